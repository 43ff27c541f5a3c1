"""What the kernel says of a process between its last instruction and its end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from backend.identity import Process, is_alive, start_time
from backend.nvidia import linux
from backend.running import is_ending, is_stopped
from tests.mounted import eventually
from tests.proc import WITHOUT_MAIN_THREAD, child_of, stat_of

Child = subprocess.Popen[bytes]


@contextmanager
def ended(process: Child) -> Iterator[Child]:
    """... in the end."""
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def program(*words: str) -> Iterator[Child]:
    """One that has said that it is ready."""
    with ended(subprocess.Popen(words, stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process


@contextmanager
def lingering() -> Iterator[int]:
    """The pid of one that ends, and is no zombie: the first of a pid namespace waits for the others, of which one is a
    zombie that nobody waits for."""
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


def test_one_that_ends() -> None:
    """As one whose GPU memory is given back."""
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
