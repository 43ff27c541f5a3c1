"""Periods of quotas that are joined into longer ones where driver calls are scarce."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.scheduler.limited import Limited
from backend.scheduler.quota import Account
from backend.scheduler.stringing import CYCLE_CALLS, SIGHT_CYCLES_US, USED, string
from backend.scheduler.watched import ON_US

RATE = 12


def below(*accounts: Account, count: int = 1) -> list[Limited]:
    """Return programs without the library below these accounts, the highest account last."""
    return [Limited(accounts, levers=True) for _ in range(count)]


def test_one_alone_has_all_calls() -> None:
    account = Account(30_000, 100_000, 0)
    string(RATE, below(account))
    assert account.strung == 4, "three calls at 9.6 a second"


def test_one_that_takes_none_has_each_period() -> None:
    account, other = Account(30_000, 100_000, 0, strung=7), Account(30_000, 100_000, 0)
    string(RATE, [Limited((account,), levers=False), *below(other, count=9)])
    assert account.strung == 1


def test_many_below_one_quota_string_no_other_s_periods() -> None:
    few, many = Account(30_000, 100_000, 0), Account(30_000, 100_000, 0)
    string(RATE, [*below(few), *below(many, count=1000)])
    assert few.strung == 7, "half of the calls"
    assert many.strung == 6250


def test_what_one_does_not_need_the_others_have() -> None:
    slow, quick = Account(30_000, 1_000_000, 0), Account(30_000, 100_000, 0)
    string(RATE, [*below(slow), *below(quick, count=4)])
    assert slow.strung == 1, "it needs 3 a second"
    assert quick.strung == 19, "12 calls at 6.6 a second"


def test_quotas_below_one_have_its_part_together() -> None:
    top, low, other = (Account(30_000, 100_000, 0) for _ in range(3))
    string(RATE, [*below(low, top), *below(top), *below(other, count=2)])
    assert low.strung == top.strung == other.strung == 13


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(10_000, 1_000_000)), min_size=1, max_size=20))
def test_no_more_are_asked_for_than_there_are(groups: list[tuple[int, int]]) -> None:
    tops = [(count, Account(1000, period_us, 0)) for count, period_us in groups]
    string(RATE, [one for count, account in tops for one in below(account, count=count)])
    rate = sum(CYCLE_CALLS * count / (account.strung * account.period_us) * 1e6 for count, account in tops)
    assert rate <= USED * RATE * 1.000001


def looked_for(quota_us: int, *, pace: float = 1.0, part: float = 1.0, period_us: int = 100_000) -> int:
    """Return the number of periods strung together for a program that samples are to tell of."""
    account = Account(quota_us, period_us, 0)
    (one,) = below(account)
    one.wants_sight, one.pace, one.part = True, pace, part
    string(RATE, [one])
    return account.strung


@pytest.mark.parametrize(
    ("quota_us", "pace", "periods"), [(30_000, 1.0, 12), (30_000, 0.5, 8), (80_000, 1.0, 8), (95_000, 0.98, 4)]
)
def test_a_sample_takes_as_few_cycles_as_it_has_to(quota_us: int, pace: float, periods: int) -> None:
    """Beside others a program is on the runlist for longer. Whole cycles: the next ones begin when they would have."""
    assert looked_for(quota_us, pace=pace) == periods
    assert periods * quota_us >= ON_US * pace


def test_where_no_sample_can_fall_cycles_stay_as_they_are() -> None:
    assert looked_for(10_000) == 4
    assert looked_for(100_000, period_us=1_000_000) == 1


def test_a_small_quota_has_no_longer_cycle_beside_others() -> None:
    """A time that is measured from the middle of a cycle of 2 s would miss a tenth of the quota of 10 s."""
    assert looked_for(10_000, pace=0.5) == 4
    assert looked_for(100_000, pace=0.5, period_us=1_000_000) == 1


@pytest.mark.parametrize(("part", "pace", "cycle_us"), [(0.6, 0.6, SIGHT_CYCLES_US[1]), (0.6, 0.3, SIGHT_CYCLES_US[1])])
def test_one_that_idles_is_looked_at_for_longer(part: float, pace: float, cycle_us: int) -> None:
    assert looked_for(30_000, part=part, pace=pace) * 100_000 == cycle_us
