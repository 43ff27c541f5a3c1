"""Timeslices of programs that share a GPU: in the proportion of their parts, corrected by their measured use.

The runlist is round robin, so slices decide as long as every program has work. Each switch to a context costs engine
time, which is taken off the slice of the context's program: a program of four contexts uses no more than its part. The
use of each program is also compared with its due (Ghost, section 4.3: credits), and slices are changed where the
difference is more than one slice that fell just inside or outside the measured time. So nothing oscillates, and among
programs that go on as before nothing is changed at all.

A program that waits for each of its results yields: it leaves the engine before its slice is over, once in each round.
Beside a program that never yields it has its part only if that program's slice is as long as its own stays, in
proportion: the slice is fitted to them.

A program that stands for its quota does not come and go of its own will: rounds stay long beside it. In short ones a
quota of 30 ms had been done in eight stays, each with a switch. Its slice is its quota, or a whole part of that: what
it had is known only once it stands, and where it is in its slice is not known at all. A time of whole rounds has as
many whole slices, whenever it begins, so the program stands while others have the engine, with all of its quota and no
more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import attrs

from backend.process.identity import Process
from backend.scheduler.shares import Contender, Layer, due, measures, tops
from backend.scheduler.use import Use

ROUND_US = 60_000
"""Length of a round of programs that always have work, microseconds: three of them lose 1 % of it to switches."""
SHORT_ROUND_US = 8_000
"""Length of a round in which a program comes and goes, microseconds: the program waits for no longer than this."""
LEADER_ROUND_US = 20_000
"""Length of such a round of leaders, whose pauses others fill, microseconds: no work of a leader is interrupted for a
filler more often. Rounds of a leader that is alone are always long: only fillers wait for it, as they are to."""
ROUND_MOST_US = 250_000
"""Longest round, microseconds: of very different parts, so that the smallest is a slice worth a switch."""
SLICE_US = 1_000
"""Shortest slice that is worth a switch, microseconds."""
SLICE_LEAST_US = 50
"""Slice of the smallest part in a round of ROUND_MOST_US, however small the part is, microseconds."""
SWITCH_US = 170
"""Time that the trace of a GPU charges for a switch besides the slice, microseconds: from the end of the last stay to
the end of the save (81 + 92 us on an H200, docs/nvidia.md)."""
STAY = 1.024
"""Length of a stay on the engine, as a multiple of the slice (measured on an H200)."""
LOOK_US = 1_000_000
"""Least time over which use is compared, microseconds."""
MEMORY_US = 8_000_000
"""Time after which earlier use counts half, microseconds."""
YIELDS = 0.7
"""Part of its slice up to which a program that leaves the engine does so by itself, to wait for something."""
MOVES = 0.15
"""Relative difference from which the slice of a program beside one that yields is set anew."""
FULL = 0.8
"""Used part of its due, or of its slices, from which a program always has work."""
SOME = 0.5
"""Used part of its due below which a program comes and goes."""
LIVELY_US = 5_000_000
"""Time for which rounds stay short after a program came and went, microseconds."""
LIVELY_MOST_US = 80_000_000
"""Longest such time, microseconds. It doubles, up to this, where the program comes and goes again as soon as rounds are
long: a program that waits for each of its results does so for ever, and has one result in each long round."""
LATE_US = 500_000
"""Time after a change in which use is still of before it, microseconds: a trace is 0.2 s late, and levers take time."""
TOLERANCE = 0.01
"""Relative difference of use and due that is left alone, besides one slice inside or outside the measured time."""
STEP = (0.8, 1.25)
"""Least and greatest factor of one correction of a slice."""
BOUND = (0.25, 4.0)
"""Least and greatest factor of all corrections of a slice together."""


def _whole_part(quota_us: int, slice_us: int) -> int:
    """Return the slice, microseconds, whose stay is a whole part of a quota: of those the one nearest to `slice_us`."""
    return max(SLICE_LEAST_US, round(quota_us / max(1, round(quota_us / slice_us)) / STAY))


@attrs.define
class Fair:
    """The programs that share at one time, and their slices."""

    _parts: Layer = attrs.field(factory=dict)
    _gains: dict[Process, float] = attrs.field(factory=dict)
    _members: Sequence[Contender] = ()
    _by_hand: bool = False  # whether some have explicit timeslices
    _light: set[Process] = attrs.field(factory=set)
    _left: dict[Process, float] = attrs.field(factory=dict)  # parts with what siblings leave, of parts without
    _seen: set[Process] = attrs.field(factory=set)  # those that used anything since these share
    _used: dict[Process, float] = attrs.field(factory=dict)
    _recent: dict[Process, int] = attrs.field(factory=dict)  # microseconds since the last look
    _stays: dict[Process, int] = attrs.field(factory=dict)  # how often each came onto the engine since then
    _stayer: tuple[Process, float] | None = None  # that never yields; the others' use between its stays
    _slices: dict[Process, int] = attrs.field(factory=dict)
    _switches: dict[Process, int] = attrs.field(factory=dict)  # microseconds of switches in a round
    _measured: int = 0  # microseconds in which _used was measured
    _looked: int = 0  # microseconds since the last look
    _late: int = 0  # microseconds for which use is not measured
    _lively: int = 0  # microseconds for which rounds are still to be short
    _calm: int = LIVELY_MOST_US  # microseconds since rounds were short
    _patience: int = LIVELY_US  # microseconds for which rounds stay short
    _limited: set[Process] = attrs.field(factory=set)  # those that stood for quotas of late
    _restless: set[Process] = attrs.field(factory=set)  # those for which rounds are short

    def slices(
        self, window_us: int, layer: Layer, members: Sequence[Contender], use: Use, *, leads: bool
    ) -> Mapping[Process, int]:
        """Return timeslices in microseconds, 0 for the driver's default. `members` are those of the layer; `leads` says
        whether other programs fill what these leave."""
        self._members = [one for one in members if one.active]
        active = {one.process: layer[one.process] for one in self._members}
        if len(active) < 2 and not leads:
            return dict.fromkeys(layer, 0)  # alone it runs on, whatever its slice is
        if self._by_hand:
            self._by_hand = False
            self._begin({})
        if active != self._parts:
            self._begin(active)
        self._calm = 0 if self._lively else self._calm + window_us
        self._lively = max(0, self._lively - window_us)
        if not self._lively:
            self._restless.clear()
        self._measure(window_us, use)
        short = SHORT_ROUND_US if not leads else LEADER_ROUND_US if len(active) > 1 else ROUND_US
        length = short if self._lively else ROUND_US
        own = {process: part * self._gains.get(process, 1.0) for process, part in layer.items()}
        weighted = {process: part * self._left.get(process, 1.0) for process, part in own.items()}
        whole = sum(weighted[process] for process in active) or 1.0
        self._switches = {process: SWITCH_US * use.contexts(process) for process in layer}
        least = max((SLICE_US + self._switches[process]) * whole / part for process, part in weighted.items())
        length = max(length, min(ROUND_MOST_US, round(least)))
        before = self._slices
        self._slices = {
            process: max(SLICE_LEAST_US, round(length * part / whole) - self._switches[process])
            for process, part in weighted.items()
        }
        if self._stayer is not None and not leads:
            self._fit(own, active)
        for process in active:
            if (quota_us := use.quota_us(process)) and use.contexts(process) == 1:
                self._slices[process] = _whole_part(quota_us, self._slices[process])
        if any(abs(self._slices[process] / before.get(process, 1) - 1) > MOVES for process in active):
            self._look_anew()
        return self._slices

    def pause(self) -> None:
        """Take note that nothing is shared now. The trace is late: what it tells next is of a program alone."""
        self._look_anew()

    def keep(self, there: Set[Process]) -> None:
        """Forget processes that are gone; rounds are not short for them any more."""
        self._light &= there
        if self._restless and self._restless.isdisjoint(there):
            self._restless.clear()
            self._lively, self._calm, self._patience = 0, LIVELY_MOST_US, LIVELY_US

    def is_light(self, process: Process) -> bool:
        """Return whether a process was seen to use less than its part: it may use nothing for a while and still be
        there."""
        return process in self._light

    def _fit(self, parts: Mapping[Process, float], active: Iterable[Process]) -> None:
        """Fit the slice of the one program that never yields. Those that yield have one stay each in a round, whatever
        their slices are; so its slice is what makes parts right."""
        assert self._stayer is not None
        process, between = self._stayer
        others = sum(parts[one] for one in active if one != process) or 1.0
        fair = round(between * parts[process] / others) - self._switches[process]
        self._slices[process] = min(self._slices[process], max(SLICE_US, fair))

    def beside(self, window_us: int, members: Sequence[Contender], use: Use, default_us: int) -> Mapping[Process, int]:
        """Return timeslices, 0 for the driver's default, beside programs that have theirs by hand. Timeslices by hand
        were chosen against those that the driver gives, so these are the measure: a program of default weight in the
        root has that, and the others by their parts beside it, as if those by hand were not there."""
        others = [one for one in members if not one.explicit]
        self._members = [one for one in others if one.active]
        active = due(self._members, {})
        scales = measures(others, due(others, {})) | measures(self._members, active)
        if active != self._parts or not self._by_hand:
            if not self._by_hand:
                self._by_hand = True
                self._gains.clear()
            self._begin(active)
        self._measure(window_us, use)
        right = {p: self._gains.get(p, 1.0) * self._left.get(p, 1.0) for p in scales}
        self._switches = {process: SWITCH_US * use.contexts(process) for process in scales}
        self._slices = {
            process: min(ROUND_MOST_US, max(SLICE_LEAST_US, round(default_us * scale * right[process])))
            for process, scale in scales.items()
        }
        chosen = {p: 0 if us == default_us and use.contexts(p) == 1 else us for p, us in self._slices.items()}
        return {one.process: chosen.get(one.process, 0) for one in members}

    def _begin(self, parts: Layer) -> None:
        self._parts = dict(parts)
        self._stayer = None
        self._seen.clear()
        self._left = {}
        if light := self._light & parts.keys():  # these are taken to use little again
            self._left = self._left_by_others(due(self._members, dict.fromkeys(light, 0.0)), parts.keys() - light)
        self._gains = {process: gain for process, gain in self._gains.items() if process in parts}
        self._forget()

    def _forget(self) -> None:
        self._used = dict.fromkeys(self._parts, 0.0)
        self._measured = 0
        self._look_anew()

    def _look_anew(self) -> None:
        """Begin a look anew. A look is at slices of one kind: stays in short rounds do not say which programs yield in
        long ones."""
        self._recent = dict.fromkeys(self._parts, 0)
        self._stays = dict.fromkeys(self._parts, 0)
        self._looked = 0
        self._late = LATE_US

    def _measure(self, window_us: int, use: Use) -> None:
        """Charge use. Where the use of any program is unknown, rounds are short, and slices as parts say."""
        windows = {process: use.used(process) for process in self._parts}
        self._seen |= {process for process, used in windows.items() if used}
        limited = {process for process in self._parts if use.is_limited(process)}
        if limited != self._limited:  # what one had below a quota is nothing that it lacks
            self._limited = limited
            self._forget()
        if self._late > 0:
            self._late -= window_us
            return
        if unknown := {process for process, used in windows.items() if used is None}:
            self._shorten(LIVELY_US, unknown)
            return
        for process, used in windows.items():
            self._used[process] += used or 0
            self._recent[process] += used or 0
            self._stays[process] += use.stays(process) or 0
        self._measured += window_us
        self._looked += window_us
        if self._looked >= LOOK_US:
            self._looked = 0
            self._look(use)
        if self._measured >= MEMORY_US:
            self._used = {process: used / 2 for process, used in self._used.items()}
            self._measured //= 2

    def _shorten(self, us: int, why: Set[Process]) -> None:
        """Keep rounds short for `us` microseconds, for the processes `why`."""
        self._lively = max(self._lively, us)
        self._restless |= why

    def _had(self, used: Mapping[Process, float]) -> Mapping[Process, float]:
        """Return the use of each process as a part of its due."""
        total, whole = sum(used.values()), sum(self._parts.values())
        rounds = {p: self._slices.get(p, 0) + self._switches.get(p, 0) for p in self._parts}
        length = sum(rounds.values()) or 1
        slices = sum(self._slices.get(p, 0) for p in self._parts) or 1  # not every trace charges switches
        return {
            p: used[p] / (min(part / whole, rounds[p] / length, self._slices.get(p, 0) / slices) * total or 1.0)
            for p, part in self._parts.items()
        }

    def _yielding(self, use: Use) -> set[Process]:
        """Return the processes that leave the engine before their slices are over."""
        return {
            process
            for process, stays in self._stays.items()
            if stays
            and not use.is_limited(process)
            and self._recent[process] / stays < YIELDS * self._slices.get(process, 0) / use.contexts(process)
        }

    def _full(self, use: Use) -> Set[Process]:
        """Return the processes that always have work. Of several contexts some may have none: then one that has stays
        for its slice in each round, and the process has less than its part."""
        full = {process for process, used in self._had(self._used).items() if used >= FULL}
        turns = {p: self._recent[p] / max(1, self._slices.get(p, 0)) for p in self._parts}
        rounds, yielding = max(turns.values(), default=0.0), self._yielding(use)
        for process in self._parts.keys() - full - yielding:
            contexts = use.contexts(process)
            if contexts > 1 and self._stays[process] and contexts * turns[process] >= FULL * rounds:
                full.add(process)
        return full

    def _look_for_a_stayer(self, use: Use) -> None:
        """Find the process that does not yield where all others do. Short rounds cost no process anything then, as
        where all yield."""
        yielding = self._yielding(use)
        here = {process for process, used in self._recent.items() if used}
        staying = here - yielding
        if len(staying) != 1:
            self._stayer = None
        if not yielding or len(staying) > 1:
            return
        self._shorten(LIVELY_US, yielding)
        for process in staying:
            between = sum(self._recent[one] for one in yielding) / max(1, self._stays[process])
            if self._stayer is None or self._stayer[0] != process or abs(self._stayer[1] / between - 1) > MOVES:
                self._stayer = process, between

    def _look(self, use: Use) -> None:
        # Rounds follow what was just seen, slices what was seen for long: they are to be right on the average.
        limited = self._limited
        if some := {process for process, used in self._had(self._recent).items() if 0 < used < SOME} - limited:
            if not self._lively:
                self._patience = min(LIVELY_MOST_US, 2 * self._patience) if self._calm < self._patience else LIVELY_US
            self._shorten(self._patience, some)
        self._look_for_a_stayer(use)
        full = self._full(use) - limited  # below a quota a program wants no more than it has
        self._recent = dict.fromkeys(self._parts, 0)
        self._stays = dict.fromkeys(self._parts, 0)
        self._light = (self._light | self._seen) - full - limited
        self._correct(full, use)

    def _correct(self, full: Set[Process], use: Use) -> None:
        """Compare the use of the processes that always have work with their dues. Slices are changed where these differ
        by more than one slice inside or outside the measured time."""
        total = sum(self._used.values()) or 1.0
        wanted = due(self._members, {p: used / total for p, used in self._used.items() if p not in full})
        spent, whole = sum(self._used[p] for p in full), sum(wanted[p] for p in full) or 1.0
        theirs = {process: wanted[process] / whole * spent for process in full}
        left = self._left_by_others(wanted, full)
        more = {process: left[process] / self._left.get(process, 1.0) for process in full}
        if any(
            abs(self._used[process] - us) > self._slices.get(process, 0) + TOLERANCE * us
            for process, us in theirs.items()
        ):
            self._gain({p: us / self._used[p] / more[p] for p, us in theirs.items()}, use)
            self._left = left
            self._forget()
        elif self._by_hand and any(abs(one - 1) > MOVES * LOOK_US / self._measured for one in more.values()):
            # There may be no process to compare with. Use is taken as if slices had been these all along.
            self._left = left
            self._used |= {process: self._used[process] * one for process, one in more.items()}
            self._look_anew()

    def _gain(self, steps: Mapping[Process, float], use: Use) -> None:
        """Multiply slices by `steps`, on top of what parts, and what others leave of theirs, say."""
        gains = {}
        for process, step in steps.items():
            contexts = use.contexts(process)
            step = min(max(STEP[1], contexts), max(min(STEP[0], 1 / contexts), step))
            gain = self._gains.get(process, 1.0) * step
            gains[process] = min(BOUND[1] * contexts, max(BOUND[0] / contexts, gain))
        self._gains |= self._by_the_measure(gains, use) if self._by_hand else gains

    def _left_by_others(self, wanted: Mapping[Process, float], full: Set[Process]) -> dict[Process, float]:
        """Return the dues of the processes that always have work, with what others leave, as factors of their parts.
        Beside explicit timeslices a group in the root has its own part, and the rest of that is for its members."""
        groups = [[one.process for one in below] for below in tops(self._members)] if self._by_hand else [full]
        left: dict[Process, float] = {}
        for group in groups:
            whole, parts = sum(wanted[p] for p in group) or 1.0, sum(self._parts[p] for p in group)
            left |= {p: round(wanted[p] / whole * parts / self._parts[p], 6) for p in group if p in full}
        return left

    def _by_the_measure(self, gains: Mapping[Process, float], use: Use) -> dict[Process, float]:
        """Return gains relative to that of the measure, which has none: a process with other than its part beside the
        measure is corrected. Where all are in slices, or have several contexts, some of which may have no work, one
        keeps its gain."""
        there = [one for one in self._members if one.process in gains]
        first = min(there, key=lambda one: (use.contexts(one.process) > 1, len(one.path)))
        is_measure = use.contexts(first.process) == 1 and len(first.path) == 1
        goal = 1.0 if is_measure else self._gains.get(first.process, 1.0)
        return {process: gain * goal / gains[first.process] for process, gain in gains.items()}
