"""Mounts of this machine: those of trees, the cgroup2 hierarchy, and bind mounts."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from backend.process import procfs

DEFAULT_MOUNTPOINT = Path("/run/ggroup")

SYSTEMD = Path("/run/systemd/system")
"""Path that exists if systemd is the system manager (sd_booted(3))."""


def device_number(device: str) -> int:
    """Convert ``MAJOR:MINOR`` of mountinfo to a device number as in stat(2)."""
    major, _, minor = device.partition(":")
    return os.makedev(int(major), int(minor))


def mount_of(mountpoint: str) -> tuple[str, str] | None:
    """Return device number and type of the topmost mount at exactly that path; None if there is none."""
    found = [mount for mount in procfs.mounts() if mount.point == mountpoint]
    return (found[-1].device, found[-1].type) if found else None


MS_BIND, MNT_DETACH = 4096, 2  # linux/mount.h

_libc = ctypes.CDLL(None, use_errno=True)


def bind(source: str, target: Path) -> None:
    """Bind what is mounted at `source` to `target`. OSError.

    Other mount namespaces see it if `target` is a shared mount, or in one (mount_namespaces(7)).
    """
    if _libc.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND, None):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(target))


def unbind(target: Path) -> None:
    """Unmount `target`, in the namespaces that received it from here as well.

    It is no error if nothing is mounted there.
    """
    _libc.umount2(os.fsencode(target), MNT_DETACH)


def cgroup2() -> Path | None:
    """Return the mountpoint of the cgroup2 tree (cgroups(7)); None on a machine without one."""
    mount = procfs.cgroup2()
    return Path(mount.point) if mount is not None else None


def trees() -> list[str]:
    """Return the mountpoints of ggroup trees, whether their daemons are alive or dead."""
    return [mount.point for mount in procfs.mounts() if mount.type == "fuse.ggroupfs"]
