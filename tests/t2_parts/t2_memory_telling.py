"""What the log says of turns of memory."""

from __future__ import annotations

import logging

import pytest
import trio

from backend.scheduler.memory.telling import AGAIN_S, LINES, Beginnings, log
from tests.support.harness import virtual


def test_it_is_seen_without_an_option() -> None:
    """The daemon has the others say no less than warnings."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.WARNING)
    try:
        assert log.isEnabledFor(logging.INFO)
    finally:
        root.setLevel(before)


@virtual
async def test_of_each_level_once_in_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    beginnings = Beginnings()
    for _ in range(3):
        beginnings.tell("GPU 0, slice /jobs", 3)
        beginnings.tell("GPU 0, slice /other", 2)
        await trio.sleep(AGAIN_S / 4)
    assert [one.partition(":")[0] for one in caplog.messages] == ["GPU 0, slice /jobs", "GPU 0, slice /other"]
    await trio.sleep(AGAIN_S / 2)
    beginnings.tell("GPU 0, slice /jobs", 4)
    assert caplog.messages[-1] == (
        "GPU 0, slice /jobs: programs use more memory than there is room for, and have turns, in 4 sets (-o turns=off)"
    )
    assert len(caplog.messages) == 3


@virtual
async def test_a_user_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    beginnings = Beginnings()
    rate, burst = LINES
    for number in range(1000):
        beginnings.tell(f"GPU 0, slice /user/{number}", 2)
        await trio.sleep(0.1)
    assert burst <= len(caplog.messages) <= burst + rate * 100 + 1
