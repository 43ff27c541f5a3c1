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

from backend.identity import Process, is_alive, is_ending, start_time
from backend.nvidia import linux
from tests.mounted import eventually

Child = subprocess.Popen[bytes]

MAIN_THREAD_ENDS = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1e6,)).start(); "
MAIN_THREAD_ENDS += "print(flush=True); ctypes.CDLL(None).pthread_exit(None)"


@contextmanager
def program(*words: str) -> Iterator[Child]:
    """One that has said that it is ready."""
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process
        finally:
            process.kill()


def child_of(process: Child) -> int:
    """Its only one."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        (pid,) = map(int, file.read().split())
    return pid


@contextmanager
def lingering() -> Iterator[int]:
    """The pid of one that ends, and is no zombie: the first of a pid namespace waits for the others, of which one is a
    zombie that nobody waits for."""
    ready = ("sh", "-c", "echo; exec sleep 1000")
    with program("unshare", "--pid", "--fork", "--kill-child", *ready) as outer:
        first = child_of(outer)
        with program("nsenter", "--target", str(first), "--pid", *ready) as parent:
            os.kill(parent.pid, signal.SIGSTOP)
            os.kill(first, signal.SIGKILL)
            yield first


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_one_that_runs() -> None:
    with ExitStack() as stack:
        others = [threading.Event() for _ in range(3)]
        for event in others:
            threading.Thread(target=event.wait).start()
            stack.callback(event.set)
        assert not is_ending(os.getpid())
    assert linux.LinuxSystem().control_fds(os.getpid()) == []


def test_one_whose_main_thread_has_ended() -> None:
    with program(sys.executable, "-c", MAIN_THREAD_ENDS) as process:
        eventually(lambda: state_of(process.pid) == "Z", "its main thread has ended")
        assert not is_ending(process.pid)
        assert linux.LinuxSystem().control_fds(process.pid) == []


def test_one_that_ends() -> None:
    """As one whose GPU memory is given back."""
    with lingering() as pid:
        eventually(lambda: is_ending(pid), "it ends")
        assert state_of(pid) in "SD"
        assert is_alive(Process(pid, start_time(pid)))
        with pytest.raises(ProcessLookupError) as caught:
            linux.LinuxSystem().control_fds(pid)
        assert caught.value.errno == errno.ESRCH


def test_one_that_has_ended() -> None:
    with subprocess.Popen(["true"]) as process:
        eventually(lambda: state_of(process.pid) == "Z", "it is a zombie")
        assert is_ending(process.pid)
    assert is_ending(process.pid)
