"""What one process works on a GPU, as soon as it can be told. Pure, in microseconds.

The software GPU tells at once. The trace of a real one is 0.2 s late, and charges a program that is alone with all of
the time, also while it idles (``nvidia/residency.py``). So the meter goes ahead of it: what a process worked is taken
to be its *chances*, the time in which it could run and had work as far as it says, times what it made of these of late.
When the figure comes it takes the place of that guess. It counts up to the chances of its time: an engine that stood at
the context of a program without work was not used by it. Of a process without the library no chance is known by its
word: what NVML's samples say is taken, which are a second late.
"""

from __future__ import annotations

from collections import deque

import attrs

from backend.core.records import Activity

SAMPLES_US = 1_500_000
"""Microseconds of chances after which samples that did not change say that nothing was used."""
KEPT = 0.8
"""Part of what was sampled that counts still with the next sample."""
ALL = 0.9
"""Part of its chances from which on a process is taken to use all of them: samples are no better than that."""
SILENT_US = 500_000
"""Microseconds beyond its delay after which a figure that did not change says that nothing was used."""
LEARNT_US = 50_000
"""Microseconds of chances after which what was made of them is learnt."""


@attrs.frozen
class Mark:
    """What was known at one moment, since the meter began, microseconds."""

    at: int
    """The moment."""
    chances: float
    """Time in which it could run, and had work."""
    guessed: float
    """What it was taken to use of that."""


@attrs.define(eq=False)
class Meter:
    """The meter of one process."""

    late_us: int
    """How late its time on the engine is told, microseconds; 0 where it is told at once."""
    told_us: int = 0
    """What had been told when the meter began, or was read last, microseconds."""
    _sums: tuple[float, float] = attrs.field(default=(0.0, 0.0), init=False)  # of samples, and of chances meanwhile
    _since_us: float = attrs.field(default=0.0, init=False)  # chances since the last sample
    _is_sampled: bool = attrs.field(default=False, init=False)
    _known_us: float = attrs.field(default=0.0, init=False)  # what it worked up to a time that is late
    _counted_us: int = attrs.field(default=0, init=False)  # what was returned so far
    _share: float = attrs.field(default=1.0, init=False)  # of its chances, of late
    _had_work: bool = attrs.field(default=True, init=False)  # when it was read last
    _marks: deque[Mark] = attrs.field(factory=deque, init=False)  # the oldest is of the time up to which is known

    @classmethod
    def begun(cls, late_us: int, activity: Activity | None) -> Meter:
        """Return the meter of a process that goes on from what is told of it; None: all that it ever does counts."""
        meter = cls(late_us)
        if activity is not None:
            meter._is_sampled = meter._takes_samples(activity)
            meter.told_us = meter._figure(activity) or 0
        return meter

    def read(self, now_us: int, activity: Activity, could_run: bool) -> int:
        """Return what the process worked since it was read last, microseconds; less than nothing where that was less
        than was thought. `could_run`: since then it was on the runlist, and let launch or had work launched."""
        figure = self._figure(activity)
        if self.late_us == 0 and figure is not None:
            grown, self.told_us = max(0, figure - self.told_us), figure
            return grown
        has_work = activity.pending != 0
        self._mark(now_us, could_run * (self._had_work + has_work) / 2)
        self._had_work = has_work
        if figure is None:  # all chances count
            self._settle(self._marks[-1].chances - self._marks[0].chances)
        elif self._is_sampled != self._takes_samples(activity):
            self._is_sampled, self.told_us = not self._is_sampled, figure
        elif self._is_sampled:
            self._take_sample(figure)
        else:
            self._learn(now_us, figure)
        whole = round(self._known_us + self._marks[-1].guessed - self._marks[0].guessed)
        grown, self._counted_us = whole - self._counted_us, whole
        return grown

    def _takes_samples(self, activity: Activity) -> bool:
        """Whether samples tell of it: it does not say whether it has work."""
        return activity.pending is None and activity.busy_usec is not None

    def _figure(self, activity: Activity) -> int | None:
        """Return what is told of it, microseconds."""
        if self._takes_samples(activity) or (self.late_us == 0 and activity.busy_usec is not None):
            return activity.busy_usec
        return activity.gpu_usec

    def _mark(self, now_us: int, chance: float) -> None:
        if not self._marks:
            self._marks.append(Mark(now_us, 0.0, 0.0))
            return
        last = self._marks[-1]
        chances = max(0, now_us - last.at) * chance
        self._marks.append(Mark(now_us, last.chances + chances, last.guessed + self._share * chances))

    def _settle(self, worked_us: float) -> None:
        """So much was worked up to now, and nothing of that will be known better."""
        self._known_us += worked_us
        self._marks = deque((self._marks[-1],))

    def _take_sample(self, figure: int) -> None:
        """A sample is of a time that is known too roughly to be set against the chances of that time. So what is made
        of chances is learnt from several."""
        used, chances = self._sums
        if figure != self.told_us or self._since_us >= SAMPLES_US:
            used = KEPT * used + max(0, figure - self.told_us)
            self.told_us = figure
            chances = KEPT * chances + self._since_us
            self._since_us = 0.0
            self._sums = used, chances
            if chances >= LEARNT_US:
                self._share = 1.0 if used >= ALL * chances else used / chances
        self._since_us += self._marks[-1].chances - self._marks[0].chances
        self._settle(self._marks[-1].guessed - self._marks[0].guessed)

    def _learn(self, now_us: int, figure: int) -> None:
        if figure == self.told_us and now_us - self._marks[0].at < self.late_us + SILENT_US:
            return
        used, self.told_us = max(0, figure - self.told_us), figure
        before = self._marks[0]
        until = now_us - self.late_us
        if until <= before.at:  # it is of the time before the meter
            return
        while len(self._marks) > 1 and self._marks[1].at <= until:
            self._marks.popleft()
        there = self._marks[0] = self._between(until)
        chances = there.chances - before.chances
        worked = min(used, chances)
        self._known_us += worked
        if chances >= LEARNT_US:
            self._share = (self._share + worked / chances) / 2

    def _between(self, at: int) -> Mark:
        """Return what was known at a moment between the first two marks, or at the first."""
        first = self._marks[0]
        if len(self._marks) < 2 or at <= first.at:
            return first
        after = self._marks[1]
        part = min(1.0, (at - first.at) / max(1, after.at - first.at))
        chances = first.chances + (after.chances - first.chances) * part
        return Mark(at, chances, first.guessed + (after.guessed - first.guessed) * part)
