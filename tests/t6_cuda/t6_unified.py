"""Managed memory under limits: charged, kept in the host by advice, and the program's own advice as it was."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.cuda.page import CounterPage
from backend.door.wire import CUDA, SIZE, Feature, Message, Op
from tests.t6_cuda.harness import SECONDS, GrantingDaemon, Program, eventually, running

MIB = 1 << 20
WHOLE = 96
"""MiB of the program's allocation; 4 KiB are in it besides, which count 2 MiB."""
CHARGED = WHOLE + 2
"""MiB of it in the books."""
MOVE_BACK = 0.25
"""Seconds after which the library asks for what has gone, if it is not told that there is room."""
PIECE = 16
"""MiB that go together, but for the last piece, of 4 KiB."""


class Books(GrantingDaemon):
    """A daemon that keeps books of what it hears, with a hard limit if a test has one."""

    features: Feature = CUDA
    resident = swapped = managed = 0
    """MiB."""
    most: int | None = None
    """MiB that may be charged; None: all."""
    room = 0
    """MiB that may come back."""
    usec = 0
    """Microseconds that the last move to the host took, by the word of the library."""

    def __init__(self, path: Path) -> None:
        self.answers: queue.Queue[int] = queue.Queue()
        self.heard: list[Op] = []
        self.heard_at: list[float] = []
        super().__init__(path)

    def _serve(self, connection: socket.socket) -> None:
        page = CounterPage()
        self.pages.append(page)
        with contextlib.suppress(OSError):
            while raw := connection.recv(SIZE):
                self._hear(connection, Message.decode(raw), page)

    def _hear(self, connection: socket.socket, heard: Message, page: CounterPage) -> None:
        if heard.reply:
            moved = heard.check().args[0] // MIB
            self.resident -= moved
            self.swapped += moved
            self.usec = heard.args[1]
            self.answers.put(moved)
            return
        self.heard.append(Op(heard.op))
        self.heard_at.append(time.monotonic())
        answer, first = heard.answer(), heard.args[0] // MIB
        match heard.op:
            case Op.HELLO:
                answer = heard.answer(1, 2 << 20, 2000, self.features)
            case Op.LOCATE:
                answer = heard.answer(heard.args[1] >> 56)
            case Op.MANAGE:
                self.resident, self.swapped = first, heard.args[1] // MIB
            case Op.CHARGE if self.most is not None and self.resident + first > self.most:
                answer = heard.refuse(errno.ENOMEM)
            case Op.CHARGE:
                self.resident += first
            case Op.UNCHARGE:
                self.resident -= first
                self.swapped -= heard.args[1] // MIB
            case Op.MOVE_IN if first > self.room:
                answer = heard.refuse(errno.EAGAIN)
            case Op.MOVE_IN:
                self.room -= first
                self.resident += first
                self.swapped -= first
            case Op.LIMITS:
                answer = heard.answer((1 << 64) - 1, 0, 0)
            case Op.HOST:
                self.managed = heard.args[4] // MIB
        if heard.seq:
            fds = [page.descriptor] if heard.op == Op.MANAGE else []
            socket.send_fds(connection, [answer.encode()], fds)

    def reclaim(self, nbytes: int) -> int:
        """Ask the program to move so many MiB; what it says it has moved."""
        self._connections[-1].send(Message(Op.RECLAIM, 77, 0, (0, 0, 0, nbytes * MIB)).encode())
        return self.answers.get(timeout=SECONDS)

    def let_back(self, nbytes: int) -> None:
        """Have room for so many MiB, and say so."""
        self.room = nbytes
        self._connections[-1].send(Message(Op.ROOM, 0, 0, (nbytes * MIB,)).encode())


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Books]:
    server = Books(tmp_path / "socket")
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def unified(tmp_path: Path, what: str, sanitize: str = "", **more: str) -> Iterator[Program]:
    extra = {"GGROUP_SOCKET": str(tmp_path / "socket"), "GGROUP_CUDA_POOL": "0", "FAKE_MEMORY": str(1 << 30), **more}
    with running("unified", what, tmp_path=tmp_path, sanitize=sanitize, extra=extra) as program:
        yield program


