"""What the bus carries, as pieces of memory tell it: :mod:`backend.scheduler.memory.pieces`."""

from __future__ import annotations

from backend.scheduler.memory.pieces import Seen

FIRST = 30e9
"""Bytes a second that the bus is taken to carry at first."""
PIECE_S = 0.05
"""Seconds from one piece to the next."""


def seen(rate: float, seconds: float, before: Seen) -> Seen:
    """Return what is known after pieces that went so fast for so long."""
    now = before.at
    for number in range(1, round(seconds / PIECE_S) + 1):
        before = before.with_(rate, now + number * PIECE_S)
    return before


def test_a_bus_that_is_slow_for_a_moment_is_not_taken_to_be() -> None:
    """Memory of the host is being made. By the rate of that, turns would take seconds."""
    slow = seen(2.5e9, 2.0, Seen(best=FIRST))
    assert slow.usual < 3e9
    assert slow.rate > 10e9


def test_what_was_fast_once_is_taken_for_as_fast_for_a_while() -> None:
    known = seen(45e9, 2.0, Seen(best=FIRST))
    assert 44e9 < known.rate <= 45e9
    assert seen(2.5e9, 1.0, known).rate > 15e9
    assert 44e9 < seen(45e9, 2.0, seen(2.5e9, 1.0, known)).rate <= 45e9


def test_a_slow_bus_is_known_after_some_seconds() -> None:
    slow = seen(3e9, 20.0, Seen(best=FIRST))
    assert slow.rate == 3_000_000_000
