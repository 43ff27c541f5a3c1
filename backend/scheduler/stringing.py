"""How many periods of quotas are strung together, so that there are calls of the driver for all of them. Pure.

A program without the library takes CYCLE_CALLS for each context in each period. What there is of these is shared by the
quotas that stand at the top, each with all that is below it, however much that is: a slice with a thousand programs has
long periods itself, and no other has longer ones for that than with one such program beside it.

A program of which samples are to tell has longer cycles meanwhile (``watched.py``). What counts is how long it is on
the runlist in one go, and beside others that is longer than its quota: a cycle with all of ON_US as its quota would
move twice as much work to its beginning as it has to, and a time that is measured from its middle would miss that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from backend.scheduler.limited import Limited
from backend.scheduler.quota import Account
from backend.scheduler.watched import IDLES, ON_US

USED = 0.8
"""Part of the calls that periods are strung together for: each process is to find some when it needs them."""
SIGHT_CYCLES_US = (1_000_000, 2_000_000)
"""Lengths of a cycle, microseconds, in which a program that idles in between is on the runlist for long enough that
samples tell of it: the first that is enough is taken, if any. A time of 10 s is a whole number of each, and has its
quota. A program that always works has such a cycle once, of as many ordinary ones as it takes, up to the last of these
lengths: the next cycles begin when they would have."""
CYCLE_CALLS = 3
"""Calls for each context in a period: one that takes it off the runlist, and two that put it back and look."""


def string(rate: float, each: Collection[Limited]) -> None:
    """Have as many periods of the accounts of these strung together as they need, where there are `rate` calls of the
    driver a second; and note the calls of all that are below the same top, and the quota that each alone has in a
    cycle."""
    calls, shortest_us, members = Counter[Account](), dict[Account, int](), Counter[Account]()
    for one in each:
        one.demand = 0
        for account in one.accounts:
            account.strung = 1
            members[account] += 1
        if one.levers and not one.waits:
            top = one.accounts[-1]
            calls[top] += CYCLE_CALLS * one.contexts
            period_us = min(account.period_us for account in one.accounts)
            shortest_us[top] = min(period_us, shortest_us.get(top, period_us))
    cycles_us = _cycles(rate, calls, shortest_us)
    for one in each:
        if one.levers and (top := one.accounts[-1]) in cycles_us:
            one.demand = calls[top]
            for account in one.accounts:
                account.strung = max(account.strung, math.ceil(cycles_us[top] / account.period_us))
    for one in each:
        own = (account.strung * account.quota_us for account in one.accounts if members[account] == 1)
        one.quota_us = min(own, default=None)
    for one in each:
        for account in one.accounts if one.wants_sight and not one.waits else ():
            account.strung = max(account.strung, _sight(account, one))


def _cycles(rate: float, calls: Counter[Account], shortest_us: Mapping[Account, int]) -> Mapping[Account, float]:
    """Return the length of cycles, microseconds, by the quota at the top: `rate` is in calls a second, `calls` in calls
    for each cycle of all below that quota, `shortest_us` the shortest period among them."""
    cycles_us, left = dict[Account, float](), USED * rate
    tops = sorted(calls, key=lambda top: calls[top] / shortest_us[top])
    for number, top in enumerate(tops):
        fair = left / (len(tops) - number)
        needed = calls[top] / shortest_us[top] * 1e6
        cycles_us[top] = shortest_us[top] if needed <= fair else calls[top] / fair * 1e6
        left -= min(needed, fair)
    return cycles_us


def _sight(account: Account, one: Limited) -> int:
    """Return the number of periods in whose quota a sample of a program falls, by what it is charged for its time on
    the runlist; 1 where that would be too many."""
    found, least_us = 1, ON_US * (one.pace if one.part >= IDLES else one.part)
    if one.part >= IDLES:
        most = SIGHT_CYCLES_US[-1] // account.period_us
        if most * account.quota_us < ON_US * one.part:
            return found  # on an engine of its own no sample falls: nor is a cycle longer beside others
        counts: Iterable[int] = range(account.strung, most + 1, account.strung)
    else:
        counts = (math.ceil(cycle_us / account.period_us) for cycle_us in SIGHT_CYCLES_US)
    for periods in counts:
        if periods * account.quota_us >= least_us:
            found = periods
            if one.part >= IDLES:
                break  # of one that idles longer times tell better: it begins each with what it was stopped in
    return found