def agrees(daemon: Books, resident: int, swapped: int) -> None:
    """The books come to that, and all on the GPU is managed memory."""
    eventually(
        lambda: (daemon.resident, daemon.swapped, daemon.managed) == (resident, swapped, resident),
        lambda: f"{daemon.resident} {daemon.swapped} {daemon.managed}, and not {resident} {swapped}",
    )


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_what_is_asked_for_stays_in_the_host(tmp_path: Path, daemon: Books, sanitize: str) -> None:
    """However a kernel uses it; the books have what may be on the GPU at most, and the last of it goes first."""
    with unified(tmp_path, "plain", sanitize) as program:
        assert program.hears("plain") == WHOLE
        agrees(daemon, CHARGED, 0)
        assert daemon.reclaim(40) == 50, "whole pieces: 2, and three of 16"
        agrees(daemon, CHARGED - 50, 50)
        program.go()
        assert program.hears("plain") == WHOLE - 48
        assert daemon.reclaim(1000) == CHARGED - 50
        agrees(daemon, 0, CHARGED)
        program.go()
        assert program.hears("plain") == 0
        assert daemon.reclaim(16) == 0
        daemon.let_back(40)
        agrees(daemon, 32, CHARGED - 32)
        program.go()
        assert program.hears("plain") == 32
        daemon.let_back(1000)
        agrees(daemon, CHARGED, 0)
        program.go()
        assert program.hears("plain") == WHOLE


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_the_programs_own_advice_is_what_it_was(tmp_path: Path, daemon: Books, sanitize: str) -> None:
    """To all that ask, whatever is in the host; and it holds again where the memory is let back."""
    with unified(tmp_path, "advice", sanitize) as program:
        assert program.hears("advice") == WHOLE
        assert daemon.reclaim(1000) == CHARGED
        program.go()
        assert program.hears("advice") == 0, "it changed all of it meanwhile, and nothing came by that"
        daemon.let_back(1000)
        agrees(daemon, CHARGED, 0)
        program.go()
        assert program.hears("advice") > 0
        daemon.room = 0  # else it would come back, a quarter of a second later
        assert daemon.reclaim(64) >= 64
        program.go()
        assert program.hears("advice") <= 32


def test_what_is_asked_for_is_not_asked_back_at_once(tmp_path: Path, daemon: Books) -> None:
    """Though there was room for more than the program has: what goes may go for another one."""
    with unified(tmp_path, "plain") as program:
        assert program.hears("plain") == WHOLE
        assert daemon.reclaim(1000) == CHARGED
        daemon.let_back(1000)
        agrees(daemon, CHARGED, 0)
        before, since = len(daemon.heard), time.monotonic()
        assert daemon.reclaim(64) >= 64
        agrees(daemon, CHARGED, 0)
        assert daemon.heard_at[daemon.heard.index(Op.MOVE_IN, before)] - since >= MOVE_BACK


def test_a_prefetch_comes_where_there_is_room(tmp_path: Path, daemon: Books) -> None:
    with unified(tmp_path, "prefetched") as program:
        assert program.hears("prefetched") == WHOLE
        assert daemon.reclaim(1000) == CHARGED
        program.go()
        assert program.hears("prefetched") == 0
        daemon.room = 48
        program.go()
        assert program.hears("prefetched") == 48
        agrees(daemon, 48, CHARGED - 48)


@pytest.mark.parametrize(("most", "there", "charged"), [(0, 0, 0), (40, 32, 34), (97, 96, 96), (98, 96, 98)])
def test_what_a_hard_limit_has_no_room_for_is_in_the_host(
    tmp_path: Path, daemon: Books, most: int, there: int, charged: int
) -> None:
    """From the beginning: the allocation succeeds, as the driver's does."""
    daemon.most = most
    with unified(tmp_path, "plain") as program:
        assert program.hears("plain") == there
        agrees(daemon, charged, 0)


