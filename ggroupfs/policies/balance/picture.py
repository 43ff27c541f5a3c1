"""Who is on which GPU, what each wants, and what to expect if one were on another: a model, without clock or files.

A GPU is a time of 1 that is divided: the better priority first, and in a priority by weights, but nobody has more than
he wants; what is left goes to who wants more. That is what the daemon's scheduler does with processes that are
siblings; of slices in slices it is an estimate. Flyt's orchestrator (section 3.3) looks for the GPU with headroom in
the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

LEAST = 1e-3
"""A part of a GPU below which nothing is divided."""


@attrs.frozen
class Bound:
    """What a group is to have; at least one of the two."""

    upper: float | None = None
    """Seconds that its latency may be."""
    least: float | None = None
    """The part of a GPU that it is to have when it wants it."""


@attrs.frozen
class Load:
    """A group on one GPU: a process, or all processes of a slice there."""

    name: str
    """Its name. A slice may be on several GPUs."""
    gpu: int
    """Index of the GPU."""
    want: float
    """The part of a GPU that it would use if it had one for itself, 0 to 1."""
    held: int
    """Bytes on the GPU: what a move has to copy, while the group stands still."""
    swapped: int = 0
    """Bytes in the host, which stay there; they too want room on the GPU."""
    use: float = 0.0
    """The part of the GPU that it uses now."""
    weight: int = 100
    """compute.weight."""
    priority: int = 8
    """compute.priority; the smaller goes first."""
    bound: Bound | None = None
    """None for one of best effort."""
    alone: float | None = None
    """Seconds that its latency would be if it had a GPU for itself, as the model has it; None where nobody knows."""
    feared: float | None = None
    """The most that this was thought to be lately: as the model is no more than one, beside others a latency may grow
    faster than it says, and that is seen only where there were others."""
    movable: bool = True
    """Whether it may be moved at all."""


@attrs.frozen
class Card:
    """The memory of a GPU."""

    capacity: int
    """Bytes that may be used: what it has without what is to stay free."""
    used: int
    """Bytes that are."""


@attrs.frozen
class Move:
    """A group goes to another GPU."""

    load: Load
    """Which, and where it is."""
    to: int
    """Index of the other GPU."""


def parts(loads: Iterable[Load]) -> dict[str, float]:
    """What part of their GPU groups on the same one get."""
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
    """The part of the GPU that a group has while it has work, beside the others there: how much slower it goes."""
    return max(LEAST, parts([attrs.evolve(load, want=1.0), *others])[load.name])


def strain(load: Load, others: Sequence[Load]) -> float:
    """How near a group is to its bounds beside these others; above 1 they do not hold. 0 for one that has none, or of
    which nobody knows the latency."""
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
    """GPUs by their index."""
    groups: Mapping[int, Mapping[str, Load]]
    """The groups on each of them, by their name."""

    @classmethod
    def of(cls, cards: Mapping[int, Card], loads: Iterable[Load]) -> Picture:
        """Loads that are on none of the cards are left out."""
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
        """All groups; one that is on two GPUs twice."""
        return [load for gpu in self.groups for load in self.on(gpu)]

    def find(self, name: str, gpu: int) -> Load | None:
        """A group on a GPU."""
        return self.groups.get(gpu, {}).get(name)

    def demand(self, gpu: int) -> float:
        """What all groups on a GPU want together, in GPUs."""
        return sum(load.want for load in self.groups[gpu].values())

    def strain(self, name: str, gpu: int) -> float:
        """See :func:`strain`."""
        others = [load for load in self.on(gpu) if load.name != name]
        return strain(self.groups[gpu][name], others)

    def fear(self, name: str, gpu: int) -> float:
        """The same by the worst that is known of the group."""
        load = self.groups[gpu][name]
        others = [other for other in self.on(gpu) if other is not load]
        return strain(attrs.evolve(load, alone=load.feared), others)

    def rate(self, name: str, gpu: int) -> float:
        """See :func:`rate`."""
        others = [load for load in self.on(gpu) if load.name != name]
        return rate(self.groups[gpu][name], others)

    def has_room(self, load: Load, gpu: int) -> bool:
        """Whether there is room for the group's memory on a GPU, what is in the host included: it is wanted back."""
        card = self.cards[gpu]
        return card.used + load.held + load.swapped <= card.capacity

    def after(self, move: Move) -> Picture:
        """As it will be. Of a slice that is on the other GPU too, both parts are one then."""
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
