"""Which groups are moved: the smallest that helps. Pure, over a picture.

What a move costs is the time for which the group stands still: its memory over the bus, out and in again, and about
half a second besides (an H200: 4.7 GB in 4.1 s). So the cheapest is chosen of those moves after which the bounds of
both GPUs are expected to hold; a group that has bounds itself counts several times, as its own latency is what breaks
them while it stands still. One move is found by trying all; several are put together one after the other, each by what
it helps for its cost, and what turns out to be needless is left out again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import attrs

from ggroupfs.policies.balance.picture import Load, Move, Picture

FIXED = 512 << 20
"""Bytes that could be moved in the time that a move takes without any."""
CRITICAL = 8
"""A byte of a group that has bounds counts as so many."""
GOAL = 0.9
"""After a move a group that missed its bounds is to be so near to them at most: 1 is at the bound."""
KEEP = 0.8
"""Nobody is put beside a group that would be nearer to its bounds than that. Less than the goal: hysteresis."""
BETTER = 1.25
"""What does not reach the goal is done if it brings a group nearer to its bounds by that factor."""
GAIN = 0.3
"""Parts of a GPU by which the more loaded of two has to be less so after a move, where no bounds are missed."""
MOST = 8
"""Moves at a time, at most."""
SLIGHT = 1.02
"""What brings less is of no help."""

May = Callable[[Load, int], bool]
"""Whether a group may be moved to a GPU now."""


@attrs.frozen
class Plan:
    """Moves, one after the other."""

    moves: Sequence[Move]
    """In the order in which they are made; at least one."""
    strain: float
    """How near to its bounds the worst of those that missed them is expected to be; 0 if that is not what it is for."""

    @property
    def cost(self) -> int:
        """Bytes, as above."""
        return sum(_cost(move.load) for move in self.moves)


def _cost(load: Load) -> int:
    return (load.held + FIXED) * (CRITICAL if load.bound is not None else 1)


def relieve(picture: Picture, gpu: int, short: Collection[str], may: May) -> Plan | None:
    """For groups on a GPU that miss their bounds there: neighbours of best effort go, or one of themselves does.

    None where nothing helps.
    """
    now = _worst(picture, gpu, short)
    if now <= GOAL:
        return None  # it was helped already, as far as anybody can tell
    found = [*_without_neighbours(picture, gpu, short, may), *_without_one(picture, gpu, short, may)]
    enough = [plan for plan in found if plan.strain <= GOAL]
    if enough:
        return min(enough, key=lambda plan: (plan.cost, plan.strain))
    better = [plan for plan in found if plan.strain * BETTER <= now]
    return min(better, key=lambda plan: (plan.strain, plan.cost), default=None)


def even(picture: Picture, gpu: int, may: May) -> Plan | None:
    """For a GPU of which more is wanted than there is: groups of best effort go where less is wanted.

    None where nothing is gained. Every move makes the more loaded of two GPUs less so, by a fixed amount at least:
    while wants stay as they are there is an end to it.
    """
    moves: list[Move] = []
    while picture.demand(gpu) > 1.0 and len(moves) < MOST:
        steps = [move for move in _ways(picture, gpu, moves, may) if _gain(picture, move) >= GAIN]
        if not steps:
            break
        step = min(steps, key=lambda move: (_cost(move.load), -_gain(picture, move)))
        moves.append(step)
        picture = picture.after(step)
    return Plan(moves, 0.0) if moves else None


def _gain(picture: Picture, move: Move) -> float:
    """Parts of a GPU by which the more loaded of two is less so after it."""
    here, there, want = picture.demand(move.load.gpu), picture.demand(move.to), move.load.want
    return here - max(here - want, there + want)


def _without_neighbours(picture: Picture, gpu: int, short: Collection[str], may: May) -> Iterator[Plan]:
    moves: list[Move] = []
    first = picture
    now = _worst(picture, gpu, short)
    while now > GOAL and len(moves) < MOST:
        steps = []
        for move in _ways(picture, gpu, moves, may):
            then = _worst(picture.after(move), gpu, short)
            if then * SLIGHT <= now:
                steps.append((then, move))
        if not steps:
            break
        # The last one is the cheapest that will do; those before it help the most for what they cost.
        last = [(_cost(move.load), then, index) for index, (then, move) in enumerate(steps) if then <= GOAL]
        best = [((now - then) / _cost(move.load), index) for index, (then, move) in enumerate(steps)]
        now, step = steps[min(last)[-1] if last else max(best)[-1]]
        moves.append(step)
        picture = picture.after(step)
    if moves:
        yield _pruned(first, gpu, short, Plan(moves, now))


def _pruned(picture: Picture, gpu: int, short: Collection[str], plan: Plan) -> Plan:
    """Without the moves that it does not need, the most expensive first."""
    for move in sorted(plan.moves, key=lambda one: _cost(one.load), reverse=True):
        rest = [one for one in plan.moves if one is not move]
        then = picture
        for one in rest:
            then = then.after(one)
        strain = _worst(then, gpu, short)
        if rest and strain <= max(GOAL, plan.strain):
            plan = Plan(rest, strain)
    return plan


def _without_one(picture: Picture, gpu: int, short: Collection[str], may: May) -> Iterator[Plan]:
    for name in short:
        load = picture.find(name, gpu)
        if load is None:
            continue
        for move in _moves(picture, load, may):
            then = picture.after(move)
            if _harmless(picture, then, move):
                rest = [other for other in short if other != name]
                yield Plan([move], max(then.strain(name, move.to), _worst(then, gpu, rest)))


def _ways(picture: Picture, gpu: int, made: Iterable[Move], may: May) -> Iterator[Move]:
    """Moves of best effort groups away from a GPU, each to where the least is wanted of those where it does no harm."""
    moved = {move.load.name for move in made}
    for load in picture.on(gpu):
        if load.bound is None and load.name not in moved:
            ways = [move for move in _moves(picture, load, may) if _harmless(picture, picture.after(move), move)]
            if ways:
                yield min(ways, key=lambda move: (picture.demand(move.to), move.to))


def _moves(picture: Picture, load: Load, may: May) -> Iterator[Move]:
    for other in picture.cards:
        if load.movable and other != load.gpu and picture.has_room(load, other) and may(load, other):
            yield Move(load, other)


def _harmless(before: Picture, after: Picture, move: Move) -> bool:
    """Whether those who have bounds where it goes keep them, or it makes no difference to them."""
    return all(
        after.fear(one.name, move.to) <= max(KEEP, before.fear(one.name, move.to) + 1e-9)
        for one in before.on(move.to)
        if one.bound is not None and one.name != move.load.name
    )


def _worst(picture: Picture, gpu: int, names: Iterable[str]) -> float:
    """How near to its bounds the worst of some groups on a GPU is; 0 where none of them is there."""
    return max((picture.strain(name, gpu) for name in names if picture.find(name, gpu)), default=0.0)
