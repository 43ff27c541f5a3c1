"""What of its time on the engine a program without the library works, by samples that are whole."""

from __future__ import annotations

import pytest

from backend.core.records import Activity
from backend.scheduler.watched import AGAIN_US, FIRST_US, NEW_US, PUT_RIGHT_US, TRIED_US, Watched


def activity(watched: int, busy: int) -> Activity:
    return Activity(gpu_usec=0, watched_usec=watched, watched_busy_usec=busy)


def test_without_samples_all_of_its_time_counts() -> None:
    watched = Watched()
    watched.begin(activity(0, 0))
    assert sum(watched.take(30_000, activity(0, 0)) for _ in range(100)) == 3_000_000


@pytest.mark.parametrize("part", [0.0, 0.3, 0.92, 1.0])
def test_with_each_sample_what_was_counted_is_put_right(part: float) -> None:
    """Whatever it was taken to do before."""
    watched, counted = Watched(), 0.0
    watched.begin(activity(0, 0))
    for number in range(1, 31):
        seen = number // 3 * 160_000
        counted += watched.take(100_000, activity(seen, round(part * seen)))
    assert counted == pytest.approx(part * 3_000_000, abs=1)
    assert watched.works == (part >= 0.9)


def test_what_is_put_right_is_bounded() -> None:
    watched = Watched()
    watched.begin(activity(0, 0))
    counted = watched.take(60_000_000, activity(0, 0)) + watched.take(0, activity(160_000, 0))
    assert counted == 60_000_000 - PUT_RIGHT_US


def test_samples_never_count_more_than_the_engine() -> None:
    watched = Watched()
    watched.begin(activity(0, 0))
    assert watched.take(100_000, activity(100_000, 250_000)) == 100_000


def test_what_was_known_before_is_the_first_guess_alone() -> None:
    watched = Watched()
    watched.begin(activity(10_000_000, 1_000_000))
    counted = watched.take(100_000, activity(10_000_000, 1_000_000))
    assert counted == pytest.approx(10_000)
    counted += watched.take(0, activity(10_160_000, 1_160_000))
    assert counted == pytest.approx(100_000)


def test_it_is_looked_for_a_sample_at_first_and_now_and_then() -> None:
    watched = Watched()
    watched.begin(activity(1_000_000, 1_000_000))
    assert not watched.wants_sight(0)
    assert watched.wants_sight(FIRST_US)
    watched.take(100_000, activity(1_160_000, 1_160_000))
    assert not watched.wants_sight(FIRST_US + 1)
    assert watched.wants_sight(FIRST_US + 1 + AGAIN_US)
    watched.take(100_000, activity(1_320_000, 1_240_000))
    assert watched.wants_sight(FIRST_US + 2 + AGAIN_US), "it idles: its quota goes by samples"


def test_where_no_sample_comes_it_is_not_looked_for_all_the_time() -> None:
    watched = Watched()
    watched.begin(Activity(gpu_usec=0))
    assert not watched.wants_sight(0)
    for began_us in (FIRST_US, FIRST_US + TRIED_US + AGAIN_US):
        assert watched.wants_sight(began_us)
        assert watched.wants_sight(began_us + TRIED_US - 1)
        assert not watched.wants_sight(began_us + TRIED_US)


def test_of_one_that_is_new_it_is_looked_for_later() -> None:
    """A program that comes and goes has ended by then."""
    watched = Watched()
    assert not watched.wants_sight(0)
    assert not watched.wants_sight(NEW_US - 1)
    assert watched.wants_sight(NEW_US)
