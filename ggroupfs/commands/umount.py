"""``ggroupfs umount``: thaws everything and unmounts; returns when that is done.

A tree may never answer: its daemon is stopped, or was killed while one of its messages to the kernel waited for a lock
held by a program that waits for the daemon. With ``--force`` the connection is aborted, as umount(8) does: waiting
requests fail with ECONNABORTED. A daemon that lives then ends as usual, and thaws, but the command does not wait for
that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path

from ggroupfs import serving
from ggroupfs.fs.connection import Connection
from ggroupfs.mounts import DEFAULT_MOUNTPOINT, device_number, mount_of

SECONDS = 15.0
"""Seconds that the daemon has to end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("mountpoint", nargs="?", type=Path, default=DEFAULT_MOUNTPOINT)
    parser.add_argument("-f", "--force", action="store_true", help="a tree that does not answer, too: it is aborted")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    unmount(arguments.mountpoint, force=arguments.force)
    return 0


def unmount(mountpoint: Path, *, force: bool = False) -> None:
    """Tell the daemon to end and wait for it; remove the mount of a dead daemon. RuntimeError."""
    path = os.path.abspath(mountpoint)
    found = mount_of(path)
    if found is None or found[1] != serving.TYPE:
        raise RuntimeError(f"umount: {path} is not a ggroup tree")
    with contextlib.ExitStack() as stack:
        connection = _connection(stack, device_number(found[0]))
        if mount_of(path) != found:  # otherwise the connection may be another tree's
            raise RuntimeError(f"umount: {path} is not a ggroup tree any more")
        try:
            with serving.daemon_of(path, found[0]) as daemon:
                if daemon is not None:
                    _end(daemon)
        except serving.Silent as error:
            if not force:
                raise RuntimeError(f"umount: {path}: {error}; with --force it is aborted") from None
            if connection is None:
                raise RuntimeError(f"umount: {path}: {error}, and the kernel has no control of it here") from None
            connection.abort()
        except serving.Unknown as error:
            words = f"umount: {path}: {error}: no process is told to end; umount(8) unmounts it"
            raise RuntimeError(words) from None
    if mount_of(path) == found:
        subprocess.run(["fusermount3", "-u", "-z", path])
        if mount_of(path) == found:
            raise RuntimeError(f"umount: {path} is still mounted")


def _connection(stack: contextlib.ExitStack, device: int) -> Connection | None:
    """Return the connection of a tree, opened while it is mounted; None if it cannot be controlled here."""
    try:
        found = Connection(device)
    except OSError:
        return None
    stack.callback(found.close)
    return found


def _end(daemon: serving.Daemon) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(daemon.pidfd, signal.SIGTERM)
        if not select.select([daemon.pidfd], [], [], SECONDS)[0]:
            raise RuntimeError(f"umount: the daemon (pid {daemon.pid}) did not end within {SECONDS:.0f} s")
