"""The usher's own program: has programs of frozen slices wait as they open a file, until the daemon says otherwise.

    -m backend.process.ushering DAEMON FILE...    serves the socket that is its standard input

It asks nothing of the daemon. That tells it, at least once a second, which slices are frozen; what is opened by a
program below one of them waits, and all else is answered at once. So an opening waits for this process alone, never for
the daemon, and goes on

- as soon as its slice is not frozen any more, or its program is in another one;
- where the daemon has said nothing for LEASE_S;
- at the end of this process, whatever ends it: the kernel answers then. It is killed with the daemon
  (PR_SET_PDEATHSIG), and by it where it does not answer, be it stopped by a signal.

Files are marked only while some slice is frozen. The daemon, and what it started, never wait.
"""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterator, Sequence

from backend.common import syscalls
from backend.process import procfs
from backend.process.fanotify import Opening, Openings
from backend.process.identity import Slice, cgroup_of

SAID = struct.Struct("=QB")
"""What a part of a message of the daemon's begins with: the number of the message, and whether this is the last part.
Paths of slices follow, with a zero between them."""
SAID_MOST = 32 << 10
"""Bytes of a part, at most."""
HEARD = struct.Struct("=QIIII")
"""The answer: the number of the message, how many files are marked, how many programs wait, how many went on since the
last answer as nothing was heard of the daemon, and how many did as too many waited."""
LEASE_S = 3.0
"""Seconds that what the daemon has said counts."""
MARK_S = 5.0
"""Seconds between two looks for the files: a driver that is installed has others."""
WAITING_MOST = 1024
"""Openings that wait at once, at most; what comes then goes on."""
SPARE = 64
"""Descriptors for all else."""
ANCESTORS_MOST = 64
"""Parents of a program, and theirs, that are looked at."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h

CUDA = "cuda"
"""In the place of a file: the driver's library, wherever it is."""
LIBRARIES = tuple(
    f"{place}/libcuda.so*"
    for place in (
        "/usr/lib/*-linux-gnu",  # Debian, Ubuntu
        "/usr/lib/*-linux-gnu/nvidia/*",
        "/usr/lib64",  # Fedora, SUSE
        "/usr/lib64/nvidia*",
        "/usr/lib",  # Arch
        "/usr/local/cuda*/compat",  # the forward compatibility packages
        "/run/nvidia/driver/usr/lib/*-linux-gnu",  # a driver in a container
        "/run/nvidia/driver/usr/lib64",
    )
)
"""Where CUDA is: without one of these no program comes to a GPU by it. What containers are given of it by NVIDIA's
runtimes are these very inodes."""


class Ushering:
    """See the module."""

    def __init__(self, daemon: int, end: socket.socket, files: Sequence[str]) -> None:
        """`daemon` is the pid of the daemon, `end` the socket to it."""
        self._daemon = daemon
        self._end = end
        self._files = files
        self._openings = Openings()
        self._marked: set[tuple[int, int]] = set()  # device and inode
        self._looked = 0.0
        self._coming: list[bytes] = []  # of a message of which the last part is not here yet
        self._frozen: Collection[Slice] = frozenset()
        self._until = 0.0  # when what the daemon said counts no more
        self._waiting: list[Opening] = []
        self._lapsed = self._over = 0
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        self._most = WAITING_MOST if soft < 0 else max(1, min(WAITING_MOST, soft - SPARE))

    def run(self) -> None:
        """Serves until the daemon closes its end."""
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        poller.register(self._openings, select.POLLIN)
        while True:
            left = max(0.0, self._until - time.monotonic()) * 1000 + 1 if self._frozen else None
            ready = {fd for fd, _ in poller.poll(left)}
            if self._end.fileno() in ready and not self._hear():
                return
            if self._frozen and time.monotonic() >= self._until:
                self._lapse()
            if self._openings.fileno() in ready:
                self._ask()

    def _ask(self) -> None:
        with contextlib.suppress(OSError):  # the kernel has answered that one, as something is short
            for opening in self._openings.asked():
                if not self._is_frozen(opening.pid):
                    self._openings.allow(opening)
                elif len(self._waiting) >= self._most:
                    self._over += 1
                    self._openings.allow(opening)
                else:
                    self._waiting.append(opening)

    def _hear(self) -> bool:
        """Takes a part of a message. Whether the daemon is there."""
        raw = self._end.recv(SAID.size + SAID_MOST)
        if not raw:
            return False
        number, is_last = SAID.unpack_from(raw)
        self._coming += (word for word in raw[SAID.size :].split(b"\0") if word)
        if is_last:
            self._frozen = frozenset(Slice(os.fsdecode(word)) for word in self._coming)
            self._coming = []
            self._until = time.monotonic() + LEASE_S
            self._mark()
            self._look_again()
            found = HEARD.pack(number, len(self._marked), len(self._waiting), self._lapsed, self._over)
            self._lapsed = self._over = 0
            self._end.send(found)
        return True

    def _mark(self) -> None:
        """Has the files marked, or none while nothing is frozen."""
        if not self._frozen:
            self._unmark()
        elif not self._marked or time.monotonic() - self._looked >= MARK_S:
            self._looked = time.monotonic()
            for path in self._found():
                with contextlib.suppress(OSError):  # gone since; or it is no file that is on a disk
                    status = os.stat(path)
                    if not stat.S_ISREG(status.st_mode):
                        continue  # the kernel would take the mark, and never ask
                    if (status.st_dev, status.st_ino) not in self._marked:
                        self._openings.mark(path)
                        self._marked.add((status.st_dev, status.st_ino))

    def _found(self) -> Iterator[str]:
        for file in self._files:
            if file == CUDA:
                for pattern in LIBRARIES:
                    yield from glob.iglob(pattern)
            else:
                yield file

    def _unmark(self) -> None:
        if self._marked:
            self._openings.unmark()
            self._marked.clear()

    def _look_again(self) -> None:
        """Those whose slice is not frozen any more go on, and so does what has been killed."""
        still = []
        for opening in self._waiting:
            if self._is_frozen(opening.pid):
                still.append(opening)
            else:
                self._openings.allow(opening)
        self._waiting = still

    def _lapse(self) -> None:
        """The daemon has said nothing: all go on, and none waits until it does."""
        self._frozen = frozenset()
        self._lapsed += len(self._waiting)
        waiting, self._waiting = self._waiting, []
        for opening in waiting:
            self._openings.allow(opening)
        self._unmark()

    def _is_frozen(self, pid: int) -> bool:
        """Whether a process is in a slice that is frozen, and none of the daemon's. What cannot be told is not."""
        if pid <= 0 or not self._frozen:
            return False
        try:
            if procfs.status(pid).has_ended:  # killed as it waited: its pid stays until its parent asks
                return False
            slice_: Slice | None = cgroup_of(pid)
            while slice_ is not None and slice_ not in self._frozen:
                slice_ = slice_.parent
            return slice_ is not None and not self._is_of_the_daemon(pid)
        except OSError:
            return False

    def _is_of_the_daemon(self, pid: int) -> bool:
        for _ in range(ANCESTORS_MOST):
            if pid in (self._daemon, os.getpid()):
                return True
            pid = procfs.descent(pid).parent
            if pid <= 1:
                return False
        return False


def main() -> None:
    """Serves, as a child of the daemon's main thread."""
    daemon = int(sys.argv[1])
    syscalls.named("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != daemon:
        return
    with socket.socket(fileno=0) as end:
        Ushering(daemon, end, sys.argv[2:]).run()


if __name__ == "__main__":
    main()