def test_what_is_freed_is_uncharged_wherever_it_is(tmp_path: Path, daemon: Books) -> None:
    """So is what goes with its context."""
    with unified(tmp_path, "free") as program:
        assert program.hears("free") == WHOLE
        assert daemon.reclaim(40) == 50
        program.go()
        assert program.hears("free") == 0
        agrees(daemon, 0, 0)
        program.go()
        assert program.hears("free") == 0
        agrees(daemon, 0, 0)
        program.go()
        program.ends()


@pytest.mark.parametrize("features", [Feature(0), CUDA & ~Feature.MANAGED])
def test_an_older_daemon_is_told_of_none(tmp_path: Path, daemon: Books, features: Feature) -> None:
    """It is named, as it was before."""
    daemon.features = features
    with unified(tmp_path, "plain") as program:
        assert program.hears("plain") == WHOLE
        assert (daemon.resident, daemon.managed) == (0, 0)
        assert daemon.reclaim(40) == 0
    assert Op.CHARGE not in daemon.heard


@pytest.mark.parametrize(("what", "variables"), [("small", {}), ("plain", {"FAKE_CONCURRENT": "0"})])
def test_what_takes_no_advice_is_named(tmp_path: Path, daemon: Books, what: str, variables: dict[str, str]) -> None:
    """Less than the driver moves at a time; and on a GPU whose driver moves it as a whole."""
    with unified(tmp_path, what, **variables) as program:
        program.hears(what)
        assert (daemon.resident, daemon.managed) == (0, 0)


REFUSABLE = (
    "cuMemAdvise_v2",
    "cuMemPrefetchAsync_v2",
    "cuStreamCreate",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
)
"""Calls of a move to the host. The event tells of a prefetch that does not arrive."""


def test_a_move_takes_what_its_prefetches_take(tmp_path: Path, daemon: Books) -> None:
    """Which is what the daemon reckons with: three pieces of 16 MiB, and the last one."""
    with unified(tmp_path, "plain", FAKE_PREFETCH_US="20000") as program:
        assert program.hears("plain") == WHOLE
        assert daemon.reclaim(40) == 50
        assert daemon.usec >= 4 * 20_000


@pytest.mark.parametrize("call", REFUSABLE)
def test_what_the_driver_refuses_stays_where_it_is(tmp_path: Path, daemon: Books, call: str) -> None:
    """And in the books as it was."""
    with unified(tmp_path, "plain", FAKE_FAIL=f"{call}:0:719") as program:
        assert program.hears("plain") == WHOLE
        agrees(daemon, CHARGED, 0)
        assert daemon.reclaim(40) == 0
        agrees(daemon, CHARGED, 0)
        program.go()
        assert program.hears("plain") == WHOLE


STEPS = 1500 * int(os.environ.get("FUZZ", "1"))
SEEDS = range(int(os.environ.get("SEED", "1")), int(os.environ.get("SEED", "1")) + 2)


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_it_says_is_kept_wherever_it_is(tmp_path: Path, daemon: Books, seed: int, sanitize: str) -> None:
    """Advice and prefetches in any order, while the daemon asks for memory, and lets it back; the books are right."""
    chance = random.Random(seed)
    extra = {
        "GGROUP_SOCKET": str(daemon.path),
        "GGROUP_CUDA_POOL": "0",
        "FAKE_MEMORY": str(1 << 30),
        "FAKE_DEVICES": "2",
    }
    steps = STEPS if not sanitize else STEPS // 3
    daemon.most = chance.choice([None, 64, 128])
    with running("unified_fuzz", steps, seed, tmp_path=tmp_path, sanitize=sanitize, extra=extra) as program:
        for _ in range(0, steps, 64):
            program.hears("step")
            before = daemon.resident
            if chance.random() < 0.6:
                assert daemon.reclaim(chance.randrange(1, 120)) <= before
            else:
                daemon.let_back(chance.randrange(1, 200))
            program.go()
        program.hears("freed")
        agrees(daemon, 0, 0)
        program.go()
        program.ends()
