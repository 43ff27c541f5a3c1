"""Programs that have the periods of a quota in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from backend.process.identity import Process
from backend.scheduler.rota import Rota

A, B, C, D = (Process(pid, 1) for pid in range(1, 5))


def period(rota: Rota, those: Sequence[Process], us: int = 100) -> Process:
    """A period in which the one that may works so much."""
    one = rota.of(those)
    assert rota.of(those) == one, "until it is over"
    rota.charge(one, us)
    rota.end()
    rota.end()
    return one


def test_each_has_a_period() -> None:
    rota = Rota()
    assert [period(rota, [A, B, C, D]) for _ in range(8)] == [A, B, C, D, A, B, C, D]


def test_one_that_had_little_has_the_next_one_again() -> None:
    """As where it was heard late that the one before had left something."""
    rota = Rota()
    assert [period(rota, [A, B], us) for us in (100, 10, 90, 100)] == [A, B, B, A]


def test_what_one_that_ends_leaves_of_its_period_is_another_s() -> None:
    rota = Rota()
    assert rota.of([A, B]) == A
    assert rota.of([B, C]) == B


def test_one_that_comes_owes_nothing_and_is_owed_nothing() -> None:
    rota = Rota()
    for _ in range(100):
        period(rota, [A, B])
    assert Counter(period(rota, [A, B, C]) for _ in range(30)) == {A: 10, B: 10, C: 10}


@given(st.lists(st.sets(st.sampled_from(range(4)), min_size=1), min_size=1, max_size=60))
def test_it_is_one_of_those_that_are_there_and_none_has_two_more_than_another(crowds: list[set[int]]) -> None:
    """Since the last one came or went."""
    rota, before, had = Rota(), set[int](), Counter[int]()
    for crowd in crowds:
        if crowd != before:
            before, had = crowd, Counter(dict.fromkeys(crowd, 0))
        had[period(rota, [Process(pid, 1) for pid in sorted(crowd)]).pid] += 1
        assert had.keys() == crowd
        assert max(had.values()) - min(had.values()) <= 2
