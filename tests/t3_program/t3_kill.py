"""Level 3: a signal goes to the process that was on the screen of `top`, or to none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.process import procfs
from ggroupfs.commands.kill import seize, send
from ggroupfs.errors import UsageError
from ggroupfs.view.figures import Figures
from ggroupfs.view.snapshot import NOT_KNOWN, ProcessUse
from tests.support.mounted import eventually


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child
        child.kill()


def planted(tree: Path, pid: int, start: int) -> ProcessUse:
    """Plant a process in a tree of plain files; return it as a screen shows it."""
    group = tree / str(pid) / "0"
    group.mkdir(parents=True)
    (group / "gcgroup.record").write_text(f"gpu 0\nprocess {pid}\nstart {start}\n")
    return ProcessUse(pid, group.parent.stat().st_ino, "sleep", "/", 0, Figures(), user="ann")


@pytest.mark.parametrize(
    ("answer", "number"),
    [("yes", 15), ("Y", 15), ("KILL", 9), ("sigint", 2), ("USR1", signal.SIGUSR1)],
)
def test_a_signal(process: subprocess.Popen[bytes], tmp_path: Path, answer: str, number: int) -> None:
    use = planted(tmp_path, process.pid, procfs.stat(process.pid).start)
    words = send(seize(use), tmp_path, use.directory, answer)
    assert words == f"{process.pid} sleep of ann: {signal.Signals(number).name} was sent"
    assert process.wait() == -number


@pytest.mark.parametrize("answer", ["no", "9", "yes please", "RTMIN+1", "SIG"])
def test_no_answer(process: subprocess.Popen[bytes], tmp_path: Path, answer: str) -> None:
    use = planted(tmp_path, process.pid, procfs.stat(process.pid).start)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError, match="nothing was sent"):
        send(seize(use), tmp_path, use.directory, answer)
    assert len(os.listdir("/proc/self/fd")) == before, "the pidfd is closed"
    assert process.poll() is None


def test_a_pid_that_was_recycled_before_the_question(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The tree shows an earlier process with that pid."""
    use = planted(tmp_path, process.pid, procfs.stat(process.pid).start - 1)
    with pytest.raises(RuntimeError, match="that pid is another process's now: nothing was sent"):
        send(seize(use), tmp_path, use.directory, "KILL")
    assert process.poll() is None


def test_a_directory_that_is_another_process_s(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    use = planted(tmp_path, process.pid, procfs.stat(process.pid).start)
    victim = seize(use)
    (tmp_path / str(process.pid)).rename(tmp_path / "before")
    planted(tmp_path, process.pid, procfs.stat(process.pid).start)
    with pytest.raises(RuntimeError, match="has ended: nothing was sent"):
        send(victim, tmp_path, use.directory, "KILL")
    assert process.poll() is None


def test_a_process_that_ends_while_it_is_asked(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    use = planted(tmp_path, process.pid, procfs.stat(process.pid).start)
    victim = seize(use)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RuntimeError, match="has ended: nothing was sent"):
        send(victim, tmp_path, use.directory, "yes")
    process.wait()
    with pytest.raises(RuntimeError, match="has ended"):
        seize(use)


def test_a_daemon_that_does_not_say_when_it_started(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    use = planted(tmp_path, process.pid, 0)
    (tmp_path / use.directory / "gcgroup.record").write_text("gpu 0\n")
    with pytest.raises(RuntimeError, match="nothing was sent"):
        send(seize(use), tmp_path, use.directory, "yes")
    assert process.poll() is None


def test_a_pid_of_another_namespace(process: subprocess.Popen[bytes]) -> None:
    with pytest.raises(RuntimeError, match="the tree is of another pid namespace"):
        seize(ProcessUse(process.pid, 1, NOT_KNOWN, NOT_KNOWN, 0, Figures()))


AS_ANOTHER = """\
import os, sys
from ggroupfs.commands.kill import seize
from ggroupfs.view.figures import Figures
from ggroupfs.view.snapshot import ProcessUse
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    seize(ProcessUse(int(sys.argv[1]), 1, "sleep", "/", 0, Figures(), user="root"))
except RuntimeError as error:
    print(error)
"""


def test_a_user_that_may_not(process: subprocess.Popen[bytes]) -> None:
    """The signal is refused before the user is asked to confirm."""
    words = [sys.executable, "-c", AS_ANOTHER, str(process.pid)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"{process.pid} sleep of root: no signal can be sent to it: Operation not permitted\n"
    eventually(lambda: process.poll() is None, "it runs on")
