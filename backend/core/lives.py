"""The lives of slices that were made to stay: each lasts as long as its cgroup, as with cgroupfs.

A slice is made to stay by mkdir, or when something is set on it. It may be made ahead: then its cgroup is **awaited**,
for ever or for as long as its maker said. Once the cgroup, or a process in it, has been seen, the slice belongs to that
cgroup and to no later one of its name. It goes with the cgroup, or, where something is still below it then, with the
last of that; if another cgroup of the name is made before, the slice is reset for it. Where the presence of a cgroup
cannot be told, nothing goes. An active unit keeps its slice (:mod:`ggroupfs.units.active`).

Nothing announces cgroups that come and go in every namespace and hierarchy, so they are polled: some at a time, and
those above a process whenever it enters one.
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
"""Most cgroups looked at each time, some 10 us each: ten thousand take 40 s to go through."""

TURN_S = 0.002
"""Seconds of work after which other tasks get a turn: thousands of slices may go at once."""


class Memory(Protocol):
    """The store of lives that outlasts a daemon."""

    def kept(self) -> Mapping[Slice, Life]:
        """Return the lives that the previous daemon left."""

    def keep(self, slice_: Slice, life: Life, *, now: bool) -> None:
        """Store a life, if it changed. Unless `now`, it may be lost if the daemon dies."""

    def forget(self, slices: Iterable[Slice]) -> None:
        """Drop the lives of slices that are gone, or were not made after all."""


class Forgetful:
    """A :class:`Memory` in which nothing outlives this daemon."""

    def kept(self) -> Mapping[Slice, Life]:
        return {}

    def keep(self, slice_: Slice, life: Life, *, now: bool) -> None:
        pass

    def forget(self, slices: Iterable[Slice]) -> None:
        pass


@attrs.frozen
class Told:
    """A made slice, as it is shown."""

    slice: Slice
    """The slice."""
    state: str
    """``awaited``: its cgroup never came; ``there``: it came, and was there at the last look; ``unit``: its unit is
    active."""
    age_s: int
    """Seconds since the slice was made, or asked for anew."""
    left_s: int | None
    """Seconds that an awaited cgroup has left; None where there is no end, or where it is not awaited."""


class Lives:
    """See the module."""

    def __init__(self, population: Population, settle: Callable[[Slice], None], memory: Memory | None = None) -> None:
        """`settle` updates the processes below a slice that have exited, or moved to another cgroup, unnoticed so
        far."""
        self._population = population
        self._settle = settle
        self._memory: Memory = memory or Forgetful()
        self._lives: dict[Slice, Life] = {}
        self._over: dict[Slice, Life] = {}  # slices that stay only for what is below them
        self._queue: dict[Slice, None] = {}  # the order in which cgroups are looked at
        self._due: dict[Slice, None] = {}  # looked at first: the cgroup above them is gone
        self._doomed: dict[Slice, Life] = {}  # to be dropped, unless their life changes meanwhile
        self._version = 0
        self._told: tuple[tuple[int, int], Sequence[Told]] = (-1, 0), ()
        self.clock_ms: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        """Returns milliseconds since boot, suspended time included."""
        self.timeout_of: Callable[[Slice], int | None] = lambda _: None
        """Returns how many milliseconds a slice waits for its cgroup if its maker did not say, as configured; None for
        no end."""
        self.knows_units: Callable[[], bool] = lambda: True
        """Returns whether active units hold their slices by now."""
        self.heard: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        """Returns once the kernel has dropped the dentries of all slices that have gone so far: until then it finds the
        former slices by their names."""
        population.kept.append(self._turned)

    def __len__(self) -> int:
        return len(self._lives)

    def take_over(self) -> None:
        """Take over the lives that the previous daemon left, of slices that are in the tree because they were made."""
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
        """Look at cgroups, some at a time, until cancelled."""
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
        """Look at one slice that is due, or drop one."""
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

    # Events

    def make(self, slice_: Slice, maker: int = 0) -> None:
        """Make a slice, by mkdir of a user. As :meth:`Population.make`; a former slice without its cgroup goes
        first."""
        self.look(slice_)
        self._population.make(slice_)
        if maker:
            self._note(slice_, attrs.evolve(self._lives[slice_], maker=maker))
        self.look(slice_)

    def make_ahead(self, slice_: Slice, timeout_ms: int) -> None:
        """Make a slice, with those above it, and give its cgroup so many milliseconds to come, or FOREVER. EAGAIN for a
        slice that is too deep, EINVAL for that of a family."""
        self._population.require_plain(slice_)
        self.look(slice_)
        now = self.clock_ms()  # asking again starts the time again
        life = attrs.evolve(self._lives.get(slice_) or Life(now), since_ms=now, timeout_ms=timeout_ms)
        self._memory.keep(slice_, life, now=True)  # first: a daemon killed now must leave no slice that nothing ends
        try:
            self._population.make_ahead(slice_)
        except OSError:
            self._memory.forget([slice_])
            raise
        self._note(slice_, attrs.evolve(self._lives[slice_], since_ms=life.since_ms, timeout_ms=timeout_ms))
        self.look(slice_)

    def enters(self, cgroup: Slice) -> None:
        """Note that a process is in a cgroup, and is about to enter the tree there."""
        for level in _levels(cgroup):
            self.look(level, came=True)

    def look(self, slice_: Slice, *, came: bool = False) -> None:
        """Drop a slice if its cgroup is gone, or did not come in time. `came`: a process is in the cgroup."""
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
            elif came or entry.unit:  # a unit may be active without a cgroup
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

    # Showing

    def told(self) -> Sequence[Told]:
        """Return what is shown, in the order of the paths. It is the same object while nothing changes, for a second at
        most."""
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

    # Helpers

    def _timeout(self, slice_: Slice, life: Life) -> int | None:
        timeout = self.timeout_of(slice_) if life.timeout_ms is None else life.timeout_ms
        return None if timeout == FOREVER else timeout

    def _is_late(self, slice_: Slice, life: Life, entry: SliceEntry) -> bool:
        """Return whether a slice waited in vain. It is kept while something is below it."""
        if entry.members or entry.children:
            return False
        timeout = self._timeout(slice_, life)
        return timeout is not None and self.clock_ms() >= life.since_ms + timeout

    def _end(self, slice_: Slice, life: Life) -> None:
        """Drop a slice after its cgroup. The cgroups below are gone with it: they are looked at soon."""
        self._population.let_go(slice_)
        self._settle(slice_)
        entry = self._population.slice_entry(slice_)
        if entry is None:
            return
        if not entry.kept:  # a process that settled elsewhere may have brought it back
            self._over[slice_] = attrs.evolve(life, is_over=True)
            self._memory.keep(slice_, self._over[slice_], now=False)
        self._due.update(dict.fromkeys(below for below in entry.children if below in self._lives))
        if entry.given:  # slices that its user made ahead in it would keep it that user's
            self._doom_awaited(entry, entry.given)

    def _renew(self, slice_: Slice) -> None:
        """Reset a slice, kept by what is below it, for another cgroup of its name: nothing of the former counts."""
        del self._over[slice_]
        self._memory.forget([slice_])
        self._population.reset(slice_)

    def _doom_awaited(self, entry: SliceEntry, user: int) -> None:
        """Drop, soon, the slices below one that a user made for cgroups that never came."""
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
        """Note that a slice was made to stay, or no longer is; or that it became a unit's."""
        self._version += 1
        entry = self._population.slice_entry(slice_)
        if kept and slice_ not in self._lives:
            was_over = self._over.pop(slice_, None) is not None
            self._lives[slice_] = Life(self.clock_ms())
            self._queue[slice_] = None
            if was_over:  # else the next daemon would still take its cgroup for gone
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
    """Yield a cgroup and those above it, lowest first, without the root."""
    level: Slice | None = cgroup
    while level is not None and level != ROOT:
        yield level
        level = level.parent
