"""Decides when groups are moved, without a clock or a file.

Bounds come first: a group that misses its own for a whole window is relieved. Only if every group keeps its bounds,
groups are moved from GPUs with more demand than time to GPUs with less. Flyt (section 3.3) calls this "targeted
migration": only on sustained deviation.

Several rules prevent oscillation. A window has to be full of misses, and every move empties it. The expected result of
a move is better than what was missed (``choice.GOAL``, ``choice.KEEP`` and ``choice.GAIN``). Two GPUs are left alone
for a cool-down after a plan, and a moved group for a rest that doubles each time it is moved again soon
(``history.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping

import attrs

from ggroupfs.policies.balance.choice import GOAL, Plan, even, relieve
from ggroupfs.policies.balance.history import History
from ggroupfs.policies.balance.picture import LEAST, Load, Move, Picture

HOLD_S = 600.0
"""Seconds for which the worst latency of a group is remembered."""
MISSED = 0.9
"""Fraction of its smallest share below which a group misses that share."""


@attrs.frozen
class Pace:
    """The speed of the policy."""

    window: int = 3
    """Consecutive samples, or looks, on which a decision is made."""
    silence: float = 60.0
    """Seconds without a report after which a latency is no longer believed."""
    rest: float = 60.0
    """Seconds for which a moved group stays where it is."""
    cooldown: float = 5.0
    """Seconds between two plans for the same GPUs."""
    overload: float = 1.2
    """Demand on a GPU, in GPUs, above which moves to other GPUs are considered."""


@attrs.frozen
class Short:
    """A group has missed its bounds for a cool-down, and no move helps. Emitted once, until the bounds hold again."""

    group: str
    """Name of the group."""
    gpu: int
    """Index of its GPU."""
    latency: float | None
    """Mean latency of the window, seconds; None if no latency is reported."""


@attrs.frozen
class Met:
    """A group that was reported as :class:`Short` keeps its bounds again, or is gone."""

    group: str
    """Name of the group."""


Decision = Plan | Short | Met


@attrs.define
class _Watch:
    """The state of a group with bounds."""

    samples: deque[float]
    """Last latencies since a move to or from its GPU, seconds."""
    heard: float
    """Time of the last sample, seconds."""
    alone: float | None = None
    """Latency that the group would have with a GPU to itself, by the last full window, seconds."""
    worst: float | None = None
    """Largest value of `alone` that is remembered, seconds."""
    worst_at: float = 0.0
    """Time at which `worst` was measured, seconds."""
    misses: int = 0
    """Consecutive looks in which the group had less than its smallest share."""
    since: float | None = None
    """Time since which the group misses its bounds and no move helps, seconds; None while that is not so."""
    told: bool = False
    """Whether the group was reported as :class:`Short`."""

    @property
    def latency(self) -> float | None:
        """The mean of a full window, seconds; None while the window is not full."""
        return sum(self.samples) / len(self.samples) if len(self.samples) == self.samples.maxlen else None

    def measured(self, now: float, alone: float) -> None:
        """Record the latency that the group would have alone, by a full window."""
        self.alone = alone
        if self.worst is None or alone >= self.worst or now - self.worst_at >= HOLD_S:
            self.worst, self.worst_at = alone, now


class Core:
    """The decisions about all groups of a machine."""

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self._history = History(self._pace.rest, self._pace.cooldown)
        self._watched: dict[str, _Watch] = {}
        self._overloaded: dict[int, int] = {}  # consecutive overloaded looks of each GPU

    def sample(self, now: float, name: str, latency: float) -> None:
        """Record the latency of a group in one interval, in seconds."""
        watch = self._watch(name)
        watch.samples.append(latency)
        watch.heard = now

    def decide(self, now: float, picture: Picture) -> list[Decision]:
        """Return the decisions of one look, at the time `now` in seconds.

        They contain at most one plan. It has to be carried out, and its moves reported by :meth:`moved` and
        :meth:`refused`, before the next look.
        """
        picture = self.look(now, picture)
        short = self._short(picture)
        made: list[Decision] = list(self._met(picture, short))
        for gpu in sorted(short, key=lambda gpu: -max(picture.strain(name, gpu) for name in short[gpu])):
            plan = self.relieve(now, picture, gpu, short[gpu])
            if plan is not None:
                return [*made, plan]
            made += self._stuck(now, gpu, short[gpu])
        full = [gpu for gpu, looks in self._overloaded.items() if looks >= self._pace.window and gpu not in short]
        for gpu in sorted(full, key=picture.demand, reverse=True):
            plan = even(picture, gpu, lambda load, to: self._history.may(now, load.name, load.gpu, to))
            if plan is not None:
                return [*made, plan]
        return made

    def look(self, now: float, picture: Picture) -> Picture:
        """Take in a picture, and return it with the known latencies filled in."""
        names = {load.name for load in picture.loads}
        self._history.keep(names)
        for name, watch in self._watched.items():
            if now - watch.heard >= self._pace.silence or name not in names:
                watch.samples.clear()
                watch.alone = None
        self._overloaded = {  # a lost GPU is in no picture
            gpu: self._overloaded.get(gpu, 0) + 1 if picture.demand(gpu) > self._pace.overload else 0
            for gpu in picture.cards
        }
        known = []
        for load in picture.loads:
            if load.bound is not None:
                watch = self._watch(load.name)
                if watch.latency is not None:
                    watch.measured(now, watch.latency * picture.rate(load.name, self._slowest(picture, load.name)))
                asked = min(load.bound.least or 0.0, load.want)
                watch.misses = watch.misses + 1 if asked > LEAST and load.use < MISSED * asked else 0
                load = attrs.evolve(load, alone=watch.alone, feared=watch.worst)
            known.append(load)
        return Picture.of(picture.cards, known)

    def relieve(self, now: float, picture: Picture, gpu: int, short: Collection[str]) -> Plan | None:
        """Return a plan for groups on a GPU that miss their bounds, or None. `picture` comes from :meth:`look`."""
        if gpu not in picture.cards:
            return None
        return relieve(picture, gpu, short, lambda load, to: self._history.may(now, load.name, load.gpu, to))

    def moved(self, now: float, picture: Picture, move: Move) -> None:
        """Record a move that was made. `picture` is the one that it was decided on."""
        self._history.moved(now, move.load.name, move.load.gpu, move.to)
        self._forget(picture, move)

    def refused(self, now: float, picture: Picture, move: Move, code: int) -> None:
        """Record a move that was refused with an errno. The group may have stood still for it."""
        self._history.refused(now, move.load.name, move.load.gpu, move.to, code)
        self._forget(picture, move)

    def _forget(self, picture: Picture, move: Move) -> None:
        """Drop the measurements of the groups on both GPUs: their neighbours have changed."""
        for gpu in (move.load.gpu, move.to):
            self._overloaded[gpu] = 0
            for name in {move.load.name, *(load.name for load in picture.on(gpu))} & self._watched.keys():
                self._watched[name].samples.clear()
                self._watched[name].misses = 0

    def _stuck(self, now: float, gpu: int, names: Iterable[str]) -> Iterator[Short]:
        """Report the groups for which nothing has helped for a cool-down."""
        for name in names:
            watch = self._watched[name]
            watch.since = now if watch.since is None else watch.since
            if not watch.told and now - watch.since >= self._pace.cooldown:
                watch.told = True
                yield Short(name, gpu, watch.latency)

    def _met(self, picture: Picture, short: Mapping[int, Collection[str]]) -> Iterator[Met]:
        """Report the groups that clearly keep their bounds again, or are gone or silent."""
        missing = {name for names in short.values() for name in names}
        for name, watch in self._watched.items():
            strains = [picture.strain(load.name, load.gpu) for load in picture.loads if load.name == name]
            if name in missing or (watch.alone is not None and watch.latency is None and strains):
                continue
            watch.since = None
            if watch.told and max(strains, default=0.0) <= GOAL:
                watch.told = False
                yield Met(name)

    def _short(self, picture: Picture) -> dict[int, list[str]]:
        """Groups that miss their bounds, by the index of their GPU."""
        found: dict[int, list[str]] = {}
        for load in picture.loads:
            if load.bound is not None and self._misses(load) and self._slowest(picture, load.name) == load.gpu:
                found.setdefault(load.gpu, []).append(load.name)
        return found

    def _misses(self, load: Load) -> bool:
        watch, upper = self._watched[load.name], load.bound.upper if load.bound is not None else None
        latency = watch.latency
        # The last sample counts as well: a backlog that shrinks needs no help.
        slow = upper is not None and latency is not None and min(latency, watch.samples[-1]) > upper
        return slow or watch.misses >= self._pace.window

    def _slowest(self, picture: Picture, name: str) -> int:
        """The GPU that is assumed to determine a group's latency: the one on which the group has the lowest rate."""
        return min((picture.rate(name, load.gpu), load.gpu) for load in picture.loads if load.name == name)[1]

    def _watch(self, name: str) -> _Watch:
        if name not in self._watched:
            self._watched[name] = _Watch(deque(maxlen=self._pace.window), 0.0)
        return self._watched[name]
