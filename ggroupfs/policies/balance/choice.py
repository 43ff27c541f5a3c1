"""Chooses the groups to move: the cheapest that help. Pure, over a picture.

The cost of a move is the time for which the group stands still: its memory crosses the bus twice, out and in, and about
half a second comes on top (an H200: 4.7 GB in 4.1 s). So the cheapest move is chosen of those after which the bounds of
both GPUs are expected to hold. A group with bounds of its own counts several times, because standing still breaks its
own latency.

A single move is found by trying all. A plan of several is built step by step, each step chosen by its benefit per cost,
and moves that turn out to be unnecessary are removed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import attrs

from ggroupfs.policies.balance.picture import Load, Move, Picture

FIXED = 512 << 20
"""Fixed cost of a move, as the bytes that could be moved in that time."""
CRITICAL = 8
"""Factor by which the cost of a group with bounds is multiplied."""
GOAL = 0.9
"""Largest strain allowed after a move for a group that missed its bounds; at 1 it is at its bound."""
KEEP = 0.8
"""Largest strain allowed on the target GPU for the groups there. It is below GOAL as a hysteresis."""
BETTER = 1.25
"""Factor by which a plan that does not reach GOAL has to reduce the strain in order to be worth it."""
GAIN = 0.3
"""Reduction of demand, in GPUs, on the more loaded of two that a move has to bring where no bounds are missed."""
MOST = 8
"""Largest number of moves in a plan."""
SLIGHT = 1.02
"""Factor below which a reduction of the strain counts as no help."""

May = Callable[[Load, int], bool]
"""Tells whether a group may be moved to a GPU now."""


@attrs.frozen
class Plan:
    """Moves, made one after the other."""

    moves: Sequence[Move]
    """The moves, in order; at least one."""
    strain: float
    """Expected strain of the worst group that missed its bounds; 0 for a plan that is not about bounds."""

    @property
    def cost(self) -> int:
        """Cost of all moves, bytes (see the module)."""
        return sum(_cost(move.load) for move in self.moves)


def _cost(load: Load) -> int:
    return (load.held + FIXED) * (CRITICAL if load.bound is not None else 1)


def relieve(picture: Picture, gpu: int, short: Collection[str], may: May) -> Plan | None:
    """Return a plan for groups that miss their bounds: best-effort neighbours leave, or one of the groups itself.

    None if no move helps.
    """
    now = _worst(picture, gpu, short)
    if now <= GOAL:
        return None  # already helped, as far as the model can tell
    found = [*_without_neighbours(picture, gpu, short, may), *_without_one(picture, gpu, short, may)]
    enough = [plan for plan in found if plan.strain <= GOAL]
    if enough:
        return min(enough, key=lambda plan: (plan.cost, plan.strain))
    better = [plan for plan in found if plan.strain * BETTER <= now]
    return min(better, key=lambda plan: (plan.strain, plan.cost), default=None)


def even(picture: Picture, gpu: int, may: May) -> Plan | None:
    """Return a plan for a GPU with more demand than time: best-effort groups go where there is less demand.

    None if nothing is gained. Every move reduces the demand on the more loaded of two GPUs by at least GAIN, so the
    moves end as long as the demand stays as it is.
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
    """Reduction of demand, in GPUs, on the more loaded of the two GPUs."""
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
        # The last step is the cheapest that reaches GOAL; the steps before it have the best benefit per cost.
        last = [(_cost(move.load), then, index) for index, (then, move) in enumerate(steps) if then <= GOAL]
        best = [((now - then) / _cost(move.load), index) for index, (then, move) in enumerate(steps)]
        now, step = steps[min(last)[-1] if last else max(best)[-1]]
        moves.append(step)
        picture = picture.after(step)
    if moves:
        yield _pruned(first, gpu, short, Plan(moves, now))


def _pruned(picture: Picture, gpu: int, short: Collection[str], plan: Plan) -> Plan:
    """Return the plan without the moves that it does not need; the most expensive are dropped first."""
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
    """Moves of best-effort groups away from a GPU, each to the least demanded GPU where it does no harm."""
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
    """Whether the groups with bounds on the target GPU keep them, or are no worse off."""
    return all(
        after.fear(one.name, move.to) <= max(KEEP, before.fear(one.name, move.to) + 1e-9)
        for one in before.on(move.to)
        if one.bound is not None and one.name != move.load.name
    )


def _worst(picture: Picture, gpu: int, names: Iterable[str]) -> float:
    """Largest strain among some groups on a GPU; 0 if none of them is there."""
    return max((picture.strain(name, gpu) for name in names if picture.find(name, gpu)), default=0.0)
