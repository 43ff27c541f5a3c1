"""Kernels on some SMs alone: where each runs, in which order, what is counted, and what a launch calls.

The order is that of a model in programs/sms_all.c: each piece of work of a random program says at its end which others
had to run before it, by the rules of CUDA's streams and events. SEED and STEPS in the environment have it go on from
another seed, and for longer.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.cuda.placements import GROUPS_MOST
from backend.door.wire import Op
from tests.t6_cuda.harness import daemon, eventually, run, running
from tests.t6_cuda.turning import TurningDaemon

SANITIZERS = ["", "thread", "address,undefined"]
CASES = ["placed", "refused", "wide", "ends", "gone", "fork", "marks"]
SEED = int(os.environ.get("SEED", "1"))
STEPS = int(os.environ.get("STEPS", "1500"))
SEEDS = range(SEED, SEED + 4)
LAUNCHES = 100
"""Launches of the cases that are looked at for their calls."""


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("case", CASES)
def test_sms(case: str, sanitize: str) -> None:
    """Each case is a function of sms_all.c."""
    run("sms_all", case, sanitize=sanitize)


def test_a_driver_without_green_contexts_is_refused() -> None:
    """The limit is EOPNOTSUPP, and launches are as they were."""
    run("sms_all", "without", FAKE_GREEN="0")


def test_what_the_driver_refuses_there_is_launched_on_all_sms() -> None:
    """The second launch of the driver's is refused: the first try of the program's second."""
    run("sms_all", "there", FAKE_FAIL="cuLaunchKernel:2:1")


def test_a_thread_that_waits_for_room_is_in_the_way_of_no_other() -> None:
    """The driver lets a launch wait where its stream has too much to do."""
    run("sms_all", "full", FAKE_QUEUE="8")


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_nor_is_one_that_waits_to_place_a_marker(sanitize: str) -> None:
    """Without a limit, too: kernels are counted by markers."""
    run("sms_all", "marked", sanitize=sanitize, FAKE_QUEUE="1")


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_order_with_limits_that_change(seed: int, sanitize: str) -> None:
    """One thread, which sets the limits itself: it is known where each kernel has to run."""
    run("sms_all", "order", seed, STEPS, sanitize=sanitize)


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_order_in_several_threads(seed: int, sanitize: str) -> None:
    """Limits change, and markers are placed, in a thread of their own. All that was launched runs, and is counted."""
    run("sms_all", "threads", seed, STEPS // 3, sanitize=sanitize)


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_order_in_several_threads_that_share_streams(seed: int, sanitize: str) -> None:
    """The work of each thread is in order, whatever the others put into the same streams in between."""
    run("sms_all", "shared", seed, STEPS // 3, sanitize=sanitize)


def calls(case: str, log: Path) -> Counter[str]:
    """Return the calls of the driver that a case makes."""
    run("sms_all", case, FAKE_LOG=str(log))
    return Counter(line.split()[0] for line in log.read_text(encoding="utf-8").splitlines())


def test_without_a_limit_a_launch_makes_no_more_calls(tmp_path: Path) -> None:
    """Of each launch there is itself, and the question for the current context, which is that of the gate."""
    found = calls("plain", tmp_path / "plain")
    assert found["cuLaunchKernel"] == LAUNCHES
    each = {name: count for name, count in found.items() if count >= LAUNCHES // 2}
    assert each == {"cuLaunchKernel": LAUNCHES, "cuCtxGetCurrent": LAUNCHES + 1}
    assert not {name for name in found if "Green" in name or "DevResource" in name or "Event" in name}


@pytest.mark.parametrize("case", ["lifted", "away"])
def test_a_kernel_behind_another_makes_none_either(case: str, tmp_path: Path) -> None:
    """After a limit that was lifted, and under one: a stream goes out once, and home once."""
    found = calls(case, tmp_path / case)
    each = {name: count for name, count in found.items() if count >= LAUNCHES // 2}
    assert each == {"cuLaunchKernel": LAUNCHES, "cuCtxGetCurrent": LAUNCHES + 1}
    assert (found["cuEventRecord"], found["cuStreamWaitEvent"], found["cuGreenCtxCreate"]) == (2, 2, 1)


@pytest.fixture
def limiting(tmp_path: Path) -> Iterator[TurningDaemon]:
    """A daemon that says on which groups kernels run."""
    server = TurningDaemon(tmp_path / "socket")
    yield server
    server.close()


def limit(server: TurningDaemon, groups: int, ask: int = 0) -> tuple[int, tuple[int, ...]]:
    """Tell a program its groups; return the status, and what it says of the GPU."""
    server.say(Op.SMS, (groups, ask))
    answer = server.answers.get(timeout=60)
    assert answer.op == Op.SMS
    return answer.status, answer.args[:3]


def test_a_daemon_sets_changes_and_lifts_a_limit(tmp_path: Path, limiting: TurningDaemon) -> None:
    """It is told how the SMs are split, and from its page how many launches ran where."""
    with running("turns", tmp_path=tmp_path, extra={"GGROUP_SOCKET": str(limiting.path)}) as program:

        def launched() -> int:
            program.go()
            return program.hears("launched")

        program.hears("ready")
        eventually(lambda: bool(limiting.managed), lambda: "it does not connect")
        assert limit(limiting, 0, ask=1) == (0, (16, 8, 132))
        assert launched() > 0
        page = limiting.pages[-1]
        assert page.placed(0) == (0, 0)
        assert limit(limiting, 0xFF)[0] == 0
        eventually(lambda: launched() > 0 and page.placed(0)[0] > 0, lambda: f"{page.placed(0)}")
        assert limit(limiting, 1 << 16)[0] == -errno.EINVAL
        assert limit(limiting, 1 << (GROUPS_MOST - 1))[0] == -errno.EINVAL
        assert limit(limiting, 0xF00)[0] == 0
        assert launched() > 0
        assert limit(limiting, 0)[0] == 0
        launched()
        before = page.placed(0)
        assert launched() > 0
        assert page.placed(0) == before
        assert limit(limiting, 0xFF)[0] == 0
        launched()
        assert program.process.stdin is not None
        program.process.stdin.write("end\n")  # it checks what its kernels have added up
        program.process.stdin.flush()
        program.ends()


def test_a_driver_without_them_says_so(tmp_path: Path, limiting: TurningDaemon) -> None:
    """No limit holds, and to lift one is no error."""
    extra = {"GGROUP_SOCKET": str(limiting.path), "FAKE_GREEN": "0"}
    with running("turns", tmp_path=tmp_path, extra=extra):
        eventually(lambda: bool(limiting.managed), lambda: "it does not connect")
        assert limit(limiting, 0, ask=1) == (0, (0, 0, 0))
        assert limit(limiting, 0xFF)[0] == -errno.EOPNOTSUPP
        assert limit(limiting, 0)[0] == 0


def test_a_daemon_that_grants_all_knows_nothing_of_it(tmp_path: Path) -> None:
    """A program of a daemon that never says a word of SMs runs on all of them."""
    with daemon(tmp_path) as server:
        run("sms_all", "plain", GGROUP_SOCKET=str(server.path))
        assert server.pages[-1].placed(0) == (0, 0)
