"""Level 6: programs that stand by to be moved to another GPU, with all of their memory held by descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backend.cuda.page import CounterPage, stands
from backend.door.wire import Message, Op
from tests.t6_cuda.harness import MIB, SECONDS, BookingDaemon, Program, eventually, running

HELD = 86
"""MiB that the program always has."""
EXTRA = 4
"""MiB that it also allocates and frees; freed memory that is in the host is gone from there."""
OBJECT = 20
"""MiB of each further object, if it makes any: one before it gives memory back, and one after."""
EXCHANGED_MOST = 5
"""Number of programs an object of which may have changed places before it was to be seen at rest."""
AWAY = 40
"""MiB of HELD that are in the host, whatever happens to EXTRA."""


class DepartingDaemon(BookingDaemon):
    """A daemon that has programs stand by, and lets them go on."""

    def __init__(self, path: Path) -> None:
        self.located = 0
        """Number of the GPU that the program asked for last."""
        self.managed: list[tuple[int, int, int]] = []
        """GPU, bytes there and bytes in the host, as reported once per connection."""
        self.hasty: int | None = None
        """Pid of a program that learns both when it next runs: that it is managed, and that it is to stand by."""
        super().__init__(path)

    def _hear(self, connection: socket.socket, heard: Message, page: CounterPage) -> None:
        if heard.op == Op.CHARGE and self.stands:
            return  # granted by the end of the connection
        if not heard.reply and heard.op == Op.LOCATE:
            self.located = heard.args[1] >> 56
        if not heard.reply and heard.op == Op.MANAGE:
            self.resident, self.swapped = heard.args[:2]
        hasty = self.hasty if not heard.reply and heard.op == Op.MANAGE else None
        if hasty:
            os.kill(hasty, signal.SIGSTOP)
        super()._hear(connection, heard, page)
        if hasty:
            connection.send(Message(Op.DEPART, 78, self.located, (1,)).encode())
            os.kill(hasty, signal.SIGCONT)
        if not heard.reply and heard.op == Op.MANAGE:  # only after the answer has it a page to write to
            self.managed.append((heard.gpu, *heard.args[:2]))

    def depart(self, near: bool = True) -> int:
        """Have the program stand by; return 0, or the errno of its refusal."""
        self._connections[-1].send(Message(Op.DEPART, 78, self.located, (int(near),)).encode())
        return -self.answers.get(timeout=SECONDS).status

    def depart_in_time(self, near: bool = True, how: Callable[[], int] | None = None) -> int:
        """Do the same until it is not EBUSY, which it is on a busy machine if its gate does not close in 500 ms. `how`
        is another way to ask."""
        answer = errno.EBUSY

        def asked() -> bool:
            nonlocal answer
            answer = how() if how else self.depart(near)
            return answer != errno.EBUSY

        eventually(asked, lambda: "it is busy for ever")
        return answer

    def has_given(self, nbytes: int) -> bool:
        """Ask for the part of `nbytes` that is not in the host; return whether all is. A busy program may give none."""
        if self.swapped < nbytes:
            self.reclaim(nbytes - self.swapped, self.located)
        return self.swapped >= nbytes

    @property
    def stands(self) -> bool:
        """Whether its page says that it stands by."""
        return stands(self.pages[-1].descriptor)

    def hang_up(self) -> Callable[[], None]:
        """End the connection; return a function that waits until it is connected and managed again."""
        before = len(self.managed)
        self._connections[-1].shutdown(2)
        return lambda: eventually(lambda: len(self.managed) > before, lambda: "it does not connect again")

    def let_go(self) -> None:
        """End the connection, and wait for the next one."""
        self.hang_up()()


@contextlib.contextmanager
def departing(
    tmp_path: Path, sanitize: str = "", moves: int = 1, away: int = AWAY + EXTRA, **extra: str
) -> Iterator[tuple[DepartingDaemon, Program]]:
    """Start a program that works, with `away` MiB in the host."""
    path = tmp_path / "socket"
    daemon = DepartingDaemon(path)
    variables = {
        "GGROUP_SOCKET": str(path),
        "GGROUP_CUDA_POOL": "0" if "FAKE_FAIL_LATER" in extra else "16",
        "MOVES": str(moves),
        **extra,
    }
    try:
        with running("departs", tmp_path=tmp_path, sanitize=sanitize, extra=variables) as program:
            assert program.hears("ready") == 0
            eventually(lambda: daemon.has_given(away * MIB), lambda: "it gives nothing")
            program.go()
            assert program.hears("armed") == 0
            yield daemon, program
    finally:
        daemon.close()


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
@pytest.mark.parametrize("dies", [False, True])
def test_a_program_stands_by_and_goes_on_elsewhere(tmp_path: Path, sanitize: str, dies: bool) -> None:
    """Three times: nothing is left that a checkpoint could not restore, nothing runs, and no word is lost. If the
    daemon dies during the checkpoint, the program waits for its end, whatever its threads are doing."""
    variables = {"CHECKPOINTED": "1"} if dies else {}
    with departing(tmp_path, sanitize, moves=3, **variables) as (daemon, program):
        for number in (3, 2, 1):
            assert not daemon.stands
            eventually(lambda: daemon.depart() == 0, lambda: "it does not stand by")  # memory may still be coming back
            assert daemon.stands
            program.go()
            assert program.hears("host") == 0
            program.go()
            assert program.hears("objects") <= 2, "but for an allocation that was under way"
            program.go()
            assert program.hears("launched") == 0
            page = daemon.pages[-1].descriptor
            program.go()
            if dies:
                assert program.hears("checkpointed") == 0
                is_back = daemon.hang_up()
                program.go()
            assert program.hears("moved") == number
            (is_back if dies else daemon.let_go)()
            assert not stands(page)
            index, resident, swapped = daemon.managed[-1]
            assert index == number
            extra = resident + swapped - HELD * MIB
            assert extra in (0, EXTRA // 2 * MIB, EXTRA * MIB), "it allocates and frees two chunks"
            assert swapped >= AWAY * MIB
            before = daemon.counts(number)[1]
            eventually(lambda: daemon.counts(number)[1] > before + 8, lambda: "it does not go on")  # noqa: B023
        daemon.room = True
        eventually(lambda: not daemon.swapped, lambda: f"{daemon.swapped} bytes stay away")
        program.go()
        assert program.hears("launched") > 0
        program.go()
        program.ends()


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
@pytest.mark.parametrize("near", [True, False])
def test_objects_go_along(tmp_path: Path, sanitize: str, near: bool) -> None:
    """A moved object goes with all that the library has placed; the driver carries the others, and the daemon is told
    of that before. An object may also have moved by changing places with hotter memory, if the machine is slow: then
    another program has to show it."""
    for number in range(EXCHANGED_MOST):
        (here := tmp_path / str(number)).mkdir()
        with departing(here, sanitize, away=HELD + OBJECT, OBJECTS="1") as (daemon, program):
            if objects_go_along(daemon, program, near):
                return
    pytest.fail("objects change places each time")


def objects_go_along(daemon: DepartingDaemon, program: Program, near: bool) -> bool:
    """Return whether they do, up to the end of a program; False where one changed places before it was seen at rest."""

    def rests() -> bool:
        def is_told() -> bool:
            return daemon.reported[3] == OBJECT * MIB

        eventually(lambda: is_told() or daemon.reported[1] > 0, lambda: f"{daemon.reported} is said")
        return is_told()

    if not rests():
        return False
    assert daemon.reported[0] == 0
    eventually(lambda: daemon.depart(near) == 0, lambda: "it does not stand by")
    program.go()
    assert program.hears("host") == 0
    program.go()
    assert program.hears("objects") <= 2 + 1
    for what in ("launched", "moved"):
        program.go()
        program.hears(what)
    daemon.let_go()
    if not rests():
        return False
    daemon.room = True
    eventually(lambda: not daemon.swapped, lambda: f"{daemon.swapped} bytes stay away")
    # Once it has moved, the library carries it.
    daemon.room = False
    eventually(lambda: daemon.has_given((HELD + 2 * OBJECT) * MIB), lambda: "it gives nothing")
    eventually(lambda: daemon.reported[3] == 0, lambda: f"{daemon.reported} is said")
    program.go()
    assert program.hears("launched") > 0
    program.go()
    program.ends()
    return True


def test_what_others_have_by_descriptors_keeps_it_here(tmp_path: Path) -> None:
    """The memory would stay on this GPU, and be charged on the other."""
    with departing(tmp_path, FAKE_LENT="1") as (daemon, program):
        eventually(lambda: daemon.reported[4] == OBJECT * MIB, lambda: f"{daemon.reported} is said")
        assert daemon.depart_in_time() == errno.EOPNOTSUPP
        program.go()
        assert program.hears("closed") == 0
        assert daemon.depart_in_time() == 0
        eventually(lambda: daemon.reported[4] == 0, lambda: f"{daemon.reported} is said")
        for what in ("host", "objects", "launched", "moved"):
            program.go()
            program.hears(what)
        daemon.let_go()
        program.go()
        program.hears("launched")
        program.go()
        program.ends()


def test_what_is_on_the_gpu_is_left_to_the_driver(tmp_path: Path) -> None:
    """Where the other GPU could not use it; nothing is left in the host that the driver could not restore."""
    with departing(tmp_path) as (daemon, program):
        assert daemon.depart_in_time(near=False) == 0
        program.go()
        assert program.hears("host") == 0
        program.go()
        assert program.hears("objects") > 2
        for what in ("launched", "moved"):
            program.go()
            program.hears(what)
        daemon.let_go()
        index, _, swapped = daemon.managed[-1]
        assert (index, swapped >= AWAY * MIB) == (1, True)
        assert daemon.depart_in_time() == 0, "nothing is to come home"
        daemon.let_go()
        daemon.room = True
        eventually(lambda: not daemon.swapped, lambda: f"{daemon.swapped} bytes stay away")
        program.go()
        program.hears("launched")
        program.go()
        program.ends()


def test_one_that_is_asked_as_it_is_managed_has_its_page(tmp_path: Path) -> None:
    with departing(tmp_path) as (daemon, program):

        def hasten() -> int:
            daemon.hasty = program.process.pid
            daemon.let_go()
            return -daemon.answers.get(timeout=SECONDS).status

        assert daemon.depart_in_time(how=hasten) == 0
        assert daemon.stands


@pytest.mark.parametrize("ends", [True, False])
def test_nothing_comes_home_while_the_driver_is_busy(tmp_path: Path, ends: bool) -> None:
    """The program works meanwhile, with its memory where it was: with the gate closed each call would wait. A driver
    that stays busy keeps the memory away for 3 s."""
    busy = tmp_path / "busy"

    def came() -> bool:
        return "home, in" in (tmp_path / "stderr").read_text()

    with departing(tmp_path, FAKE_BUSY=str(busy), GGROUP_CUDA_LOG="1") as (daemon, program):
        assert daemon.depart_in_time() == 0
        for what in ("host", "objects", "launched", "moved"):
            program.go()
            program.hears(what)
        busy.touch()
        daemon.let_go()
        begun, before = time.monotonic(), daemon.counts(1)[1]
        eventually(lambda: daemon.counts(1)[1] > before + 30, lambda: "it does not go on")
        assert not came()
        if ends:
            busy.unlink()
        eventually(came, lambda: "nothing comes home")
        assert ends or time.monotonic() - begun > 2
        program.go()
        assert program.hears("launched") > 0
        program.go()
        program.ends()


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
@pytest.mark.parametrize("fault", ["cuMemImportFromShareableHandle:3", "cuMemMap:2", "cuMemMap:5", "cuMemSetAccess:1"])
def test_what_fails_on_the_way_back_is_tried_again(tmp_path: Path, fault: str, sanitize: str) -> None:
    with departing(tmp_path, sanitize, FAKE_FAIL_LATER=fault) as (daemon, program):
        assert daemon.depart_in_time() == 0
        daemon.let_go()
        before = daemon.counts()[1]
        eventually(lambda: daemon.counts()[1] > before + 8, lambda: "it does not go on")
        daemon.room = True
        eventually(lambda: not daemon.swapped, lambda: f"{daemon.swapped} bytes stay away")
        for what in ("host", "objects", "launched", "moved", "launched"):
            program.go()
            program.hears(what)
        program.go()
        program.ends()


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
@pytest.mark.parametrize(
    "fault",
    [
        *("cuMemExportToShareableHandle:1", "cuMemExportToShareableHandle:5"),
        *("cuMemUnmap:1", "cuMemUnmap:2", "cuMemUnmap:4", "cuMemRelease:1", "cuMemRelease:7"),
    ],
)
def test_one_that_cannot_stand_by_goes_on(tmp_path: Path, fault: str, sanitize: str) -> None:
    """Whatever the driver refuses after a program began to stand by, all is as before; the next attempt succeeds."""
    with departing(tmp_path, sanitize, FAKE_FAIL_LATER=fault) as (daemon, program):
        assert daemon.depart_in_time() == errno.EIO
        assert not daemon.stands
        assert len(daemon.managed) == 1
        before = daemon.counts()[1]
        eventually(lambda: daemon.counts()[1] > before + 8, lambda: "it does not go on")
        eventually(lambda: daemon.depart() == 0, lambda: "what came back keeps it from standing by")
        daemon.let_go()
        program.go()
        assert program.hears("host") > 0
        for what in ("objects", "launched", "moved", "launched"):
            program.go()
            program.hears(what)
        program.go()
        program.ends()
