"""The page on which a program counts its kernels, as the daemon reads it."""

from __future__ import annotations

import os

import pytest

from backend.core.workingset import WorkingSet
from backend.cuda.page import ALONE, GPUS, LINE, USED, USED_AT, CounterPage


@pytest.mark.parametrize(
    ("word", "worked"),
    [(0, None), (2 * 700, 700), ((2 * (700 - 5_000) | 1) & (1 << 64) - 1, 700 + 9_000 - 5_000)],
    ids=["not told", "nothing pends", "something does"],
)
def test_the_time_with_kernels_pending(word: int, worked: int | None) -> None:
    """The values are 700 us, plus 5,000 us since then by the clock."""
    page = CounterPage()
    try:
        os.pwrite(page.descriptor, LINE.pack(10, 9, 3), 2 * LINE.size)
        os.pwrite(page.descriptor, word.to_bytes(8, "little"), 2 * LINE.size + 24)
        assert page.counts(2) == (10, 9)
        assert page.launches(2) == 3
        assert page.worked_us(2, 9_000) == worked
        assert page.worked_us(GPUS, 9_000) is None
    finally:
        page.close()


def test_a_working_set_is_on_a_line_of_its_own() -> None:
    """Libraries without working sets have lines of counts that are as long."""
    page = CounterPage()
    try:
        os.pwrite(page.descriptor, LINE.pack(10, 9, 3), 2 * LINE.size)
        assert page.working_set(2) is None
        os.pwrite(page.descriptor, USED.pack(600, 700, 50, ALONE, 7, 8), USED_AT + 2 * USED.size)
        assert page.working_set(2) == WorkingSet(600, 600, 50, 7, 8)
        assert page.is_alone(2)
        assert not page.is_alone(1)
        assert page.counts(2) == (10, 9)
    finally:
        page.close()
