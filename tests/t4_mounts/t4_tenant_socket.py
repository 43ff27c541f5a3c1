"""Hostile and unlucky programs at the software GPU's socket, and crowds at the tree: only they get errors."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backend.door.wire import FORMAT, REPLY, SIZE, VERSION, Message, Op
from backend.soft.config import SoftConfig
from backend.soft.hardware import KERNEL_MOST_US
from backend.soft.server import CHANNELS
from tests.support.mounted import SECONDS, SLOW, Mounted, Tenant, eventually, mounted
from tests.support.tenant_socket import MIB, Raw, descriptors, status

U64 = (1 << 64) - 1

DROPPED = "not a message"
"""Words of the log about a program that sends an invalid message."""

Prepare = Callable[["Raw"], tuple[int, ...]]


@pytest.fixture(scope="module")
def hostile_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mount whose daemon is expected to log invalid messages, and nothing else."""
    with mounted(tmp_path_factory.mktemp("ggroup"), expect_errors=[DROPPED]) as mount:
        yield mount


@pytest.fixture
def victim(hostile_mount: Mounted) -> Iterator[Tenant]:
    """A program at work that must not notice anything."""
    try:
        with Tenant(hostile_mount, "--gmem", "64M", "--kernel", "1ms", "--report", "0.02") as tenant:
            yield tenant
            before = tenant.report()["finished"]
            assert tenant.report()["finished"] > before
            assert tenant.number("gmem.current") == 64 * MIB
            tenant.stop()
    finally:
        hostile_mount.check()


@pytest.mark.parametrize("size", [1, 4, 63, 65, 4096, 100_000])
def test_what_is_not_a_message_closes_the_connection(hostile_mount: Mounted, victim: Tenant, size: int) -> None:
    """The log has one line, which names the process."""
    lines = len(hostile_mount.errors)
    with Raw(hostile_mount).hello() as raw:
        raw.socket.sendall(os.urandom(size))
        assert raw.closed
    eventually(lambda: len(hostile_mount.errors) == lines + 1, "a line in the log")
    assert f"process {os.getpid()}: not a message" in hostile_mount.errors[-1]


def test_an_empty_message_closes_the_connection(hostile_mount: Mounted, victim: Tenant) -> None:
    with Raw(hostile_mount).hello() as raw:
        raw.socket.send(b"")
        assert raw.closed


BEFORE_HELLO = [
    ("join", (Op.JOIN, 1), {}, errno.EPROTO),
    ("unknown", (99,), {}, errno.EPROTO),
    ("version", (Op.HELLO, VERSION + 1), {}, errno.EPROTO),
    ("version 2^64-1", (Op.HELLO, U64), {}, errno.EPROTO),
    ("reply", (Op.HELLO | REPLY, VERSION), {}, errno.EPROTO),
    ("flags", (Op.HELLO, VERSION), {"flags": 1}, errno.EPROTO),
    ("status", (Op.HELLO, VERSION), {"status": -errno.EIO}, errno.EPROTO),
    ("status of no errno", (Op.HELLO, VERSION), {"status": 5}, errno.EPROTO),
    ("no such gpu", (Op.HELLO, VERSION), {"gpu": 1}, errno.ENODEV),
    ("no such gpu 2^32-1", (Op.HELLO, VERSION), {"gpu": (1 << 32) - 1}, errno.ENODEV),
]


@pytest.mark.parametrize(
    ("words", "how", "code"), [case[1:] for case in BEFORE_HELLO], ids=[c[0] for c in BEFORE_HELLO]
)
def test_without_a_greeting(
    hostile_mount: Mounted, victim: Tenant, words: tuple[int, ...], how: dict[str, int], code: int
) -> None:
    with Raw(hostile_mount) as raw:
        assert raw.ask(*words, **how) == code
        raw.hello()


# The first two stand for its own TSG and the first of its own 32 pages. TSG 1 is another program's.
TSG, PAGE, FOREIGN_TSG, FOREIGN_PAGE = -1, -2, 1, 1 << 40
QUEUE = SoftConfig().queue

