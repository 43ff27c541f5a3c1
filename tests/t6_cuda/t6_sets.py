"""Level 6: the working set of a program: what is told of it, how it comes in before a turn, and which memory goes
first."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from backend.core.workingset import WorkingSet
from backend.cuda.page import CounterPage
from backend.door.wire import CUDA, CUDA_ALL, Feature, Message, Op
from tests.t6_cuda.harness import MIB, SECONDS, Program, eventually, running
from tests.t6_cuda.turning import TurningDaemon

EACH = 2 * MIB
ALL = 8 * EACH
AHEAD_US = 10_000
LONG_S = 0.05
"""Length of a turn that is long enough to count, in seconds."""
KEPT_S = 1.05
"""Length of a turn after which memory used in earlier ones has left the working set, in seconds."""


class Setting(TurningDaemon):
    """A daemon that asks for working sets."""

    features = CUDA_ALL

    def _hear(self, connection: socket.socket, heard: Message, page: CounterPage) -> None:
        if heard.op == Op.HELLO and not heard.reply:
            connection.send(heard.answer(1, EACH, 2000, self.features).encode())
        else:
            super()._hear(connection, heard, page)

    def prepare(self, nbytes: int) -> int:
        """Prepare up to `nbytes`; return the bytes that came in. Under a sanitizer one call may not do it all."""
        moved = 0
        while moved < nbytes and (step := self.ask(Op.PREPARE, nbytes - moved).check().args[0]):
            moved += step
        return moved

    def told(self) -> tuple[int, int] | None:
        """Return the MiB of the working set, and of that on the GPU; None if nothing is told."""
        found = self.pages[-1].working_set(0)
        assert found is None or isinstance(found, WorkingSet)
        return None if found is None else (found.used // MIB, found.resident // MIB)


@attrs.frozen
class Rig:
    """Such a daemon, and the program sets.c."""

    daemon: Setting
    program: Program

    def do(self, line: str = "look") -> set[int]:
        """Have the program do a line; return which of its allocations are on the GPU then."""
        assert self.program.process.stdin is not None
        self.program.process.stdin.write(line + "\n")
        self.program.process.stdin.flush()
        bits = self.program.hears("done")
        return {number for number in range(8) if bits >> number & 1}

    def turn(self, *lines: str, seconds: float = KEPT_S) -> None:
        """Run a turn in which the program does these lines."""
        self.daemon.begin_turn(AHEAD_US)
        for line in lines:
            self.do(line)
        time.sleep(seconds)
        self.end_turn()

    def turns(self, told: tuple[int, int], *lines: str) -> None:
        """Run such turns until `told` is told: on a busy machine a turn may begin late, and be too short."""

        def tells() -> bool:
            self.turn(*lines)
            return self.daemon.told() == told

        eventually(tells, lambda: f"{self.daemon.told()}, not {told}")

    def end_turn(self) -> None:
        """End the turn, however long this machine takes."""
        eventually(self.daemon.end_turn, lambda: "it does not drain")

    def goes_down_to(self, count: int) -> None:
        """Reclaim until `count` allocations are on the GPU. Under a sanitizer one call may not do it all."""

        def is_down() -> bool:
            if (over := self.daemon.resident - count * EACH) > 0:
                self.daemon.reclaim(over)
            return self.daemon.resident <= count * EACH

        eventually(is_down, lambda: f"{self.daemon.resident} bytes stay")

    def all_go(self) -> None:
        """Reclaim until none of the program's memory is on the GPU."""
        self.goes_down_to(0)
        assert not self.do()

    def ends(self) -> None:
        """End the program in a last turn, in which it checks its memory."""
        self.daemon.begin_turn()
        assert self.program.process.stdin is not None
        self.program.process.stdin.write("end\n")
        self.program.process.stdin.flush()
        self.program.ends()


