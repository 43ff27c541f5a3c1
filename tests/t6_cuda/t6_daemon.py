"""The library's client, without the rest of the library, against the daemon's end (backend/cuda), in real time."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from backend.core.turns import YIELD_AHEAD_US, TurnEnd
from backend.core.workingset import WorkingSet
from backend.cuda.burst import BurstPage
from backend.cuda.peers import Peers
from backend.door.wire import CUDA_ALL, SIZE, Message, Op
from tests.t6_cuda.daemon import GIB, MIB, Program, serving

HERE = Path(__file__).parent
CUDA = Path(os.environ.get("CUDA_INCLUDE", "/usr/local/cuda/include"))
LIBRARY = HERE.parent.parent / "backend" / "cuda" / "library"
PARTS = ("daemon", "memory", "move", "count", "driver")
INCLUDES = [f"-I{place}" for place in (CUDA, LIBRARY, *(LIBRARY / part for part in PARTS))]
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *INCLUDES]
SANITIZERS = {"plain": [], "thread": ["-fsanitize=thread"], "address": ["-fsanitize=address,undefined"]}


@pytest.fixture(scope="module", params=SANITIZERS)
def binary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (CUDA / "cuda.h").exists():
        pytest.fail(f"no cuda.h in {CUDA}: make cuda brings it")
    out = tmp_path_factory.mktemp("daemon") / "daemon_main"
    names = ("daemon", "session", "listener", "contact", "command", "link", "family", "sight", "space")
    sources = [LIBRARY / "daemon" / f"{name}.c" for name in names]
    main = HERE / "socket" / "daemon_main.c"
    subprocess.run(["gcc", *FLAGS, *SANITIZERS[request.param], main, *sources, "-o", out], check=True)
    return out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "daemon.sock"


Start = Callable[..., Program]


@pytest.fixture
def start(binary: Path, path: Path) -> Iterator[Start]:
    """Start programs; at their end standard error must be empty, where sanitizers report."""
    started: list[Program] = []

    def start(*wrapper: str, **environment: str) -> Program:
        pipe = subprocess.PIPE
        env = {**os.environ, "GGROUP_SOCKET": os.fspath(path), "TSAN_OPTIONS": "die_after_fork=0", **environment}
        started.append(Program(subprocess.Popen([*wrapper, binary], stdin=pipe, stdout=pipe, stderr=pipe, env=env)))
        return started[-1]

    yield start
    complaints = []
    for program in started:
        program.popen.send_signal(signal.SIGCONT)
        for stream in (program.popen.stdin, program.popen.stdout):
            assert stream is not None
            stream.close()
        assert program.popen.stderr is not None
        complaints.append(program.popen.stderr.read())
        program.popen.stderr.close()
        program.popen.wait(10)
    assert not any(complaints), b"\n".join(complaints).decode()


def real(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            await test()

    trio.run(main)


def test_without_a_daemon_everything_is_granted(start: Start) -> None:
    program = start()
    assert program._do("use 0") == [-1]
    assert program._do("charge 1000000") == [0]
    assert program._do("limits") == [0, 0, 0]
    assert program._do("free 1000") == [0]
    nothing = start(GGROUP_SOCKET="")
    assert nothing._do("use 0") == [-1]
    assert len(os.listdir(f"/proc/{nothing.popen.pid}/task")) <= 2, "no thread but a sanitizer's"
    assert nothing._do("charge 5") == [0]


def test_a_working_set_is_told_and_comes_before_a_turn(start: Start, path: Path) -> None:
    program = start()

    async def test() -> None:
        async with serving(path, Peers(offers=CUDA_ALL)) as daemon:
            await program.do("use", 0)
            await program.do("charge", 1024)
            managed, process = daemon.gpu.managed, program.process
            assert managed.working_set(process) is None
            await program.do("set", 512)
            wanted = WorkingSet(512 * MIB, 512 * MIB)
            await daemon.until(lambda: managed.working_set(process) == wanted, "it is told")
            assert managed.shares(process) == frozenset()
            assert await managed.prepare(process, GIB) == 0, "it is its turn"
            assert await managed.end_turn(process, 1000, 256 * MIB) is TurnEnd.DRAINED
            assert managed.working_set(process) == WorkingSet(512 * MIB, 512 * MIB, 256 * MIB)
            assert await managed.reclaim(process, GIB) == GIB
            gone = WorkingSet(512 * MIB, 0)
            await daemon.until(lambda: managed.working_set(process) == gone, "it is told, once it is booked")
            await trio.sleep(0.6)
            assert daemon.books(program) == (0, 1024), "what waits does not come by itself"
            assert await managed.prepare(process, 200 * MIB) == 200 * MIB
            assert daemon.books(program) == (200, 824)
            assert managed.working_set(process) == WorkingSet(512 * MIB, 200 * MIB, 200 * MIB)
            await daemon.h.write(f"{process.pid}/0/gmem.limit.high", "300M")
            assert await managed.prepare(process, GIB) == 100 * MIB
            await daemon.h.write(f"{process.pid}/0/gmem.limit.high", "max")
            assert await managed.prepare(process, GIB) == 212 * MIB
            assert daemon.books(program) == (512, 512)
            managed.begin_turn(process)
            await daemon.until(lambda: daemon.books(program) == (1024, 0), "the rest comes in its turn")

    real(test)


def test_the_groups_of_sms_outlive_the_daemon(start: Start, path: Path) -> None:
    """The next one is told which they are, and says another thing only where it wants another."""

    async def test() -> None:
        program = start()
        async with serving(path) as daemon:
            await program.do("use", 0)
            managed, process = daemon.gpu.managed, program.process
            await managed.limit_sms(process, 64, here=True)
            assert await program.do("sms") == [0xFF]
            await managed.limit_sms(process, 20, here=True)
            assert await program.do("sms") == [0x3]
        assert await program.do("sms") == [0x3], "without a daemon"
        async with serving(path) as daemon:
            managed = daemon.gpu.managed
            await daemon.until(lambda: process in managed, "it connects again")
            while await program.do("sms") != [0]:  # noqa: ASYNC110 - another process does it
                await trio.sleep(0.01)
            await managed.limit_sms(process, 132, here=True)
            assert await program.do("sms") == [0]

    real(test)


def look_at_the_thread(pid: int) -> None:
    """Check that the thread has a name and takes no signals, and that its descriptors do not survive an exec."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    (ours,) = [task for task in tasks if (task / "comm").read_text() == "ggroup\n"]
    status = dict(line.split(":", 1) for line in (ours / "status").read_text().splitlines())
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGPIPE):
        assert int(status["SigBlk"], 16) & 1 << number - 1
    high = [fd for fd in Path(f"/proc/{pid}/fdinfo").iterdir() if int(fd.name) >= 512]
    assert len(high) == 3
    for fd in high:
        flags = dict(line.split(":", 1) for line in fd.read_text().splitlines())["flags"]
        assert int(flags, 8) & os.O_CLOEXEC


