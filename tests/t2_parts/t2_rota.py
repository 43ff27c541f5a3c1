"""Programs that have the periods of a quota in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from backend.process.identity import Process
from backend.scheduler.limited import Limited
from backend.scheduler.quota import Account
from backend.scheduler.rota import RESTS_US, SPARED, Rota, Rotation
from backend.scheduler.stringing import string

A, B, C, D = (Process(pid, 1) for pid in range(1, 5))


def period(rota: Rota, those: Sequence[Process], us: int = 100) -> Process:
    """Run a period in which the program that may run works for `us`."""
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
    """It was learnt late that its predecessor had left some time."""
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


def limited() -> dict[Process, Limited]:
    """Three equals under one quota of 30 ms in 100."""
    account = Account(30_000, 100_000, 0)
    return {process: Limited((account,), levers=True) for process in (A, B, C)}


def waiting(each: dict[Process, Limited]) -> list[Process]:
    return [process for process, one in each.items() if one.waits]


def test_all_that_are_there_and_equals_have_periods_in_turns() -> None:
    each, rotation = limited(), Rotation(lambda process: process != D, lambda process: True)
    rotation.look(0, each, {A, B, C})
    assert waiting(each) == [B, C]
    for known in (None, {A, B}, {A, B, C, D}):
        rotation.look(1, each, known)
        assert waiting(each) == []
    rotation.look(2, each, {A, B, C})
    assert waiting(each) == [B, C]
    for name, value in (("levers", False), ("equals", "another slice"), ("rests_us", 10)):
        before = getattr(each[B], name)
        setattr(each[B], name, value)
        rotation.look(3, each, {A, B, C})
        assert waiting(each) == []
        setattr(each[B], name, before)
    each[D] = each.pop(C)
    rotation.look(4, each, {A, B, D})
    assert waiting(each) == [], "one that does not always work"


def test_one_that_has_just_come_works_besides() -> None:
    """Whether the new process takes levers is not known; the others wait on all the same."""
    each, rotation = limited(), Rotation(lambda process: True, lambda process: True)
    rotation.look(0, each, {A, B, C})
    each[D] = Limited(each[A].accounts, levers=None)
    rotation.look(1, each, {A, B, C, D})
    assert waiting(each) == [B, C]


def test_the_next_period_is_reckoned_for_one_of_them() -> None:
    """While all of them stand, periods are strung together for the calls of those that go on."""
    each, rotation = limited(), Rotation(lambda process: True, lambda process: True)
    rotation.look(0, each, {A, B, C})
    rotation.charge(A, 30_000)
    each[D] = Limited(each[A].accounts, levers=True)
    each[A].accounts[0].is_spent = True
    rotation.look(1, each, {A, B, C, D})
    assert waiting(each) == [A, C, D]
    string(12, each.values())
    assert each[A].accounts[0].strung == 4


def test_one_that_leaves_its_period_ends_the_turns_for_a_while() -> None:
    each, runs = limited(), {A}
    rotation, there = Rotation(lambda process: True, runs.__contains__), {A, B, C}
    for now_us in range(0, SPARED * 100_000 + 2_000, 1_000):
        assert waiting(each) in ([], [B, C])
        rotation.look(now_us, each, there)
    rotation.look(now_us + 1_000, each, there)
    assert waiting(each) == []
    assert [process for process, one in each.items() if one.rests_us] == [A]
    rotation.look(now_us + RESTS_US + 1_000, each, there)
    assert waiting(each) == [B, C]
    runs.clear()  # no driver calls are available
    for later_us in range(now_us + RESTS_US + 1_000, now_us + RESTS_US + 1_000_000, 1_000):
        rotation.look(later_us, each, there)
        assert waiting(each) == [B, C]


def test_one_that_has_period_after_period_is_not_taken_to_leave_them() -> None:
    """It may have had the least, since the others were charged too much."""
    each, rotation = limited(), Rotation(lambda process: True, lambda process: True)
    (account,) = each[A].accounts
    for now_us in range(0, 1_000_000, 1_000):
        account.is_spent = now_us % 100_000 >= 50_000
        rotation.look(now_us, each, {A, B, C})
    assert waiting(each) == [B, C]


@given(st.lists(st.sets(st.sampled_from(range(4)), min_size=1), min_size=1, max_size=60))
def test_it_is_one_of_those_that_are_there_and_none_has_two_more_than_another(crowds: list[set[int]]) -> None:
    """Counted since the last program came or went."""
    rota, before, had = Rota(), set[int](), Counter[int]()
    for crowd in crowds:
        if crowd != before:
            before, had = crowd, Counter(dict.fromkeys(crowd, 0))
        had[period(rota, [Process(pid, 1) for pid in sorted(crowd)]).pid] += 1
        assert had.keys() == crowd
        assert max(had.values()) - min(had.values()) <= 2
