"""The usher's program: make programs of frozen slices wait when they open a file, until the daemon says otherwise.

    -m backend.process.ushering DAEMON FILE...    serves the socket that is its standard input

The usher asks the daemon nothing. The daemon tells it, at least once a second, which slices are frozen. An opening by
a program below one of them waits, and any other is answered at once. So an opening waits only for this process, never
for the daemon, and goes on

- as soon as its slice is no longer frozen, or its program is in another one;
- if the daemon has said nothing for LEASE_S;
- if its cgroup is being frozen (``docker pause``), which the kernel completes only then: it runs no further;
- at the end of this process, whatever ends it: the kernel answers then. It is killed together with the daemon
  (PR_SET_PDEATHSIG), by the daemon if it does not answer, even while it is stopped by a signal, and by a timer of its
  own (SIGALRM) if it does not get to the next event.

Files are marked only while some slice is frozen, and only on a filesystem that answers without any other program or
machine. The daemon, and what it started, never wait.
"""

from __future__ import annotations

import contextlib
import glob
import os
import random
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs

from backend.common import syscalls
from backend.process import procfs, running
from backend.process.fanotify import AT_ONCE, Opening, Openings
from backend.process.identity import Slice, cgroup_of

SAID = struct.Struct("=QB")
"""Start of each part of a message from the daemon: the number of the message, and whether this is its last part.
Paths of slices follow, separated by zeros.
"""
SAID_MOST = 32 << 10
"""Maximum size of a part, bytes."""
HEARD = struct.Struct("=QIIIII")
"""The answer: the number of the message, how many files are marked, and how many programs wait; then the programs
that went on since the last answer, by reason: nothing was heard from the daemon, too many waited, their cgroup was
frozen. Files follow that are not marked because of their filesystem, separated by zeros.

An answer with number 0 comes first, with no file marked: this process is there.
"""
REFUSED_MOST = 8 << 10
"""Maximum size of the list of these files, bytes."""
LEASE_S = 3.0
"""Seconds for which a message of the daemon counts, and that this process may take for one event."""
MARK_S = 5.0
"""Seconds between two looks for the files: a new driver brings others."""
FREEZERS_S = 0.2
"""Seconds of a beat for looks whether cgroups are frozen: users make as many, and as deep, as they like. Cgroups that
are left over are looked at in the next beat.
"""
WAITING_MOST = 1024
"""Openings that wait at once, at most; further ones go on."""
SPARE = AT_ONCE + 64
"""Descriptors for everything else, including those of one read(2): with none left the kernel refuses an opening."""
ANCESTORS_MOST = 64
"""Ancestors of a program that are looked at."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h

CUDA = "cuda"
"""Stands for the driver's library in a list of files, wherever it is."""
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
"""Places of CUDA's library, without which no program gets to a GPU through CUDA. The library that NVIDIA's runtimes
give to containers has these same inodes.
"""
LOCAL = frozenset(
    (
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0xCA451A4E,  # bcachefs
        0x2FC12FC1,  # zfs
        0xF2F52010,  # f2fs
        0x01021994,  # tmpfs
        0x858458F6,  # ramfs
        0x794C7630,  # overlay
        0x73717368,  # squashfs
        0xE0F5E1E2,  # erofs
        0x9660,  # iso9660
    )
)
"""Types of filesystems (statfs(2), linux/magic.h) that answer by themselves. On any other, such as NFS and FUSE, the
server of the file may itself need a program that waits, or may never answer this process.
"""


@attrs.frozen
class Waiter:
    """An opening that waits, with its user and its slice."""

    opening: Opening
    user: int
    slice: Slice
    """The frozen slice that its program is in."""
    cgroup: Slice
    """The program's cgroup, at or below that slice."""


