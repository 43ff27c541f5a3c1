"""The guard, a process beside a daemon: the signals that reach it, those that do not, and its files."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from ggroupfs.daemon import guard
from tests.support.mounted import SECONDS, eventually

DAEMON = """
import ctypes, sys, threading, time
from ggroupfs.daemon import guard
journal = open("/dev/zero")
with guard.beside(int(sys.argv[1])):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    print("ready", flush=True)
    if sys.stdin.readline() == "leave\\n":
        ctypes.CDLL(None).pthread_exit(None)  # of the main thread alone
"""


@attrs.define
class Guarded:
    """A program with a guard."""

    program: subprocess.Popen[str]
    pid: int
    """Pid of the guard."""
    pidfd: int
    """The guard itself."""
    file: Path
    """Stand-in for the kernel's file by which a connection is aborted."""

    @property
    def written(self) -> str:
        """What the guard has written."""
        return self.file.read_text()

    def tell(self, word: str) -> None:
        """Send the program a line."""
        assert self.program.stdin is not None
        self.program.stdin.write(f"{word}\n")
        self.program.stdin.flush()

    def guard_ends(self, seconds: float = SECONDS) -> bool:
        """Return whether the guard ends within that time."""
        return bool(select.select([self.pidfd], [], [], seconds)[0])


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """Yield a program; neither it nor its guard is left in the end."""
    file = tmp_path / "abort"
    with contextlib.ExitStack() as stack:
        abort = stack.enter_context(file.open("w"))
        words = [sys.executable, "-c", DAEMON, str(abort.fileno())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        program = stack.enter_context(
            subprocess.Popen(words, text=True, pass_fds=[abort.fileno()], **pipes)  # type: ignore[call-overload]
        )
        stack.callback(program.kill)
        assert program.stdout.readline() == "ready\n"
        [pid] = map(int, Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split())
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        found = Guarded(program, pid, pidfd, file)
        yield found
        program.kill()
        assert found.guard_ends()


def test_a_program_that_is_killed(guarded: Guarded) -> None:
    guarded.program.kill()
    assert guarded.guard_ends()
    assert guarded.written == "1\n"


def test_a_main_thread_that_ends_before_another(guarded: Guarded) -> None:
    """A killed daemon's main thread does so where another thread waits in the kernel."""
    guarded.tell("leave")
    assert guarded.guard_ends()
    assert guarded.written == "1\n"
    assert guarded.program.poll() is None, "its other thread is still there"


def test_a_clean_end(guarded: Guarded) -> None:
    guarded.tell("end")
    assert guarded.program.wait(SECONDS) == 0
    assert guarded.guard_ends(0)
    assert guarded.written == ""


def test_a_signal_to_each_process_of_a_service_or_a_terminal(guarded: Guarded) -> None:
    """A signal that stops or ends the daemon by its group does not reach the guard, which then does its work."""
    assert os.getsid(guarded.pid) == guarded.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGUSR2):
        signal.pidfd_send_signal(guarded.pidfd, number)
    assert not guarded.guard_ends(0.1)
    assert guarded.written == ""
    guarded.program.kill()
    assert guarded.guard_ends()
    assert guarded.written == "1\n"


def test_a_guard_has_one_file_and_no_other(guarded: Guarded) -> None:
    """A further open file would hold a lock, or the memory of a program that is gone."""

    def files() -> set[str]:
        return {os.readlink(entry) for entry in Path(f"/proc/{guarded.pid}/fd").iterdir()}

    eventually(lambda: files() == {os.devnull, os.fspath(guarded.file)}, "the pipe is closed, once it has told")
    assert os.readlink(f"/proc/{guarded.pid}/cwd") == "/"


def test_a_guard_that_is_gone(guarded: Guarded) -> None:
    """The program ends as it would without one."""
    signal.pidfd_send_signal(guarded.pidfd, signal.SIGKILL)
    guarded.tell("end")
    assert guarded.program.wait(SECONDS) == 0


@pytest.mark.logs("no guard: .*: `ggroupfs umount --force` ends ")
@pytest.mark.parametrize("program", ["/nonexistent", "/bin/false"])
def test_no_guard_to_be_had(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says so, and what to do, and the daemon serves all the same."""
    monkeypatch.setattr(sys, "executable", program)
    served = False
    with open(os.devnull, "w") as abort, guard.beside(abort.fileno()):
        served = True
    assert served
