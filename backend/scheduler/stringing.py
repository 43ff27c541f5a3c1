"""How many periods of quotas are strung together, so that there are calls of the driver for all of them. Pure.

A program without the library takes CYCLE_CALLS for each context in each period. What there is of these is shared by the
quotas that stand at the top, each with all that is below it, however much that is: a slice with a thousand programs has
long periods itself, and no other has longer ones for that than with one such program beside it.

One of which samples are to tell has longer cycles meanwhile (``watched.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from backend.scheduler.limited import Limited
from backend.scheduler.quota import Account
from backend.scheduler.watched import IDLES, ON_US

USED = 0.8
"""Part of the calls that periods are strung together for: each process is to find some when it needs them."""
SIGHT_CYCLES_US = (1_000_000, 2_000_000)
"""Microseconds of a cycle in which a program is on the runlist for long enough that samples tell of it: the first that
does, if any. A time of 10 s is a whole number of each, and has its quota."""
CYCLE_CALLS = 3
"""Calls for each context in a period: one that takes it off the runlist, and two that put it back and look."""


def string(rate: float, each: Collection[Limited]) -> None:
    """Have as many periods of the accounts of these strung together as they need, where there are `rate` calls of the
    driver a second; and note the calls of all that are below the same top."""
    calls, shortest_us = Counter[Account](), dict[Account, int]()
    for one in each:
        one.demand = 0
        for account in one.accounts:
            account.strung = 1
        if one.levers and not one.waits:
            top = one.accounts[-1]
            calls[top] += CYCLE_CALLS * one.contexts
            period_us = min(account.period_us for account in one.accounts)
            shortest_us[top] = min(period_us, shortest_us.get(top, period_us))
    if not calls:
        return
    cycles_us, left = dict[Account, float](), USED * rate
    tops = sorted(calls, key=lambda top: calls[top] / shortest_us[top])
    for number, top in enumerate(tops):
        fair = left / (len(tops) - number)
        needed = calls[top] / shortest_us[top] * 1e6
        cycles_us[top] = shortest_us[top] if needed <= fair else calls[top] / fair * 1e6
        left -= min(needed, fair)
    for one in each:
        if one.levers and (top := one.accounts[-1]) in cycles_us:
            one.demand = calls[top]
            for account in one.accounts:
                account.strung = max(account.strung, math.ceil(cycles_us[top] / account.period_us))
                if one.wants_sight:
                    account.strung = max(account.strung, _sight(account, one.part))


def _sight(account: Account, part: float) -> int:
    """Return the periods in whose quota a sample falls, of a program that works for a part of its time on the engine; 1
    where that would be too many."""
    found = 1
    for cycle_us in SIGHT_CYCLES_US:
        periods = math.ceil(cycle_us / account.period_us)
        if periods * account.quota_us >= ON_US * part:
            found = periods
        if part >= IDLES and found > 1:
            break  # of one that idles longer times tell better: it begins each with what it was stopped in
    return found
