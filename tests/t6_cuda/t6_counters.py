"""Kernels submitted and finished, on the page shared with the daemon: the counts are exact for every way to launch."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from . import harness
from .harness import GrantingDaemon, Program, daemon, eventually, running

SANITIZERS = ["", "thread", "address,undefined"]


def all_finished(server: GrantingDaemon, number: int, gpu: int = 0) -> float:
    """Wait until `number` kernels are submitted and finished; return the seconds that took."""
    return eventually(
        lambda: server.counts(gpu) == (number, number), lambda: f"{server.counts(gpu)}, not {number} on GPU {gpu}"
    )


def finishes(case: str, rounds: int, tmp_path: Path, sanitize: str, **extra: str) -> list[float]:
    """Run a case that reports `rounds` times how many kernels it launched, all of which have run by then."""
    took = []
    with daemon(tmp_path) as server:
        environment = {"GGROUP_SOCKET": str(server.path), "GGROUP_CUDA_LOG": "1", **extra}
        with running("count_all", case, tmp_path=tmp_path, sanitize=sanitize, extra=environment) as program:
            for _ in range(rounds):
                took.append(all_finished(server, program.hears("launched")))
                program.go()
            program.ends()
    return took


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize(
    ("case", "rounds"),
    [("plain", 3), ("ways", 1), ("others", 1), ("streams", 3), ("threads", 1), ("graphs", 4), ("contexts", 3)],
)
def test_exact(case: str, rounds: int, sanitize: str, tmp_path: Path) -> None:
    """Each case is a function of count_all.c."""
    finishes(case, rounds, tmp_path, sanitize)


@pytest.mark.parametrize(("case", "several"), [("plain", False), ("graphs", True)])
def test_a_graph_is_one_launch(case: str, several: bool, tmp_path: Path) -> None:
    """A graph counts as one launch however many kernels it has; so does a graph of one kernel."""
    with daemon(tmp_path) as server:
        environment = {"GGROUP_SOCKET": str(server.path)}
        with running("count_all", case, tmp_path=tmp_path, extra=environment) as program:
            number = program.hears("launched")
            all_finished(server, number)
            launches = sum(page.launches(0) for page in list(server.pages))
            assert 0 < launches < number if several else launches == number


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("mode", ["global", "thread", "relaxed"])
def test_capture(mode: str, sanitize: str, tmp_path: Path) -> None:
    """Captured launches are not counted, and captures in every mode work as without the library."""
    with daemon(tmp_path) as server:
        environment = {"GGROUP_SOCKET": str(server.path)}
        with running(
            "count_all", f"capture-{mode}", tmp_path=tmp_path, sanitize=sanitize, extra=environment
        ) as program:
            all_finished(server, program.hears("launched"))
            program.go()
            submitted = program.hears("submitted")
            # Work before the capture may be known to be finished only after it.
            eventually(lambda: server.counts()[1] >= submitted - 2, lambda: f"{server.counts()}, of {submitted}")
            assert server.counts()[0] == submitted
            program.go()
            all_finished(server, program.hears("launched"))
            program.go()
            program.ends()


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_finished_is_what_has_run(sanitize: str, tmp_path: Path) -> None:
    """A kernel that does not end holds up the count of its own stream only."""
    with daemon(tmp_path) as server:
        environment = {"GGROUP_SOCKET": str(server.path)}
        with running("count_all", "held", tmp_path=tmp_path, sanitize=sanitize, extra=environment) as program:
            submitted = program.hears("submitted")
            eventually(lambda: server.counts() == (submitted, 1), lambda: f"{server.counts()}, of {submitted}")
            program.go()
            submitted = program.hears("submitted")
            eventually(lambda: server.counts() == (submitted, 2), lambda: f"{server.counts()}, of {submitted}")
            program.go()
            all_finished(server, program.hears("launched"))
            program.go()
            program.ends()


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_the_time_with_kernels_pending(sanitize: str, tmp_path: Path) -> None:
    """The time advances with the clock while kernels are pending, whenever it is read, and then stands still."""

    def now_us() -> int:
        return time.monotonic_ns() // 1000

    with daemon(tmp_path) as server:
        environment = {"GGROUP_SOCKET": str(server.path)}
        began = now_us()
        with running("count_all", "held", tmp_path=tmp_path, sanitize=sanitize, extra=environment) as program:
            submitted = program.hears("submitted")
            eventually(lambda: server.counts() == (submitted, 1), lambda: f"{server.counts()}, of {submitted}")
            (page,), seen = server.pages, now_us()
            first, second = page.worked_us(0, seen), page.worked_us(0, seen + 1_000_000)
            assert first is not None
            assert 0 < first <= seen - began
            assert second == first + 1_000_000
            program.go()
            program.hears("submitted")
            program.go()
            all_finished(server, program.hears("launched"))
            ended, worked = now_us(), page.worked_us(0, now_us())
            assert worked == page.worked_us(0, ended + 1_000_000)
            assert worked is not None
            assert first <= worked <= ended - began
            program.go()
            program.ends()


def test_soon_after_idle(tmp_path: Path) -> None:
    """The end is known within milliseconds: markers are placed and looked at every 2 ms; the limit allows for a busy
    machine."""
    took = finishes("plain", 3, tmp_path, "")
    assert min(took) < 0.05, took


def test_each_gpu_has_its_own(tmp_path: Path) -> None:
    """The counts of two GPUs are separate."""
    with daemon(tmp_path) as server:
        environment = {"GGROUP_SOCKET": str(server.path), "FAKE_DEVICES": "2"}
        with running("count_all", "devices", tmp_path=tmp_path, extra=environment) as program:
            all_finished(server, program.hears("launched"), 0)
            program.go()
            all_finished(server, program.hears("launched"), 1)
            assert server.counts(0) == (1, 1)
            program.go()
            program.ends()


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_a_child_counts_for_itself(sanitize: str, tmp_path: Path) -> None:
    """A child has its own connection and page."""
    with daemon(tmp_path) as server:
        environment = {"GGROUP_SOCKET": str(server.path)}
        with running("count_all", "fork", tmp_path=tmp_path, sanitize=sanitize, extra=environment) as program:
            all_finished(server, program.hears("launched"))
            assert sorted(page.counts(0) for page in server.pages) == [(5, 5), (10, 10)]
            program.go()
            program.ends()


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuEventQuery"])
@pytest.mark.parametrize("nth", [1, 2, 5, 0])
def test_faults_in_our_own_calls(call: str, nth: int, tmp_path: Path) -> None:
    """The program notices nothing, and nothing is left counted as unfinished."""
    assert finishes("plain", 3, tmp_path, "", FAKE_FAIL=f"{call}:{nth}:2")


def late(program: Program, server: GrantingDaemon) -> None:
    """Have the daemon go away and come back: earlier counts appear on the new page."""
    number = program.hears("launched")
    eventually(lambda: server.counts() == (number, number), lambda: f"{server.counts()}, of {number}")
    program.go()


def test_a_new_daemon_gets_the_whole_count(tmp_path: Path) -> None:
    """Earlier counts are carried over to a new page."""
    with daemon(tmp_path) as server:
        environment = {"GGROUP_SOCKET": str(server.path)}
        with running("count_all", "plain", tmp_path=tmp_path, extra=environment) as program:
            late(program, server)
            server.close()
            with daemon(tmp_path) as again:
                late(program, again)
                late(program, again)
                program.ends()


def test_without_a_daemon(tmp_path: Path) -> None:
    """There is no page and no thread, and the program runs."""
    with running("count_all", "plain", tmp_path=tmp_path) as program:
        for _ in range(3):
            assert program.hears("launched") > 0
            assert len(list(Path(f"/proc/{program.process.pid}/task").iterdir())) <= 2  # its own, and one of the double
            program.go()
        program.ends()


def test_a_page_that_can_be_cut_off_is_not_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the daemon's place at the socket cannot end another program with SIGBUS."""

    class Unsealed:
        def __init__(self) -> None:
            self.descriptor = os.memfd_create("impostor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, 4096)

        def close(self) -> None:
            os.close(self.descriptor)

    monkeypatch.setattr(harness, "CounterPage", Unsealed)
    with (
        daemon(tmp_path) as server,
        running("count_all", "plain", tmp_path=tmp_path, extra={"GGROUP_SOCKET": str(server.path)}) as program,
    ):
        for _ in range(3):
            program.hears("launched")
            os.ftruncate(server.pages[0].descriptor, 0)
            program.go()
        program.ends()
