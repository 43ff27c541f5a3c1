"""Hostile programs of one round: for each pair of kinds, a process that does both at the same time, in two threads.

The program reads rounds from standard input, a line of JSON each. It writes `begun` when the processes of a round are
there, and `gone` when nothing of them is left. A tenant that ends, or becomes another program, is started again until
its time is over. Then it stays, with all that it holds, until it is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from typing import Any

from tests.hostile import cuda, descriptors, files, messages, namespaces, processes, soft
from tests.hostile.page import Page
from tests.hostile.registry import KINDS, Tenant

__all__ = ["cuda", "descriptors", "files", "messages", "namespaces", "soft"]  # they register their kinds

USER = 65534
DESCRIPTORS, PROCESSES = 512, 600
"""Descriptors that one tenant may have, and number of processes and threads of all tenants together."""
BEGIN_S = 0.03
"""Seconds between the announcement of a round and its start, in which all of its tenants start."""


def main() -> None:
    """Run the program."""
    libc = ctypes.CDLL(None)
    libc.prctl(processes.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    page = Page(int(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        begin = time.monotonic() + BEGIN_S
        for one in told["tenants"]:
            if os.fork() == 0:
                try:
                    _supervise(one, page, begin, begin + told["seconds"])
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
        print("begun", flush=True)
        try:
            while True:
                os.wait()
        except ChildProcessError:
            print("gone", flush=True)


def _supervise(told: dict[str, Any], page: Page, begin: float, until: float) -> None:
    """Start a tenant, again and again."""
    with open(f"{told['cgroups'][0]}/cgroup.procs", "w", encoding="ascii") as file:
        file.write("0")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    processes.LIBC.prctl(processes.PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after an exec
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    life = 0
    while time.monotonic() < until or life == 0:
        pid = os.fork()
        if pid == 0:
            try:
                _live(told, page, begin, until, life)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        life += 1
        page.words[page.half(told["number"], 0) + 2] = life
        os.waitpid(pid, 0)
    while True:
        signal.pause()


def _live(told: dict[str, Any], page: Page, begin: float, until: float, life: int) -> None:
    """Live one life of a tenant."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    place = page.place(told["number"], 0)
    page.words[place + 1] = 256 << 20
    page.words[place] = os.getpid()
    tenant = Tenant(
        mount=told["mount"],
        door=told["door"],
        protocol=told["protocol"],
        own=told["own"],
        cgroups=told["cgroups"][1:],
        number=told["number"],
        page=page,
    )
    barrier = threading.Barrier(2)

    def half(number: int) -> None:
        kind = KINDS[told["pair"][number]]
        chance = random.Random(f"{told['seed']}/{life}/{number}")
        at = page.half(told["number"], number)
        time.sleep(max(0.0, begin - time.monotonic()))
        barrier.wait()
        while not page.words[at] or time.monotonic() < until:  # at least once, however late the machine lets it begin
            page.words[at] += 1
            try:
                kind.act(tenant, chance)
            except (OSError, MemoryError):
                page.words[at + 1] += 1
            except (RuntimeError, ValueError) as error:
                # No thread is available, or the other half has closed a descriptor.
                if "thread" not in str(error) and "descriptor" not in str(error):
                    traceback.print_exc()
                    page.words[at + 3] = 1
                page.words[at + 1] += 1
            except BaseException:
                traceback.print_exc()
                page.words[at + 3] = 1
                return

    other = threading.Thread(target=half, args=(1,), daemon=True)
    other.start()
    half(0)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