AFTER_JOIN = [
    ("op 0", (0,), errno.ENOSYS),
    ("op 99", (99,), errno.ENOSYS),
    ("op 2^31-1", (REPLY - 1,), errno.ENOSYS),
    ("an event", (Op.PROGRESS, TSG, 1), errno.ENOSYS),
    ("a reply", (Op.JOIN | REPLY, 1), errno.EPROTO),
    ("no channels", (Op.JOIN, 0), errno.EINVAL),
    ("a channel too many", (Op.JOIN, CHANNELS + 1), errno.EINVAL),
    ("2^64-1 channels", (Op.JOIN, U64), errno.EINVAL),
    ("leave of another's", (Op.LEAVE, FOREIGN_TSG), errno.ENOENT),
    ("leave of none", (Op.LEAVE, U64), errno.ENOENT),
    ("no bytes", (Op.ALLOC, 0), errno.EINVAL),
    ("too many bytes", (Op.ALLOC, 1 << 50), errno.ENOMEM),
    ("2^64-1 bytes", (Op.ALLOC, U64), errno.ENOMEM),
    ("free of none", (Op.FREE, FOREIGN_PAGE, 1), errno.EINVAL),
    ("free of a part", (Op.FREE, PAGE, 1), errno.EINVAL),
    ("free of too much", (Op.FREE, PAGE, U64), errno.EINVAL),
    ("write beyond", (Op.WRITE, PAGE, 33, 1, 1), errno.EFAULT),
    ("write of 2^64-1", (Op.WRITE, PAGE, U64, 1, 1), errno.EFAULT),
    ("write elsewhere", (Op.WRITE, FOREIGN_PAGE, 1, 1, 1), errno.EFAULT),
    ("write at 2^64-1", (Op.WRITE, U64, 2, 1, 1), errno.EFAULT),
    ("read of six", (Op.READ, PAGE, 6), errno.EINVAL),
    ("read of 2^64-1", (Op.READ, PAGE, U64), errno.EINVAL),
    ("read elsewhere", (Op.READ, FOREIGN_PAGE, 1), errno.EFAULT),
    ("read at 2^64-1", (Op.READ, U64, 5), errno.EFAULT),
    ("launch on another's", (Op.LAUNCH, FOREIGN_TSG, 1, 1), errno.ENOENT),
    ("no kernels", (Op.LAUNCH, TSG, 0, 1), errno.EINVAL),
    ("a kernel too many", (Op.LAUNCH, TSG, QUEUE + 1, 1), errno.EAGAIN),
    ("2^64-1 kernels", (Op.LAUNCH, TSG, U64, 1), errno.EAGAIN),
    ("a kernel that is too long", (Op.LAUNCH, TSG, 1, KERNEL_MOST_US + 1), errno.EINVAL),
    ("kernels of 0 us", (Op.LAUNCH, TSG, 1, 0), errno.EINVAL),
    ("kernels of 2^64-1 us", (Op.LAUNCH, TSG, 1, U64), errno.EINVAL),
    ("touching elsewhere", (Op.LAUNCH, TSG, 1, 1, FOREIGN_PAGE, 1), errno.EFAULT),
    ("touching 2^64-1", (Op.LAUNCH, TSG, 1, 1, PAGE, U64), errno.EFAULT),
]


@pytest.mark.parametrize(("words", "code"), [case[1:] for case in AFTER_JOIN], ids=[case[0] for case in AFTER_JOIN])
def test_a_hostile_request_is_refused(
    hostile_mount: Mounted, victim: Tenant, words: tuple[int, ...], code: int
) -> None:
    """The errno of each, on a connection that works before and after; nothing of another program is reached."""
    with Raw(hostile_mount).hello() as raw:
        tsg, page = grown(raw)
        own = {TSG: tsg, PAGE: page}
        assert raw.ask(*(own.get(word, word) for word in words)) == code
        assert raw.ask(Op.READ, page, 2) == (5, 6, 0, 0, 0)
        assert raw.ask(Op.FREE, page, 32) == (0,) * 5
        assert raw.ask(Op.FREE, page, 32) == errno.EINVAL, "twice"
        assert raw.ask(Op.LEAVE, tsg) == (0,) * 5
        assert raw.ask(Op.LEAVE, tsg) == errno.ENOENT, "twice"


def grown(raw: Raw) -> tuple[int, int]:
    """Make a context and 32 pages that hold 5, 6, ...; return the numbers of its TSG and of its first page."""
    joined, held = raw.ask(Op.JOIN, 1), raw.ask(Op.ALLOC, 64 * MIB)
    assert isinstance(joined, tuple)
    assert isinstance(held, tuple)
    assert raw.ask(Op.WRITE, held[0], 32, 5, 1) == (0,) * 5
    return joined[0], held[0]