def test_charges_limits_counts_and_the_thread(start: Start, path: Path) -> None:
    program = start()

    async def test() -> None:
        async with serving(path) as daemon:
            assert await program.do("use", 0) == [0]
            assert daemon.gpu.manages(program.process)
            assert await program.do("use", 1) == [-1], "a GPU of another tree"
            assert await program.do("charge", 1024) == [0]
            assert daemon.books(program) == (1024, 0)
            assert await program.do("limits") == [0, 0, 0]
            file = f"{program.process.pid}/0/"
            await daemon.h.write(file + "gmem.limit.high", "4G")
            assert await program.do("limits") == [1, 4096, 3072]
            await program.do("kernels", 17)
            assert "submitted 17\n" in await daemon.h.read(file + "gcgroup.stat")
            await program.do("free", 24)
            await program.do("report", 100, 30)
            assert await program.do("limits") == [1, 4096, 3096], "what was freed is told first"
            stat = await daemon.h.read(file + "gmem.stat")
            assert f"unmovable {100 * MIB}\n" in stat
            assert f"exchanged_bytes {30 * MIB}\n" in stat
            assert daemon.away(program) == 0
            await program.do("report", 100, 30, 64)
            assert await program.do("limits") == [1, 4096, 3096]
            assert daemon.away(program) == 64 * MIB
            assert await program.do("lend", 48) == [0]
            assert await program.do("limits") == [1, 4096, 3096]
            assert daemon.lent(program) == 48 * MIB
            assert await program.do("closed") == [0]
            await daemon.until(lambda: daemon.lent(program) == 0, "it looks whether others have it still")
            assert "clean 0\n" in stat
            assert await program.do("clean", 48) == [0]
            await program.do("limits")
            stat = await daemon.h.read(file + "gmem.stat")
            assert f"clean {48 * MIB}\n" in stat
            assert "swapped 0\n" in stat
            assert daemon.away(program) == 64 * MIB
            look_at_the_thread(program.process.pid)
            assert (await program.do("ticks", 500))[0] <= 2, "it sleeps"
            assert await program.do("wake") == [0]

    real(test)


