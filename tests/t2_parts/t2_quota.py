"""Accounts of quotas and meters of work, without a clock: properties over random loads."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.core.records import Activity
from backend.process.identity import Process
from backend.scheduler.meter import Meters, Share
from backend.scheduler.quota import BACK_US, CHECK_US, IDLE_CHECK_US, OWED_US, Account

LOADS = settings(print_blob=True, max_examples=200, deadline=None)
WHO = Process(1, 1)

quotas = st.tuples(st.integers(1000, 900_000), st.integers(10_000, 1_000_000)).filter(lambda one: one[0] < one[1])


@attrs.define
class Engine:
    """One group with a quota on an engine, which runs on for `ahead_us` of work after it is to stand."""

    account: Account
    ahead_us: int = 0
    now_us: int = 0
    worked_us: int = 0
    most_us: int = 0
    """The most that was worked in one period."""
    periods: int = 0
    _left_us: int = 0
    _marks: list[tuple[int, int]] = attrs.field(factory=list)

    def run(self, until_us: int, wants: bool) -> None:
        """The group wants to work, or not, up to a time."""
        while self.now_us < until_us:
            self.periods += self.account.advance(self.now_us)
            stands = self.account.decide()
            due_us = min(until_us, max(self.now_us + 1, self.account.next_us(self.now_us)))
            if not stands:
                self._left_us = self.ahead_us
                worked = due_us - self.now_us if wants else 0
            else:
                worked = min(self._left_us, due_us - self.now_us) if wants else 0
                self._left_us -= worked
            self.account.charge(worked)
            self.worked_us += worked
            self._marks.append((self.now_us, worked))
            self.now_us = due_us


@LOADS
@given(quota=quotas, ahead_us=st.sampled_from((0, 500, 12_000)), periods=st.integers(20, 60))
def test_one_that_always_works_has_its_quota(quota: tuple[int, int], ahead_us: int, periods: int) -> None:
    """To what one period may be over: what is over is paid for."""
    quota_us, period_us = quota
    engine = Engine(Account(quota_us, period_us, 0), ahead_us)
    engine.run(periods * period_us, wants=True)
    over_us = CHECK_US + ahead_us + IDLE_CHECK_US
    assert engine.worked_us <= periods * quota_us + over_us
    assert engine.worked_us >= (periods - 1) * quota_us - over_us


@LOADS
@given(quota=quotas, load=st.lists(st.tuples(st.integers(100, 3_000_000), st.booleans()), min_size=1, max_size=20))
def test_in_no_time_is_more_worked_than_the_quota_and_the_bound(
    quota: tuple[int, int], load: list[tuple[int, bool]]
) -> None:
    """In each window of whole periods, from whatever period on, however the load comes and goes: its quota, that of one
    period more, and what a look may be late."""
    quota_us, period_us = quota
    engine = Engine(Account(quota_us, period_us, 0))
    for length_us, wants in load:
        engine.run(engine.now_us + length_us, wants)
    worked = [0] * (engine.now_us // period_us + 2)
    for at_us, us in engine._marks:
        while us:
            period = at_us // period_us
            part = min(us, (period + 1) * period_us - at_us)
            worked[period] += part
            at_us, us = at_us + part, us - part
    bound_us = quota_us + IDLE_CHECK_US + CHECK_US
    total, lowest = 0, 0
    for us in worked:
        total += us - quota_us
        assert total - lowest <= bound_us
        lowest = min(lowest, total)


@LOADS
@given(quota=quotas, load=st.lists(st.tuples(st.integers(100, 3_000_000), st.booleans()), min_size=1, max_size=20))
def test_one_that_wants_less_never_stands(quota: tuple[int, int], load: list[tuple[int, bool]]) -> None:
    """One that idles for all of a period at least after each quota that it used is kept from nothing."""
    quota_us, period_us = quota
    account = Account(quota_us, period_us, 0)
    now_us = 0
    for idle_us, works in load:
        account.advance(now_us)
        if works:
            account.charge(min(quota_us - 1, idle_us))
        assert not account.decide()
        now_us += 2 * period_us + idle_us


def test_what_is_owed_to_one_that_waits_is_bounded() -> None:
    account = Account(10_000, 100_000, 0)
    for now_us in range(0, 20_000_000, 50_000):
        account.waited_us = now_us
        account.advance(now_us)
        account.decide()
    assert account.left_us == 10_000 * (1 + OWED_US // 100_000)


@pytest.mark.parametrize(("quota_us", "period_us", "stands_s"), [(300_000, 1_000_000, 60), (10_000, 1_000_000, 100)])
def test_what_a_group_owes_is_bounded(quota_us: int, period_us: int, stands_s: int) -> None:
    """It did an hour of work beyond its quota; it stands for a minute, or until it has paid for a second."""
    account = Account(quota_us, period_us, 0)
    account.charge(3_600_000_000)
    now_us = 0
    while account.decide():
        now_us = max(now_us + 1, account.next_us(now_us))
        account.advance(now_us)
        if now_us > 4_000_000_000:
            break
    assert now_us / 1e6 == pytest.approx(stands_s, abs=2)


def test_a_debt_below_the_bound_is_paid_whole() -> None:
    account = Account(30_000, 100_000, 0)
    account.charge(6_000_000)
    account.advance(19_900_000)
    assert account.decide()
    account.advance(20_100_000)
    assert not account.decide()


def test_an_idle_group_has_no_periods() -> None:
    account = Account(30_000, 100_000, 0)
    assert account.advance(10_000_000) == 0
    account.charge(1000)
    assert account.advance(10_050_000) == 0
    assert account.advance(20_000_000) == 1
    account.charge(50_000)
    assert account.decide()
    assert account.advance(20_150_000) == 1
    assert account.decide() is False


def test_a_greater_quota_holds_at_once_and_what_was_used_counts() -> None:
    account = Account(10_000, 100_000, 0)
    account.charge(10_000)
    assert account.decide()
    account.change(30_000, 100_000)
    assert not account.decide()
    assert account.left_us == 20_000
    account.change(5000, 100_000)
    assert account.decide()


@pytest.mark.parametrize("late_us", [0, 200_000])
def test_a_meter_comes_to_what_is_told(late_us: int) -> None:
    meters, total = Meters(late_us), 0
    meters.begin(WHO, Activity(gpu_usec=0, busy_usec=0, pending=1))
    for now_us in range(0, 5_000_000, 5_000):
        told = max(0, now_us // 100_000 * 100_000 - late_us) // 2  # it shares the engine with another
        total += meters.look(now_us, [(WHO, Activity(gpu_usec=told, busy_usec=told, pending=1), True)])[WHO]
    assert total == pytest.approx(2_500_000, abs=110_000)


def test_a_meter_charges_no_engine_that_stood_idle() -> None:
    """A context that is alone has the engine all of the time; the program works for 10 ms of each 100."""
    meters, total = Meters(200_000), 0
    meters.begin(WHO, Activity(gpu_usec=0, pending=0))
    for now_us in range(0, 10_000_000, 1_000):
        told = max(0, now_us // 100_000 * 100_000 - 200_000)
        works = now_us % 100_000 < 10_000
        total += meters.look(now_us, [(WHO, Activity(gpu_usec=told, pending=int(works)), True)])[WHO]
    assert total == pytest.approx(1_000_000, rel=0.05)


def test_of_two_the_idle_engine_is_charged_to_neither() -> None:
    other, total = Process(2, 1), 0
    meters = Meters(200_000)
    for process in (WHO, other):
        meters.begin(process, Activity(gpu_usec=0, pending=0))
    for now_us in range(0, 10_000_000, 1_000):
        told = max(0, now_us // 100_000 * 100_000 - 200_000)
        looks = [
            (process, Activity(gpu_usec=told * part // 20, pending=int(now_us % 100_000 < 20_000)), True)
            for process, part in ((WHO, 18), (other, 2))
        ]
        total += sum(meters.look(now_us, looks).values())
    assert total == pytest.approx(2_000_000, rel=0.05)


def test_a_program_that_nothing_is_told_of_is_charged_all_that_it_was_let() -> None:
    meters, total = Meters(200_000), 0
    meters.begin(WHO, None)
    for now_us in range(0, 1_000_001, 10_000):
        total += meters.look(now_us, [(WHO, Activity(), now_us <= 500_000)])[WHO]
    assert total == 500_000


def test_what_is_told_of_one_that_has_ended_takes_the_place_of_the_guess() -> None:
    """Two have had the engine in turns; one ends, and its figures come 0.2 s later."""
    other, meters, total = Process(2, 1), Meters(200_000), 0
    for process in (WHO, other):
        meters.begin(process, Activity(gpu_usec=0, pending=1))

    def told(now_us: int, part: float) -> Activity:
        return Activity(gpu_usec=round(part * max(0, now_us - 200_000)), pending=1)

    for now_us in range(0, 100_000, 5_000):  # nothing is told yet, so half is the guess
        total += meters.look(now_us, [(WHO, told(now_us, 0.9), True), (other, told(now_us, 0.1), True)])[WHO]
    total += meters.end(100_000, (WHO, told(100_000, 0.9), True))
    assert total == pytest.approx(50_000, abs=5_000)
    for now_us in range(105_000, 400_000, 5_000):
        last = told(min(now_us, 300_000), 0.9)
        total += meters.look(now_us, [(WHO, last, False), (other, told(now_us, 0.1), True)])[WHO]
        assert meters.is_settled(100_000) == (now_us >= 300_000)
    assert total == pytest.approx(90_000, abs=5_000)


def test_work_that_is_told_a_little_late_is_no_idle_engine() -> None:
    """In each 0.4 s the engine stands at the context of one for 0.1 s, then two work, then another program has it, then
    the two work; and of what is known of the chances of a time the figures tell 15 ms later."""
    meters, total, other = Meters(200_000), 0, Process(2, 1)
    for process in (WHO, other):
        meters.begin(process, Activity(gpu_usec=0, pending=0))
    for now_us in range(0, 20_000_000, 1_000):
        pending = int(now_us % 200_000 >= 100_000)
        cycles, at_us = divmod(max(0, now_us // 100_000 * 100_000 - 215_000), 400_000)
        worked = sum(min(100_000, max(0, at_us - began_us)) for began_us in (100_000, 300_000))
        work_us = 100_000 * cycles + worked // 2
        idle_us = 100_000 * cycles + min(100_000, at_us)
        each = {WHO: work_us + idle_us, other: work_us}
        looks = [(process, Activity(gpu_usec=us, pending=pending), True) for process, us in each.items()]
        total += sum(meters.look(now_us, looks).values())
    assert total == pytest.approx(10_000_000, rel=0.02)


@pytest.mark.parametrize("opens_us", [0, 300, 900])
def test_a_library_says_itself_for_how_long_it_worked(opens_us: int) -> None:
    """It works for 30 ms of each 100 ms, alone. Its gate opens a while after it was decided, and that nothing is
    pending is seen up to a millisecond late: by looks alone it had 0.29."""
    meters, total = Meters(200_000), 0
    meters.begin(WHO, Activity(gpu_usec=0, pending=0, pending_usec=0, stays=1))
    for now_us in range(0, 20_000_000, 1_000):
        if now_us % 100_000 == 0:
            meters.begins(WHO)
        cycles, at_us = divmod(now_us, 100_000)
        worked_us = 30_000 * cycles + min(30_000, max(0, at_us - opens_us))
        pending = int(opens_us <= at_us < opens_us + 30_000)
        told = max(0, now_us // 100_000 * 100_000 - 200_000)  # its context has the engine all of the time
        activity = Activity(gpu_usec=told, pending=pending, pending_usec=worked_us, stays=1)
        total += meters.look(now_us, [(WHO, activity, 1.0)])[WHO]
    assert total == pytest.approx(200 * 30_000, rel=0.002)


@pytest.mark.parametrize("stay_us", [2_000, 30_000])
def test_switches_of_contexts_are_no_work(stay_us: int) -> None:
    """It shares the engine, and always has work; each stay takes 197 us more, which the trace charges to it."""
    switch_us, total = 197, 0
    meters = Meters(200_000, switch_us)
    meters.begin(WHO, Activity(gpu_usec=0, pending=1, pending_usec=0, stays=0))
    for now_us in range(0, 20_000_000, 5_000):
        at_us = max(0, now_us // 100_000 * 100_000 - 200_000)
        rounds, rest_us = divmod(at_us, 2 * (stay_us + switch_us))
        told = rounds * (stay_us + switch_us) + min(rest_us, stay_us + switch_us)
        activity = Activity(gpu_usec=told, pending=1, pending_usec=now_us, stays=rounds + (rest_us > 0))
        total += meters.look(now_us, [(WHO, activity, 1.0)])[WHO]
    assert total == pytest.approx(10_000_000 * stay_us / (stay_us + switch_us), rel=0.01)


def test_what_others_kept_a_group_from_is_owed_to_it() -> None:
    """It had work for all of the period, and the engine for 20 ms; up to one quota, however often that was so."""
    account = Account(30_000, 100_000, 0)
    for now_us in range(5_000, 1_000_001, 5_000):
        account.charge(1_000)
        account.note(True)
        account.advance(now_us)
        assert not account.decide()
    assert account.left_us == 60_000


@pytest.mark.parametrize("rests_at_us", [5_000, 50_000, 100_000])
def test_what_a_group_leaves_by_itself_is_lost(rests_at_us: int) -> None:
    account = Account(30_000, 100_000, 0)
    for now_us in range(5_000, 100_001, 5_000):
        account.charge(1_000)
        account.note(now_us != rests_at_us)
        account.advance(now_us)
        account.decide()
    assert account.left_us == 30_000


def test_one_that_stands_and_is_told_of_late_does_so_until_the_next_period() -> None:
    """The group has then what it is given back meanwhile, up to what may come back in one period."""
    account = Account(30_000, 100_000, 0, is_late=True)
    account.charge(30_000)
    assert account.decide()
    account.charge(-8_000)
    assert account.decide()
    assert account.next_us(50_000) == 100_000
    account.advance(100_000)
    assert not account.decide()
    assert account.left_us == 38_000
    account.charge(38_000)
    assert account.decide()
    account.charge(-200_000)
    account.advance(200_000)
    assert account.left_us == 30_000 + BACK_US // 100_000 * 30_000


def test_a_greater_quota_has_one_that_stands_go_on() -> None:
    account = Account(30_000, 100_000, 0, is_late=True)
    account.charge(30_000)
    assert account.decide()
    account.change(60_000, 100_000)
    assert not account.decide()


def learnt(windows: list[tuple[int, int]], share: Share) -> list[float]:
    """Return the part of a share after each of these windows (work, chances), microseconds."""
    return [share.learn(worked, chances) or share.part for worked, chances in windows]


def beside(part: float, count: int) -> list[tuple[int, int]]:
    """Return the windows, as a trace tells of them, of a program that has the engine for slices of 30 ms, 240 ms of
    each 400 ms."""
    slices, found = 30_000, list[tuple[int, int]]()
    round_us = round(slices / part)
    for cycle in range(count):
        phase = cycle * 7_000 % round_us
        for began, ended in ((0, 60_000), (60_000, 160_000), (160_000, 240_000)):
            worked = sum((us + phase) % round_us < slices for us in range(began, ended, 500)) * 500
            found.append((worked, ended - began))
    return found


@pytest.mark.parametrize("part", [0.25, 0.5])
def test_slices_are_not_taken_for_a_change(part: float) -> None:
    """By a tenth of a second alone the share is off by a tenth, and a quota by as much."""
    found = learnt(beside(part, 60), Share())[60:]
    assert max(found) - min(found) <= 0.05
    assert sum(found) / len(found) == pytest.approx(part, abs=0.02)


def test_a_neighbour_that_comes_or_goes_is_seen_soon() -> None:
    share = Share()
    found = learnt(beside(0.5, 30), share)
    assert learnt([(100_000, 100_000)] * 4, share)[-1] > 0.75
    assert learnt([(100_000, 100_000)] * 20, share)[-1] > 0.9
    assert found[-1] < 0.6
    assert learnt(beside(0.5, 3), share)[-1] < 0.7
