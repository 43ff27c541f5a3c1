"""Generated trees of accounts, built directly: the rules of reclaim must have an answer for any figures."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from backend.core.nextuse import NextUse
from backend.core.records import MAX
from backend.ledgers.account import Account
from backend.process.identity import ROOT, Member, Process, Slice, SliceOn


def below(account: Account) -> Iterator[Account]:
    """Yield an account and every account below it."""
    yield account
    for child in account.children.values():
        yield from below(child)


def settle(account: Account) -> tuple[int, int]:
    """Set the figures of every slice to the sums of what is below it; return those of `account`."""
    if account.children:
        sums = [settle(child) for child in account.children.values()]
        account.update(current=sum(held for held, _ in sums), swap=sum(swap for _, swap in sums))
    return account.figures.current, account.figures.swap


@st.composite
def trees(draw: st.DrawFn, most: int = 40, leaves: int = 5, granule: int = 1) -> Account:
    """Draw the root of a GPU with processes and up to three levels of slices."""
    amounts = st.integers(0, most)
    root = Account(SliceOn(ROOT, 0), None, granule)
    slices, depth = [root], {root: 0}
    for number in range(draw(st.integers(0, 4))):
        above = draw(st.sampled_from([slice_ for slice_ in slices if depth[slice_] < 3]))
        slices.append(Account(SliceOn(Slice(f"/{number}"), 0), above))
        depth[slices[-1]] = depth[above] + 1
    for number in range(draw(st.integers(1, leaves))):
        leaf = Account(Member(Process(number + 1, 0), 0), draw(st.sampled_from(slices)))
        leaf.update(current=draw(amounts), swap=draw(amounts))
        leaf.foresee(draw(st.sampled_from((0, 0, *NextUse))))
    unlimited = st.one_of(amounts, st.just(MAX))
    for account in below(root):
        account.update(high=draw(unlimited), low=draw(st.one_of(amounts, st.just(MAX))), swap_max=draw(unlimited))
    root.update(swap_max=MAX)
    settle(root)
    return root


def processes(top: Account) -> list[Account]:
    """Return the processes at or below an account."""
    return [account for account in below(top) if isinstance(account.group.node, Process)]
