"""Kinds about processes and threads: they come, go, stop, become others, and pass things on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import threading
import time

from backend.door.wire import SIZE, Message, Op
from tests.hostile.registry import Tenant, child, kind

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 4, 15, 36
PTRACE_TRACEME = 0


def join(tenant: Tenant) -> None:
    """Have a process of its own come into the tree: it connects, and sends as much as makes it known."""
    with tenant.connect() as connection:
        place = tenant.place()
        tenant.page.words[place + 1] = 32 << 20
        tenant.page.words[place] = int(os.readlink("/proc/self"))  # as the driver knows it, also from a pid namespace
        for op, words in ((Op.HELLO, tenant.greeting), (Op.JOIN if tenant.protocol == "soft" else Op.MANAGE, (8,))):
            connection.send(Message(op, 1, 0, words).encode())
            connection.recv(SIZE)


@kind("fork")
def fork(tenant: Tenant, random: random.Random) -> None:
    """Fork children that come into the tree, and are gone before that, or after."""
    for _ in range(4):
        child(lambda: join(tenant), random.choice((0, 0.001, 0.02)))


@kind("execute")
def execute(tenant: Tenant, random: random.Random) -> None:
    """Execute another program, in a child or in the tenant itself, which ends its other half; with all descriptors or
    none."""

    def run() -> None:
        if tenant.line is not None and random.random() < 0.5:
            os.set_inheritable(tenant.line.fileno(), True)
        os.execv("/bin/sleep", [random.choice(("sleep", "x" * 100, ") Z 1 (")), "0.02"])

    if random.random() < 0.9:
        child(run, random.choice((0, 0.03)))
    else:
        time.sleep(random.uniform(0, 0.03))
        run()


@kind("kill itself")
def kill(tenant: Tenant, random: random.Random) -> None:
    """Kill itself at any point of what the other half does, by SIGKILL or another signal."""
    time.sleep(random.uniform(0, 0.04))
    os.kill(os.getpid(), random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)))
    time.sleep(1)


@kind("stop itself")
def stop(tenant: Tenant, random: random.Random) -> None:
    """Be stopped by a child, and resumed after some time."""
    parent, seconds = os.getpid(), random.uniform(0, 0.03)

    def act() -> None:
        os.kill(parent, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(parent, signal.SIGCONT)

    child(act, 1.0)
    time.sleep(0.002)


@kind("be traced")
def traced(tenant: Tenant, random: random.Random) -> None:
    """Have a child stop for its tracer with a connection open, and kill it meanwhile."""

    def act() -> None:
        with tenant.connect() as connection:
            connection.send(Message(Op.HELLO, 1, 0, tenant.greeting).encode())
            LIBC.ptrace(PTRACE_TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGTRAP)
            time.sleep(1)

    child(act, 0.01)


@kind("start threads")
def threads(tenant: Tenant, random: random.Random) -> None:
    """Start many threads that live for a moment, each of which makes a call."""

    def call() -> None:
        with contextlib.suppress(OSError), tenant.connect() as connection:
            connection.send(Message(Op.HELLO, 1, 0, tenant.greeting).encode())

    started = [threading.Thread(target=call, daemon=True) for _ in range(6)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(0.05)


@kind("end the main thread")
def headless(tenant: Tenant, random: random.Random) -> None:
    """Start a child whose first thread ends: its state is that of a zombie, and yet it lives, and speaks."""

    def speak() -> None:
        with contextlib.suppress(OSError):
            join(tenant)
        time.sleep(0.03)

    def act() -> None:
        threading.Thread(target=speak, daemon=True).start()
        LIBC.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit(2), which ends one thread

    child(act)


@kind("be called oddly")
def named(tenant: Tenant, random: random.Random) -> None:
    """Take a name that may confuse a parser of /proc."""
    name = random.choice((b") Z 1 (", b"\n0::/\n", b"a\rb\x0b", b"\xff\xfe", b"(deleted)", b"", b"State:\tZ"))
    LIBC.prctl(PR_SET_NAME, name, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.listdir(f"{tenant.mount}/self/0")


@kind("move between cgroups")
def move(tenant: Tenant, random: random.Random) -> None:
    """Move itself, or a child, between cgroups, also to one that it may not use."""
    target = random.choice((*tenant.cgroups, *tenant.cgroups, os.path.dirname(os.path.dirname(tenant.cgroups[0]))))

    def enter() -> None:
        with open(f"{target}/cgroup.procs", "w", encoding="ascii") as file:
            file.write("0")

    if random.random() < 0.5:
        enter()
    else:
        child(lambda: (enter(), join(tenant)), 0.02)


@kind("lead sessions")
def sessions(tenant: Tenant, random: random.Random) -> None:
    """Start daemons that fork twice, lose their parents, and live on for a moment."""

    def first() -> None:
        os.setsid()
        if os.fork():
            os._exit(0)
        join(tenant)
        time.sleep(0.02)

    child(first, 0.01)


@kind("change priorities")
def priorities(tenant: Tenant, random: random.Random) -> None:
    """Ask for everything that a scheduler may be asked for without rights."""
    random.choice(
        (
            lambda: os.setpriority(os.PRIO_PROCESS, 0, random.choice((0, 5, 10))),
            lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
            lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
            lambda: os.sched_setaffinity(0, {random.choice((0, 1))}),
            lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
            lambda: LIBC.prctl(PR_SET_DUMPABLE, random.choice((0, 1)), 0, 0, 0),
        )
    )()
    os.stat(f"{tenant.mount}/self")


@kind("compute")
def spin(tenant: Tenant, random: random.Random) -> None:
    """Compute, as any program does; the rounds for comparison consist of this."""
    until = time.monotonic() + 0.002
    while time.monotonic() < until:
        pass
