"""How busy the engine was, from NVML's samples, while programs that do not count their kernels were on the runlist."""

from __future__ import annotations

import random

import pytest

from backend.nvidia.sight import LATE_S, SILENT_S, Sight, joined
from backend.process.identity import Process

A, B = Process(11, 1), Process(22, 1)
SPACING_S = 1 / 6


def told(sight: Sight, process: Process) -> tuple[float, float]:
    """Return the seconds that were watched, and busy."""
    found = sight.told(process)
    assert found is not None
    return found[0] / 1e6, found[1] / 1e6


def test_of_one_that_stays_all_samples_tell() -> None:
    sight = Sight()
    sight.keep([A], 0.0, ())
    for number in range(1, 61):
        sight.take(number * SPACING_S, {A.pid: 0.4}, 0.0, SPACING_S)
    watched, busy = told(sight, A)
    assert watched == pytest.approx(10.0, abs=0.2)
    assert busy / watched == pytest.approx(0.4)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("works", [1.0, 0.6])
def test_of_one_that_stands_and_goes_on_none_tells_of_the_standing(seed: int, works: float) -> None:
    """The program is on the runlist for 0.5 s of each second, in step with samples of a sixth, at any phase."""
    phase = random.Random(seed).random() * SPACING_S
    sight = Sight()
    sight.keep([A], 0.0, ())
    edges = [(0.5 * number, number % 2 == 0) for number in range(1, 60)]

    def on_s(at: float) -> float:
        return 0.5 * (at // 1.0) + min(0.5, at % 1.0)

    now = phase + SPACING_S
    while now < 29:
        while edges and edges[0][0] <= now:
            at, is_on = edges.pop(0)
            sight.turns(A, at, is_on)
        part = (on_s(now) - on_s(now - SPACING_S)) / SPACING_S * works
        sight.take(now, {A.pid: part} if part else {}, 0.0, SPACING_S if part else 0.0)
        now += SPACING_S
    watched, busy = told(sight, A)
    assert watched >= 29 * 0.9 * SPACING_S, "one at least in each"
    assert busy / watched == pytest.approx(works, abs=0.01)


def test_a_sample_over_both_tells_nothing() -> None:
    """In cycles of 0.4 s with 0.12 s on the runlist, no sample is within the time on it."""
    sight = Sight()
    sight.keep([A], 0.0, ())
    for number in range(1, 100):
        sight.turns(A, 0.2 * number, is_on=number % 2 == 0)
        sight.take(0.2 * number, {A.pid: 0.3}, 0.0, SPACING_S)
    assert told(sight, A)[0] <= 0.2


def test_what_several_have_is_taken_together() -> None:
    """The driver names one of the programs, or gives each a part: the engine worked all of the time."""
    sight = Sight()
    sight.keep([A, B], 0.0, ())
    for number in range(1, 61):
        shares = [{A.pid: 1.0}, {B.pid: 1.0}, {A.pid: 0.45, B.pid: 0.5}][number % 3]
        sight.take(number * SPACING_S, shares, 0.0, SPACING_S)
    for process in (A, B):
        watched, busy = told(sight, process)
        assert busy == pytest.approx(watched)


def test_that_there_is_no_sample_tells_of_an_engine_that_idles() -> None:
    sight = Sight()
    sight.keep([A], 0.0, ())
    for number in range(1, 101):
        sight.take(0.1 * number, {}, 0.0, 0.0)
    watched, busy = told(sight, A)
    assert watched == pytest.approx(10 - LATE_S, abs=SILENT_S + 0.2)
    assert busy == 0


def test_a_late_sample_is_of_the_time_that_it_says() -> None:
    """The program was on the runlist then, and is off by now."""
    sight = Sight()
    sight.keep([A], 0.0, ())
    sight.take(0.3, {A.pid: 1.0}, 0.0, None)
    sight.turns(A, 1.0, is_on=False)
    sight.take(1.5, {A.pid: 0.5}, 0.7, 0.3)
    assert told(sight, A) == (pytest.approx(0.3, abs=1e-5), pytest.approx(0.15, abs=1e-5))


def test_one_that_comes_off_the_runlist_is_watched_once_it_is_put_back() -> None:
    sight = Sight()
    sight.keep([A], 0.0, {A})
    sight.take(0.2, {B.pid: 1.0}, 0.0, None)
    sight.take(0.4, {B.pid: 1.0}, 0.0, 0.2)
    assert told(sight, A)[0] == 0
    sight.turns(A, 0.4, is_on=True)
    for number in range(3, 6):
        sight.take(0.2 * number, {B.pid: 1.0}, 0.0, 0.2)
    assert told(sight, A)[0] == pytest.approx(0.4, abs=1e-5)
    sight.keep([], 1.0, ())
    assert sight.told(A) is None


@pytest.mark.parametrize(
    ("before", "samples", "shares"),
    [
        (0, [(11, 500, 0.5)], {11: 0.5}),
        (0, [(11, 500, 0.5), (22, 400, 0.1)], {11: 0.5, 22: 0.1}),
        (0, [(11, 200, 1.0), (11, 400, 0.0), (22, 400, 0.5)], {11: 0.5, 22: 0.25}),
        (0, [(11, 400, 0.5), (11, 100, 1.0)], {11: 0.75}),
        (50, [(11, 400, 0.5), (11, 100, 1.0)], {11: 200 / 350}),
    ],
)
def test_all_samples_of_an_answer_count(
    before: int, samples: list[tuple[int, int, float]], shares: dict[int, float]
) -> None:
    """Each sample counts for its own time, if the driver reports them separately; the first is taken to be as long as
    the next if its beginning is unknown.
    """
    assert joined(samples, before) == pytest.approx(shares)
