"""How busy the engine was while programs that do not count their kernels were on the runlist, from NVML's samples.
Pure.

A sample covers about a sixth of a second, without regard to when a program is stopped and resumed. A sample that covers
both does not say how much of each it covers, so only samples count during which the program was on the runlist from
beginning to end. Of programs that share the engine a sample names one, or all with a part each, depending on the
driver. So the parts of all programs are summed, which gives the work of the engine. An idle engine has no samples:
their absence tells that it idled, once one would have been due.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping

import attrs

from backend.process.identity import Process

MARGIN_S = 0.01
"""Uncertainty of the beginning and end of a sample, seconds."""
LATE_S = 1.5
"""Seconds after which no more samples of a moment are to be expected."""
SILENT_S = 0.5
"""Seconds without a sample from which on the engine counts as idle: three sample intervals of an H200."""
LONGEST_S = 3.0
"""Longest distance between two samples, seconds; time beyond it is not counted."""
BUSY, BUSY_AMONG = 0.97, 0.9
"""Part of a sample above which the engine counts as busy throughout: with one program, and with several, since it
switches between these.
"""
STRETCHES = 16
"""Number of times off the runlist that are remembered of a program: those of the last six seconds, with cycles of 0.4
s.
"""


@attrs.define(eq=False)
class Watch:
    """Figures of one program."""

    off: deque[tuple[float, float]]
    """Times, from and until, during which it was off the runlist or may have been; until infinity while it is off."""
    watched: float = 0.0
    """Time on the runlist that samples cover, microseconds."""
    busy: float = 0.0
    """Time of these in which the engine worked, microseconds."""

    def was_on(self, began: float, ended: float) -> bool:
        """Return whether it was on the runlist all of the time."""
        return not any(since < ended and began < until for since, until in self.off)


class Sight:
    """The watched programs of one GPU; times are in seconds of one clock."""

    def __init__(self) -> None:
        self._each: dict[Process, Watch] = {}
        self._known: float | None = None  # time up to which samples were taken in

    def told(self, process: Process) -> tuple[int, int] | None:
        """Return the time of a process on the runlist that samples cover, and the part of it in which the engine
        worked, in microseconds; None if the process is not watched.
        """
        watch = self._each.get(process)
        return None if watch is None else (int(watch.watched), int(watch.busy))

    def keep(self, processes: Iterable[Process], now: float, off: Collection[Process]) -> None:
        """Watch exactly these processes, which do not count their kernels; those in `off` are off the runlist."""
        there = set(processes)
        self._each = {process: watch for process, watch in self._each.items() if process in there}
        for process in there - self._each.keys():
            until = math.inf if process in off else now
            self._each[process] = Watch(deque([(-math.inf, until)], STRETCHES))

    def turns(self, process: Process, now: float, is_on: bool) -> None:
        """Note that a process goes off the runlist from now on, or was put back by now."""
        watch = self._each.get(process)
        if watch is None:
            return
        since, until = watch.off[-1]
        if is_on and until > now:
            watch.off[-1] = since, now
        elif not is_on and until <= now:
            watch.off.append((now, math.inf))

    def take(self, now: float, shares: Mapping[int, float], age: float, span: float | None) -> None:
        """Take samples: the parts by pid, the age of the last one, and its distance `span` from the one before; None if
        unknown. Call it without samples, too, since that tells that the engine idled.
        """
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
        """Count a time of which the engine worked `part`."""
        if not 0 < ended - began <= LONGEST_S:
            return
        us = (ended - began) * 1e6
        for watch in self._each.values():
            if watch.was_on(began - MARGIN_S, ended + MARGIN_S):
                watch.watched += us
                watch.busy += us if part >= busy else us * part


def joined(samples: Iterable[tuple[int, int, float]], before: int) -> Mapping[int, float]:
    """Return the parts by pid of samples, each a pid, the time at its end and its part; `before` is the end of the
    sample before them. Drivers report each pid once, with the average since then, or each sample separately.
    """
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