def surplus(waiting: Sequence[Waiter], came: Waiter) -> Waiter:
    """Return the waiter that goes on when no more can wait: the last one of the user that has the most, in that
    user's fullest slice. So no user, and no container of the same user, displaces a waiter of one that has fewer.
    """
    everyone = [*waiting, came]
    users = Counter(waiter.user for waiter in everyone)
    user = max(users, key=lambda user: (users[user], user == came.user))
    slices = Counter(waiter.slice for waiter in everyone if waiter.user == user)
    slice_ = max(slices, key=lambda slice_: (slices[slice_], slice_ == came.slice))
    return next(waiter for waiter in reversed(everyone) if (waiter.user, waiter.slice) == (user, slice_))


class Ushering:
    """The usher: its openings, and what it knows from the daemon."""

    def __init__(self, daemon: int, end: socket.socket, files: Sequence[str]) -> None:
        """`daemon` is the pid of the daemon, `end` the socket to it."""
        self._daemon = daemon
        self._end = end
        self._files = files
        self._openings = Openings()
        self._marked = 0
        self._has_marks = False
        self._refused: Sequence[str] = ()
        self._looked = 0.0
        self._coming: list[bytes] = []  # of a message whose last part is not here yet
        self._frozen: Collection[Slice] = frozenset()
        self._until = 0.0  # when the daemon's last message stops counting
        self._waiting: list[Waiter] = []
        self._lapsed = self._over = self._paused = 0
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        self._most = WAITING_MOST if soft < 0 else max(1, min(WAITING_MOST, soft - SPARE))

    def run(self) -> None:
        """Serve until the daemon closes its end. Then, and at any error, all openings go on: an opening that is
        neither answered nor kept would wait for ever.
        """
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        poller.register(self._openings, select.POLLIN)
        try:
            self._answer(0)
            while True:
                left = max(0.0, self._until - time.monotonic()) * 1000 + 1 if self._frozen else None
                signal.setitimer(signal.ITIMER_REAL, 0)
                ready = {fd for fd, _ in poller.poll(left)}
                signal.setitimer(signal.ITIMER_REAL, LEASE_S)
                if self._end.fileno() in ready and not self._hear():
                    return
                if self._frozen and time.monotonic() >= self._until:
                    self._lapse()
                if self._openings.fileno() in ready:
                    for opening in self._openings.asked():
                        self._take(opening)
        finally:
            self._openings.close()

    def _take(self, opening: Opening) -> None:
        waiter = self._waiter(opening)
        if waiter is None:
            self._openings.allow(opening)
            return
        if len(self._waiting) >= self._most:
            left_over = surplus(self._waiting, waiter)
            self._over += 1
            self._openings.allow(left_over.opening)
            if left_over is waiter:
                return
            self._waiting.remove(left_over)
        self._waiting.append(waiter)

    def _hear(self) -> bool:
        """Take a part of a message; return whether the daemon is there."""
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
            self._answer(number)
        return True

    def _answer(self, number: int) -> None:
        words = HEARD.pack(number, self._marked, len(self._waiting), self._lapsed, self._over, self._paused)
        self._lapsed = self._over = self._paused = 0
        self._end.send(words + b"\0".join(map(os.fsencode, self._refused))[:REFUSED_MOST])

    def _mark(self) -> None:
        """Mark the files, or none while nothing is frozen."""
        if not self._frozen:
            self._unmark()
        elif not self._marked or time.monotonic() - self._looked >= MARK_S:
            self._looked = time.monotonic()
            with contextlib.ExitStack() as stack:
                # All files are looked at before the first is marked: a look may not return.
                files, self._refused = self._open(stack)
                self._marked = 0
                for file in files:
                    with contextlib.suppress(OSError):  # the kernel has no such events for the file
                        # Even a file that seems marked already: it may be another one with that inode number.
                        self._openings.mark(f"/proc/self/fd/{file}")
                        self._marked += 1
                        self._has_marks = True

    def _open(self, stack: contextlib.ExitStack) -> tuple[Sequence[int], Sequence[str]]:
        """Return the files, opened only as paths, and those that are refused because of their filesystem."""
        files: dict[tuple[int, int], int] = {}
        refused = []
        for path in self._found():
            with contextlib.suppress(OSError):  # gone since
                file = os.open(path, os.O_PATH | os.O_CLOEXEC)
                stack.callback(os.close, file)
                if (kind := syscalls.filesystem(file)) not in LOCAL:
                    refused.append(f"{path} (type {kind:#x})")
                    continue
                status = os.fstat(file)
                if stat.S_ISREG(status.st_mode):  # for any other, the kernel would accept the mark and never ask
                    files.setdefault((status.st_dev, status.st_ino), file)
        return list(files.values()), refused

    def _found(self) -> Iterator[str]:
        for file in self._files:
            if file == CUDA:
                for pattern in LIBRARIES:
                    yield from glob.iglob(pattern)
            else:
                yield file

    def _unmark(self) -> None:
        if self._has_marks:  # perhaps on a file that has left its place
            self._openings.unmark()
            self._has_marks = False
        self._marked = 0

    def _look_again(self) -> None:
        """Let openings go on whose slice is no longer frozen, whose thread was killed, or that the freezer of their
        cgroup waits for.
        """
        found = [(waiter.opening, self._waiter(waiter.opening, waits=True)) for waiter in self._waiting]
        paused = self._paused_among(waiter for _, waiter in found if waiter is not None)
        self._waiting = []
        for opening, waiter in found:
            if waiter is not None and waiter.cgroup not in paused:
                self._waiting.append(waiter)
            else:
                self._paused += waiter is not None
                self._openings.allow(opening)

    def _paused_among(self, waiting: Iterable[Waiter]) -> Collection[Slice]:
        """Return the cgroups of these that the kernel's freezer has frozen, or is about to, as far as there
        is time to look.
        """
        one_of_each = list({waiter.cgroup: waiter.opening.thread for waiter in waiting}.items())
        random.shuffle(one_of_each)
        until = time.monotonic() + FREEZERS_S
        return {cgroup for cgroup, thread in one_of_each if time.monotonic() < until and running.is_frozen(thread)}

    def _lapse(self) -> None:
        """Let all openings go on, since nothing was heard from the daemon; none waits until it speaks again."""
        self._frozen = frozenset()
        self._lapsed += len(self._waiting)
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            self._openings.allow(waiter.opening)
        self._unmark()

    def _waiter(self, opening: Opening, *, waits: bool = False) -> Waiter | None:
        """Return a waiter for an opening if its thread is in a frozen slice and does not belong to the daemon (not
        asked again if it `waits` already). If that cannot be told, the opening does not wait.
        """
        thread = opening.thread
        if thread <= 0 or not self._frozen:
            return None
        try:
            status = procfs.status(thread)
            if status.is_exiting:  # killed while it waited: its pid stays until its parent reaps it
                return None
            slice_: Slice | None = (cgroup := cgroup_of(thread))
            while slice_ is not None and slice_ not in self._frozen:
                slice_ = slice_.parent
            if slice_ is None or (not waits and self._is_of_the_daemon(status.tgid)):
                return None
            return Waiter(opening, procfs.descent(thread).uid, slice_, cgroup)
        except OSError:
            return None

    def _is_of_the_daemon(self, pid: int) -> bool:
        for _ in range(ANCESTORS_MOST):
            if pid in (self._daemon, os.getpid()):
                return True
            pid = procfs.descent(pid).parent
            if pid <= 1:
                return False
        return False


def main() -> None:
    """Serve as a child of the daemon's main thread."""
    daemon = int(sys.argv[1])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it may have been ignored where the daemon was started
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    syscalls.named("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != daemon:
        return
    with socket.socket(fileno=0) as end:
        Ushering(daemon, end, sys.argv[2:]).run()


if __name__ == "__main__":
    main()
