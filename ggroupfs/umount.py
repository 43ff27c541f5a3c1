"""``ggroupfs umount``: thaws everything and unmounts; returns when that is done."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path

from ggroupfs.mounts import DEFAULT_MOUNTPOINT, mount_of

SECONDS = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it is told."""
    parser.add_argument("mountpoint", nargs="?", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """The subcommand."""
    unmount(arguments.mountpoint)
    return 0


def unmount(mountpoint: Path) -> None:
    """Tells the daemon to end and waits for it; takes a dead daemon's mount away. RuntimeError."""
    path = os.path.abspath(mountpoint)
    found = mount_of(path)
    if found is None or found[1] != "fuse.ggroupfs":
        raise RuntimeError(f"umount: {path} is not a ggroup tree")
    pid = _daemon(Path(path))
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
                if not select.select([pidfd], [], [], SECONDS)[0]:
                    raise RuntimeError(f"umount: the daemon (pid {pid}) did not end within {SECONDS:.0f} s")
            finally:
                os.close(pidfd)
    if mount_of(path) == found:
        subprocess.run(["fusermount3", "-u", "-z", path], check=True)


def _daemon(mountpoint: Path) -> int | None:
    """Pid of the daemon that serves a tree, None if it does not answer."""
    try:
        for line in (mountpoint / "ggroup.backend").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "pid":
                return int(value)
    except OSError:
        pass
    return None
