"""What processes work on a GPU, as soon as it can be told. Pure, in microseconds.

The software GPU tells at once. The trace of a real one is 0.2 s late, and charges a program that is alone with all of
the time, also while it idles (``nvidia/residency.py``). So the meters go ahead of it: what a process worked is taken to
be its *chances*, the time in which it could run and had work as far as it says, times what it made of these of late. A
library says itself for how long kernels were pending: by looks alone each turn at a gate would count a millisecond too
much, from the decision that opens the gate to the look that finds nothing pending.

When the figures come they take the place of that guess. What a process had of the engine counts up to its chances of
that time, and what all had up to the time in which one of them had a chance: for what is more the engine stood at the
context of one without work, so it is taken from the one that had most. Switches of contexts are in the figures, and are
no work: each stay counts less by what one takes.

A process that has ended is looked at until the figures of its last moment have come: what it did at last would stay a
guess, and programs that fork end all the time.

A process without the library does not say whether it has work: all of its time on the engine counts, but for what
samples tell (``watched.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import attrs

from backend.core.records import Activity
from backend.process.identity import Process
from backend.scheduler.watched import Watched

SILENT_US = 500_000
"""Microseconds beyond their delay after which figures that did not change say that nothing was used."""
LEARNT_US = 20_000
"""Microseconds of chances from which what was made of them is learnt."""
HALF_US = 100_000
"""Microseconds of chances after which what was made of those before counts half, in the quick mean."""
MEMORY_US = 3_000_000
"""Microseconds of chances over which the mean is taken while a process goes on as before. Beside others a program has
the engine for slices of 30 ms: of 40 ms of chances it makes all or nothing, and the mean of a tenth of a second is off
by a tenth. A quota of 40 ms that went by that was off by a slice, which is heard of only once the program stands."""
JUMP = 0.25
"""Difference of the quick mean from the long one from which on a process has other neighbours, or other habits."""
PACE_LEAST = 0.1
"""Least part of the time in which a process could run that it is charged for: nine others have the rest."""
SLACK_US = 20_000
"""Microseconds by which the time of a figure is not known."""
SKEW_US = 2_000
"""Microseconds by which two looks at a library's time may be further apart than those at ours."""
ALL = 0.9
"""Part of the time since the last look from which on a process is taken to have had work at all of it."""

Look = tuple[Process, Activity, float]
"""A process, what is told of it, and in what part of the time since the last look it could run: it was on the runlist,
and launched, or had launched what it could."""


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

    def last_us(self, now_us: int) -> int:
        """Return the last moment of which something is known; now, where none is."""
        return self._each[-1].at if self._each else now_us

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
class Share:
    """The part that a process made of its chances of late: the mean over the time in which it went on as before."""

    part: float = 1.0
    """Part of its chances."""
    _quick: float = attrs.field(default=1.0, init=False)
    _weight: float = attrs.field(default=HALF_US, init=False)  # microseconds of chances that the part is of

    def learn(self, worked: float, chances: float) -> None:
        """Take into the mean that the process worked `worked` of `chances`, microseconds; less than LEARNT_US of
        chances say nothing."""
        if chances < LEARNT_US:
            return
        part = min(1.0, worked / chances)
        self._quick += (part - self._quick) * (1 - 0.5 ** (chances / HALF_US))
        self.part += (part - self.part) * chances / (self._weight + chances)
        self._weight = min(MEMORY_US, self._weight + chances)
        if abs(self._quick - self.part) > JUMP:
            self.part, self._weight = self._quick, HALF_US


