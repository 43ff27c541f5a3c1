"""The system calls by which the NVIDIA driver is reached. Nothing else in this package makes one: a test puts a fake in
their place.
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


class System(Protocol):
    """The system calls of this package. Those that look at a program, which can have them wait, are for threads, and
    give EBUSY in time (:mod:`backend.process.looks`)."""

    def begin(self) -> None:
        """Programs will be looked at soon."""

    def open_control(self) -> int:
        """A new open file of ``/dev/nvidiactl``: an identity of its own to RM."""

    def open_gpu(self, minor: int) -> int:
        """A new open file of ``/dev/nvidia<minor>``."""

    def control_fds(self, pid: int) -> Sequence[int]:
        """The descriptors that `pid` has of ``/dev/nvidiactl``: the device, not what it calls so. ProcessLookupError
        when it is gone, or has closed them because it ends."""

    def pidfd_open(self, pid: int) -> int:
        """pidfd_open(2)."""

    def look(self, pid: int, fds: Sequence[int]) -> tuple[int, Sequence[int]]:
        """As :meth:`start_time`, and which of the descriptors `fds` of `pid` are of ``/dev/nvidiactl`` just now: both
        in one look, as each has another thread wake up, and wakes this one."""

    def pidfd_getfd(self, pidfd: int, fd: int) -> int:
        """pidfd_getfd(2): a duplicate, here, of descriptor `fd` there, which was looked at before: one that stays wrong
        costs no lender anything. EBADF also where it is no more one of ``/dev/nvidiactl``: what we ask of a file as
        root may mean something else to another driver."""

    def start_time(self, pid: int) -> int:
        """Start of `pid` in clock ticks since boot; ProcessLookupError when it is gone."""

    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        """ioctl(2) with an argument that the driver reads and writes."""

    def map(self, fd: int, nbytes: int) -> memoryview:
        """mmap(2), shared and to be read, of `nbytes` from the start. It outlives the descriptor."""

    def pid_namespace(self) -> int:
        """Inode of the pid namespace that we are in."""

    def close(self, fd: int) -> None:
        """close(2)."""


class LinuxSystem:
    """The real ones."""

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
        """Nothing is asked of it any more."""
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
                if os.readlink(f"{folder}/{name}") != device.CONTROL_DEVICE:  # which is the kernel's own word
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
