"""Where trees are mounted, and what else of this machine is somewhere."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MOUNTPOINT = Path("/run/ggroup")

SYSTEMD = Path("/run/systemd/system")
"""Is there where systemd is the system manager (sd_booted(3))."""


def mount_of(mountpoint: str) -> tuple[str, str] | None:
    """Device number and type of the topmost mount on exactly that path (proc_pid_mountinfo(5)), None for none."""
    found = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.split()
            where = fields[4].encode("latin-1", "replace").decode("unicode_escape", "replace")
            if where == mountpoint:
                found = (fields[2], fields[fields.index("-") + 1])
    return found


def cgroup2() -> Path | None:
    """Where the cgroup2 tree is mounted (cgroups(7)); None on a machine without one."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.split()
            if fields[fields.index("-") + 1] == "cgroup2":
                return Path(fields[4])
    return None


def trees() -> list[str]:
    """Where trees of ours are mounted, by daemons alive and dead."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.split()
            if fields[fields.index("-") + 1] == "fuse.ggroupfs":
                found.append(fields[4].encode("latin-1", "replace").decode("unicode_escape", "replace"))
    return found