@attrs.define(eq=False)
class Meter:
    """The meter of one process."""

    told_us: int | None = None
    """Time on the engine as it was told last, microseconds; None where that is not told."""
    pending_us: int | None = None
    """Time with kernels pending as its library told it last, microseconds; None where that is not told."""
    known_us: float = 0.0
    """Work up to the time of which is known, since the meter began, microseconds."""
    counted_us: int = 0
    """Work that was returned so far, microseconds."""
    shared: Share = attrs.field(factory=Share)
    """What the process made of its chances of late."""
    had_work: bool = True
    """Whether it had work at the last look."""
    counts: bool = False
    """Whether it says what work it has."""
    chance: float = 0.0
    """Part of the time before the last look in which it could run, and had work."""
    begins: bool = False
    """Whether it has just been let go on: what waited at its gate is work that it does not say yet."""
    after_us: float = 0.0
    """Work since its gate closed, microseconds; a guess where that is told late, since a figure that comes meanwhile is
    of the time before."""
    marks: Marks = attrs.field(factory=Marks)
    least: Least = attrs.field(factory=Least)
    """Of what it had of the engine, and of its chances."""
    watched: Watched = attrs.field(factory=Watched)
    """What samples say of it, where it does not say what work it has."""

    def learn(self, worked: float, chances: float, activity: Activity) -> None:
        """So much was worked in a time with these chances, unless samples say less."""
        counted = self.watched.take(worked, activity) if activity.pending is None else worked
        self.known_us += counted
        self.shared.learn(worked * (self.watched.part if activity.pending is None else 1.0), chances)

    def look(self, now_us: int, activity: Activity, could_run: float) -> float:
        """Return in what part of the time since the last look it could run, and had work."""
        before, self.pending_us = self.pending_us, activity.pending_usec
        has_work, passed_us = activity.pending != 0 or self.begins, now_us - self.marks.last_us(now_us)
        if before is not None and self.pending_us is not None and self.pending_us > before - SLACK_US and passed_us > 0:
            had_us = self.pending_us - before  # less than nothing where it ended before it was seen to
            if had_us > passed_us:  # by the library's clock, which was read a little later than ours
                self.pending_us -= min(had_us - passed_us, SKEW_US)
            had = min(1.0, had_us / passed_us)
        else:
            had = (self.had_work + has_work) / 2
        self.had_work, self.begins, self.chance = has_work, False, could_run * had
        return self.chance

    @property
    def share(self) -> float:
        """The part that it made of its chances of late."""
        return self.shared.part

    @property
    def always_works(self) -> bool:
        """Whether it has work at all times: by its own word; or by samples, as far as they say."""
        return self.had_work if self.counts else self.watched.works

    @property
    def worked_on(self) -> bool:
        """Whether it had work, and could run, for all of the time before the last look."""
        return self.chance >= ALL and (self.counts or (self.watched.is_told and self.watched.works))


class Meters:
    """The meters of the processes of one GPU that are below quotas."""

    def __init__(self, late_us: int, switch_us: int = 0) -> None:
        """`late_us` is how late time on the engine is told, microseconds; 0 where it is told at once. `switch_us` is
        what of it each stay takes for switches."""
        self._late_us = late_us
        self._switch_us = switch_us
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
            meter.told_us, meter.pending_us = self._figure(activity), activity.pending_usec
            meter.watched.begin(activity)
        elif self._late_us:
            meter.pending_us = 0
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

    def worked_on(self, process: Process) -> bool:
        """Whether a process had work, and could run, for all of the time before the last look."""
        return self._each[process].worked_on

    def part(self, process: Process) -> float:
        """Return what part of its time on the engine a process is taken to work; 1 where it says itself."""
        meter = self._each[process]
        return 1.0 if meter.counts else meter.watched.part

    def pace(self, process: Process) -> float:
        """Return the part of the time in which a process could run that it was charged for of late, at least
        PACE_LEAST. Beside others that is less than the part of its time on the engine in which it works."""
        return max(PACE_LEAST, min(self._each[process].share, self.part(process)))

    def wants_sight(self, process: Process, now_us: int) -> bool:
        """Whether a process is to be on the runlist for ON_US of ``watched.py`` in one go: samples tell of it then."""
        meter = self._each[process]
        return self._late_us > 0 and not meter.counts and meter.watched.wants_sight(now_us)

    def begins(self, process: Process) -> None:
        """A process goes on that stood."""
        if process in self._each:
            self._each[process].begins = self._each[process].had_work = True

    def closes(self, process: Process) -> None:
        """Note that a process stands at its gate from now on."""
        if process in self._each:
            self._each[process].after_us = 0.0

    def after_us(self, process: Process) -> float:
        """Return the work, by guess where that is told late, of a process since its gate closed, microseconds."""
        return self._each[process].after_us

    def _figure(self, activity: Activity) -> int | None:
        if self._late_us == 0 and activity.busy_usec is not None:
            return activity.busy_usec
        if activity.gpu_usec is None:
            return None
        return activity.gpu_usec - self._switch_us * (activity.stays or 0)

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
                meter.after_us += found[process]
                continue
            behind[process] = activity
            chances[process] = meter.look(now_us, activity, could_run)
        any_chance = self._any_chance = max(chances.values(), default=0.0)
        guessed = sum(self._each[process].share * chance for process, chance in chances.items())
        scale = any_chance / guessed if guessed > any_chance > 0 else 1.0  # they have one engine
        for process, chance in chances.items():
            meter = self._each[process]
            meter.after_us += max(0, now_us - meter.marks.last_us(now_us)) * chance * meter.share * scale
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
        chance = meter.look(now_us, activity, could_run)
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
            worked[process] = meter.least.of(used, chances[process])
            if figure is None or meter.told_us is None or not 0 < meter.told_us - figure <= self._switch_us:
                meter.told_us = figure  # else a stay has only begun
        whole = sum(worked.values())
        excess = whole - self._least.of(whole, self._any.settle(until_us))
        for process in sorted(worked, key=lambda one: worked[one], reverse=True):
            less = min(excess, worked[process])  # less than nothing: what was taken before was work, of a time near by
            worked[process] -= less
            excess -= less
        for process, activity in behind.items():
            self._each[process].learn(worked[process], chances[process], activity)
