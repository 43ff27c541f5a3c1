"""The watchdog: fed after a read of the tree and never without one."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from backend.common.errors import fail
from ggroupfs.daemon import watchdog
from tests.support.harness import until, virtual


class Systemd:
    """The receiving end of NOTIFY_SOCKET."""

    def __init__(self, receiver: socket.socket) -> None:
        self._receiver = receiver

    def heard(self) -> list[str]:
        """Return the assignments received since the last call."""
        found: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found += self._receiver.recv(4096).decode().split("\n")
        return found


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(os.fspath(tmp_path / "notify"))
        receiver.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", os.fspath(tmp_path / "notify"))
        yield Systemd(receiver)


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_PID": str(os.getpid())}, None),
    ],
)
def test_whether_systemd_looks(environment: dict[str, str], seconds: float | None) -> None:
    assert watchdog.period(environment) == seconds


def test_nobody_is_told_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    watchdog.notify("READY=1")


def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"ggroup-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        watchdog.notify("READY=1", "STATUS=well")
        assert receiver.recv(100) == b"READY=1\nSTATUS=well"


@virtual
async def _fed(systemd: Systemd, file: Path) -> None:
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    clock.autojump_threshold = float("inf")  # time does not pass because a thread reads
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watchdog.feed, file, 10.0)
        for _ in range(3):
            await until(lambda: systemd.heard() == ["WATCHDOG=1"], "it is fed")
            clock.jump(4.9)
            await trio.testing.wait_all_tasks_blocked()
            assert systemd.heard() == []
            clock.jump(0.2)
        nursery.cancel_scope.cancel()


def test_every_half_of_the_period(systemd: Systemd, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    _fed(systemd, tmp_path / "file")


@virtual
async def _short(systemd: Systemd, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    clock.autojump_threshold = float("inf")
    watchdog.notify("READY=1")
    assert systemd.heard() == ["READY=1"]
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", raises)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watchdog.feed, file, 10.0)
            await until(lambda: systemd.heard() == ["WATCHDOG=1"], "it is fed without a descriptor")
            patch.setattr(trio.to_thread, "run_sync", no_thread)
            clock.jump(5)
            await until(lambda: systemd.heard() == [f"STATUS={file} does not answer"], "nobody was there to ask")
            watchdog._sender().close()
            watchdog._sender.cache_clear()
            clock.jump(5)
            await trio.testing.wait_all_tasks_blocked()
            assert systemd.heard() == []
            patch.undo()
            clock.jump(5)
            await until(lambda: systemd.heard() == ["WATCHDOG=1"], "it is fed again")
            nursery.cancel_scope.cancel()


def no_thread(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")


def raises(*_: object) -> None:
    raise fail(errno.EMFILE)


@pytest.mark.logs("can't start new thread: the watchdog is not fed", "cannot be told STATUS=.*: Too many open files")
def test_short_of_descriptors_and_threads(systemd: Systemd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on, and is fed as long as the tree can be asked: its own socket is open from the beginning."""
    (tmp_path / "file").write_text("here")
    _short(systemd, tmp_path / "file", monkeypatch)


@virtual
async def _failed(systemd: Systemd, file: Path) -> None:
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    clock.autojump_threshold = float("inf")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watchdog.feed, file, 10.0)
        for _ in range(2):
            await until(lambda: systemd.heard() == [f"STATUS={file} does not answer"], "it is told")
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(5)
        nursery.cancel_scope.cancel()


@pytest.mark.logs("No such file or directory.*not fed")
def test_not_where_the_read_fails(systemd: Systemd, tmp_path: Path) -> None:
    _failed(systemd, tmp_path / "nothing")


@virtual
async def _hung(systemd: Systemd, file: Path) -> None:
    with trio.move_on_after(12):
        await watchdog.feed(file, 10.0)
    assert systemd.heard() == [f"STATUS={file} does not answer"] * 2


@pytest.mark.logs("no answer within 5 s: the watchdog is not fed")
def test_not_where_the_tree_hangs(systemd: Systemd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO without a writer blocks a reader, as a dead tree does."""
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(os, "statvfs", lambda path: os.close(os.open(path, os.O_RDONLY)))
    _hung(systemd, tmp_path / "fifo")
    # Release the threads that are left behind.
    os.close(os.open(tmp_path / "fifo", os.O_RDWR | os.O_NONBLOCK))
