"""``ggroupfs upgrade``: replaces the daemon of a tree by the installed version while programs run.

The daemon ends without giving anything back, and executes itself anew (execve(2)). For systemd and for its parent it is
the same process, and it continues from the journal or from the kernel's books. In between the tree does not exist:
files that were open fail with ENOTCONN, and pollers get an error.

So the installed version is tried first, and while it does not start, the running daemon is left alone. If it starts and
fails later, the process ends with an error, and what is in force is left for the next mount; systemd tries that on its
own. Nor does an upgrade begin while the journal cannot be written, unless that is forced: the next daemon knows only
what is in the journal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from backend.door.client import facts_of
from ggroupfs import serving
from ggroupfs.daemon.successor import SIGNAL
from ggroupfs.mounts import DEFAULT_MOUNTPOINT, mount_of

SECONDS = 30.0
"""Seconds that the next daemon may take; it proves the levers of a GPU before the tree answers."""

LATER = os.EX_TEMPFAIL
"""Exit code if the journal is out of date; the package then leaves the running daemon alone."""
FORGETS = "so what was set since would be forgotten: make room, or say --force"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("mountpoint", nargs="?", type=Path, default=DEFAULT_MOUNTPOINT)
    parser.add_argument(
        "--force", action="store_true", help="though the journal is out of date: what was set since is lost"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Exit code 0 once the tree answers again, :data:`LATER` if it should be tried again."""
    path = os.path.abspath(arguments.mountpoint)
    found = mount_of(path)
    if found is None or found[1] != serving.TYPE:
        raise RuntimeError(f"upgrade: {path} is not a ggroup tree")
    with contextlib.ExitStack() as stack:
        try:
            daemon = stack.enter_context(serving.daemon_of(path, found[0]))
        except serving.Unknown as error:
            raise RuntimeError(f"upgrade: {path} is served as before: {error}") from None
        if daemon is None:
            raise RuntimeError(f"upgrade: the daemon of {path} is dead: mount it anew")
        facts = facts_of(path)
        if facts.get("upgrade") != SIGNAL.name:  # any other daemon would die of the signal
            raise RuntimeError(f"upgrade: the daemon of {path} cannot be replaced as it runs: unmount and mount")
        if facts.get("journal.kept") == "no" and not arguments.force:
            journal = facts.get("journal", "its journal")
            print(
                f"ggroupfs: upgrade: {path} is served as before: {journal} cannot be written, {FORGETS}",
                file=sys.stderr,
            )
            return LATER
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, root)
        _try(path, daemon, stack)
        mounts = stack.enter_context(open("/proc/self/mountinfo", "rb"))
        began = time.monotonic()
        signal.pidfd_send_signal(daemon.pidfd, SIGNAL)
        while _lives(root) or not _answers(path):
            _wait(daemon.pidfd, mounts.fileno(), path, began + SECONDS - time.monotonic())
        print(f"{path}: answers again after {time.monotonic() - began:.2f} s")
    return 0


def _try(path: str, daemon: serving.Daemon, stack: contextlib.ExitStack) -> None:
    """Check that the program which the daemon would become starts and parses its command line. RuntimeError if not."""
    proc = Path("/proc", str(daemon.pid))
    try:
        words = [os.fsdecode(word) for word in (proc / "cmdline").read_bytes().split(b"\0")[:-1]]
        pairs = (os.fsdecode(pair).partition("=") for pair in (proc / "environ").read_bytes().split(b"\0") if pair)
        environment = {name: value for name, _, value in pairs}
        directory = os.open(proc / "cwd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, directory)
        is_here = os.path.samestat(os.stat(proc / "root"), os.stat("/"))
    except OSError as error:
        raise RuntimeError(f"upgrade: {path} is served as before: {error.filename}: {error.strerror}") from None
    if daemon.has_ended or "mount" not in words:  # it names another process, or one that cannot re-execute itself
        raise RuntimeError(f"upgrade: {path} is served as before: process {daemon.pid} is no `ggroupfs mount`")
    if not is_here:
        raise RuntimeError(f"upgrade: {path} is served as before: its daemon is in a container: upgrade it in there")
    command = [*words[: words.index("mount")], "mount", "--help"]
    try:
        done = subprocess.run(
            [shutil.which(command[0], path=environment.get("PATH")) or command[0], *command[1:]],
            env=environment,
            cwd=f"/proc/self/fd/{directory}",
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"upgrade: {path} is served as before: what is installed does not start: {error}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"])[-1]
        raise RuntimeError(f"upgrade: {path} is served as before: what is installed does not start: {said}")


def _lives(root: int) -> bool:
    """Whether the tree of an open directory is still served. (Numbers of mounts and devices are reused.)"""
    try:
        os.fstatvfs(root)
    except OSError:
        return False
    return True


def _answers(path: str) -> bool:
    try:
        return bool(facts_of(path))
    except OSError:
        return False


def _wait(pidfd: int, mounts: int, path: str, seconds: float) -> None:
    """Wait for a mount or unmount anywhere, which poll(2) reports as an error (proc_pid_mountinfo(5)).

    RuntimeError if the daemon has ended, or time is up.
    """
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.register(mounts, select.POLLPRI)
    found = dict(poller.poll(max(0.0, seconds) * 1000))
    if pidfd in found:
        raise RuntimeError(f"upgrade: the next daemon of {path} has ended: see its log")
    if not found:
        raise RuntimeError(f"upgrade: {path} does not answer after {SECONDS:.0f} s")
