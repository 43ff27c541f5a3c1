"""When groups are moved: the decisions of the policy, without a clock or a file.

Bounds come first. A group that misses its own for a whole window is relieved; only where nobody does are GPUs of which
more is wanted than there is made even with those of which less is. Flyt (section 3.3) calls that "targeted migration":
on sustained deviation only.

It does not swing: a window is to be full of misses, and is emptied by each move; what is expected after a move is
better than what was missed (``choice.GOAL`` and ``choice.KEEP``, ``choice.GAIN``); two GPUs are left alone for a
cool-down, and a group that was moved for a rest that doubles each time it is moved again soon (``history.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping

import attrs

from ggroupfs.policies.balance.choice import GOAL, Plan, even, relieve
from ggroupfs.policies.balance.history import History
from ggroupfs.policies.balance.picture import LEAST, Load, Move, Picture

HOLD_S = 600.0
"""For so long it is kept in mind how slow a group once was."""
MISSED = 0.9
"""Who has less than that part of its least share misses it."""


@attrs.frozen
class Pace:
    """How fast things go."""

    window: int = 3
    """Samples, or looks, in a row that a decision is made on."""
    silence: float = 60.0
    """Seconds after which a latency that was not reported again is no longer believed."""
    rest: float = 60.0
    """Seconds for which a group that was moved stays."""
    cooldown: float = 5.0
    """Seconds between two plans for the same GPUs."""
    overload: float = 1.2
    """GPUs that may be wanted of one before others are looked at."""


@attrs.frozen
class Short:
    """A group has missed its bounds for a cool-down, and no move helps. Said once, until they hold again."""

    group: str
    """Which."""
    gpu: int
    """Where."""
    latency: float | None
    """Seconds: that of the window; None where none is reported."""


@attrs.frozen
class Met:
    """A group of which that was said has its bounds again, or is gone."""

    group: str
    """Which."""


Decision = Plan | Short | Met


@attrs.define
class _Watch:
    """A group that has bounds."""

    samples: deque[float]
    """Its last latencies since something was moved to or from its GPU, seconds."""
    heard: float
    """When there was one, seconds."""
    alone: float | None = None
    """Seconds: what it would be if it had a GPU for itself, by the last full window."""
    worst: float | None = None
    """The most that this was..."""
    worst_at: float = 0.0
    """... and when, seconds."""
    misses: int = 0
    """Looks in a row in which it had less than its least share."""
    since: float | None = None
    """Since when it misses its bounds and nothing helps, seconds; None while that is not so."""
    told: bool = False
    """Whether it was said to be short."""

    @property
    def latency(self) -> float | None:
        """The mean of a full window, seconds; None while it is not full."""
        return sum(self.samples) / len(self.samples) if len(self.samples) == self.samples.maxlen else None

    def measured(self, now: float, alone: float) -> None:
        """A full window says that it would be so fast alone."""
        self.alone = alone
        if self.worst is None or alone >= self.worst or now - self.worst_at >= HOLD_S:
            self.worst, self.worst_at = alone, now


class Core:
    """See the module."""

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self._history = History(self._pace.rest, self._pace.cooldown)
        self._watched: dict[str, _Watch] = {}
        self._overloaded: dict[int, int] = {}  # looks in a row

    def sample(self, now: float, name: str, latency: float) -> None:
        """The latency of a group in an interval, seconds."""
        watch = self._watch(name)
        watch.samples.append(latency)
        watch.heard = now

    def decide(self, now: float, picture: Picture) -> list[Decision]:
        """One look: what is to be done at the time `now`, seconds. One plan at most, which is to be carried out, and
        told by :meth:`moved` and :meth:`refused`, before the next look."""
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
        """Takes note of a picture, and answers it with what is known of latencies."""
        names = {load.name for load in picture.loads}
        self._history.keep(names)
        for name, watch in self._watched.items():
            if now - watch.heard >= self._pace.silence or name not in names:
                watch.samples.clear()
                watch.alone = None
        self._overloaded = {  # one that is lost is in no picture
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
        """What helps groups on a GPU that miss their bounds; None if nothing does. The picture is that of
        :meth:`look`."""
        if gpu not in picture.cards:
            return None
        return relieve(picture, gpu, short, lambda load, to: self._history.may(now, load.name, load.gpu, to))

    def moved(self, now: float, picture: Picture, move: Move) -> None:
        """A move was made; `picture` is the one that it was decided on."""
        self._history.moved(now, move.load.name, move.load.gpu, move.to)
        self._forget(picture, move)

    def refused(self, now: float, picture: Picture, move: Move, code: int) -> None:
        """A move was refused, with this errno. The group may have stood still for it."""
        self._history.refused(now, move.load.name, move.load.gpu, move.to, code)
        self._forget(picture, move)

    def _forget(self, picture: Picture, move: Move) -> None:
        """What was measured until now is of another neighbourhood."""
        for gpu in (move.load.gpu, move.to):
            self._overloaded[gpu] = 0
            for name in {move.load.name, *(load.name for load in picture.on(gpu))} & self._watched.keys():
                self._watched[name].samples.clear()
                self._watched[name].misses = 0

    def _stuck(self, now: float, gpu: int, names: Iterable[str]) -> Iterator[Short]:
        """Nothing helps those."""
        for name in names:
            watch = self._watched[name]
            watch.since = now if watch.since is None else watch.since
            if not watch.told and now - watch.since >= self._pace.cooldown:
                watch.told = True
                yield Short(name, gpu, watch.latency)

    def _met(self, picture: Picture, short: Mapping[int, Collection[str]]) -> Iterator[Met]:
        """Who has his bounds again, clearly; or is gone, or silent."""
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
        """Who misses his bounds, on which GPU."""
        found: dict[int, list[str]] = {}
        for load in picture.loads:
            if load.bound is not None and self._misses(load) and self._slowest(picture, load.name) == load.gpu:
                found.setdefault(load.gpu, []).append(load.name)
        return found

    def _misses(self, load: Load) -> bool:
        watch, upper = self._watched[load.name], load.bound.upper if load.bound is not None else None
        latency = watch.latency
        # The last one too: a backlog that shrinks does so by itself.
        slow = upper is not None and latency is not None and min(latency, watch.samples[-1]) > upper
        return slow or watch.misses >= self._pace.window

    def _slowest(self, picture: Picture, name: str) -> int:
        """Of the GPUs that a group is on, the one that its latency is thought to be of."""
        return min((picture.rate(name, load.gpu), load.gpu) for load in picture.loads if load.name == name)[1]

    def _watch(self, name: str) -> _Watch:
        if name not in self._watched:
            self._watched[name] = _Watch(deque(maxlen=self._pace.window), 0.0)
        return self._watched[name]
