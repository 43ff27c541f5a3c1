"""How long a slice stays that was made, or on which something was set: as long as its cgroup, as with cgroupfs.

It may be made ahead: then its cgroup is **awaited**, for ever or for as long as its maker said. Once the cgroup
has been seen, or a process in it, the slice is that cgroup's and of no other that has its name later: it goes with it,
or, where something is still below it then, with the last of that; if another cgroup is made there before, it is as new.
Where it cannot be told whether a cgroup is there nothing goes. The slice of a unit that is active is held by that
(:mod:`ggroupfs.units.active`).

Nothing tells of cgroups that come and go in every namespace and hierarchy, so they are looked at; some of them each
time, and the ones above a process whenever one comes in.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import attrs
import trio

from backend.core.entries import CAME, FOREVER, NEVER, Life, SliceEntry
from backend.core.population import Population
from backend.process.cgroups import ids
from backend.process.identity import ROOT, Slice

log = logging.getLogger(__name__)

SWEEP_S = 0.25
"""Seconds between two looks at some of the cgroups."""

SWEEP_MOST = 64
"""Cgroups looked at each time, some 10 us each: ten thousand of them are looked at every 40 s."""

TURN_S = 0.002
"""Seconds of work after which others have a turn: thousands of slices may go at once."""


class Memory(Protocol):
    """What a daemon leaves of this for the one after it."""

    def kept(self) -> Mapping[Slice, Life]:
        """What the daemon before us left."""

    def keep(self, slice_: Slice, life: Life, *, now: bool) -> None:
        """From now on this is so, if it was not. Where it need not be `now`, the next daemon does without if we die."""

    def forget(self, slices: Iterable[Slice]) -> None:
        """These are gone, or nothing that was made."""


class Forgetful:
    """See :class:`Memory`: nothing outlives this daemon."""

    def kept(self) -> Mapping[Slice, Life]:
        return {}

    def keep(self, slice_: Slice, life: Life, *, now: bool) -> None:
        pass

    def forget(self, slices: Iterable[Slice]) -> None:
        pass


@attrs.frozen
class Told:
    """What is shown of a slice that was made."""

    slice: Slice
    """Which."""
    state: str
    """``awaited``: its cgroup never came; ``there``: that came, and had not gone at the last look; ``unit``: of a unit
    that is active."""
    age_s: int
    """Seconds since it was made, or asked for anew."""
    left_s: int | None
    """Seconds that an awaited cgroup has; None where there is no end, or it is not awaited."""


class Lives:
    """See the module."""

    def __init__(self, population: Population, settle: Callable[[Slice], None], memory: Memory | None = None) -> None:
        """`settle` has the processes below a slice leave that have ended, or are in other cgroups, and were not seen
        to."""
        self._population = population
        self._settle = settle
        self._memory: Memory = memory or Forgetful()
        self._lives: dict[Slice, Life] = {}
        self._over: dict[Slice, Life] = {}  # slices that are there for what is below them
        self._queue: dict[Slice, None] = {}  # of whose cgroups the next is the first
        self._due: dict[Slice, None] = {}  # looked at first: what was above them has gone
        self._doomed: dict[Slice, Life] = {}  # let go, if nothing has become of them meanwhile
        self._version = 0
        self._told: tuple[tuple[int, int], Sequence[Told]] = (-1, 0), ()
        self.clock_ms: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        """Milliseconds since the machine was started, those among them in which it slept."""
        self.timeout_of: Callable[[Slice], int | None] = lambda _: None
        """How long a cgroup may keep a slice waiting of which its maker said nothing, milliseconds: as files say it."""
        self.knows_units: Callable[[], bool] = lambda: True
        """Whether units that are active hold their slices by now."""
        self.heard: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        """Returns once the kernel has heard of all slices that have gone up to now: until then it finds those of before
        by their names."""
        population.kept.append(self._turned)

    def __len__(self) -> int:
        return len(self._lives)

    def take_over(self) -> None:
        """Goes on from what the daemon before us left, of the slices that are in the tree because they were made."""
        before = self._memory.kept()
        for slice_ in self._population.slices():
            entry, life = self._population.slice_entry(slice_), before.get(slice_)
            if entry is not None and entry.kept and slice_ != ROOT:
                self._lives[slice_] = Life(self.clock_ms()) if life is None else attrs.evolve(life, is_over=False)
                self._queue[slice_] = None
            elif life is not None and life.is_over:
                self._over[slice_] = life
        gone = before.keys() - self._lives.keys() - self._over.keys()
        if gone:
            self._memory.forget(gone)
        for cgroup in {resident.cgroup for resident in self._population.residents()}:
            for level in _levels(cgroup):
                life = self._lives.get(level)
                if life is not None and life.cgroup == NEVER:
                    self._note(level, attrs.evolve(life, cgroup=CAME))

    async def run(self) -> None:
        """Looks at cgroups, some at a time, until cancelled."""
        while True:
            await trio.sleep(SWEEP_S)
            for slice_ in list(itertools.islice(self._queue, SWEEP_MOST)):
                del self._queue[slice_]
                self._queue[slice_] = self._due[slice_] = None
            began = time.perf_counter()
            while self._due or self._doomed:
                self._work_off()
                if time.perf_counter() - began >= TURN_S:
                    await trio.sleep(TURN_S)
                    began = time.perf_counter()

    def _work_off(self) -> None:
        """Looks at one slice that is due, or lets one go."""
        slice_ = next(iter(self._due or self._doomed))
        self._due.pop(slice_, None)
        doomed = self._doomed.pop(slice_, None)
        try:
            if doomed is not None and self._lives.get(slice_) is doomed:
                self._population.let_go(slice_)
            else:
                self.look(slice_)
        except Exception:
            log.exception("slice %.200r: not looked after", slice_.path)

    # What happens

    def make(self, slice_: Slice, maker: int = 0) -> None:
        """mkdir by a user. As :meth:`Population.make`; one whose cgroup has gone is there no more."""
        self.look(slice_)
        self._population.make(slice_)
        if maker:
            self._note(slice_, attrs.evolve(self._lives[slice_], maker=maker))
        self.look(slice_)

    def make_ahead(self, slice_: Slice, timeout_ms: int) -> None:
        """A slice is there, with those above it, and its cgroup has so many milliseconds to come, or FOREVER. EAGAIN
        for one that is too deep, EINVAL for that of a family."""
        self._population.require_plain(slice_)
        self.look(slice_)
        now = self.clock_ms()  # asked for again, it has that long again
        life = attrs.evolve(self._lives.get(slice_) or Life(now), since_ms=now, timeout_ms=timeout_ms)
        self._memory.keep(slice_, life, now=True)  # first: one that is killed now leaves none that nothing ends
        try:
            self._population.make_ahead(slice_)
        except OSError:
            self._memory.forget([slice_])
            raise
        self._note(slice_, attrs.evolve(self._lives[slice_], since_ms=life.since_ms, timeout_ms=timeout_ms))
        self.look(slice_)

    def enters(self, cgroup: Slice) -> None:
        """A process is in a cgroup, and is about to be so in the tree."""
        for level in _levels(cgroup):
            self.look(level, came=True)

    def look(self, slice_: Slice, *, came: bool = False) -> None:
        """Has a slice go where its cgroup has, or did not come in time. `came`: a process is in it."""
        life, entry = self._lives.get(slice_), self._population.slice_entry(slice_)
        if entry is None or (life is None and slice_ not in self._over):
            return
        found = ids(slice_)
        if life is None:
            if found and self._over[slice_].cgroup not in found:
                self._renew(slice_)
        elif life.cgroup in (NEVER, CAME):
            if found:
                self._note(slice_, attrs.evolve(life, cgroup=found[0]))
            elif came or entry.unit:  # a unit may be active without one
                self._note(slice_, attrs.evolve(life, cgroup=CAME))
            elif found is not None:
                is_over = self.knows_units() if life.cgroup == CAME else self._is_late(slice_, life, entry)
                if is_over:
                    self._end(slice_, life)
                else:
                    self._note(slice_, life, now=False)
        elif found is not None and life.cgroup not in found:
            if not entry.unit:
                self._end(slice_, life)
                if found and slice_ in self._over:
                    self._renew(slice_)
            elif found:
                self._note(slice_, attrs.evolve(life, cgroup=found[0]))  # the unit was started anew

    # Telling

    def told(self) -> Sequence[Told]:
        """What is shown, in the order of the paths: the same object while nothing happens, for a second at most."""
        now = self.clock_ms()
        key = self._version, now // 1000
        if self._told[0] != key:
            self._told = key, [self._tell(slice_, now) for slice_ in sorted(self._lives, key=lambda one: one.path)]
        return self._told[1]

    def _tell(self, slice_: Slice, now: int) -> Told:
        life, entry = self._lives[slice_], self._population.slice_entry(slice_)
        assert entry is not None, "one that is gone has no life"
        state = "unit" if entry.unit else "awaited" if life.cgroup == NEVER else "there"
        timeout = self._timeout(slice_, life) if state == "awaited" else None
        left = None if timeout is None else max(0, life.since_ms + timeout - now) // 1000
        return Told(slice_, state, max(0, now - life.since_ms) // 1000, left)

    # The small parts

    def _timeout(self, slice_: Slice, life: Life) -> int | None:
        timeout = self.timeout_of(slice_) if life.timeout_ms is None else life.timeout_ms
        return None if timeout == FOREVER else timeout

    def _is_late(self, slice_: Slice, life: Life, entry: SliceEntry) -> bool:
        """Whether a slice is there for nothing: what is below it is waited for as long as it is there."""
        if entry.members or entry.children:
            return False
        timeout = self._timeout(slice_, life)
        return timeout is not None and self.clock_ms() >= life.since_ms + timeout

    def _end(self, slice_: Slice, life: Life) -> None:
        """The cgroup of a slice is no more, and those that were below it are not, either: they are looked at soon."""
        self._population.let_go(slice_)
        self._settle(slice_)
        entry = self._population.slice_entry(slice_)
        if entry is None:
            return
        if not entry.kept:  # as a process that settled elsewhere may have it again
            self._over[slice_] = attrs.evolve(life, is_over=True)
            self._memory.keep(slice_, self._over[slice_], now=False)
        self._due.update(dict.fromkeys(below for below in entry.children if below in self._lives))
        if entry.given:  # what its user had made ahead in it would keep it that user's
            self._doom_awaited(entry, entry.given)

    def _renew(self, slice_: Slice) -> None:
        """Another cgroup is there, while something below keeps the slice: nothing of the former counts."""
        del self._over[slice_]
        self._memory.forget([slice_])
        self._population.reset(slice_)

    def _doom_awaited(self, entry: SliceEntry, user: int) -> None:
        """The slices below one that a user made, for cgroups that never came, are to stay no longer."""
        for below in entry.children:
            life, lower = self._lives.get(below), self._population.slice_entry(below)
            assert lower is not None, "it is below one that is there"
            self._doom_awaited(lower, user)
            if life is not None and life.cgroup == NEVER and life.maker == user:
                self._doomed[below] = life

    def _note(self, slice_: Slice, life: Life, *, now: bool = True) -> None:
        if self._lives[slice_] != life:
            self._lives[slice_] = life
            self._version += 1
        self._memory.keep(slice_, life, now=now)

    def _turned(self, slice_: Slice, kept: bool) -> None:
        """A slice stays from now on, or does not; or it has become a unit's."""
        self._version += 1
        entry = self._population.slice_entry(slice_)
        if kept and slice_ not in self._lives:
            was_over = self._over.pop(slice_, None) is not None
            self._lives[slice_] = Life(self.clock_ms())
            self._queue[slice_] = None
            if was_over:  # else the next daemon would take it for that still
                self._note(slice_, self._lives[slice_])
            if entry is not None and (entry.members or entry.occupied):  # its cgroup may be gone by the next look
                found = ids(slice_)
                self._note(slice_, attrs.evolve(self._lives[slice_], cgroup=found[0] if found else CAME), now=False)
        elif not kept:
            known = [self._lives.pop(slice_, None), self._over.pop(slice_, None)]
            for queue in (self._queue, self._due, self._doomed):
                queue.pop(slice_, None)
            if known != [None, None]:
                self._memory.forget([slice_])


def _levels(cgroup: Slice) -> Iterator[Slice]:
    """A cgroup and those above it, lowest first, without the root."""
    level: Slice | None = cgroup
    while level is not None and level != ROOT:
        yield level
        level = level.parent
