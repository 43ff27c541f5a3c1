"""Check whether the TSGs of a process have the timeslices that were set, and learn their native ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Set

import attrs

from backend.nvidia import levers, rm
from backend.nvidia.applied import Applied
from backend.nvidia.discover import Tsg
from backend.nvidia.levers import Controls, Key
from backend.nvidia.linux import System
from backend.process.identity import Process

AT_ONCE = 64
"""TSGs of a program that are asked for their timeslice in one go: a program with thousands holds up no other."""
OWN_S = 1.0
"""Seconds within which the maker of a TSG may still set its timeslice. Some PyTorch programs that had just started
had the driver's default again (docs/nvidia.md); the CUDA library seems to set it some time after it makes the TSG.
On a busy host that may be later, so the default is excused once, whenever it comes.
"""


class Timeslices:
    """The timeslices of one process on one GPU."""

    def __init__(self, process: Process, system: System, applied: Applied) -> None:
        self._process = process
        self._system = system
        self._applied = applied
        self._held: dict[Key, float] = {}  # since when each was seen to have what was set, by the keeper's clock
        self._changed: set[Key] = set()  # those that had it for OWN_S, and now have another one
        self._excused: set[Key] = set()  # those that were once excused for having the driver's default again

    def begin_again(self) -> None:
        """Start over after the GPU was lost and is back."""
        self._held.clear()

    # In threads

    def is_stretched(self, now: float) -> bool:
        """Ask for timeslices, and return whether any differs from what was set. `now` is the time in seconds."""
        known = self._applied.known_timeslices()
        tsgs = [tsg for tsg in self._applied.tsgs() if levers.name(tsg) in known]
        tsgs = random.sample(tsgs, min(len(tsgs), AT_ONCE))
        try:
            with rm.borrowed(self._system, self._process, sorted({tsg.fd for tsg in tsgs})) as controls:
                found = levers.timeslices(controls, [tsg for tsg in tsgs if tsg.fd in controls])
        except OSError:
            return False  # gone, or about to be found gone
        self._held = {key: since for key, since in self._held.items() if key in known}
        for key, us in found.items():
            if us == known[key]:
                self._held.setdefault(key, now)
            elif now - self._held.get(key, now) >= OWN_S:
                self._changed.add(key)
        return any(us != known[key] for key, us in found.items())

    def ask(self, controls: Controls, tsgs: Sequence[Tsg], again: bool) -> tuple[Sequence[Tsg], bool]:
        """Ask for the timeslices of the TSGs that are about to get another one; with `again`, of all.
        Return `tsgs` with the native timeslices as known by now, and whether the process undid what was
        set. Raises OSError.
        """
        applied = self._applied
        again = again and applied.timeslice_us != 0
        due = [tsg for tsg, _ in levers.differing(tsgs, applied.timeslice_us, applied.slices)]
        found = levers.timeslices(controls, levers.shares(tsgs, 0) if again else due)
        known = applied.known_timeslices()
        tsgs = self._learn(tsgs, found)
        applied.slices |= found
        if not again:
            return tsgs, False
        changed, self._changed = self._changed, set()
        others = {key for key in changed & known.keys() & found.keys() if found[key] != known[key]}
        return tsgs, bool(others - self._excuse(others))

    def _learn(self, tsgs: Sequence[Tsg], found: Mapping[Key, int]) -> Sequence[Tsg]:
        """Return `tsgs` with the native timeslices that `found` shows. The native timeslice is the one that a
        TSG has before another is set; the CUDA library's default counts as native whenever it comes, since it
        may be set late.
        """
        own = {}
        for tsg in tsgs:
            key = levers.name(tsg)
            us = found.get(key, tsg.default_us)
            by_cuda = us == rm.TIMESLICE_DEFAULT_US and self._applied.slices.get(key) not in (us, levers.UNKNOWN)
            if us != tsg.default_us and (by_cuda or key not in self._applied.slices):
                own[key] = us
        if own:
            self._applied.handles.learn(own)
        return [attrs.evolve(tsg, default_us=own.get(levers.name(tsg), tsg.default_us)) for tsg in tsgs]

    def _excuse(self, keys: Set[Key]) -> Set[Key]:
        """Return those of the TSGs whose maker may have set the timeslice: to its default, and for the first time."""
        own = {levers.name(tsg): us for tsg, us in levers.shares(self._applied.tsgs(), 0).items()}
        excused = {key for key in keys - self._excused if self._applied.slices.get(key) == own.get(key)}
        self._excused = (self._excused | excused) & own.keys()
        return excused
