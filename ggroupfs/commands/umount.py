"""``ggroupfs umount``: thaws everything and unmounts; returns when that is done."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path

from ggroupfs import serving
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
    if found is None or found[1] != serving.TYPE:
        raise RuntimeError(f"umount: {path} is not a ggroup tree")
    try:
        with serving.daemon_of(path, found[0]) as daemon:
            if daemon is not None:
                _end(daemon)
    except serving.Unknown as error:
        raise RuntimeError(f"umount: {path}: {error}: nobody is told to end; umount(8) unmounts it") from None
    if mount_of(path) == found:
        subprocess.run(["fusermount3", "-u", "-z", path], check=True)


def _end(daemon: serving.Daemon) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(daemon.pidfd, signal.SIGTERM)
        if not select.select([daemon.pidfd], [], [], SECONDS)[0]:
            raise RuntimeError(f"umount: the daemon (pid {daemon.pid}) did not end within {SECONDS:.0f} s")
