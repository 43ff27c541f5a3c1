"""The kernel's view of a process between its last instruction and its end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from backend.nvidia import linux
from backend.process import procfs
from backend.process.identity import Process, cgroup_of, is_alive, start_time
from backend.process.running import is_ending, is_frozen, is_signalled, is_stopped
from tests.support.cgroups import OURS, cgroup, enter, frozen, slice_path
from tests.support.mounted import eventually
from tests.support.proc import WITHOUT_MAIN_THREAD, child_of, stat_of

Child = subprocess.Popen[bytes]


@contextmanager
def ended(process: Child) -> Iterator[Child]:
    """End a process on exit from the context."""
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def program(*words: str) -> Iterator[Child]:
    """Start a program, and wait until it has said that it is ready."""
    with ended(subprocess.Popen(words, stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process


@contextmanager
def lingering() -> Iterator[int]:
    """Yield the pid of a process that is ending and is no zombie: the first of a pid namespace waits for the others,
    one of which is a zombie that is not waited for."""
    ready = ("sh", "-c", "echo; exec sleep 1000")
    with program("unshare", "--pid", "--fork", "--kill-child", *ready) as outer:
        first = child_of(outer.pid)
        with program("nsenter", "--target", str(first), "--pid", *ready) as parent:
            os.kill(parent.pid, signal.SIGSTOP)
            eventually(lambda: is_stopped(parent.pid), "it waits for nobody")
            os.kill(first, signal.SIGKILL)
            yield first


def test_one_that_runs() -> None:
    with ExitStack() as stack:
        others = [threading.Event() for _ in range(3)]
        for event in others:
            threading.Thread(target=event.wait).start()
            stack.callback(event.set)
        assert not is_ending(os.getpid())
    assert linux.LinuxSystem().control_fds(os.getpid()) == []


def test_one_whose_main_thread_has_ended() -> None:
    with ended(subprocess.Popen([sys.executable, "-c", WITHOUT_MAIN_THREAD])) as process:
        eventually(lambda: stat_of(process.pid)[0] == "Z", "its main thread has ended")
        assert not is_ending(process.pid)
        assert linux.LinuxSystem().control_fds(process.pid) == []


def test_one_without_main_thread_that_is_stopped() -> None:
    with ended(subprocess.Popen([sys.executable, "-c", WITHOUT_MAIN_THREAD])) as process:
        eventually(lambda: stat_of(process.pid)[0] == "Z", "its main thread has ended")
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(process.pid), "what is left of it is stopped")


def test_one_without_main_thread_that_moves() -> None:
    """Figures of the thread that has ended stay what they were."""
    with cgroup() as path, ended(subprocess.Popen([sys.executable, "-c", WITHOUT_MAIN_THREAD])) as process:
        before = cgroup_of(process.pid)
        eventually(lambda: stat_of(process.pid)[0] == "Z", "its main thread has ended")
        assert cgroup_of(process.pid) == before
        enter(process.pid, path)
        assert cgroup_of(process.pid).path == f"/{slice_path(path)}"
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError):
            cgroup_of(process.pid)


def test_one_that_has_ended_in_a_cgroup_that_is_gone() -> None:
    """It is in no cgroup, and least of all in one with the name that the kernel shows."""
    with cgroup(f"{OURS} (deleted)") as path, program("sh", "-c", "echo; exec sleep 1000") as process:
        enter(process.pid, path)
        assert cgroup_of(process.pid).path == f"/{slice_path(path)}", "somebody may call one so"
        with cgroup() as other:
            enter(process.pid, other)
            process.kill()
            eventually(lambda: stat_of(process.pid)[0] == "Z", "it is a zombie")
        assert procfs.cgroups(process.pid)[-1].path == f"/{slice_path(other)} (deleted)"
        with pytest.raises(ProcessLookupError):
            cgroup_of(process.pid)


def test_one_whose_cgroup_is_frozen() -> None:
    with cgroup() as path, program("sh", "-c", "echo; exec sleep 1000") as process:
        below = path / "below"
        below.mkdir()
        for place in (path, below):
            enter(process.pid, place)
            assert not is_stopped(process.pid)
            with frozen(path):
                assert is_frozen(process.pid)
                assert is_stopped(process.pid)
                assert not is_signalled(process.pid)
        assert not is_stopped(process.pid)


def test_one_whose_cgroup_is_to_be_frozen_and_is_not_yet() -> None:
    """A thread of a neighbour may be in a call of the driver: a cgroup is frozen with its last thread."""
    with cgroup() as path, program("sh", "-c", "echo; exec sleep 1000") as process:
        enter(process.pid, path)
        with mock.patch.object(procfs, "says", lambda level, name: b"1" if (level, name) == asked else b""):
            asked = (os.fspath(path.parent), "cgroup.freeze")
            assert is_frozen(process.pid)
            asked = (os.fspath(path), "cgroup.max.depth")
            assert not is_frozen(process.pid)


def test_one_whose_cgroup_of_the_first_version_is_frozen() -> None:
    tree = procfs.cgroup1("freezer")
    if tree is None:
        pytest.skip("no v1 hierarchy has the freezer here")
    with program("sh", "-c", "echo; exec sleep 1000") as process:
        path = Path(tree.point, OURS)
        (path / "below").mkdir(parents=True)
        try:
            enter(process.pid, path / "below")
            assert not is_stopped(process.pid)
            (path / "freezer.state").write_text("FROZEN")
            assert is_stopped(process.pid)
            (path / "freezer.state").write_text("THAWED")
            assert not is_stopped(process.pid)
        finally:
            (path / "freezer.state").write_text("THAWED")
            enter(process.pid, Path(tree.point))
            (path / "below").rmdir()
            path.rmdir()


def test_one_that_ends() -> None:
    """Its GPU memory is being given back, for example."""
    with lingering() as pid:
        eventually(lambda: is_ending(pid) and stat_of(pid)[0] in "SD", "it ends, and waits")
        assert is_alive(Process(pid, start_time(pid)))
        with pytest.raises(ProcessLookupError) as caught:
            linux.LinuxSystem().control_fds(pid)
        assert caught.value.errno == errno.ESRCH


def test_one_that_has_ended() -> None:
    with subprocess.Popen(["true"]) as process:
        eventually(lambda: stat_of(process.pid)[0] == "Z", "it is a zombie")
        assert is_ending(process.pid)
    assert is_ending(process.pid)
