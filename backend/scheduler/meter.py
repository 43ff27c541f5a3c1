"""What processes work on a GPU, as soon as it can be told. Pure, in microseconds.

The software GPU tells at once. The trace of a real one is 0.2 s late, and charges a program that is alone with all of
the time, also while it idles (``nvidia/residency.py``). So the meters go ahead of it: what a process worked is taken to
be its *chances*, the time in which it could run and had work as far as it says, times what it made of these of late.

When the figures come they take the place of that guess. What a process had of the engine counts up to its chances of
that time, and what all had up to the time in which one of them had a chance: for what is more the engine stood at the
context of one without work, so it is taken from the one that had most.

A process that has ended is looked at until the figures of its last moment have come: what it did at last would stay a
guess, and programs that fork end all the time.

A process without the library does not say whether it has work. NVML's samples tell how busy it is, a second late and
coarsely: what part of its time they say is learnt from several, and one of nearly all of it counts as all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import attrs

from backend.core.records import Activity
from backend.process.identity import Process

SILENT_US = 500_000
"""Microseconds beyond their delay after which figures that did not change say that nothing was used."""
LEARNT_US = 20_000
"""Microseconds of chances from which what was made of them is learnt."""
SLACK_US = 20_000
"""Microseconds by which the time of a figure is not known."""
SAMPLES_US = 1_500_000
"""Microseconds of work after which samples that did not change say that a process idled."""
KEPT = 0.9
"""Part of what was sampled that counts still with the next sample."""
ALL = 0.8
"""Part of its work from which on a process is taken to have idled at no time: samples are no better than that, as they
are of another time than what is known of the trace."""
ENOUGH_US = 500_000
"""Microseconds of work from which samples say something."""
EACH_US = 300_000
"""Microseconds of work from which on samples are taken together: what comes late of one cycle comes with the next."""
FIRST = 2
"""How often samples were taken before they count: they are a second late, and the first ones say nothing yet."""

Look = tuple[Process, Activity, bool]
"""A process, what is told of it, and whether it could run since the last look: it was on the runlist, and launched, or
had launched what it could."""


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
class Marks:
    """What was known at the moments from one up to which all is settled."""

    _each: deque[Mark] = attrs.field(factory=deque, init=False)

    def add(self, now_us: int, chance: float, share: float = 1.0) -> None:
        """It is that time, and since the last one it had chances in this part of it, of which it used that share."""
        last = self._each[-1] if self._each else Mark(now_us, 0.0, 0.0)
        chances = max(0, now_us - last.at) * chance
        self._each.append(Mark(now_us, last.chances + chances, last.guessed + share * chances))

    def settle(self, until_us: int) -> float:
        """Return the chances up to a moment; from then on they are counted anew."""
        before = self._each[0]
        while len(self._each) > 1 and self._each[1].at <= until_us:
            self._each.popleft()
        first = self._each[0]
        if len(self._each) > 1 and until_us > first.at:
            after = self._each[1]
            part = (until_us - first.at) / (after.at - first.at)
            chances = first.chances + (after.chances - first.chances) * part
            first = self._each[0] = Mark(until_us, chances, first.guessed + (after.guessed - first.guessed) * part)
        return first.chances - before.chances

    @property
    def guessed(self) -> float:
        """What was taken to be used since the moment up to which all is settled, microseconds."""
        return self._each[-1].guessed - self._each[0].guessed


@attrs.define(eq=False)
class Least:
    """The least of two sums that grow, where what grows at the end of a look in one may grow in the next in the other:
    a figure is of a time that is known to some milliseconds."""

    _over: tuple[float, float] = attrs.field(default=(0.0, 0.0), init=False)

    def of(self, one: float, other: float) -> float:
        """Return what the least grows by where these are what the two grow by."""
        one, other = one + self._over[0], other + self._over[1]
        least = min(one, other)
        self._over = min(SLACK_US, one - least), min(SLACK_US, other - least)
        return least


@attrs.define(eq=False)
class Meter:
    """The meter of one process."""

    told_us: int | None = None
    """Time on the engine as it was told last, microseconds; None where that is not told."""
    sampled_us: int | None = None
    """Busy time as samples told it last, microseconds."""
    known_us: float = 0.0
    """Work up to the time of which is known, since the meter began, microseconds."""
    counted_us: int = 0
    """Work that was returned so far, microseconds."""
    share: float = 1.0
    """What the process made of its chances of late."""
    had_work: bool = True
    """Whether it had work at the last look."""
    counts: bool = False
    """Whether it says what work it has."""
    begins: bool = False
    """Whether it has just been let go on: what waited at its gate is work that it does not say yet."""
    marks: Marks = attrs.field(factory=Marks)
    least: Least = attrs.field(factory=Least)
    """Of what it had of the engine, and of its chances."""
    _busy: float = 1.0  # part of its work that samples say
    _sampled: float = 0.0  # of late, in samples
    _worked: float = 0.0  # ... and as it was known without them
    _since: float = 0.0  # ... since the last sample
    _taken: int = 0  # how often samples were taken
    _is_seen: bool = False  # whether they tell of any work

    def learn(self, worked: float, chances: float, activity: Activity) -> None:
        """So much was worked in a time with these chances, unless samples say less."""
        if activity.pending is None and activity.busy_usec is not None:
            self._take_sample(worked, activity.busy_usec)
            worked *= self._busy
        self.known_us += worked
        if chances >= LEARNT_US:
            self.share = (self.share + min(1.0, worked / chances)) / 2

    @property
    def always_works(self) -> bool:
        """Whether it has work at all times: by its own word; or by samples, as far as they say."""
        return self.had_work if self.counts else self._is_seen and self._busy == 1.0

    def _take_sample(self, worked: float, busy_us: int) -> None:
        before = busy_us if self.sampled_us is None else self.sampled_us
        self._is_seen |= busy_us > before
        if (busy_us != before and self._since >= EACH_US) or self._since >= SAMPLES_US:
            if self._taken >= FIRST:
                self._sampled = KEPT * self._sampled + max(0, busy_us - before)
                self._worked = KEPT * self._worked + self._since
            self._taken, self._since = self._taken + 1, 0.0
            if self._worked >= ENOUGH_US:
                self._busy = 1.0 if self._sampled >= ALL * self._worked else self._sampled / self._worked
            before = busy_us
        self.sampled_us = before
        self._since += worked


class Meters:
    """The meters of the processes of one GPU that are below quotas."""

    def __init__(self, late_us: int) -> None:
        """`late_us` is how late time on the engine is told, microseconds; 0 where it is told at once."""
        self._late_us = late_us
        self._each: dict[Process, Meter] = {}
        self._any = Marks()  # of the time in which one of them had a chance
        self._any_chance = 0.0  # ... as the last look found it
        self._least = Least()  # of what all worked, and of that time
        self._until: int | None = None  # all is settled up to then

    def begin(self, process: Process, activity: Activity | None, since_us: int = 0) -> None:
        """A process is below a quota from now on, and what is told of it so far is done; None: it has come at about
        `since_us`, and all that it ever did counts. Nothing where it was already."""
        if process in self._each:
            return
        meter = self._each[process] = Meter(told_us=0)
        if activity is not None:
            meter.told_us, meter.sampled_us = self._figure(activity), activity.busy_usec
        elif self._late_us:
            meter.marks.add(since_us, 0)

    def keep(self, processes: Iterable[Process]) -> None:
        """No other process is below a quota. Where none is, nothing of what was is of any use."""
        there = set(processes)
        self._each = {process: meter for process, meter in self._each.items() if process in there}
        if not self._each:
            self._any, self._any_chance, self._least, self._until = Marks(), 0.0, Least(), None

    def always_works(self, process: Process) -> bool:
        """Whether a process always has work, as far as is known."""
        return self._each[process].always_works

    def begins(self, process: Process) -> None:
        """A process goes on that stood."""
        if process in self._each:
            self._each[process].begins = self._each[process].had_work = True

    def _figure(self, activity: Activity) -> int | None:
        if self._late_us == 0 and activity.busy_usec is not None:
            return activity.busy_usec
        return activity.gpu_usec

    def look(self, now_us: int, looks: Iterable[Look]) -> Mapping[Process, int]:
        """Return what processes worked since the last look, microseconds; less than nothing where that was less than
        was thought."""
        found: dict[Process, int] = {}
        behind: dict[Process, Activity] = {}
        chances: dict[Process, float] = {}
        for process, activity, could_run in looks:
            meter, figure = self._each[process], self._figure(activity)
            meter.counts = activity.pending is not None
            if self._late_us == 0 and figure is not None:
                found[process] = max(0, figure - (meter.told_us or 0))
                meter.told_us, meter.had_work = figure, activity.pending != 0
                continue
            behind[process] = activity
            has_work = activity.pending != 0 or meter.begins
            chances[process] = could_run * (meter.had_work + has_work) / 2
            meter.had_work, meter.begins = has_work, False
        any_chance = self._any_chance = max(chances.values(), default=0.0)
        guessed = sum(self._each[process].share * chance for process, chance in chances.items())
        scale = any_chance / guessed if guessed > any_chance else 1.0  # they have one engine
        for process, chance in chances.items():
            meter = self._each[process]
            meter.marks.add(now_us, chance, meter.share * scale)
        if behind:
            self._any.add(now_us, any_chance)
            self._settle(now_us, behind)
            for process in behind:
                meter = self._each[process]
                whole = round(meter.known_us + meter.marks.guessed)
                found[process], meter.counted_us = whole - meter.counted_us, whole
        return found

    def end(self, now_us: int, look: Look) -> int:
        """Return what a process that is about to be gone worked since the last look, microseconds. The others are not
        looked at, since there may be a thousand, and nothing is settled."""
        process, activity, could_run = look
        meter, figure = self._each[process], self._figure(activity)
        if self._late_us == 0 and figure is not None:
            worked, meter.told_us = max(0, figure - (meter.told_us or 0)), figure
            return worked
        has_work = activity.pending != 0 or meter.begins
        chance = could_run * (meter.had_work + has_work) / 2
        meter.marks.add(now_us, chance, meter.share)
        self._any.add(now_us, max(chance, self._any_chance))
        before, meter.counted_us = meter.counted_us, round(meter.known_us + meter.marks.guessed)
        return meter.counted_us - before

    def is_settled(self, us: int) -> bool:
        """Whether all is known up to a moment."""
        return self._late_us == 0 or (self._until is not None and self._until >= us)

    def _settle(self, now_us: int, behind: Mapping[Process, Activity]) -> None:
        """Puts figures that have come in the place of guesses."""
        until_us = now_us - self._late_us
        if self._until is None:
            self._until = until_us
        is_news = any(self._figure(one) != self._each[process].told_us for process, one in behind.items())
        if until_us <= self._until or (not is_news and until_us - self._until < SILENT_US):
            return
        self._until = until_us
        chances, worked = {}, dict[Process, float]()
        for process, activity in behind.items():
            meter, figure = self._each[process], self._figure(activity)
            chances[process] = meter.marks.settle(until_us)
            used = chances[process] if figure is None else max(0, figure - (meter.told_us or 0))
            worked[process], meter.told_us = meter.least.of(used, chances[process]), figure
        whole = sum(worked.values())
        excess = whole - self._least.of(whole, self._any.settle(until_us))
        for process in sorted(worked, key=lambda one: worked[one], reverse=True):
            less = min(excess, worked[process])  # less than nothing: what was taken before was work, of a time near by
            worked[process] -= less
            excess -= less
        for process, activity in behind.items():
            self._each[process].learn(worked[process], chances[process], activity)
