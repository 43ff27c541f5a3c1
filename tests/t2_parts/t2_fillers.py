"""Turns of programs that fill what a better one leaves, in simulated time."""

from __future__ import annotations

import pytest

from tests.support.scheduled import Machine, Program


def rate(late: int) -> float:
    """Return the driver calls per second for three batch programs behind one that serves requests, with a trace that is
    `late` looks late."""
    lead = Program(1, priority=0, request_us=8800, kernel_us=100, load=0.35)
    machine = Machine(lead, *[Program(n, kernel_us=900) for n in (2, 3, 4)], late=late)
    machine.run(40)
    return machine.rate(10)


@pytest.mark.parametrize("late", [1, 2, 3])
def test_batch_programs_have_long_turns_however_late_the_trace_is(late: int) -> None:
    """What the leader left of a turn and what was used of it are of the same windows: a trace is as late for both."""
    assert rate(late) <= 1.1 * rate(0)