Start = Callable[..., Rig]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start both; `features` are those that the daemon announces."""
    path = tmp_path / "socket"
    server = Setting(path)
    with contextlib.ExitStack() as stack:

        def begin(sanitize: str = "", features: Feature = CUDA_ALL) -> Rig:
            server.features = features
            extra = {"GGROUP_SOCKET": str(path), "GGROUP_CUDA_POOL": "0"}
            program = stack.enter_context(running("sets", tmp_path=tmp_path, sanitize=sanitize, extra=extra))
            assert program.hears("ready") == 0
            rig = Rig(server, program)
            time.sleep(LONG_S)
            rig.end_turn()  # in which it filled all of them
            assert (server.told() is None) == (Feature.SETS not in features)
            return rig

        yield begin
    server.close()


SANITIZERS = ["", "thread", "address,undefined"]


@pytest.mark.parametrize(
    ("way", "sanitize"),
    [("use", ""), ("map", ""), ("graph", ""), ("map", "address,undefined"), ("graph", "thread")],
)
def test_what_a_turn_used_comes_before_the_next_in_its_order(start: Start, way: str, sanitize: str) -> None:
    """This holds for every way in which kernels are told of memory; nothing else comes in while the program waits."""
    rig = start(sanitize)
    server = rig.daemon
    rig.turns((8, 8), f"{way} 5317")
    rig.all_go()
    assert server.told() == (8, 0)
    server.room = True
    assert server.prepare(EACH - 1) == 0
    assert server.prepare(2 * EACH) == 2 * EACH
    assert rig.do() == {5, 3}
    assert server.told() == (8, 4)
    time.sleep(1)
    assert rig.do() == {5, 3}, "what waits has come by itself"
    assert server.prepare(ALL) == 2 * EACH
    assert rig.do() == {1, 3, 5, 7}
    assert server.told() == (8, 8)
    assert server.prepare(ALL) == 0
    server.begin_turn(AHEAD_US)
    rig.do(f"{way} 5317")
    eventually(lambda: not server.swapped, lambda: f"{server.swapped} bytes stay away in its turn")
    rig.ends()


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_what_a_turn_used_goes_last_and_its_first_last_of_all(start: Start, sanitize: str) -> None:
    rig = start(sanitize)
    server = rig.daemon
    rig.turn("use 5317", "use 04")
    rig.turns((8, 8), "use 5317")
    rig.goes_down_to(4)
    assert rig.do() == {1, 3, 5, 7}
    rig.goes_down_to(3)
    assert rig.do() == {1, 3, 5}
    rig.goes_down_to(2)
    assert rig.do() == {3, 5}
    assert server.told() == (8, 4)
    rig.ends()


def test_a_program_without_room_is_left_as_it_is(start: Start) -> None:
    """The daemon is asked for the room piece by piece."""
    rig = start()
    server = rig.daemon
    rig.turns((4, 4), "use 01")
    rig.all_go()
    assert server.prepare(ALL) == 0
    assert not rig.do()
    rig.ends()


def test_a_short_turn_says_nothing_alone(start: Start) -> None:
    """A short turn is part of the next one. A turn in which nothing was used tells nothing either."""
    rig = start()
    server = rig.daemon
    rig.turns((8, 8), "use 0123")
    rig.turn()
    assert server.told() == (8, 8)
    server.begin_turn(AHEAD_US)
    rig.end_turn()
    rig.turns((4, 4), "use 45")
    rig.ends()


def test_short_turns_count_together(start: Start) -> None:
    """The memory used longest ago comes first."""
    rig = start()
    server = rig.daemon

    def count_together() -> bool:
        rig.turns((4, 4), "use 67")
        rig.turn("use 0", seconds=LONG_S)
        return server.told() == (6, 6)

    eventually(count_together, lambda: f"{server.told()}")
    rig.all_go()
    server.room = True
    assert server.prepare(2 * EACH) == 2 * EACH
    assert rig.do() == {6, 7}
    rig.ends()


@pytest.mark.parametrize("sanitize", ["thread"])
def test_a_program_that_takes_no_turns_is_looked_at(start: Start, sanitize: str) -> None:
    """Its uses are looked at for one second in ten."""
    rig = start(sanitize)
    server = rig.daemon
    server.begin_turn()

    def tells(which: str, mib: int) -> bool:
        rig.do(f"use {which}")
        return server.told() == (mib, mib)

    eventually(lambda: tells("012", 6), lambda: f"{server.told()}")
    eventually(lambda: tells("5", 2), lambda: f"{server.told()}")
    rig.ends()


def test_shared_memory_is_told(start: Start) -> None:
    rig = start()
    rig.turns((2, 2), "use 0")
    assert rig.daemon.pages[-1].is_alone(0)
    rig.turn("export")
    assert rig.daemon.told() == (2, 2)
    assert not rig.daemon.pages[-1].is_alone(0)
    rig.ends()


def test_one_that_is_late_or_elsewhere_is_not_prepared(start: Start) -> None:
    rig = start()
    assert rig.daemon.ask(Op.PREPARE, ALL, gpu=1).status == -errno.ENODEV
    rig.turn("use 0")
    eventually(lambda: not rig.daemon.ask(Op.DEPART, 1).status, lambda: "it does not stand by")
    assert rig.daemon.ask(Op.PREPARE, ALL).status == -errno.EBUSY
    rig.daemon.hang_up()
    rig.ends()


def test_memory_comes_back_as_turns_end(start: Start) -> None:
    """A daemon tells of room once a program has no turns any more, however short a while ago it was prepared."""
    rig = start()
    rig.turns((8, 8), "use 5317")
    rig.all_go()
    rig.daemon.room = True
    assert rig.daemon.prepare(EACH) == EACH
    rig.daemon.begin_turn(0)
    rig.daemon.say(Op.ROOM, (ALL,))

    def is_back() -> bool:
        rig.daemon.ask(Op.PREPARE, 0).check()  # it is so all the time, that is
        return not rig.daemon.swapped

    eventually(is_back, lambda: "it stays")
    rig.ends()


def test_an_older_daemon_is_told_nothing(start: Start) -> None:
    """Memory in the host comes back as ever where there is room."""
    rig = start(features=CUDA)
    server = rig.daemon
    rig.turn("use 01")
    assert server.pages[-1].working_set(0) is None
    rig.all_go()
    server.room = True
    eventually(lambda: not server.swapped, lambda: f"{server.swapped} bytes stay away")
    rig.ends()


def test_another_connection_is_told_anew(start: Start) -> None:
    """The set is of what the program uses from then on: its gate has opened."""
    rig = start()
    server = rig.daemon
    rig.turn("use 01")
    before = len(server.pages)
    server.hang_up()
    eventually(lambda: len(server.pages) > before, lambda: "it does not connect again")
    deadline = time.monotonic() + SECONDS
    while server.told() != (6, 6):
        assert time.monotonic() < deadline, server.told()
        rig.do("use 234")
    rig.ends()
