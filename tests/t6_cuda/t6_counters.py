"""Kernels submitted and finished, on the page that the daemon shares: exact, however they are launched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from . import harness
from .harness import GrantingDaemon, Program, daemon, eventually, running

SANITIZERS = ["", "thread", "address,undefined"]


def all_finished(server: GrantingDaemon, number: int, gpu: int = 0) -> float:
    """Waits until so many are submitted, and as many finished; the seconds that took."""
    return eventually(
        lambda: server.counts(gpu) == (number, number), lambda: f"{server.counts(gpu)}, not {number} on GPU {gpu}"
    )


def finishes(case: str, rounds: int, tmp_path: Path, sanitize: str, **extra: str) -> list[float]:
    """Runs a case that says `rounds` times what it launched, all of which has run by then."""
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


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("mode", ["global", "thread", "relaxed"])
def test_capture(mode: str, sanitize: str, tmp_path: Path) -> None:
    """Captured launches are none; and the captures, in whichever mode, are as if we were not there."""
    with daemon(tmp_path) as server:
        environment = {"GGROUP_SOCKET": str(server.path)}
        with running(
            "count_all", f"capture-{mode}", tmp_path=tmp_path, sanitize=sanitize, extra=environment
        ) as program:
            all_finished(server, program.hears("launched"))
            program.go()
            submitted = program.hears("submitted")
            # What this stream had before the capture may be known to be finished only after it.
            eventually(lambda: server.counts()[1] >= submitted - 2, lambda: f"{server.counts()}, of {submitted}")
            assert server.counts()[0] == submitted
            program.go()
            all_finished(server, program.hears("launched"))
            program.go()
            program.ends()


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_finished_is_what_has_run(sanitize: str, tmp_path: Path) -> None:
    """A kernel that does not end holds up its own stream's count, and no other's."""
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


def test_soon_after_idle(tmp_path: Path) -> None:
    """Within milliseconds: markers are placed at most every 2 ms, and looked at as often; this machine may be busy."""
    took = finishes("plain", 3, tmp_path, "")
    assert min(took) < 0.05, took


def test_each_gpu_has_its_own(tmp_path: Path) -> None:
    """Two of them."""
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
    """On a connection, and a page, of its own."""
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
    """The program notices nothing, and nothing stays counted as unfinished for ever."""
    assert finishes("plain", 3, tmp_path, "", FAKE_FAIL=f"{call}:{nth}:2")


def late(program: Program, server: GrantingDaemon) -> None:
    """The daemon went away and comes again: what was counted before is on the new page."""
    number = program.hears("launched")
    eventually(lambda: server.counts() == (number, number), lambda: f"{server.counts()}, of {number}")
    program.go()


def test_a_new_daemon_gets_the_whole_count(tmp_path: Path) -> None:
    """On a new page, what was counted before is carried over."""
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
    """There is no page, and no thread; the program runs."""
    with running("count_all", "plain", tmp_path=tmp_path) as program:
        for _ in range(3):
            assert program.hears("launched") > 0
            assert len(list(Path(f"/proc/{program.process.pid}/task").iterdir())) <= 2  # it, and the double's stream
            program.go()
        program.ends()


def test_a_page_that_can_be_cut_off_is_not_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sits at the socket instead of the daemon cannot end a program by it (SIGBUS)."""

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
