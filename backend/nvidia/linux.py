"""The system calls through which the NVIDIA driver is reached.

No other module of this package makes a system call of that kind, so tests can put a fake in the place of these.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from backend.common.errors import fail
from backend.nvidia import device
from backend.nvidia.lender import Lender
from backend.process.identity import start_time
from backend.process.looks import look_here
from backend.process.running import is_ending


class Files(Protocol):
    """The system calls by which requests are made through the files of a program."""

    def pidfd_open(self, pid: int) -> int:
        """pidfd_open(2)."""

    def look(self, pid: int, fds: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Return the start time of `pid`, as :meth:`start_time`, and which of its descriptors `fds` are of
        ``/dev/nvidiactl`` now. One look does both, since each look costs two switches between threads.
        """

    def pidfd_getfd(self, pidfd: int, fd: int) -> int:
        """pidfd_getfd(2): return a duplicate, in this process, of descriptor `fd` of a process. The descriptor was
        looked at before, so that one that stays wrong takes up no lender. Raises EBADF also if it is no longer of
        ``/dev/nvidiactl``: a request made as root may mean something else to another driver.
        """

    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        """ioctl(2) with an argument that the driver reads and writes."""

    def close(self, fd: int) -> None:
        """close(2)."""


class System(Files, Protocol):
    """The system calls of this package. Calls that look at a program can be kept waiting by it: they are for
    threads, and fail with EBUSY in time (:mod:`backend.process.looks`).
    """

    def begin(self) -> None:
        """Prepare to look at programs soon."""

    def open_control(self) -> int:
        """Return a new open file of ``/dev/nvidiactl``, which to RM is an identity of its own."""

    def open_gpu(self, minor: int) -> int:
        """Return a new open file of ``/dev/nvidia<minor>``."""

    def control_fds(self, pid: int) -> Sequence[int]:
        """Return the descriptors of `pid` that are of the device ``/dev/nvidiactl``, not merely of a file of that
        name. Raises ProcessLookupError when `pid` is gone, or has closed them because it ends.
        """

    def start_time(self, pid: int) -> int:
        """Return the start time of `pid` in clock ticks since boot. Raises ProcessLookupError when it is gone."""

    def map(self, fd: int, nbytes: int) -> memoryview:
        """mmap(2) of `nbytes` from the start, shared and read-only. The mapping outlives the descriptor."""

    def pid_namespace(self) -> int:
        """Return the inode of this process's pid namespace."""


class LinuxSystem:
    """The system calls of Linux."""

    def __init__(self) -> None:
        self._lender = Lender()
        self._pids: dict[int, int] = {}  # by pidfd

    def begin(self) -> None:
        self._lender.begin(device.CONTROL_NUMBER)

    def open_control(self) -> int:
        return os.open(device.CONTROL_DEVICE, os.O_RDWR | os.O_CLOEXEC)

    def open_gpu(self, minor: int) -> int:
        return os.open(f"/dev/nvidia{minor}", os.O_RDWR | os.O_CLOEXEC)

    def control_fds(self, pid: int) -> Sequence[int]:
        return look_here(pid, partial(_control_fds, pid))

    def pidfd_open(self, pid: int) -> int:
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        return pidfd

    def look(self, pid: int, fds: Sequence[int]) -> tuple[int, Sequence[int]]:
        return look_here(pid, partial(_look, pid, fds))

    def pidfd_getfd(self, pidfd: int, fd: int) -> int:
        return self._lender.get(pidfd, self._pids[pidfd], fd, device.CONTROL_NUMBER)

    def start_time(self, pid: int) -> int:
        return look_here(pid, partial(start_time, pid))

    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        fcntl.ioctl(fd, request, argument)

    def map(self, fd: int, nbytes: int) -> memoryview:
        return memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))

    def pid_namespace(self) -> int:
        return os.stat("/proc/self/ns/pid").st_ino

    def end(self) -> None:
        """End the lender, once no more is asked."""
        self._lender.end()

    def close(self, fd: int) -> None:
        self._pids.pop(fd, None)
        os.close(fd)


def _look(pid: int, fds: Sequence[int]) -> tuple[int, Sequence[int]]:
    start = start_time(pid)
    return start, [fd for fd in fds if device.number_of(f"/proc/{pid}/fd/{fd}") == device.CONTROL_NUMBER]


def _control_fds(pid: int) -> Sequence[int]:
    folder = f"/proc/{pid}/fd"
    found = []
    try:
        for name in os.listdir(folder):
            try:
                if os.readlink(f"{folder}/{name}") != device.CONTROL_DEVICE:  # the name is the kernel's
                    continue
                if device.is_open_at(pid, name, device.CONTROL_NUMBER):
                    found.append(int(name))
            except FileNotFoundError:  # closed meanwhile
                continue
    except FileNotFoundError:
        raise fail(errno.ESRCH) from None
    if not found and is_ending(pid):
        raise fail(errno.ESRCH)
    return found
