"""Models which group is on which GPU, what each wants, and what to expect of a move, without a clock or files.

A GPU is a time of 1 to be divided: the better priority comes first, and within a priority weights decide, but no group
gets more than it wants; the rest goes to groups that want more. The daemon's scheduler does this with processes that
are siblings; for nested slices it is an estimate. Flyt's orchestrator (section 3.3) looks for a GPU with headroom in
the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

LEAST = 1e-3
"""Fraction of a GPU below which nothing is divided."""


@attrs.frozen
class Bound:
    """The bounds of a group; at least one of the two is set."""

    upper: float | None = None
    """Largest latency, seconds."""
    least: float | None = None
    """Fraction of a GPU that the group should get when it wants it."""


@attrs.frozen
class Load:
    """A group on one GPU: a process, or all processes of a slice there."""

    name: str
    """Name of the group. A slice may be on several GPUs."""
    gpu: int
    """Index of the GPU."""
    want: float
    """Fraction of a GPU that the group would use alone, 0 to 1."""
    held: int
    """Memory on the GPU, bytes: what a move has to copy while the group stands still."""
    swapped: int = 0
    """Memory in the host, bytes. A move leaves it there, but it needs room on the new GPU."""
    use: float = 0.0
    """Fraction of the GPU that the group uses now."""
    weight: int = 100
    """Value of compute.weight."""
    priority: int = 8
    """Value of compute.priority; the smaller goes first."""
    bound: Bound | None = None
    """Required bounds; None for a best-effort group."""
    alone: float | None = None
    """Latency with a GPU to itself by the model, seconds; None if unknown."""
    feared: float | None = None
    """Largest recent value of `alone`. On a shared GPU a latency may grow faster than the model says, and that
    shows only while the GPU is shared."""
    movable: bool = True
    """Whether the group may be moved at all."""


@attrs.frozen
class Card:
    """The memory of a GPU."""

    capacity: int
    """Usable bytes: the capacity without the space to keep free."""
    used: int
    """Used bytes."""


@attrs.frozen
class Move:
    """A move of a group to another GPU."""

    load: Load
    """The group, and where it is."""
    to: int
    """Index of the target GPU."""


def parts(loads: Iterable[Load]) -> dict[str, float]:
    """Fraction of their common GPU that each of these groups gets."""
    got: dict[str, float] = {}
    left = 1.0
    strata: dict[int, list[Load]] = {}
    for load in loads:
        strata.setdefault(load.priority, []).append(load)
    for priority in sorted(strata):
        waiting = strata[priority]
        while waiting:
            part = max(0.0, left) / sum(load.weight for load in waiting)
            sated = [load for load in waiting if load.want <= part * load.weight]
            if not sated:
                got |= {load.name: part * load.weight for load in waiting}
                left = 0.0
                break
            got |= {load.name: load.want for load in sated}
            left -= sum(load.want for load in sated)
            waiting = [load for load in waiting if load.want > part * load.weight]
    return got


def rate(load: Load, others: Iterable[Load]) -> float:
    """Fraction of the GPU that a group has while it has work, next to `others`: the factor of its slowdown."""
    return max(LEAST, parts([attrs.evolve(load, want=1.0), *others])[load.name])


def strain(load: Load, others: Sequence[Load]) -> float:
    """How near a group is to its bounds next to `others`: 1 is at a bound, and above 1 the bounds do not hold.

    0 for a group without bounds, or whose latency is unknown.
    """
    found, bound = 0.0, load.bound
    if bound is not None and bound.upper is not None and load.alone is not None:
        found = load.alone / rate(load, others) / bound.upper
    if bound is not None and bound.least is not None:
        asked = min(bound.least, load.want)
        if asked > LEAST:
            found = max(found, asked / max(LEAST, parts([load, *others])[load.name]))
    return found


@attrs.frozen
class Picture:
    """All GPUs at one time."""

    cards: Mapping[int, Card]
    """GPUs by index."""
    groups: Mapping[int, Mapping[str, Load]]
    """Groups by index of the GPU and name."""

    @classmethod
    def of(cls, cards: Mapping[int, Card], loads: Iterable[Load]) -> Picture:
        """Build a picture. Loads on other GPUs than these cards are left out."""
        groups: dict[int, dict[str, Load]] = {gpu: {} for gpu in cards}
        for load in loads:
            if load.gpu in groups:
                groups[load.gpu][load.name] = load
        return cls(cards, groups)

    def on(self, gpu: int) -> list[Load]:
        """The groups on a GPU."""
        return list(self.groups[gpu].values())

    @property
    def loads(self) -> list[Load]:
        """All groups; a group on two GPUs appears twice."""
        return [load for gpu in self.groups for load in self.on(gpu)]

    def find(self, name: str, gpu: int) -> Load | None:
        """Return a group on a GPU; None if it is not there."""
        return self.groups.get(gpu, {}).get(name)

    def demand(self, gpu: int) -> float:
        """Total demand of the groups on a GPU, in GPUs."""
        return sum(load.want for load in self.groups[gpu].values())

    def strain(self, name: str, gpu: int) -> float:
        """See :func:`strain`."""
        others = [load for load in self.on(gpu) if load.name != name]
        return strain(self.groups[gpu][name], others)

    def fear(self, name: str, gpu: int) -> float:
        """The strain of a group by its worst recent latency."""
        load = self.groups[gpu][name]
        others = [other for other in self.on(gpu) if other is not load]
        return strain(attrs.evolve(load, alone=load.feared), others)

    def rate(self, name: str, gpu: int) -> float:
        """See :func:`rate`."""
        others = [load for load in self.on(gpu) if load.name != name]
        return rate(self.groups[gpu][name], others)

    def has_room(self, load: Load, gpu: int) -> bool:
        """Whether a GPU has room for the group's memory, including that in the host, which will be wanted back."""
        card = self.cards[gpu]
        return card.used + load.held + load.swapped <= card.capacity

    def after(self, move: Move) -> Picture:
        """Return the picture after a move. The two parts of a slice that was already on the target GPU become one."""
        load, cards = move.load, dict(self.cards)
        moved = attrs.evolve(load, gpu=move.to)
        there = self.find(load.name, move.to)
        if there is not None:
            moved = attrs.evolve(
                moved,
                want=min(1.0, load.want + there.want),
                held=load.held + there.held,
                swapped=load.swapped + there.swapped,
            )
        cards[load.gpu] = attrs.evolve(cards[load.gpu], used=max(0, cards[load.gpu].used - load.held))
        cards[move.to] = attrs.evolve(cards[move.to], used=cards[move.to].used + load.held)
        stay = {name: one for name, one in self.groups[load.gpu].items() if name != load.name}
        return Picture(cards, {**self.groups, load.gpu: stay, move.to: {**self.groups[move.to], load.name: moved}})
