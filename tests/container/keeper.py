"""Starts a container, and ends all of it: when it is told to, or when the process that started this one is gone.

    python -m tests.container.keeper ARCHIVE SHARED DIRECTORY

The container has namespaces and a cgroup of its own, and its root is in memory. So nothing is left once its processes
are gone but the directories of the cgroup, which are removed here. Where this process is killed itself, the kernel
kills process 1 of the container, and with that all the others; the next keeper removes the directories.

The process that starts this one holds the other end of its standard input: where that is closed, be it because that
process was killed, the container ends. The end of standard output says that it has ended by itself before. At last
DIRECTORY is removed, in which are `console`, what the container writes, and `socket`, which it has as /run/host/socket.
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
"""Of the names of the cgroups."""
END_S = 60.0
"""Seconds that killed processes have to be gone: one that is not hangs in the kernel."""
UNSHARED = ("--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child")
"""enter.sh adds the cgroup's, once it is in the cgroup."""


def main() -> int:
    archive, shared, directory = (Path(word).absolute() for word in sys.argv[1:])
    # Ctrl-C is for the process at the other end. What ends this process has it end the container first.
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
        # The other end is told, and uses the directory until it says that it does not.
        os.close(1)
        select.select([0], [], [])
        return code
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def keep(archive: Path, shared: Path, directory: Path) -> None:
    """From the first process to the last one. OSError."""
    for name in ("root", "socket"):
        (directory / name).mkdir(exist_ok=True)
    with cgroup() as path:
        words = ["unshare", *UNSHARED, "--", *map(os.fspath, (ENTER, path, archive, directory, shared))]
        # With this process goes unshare, however that ends, and with unshare goes process 1 of the namespace.
        words = ["setpriv", "--pdeathsig", "KILL", *words]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        try:
            watch(process)
        finally:
            end(process, path)


def watch(process: subprocess.Popen[bytes]) -> None:
    """Returns when the container is not wanted any more."""
    pidfd = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([0, pidfd], [], [])
        if pidfd in ready:
            print(f"keeper: process 1 has ended with status {process.wait()}", file=sys.stderr)
    finally:
        os.close(pidfd)


def end(process: subprocess.Popen[bytes], path: Path) -> None:
    """Kills what is in the cgroup. With the first process of a pid namespace the kernel kills all in it, and ends that
    one last, so all are gone when it is."""
    deadline = time.monotonic() + END_S
    while process.poll() is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path}: what was killed has not ended within {END_S:g} s")
        # Again, since it may not have entered yet.
        (path / "cgroup.kill").write_text("1")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


# Its cgroup


def above() -> Path:
    """The cgroup of this process (cgroups(7)). FileNotFoundError on a machine without cgroup2."""
    mount = procfs.cgroup2()
    paths = [one.path for one in procfs.cgroups("self") if one.hierarchy == 0]
    if mount is None or not paths:
        raise FileNotFoundError("no cgroup2 is mounted here")
    return Path(mount.point, os.path.relpath(paths[0], mount.root))


@contextlib.contextmanager
def cgroup() -> Iterator[Path]:
    """An empty one below that of this process. In the end it is removed, as are those whose keeper was killed.

    A keeper has a lock on its own. So one that can be locked has no keeper any more.
    """
    parent = above()
    with contextlib.ExitStack() as stack:
        # Between making one and locking it another keeper does not look.
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
    """flock(2) with those flags: with LOCK_NB BlockingIOError where another process has it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(fd)


def remove(path: Path, seconds: float) -> None:
    """With those below it. OSError if it is in use for longer than that."""
    deadline = time.monotonic() + seconds
    for top, _, _ in os.walk(path, topdown=False):
        while True:
            try:
                os.rmdir(top)
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                    raise
                # A process that was killed has not left yet.
                time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
