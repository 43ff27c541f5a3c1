"""What NVML's samples tell for certain of programs that do not count their kernels: how busy the engine was in times in
which such a program was on the runlist from beginning to end. Pure.

A sample is of some time, about a sixth of a second, that has no regard to when a program is had stand and go on. One
that covers both says how much of each fell into it. And of programs that share the engine it names one, or all with a
part each, as the driver likes: so what all of them have in a sample is taken together, which is what the engine worked.
Nothing is sampled of an engine that idles: that there is no sample says so, once one would have come.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping

import attrs

from backend.process.identity import Process

MARGIN_S = 0.01
"""Seconds by which the ends of a sample are not known."""
LATE_S = 1.5
"""Seconds after which no sample of a time is to be expected any more."""
SILENT_S = 0.5
"""Seconds without a sample from which on an engine idled: three of an H200's."""
LONGEST_S = 3.0
"""Seconds between two samples, beyond which nothing is told of the time between."""
BUSY, BUSY_AMONG = 0.97, 0.9
"""Part of a sample from which on the engine idled at no time: of one program, and of several, for which it switches."""
STRETCHES = 16
"""Times off the runlist that are remembered of a program: those of the last six seconds, at a cycle of 0.4 s."""


@attrs.define(eq=False)
class Watch:
    """What is known of one program."""

    off: deque[tuple[float, float]]
    """From when to when it was off the runlist, or may have been; up to infinity where it is."""
    watched: float = 0.0
    """Microseconds on the runlist of which samples told."""
    busy: float = 0.0
    """What the engine worked of these."""

    def was_on(self, began: float, ended: float) -> bool:
        """Whether it was on the runlist all of the time."""
        return not any(since < ended and began < until for since, until in self.off)


class Sight:
    """See the module. Of one GPU; times are in seconds, by one clock."""

    def __init__(self) -> None:
        self._each: dict[Process, Watch] = {}
        self._known: float | None = None  # up to when samples have told

    def told(self, process: Process) -> tuple[int, int] | None:
        """Microseconds on the runlist of which samples told, and what the engine worked of these; None where it is not
        watched."""
        watch = self._each.get(process)
        return None if watch is None else (int(watch.watched), int(watch.busy))

    def keep(self, processes: Iterable[Process], now: float, off: Collection[Process]) -> None:
        """These do not count their kernels, and no others; those `off` are off the runlist."""
        there = set(processes)
        self._each = {process: watch for process, watch in self._each.items() if process in there}
        for process in there - self._each.keys():
            until = math.inf if process in off else now
            self._each[process] = Watch(deque([(-math.inf, until)], STRETCHES))

    def turns(self, process: Process, now: float, is_on: bool) -> None:
        """A process goes off the runlist from now on, or was put back by now."""
        watch = self._each.get(process)
        if watch is None:
            return
        since, until = watch.off[-1]
        if is_on and until > now:
            watch.off[-1] = since, now
        elif not is_on and until <= now:
            watch.off.append((now, math.inf))

    def take(self, now: float, shares: Mapping[int, float], age: float, span: float | None) -> None:
        """Take samples: parts by pid, the last one of `age` seconds ago, and `span` after the one before; None where
        that is not known. Without any, it is that time all the same."""
        if shares and span is not None:
            ended = min(now, now - age)
            began = ended - span if self._known is None else max(self._known, ended - span)
            self._see(began, ended, min(1.0, sum(shares.values())), BUSY if len(shares) == 1 else BUSY_AMONG)
            self._known = max(began, ended)
        elif shares:
            self._known = min(now, now - age)
        elif self._known is None:
            self._known = now
        elif now - LATE_S - self._known >= SILENT_S:
            self._see(self._known, now - LATE_S, 0.0, BUSY)
            self._known = now - LATE_S

    def _see(self, began: float, ended: float, part: float, busy: float) -> None:
        """The engine worked so much of a time."""
        if not 0 < ended - began <= LONGEST_S:
            return
        us = (ended - began) * 1e6
        for watch in self._each.values():
            if watch.was_on(began - MARGIN_S, ended + MARGIN_S):
                watch.watched += us
                watch.busy += us if part >= busy else us * part


def joined(samples: Iterable[tuple[int, int, float]], before: int) -> Mapping[int, float]:
    """Return the parts by pid of samples, each a pid, the time at its end and its part; the one before them ended
    `before`. Drivers tell of each pid once, with the average since then, or of each sample by itself."""
    each = sorted(samples, key=lambda one: one[1])
    pids = [pid for pid, _, _ in each]
    if len(set(pids)) == len(pids):
        return {pid: part for pid, _, part in each}
    stamps = sorted({stamp for _, stamp, _ in each})
    first = before if 0 < before < stamps[0] else 2 * stamps[0] - stamps[1] if len(stamps) > 1 else stamps[0] - 1
    spans = {stamp: stamp - since for since, stamp in itertools.pairwise([first, *stamps])}
    whole, parts = stamps[-1] - first, dict[int, float]()
    for pid, stamp, part in each:
        parts[pid] = parts.get(pid, 0.0) + part * spans[stamp] / whole
    return parts
