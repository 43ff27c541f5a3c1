"""How long a slice stays that was made, or on which something was set: as long as its cgroup, as with cgroupfs.

It may be made ahead: then its cgroup is **awaited**, for ever or for as long as its maker said. Once the cgroup
has been seen, or a process in it, the slice is that cgroup's and of no other that has its name later: it goes with it,
or, where something is still below it then, with the last of that. Where it cannot be told whether a cgroup is there
nothing goes. The slice of a unit that is active is held by that (:mod:`ggroupfs.units.active`).

Nothing tells of cgroups that come and go in every namespace and hierarchy, so they are looked at; some of them each
time, and the ones above a process whenever one comes in.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
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
    """Seconds since it was made."""
    left_s: int | None
    """Seconds that an awaited cgroup has; None where there is no end, or it is not awaited."""


class Lives:
    """See the module."""

    def __init__(
        self, population: Population, expel_ended: Callable[[Slice], None], memory: Memory | None = None
    ) -> None:
        """`expel_ended` has the processes below a slice leave that have ended, and were not seen to."""
        self._population = population
        self._expel_ended = expel_ended
        self._memory: Memory = memory or Forgetful()
        self._lives: dict[Slice, Life] = {}
        self._queue: dict[Slice, None] = {}  # of whose cgroups the next is the first
        self.clock_ms: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        """Milliseconds since the machine was started, those among them in which it slept."""
        self.timeout_of: Callable[[Slice], int | None] = lambda _: None
        """How long a cgroup may keep a slice waiting of which its maker said nothing, milliseconds: as files say it."""
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
            entry = self._population.slice_entry(slice_)
            if entry is not None and entry.kept and slice_ != ROOT:
                self._lives[slice_] = before.get(slice_) or Life(self.clock_ms())
                self._queue[slice_] = None
        gone = before.keys() - self._lives.keys()
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
                if slice_ not in self._queue:  # it went with another
                    continue
                del self._queue[slice_]
                self._queue[slice_] = None
                try:
                    self.look(slice_)
                except Exception:
                    log.exception("slice %.200r: not looked after", slice_.path)

    # What happens

    def make(self, slice_: Slice) -> None:
        """mkdir. As :meth:`Population.make`; one whose cgroup has gone is there no more."""
        self.look(slice_)
        self._population.make(slice_)
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
        if life is None or entry is None:
            return
        found = ids(slice_)
        if life.cgroup in (NEVER, CAME):
            if found:
                self._note(slice_, attrs.evolve(life, cgroup=found[0]))
            elif came or entry.unit:  # a unit may be active without one
                self._note(slice_, attrs.evolve(life, cgroup=CAME))
            elif found is not None:
                if life.cgroup == CAME or self._is_late(slice_, life, entry):
                    self._end(slice_)
                else:
                    self._note(slice_, life, now=False)
        elif found is not None and life.cgroup not in found:
            if not entry.unit:
                self._end(slice_)
            elif found:
                self._note(slice_, attrs.evolve(life, cgroup=found[0]))  # the unit was started anew

    # Telling

    def told(self) -> Iterator[Told]:
        """What is shown, in the order of the paths."""
        now = self.clock_ms()
        for slice_ in sorted(self._lives, key=lambda one: one.path):
            life, entry = self._lives[slice_], self._population.slice_entry(slice_)
            assert entry is not None, "one that is gone has no life"
            state = "unit" if entry.unit else "awaited" if life.cgroup == NEVER else "there"
            timeout = self._timeout(slice_, life) if state == "awaited" else None
            left = None if timeout is None else max(0, life.since_ms + timeout - now) // 1000
            yield Told(slice_, state, max(0, now - life.since_ms) // 1000, left)

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

    def _end(self, slice_: Slice) -> None:
        """The cgroup of a slice is no more, and so are those that were below it."""
        for below in list(self._population.children(slice_)):
            self._end_below(below)
        self._expel_ended(slice_)
        entry = self._population.slice_entry(slice_)
        if entry is not None and entry.given:  # what its user had made ahead in it would keep it that user's
            self._let_go_awaited(slice_, entry.given)
        self._population.let_go(slice_)

    def _end_below(self, slice_: Slice) -> None:
        known = slice_ in self._lives
        self.look(slice_)
        if known and slice_ not in self._lives:
            return  # what is below has been looked at with it
        for below in list(self._population.children(slice_)):
            self._end_below(below)

    def _let_go_awaited(self, slice_: Slice, user: int) -> None:
        """The slices below one that a user made, for cgroups that never came, stay no longer."""
        for below in list(self._population.children(slice_)):
            self._let_go_awaited(below, user)
            life, entry = self._lives.get(below), self._population.slice_entry(below)
            if life is not None and life.cgroup == NEVER and entry is not None and entry.user == user:
                self._population.let_go(below)

    def _note(self, slice_: Slice, life: Life, *, now: bool = True) -> None:
        self._lives[slice_] = life
        self._memory.keep(slice_, life, now=now)

    def _turned(self, slice_: Slice, kept: bool) -> None:
        """A slice stays from now on, or does not."""
        entry = self._population.slice_entry(slice_)
        if kept and slice_ not in self._lives:
            self._lives[slice_] = Life(self.clock_ms())
            self._queue[slice_] = None
            if entry is not None and (entry.members or entry.occupied):  # its cgroup may be gone by the next look
                found = ids(slice_)
                self._note(slice_, attrs.evolve(self._lives[slice_], cgroup=found[0] if found else CAME), now=False)
        elif not kept and self._lives.pop(slice_, None) is not None:
            self._queue.pop(slice_, None)
            self._memory.forget([slice_])


def _levels(cgroup: Slice) -> Iterator[Slice]:
    """A cgroup and those above it, lowest first, without the root."""
    level: Slice | None = cgroup
    while level is not None and level != ROOT:
        yield level
        level = level.parent
