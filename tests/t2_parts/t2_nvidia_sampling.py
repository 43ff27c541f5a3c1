"""NVML's samples: when they are read, and for how long each one counts."""

from __future__ import annotations

import math

import pytest

from backend.nvidia.busy import BusyTime
from backend.nvidia.sampling import CLOSELY_S, SAMPLE_S, Sampling
from backend.process.identity import Process

WHO = Process(11, 1)
LOOK_S = 0.1


def test_while_a_program_stands_now_and_then_all_are_asked_for() -> None:
    sampling = Sampling()
    sampling.begin(0.0)
    assert not sampling.is_due(LOOK_S, frozenset())
    assert sampling.is_due(2 * LOOK_S, {WHO})
    sampling.window_us(2 * LOOK_S, 0)
    assert sampling.is_due(3 * LOOK_S, frozenset())
    sampling.window_us(3 * LOOK_S, 0)
    now = 3 * LOOK_S + CLOSELY_S
    sampling.window_us(now, 0)
    assert not sampling.is_due(now + LOOK_S, frozenset())
    assert sampling.is_due(now + SAMPLE_S, frozenset())


def test_one_that_stands_for_long_has_it_asked_no_more_often() -> None:
    """For example a freeze of days."""
    sampling = Sampling()
    sampling.begin(0.0)
    assert sampling.is_due(LOOK_S, {WHO})
    sampling.window_us(LOOK_S + CLOSELY_S, 0)
    assert not sampling.is_due(2 * LOOK_S + CLOSELY_S, {WHO})


def test_else_the_last_one_stands_for_all_since_it_was_asked() -> None:
    sampling = Sampling()
    sampling.begin(1.0)
    assert sampling.window_us(2.1, 166_667) == pytest.approx(1_100_000)


@pytest.mark.parametrize("spacing_us", [100_000, 166_667, 1_000_000])
@pytest.mark.parametrize("late_us", [0, 800_000])
@pytest.mark.parametrize("look_us", [100_000, 101_300, 290_000])
def test_they_add_up_to_what_was_worked(spacing_us: int, late_us: int, look_us: int) -> None:
    """For a program that works 0.12 s of each 0.4 s; there are no samples of its idle time."""

    def worked_us(at_us: int) -> int:
        return at_us // 400_000 * 120_000 + min(120_000, at_us % 400_000)

    sampling, busy = Sampling(), BusyTime(2)
    sampling.begin(0.0)
    seen: int | None = None
    for now_us in range(look_us, 20_000_000, look_us):
        assert sampling.is_due(now_us / 1e6, {WHO} if now_us // look_us % 2 else frozenset())
        span_us: int | None = 0
        sampled: dict[int, float] = {}
        for stamp_us in range((now_us - late_us) // spacing_us * spacing_us, seen or 0, -spacing_us):
            if share := math.floor(100 * (worked_us(stamp_us) - worked_us(stamp_us - spacing_us)) / spacing_us):
                span_us, seen = None if seen is None else stamp_us - seen, stamp_us
                sampled[WHO.pid] = share / 100
                break
        window_us = sampling.window_us(now_us / 1e6, span_us)
        sampled = {pid: share * window_us for pid, share in sampled.items()}
        busy.sample([(WHO, None)], lambda process, now_us=now_us: worked_us(now_us), sampled)  # type: ignore[misc]
    sampled_us = busy.sampled_usec(WHO)
    assert sampled_us is not None
    assert 0.85 * 6_000_000 <= sampled_us <= 1.05 * 6_000_000  # the late samples at the end are missing


def test_what_is_sampled_late_is_matched_with_the_engine_of_that_time() -> None:
    """The trace reports a second before samples do."""
    busy, used = BusyTime(2), 0
    for number in range(20):
        used += 360_000 if number % 2 else 240_000
        sampled = 240_000 if number % 2 else 360_000
        busy.sample([(WHO, None)], lambda process, used=used: used, {WHO.pid: sampled})  # type: ignore[misc]
    assert busy.sampled_usec(WHO) == pytest.approx(6_000_000, abs=130_000)


def test_an_engine_at_an_idle_program_is_kept_for_no_later_sample() -> None:
    """Except for samples that are a second late."""
    busy = BusyTime(2)
    busy.sample([(WHO, None)], lambda process: 60_000_000, {})
    busy.sample([(WHO, None)], lambda process: 60_000_000, {WHO.pid: 5_000_000})
    assert busy.sampled_usec(WHO) == 1_000_000