WHOLE = ((1 << 64) - 1) // MIB
"""Size told to a program that may see all of its GPU, in MiB."""


def test_the_size_is_that_of_the_first_question(start: Start, path: Path) -> None:
    """The first answer stays, even before the GPU is managed, and whatever becomes of the limits and the daemon. A
    child has an answer of its own."""
    program = start()

    async def test() -> None:
        async with serving(path) as daemon:
            await daemon.h.controller.make_process(program.process.pid)
            file = f"{program.process.pid}/0/gmem.limit."
            await daemon.h.write(f"{file}high", "4G")
            assert await program.do("sight", 0) == [1, 4096]
            assert await program.do("sight", 1) == [1, WHOLE], "a GPU of no tree"
            assert program.process not in daemon.gpu.managed
            await daemon.h.write(f"{file}high", "1G")
            await daemon.h.write(f"{file}max", "2G")
            await program.do("use", 0)
            assert await program.do("sight", 0) == [1, 4096]
            assert await program.do("limits") == [1, 1024, 1024]
        assert await program.do("sight", 0) == [1, 4096]

    real(test)


def test_the_size_without_a_daemon(start: Start, path: Path) -> None:
    """The program sees the whole size, for good."""
    program, nothing = start(), start(GGROUP_SOCKET="")
    assert program._do("sight 0") == nothing._do("sight 0") == [1, WHOLE]

    async def test() -> None:
        async with serving(path) as daemon:
            await daemon.h.controller.make_process(program.process.pid)
            await daemon.h.write(f"{program.process.pid}/0/gmem.limit.max", "4G")
            assert await program.do("use", 0) == [0]
            assert await program.do("limits") == [1, 4096, 4096]
            assert await program.do("sight", 0) == [1, WHOLE]

    real(test)


@contextlib.contextmanager
def hanging_up(path: Path, times: int) -> Iterator[tuple[list[int], threading.Event]]:
    """A daemon that takes one message on each of `times` connections, ends them, and goes away, which it reports."""
    ended, gone = list[int](), threading.Event()

    def serve(listener: socket.socket) -> None:
        for _ in range(times):
            connection, _ = listener.accept()
            with connection:
                ended.append(len(connection.recv(SIZE)))
                if len(ended) == times:
                    path.unlink()
                    listener.close()
        gone.set()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield ended, gone
        thread.join()


