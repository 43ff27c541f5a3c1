"""What bounds a cell of tests/bench/papers, with real processes: its time, and the end of what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.bench.papers import bounds
from tests.bench.papers.bounds import Overdue
from tests.support.mounted import alive, eventually, mounted

ROOT = Path(__file__).resolve().parent.parent.parent
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
"""A program that no SIGTERM ends; it says when."""
ORPHAN = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
"""
"""A program that ends before its child does."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Waits of tests; and no process of one is left."""
    monkeypatch.setattr(bounds, "TERM_S", 2.0)
    monkeypatch.setattr(bounds, "KILL_S", 20.0)
    before = bounds.descendants()
    yield
    assert bounds.descendants().keys() <= before.keys()


def sleeping(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*(words or ("sleep", "600"))], stdout=subprocess.PIPE, text=True)


def test_what_outlives_a_cell_is_ended_by_pid_and_waited_for() -> None:
    with sleeping() as before:
        with bounds.swept() as told:
            run = sleeping()
        assert told == [f"sleep ({run.pid}) outlived its cell: ended by SIGTERM"]
        assert not alive(run.pid)
        assert before.poll() is None, "it was there before"
        before.kill()
    with run:
        assert run.wait() is not None


def test_a_program_that_hears_no_sigterm_is_killed() -> None:
    with bounds.swept() as told:
        run = sleeping(sys.executable, "-c", DEAF)
        assert run.stdout is not None
        run.stdout.readline()
    (line,) = told
    assert line.endswith("outlived its cell: ended by SIGKILL")
    assert not alive(run.pid)
    with run:
        run.wait()


def test_a_cell_that_leaves_nothing_tells_nothing() -> None:
    with bounds.swept() as told, sleeping() as run:
        run.kill()
    assert told == []


SWEEPS = """
import subprocess, sys
from tests.bench.papers import bounds
bounds.adopt()
with bounds.swept() as told:
    done = subprocess.run([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(done.stdout.strip(), *told, sep="\\n")
"""
"""A runner, in a process of its own, since it becomes the parent of orphans for good."""


def runner(text: str, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_orphan_is_ended_too() -> None:
    pid, *told = runner(SWEEPS, ORPHAN)
    assert told == [f"sleep ({pid}) outlived its cell: ended by SIGTERM"]
    assert not alive(int(pid))


def test_a_daemon_that_is_left_unmounts() -> None:
    """It is ended as an operator would, and what a killed one leaves is unmounted."""
    trees = bounds.trees()
    for number in (signal.SIGTERM, signal.SIGKILL):
        folder = Path(f"/tmp/ggroup-left-{os.getpid()}-{number}")
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            with bounds.swept() as told:
                words = [sys.executable, "-m", "ggroupfs", "mount", "-f", "--gpu", "soft", os.fspath(folder)]
                daemon = stack.enter_context(sleeping(*words))
                assert daemon.stdout is not None
                assert daemon.stdout.readline() == "ready\n"
                if number == signal.SIGKILL:
                    daemon.kill()
                    daemon.wait()
            assert all(line.endswith("ended by SIGTERM") for line in told[:-1])
            assert told[-1].endswith("ended by SIGTERM" if number == signal.SIGTERM else f"{folder} was still mounted")
            assert bounds.trees() == trees
            daemon.wait()
        if folder.exists():
            folder.rmdir()


def test_pages_of_programs_are_removed() -> None:
    with bounds.swept():
        page = bounds.PAGES / f"{bounds.PAGE}{os.getpid()}-left"
        page.touch()
        other = bounds.PAGES / f"{bounds.PAGE}1-not-ours"
        other.touch()
    assert not page.exists()
    assert other.exists()
    other.unlink()


def hang(started: list[subprocess.Popen[str]], told: list[str]) -> None:
    """A cell that waits for a program."""
    try:
        with bounds.bounded(0.3) as found:
            started.append(sleeping())
            started[0].wait()
    finally:
        told += found


def test_a_cell_that_hangs_is_broken_off_and_what_it_started_ends() -> None:
    started, told = list[subprocess.Popen[str]](), list[str]()
    with pytest.raises(Overdue, match="not over after 0 s"):
        hang(started, told)
    (run,) = started
    assert told == [f"sleep ({run.pid}) outlived its cell: ended by SIGTERM"]
    with run:
        run.wait()


def cling(started: list[subprocess.Popen[str]]) -> None:
    """A cell that waits for a deaf program, and once more on its way out."""
    with bounds.timed(600.0):
        started.append(sleeping(sys.executable, "-c", DEAF))
        assert started[0].stdout is not None
        started[0].stdout.readline()
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.2)  # it is over its time now, and again soon
        try:
            started[0].wait()
        finally:
            with contextlib.suppress(Exception):
                started[0].wait()


def test_what_waits_on_the_way_out_is_ended_as_well() -> None:
    """Contexts of programs wait for their end, and ignore errors: the second time the programs are killed."""
    started = list[subprocess.Popen[str]]()
    with pytest.raises(Overdue):
        cling(started)
    with started[0] as run:
        assert run.wait() == -signal.SIGKILL


def test_a_cell_in_time_leaves_the_alarm_as_it_was() -> None:
    """A test's own time limit is one."""
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    with bounds.bounded(600.0):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 500
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


ENDS = """
import subprocess, sys
from tests.bench.papers import bounds
bounds.on_terminate()
try:
    with bounds.swept():
        run = subprocess.Popen(["sleep", "600"])
        print(run.pid, flush=True)
        run.wait()
except SystemExit as error:
    print(error.code, flush=True)
"""


def test_a_session_that_is_told_to_end_ends_what_it_started() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDS], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        begin = time.monotonic()
        run.terminate()
        assert run.stdout.readline() == f"{128 + signal.SIGTERM}\n"
        assert run.wait(60) == 0
    assert not alive(pid)
    assert time.monotonic() - begin < 60


def names(lines: Sequence[str]) -> list[str]:
    return [line.partition(" ")[0] for line in lines]


def test_a_tree_whose_context_ends_it_is_no_finding(tmp_path: Path) -> None:
    with bounds.bounded(120.0) as told, mounted(tmp_path) as mount:
        eventually((mount / "gpus").exists, "it is mounted")
    assert names(told) == []
