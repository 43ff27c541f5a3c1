"""The system calls by which the NVIDIA driver is reached. Nothing else in this package makes one: a test puts a fake in
their place.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from typing import Protocol

from backend.errors import fail
from backend.identity import start_time
from backend.running import is_ending

CONTROL_DEVICE = "/dev/nvidiactl"
CONTROL_NUMBER = os.makedev(195, 255)
"""NV_MAJOR_DEVICE_NUMBER and NV_MINOR_DEVICE_NUMBER_CONTROL_DEVICE (nv.h)."""


class System(Protocol):
    """The system calls of this package."""

    def open_control(self) -> int:
        """A new open file of ``/dev/nvidiactl``: an identity of its own to RM."""

    def open_gpu(self, minor: int) -> int:
        """A new open file of ``/dev/nvidia<minor>``."""

    def control_fds(self, pid: int) -> Sequence[int]:
        """The descriptors that `pid` has of ``/dev/nvidiactl``. ProcessLookupError when it is gone, or has closed them
        because it ends."""

    def pidfd_open(self, pid: int) -> int:
        """pidfd_open(2)."""

    def pidfd_getfd(self, pidfd: int, fd: int) -> int:
        """pidfd_getfd(2): a duplicate, here, of descriptor `fd` there. EBADF also where that is not, or no more, one of
        ``/dev/nvidiactl``: what we ask of a file as root may mean something else to another driver."""

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


_SYS_PIDFD_GETFD = 438  # the same number on every architecture (asm-generic/unistd.h)


def _is_control(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == CONTROL_NUMBER


class LinuxSystem:
    """The real ones."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def open_control(self) -> int:
        return os.open(CONTROL_DEVICE, os.O_RDWR | os.O_CLOEXEC)

    def open_gpu(self, minor: int) -> int:
        return os.open(f"/dev/nvidia{minor}", os.O_RDWR | os.O_CLOEXEC)

    def control_fds(self, pid: int) -> Sequence[int]:
        folder = f"/proc/{pid}/fd"
        found = []
        try:
            for name in os.listdir(folder):
                try:
                    if os.readlink(f"{folder}/{name}") == CONTROL_DEVICE:
                        found.append(int(name))
                except FileNotFoundError:  # closed meanwhile
                    continue
        except FileNotFoundError:
            raise fail(errno.ESRCH) from None
        if not found and is_ending(pid):
            raise fail(errno.ESRCH)
        return found

    def pidfd_open(self, pid: int) -> int:
        return os.pidfd_open(pid)

    def pidfd_getfd(self, pidfd: int, fd: int) -> int:
        result: int = self._libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0)
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if not _is_control(os.fstat(result)):
            os.close(result)
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return result

    def start_time(self, pid: int) -> int:
        return start_time(pid)

    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        fcntl.ioctl(fd, request, argument)

    def map(self, fd: int, nbytes: int) -> memoryview:
        return memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))

    def pid_namespace(self) -> int:
        return os.stat("/proc/self/ns/pid").st_ino

    def close(self, fd: int) -> None:
        os.close(fd)
