"""Where trees are mounted, and what else of this machine is somewhere."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from backend.process import procfs

DEFAULT_MOUNTPOINT = Path("/run/ggroup")

SYSTEMD = Path("/run/systemd/system")
"""Is there where systemd is the system manager (sd_booted(3))."""


def device_number(device: str) -> int:
    """The number of what mountinfo calls ``MAJOR:MINOR``, as stat(2) has it."""
    major, _, minor = device.partition(":")
    return os.makedev(int(major), int(minor))


def mount_of(mountpoint: str) -> tuple[str, str] | None:
    """Device number and type of the topmost mount on exactly that path, None for none."""
    found = [mount for mount in procfs.mounts() if mount.point == mountpoint]
    return (found[-1].device, found[-1].type) if found else None


MS_BIND, MNT_DETACH = 4096, 2  # linux/mount.h

_libc = ctypes.CDLL(None, use_errno=True)


def bind(source: str, target: Path) -> None:
    """What is mounted at `source` is at `target`, too; others see it where that is a shared mount, or in one
    (mount_namespaces(7)). OSError."""
    if _libc.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND, None):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(target))


def unbind(target: Path) -> None:
    """Takes that away, from all who have it from there. What is not mounted is none."""
    _libc.umount2(os.fsencode(target), MNT_DETACH)


def cgroup2() -> Path | None:
    """Where the cgroup2 tree is mounted (cgroups(7)); None on a machine without one."""
    mount = procfs.cgroup2()
    return Path(mount.point) if mount is not None else None


def trees() -> list[str]:
    """Where trees of ours are mounted, by daemons alive and dead."""
    return [mount.point for mount in procfs.mounts() if mount.type == "fuse.ggroupfs"]
