"""Starts a container, and ends all of it when told to, or when the process that started the keeper is gone.

    python -m tests.container.keeper ARCHIVE SHARED DIRECTORY

The container has namespaces and a cgroup of its own, and its root is in memory. So once its processes are gone, only
the directories of the cgroup are left, and the keeper removes them. If the keeper itself is killed, the kernel kills
process 1 of the container, and with it all the others; the next keeper removes the directories.

The process that starts the keeper holds the other end of its standard input. When that is closed, which also happens if
the process is killed, the container ends. If standard output ends first, the container has ended by itself. At the end
the keeper removes DIRECTORY, which holds `console`, the container's output, and `socket`, its /run/host/socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from backend.process import procfs

ENTER = Path(__file__).with_name("enter.sh")
PREFIX = "ggroup-container-"
"""The prefix of the cgroups' names."""
END_S = 60.0
"""Seconds that killed processes may take to vanish: one that takes longer hangs in the kernel."""
UNSHARED = ("--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child")
"""The namespaces that unshare makes. enter.sh adds that of cgroups, once it is in the cgroup."""


def main() -> int:
    archive, shared, directory = (Path(word).absolute() for word in sys.argv[1:])
    # Ctrl-C is meant for the process at the other end. The signals that end the keeper make it end the container first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        code = 0
        try:
            keep(archive, shared, directory)
        except OSError as error:
            print(f"keeper: {error}", file=sys.stderr)
            code = 1
        # This tells the other end, which may use the directory until it closes standard input.
        os.close(1)
        select.select([0], [], [])
        return code
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def keep(archive: Path, shared: Path, directory: Path) -> None:
    """Run a container from its first process to its last. OSError."""
    for name in ("root", "socket"):
        (directory / name).mkdir(exist_ok=True)
    with cgroup() as path:
        words = ["unshare", *UNSHARED, "--", *map(os.fspath, (ENTER, path, archive, directory, shared))]
        # unshare is killed when this process ends for any reason, and with unshare goes process 1 of the namespace.
        words = ["setpriv", "--pdeathsig", "KILL", *words]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        try:
            watch(process)
        finally:
            end(process, path)


def watch(process: subprocess.Popen[bytes]) -> None:
    """Return when the container is not wanted any more, or has ended."""
    pidfd = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([0, pidfd], [], [])
        if pidfd in ready:
            print(f"keeper: process 1 has ended with status {process.wait()}", file=sys.stderr)
    finally:
        os.close(pidfd)


def end(process: subprocess.Popen[bytes], path: Path) -> None:
    """Kill all processes in the cgroup. With the first process of a pid namespace the kernel kills all of them, and it
    reports that one as ended last; so they are all gone when this returns."""
    deadline = time.monotonic() + END_S
    while process.poll() is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path}: what was killed has not ended within {END_S:g} s")
        # Repeated, because the process may not have entered the cgroup yet.
        (path / "cgroup.kill").write_text("1")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


# The cgroup of the container


def above() -> Path:
    """The cgroup of this process (cgroups(7)). FileNotFoundError on a machine without cgroup2."""
    mount = procfs.cgroup2()
    paths = [one.path for one in procfs.cgroups("self") if one.hierarchy == 0]
    if mount is None or not paths:
        raise FileNotFoundError("no cgroup2 is mounted here")
    return Path(mount.point, os.path.relpath(paths[0], mount.root))


@contextlib.contextmanager
def cgroup() -> Iterator[Path]:
    """An empty cgroup below that of this process, which is removed at the end, with those whose keepers were killed.

    Each keeper holds a lock on its cgroup. So a cgroup that can be locked has no keeper any more.
    """
    parent = above()
    with contextlib.ExitStack() as stack:
        # The lock on the parent keeps other keepers from looking at a cgroup that is made but not locked yet.
        with locked(parent, 0):
            for left in parent.glob(f"{PREFIX}*"):
                with contextlib.suppress(OSError), locked(left, fcntl.LOCK_NB):
                    remove(left, 0)
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            stack.callback(remove, path, END_S)
            stack.enter_context(locked(path, fcntl.LOCK_NB))
        yield path


@contextlib.contextmanager
def locked(path: Path, flags: int) -> Iterator[None]:
    """Hold flock(2) with these flags. With LOCK_NB, BlockingIOError if another process holds it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(fd)


def remove(path: Path, seconds: float) -> None:
    """Remove a cgroup and those below it. OSError if it is still in use after that many seconds."""
    deadline = time.monotonic() + seconds
    for top, _, _ in os.walk(path, topdown=False):
        while True:
            try:
                os.rmdir(top)
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                    raise
                # A killed process may not have left the cgroup yet.
                time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
