"""The control daemon of one space: ``nvidia-cuda-mps-control -f``, started as the user of the space.

It is a child of this process, in directories of its own, and is known by its pidfd. After an upgrade it is still a
child; a daemon that comes after one that was killed finds it by its record. It ends by its own command ``quit``, for
which it waits until its last client has ended: nothing here ends a program that runs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import trio

from backend.common.errors import fail
from backend.common.threads import in_a_thread
from backend.process import procfs
from backend.process.identity import Process, has_exited
from backend.process.looks import identified, verify
from backend.space.space import Space

log = logging.getLogger(__name__)

PROGRAM = "nvidia-cuda-mps-control"
"""The name of the program, as NVIDIA's packages install it."""
MISSING = f"there is no {PROGRAM}"
"""Reason why there are no servers, in words."""
PLACES = ("/usr/bin", "/usr/local/bin", "/usr/local/nvidia/bin")
"""Directories in which it is looked for."""
START_S = 10.0
"""Seconds until it listens, at most; half a second is usual."""
LOOK_S = 0.02
"""Seconds between two looks whether it listens."""
ASK_S = 5.0
"""Seconds for the answer to a command."""
WORDS = 4096
"""Bytes of what it says as it ends that are passed on to the log, at most."""
NO_GROUP = 65534
"""Group of a user that the machine does not know."""


_LEFT: list[subprocess.Popen[bytes]] = []
"""Children that go on without this daemon: Python complains of one that is dropped while it runs."""


def find(places: Sequence[str] = PLACES) -> Path | None:
    """Return the program; None where it is not installed. One that others than root could replace is none."""
    for place in places:
        path = Path(place, PROGRAM)
        with contextlib.suppress(OSError):
            found = path.stat()
            is_ours = found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022
            if stat.S_ISREG(found.st_mode) and found.st_mode & 0o111 and is_ours:
                return path
    return None


def _is_over(pid: int) -> bool:
    """Return whether a process has ended, whether or not its parent knows. It does not wait for it."""
    try:
        return procfs.status(pid).has_ended
    except OSError:
        return True