def test_a_daemon_that_is_replaced_while_it_is_asked_for_the_size(start: Start, path: Path) -> None:
    """The program waits for the daemon's successor, since the answer is for good."""
    program = start()

    async def test() -> None:
        with hanging_up(path, 1) as (_, listens_no_more):
            async with trio.open_nursery() as nursery:
                told: list[list[int]] = []

                async def ask() -> None:
                    told.append(await program.do("sight", 0))

                nursery.start_soon(ask)
                await trio.to_thread.run_sync(listens_no_more.wait)
                async with serving(path) as daemon:
                    await daemon.until(lambda: told, "it is told")
            assert told == [[1, WHOLE]]

    real(test)


def test_a_daemon_that_serves_others_alone_is_not_waited_for(start: Start, path: Path) -> None:
    program = start()
    with hanging_up(path, 3) as (ended, _):
        begun = time.monotonic()
        assert program._do("sight 0") == [1, WHOLE]
        assert time.monotonic() - begun < 4
    assert ended == [SIZE] * 3


def test_memory_goes_out_and_comes_back(start: Start, path: Path) -> None:
    program = start()

    async def test() -> None:
        async with serving(path) as daemon:
            await program.do("use", 0)
            await program.do("charge", 4096)
            file = f"{program.process.pid}/0/gmem.limit.high"
            await daemon.h.write(file, "1G")
            assert await program.do("status") == [1024, 3072, 0]
            assert daemon.books(program) == (1024, 3072)
            await daemon.h.write(file, "2G")
            await daemon.until(lambda: daemon.books(program) == (2048, 2048), "told of room")
            await program.do("free", 512)
            await daemon.until(lambda: daemon.books(program) == (2048, 1536), "room by what it freed")
            assert await program.do("charge", 512) == [0]
            assert daemon.books(program) == (2048, 2048)
            await program.do("pool", 256)
            await daemon.h.write(file, "1536M")
            assert daemon.books(program) == (1536, 2048 + 256), "what it kept for nobody was freed"
            await daemon.h.write(file, "max")
            await daemon.until(lambda: daemon.books(program)[1] == 0, "all of it")
            while (status := await program.do("status"))[1]:  # a piece is booked before it is there
                pass
            assert status == [4096 - 256, 0, 0]

    real(test)


