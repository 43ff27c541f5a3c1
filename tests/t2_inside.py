"""What is in a program that has its reader wait: nobody else waits, and it is not said to be known."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
import trio

from backend import inside
from tests.harness import until

Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Programs of which no read comes back, as where they hold their mmap lock, until it is set."""
    go = threading.Event()
    monkeypatch.setattr(inside, "ANSWER_S", 0.05)
    real = inside.in_maps
    monkeypatch.setattr(inside, "in_maps", lambda pid: real(pid) if pid == os.getpid() else go.wait())
    yield go
    go.set()


def test_who_does_not_let_itself_be_looked_at_is_not_known_and_keeps_nobody(
    held: threading.Event, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = spawn().pid
    monkeypatch.setattr(inside, "owner_of", lambda pid: 0 if pid == os.getpid() else 65534)

    async def test() -> None:
        for _ in range(inside.STUCK):
            with pytest.raises(OSError, match="it does not let itself") as raised:
                await inside.has_library(pid)
            assert raised.value.errno == errno.EBUSY
            assert not await inside.has_library(os.getpid()), "another user's is looked at"
        with pytest.raises(OSError, match="programs of its user"):
            await inside.has_library(pid)
        assert list(inside._under_way.values()) == [65534] * inside.STUCK
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0, "others have theirs"
        held.set()
        await until(lambda: not inside._under_way, "they came back")
        assert await inside.has_library(pid)

    trio.run(test)


def test_no_thread_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> bool:
        raise OSError(errno.EAGAIN, "no thread")

    monkeypatch.setattr(inside, "in_a_thread", refuse)
    with pytest.raises(BlockingIOError):
        trio.run(inside.has_library, os.getpid())
    assert not inside._under_way