def test_memory_needs_a_context(hostile_mount: Mounted, victim: Tenant) -> None:
    with Raw(hostile_mount).hello() as raw:
        assert raw.ask(Op.ALLOC, 1) == errno.EBADF


def test_contexts_are_bounded(hostile_mount: Mounted, victim: Tenant) -> None:
    with Raw(hostile_mount).hello() as raw:
        answers = [raw.ask(Op.JOIN, 1) for _ in range(65)]
        assert all(isinstance(answer, tuple) for answer in answers[:64])
        assert answers[64] == errno.EINVAL


def test_as_much_as_may_be_is_taken(hostile_mount: Mounted, victim: Tenant) -> None:
    """One more is refused: see above."""
    with Raw(hostile_mount).hello() as raw:
        joined = raw.ask(Op.JOIN, CHANNELS)
        assert isinstance(joined, tuple)
        assert raw.ask(Op.LAUNCH, joined[0], 1, KERNEL_MOST_US) == (0,) * 5
        assert raw.ask(Op.LAUNCH, joined[0], QUEUE - 1, 1) == (0,) * 5
        assert raw.ask(Op.LAUNCH, joined[0], 1, 1) == errno.EAGAIN
        assert raw.ask(Op.LEAVE, joined[0]) == (0,) * 5


def test_random_messages(hostile_mount: Mounted, victim: Tenant) -> None:
    """Three thousand messages of plausible words: each is answered, and no other program notices."""
    rng = random.Random(4242)
    interesting = (0, 1, 2, 5, 31, 32, 33, 1 << 20, 1 << 31, 1 << 32, 1 << 63, U64, U64 - 1)
    with Raw(hostile_mount).hello() as raw:
        tsg, page = grown(raw)
        for _ in range(3000):
            op = rng.choice([*Op, 0, 4, 31, 99, rng.getrandbits(32)])
            words = [rng.choice([*interesting, tsg, page, rng.getrandbits(64)]) for _ in range(5)]
            if op == Op.LAUNCH:
                words[2] = rng.choice([0, 1, U64])  # not minutes of work
            how = {"flags": rng.choice([0] * 9 + [1]), "gpu": rng.choice([0] * 9 + [7])}
            answer = raw.ask(op, *words, **how, status=rng.choice([0, 0, -5, 5]))
            assert isinstance(answer, tuple) or answer in errno.errorcode


def test_a_program_that_never_reads(hostile_mount: Mounted, victim: Tenant) -> None:
    """It asks and launches until nothing goes through any more; others go on. Then it reads, and gets all answers."""
    with Raw(hostile_mount).hello() as raw:
        joined = raw.ask(Op.JOIN, 1)
        assert isinstance(joined, tuple)
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.socket.settimeout(0.5)
        asked = 0
        with contextlib.suppress(TimeoutError):
            while asked < 100_000:
                raw.send(Op.LAUNCH, joined[0], 1, 10)
                asked += 1
        assert 0 < asked < 100_000, "it is stuck"
        before = victim.report()["finished"]
        for _ in range(5):
            assert victim.report()["finished"] > before
        raw.socket.settimeout(SECONDS * SLOW)
        answered = 0
        while answered < asked:
            message = Message.decode(raw.socket.recv(SIZE))
            answered += message.reply
            assert message.status in (0, -errno.EAGAIN)


