"""Moves: which bytes stay on the GPU, which go out, and which come in, at one point of the timeline. Pure.

What goes is what is used again last (Belady): memory that no turn uses, then that of the program whose next turn is the
farthest, and of one program what it uses last. So as many bytes move as have to, given what is to be there when.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence

import attrs

from backend.scheduler.memory.claims import Claim, Claims, Name, Rates

NEVER = 1 << 62
"""Next use of a program of which no turn is known, microseconds."""
DROPS = 60 * 10**9
"""Bytes a second that go without being written: to have the host behind 64 MiB takes the driver 1 ms (H200)."""


class Way(enum.Enum):
    """A direction of the bus."""

    OUT = "out"
    IN = "in"


@attrs.frozen
class Share:
    """Bytes that one program is to give or to get."""

    name: Name
    """The program."""
    nbytes: int
    """How many."""
    written: int = 0
    """How many of those that go are written: the host has the others as they are."""


@attrs.frozen
class Moves:
    """Moves that are made at the same time, both ways: what comes in waits for room, and nothing waits for what goes
    out but that."""

    outs: Sequence[Share] = ()
    """What goes, in this order."""
    ins: Sequence[Share] = ()
    """What comes, in this order."""
    free: int = 0
    """Room that is there for it before anything goes, bytes."""

    def __bool__(self) -> bool:
        """Return whether anything moves."""
        return bool(self.outs or self.ins)

    @property
    def fetched(self) -> int:
        """Bytes that come in."""
        return sum(one.nbytes for one in self.ins)

    @property
    def evicted(self) -> int:
        """Bytes that go, written or not."""
        return sum(one.nbytes for one in self.outs)

    @property
    def written(self) -> int:
        """Bytes that go over the bus to the host."""
        return sum(one.written for one in self.outs)

    def usec(self, rates: Rates) -> int:
        """Return how long they take, microseconds."""
        return max(rates.into_usec(self.fetched), rates.out_usec(self.written))


def out_in(share: Share, rates: Rates, usec: int) -> int:
    """Return how many bytes of what goes do so in so many microseconds: first those that are not written."""
    dropped = min(share.nbytes - share.written, usec * DROPS // 1_000_000)
    return dropped + rates.out_in(usec - -(-dropped * 1_000_000 // DROPS))


def free_in(room: int, claims: Claims) -> int:
    """Return the bytes of a room that no program has; fewer than 0 where they have more."""
    return room - sum(one.held for one in claims.values())


def leaves(claims: Claims, name: Name, room: int) -> int:
    """Return how many bytes of a program go before its next turn, at most: it is the last of all to have one."""
    needed = sum(one.used + one.stays for other, one in claims.items() if other != name)
    claim = claims[name]
    return max(0, min(claim.held + needed - room, claim.held, claim.leaves))


def after(claims: Claims, moves: Moves) -> Claims:
    """Return the claims once moves were made."""
    found = dict(claims)
    for share in moves.outs:
        found[share.name] = found[share.name].given(share.nbytes)
    for share in moves.ins:
        found[share.name] = found[share.name].fetched(share.nbytes)
    return found


def plan(
    room: int,
    claims: Claims,
    wanted: Sequence[Name],
    keeps: Collection[Name],
    next_use: Mapping[Name, int],
    most_in: int | None = None,
    most_written: int | None = None,
) -> Moves:
    """Return the moves that bring the programs that are `wanted`, the first of them first, as much of what they lack as
    can be had. Nothing is taken from those that `keeps` names, and no byte of their working sets from those that are
    wanted. `room` is what all claims have room for, bytes; `next_use` is when each program has its next turn,
    microseconds. At most `most_in` bytes come, and at most `most_written` are written.

    Where programs have more than there is room for, as a limit has become smaller, those that stand give that, too.
    """
    free = free_in(room, claims)
    left = sum(claims[name].missing for name in wanted)
    left = left if most_in is None else min(left, most_in)
    outs = _outs(claims, max(0, left - free), wanted, keeps, next_use, most_written)
    left = max(0, min(left, free + sum(share.nbytes for share in outs)))
    ins: list[Share] = []
    for name in wanted:
        if nbytes := min(claims[name].missing, left):
            ins.append(Share(name, nbytes))
            left -= nbytes
    return Moves(outs, ins, max(0, free))


def _outs(
    claims: Claims,
    nbytes: int,
    wanted: Collection[Name],
    keeps: Collection[Name],
    next_use: Mapping[Name, int],
    most_written: int | None,
) -> Sequence[Share]:
    """Return what gives `nbytes`, or as much of it as there is."""
    outs: dict[Name, int] = {}
    left = nbytes
    # What no turn uses, of those that stand; then the working sets, the farthest next use first.
    order = sorted((name for name in claims if name not in keeps), key=lambda name: -next_use.get(name, NEVER))
    for is_cold in (True, False):
        for name in order:
            if not is_cold and name in wanted:
                continue
            claim = claims[name]
            had = outs.get(name, 0)
            most = min(claim.spare if is_cold else claim.held, claim.leaves) - had
            if (share := min(left, max(0, most))) > 0:
                outs[name] = had + share
                left -= share
    found = [_share(name, claims[name], share) for name, share in outs.items()]
    return found if most_written is None else _bounded(found, most_written)


def _share(name: Name, claim: Claim, nbytes: int) -> Share:
    """Return what a program gives: first what the host has as it is."""
    return Share(name, nbytes, nbytes - min(nbytes, claim.unwritten))


def _bounded(outs: Sequence[Share], most: int) -> Sequence[Share]:
    """Return the first of what goes, so that no more is written than that."""
    found: list[Share] = []
    for share in outs:
        over = max(0, share.written - most)
        most -= share.written - over
        if share.nbytes > over:
            found.append(attrs.evolve(share, nbytes=share.nbytes - over, written=share.written - over))
    return found
