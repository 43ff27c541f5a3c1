"""Planning of reclaim: which processes give how much. Pure functions over the accounts."""

from __future__ import annotations

from backend.common import clock
from backend.core.protection import effective_lows
from backend.core.protocols import Target
from backend.core.records import MAX
from backend.ledgers.account import Account
from backend.process.identity import Member


def swap_room(account: Account) -> int:
    """Return the number of granules that the swap.max of an account and of those above it still let go to the host."""
    return min(level.room() for level in account.path())


def reclaimable(top: Account, charged: Account, nbytes: int, enough: int = MAX) -> int:
    """Return how many bytes could leave the GPU from `top` downwards if `charged`, a process below it, held `nbytes`
    more.

    A process can give what it holds, a slice what its members can give; swap.max bounds each of them and, at the top,
    everything above bounds the sum. Counting stops at `enough`: there may be thousands of processes, and every charge
    above a limit asks.
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
    """Return the processes at or below an account, in the order in which they came."""
    found, pending = [], [top]
    while pending:
        account = pending.pop()
        if account.children:
            pending.extend(reversed(account.children.values()))
        else:
            found.append(account)
    return found


def plan(top: Account, nbytes: int) -> list[Target]:
    """Split `nbytes`, in whole granules, over the processes below `top`; less in all where swap.max allows no more.

    Unprotected memory comes first, then, if that was not enough, memory that low protects. Each time the processes with
    the farthest next use give first (:class:`backend.core.nextuse.NextUse`), and nearer ones what these could not.
    Within a class the largest holders give until they are level with the next, so that equals give equally; of two
    equals, the one over its own high gives first.
    """
    members, lows, now_usec = leaves(top), effective_lows(top), clock.boot_usec()
    made = _Plan(top.granule, -(-nbytes // top.granule))
    for below_low in (False, True):
        classes: dict[int, list[Account]] = {}
        for leaf in members:
            protected = 0 if below_low else lows.get(leaf, 0)
            made.spare[leaf] = (leaf.figures.current - protected) // top.granule - made.taken.get(leaf, 0)
            if made.spare[leaf] > 0:
                classes.setdefault(leaf.next_use(now_usec), []).append(leaf)
        for _, equals in sorted(classes.items(), reverse=True):
            made.level(equals, below_low)
            if made.wanted <= 0:
                return made.targets
    return made.targets


class _Plan:
    """A plan in the making. Amounts are granules."""

    def __init__(self, granule: int, wanted: int) -> None:
        self._granule = granule
        self._room: dict[Account, int] = {}
        self.wanted = wanted
        """Amount that is still to be found."""
        self.spare: dict[Account, int] = {}
        """Amount that each process can give in this round."""
        self.taken: dict[Account, int] = {}
        """Amount that each process gives."""
        self.targets: list[Target] = []
        """The plan so far."""

    def level(self, equals: list[Account], below_low: bool) -> None:
        """Take from processes of one class, from the top; then take what a full swap kept some of them from giving from
        the rest."""
        order = sorted(
            equals,
            key=lambda leaf: (max(0, leaf.figures.current - leaf.figures.high), self.spare[leaf]),
            reverse=True,
        )
        for wish in (water_fill([self.spare[leaf] for leaf in order], self.wanted), [MAX] * len(order)):
            for leaf, most in zip(order, wish, strict=True):
                self._take(leaf, most, below_low)

    def _take(self, leaf: Account, most: int, below_low: bool) -> None:
        take = min(most, self.spare[leaf], self.wanted)
        if take <= 0:
            return
        take = min(take, *(self._room.setdefault(level, level.room()) for level in leaf.path()))
        if take <= 0 or not isinstance(leaf.group, Member):  # an empty slice has nothing
            return
        self.wanted -= take
        self.spare[leaf] -= take
        self.taken[leaf] = self.taken.get(leaf, 0) + take
        for level in leaf.path():
            self._room[level] -= take
        self.targets.append(Target(leaf.group, take * self._granule, below_low))


def water_fill(amounts: list[int], nbytes: int) -> list[int]:
    """Return what each of `amounts` gives so that `nbytes` are given and what is left is level at the top.

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
