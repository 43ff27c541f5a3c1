"""The container in which the other tests run: however it ends, it leaves nothing on this machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from backend.process import procfs
from tests.container import keeper
from tests.container.guest import PATIENCE_S, TAKES

STARTER = """
import sys
from pathlib import Path
from tests.container.guest import booted
with booted(Path(sys.argv[1]), Path(sys.argv[2])) as guest:
    guest.ok("systemd-run -q sh -c 'trap : TERM; while :; do sleep 1; done'")
    print("booted", flush=True)
    sys.stdin.read()
"""


def words() -> Sequence[str]:
    """The command line of a program that starts a container and says so."""
    place = Path(os.environ["GGROUP_GUEST"])
    return [sys.executable, "-c", STARTER, os.fspath(place / "root.tar"), os.fspath(place / "share")]


@attrs.frozen
class Started:
    """A container that another process has started."""

    starter: subprocess.Popen[str]
    keeper: int
    keeper_fd: int
    first_fd: int
    """A pidfd of process 1 in the container."""
    cgroup: Path
    directory: Path


@contextlib.contextmanager
def started() -> Iterator[Started]:
    """A booted container. At the end its starter is told to end it."""
    with (
        subprocess.Popen(words(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter,
        contextlib.ExitStack() as stack,
    ):
        assert starter.stdout is not None
        assert starter.stdout.readline() == "booted\n"
        kept = child(starter.pid)
        first = child(child(kept))
        kept_fd, first_fd = os.pidfd_open(kept), os.pidfd_open(first)
        stack.callback(os.close, kept_fd)
        stack.callback(os.close, first_fd)
        [scope] = [one.path for one in procfs.cgroups(first) if one.hierarchy == 0]
        name = next(part for part in Path(scope).parts if part.startswith(keeper.PREFIX))
        directory = Path(os.fsdecode(procfs.content(f"/proc/{kept}/cmdline").split(b"\0")[-2]))
        yield Started(starter, kept, kept_fd, first_fd, keeper.above() / name, directory)


def child(pid: int) -> int:
    """The only child of a process."""
    [found] = procfs.content(f"/proc/{pid}/task/{pid}/children").split()
    return int(found)


def until_ended(pidfd: int) -> None:
    """Wait until a process has ended."""
    assert select.select([pidfd], [], [], PATIENCE_S)[0], "it has not ended"


def test_it_ends_with_the_process_that_started_it() -> None:
    """That process is killed, so that it can clean up nothing itself."""
    with started() as container:
        assert container.cgroup.is_dir()
        assert container.directory.is_dir()
        container.starter.kill()
        until_ended(container.first_fd)
        until_ended(container.keeper_fd)
        assert not container.cgroup.exists()
        assert not container.directory.exists()


def test_it_ends_with_its_keeper_and_the_next_one_cleans_up() -> None:
    with started() as container:
        os.kill(container.keeper, signal.SIGKILL)
        until_ended(container.first_fd)
        assert container.cgroup.is_dir()
        with keeper.cgroup() as another:
            assert not container.cgroup.exists()
            assert another.is_dir()
        assert not another.exists()
    # The process that started the container reports a failure.
    assert container.starter.returncode == 1
    assert not container.directory.exists()


def test_it_needs_rights_and_says_so() -> None:
    """It says so at once, as it would in a container that is not privileged."""
    without = ["setpriv", "--bounding-set", "-sys_admin", *words()]
    done = subprocess.run(
        without, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert TAKES in done.stderr
    assert "Operation not permitted" in done.stderr
