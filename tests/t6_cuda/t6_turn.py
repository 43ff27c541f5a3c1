"""The gates of turns: which calls are held without a turn, until when, and that none is held for ever."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from backend.door.wire import Op
from tests.t6_cuda.harness import MIB, SECONDS, Program, daemon, eventually, run, running
from tests.t6_cuda.turning import TurningDaemon

SANITIZERS = ["", "thread", "address,undefined"]

CASES = ["drain", "events", "nested", "devices", "captures", "stale", "joins", "never", "destroys"]
CASES += ["hammer", "fork", "cancelled", "callback"]

KERNEL_US = 20_000
"""Time of a kernel where run-ahead is bounded to eight of them, in microseconds; more than a busy machine adds."""

LONG_KERNEL_US = 50_000
"""Time of a kernel where two of them are waited for, or several are launched before one ends, in microseconds."""


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("case", CASES)
def test_turn(case: str, sanitize: str) -> None:
    """Each case is a function of turn_all.c."""
    run("turn_all", case, sanitize=sanitize, FAKE_DEVICES="2")


def test_each_entry_point_is_held_that_brings_work() -> None:
    """No other entry point is held, by the kinds of entries.def; every row of it is called."""
    run("turn_all", "rows", FAKE_DEVICES="2")


def test_an_open_gate_is_cheap() -> None:
    """An open gate costs one load more than the other gate: nanoseconds. The limit is far higher, so that a slow
    machine passes."""
    assert int(run("turn_all", "cost")) < 200_000  # ps


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_run_ahead_is_bounded(tmp_path: Path, sanitize: str) -> None:
    """The bound is about eight kernels, by the time of recent ones, which is learnt 2 ms late."""
    with daemon(tmp_path) as server:
        extra = {"GGROUP_SOCKET": str(server.path), "FAKE_KERNEL_US": str(KERNEL_US)}
        words = run("turn_all", "ahead", sanitize=sanitize, **extra).split()
    assert 1 <= int(words[1]) <= 14, words


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_what_is_launched_at_once_is_heard_of_in_parts(tmp_path: Path, sanitize: str) -> None:
    """Of sixteen kernels, ends are noticed two at a time, and not only when all have finished and the GPU has nothing
    left."""
    with daemon(tmp_path) as server:
        extra = {"GGROUP_SOCKET": str(server.path), "FAKE_KERNEL_US": str(KERNEL_US)}
        words = run("turn_all", "fed", sanitize=sanitize, **extra).split()
    assert 1 <= int(words[1]) <= 8, words


def test_what_runs_after_a_turn_is_looked_at_often(tmp_path: Path) -> None:
    """The end is known after a millisecond, not up to 16 ms later: quotas are charged until then."""
    with daemon(tmp_path) as server:
        words = run("turn_all", "rest", GGROUP_SOCKET=str(server.path)).split()
    assert int(words[1]) <= 4_000, words


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_run_ahead_is_bounded_for_long_kernels(tmp_path: Path, sanitize: str) -> None:
    """A kernel takes eight times the bound: each of the four threads has one pending, and seldom another."""
    with daemon(tmp_path) as server:
        extra = {"GGROUP_SOCKET": str(server.path), "FAKE_KERNEL_US": str(LONG_KERNEL_US)}
        words = run("turn_all", "longer", sanitize=sanitize, **extra).split()
    assert 1 <= int(words[1]) <= 8, words


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_time_between_kernels_is_none_of_them(tmp_path: Path, sanitize: str) -> None:
    """After 2 s of work on the CPU alone, eight kernels may be pending as before."""
    with daemon(tmp_path) as server:
        extra = {"GGROUP_SOCKET": str(server.path), "FAKE_KERNEL_US": str(LONG_KERNEL_US)}
        words = run("turn_all", "idle", sanitize=sanitize, **extra).split()
    assert 3 <= int(words[1]) <= 14, words


def test_time_of_another_program_is_none_of_a_kernel(tmp_path: Path) -> None:
    """After one kernel that took twenty times as long, three are still pending: the GPU is not left without work."""
    with daemon(tmp_path) as server:
        extra = {"GGROUP_SOCKET": str(server.path), "FAKE_KERNEL_US": str(LONG_KERNEL_US)}
        words = run("turn_all", "preempted", **extra).split()
    assert 3 <= int(words[1]) <= 4, words


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_a_kernel_that_waits_for_a_later_one_gets_it(tmp_path: Path, sanitize: str) -> None:
    """A bound on run-ahead delays the kernel that another one waits for, but does not block it."""
    with daemon(tmp_path) as server:
        run("turn_all", "dependent", sanitize=sanitize, GGROUP_SOCKET=str(server.path))


COUNTED_CASES = ["late", "marks", "stands"]


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("case", COUNTED_CASES)
def test_turn_of_a_program_that_is_counted(tmp_path: Path, case: str, sanitize: str) -> None:
    """Each case is a function of turn_all.c, beside the thread that listens to a daemon."""
    with daemon(tmp_path) as server:
        run("turn_all", case, sanitize=sanitize, GGROUP_SOCKET=str(server.path), FAKE_DEVICES="2")


@attrs.frozen
class Turning:
    """A daemon, and the program turns.c."""

    daemon: TurningDaemon
    program: Program

    def launched(self, word: str = "") -> int:
        """Return how many kernels the program launches in a while from now on, after it has done `word`."""
        self._says(word)
        return self.program.hears("launched")

    def _says(self, word: str) -> None:
        assert self.program.process.stdin
        self.program.process.stdin.write(word + "\n")
        self.program.process.stdin.flush()

    def runs(self) -> None:
        """Wait until the program launches."""
        eventually(lambda: self.launched() > 0, lambda: "it launches nothing")

    def ends(self) -> str:
        """Have the program check its memory and end; return what it wrote on stderr."""
        self._says("end")
        return self.program.ends()


Start = Callable[[str], Turning]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start both."""
    path = tmp_path / "socket"
    server = TurningDaemon(path)
    with contextlib.ExitStack() as stack:

        def begin(sanitize: str) -> Turning:
            extra = {"GGROUP_SOCKET": str(path), "GGROUP_CUDA_POOL": "16", "GGROUP_CUDA_LOG": "1", "FAKE_DEVICES": "2"}
            program = stack.enter_context(running("turns", tmp_path=tmp_path, sanitize=sanitize, extra=extra))
            assert program.hears("ready") == 0
            return Turning(server, program)

        yield begin
    server.close()


