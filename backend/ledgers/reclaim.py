"""Whom to take memory from: effective protection and victim planning, pure functions over the accounts.

The rules are those of the memory cgroup: a group's own low does not protect it against its own limit; below the
group that is being reclaimed, low protects as ``effective_protection()`` in mm/memcontrol.c computes it.
"""

from __future__ import annotations

from backend.core.protocols import Target
from backend.core.records import MAX
from backend.ledgers.account import Account
from backend.process.identity import Member


def swap_room(account: Account) -> int:
    """Granules that the swap.max of an account and of those above it still let go to the host."""
    return min(level.room() for level in account.path())


def reclaimable(top: Account, charged: Account, nbytes: int, enough: int = MAX) -> int:
    """How much could leave the GPU from `top` downwards if `charged`, a process below it, held `nbytes` more.

    Bytes. A process can give what it holds, a slice what its members can give; swap.max bounds each of them and,
    at the top, everything above bounds the sum. Where it is `enough` nobody more is looked at: there may be thousands,
    and every charge above a limit asks.
    """

    def below(account: Account, enough: int) -> int:
        if account.children:
            held = 0
            for child in account.children.values():
                held += below(child, enough - held)
                if held >= enough:
                    break
        else:
            held = (account.figures.current + (nbytes if account is charged else 0)) // account.granule
        return min(held, account.room())

    return min(below(top, -(-enough // top.granule)), swap_room(top)) * top.granule


def leaves(top: Account) -> list[Account]:
    """The processes at or below an account, in the order in which they came."""
    found, pending = [], [top]
    while pending:
        account = pending.pop()
        if account.children:
            pending.extend(reversed(account.children.values()))
        else:
            found.append(account)
    return found


def effective_lows(top: Account) -> dict[Account, int]:
    """The part of each account's memory, in bytes, that a reclaim of `top` must leave alone while others can give.

    Those of whom that is nothing may be left out.

    mm/page_counter.c, effective_protection() with memory_recursiveprot (what systemd mounts cgroup2 with): children
    share what their parent has protected, in proportion when they ask for more; what none of them asks for goes to
    all, in proportion to their other memory. So a low on a slice protects the processes in it.
    """
    lows: dict[Account, int] = {}
    pending = [top]
    while pending:
        parent = pending.pop()
        children = parent.children.values()
        pending.extend(children)
        asked = sum([min(child.figures.current, low) for child in children if (low := child.figures.low)])
        ceiling = lows.get(parent, 0)
        if not asked and not ceiling:
            continue  # as almost everywhere
        for child in children:
            held = child.figures.current
            protected = min(held, child.figures.low)
            if parent is not top:  # children of the one being reclaimed have their low in full
                if asked > ceiling:
                    protected = protected * ceiling // asked
                elif held > protected and parent.figures.current > asked:
                    protected += (ceiling - asked) * (held - protected) // (parent.figures.current - asked)
            lows[child] = protected
    return lows


def plan(top: Account, nbytes: int) -> list[Target]:
    """Splits `nbytes`, in whole granules, over the processes below `top`; less in all where swap.max allows no more.

    First what is not protected, then, if that was not enough, what low protects. Each time the largest holders
    give until they are level with the next, so that equals give equally; of two equals, who is over its own high.
    """
    granule = top.granule
    wanted = -(-nbytes // granule)
    members, lows = leaves(top), effective_lows(top)
    taken: dict[Account, int] = {}
    room: dict[Account, int] = {}
    targets: list[Target] = []
    for below_low in (False, True):
        spare = {
            leaf: (leaf.figures.current - (0 if below_low else lows.get(leaf, 0))) // granule - taken.get(leaf, 0)
            for leaf in members
        }
        order = sorted(
            (leaf for leaf in members if spare[leaf] > 0),
            key=lambda leaf: (max(0, leaf.figures.current - leaf.figures.high), spare[leaf]),
            reverse=True,
        )
        for wish in (water_fill([spare[leaf] for leaf in order], wanted), [spare[leaf] for leaf in order]):
            for leaf, most in zip(order, wish, strict=True):
                # The second round hands on what a full swap kept the first from taking.
                take = min(most, spare[leaf], wanted)
                if take <= 0:
                    continue
                take = min(take, *(room.setdefault(level, level.room()) for level in leaf.path()))
                if take <= 0 or not isinstance(leaf.group, Member):  # an empty slice has nothing
                    continue
                wanted -= take
                spare[leaf] -= take
                taken[leaf] = taken.get(leaf, 0) + take
                for level in leaf.path():
                    room[level] -= take
                targets.append(Target(leaf.group, take * granule, below_low))
            if wanted <= 0:
                return targets
    return targets


def water_fill(amounts: list[int], nbytes: int) -> list[int]:
    """What each of `amounts` gives so that `nbytes` are given and what is left is level at the top.

    >>> water_fill([10, 6, 1], 6)
    [5, 1, 0]
    """
    nbytes = min(nbytes, sum(amounts))
    low, high = 0, max(amounts, default=0)
    while low < high:  # the highest level that gives at least nbytes
        level = (low + high + 1) // 2
        if sum(max(0, amount - level) for amount in amounts) >= nbytes:
            low = level
        else:
            high = level - 1
    gives = [max(0, amount - low) for amount in amounts]
    over = sum(gives) - nbytes
    for index in range(len(gives) - 1, -1, -1):
        if over and gives[index]:  # the level is whole bytes: at most one too many from each
            gives[index] -= 1
            over -= 1
    return gives
