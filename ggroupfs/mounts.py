"""Where trees are mounted, and what else of this machine is somewhere."""

from __future__ import annotations

import os
from pathlib import Path

from backend import procfs

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


def cgroup2() -> Path | None:
    """Where the cgroup2 tree is mounted (cgroups(7)); None on a machine without one."""
    mount = procfs.cgroup2()
    return Path(mount.point) if mount is not None else None


def trees() -> list[str]:
    """Where trees of ours are mounted, by daemons alive and dead."""
    return [mount.point for mount in procfs.mounts() if mount.type == "fuse.ggroupfs"]
