"""The page on which a program counts its kernels, as the daemon reads it."""

from __future__ import annotations

import os

import pytest

from backend.cuda.page import GPUS, LINE, CounterPage


@pytest.mark.parametrize(
    ("word", "worked"),
    [(0, None), (2 * 700, 700), ((2 * (700 - 5_000) | 1) & (1 << 64) - 1, 700 + 9_000 - 5_000)],
    ids=["not told", "nothing pends", "something does"],
)
def test_the_time_with_kernels_pending(word: int, worked: int | None) -> None:
    """700 us, and since 5,000 us by the clock."""
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