class Control:
    """One control daemon, and its servers."""

    def __init__(self, program: Path, directory: Path, space: Space) -> None:
        """`directory` is that of all spaces of the tree."""
        self.space = space
        self.process: Process | None = None
        """The running control daemon; None while there is none."""
        self.path = directory / space.name
        """The directory of the space, with those that its clients and servers use."""
        self._program = program
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._words = -1  # the read end of what it says; -1 where this daemon did not start it

    @property
    def pipe(self) -> Path:
        """The directory by which clients find it."""
        return self.path / "pipe"

    def environment(self) -> Mapping[str, str]:
        """Return the environment of the program, which has nothing of the daemon's own."""
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "CUDA_MPS_PIPE_DIRECTORY": os.fspath(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": os.fspath(self.path / "log"),
        }

    async def start(self, started: Callable[[Process], None] = lambda process: None) -> None:
        """Start it, and return once it listens; `started` is called with the process before that, for the next daemon
        to know it. OSError where it ends before it listens, or does not get there in time.
        """
        try:
            with trio.CancelScope(shield=True):  # a process that is started is known from then on
                pid = await in_a_thread(PROGRAM, self._start)
                with contextlib.suppress(ProcessLookupError):  # it has ended, and says why below
                    self.process = await identified(pid)
                    started(self.process)
            with trio.move_on_after(START_S):
                while not await in_a_thread("its socket", self._listens):
                    if self.has_ended():
                        raise OSError(errno.ECHILD, f"it ended: {self._said() or 'without a word'}")
                    await trio.sleep(LOOK_S)
                return
            raise OSError(errno.ETIMEDOUT, f"it does not listen after {START_S:.0f} s")
        except BaseException:
            self.kill()  # it has no client yet
            raise

    def _listens(self) -> bool:
        """Return whether it listens. Its user may have put anything there, and what is there is not followed."""
        return os.path.lexists(self.pipe / "control")

    def _start(self) -> int:
        """Start the process, and return its pid."""
        self.close()
        self._make_directories()
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._child = subprocess.Popen(
                [self._program, "-f"],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                cwd="/",
                umask=0o077,
                pass_fds=(reading,),  # without a reader its words would end it once this daemon is gone
                start_new_session=True,  # a terminal stops and kills groups of processes
                **self._as_user(),  # type: ignore[call-overload]
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._words = reading
        try:
            self._pidfd = os.pidfd_open(self._child.pid)
        except OSError:  # no descriptor is left: nothing could end it later
            self._child.kill()
            self._child.wait()
            raise
        with contextlib.suppress(OSError):  # it is spared as this daemon is, otherwise
            Path(procfs.PROC, str(self._child.pid), "oom_score_adj").write_text("0")
        return self._child.pid

    def _as_user(self) -> Mapping[str, object]:
        """Return what makes it run as the user; a daemon without rights can only run it as its own user."""
        uid = self.space.uid
        if os.geteuid() != 0:
            if uid != os.geteuid():
                raise fail(errno.EPERM)
            return {}
        try:
            group, name = (entry := pwd.getpwuid(uid)).pw_gid, entry.pw_name
            return {"user": uid, "group": group, "extra_groups": os.getgrouplist(name, group)}
        except KeyError:
            return {"user": uid, "group": NO_GROUP, "extra_groups": []}

    def _make_directories(self) -> None:
        """Make its directories anew: what another one left there is not to be taken for its own."""
        self.remove()
        self.path.mkdir(mode=0o755, parents=True)
        for part in (self.pipe, self.path / "log"):
            part.mkdir(mode=0o700)
            if os.geteuid() == 0:
                os.chown(part, self.space.uid, -1)

    def remove(self) -> None:
        """Remove its directories. OSError where the user keeps them from being removed."""
        with contextlib.suppress(FileNotFoundError):
            try:
                shutil.rmtree(self.path)  # it follows no link that the user has put there
            except RecursionError:  # nor does this, which goes down as deep as the user has made it
                subprocess.run(["rm", "-rf", "--", self.path], stderr=subprocess.DEVNULL, check=False)
                if self.path.exists():
                    raise fail(errno.ENOTEMPTY) from None

    async def adopt(self, process: Process) -> bool:
        """Take over one that an earlier daemon started; return whether it lives."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            return False
        try:
            await verify(process)
            lives = procfs.command(process.pid) == PROGRAM[:15] and not has_exited(pidfd)
        except OSError:
            lives = False
        if not lives:
            os.close(pidfd)
            return False
        self.process, self._pidfd = process, pidfd
        return True

    def has_ended(self) -> bool:
        """Return whether it has ended, or was never there."""
        return self._pidfd < 0 or has_exited(self._pidfd)

    async def ended(self) -> None:
        """Return once it has ended."""
        if self._pidfd >= 0:
            await trio.lowlevel.wait_readable(self._pidfd)

    async def ask(self, command: str) -> bool:
        """Give it a command; return whether it took it within ASK_S. The client of ``quit`` goes on waiting, as it
        answers once the last program has ended.
        """
        try:
            return await in_a_thread(PROGRAM, partial(self._ask, command))
        except OSError as error:
            log.warning("%s of %s: %s: %s", PROGRAM, self.space.slice.path, command, error.strerror)
            return False

    def _ask(self, command: str) -> bool:
        client = subprocess.Popen(
            [self._program],
            env=self.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            **self._as_user(),  # type: ignore[call-overload]
        )
        try:
            client.communicate(f"{command}\n".encode(), timeout=ASK_S)
        except subprocess.TimeoutExpired:
            client.kill()
            client.wait()
            return False
        return bool(client.returncode == 0)

    def kill(self) -> None:
        """End it by its pidfd: for one that does not start, or has no client and takes no command."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def servers(self) -> Sequence[int]:
        """Return the pids of its servers, which are its children."""
        if self.process is None or self.has_ended():
            return ()
        try:
            raw = procfs.of_process(self.process.pid, f"task/{self.process.pid}/children")
        except OSError:
            return ()
        return [int(word) for word in procfs.words(raw)]

    def is_server(self, pid: int) -> bool:
        """Return whether a process is its server: the first of its children, as its user could have it make any number
        of them. It does not wait for that process.
        """
        return next((one for one in self.servers() if not _is_over(one)), None) == pid

    def _said(self) -> str:
        """Return what it said as it ended, fit for a line of a log."""
        try:
            words = os.read(self._words, WORDS).decode("utf-8", "backslashreplace")
        except OSError:
            return ""
        return "".join(c if c.isprintable() else " " for c in words).strip()

    def close(self) -> None:
        """Forget a process that has ended, or is to go on without us."""
        if self._child is not None and self._child.poll() is None:
            _LEFT.append(self._child)
        elif self._child is None and self._pidfd >= 0 and self.has_ended():
            with contextlib.suppress(ChildProcessError):  # it is a child of ours only after an upgrade
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        if self._pidfd >= 0:
            os.close(self._pidfd)
        if self._words >= 0:
            os.close(self._words)
        self._child, self._pidfd, self._words, self.process = None, -1, -1, None
