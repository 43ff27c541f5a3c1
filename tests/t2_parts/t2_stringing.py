"""Periods of quotas that are joined into longer ones where driver calls are scarce."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.scheduler.limited import Limited
from backend.scheduler.quota import Account
from backend.scheduler.stringing import CYCLE_CALLS, USED, string

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
