"""Put back on the runlist what a killed daemon took off by its own decisions, as it stands in :mod:`.waiting`.

The guard beside the daemon (``ggroupfs/daemon/guarding.py``) calls :func:`main` once the daemon is gone. Until then it
has loaded nothing, and programs stand still until this is done: so this loads as little as it can, and no event loop.

A program can keep a look at it, or the duplicate of a file of it, waiting for as long as it likes
(:mod:`backend.nvidia.lender`). So threads take the processes from a queue, and more are made as soon as all are held
up: such a program alone stays off. A channel is enabled once, as it was disabled once: the guard has no read-back of
whether it is on.

The next daemon may freeze a program that has held up the guard so far. So nothing is put on any more once a daemon has
the journal: that one puts back itself what is to run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from backend.common import syscalls
from backend.common.errors import fail
from backend.nvidia import device, rm
from backend.nvidia.waiting import Batch, noted
from backend.process.identity import Process, start_time

if TYPE_CHECKING:  # it loads much
    from backend.nvidia.linux import Files

RELEASE_S = 10.0
"""Seconds for all programs, at most."""
LAST_S = 1.0
"""Seconds of these that are kept for what a killed daemon still takes off, where a thread of it is held up."""
SOON_S = 0.05
"""Seconds within which all threads of a killed daemon end, unless one is held up in the kernel."""
THREADS = 32
"""Threads that are made at once, at most: the machine of the programs may have no room for one each."""
HELD_S = 0.05
"""Seconds without a process that is done, after which all threads are taken to be held up by programs."""
SYSLOG = "/dev/log"
WARNING = 3 << 3 | 4
"""Facility and severity of a message to the system log: LOG_DAEMON and LOG_WARNING (syslog(3))."""

_SYS_PIDFD_GETFD = 438  # the same number on every architecture (asm-generic/unistd.h)


class OwnFiles:
    """The system calls of :class:`backend.nvidia.linux.Files`, made by this process, for which no other waits."""

    def pidfd_open(self, pid: int) -> int:
        return os.pidfd_open(pid)

    def look(self, pid: int, fds: Sequence[int]) -> tuple[int, Sequence[int]]:
        start = start_time(pid)  # this may wait for the program, as may what follows
        return start, [fd for fd in fds if device.number_of(f"/proc/{pid}/fd/{fd}") == device.CONTROL_NUMBER]

    def pidfd_getfd(self, pidfd: int, fd: int) -> int:
        duplicate = syscalls.call(_SYS_PIDFD_GETFD, pidfd, fd, 0)
        if device.is_usable(duplicate, device.CONTROL_NUMBER):
            return duplicate
        os.close(duplicate)
        raise fail(errno.EBADF)

    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        fcntl.ioctl(fd, request, argument)

    def close(self, fd: int) -> None:
        os.close(fd)


def main(fd: int, daemon: int, journal: str = "") -> None:
    """Put back what stands in the memory at descriptor `fd`, and tell the system log of it. `daemon` is a pidfd: the
    main thread of that process has ended. `journal` is the path of the file that the next daemon takes; empty if none.

    Another thread of it may be in the middle of a request that takes channels off, and the kernel lets it come to the
    end of that. Where one is held up for longer, all is put back at once, and once more when it has ended. Both take
    RELEASE_S at most.
    """
    end = time.monotonic() + RELEASE_S

    def has_next() -> bool:  # as long as the killed one has not ended, the lock is its own
        return bool(journal) and _ends(daemon, 0) and is_taken(journal)

    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        has_ended = _ends(daemon, SOON_S)
        done, count = put_back(memory, OwnFiles(), RELEASE_S if has_ended else RELEASE_S / 2, has_next)
        if not has_ended and _ends(daemon, end - LAST_S - time.monotonic()):
            done, count = put_back(memory, OwnFiles(), end - time.monotonic(), has_next)
    if count:
        how = "are left to the next daemon" if has_next() else "could not be reached"
        left = f", {count - done} {how}" if done < count else ""
        _say(f"the daemon was killed: of the programs that waited for their turn {done} go on{left}")


def is_taken(journal: str) -> bool:
    """Return whether a daemon has the journal at that path, or `ggroupfs doctor`, which thaws all. A daemon that wants
    it in this very moment tries again (:mod:`backend.ledgers.journal.file`)."""
    try:
        fd = os.open(journal, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    finally:
        os.close(fd)
    return False


def put_back(
    memory: bytes | mmap.mmap, files: Files, seconds: float = RELEASE_S, has_next: Callable[[], bool] = lambda: False
) -> tuple[int, int]:
    """Put back all that is noted to go back, until `has_next` says that another daemon is there. Return the number of
    processes for which that was done within that time, and the number of all.

    Where no thread can be made, those that run do it all, and this one: then it may be held up itself.
    """
    batches: dict[Process, list[Batch]] = {}
    for process, batch in noted(memory):
        batches.setdefault(process, []).append(batch)
    left, done, gone_through = deque(batches.items()), list[Process](), threading.Semaphore(0)
    end = time.monotonic() + seconds

    def work() -> None:
        while time.monotonic() < end:
            try:
                process, own = left.popleft()
            except IndexError:
                return
            try:
                with contextlib.suppress(OSError):
                    if release(process, own, files, has_next):
                        done.append(process)
            finally:
                gone_through.release()

    due = len(batches)
    while due and time.monotonic() < end:
        if left and not _start(work, min(THREADS, len(left))):
            work()
        while due and gone_through.acquire(timeout=max(0.0, min(HELD_S, end - time.monotonic()))):
            due -= 1
    return len(done), len(batches)


def _start(work: Callable[[], None], count: int) -> bool:
    """Start threads, up to this number; return whether any was. None can be for lack of memory, or of room for another
    task (pids.max)."""
    for number in range(count):
        try:
            threading.Thread(target=work, daemon=True).start()
        except (RuntimeError, MemoryError):
            return number > 0
    return True


def release(process: Process, batches: Iterable[Batch], files: Files, has_next: Callable[[], bool]) -> bool:
    """Put the channels of a process back on the runlist; return whether all are on that are still there. One that fails
    keeps no other. None is put on any more once `has_next`. OSError where its files cannot be had, and
    ProcessLookupError where it is gone, even if its pid is another process's now.
    """
    batches = list(batches)
    with rm.borrowed(files, process, [*dict.fromkeys(batch.fd for batch in batches)]) as controls:
        return all([batch.fd in controls and _enable(controls[batch.fd], batch, has_next) for batch in batches])


def _enable(control: rm.Control, batch: Batch, has_next: Callable[[], bool]) -> bool:
    try:
        for _ in range(2):  # of a request some of whose channels were freed meanwhile, the others were served
            channels = rm.still_channels(control, batch.client, batch.channels)
            if not channels:
                return True
            if has_next():
                return False
            try:
                rm.switch(control, batch.client, batch.subdevice, channels, False)
            except rm.RmError as error:
                if not error.gone:
                    raise
            else:
                return True
    except OSError:
        pass
    return False


def _ends(pidfd: int, seconds: float) -> bool:
    """Return whether a process, with all of its threads, ends within that time."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))


def _say(text: str) -> None:
    """Write a line to the system log, where there is one and it takes it at once."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.setblocking(False)
        log.connect(SYSLOG)
        log.send(f"<{WARNING}>ggroupfs[{os.getpid()}]: {text}".encode())
