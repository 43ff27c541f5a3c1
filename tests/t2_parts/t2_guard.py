"""The guard, a process beside a daemon: the signals that reach it, those that do not, and its files."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest

from backend.nvidia.waiting import RELEASE
from ggroupfs.daemon import guard
from tests.support.mounted import SECONDS, eventually

DAEMON = """
import ctypes, sys, threading, time
from pathlib import Path
from ggroupfs.daemon import guard
journal = open("/dev/zero")
abort, memory = (int(word) if word != "-" else None for word in sys.argv[1:])
with guard.beside(abort, None if memory is None else guard.Left("stand_in", memory, Path("one.journal"))):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    print("ready", flush=True)
    if sys.stdin.readline() == "leave\\n":
        ctypes.CDLL(None).pthread_exit(None)  # of the main thread alone
"""


STAND_IN = """
import os, select
def main(memory, daemon, journal):
    poller = select.poll()
    poller.register(daemon, select.POLLIN)
    if poller.poll(60_000):
        os.write(memory, f"put back, beside {journal}".encode())
"""
"""A module that says in the memory that it was called, once the daemon has ended."""
PUT_BACK = f"put back, beside {os.path.abspath('one.journal')}"
"""What it says."""


FAILS = """
import threading, time
def main(*_):
    threading.Thread(target=time.sleep, args=(600,)).start()
    1 / 0
"""
"""A module that fails, with a thread that is held up."""


LOADS = """
import sys
sys.path += sys.argv[2].split(":")
__import__(sys.argv[1])
assert "trio" not in sys.modules
"""
"""A program that loads a module as the guard does."""


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
    memory: Path
    """What the daemon leaves for its guard."""

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


@contextlib.contextmanager
def beside(folder: Path, *, aborts: bool = True, leaves: bool = False) -> Iterator[Guarded]:
    """Yield a program; neither it nor its guard is left in the end. `leaves`: its guard has something to put back."""
    file, memory = folder / "abort", folder / "memory"
    (folder / "stand_in.py").write_text(STAND_IN)
    with contextlib.ExitStack() as stack:
        given = [stack.enter_context(one.open("w")).fileno() for one in (file, memory)]
        words = [str(fd) if given_ else "-" for fd, given_ in zip(given, (aborts, leaves), strict=True)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        program = stack.enter_context(
            subprocess.Popen(  # type: ignore[call-overload]
                [sys.executable, "-c", DAEMON, *words],
                text=True,
                pass_fds=given,
                env=os.environ | {"PYTHONPATH": os.fspath(folder)},
                **pipes,
            )
        )
        stack.callback(program.kill)
        assert program.stdout.readline() == "ready\n"
        [pid] = map(int, Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split())
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        found = Guarded(program, pid, pidfd, file, memory)
        yield found
        program.kill()
        assert found.guard_ends()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """Yield a program whose guard has nothing to put back."""
    with beside(tmp_path) as found:
        yield found


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


@pytest.mark.parametrize("aborts", [True, False])
def test_what_a_killed_program_leaves(tmp_path: Path, aborts: bool) -> None:
    """The guard puts it back, whether or not there is a connection to abort."""
    with beside(tmp_path, aborts=aborts, leaves=True) as guarded:
        guarded.program.kill()
        assert guarded.guard_ends()
        assert guarded.memory.read_text() == PUT_BACK
        assert guarded.written == ("1\n" if aborts else "")


def test_what_a_program_leaves_that_ends(tmp_path: Path) -> None:
    """It has put back everything itself, or left it to the next one."""
    with beside(tmp_path, leaves=True) as guarded:
        guarded.tell("end")
        assert guarded.program.wait(SECONDS) == 0
        assert guarded.guard_ends(0)
        assert guarded.memory.read_text() == guarded.written == ""


def test_what_it_leaves_where_the_abort_fails(tmp_path: Path) -> None:
    """It is put back all the same."""
    (tmp_path / "abort").symlink_to("/dev/full")
    with beside(tmp_path, leaves=True) as guarded:
        guarded.program.kill()
        assert guarded.guard_ends()
        assert guarded.memory.read_text() == PUT_BACK


def test_what_puts_programs_back_and_fails(tmp_path: Path) -> None:
    """The guard ends all the same, whatever thread is held up."""
    with beside(tmp_path, leaves=True) as guarded:
        (tmp_path / "stand_in.py").write_text(FAILS)
        guarded.program.kill()
        assert guarded.guard_ends()


def test_what_puts_programs_back_loads_little() -> None:
    """Programs stand still meanwhile: it is found in an interpreter without a site, and has no event loop."""
    words = [sys.executable, "-I", "-S", "-c", LOADS, RELEASE, guard.path()]
    subprocess.run(words, check=True)


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


@pytest.mark.parametrize("leaves", [False, True])
def test_a_guard_has_its_files_and_no_other(tmp_path: Path, leaves: bool) -> None:
    """A further open file would hold a lock, or the memory of a program that is gone."""
    with beside(tmp_path, leaves=leaves) as guarded:

        def files() -> set[str]:
            return {os.readlink(entry) for entry in Path(f"/proc/{guarded.pid}/fd").iterdir()}

        own = {os.devnull, os.fspath(guarded.file)}
        if leaves:
            own |= {os.fspath(guarded.memory), "anon_inode:[pidfd]"}
        eventually(lambda: files() == own, "the pipe is closed, once it has told")
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


@pytest.mark.logs("programs that wait stand still if the daemon is killed: no pidfd: Too many open files")
def test_a_daemon_without_a_pidfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection has its guard all the same."""
    started: list[list[str]] = []

    class Seen(subprocess.Popen[bytes]):
        def __init__(self, words: list[str], **how: Any) -> None:
            started.append(words)
            super().__init__(words, **how)

    monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    monkeypatch.setattr(subprocess, "Popen", Seen)
    with (tmp_path / "abort").open("w") as abort, guard.beside(abort.fileno(), guard.Left("stand_in", abort.fileno())):
        assert [words[-1] for words in started] == [str(abort.fileno())]


@pytest.mark.logs("no guard: Function not implemented: ")
def test_without_a_pidfd_and_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to do for a guard."""
    monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=AssertionError))
    with guard.beside(None, guard.Left("stand_in", 0)):
        pass