def drained(daemon: TurningDaemon, gpu: int = 0) -> bool:
    """End the program's turn, however long that takes on this machine."""
    eventually(lambda: daemon.end_turn(gpu=gpu), lambda: "it does not drain")
    return True


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_memory_moves_while_a_program_waits_for_its_turn(start: Start, sanitize: str) -> None:
    """Nothing is launched, questions are answered, and no data is lost."""
    turning = start(sanitize)
    server = turning.daemon
    turning.runs()
    assert drained(server)
    assert turning.launched() == 0
    eventually(lambda: server.swapped >= 40 * MIB or not server.reclaim(8 * MIB), lambda: "it does not stop")
    assert server.swapped >= 40 * MIB
    assert turning.launched() == 0, "a move opens the other gate alone"
    eventually(lambda: server.end_turn(0), lambda: "it is no more drained")
    server.room = True
    eventually(lambda: not server.swapped, lambda: f"{server.swapped} bytes stay away")
    assert turning.launched() == 0
    server.begin_turn(20_000)
    turning.runs()
    stderr = turning.ends()
    assert "the turn is over, nothing runs after" in stderr
    assert "a turn begins, run-ahead 20000 us" in stderr


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_nothing_comes_back_to_a_program_that_is_late(start: Start, sanitize: str) -> None:
    """A move would wait for running work, and the next turn for the move; once the work is over, all comes back."""
    turning = start(sanitize)
    server = turning.daemon
    turning.runs()
    assert drained(server)
    eventually(lambda: server.swapped >= 40 * MIB or not server.reclaim(8 * MIB), lambda: "it does not stop")
    server.begin_turn()
    turning.runs()
    turning.launched("hold")
    assert not server.end_turn(10_000)
    server.room = True
    away = server.swapped
    assert away >= 40 * MIB
    time.sleep(1)
    assert not server.end_turn(10_000)
    assert server.swapped == away
    server.begin_turn()
    turning.launched("let")
    turning.runs()
    eventually(lambda: not server.swapped, lambda: f"{server.swapped} bytes stay away")
    stderr = turning.ends()
    begun = stderr.rindex("the turn is over, something runs")
    assert "what runs does not end" not in stderr[begun : stderr.index("a turn begins", begun)]


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_a_turn_ends_behind_a_move(start: Start, sanitize: str) -> None:
    """Both are requested at once; the move goes first."""
    turning = start(sanitize)
    server = turning.daemon
    for _ in range(5):
        turning.runs()
        server.say(Op.RECLAIM, (0, 0, 0, 8 * MIB))
        server.say(Op.END_TURN, (1_000_000,))
        moved, ended = (server.answers.get(timeout=SECONDS).check() for _ in range(2))
        assert (moved.op, ended.op) == (Op.RECLAIM, Op.END_TURN)
        assert ended.args[0] or drained(server)
        assert turning.launched() == 0
        server.room = True
        eventually(lambda: not server.swapped, lambda: f"{server.swapped} bytes stay away")
        server.room = False
        server.begin_turn()
    turning.runs()
    turning.ends()


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_the_end_of_the_connection_opens(start: Start, sanitize: str) -> None:
    """A daemon that is killed or upgraded holds up no program."""
    turning = start(sanitize)
    turning.runs()
    assert drained(turning.daemon)
    assert turning.launched() == 0
    turning.daemon.hang_up()
    turning.runs()
    turning.ends()


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_a_departure_opens(start: Start, sanitize: str) -> None:
    """The program stands by, with no turn to end; afterwards it runs."""
    turning = start(sanitize)
    turning.runs()
    assert drained(turning.daemon)
    eventually(lambda: not turning.daemon.ask(Op.DEPART, 1).status, lambda: "it does not stand by")
    assert turning.daemon.ask(Op.END_TURN, 1000).status == -errno.EBUSY
    turning.daemon.hang_up()
    turning.runs()
    turning.ends()


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_a_departure_that_is_refused_opens_the_gate_of_that_gpu_alone(start: Start, sanitize: str) -> None:
    """On the other GPU the program still waits for its turn, as the daemon was told."""
    turning = start(sanitize)
    server = turning.daemon
    turning.runs()
    eventually(lambda: turning.launched("second") > 0, lambda: "it launches nothing there")
    assert drained(server, gpu=1)
    turning.launched("hold")
    assert not server.end_turn(10_000)
    assert turning.launched() == 0
    assert server.ask(Op.DEPART, 1).status == -errno.EBUSY
    turning.runs()
    assert turning.launched("second") == 0
    server.begin_turn(gpu=1)
    eventually(lambda: turning.launched("second") > 0, lambda: "it launches nothing there")
    turning.launched("let")
    turning.ends()


def test_what_is_not_managed_has_no_turns(start: Start) -> None:
    """Neither a GPU that the program has not said it uses, nor one that does not exist, has turns."""
    turning = start("")
    for op in (Op.END_TURN, Op.BEGIN_TURN):
        assert turning.daemon.ask(op, 1000, gpu=1).status == -errno.ENODEV
        assert turning.daemon.ask(op, 1000, gpu=1 << 31).status == -errno.ENODEV
    turning.runs()
    turning.ends()