def test_a_program_that_never_reads_and_dies(hostile_mount: Mounted, victim: Tenant) -> None:
    """It is stuck in both directions and then gone: no line in the log, nothing is kept."""
    program = (
        "import sys, time; from pathlib import Path; from backend.door.wire import Op\n"
        "from tests.support.tenant_socket import Raw\n"
        "class M: path = Path(sys.argv[1])\n"
        "raw = Raw(M()).hello(); tsg = raw.ask(Op.JOIN, 1)[0]; raw.socket.settimeout(0.2)\n"
        "try:\n"
        "    while True: raw.send(Op.LAUNCH, tsg, 1, 10)\n"
        "except TimeoutError: print('stuck', flush=True); time.sleep(600)\n"
    )
    words = [sys.executable, "-c", program, os.fspath(hostile_mount.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as stuck:
        try:
            assert stuck.stdout is not None
            assert stuck.stdout.readline() == "stuck\n"
            assert (hostile_mount / stuck.pid).exists()
        finally:
            stuck.kill()
            stuck.wait()
        watch = hostile_mount.watch()
        eventually(lambda: not (hostile_mount / stuck.pid).exists(), "its directory is gone", 0.2, watch)


def test_connections_that_come_and_go_leave_no_descriptor(hostile_mount: Mounted, victim: Tenant) -> None:
    before = descriptors(hostile_mount)
    for index in range(100):
        with Raw(hostile_mount) as raw:
            if index % 4:
                raw.hello()
            if index % 4 > 1:
                grown(raw)
            if index % 4 > 2:
                raw.send(Op.ALLOC, 64 * MIB)  # it is gone before the answer
    eventually(lambda: descriptors(hostile_mount) <= before + 1, "descriptors are given back")  # + our own pidfd
    # This process has no contexts any more but lives, so its directory stays, and is empty.
    group = hostile_mount.group(os.getpid())
    eventually(lambda: (group / "gmem.current").read_text() == "0\n", "memory is given back")
    assert "tsgs 0\n" in (group / "gcgroup.stat").read_text()


def test_a_crowd(tmp_path: Path) -> None:
    """200 clients read, write and list while tenants come and go: descriptors, threads and memory stay the same."""
    with mounted(tmp_path) as mount:
        for _ in range(2):
            crowd(mount, 1.5)  # caches, threads and arenas are as large as they get
        with Tenant(mount) as tenant:  # a busy machine may have seen none go: a thread tells the kernel
            (tenant.group / "gmem.current").read_text()
        eventually(lambda: not mount.members(), "all tenants are gone")
        start = {"fds": descriptors(mount), "threads": status(mount, "Threads"), "kB": status(mount, "VmRSS")}
        for _ in range(2):
            crowd(mount, 1.5)
        eventually(lambda: not mount.members(), "all tenants are gone")
        eventually(lambda: descriptors(mount) <= start["fds"], "descriptors are given back")
        eventually(lambda: status(mount, "Threads") <= start["threads"], "threads end")
        assert status(mount, "VmRSS") < start["kB"] + 3000
        assert mount.daemon.poll() is None
        mount.check()


def crowd(mount: Mounted, seconds: float) -> None:
    """Run 200 threads at the tree with three tenants at a time; every error must be an errno that the tree has."""
    until = time.monotonic() + seconds
    problems: list[str] = []
    fine = {errno.ENOENT, errno.ENODEV, errno.EAGAIN, errno.EBUSY, errno.EINVAL, errno.EEXIST, errno.EPERM}

    def put(file: Path, value: str) -> None:
        """Write without O_CREAT: a file that has just gone is ENOENT, as for any reader."""
        with open(os.open(file, os.O_WRONLY), "w") as opened:
            opened.write(value)

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            try:
                act(rng)
            except OSError as error:
                if error.errno not in fine:
                    problems.append(str(error))

    def act(rng: random.Random) -> None:
        pids = [name for name in os.listdir(mount.path) if name.isdigit()]
        (mount / "ggroup.backend").read_text()
        if not pids:
            return
        group = mount.group(int(rng.choice(pids)))
        name = rng.choice(os.listdir(group) or ["gone"])
        match rng.randrange(4):
            case 0:
                put(group / "gmem.limit.high", rng.choice(["max", "8M", "64M"]))
            case 1:
                put(group / "compute.freeze", rng.choice(["0", "1"]))
            case 2:
                (mount / "slice" / f"s{rng.randrange(9)}").mkdir()
            case _:
                (group / name).read_bytes()

    def tenants() -> None:
        words = ["tenant", "--mount", os.fspath(mount.path), "--gmem", "32M", "--report", "0.05"]
        while time.monotonic() < until:
            with subprocess.Popen([sys.executable, "-m", "ggroupfs", *words], stdout=subprocess.DEVNULL) as tenant:
                eventually(lambda pid=tenant.pid: (mount / pid).exists(), "it works")
                time.sleep(0.1)  # it is killed in the middle of whatever it does
                tenant.kill()

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(200)]
    threads += [threading.Thread(target=tenants) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in (mount / "slice").glob("s?"):
        made.rmdir()
    assert problems == [], problems


def test_messages_are_what_wire_says() -> None:
    """The raw packing above is the documented one."""
    assert FORMAT.pack(2, 0, 7, 0, 0, 1, 0, 0, 0, 0) == Message(Op.JOIN, 7, 0, (1,)).encode()
    assert struct.calcsize(FORMAT.format) == SIZE == 64