def test_the_host_is_granted(start: Start, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs get what serves them and even parts of the rest; what one frees or leaves, the other gets. The next
    daemon is told what is pinned."""
    monkeypatch.setattr("backend.core.hostroom.available", lambda root: 8 * GIB)
    monkeypatch.setattr("backend.core.hostroom.left", lambda slice_, root: 1 << 62)
    monkeypatch.setattr("backend.cuda.grants.LOOK_S", 0.1)
    one, other = start(), start()

    async def granted(program: Program, mib: int) -> None:
        while (said := await program.do("granted"))[1] != mib:
            assert said[0] < 100, said
            await trio.sleep(0.01)

    async def test() -> None:
        async with serving(path):
            assert await one.do("use", 0) == await other.do("use", 0) == [0]
            await one.do("host", 0, 0, 3072)
            await granted(one, 3072)
            await other.do("host", 0, 0, 2048)
            await granted(other, 2048)
            await granted(one, 2048)
            await other.do("host", 0, 0, 512)
            await granted(one, 3072)
            await granted(other, 512)
            await other.do("host", 512, 0, 9000)
            await granted(other, 2176)  # (8 GiB and what is pinned) / 2, half of it
        await one.do("host", 1024, 0, 9000)
        async with serving(path):
            await granted(one, 2048)
            other.popen.kill()
            await granted(one, 4096)

    real(test)


def test_refused(start: Start, path: Path) -> None:
    program = start()

    async def test() -> None:
        async with serving(path) as daemon:
            await program.do("use", 0)
            await program.do("charge", 1024)
            file = f"{program.process.pid}/0/"
            await daemon.h.write(file + "gmem.swap.max", "0")
            await daemon.h.write(file + "gmem.limit.high", "1G")
            assert await program.do("charge", 2) == [12]
            assert daemon.books(program) == (1024, 0)
            await program.do("free", 2)
            assert await program.do("charge", 2) == [0]

    real(test)


def test_over_limit_max_room_is_made_before_or_it_is_refused(start: Start, path: Path) -> None:
    """The program learns of the refusal before it allocates, so refused memory never exists."""
    program = start()

    async def test() -> None:
        async with serving(path) as daemon:
            await program.do("use", 0)
            await program.do("charge", 1024)
            file = f"{program.process.pid}/0/"
            await daemon.h.write(file + "gmem.limit.max", "1G")
            assert await program.do("charge", 256) == [0]
            assert daemon.books(program) == (1024, 256)
            assert await program.do("charge", 1025) == [12], "larger than the limit"
            assert daemon.books(program) == (1024, 256)
            await daemon.h.write(file + "gmem.swap.max", "256M")
            assert await program.do("charge", 2) == [12]
            await program.do("free", 2)
            assert await program.do("charge", 2) == [0]
            assert int(await daemon.h.read(file + "gmem.peak")) == 1024 * MIB

    real(test)


def test_threads_charge_while_limits_change(start: Start, path: Path) -> None:
    program = start()

    async def test() -> None:
        async with serving(path) as daemon:
            await program.do("use", 0)
            await program.do("charge", 1024)
            file = f"{program.process.pid}/0/gmem.limit.high"
            failed: list[int] = []

            async def work() -> None:
                failed.extend(await program.do("threads", 8, 150))
                nursery.cancel_scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)
                while True:
                    for limit in ("512M", "1G", "700M", "max"):
                        with contextlib.suppress(OSError, Exception):
                            await daemon.h.write(file, limit)
                        await trio.sleep(0.01)
            assert failed == [0]
            await daemon.h.write(file, "max")
            await daemon.until(lambda: daemon.books(program) == (1024, 0), "all came back, and the figures agree")
            assert await program.do("status") == [1024, 0, 0]

    real(test)


def test_a_daemon_that_comes_back_is_told_what_is_there(start: Start, path: Path) -> None:
    program = start()

    async def test() -> None:
        async with serving(path) as daemon:
            await program.do("use", 0)
            await program.do("charge", 4096)
            await daemon.h.write(f"{program.process.pid}/0/gmem.limit.high", "3G")
            assert daemon.books(program) == (3072, 1024)
        assert await program.do("charge", 100) == [0], "nobody is there: granted"
        await program.do("free", 50)
        await program.do("kernels", 9)
        async with serving(path) as daemon:
            await daemon.until(lambda: daemon.gpu.manages(program.process), "it connects again")
            await daemon.until(lambda: daemon.books(program) == (4146, 0), "it was told, and has no limit any more")
            assert f"swapin_bytes {GIB}\n" in await daemon.h.read(f"{program.process.pid}/0/gmem.stat")
            assert await program.do("charge", 2) == [0]
            await program.do("kernels", 1)
            assert "submitted 10\n" in await daemon.h.read(f"{program.process.pid}/0/gcgroup.stat")

    real(test)


def test_a_daemon_that_comes_later(start: Start, path: Path) -> None:
    program = start()

    async def test() -> None:
        assert await program.do("use", 0) == [-1]
        await program.do("charge", 100)
        async with serving(path) as daemon:
            await daemon.until(lambda: daemon.gpu.manages(program.process), "it looks once a second", 3)
            assert daemon.books(program) == (100, 0)

    real(test)


def test_the_daemon_goes_while_a_charge_waits(start: Start, path: Path) -> None:
    program = start()

    async def test() -> None:
        answers: list[int] = []

        async def charge() -> None:
            answers.extend(await program.do("charge", 256))

        async with trio.open_nursery() as nursery:
            daemon = serving(path)
            each = await daemon.__aenter__()
            await program.do("use", 0)
            await program.do("charge", 1024)
            await each.h.write(f"{program.process.pid}/0/gmem.limit.high", "1G")
            await program.do("delay", 400)
            nursery.start_soon(charge)
            await trio.sleep(0.1)
            await daemon.__aexit__(None, None, None)
        assert answers == [0], "granted"
        await program.do("delay", 0)
        async with serving(path) as daemon:
            await daemon.until(lambda: daemon.gpu.manages(program.process), "it connects again")
            await daemon.until(lambda: sum(daemon.books(program)) == 1280, "what was granted is told")

    real(test)


def test_a_program_that_closes_all_descriptors(start: Start, path: Path) -> None:
    """The program reuses the descriptor numbers itself: its files are left alone, and it is soon managed again."""
    program = start()

    async def test() -> None:
        async with serving(path) as daemon:
            await program.do("use", 0)
            await program.do("charge", 100)
            assert await program.do("closefrom") == [0]
            assert await program.do("take") == [0]
            assert await program.do("charge", 100) == [0]
            for _ in range(20):
                assert await program.do("free", 2) == [0]
            await daemon.until(
                lambda: daemon.gpu.manages(program.process) and daemon.books(program) == (160, 0), "again", 8
            )
            assert await program.do("charge", 2) == [0]
            assert daemon.books(program) == (162, 0)
            assert await program.do("taken") == [4], "its own files are as they were"

    real(test)


def test_a_child_of_fork_starts_anew(start: Start, path: Path) -> None:
    program = start()

    async def test() -> None:
        async with serving(path) as daemon:
            await program.do("use", 0)
            await program.do("charge", 100)
            assert await program.do("fork", 50) == [0]
            assert daemon.books(program) == (100, 0), "the child charged its own"
            assert await program.do("charge", 2) == [0]
            assert daemon.books(program) == (102, 0)

    real(test)


def test_a_program_that_is_killed_leaves_nothing(start: Start, path: Path) -> None:
    program = start()

    async def test() -> None:
        async with serving(path) as daemon:
            await program.do("use", 0)
            await program.do("charge", 100)
            program.popen.kill()
            await daemon.until(lambda: not daemon.gpu.manages(program.process), "it is gone")
            await daemon.h.gone(program.process)

    real(test)


@contextlib.contextmanager
def listening_as(path: Path, user: int) -> Iterator[socket.socket]:
    """A socket at `path`, on which `user` listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.settimeout(60)
        os.seteuid(user)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        yield listener


@contextlib.contextmanager
def managing(program: Program, listener: socket.socket) -> Iterator[socket.socket]:
    """The connection of a program that wants its GPU managed."""
    thread = threading.Thread(target=program._do, args=("use 0",))
    thread.start()
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(60)
        yield connection
    thread.join()


def test_nothing_is_said_to_a_daemon_of_another_user(start: Start, path: Path) -> None:
    with listening_as(path, 1000) as listener, managing(start(), listener) as connection:
        assert connection.recv(SIZE) == b""


def test_a_daemon_outside_of_the_user_namespace_is_spoken_to(start: Start, path: Path) -> None:
    """A daemon whose uid has no mapping in the namespace, like root's in a container, is trusted: it may be root."""
    program = start("unshare", "--user", "--map-root-user")
    with listening_as(path, 1000) as listener, managing(program, listener) as connection:
        assert Message.decode(connection.recv(SIZE)).op == Op.HELLO


@pytest.mark.parametrize(("op", "count"), [(Op.HELLO, 1), (Op.LOCATE, 1), (Op.MANAGE, 2), (Op.MANAGE, 5)])
def test_descriptors_that_nobody_expects_are_closed(start: Start, path: Path, op: Op, count: int) -> None:
    end, theirs = os.pipe()
    with listening_as(path, 0) as listener, managing(start(), listener) as connection:
        while (request := Message.decode(connection.recv(SIZE))).op != op:
            connection.send(request.answer(1, 2 * MIB, 2000).encode())
        socket.send_fds(connection, [request.answer(1, 2 * MIB, 2000).encode()], [theirs] * count)
        os.close(theirs)
        assert select.select([end], [], [], 20)[0], "it has one of them"
        assert os.read(end, 1) == b""
    os.close(end)


# Busy periods


async def ranks(program: Program, condition: Callable[[list[int]], bool]) -> list[int]:
    """Return what a program was told: its own page, how long others are held, its run-ahead, and the pages that it
    reads."""
    with trio.fail_after(10):
        while True:
            found = await program.do("ranks")
            if condition(found):
                return found


NONE = [0] * 8


def test_programs_get_the_pages_of_those_that_go_before_them(start: Start, path: Path) -> None:
    """Programs get no other pages: a program of worse priority holds none of a better one, and earlier orders no longer
    count."""

    first, second, third = start(), start(), start()

    async def test() -> None:
        async with serving(path) as daemon:
            for program in (first, second, third):
                assert await program.do("use", 0) == [0]
            daemon.gpu.rank({second.process: [first.process], third.process: [first.process, second.process]}, 150)
            page = (await ranks(first, lambda found: found[0] > 0))[0]
            assert await ranks(first, lambda found: True) == [page, 150, 0, *NONE]
            middle = await ranks(second, lambda found: found[0] > 0 and found[2] > 0)
            assert middle == [middle[0], 150, YIELD_AHEAD_US, page, *NONE[1:]]
            last = await ranks(third, lambda found: found[4] > 0 and found[3] > 0)
            assert last[:3] == [0, 0, YIELD_AHEAD_US]
            assert sorted(last[3:]) == sorted([page, middle[0], *NONE[2:]])
            # The other way round: nothing reads the page that the first program still maps.
            daemon.gpu.rank({first.process: [third.process]}, 150)
            assert await ranks(second, lambda found: not any(found)) == [0, 0, 0, *NONE]
            turned = await ranks(third, lambda found: found[0] > 0 and not any(found[3:]))
            assert await ranks(first, lambda found: found[3] > 0 and not found[0]) == [
                *(0, 0, YIELD_AHEAD_US),
                *(turned[0], *NONE[1:]),
            ]
            assert turned[0] not in (page, middle[0])
            daemon.gpu.rank({}, 150)
            for program in (first, second, third):
                await ranks(program, lambda found: found == [0, 0, 0, *NONE])

    real(test)


def test_a_program_that_ends_goes_before_none(start: Start, path: Path) -> None:
    """A program that connects again has a new page, which the programs behind it get."""

    first, second = start(), start()

    async def test() -> None:
        async with serving(path) as daemon:
            for program in (first, second):
                assert await program.do("use", 0) == [0]
            daemon.gpu.rank({second.process: [first.process]}, 150)
            page = (await ranks(second, lambda found: found[3] > 0))[3]
            daemon.gpu.managed._programs[first.process].mover.end()
            found = await ranks(second, lambda found: found[3] not in (0, page))
            assert (await ranks(first, lambda found: found[0] > 0))[0] == found[3]
            assert first.popen.stdin is not None
            first.popen.kill()
            await ranks(second, lambda found: found == [0, 0, 0, *NONE])

    real(test)


def test_what_is_handed_out_for_reading_cannot_be_written() -> None:
    page = BurstPage()
    assert page.readable is not None
    assert page.writable is not None
    assert fcntl.fcntl(page.readable, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with pytest.raises(PermissionError):
        mmap.mmap(page.readable, 4096, prot=mmap.PROT_WRITE)
    assert stat.S_IMODE(os.fstat(page.readable).st_mode) == 0o400, "nor opened anew by another user"
    with pytest.raises(PermissionError):
        os.ftruncate(page.writable, 0)
    page.close()
    assert page.readable is page.writable is None
