"""Busy time: the part of a program's engine time during which the program had work."""

from __future__ import annotations

import pytest

from backend.nvidia.busy import BusyTime
from backend.process.identity import Process

A, B = Process(11, 1), Process(22, 1)
TICK_US = 100_000.0


def test_an_idle_program_that_has_the_engine_is_not_busy() -> None:
    """It is alone, so the trace charges it with all of the time."""
    busy = BusyTime(0)
    for tick in range(1, 11):
        busy.look([(A, tick > 7)], lambda process, tick=tick: tick * 100_000, TICK_US)  # type: ignore[misc]
    assert busy.usec(A) == 300_000
    assert busy.sampled_usec(A) == 0


def test_a_program_that_waits_for_others_is_not_busy() -> None:
    """Its kernels are pending, and it has the engine for a part of the time."""
    busy = BusyTime(0)
    for tick in range(1, 11):
        busy.look([(A, True)], lambda process, tick=tick: tick * 20_000, TICK_US)  # type: ignore[misc]
    assert busy.usec(A) == 200_000


def test_what_was_pending_is_matched_with_the_engine_of_that_time() -> None:
    """The engine's time is known two looks late: a burst that is over by then counts."""
    busy = BusyTime(2)
    used = [0, 0, 0, 100_000, 100_000, 100_000]
    for pending, now in zip([False, True, False, False, False, False], used, strict=True):
        busy.look([(A, pending)], lambda process, now=now: now, TICK_US)  # type: ignore[misc]
    assert busy.usec(A) == 100_000


def test_without_a_trace_it_is_the_time_in_which_kernels_were_pending() -> None:
    """Without a trace it is unknown when the program had the engine."""
    busy = BusyTime(2)
    for pending in (True, False, True, True):
        busy.look([(A, pending)], lambda process: None, 1e6)
    assert busy.usec(A) == 3_000_000


@pytest.mark.parametrize(("used", "expected"), [(None, 500_000), (200_000, 200_000), (900_000, 500_000)])
def test_samples_tell_no_more_than_the_engine(used: int | None, expected: int) -> None:
    """Samples can give a program that is kept off the engine the time of others."""
    busy = BusyTime(2)
    busy.sample([(A, None), (B, True)], lambda process: used, {A.pid: 500_000, B.pid: 1_000_000})
    assert (busy.usec(A), busy.sampled_usec(A)) == (expected, expected)
    assert busy.usec(B) is None, "it counts its kernels, and was not looked at"


def test_who_is_forgotten_was_never_busy() -> None:
    """Its pid may be another process's soon."""
    busy = BusyTime(0)
    busy.look([(A, True)], lambda process: 100, TICK_US)
    assert busy.rest(A, 150) == 50
    busy.forget(A)
    assert busy.usec(A) is None
    assert busy.rest(A, 150) == 0
