"""Programs that together use more memory than they have room for: what is left of their speed, by turns and without.

The programs are in one slice, and none of them knows of anything. With room for all each does what it can; then the
slice has room for a part of what they hold, contexts counted, down to a third of it: 150, 200 and 300 %. Turns are of
half a second at most, or of one where a case says so. Every case is measured with the same programs, which go on from
one to the next, after a round of turns to settle.

In the end each program says whether all that it computed is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario, Subject
from tests.bench.gpu.faces import Carried, Job, Lab, Room, Rooms, Worked
from tests.bench.gpu.systems import Turned, WholeGpu

DRIVER, TURNS, OFF = "time slicing, room for all", "ggroupfs, turns", "ggroupfs, turns off"

EACH_MIB = 8704
"""MiB of each program: 8.5 GiB, as Llama-3-8B in int8."""
FEW_GIB = 24
"""GiB of room that eight of them have."""
WINDOW_S, SLOW_S, SETTLE_S = 6.0, 8.0, 10.0
"""Seconds that are measured; of programs that wait for a second and longer, so that each has a turn; and before, where
there is less room than until then. The host's memory for what goes then is pinned once, at 3 to 4 GiB/s, 2 to 3 GiB of
each of four programs."""
UNTURNED_S = 4.0
"""Seconds before such a window, and of it, where there are no turns: nothing is pinned but as the limit is written."""
ROUND_S, STOOD_S, LOOK_S = 5.0, 0.3, 0.002
"""Seconds of a round of turns at most, for which one program stands in it at least, and between two looks at it."""
FIRST_SETTLE_S, BEGUN_S = 12.0, 3.0
"""Seconds before the first such window of a mix: a third of all is pinned. And before the programs are measured with
room for all: they have begun one after the other, and the scheduler learns how long their kernels take."""


BUSY = ("does not follow",)
"""What the daemon says of programs that read over the bus, where no turns have them rest: their memory goes later."""


@attrs.frozen
class Pressure:
    """How much room there is, and how long turns are."""

    percent: int
    """What the programs hold, of the room that they have."""
    turn_s: float = 0.5
    """Seconds of a turn at most."""
    wait_s: float = 2.0
    """Seconds that a program waits at most, so that it is that."""

    @property
    def seconds(self) -> float:
        """Seconds to measure: a round at least."""
        return SLOW_S if self.wait_s > 2.0 else WINDOW_S


USUAL = (Pressure(150), Pressure(200, 0.5, 1.8), Pressure(300, 0.5, 2.5), Pressure(300, 1.0, 4.0))
"""At 300 % three turns and four switches of 170 to 210 ms are between two turns of a program: where it waits 2.2 s at
most, turns are 0.4 to 0.45 s."""
EIGHT = (Pressure(8 * EACH_MIB * 100 // (FEW_GIB << 10), 0.5, 4.0),)


@attrs.frozen
class Mix:
    """Programs that run together."""

    name: str
    """As the case says."""
    jobs: Sequence[Job]
    """What they do."""
    pressures: Sequence[Pressure] = USUAL
    """What is measured of them."""
    more: Mapping[str, str | float] = attrs.field(factory=dict)
    """What the case says besides."""

    @property
    def case(self) -> dict[str, str | float]:
        """The case, with room for all."""
        return {"mix": self.name, **self.more}


def decoding() -> list[Mix]:
    """D: decode loops, as launches and as graphs; and eight of them."""
    found = [
        Mix("decode", [Job("decode", EACH_MIB, graph)] * 4, more={"programs": 4, "graphs": int(graph)})
        for graph in (True, False)
    ]
    eight = [Job("decode", EACH_MIB, graph=True)] * 8
    return [*found, Mix("decode", eight, EIGHT, {"programs": 8, "graphs": 1})]


VISION = tuple(Job(kind, EACH_MIB) for kind in ("resnet152", "vgg19", "inception_v3", "densenet201"))
SCIENCE = tuple(Job(kind, EACH_MIB) for kind in ("wavelet", "stencil", "gather", "neighbours"))


def inference() -> list[Mix]:
    """B: four models of torchvision."""
    return [Mix("inference", VISION)]


def mixed() -> list[Mix]:
    """C: those, and one decode loop."""
    return [Mix("mixed", [*VISION, Job("decode", EACH_MIB, graph=True)])]


def science() -> list[Mix]:
    """A: four scientific programs."""
    return [Mix("science", SCIENCE)]


@attrs.frozen
class Look:
    """What programs have done by some moment."""

    at: float
    """Seconds of the lab's clock."""
    passes: Sequence[int]
    """Of each."""
    carried: Carried
    """Of all."""
    turns: int
    """Turns that all had."""


@attrs.define
class Bench:
    """A mix, by one system."""

    lab: Lab
    mixes: Sequence[Mix]
    rooms: Rooms
    pressed: bool = True
    """Whether anything but room for all is measured."""
    takes_turns: bool = True
    """Whether programs have turns of memory: then windows are of whole rounds."""

    @property
    def name(self) -> str:
        """Of the system."""
        return self.rooms.name

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """See runner.Subject."""
        for mix in self.mixes:
            yield from self._mix(mix)

    def _mix(self, mix: Mix) -> Iterator[tuple[Case, Figures]]:
        cases = [{**mix.case, "percent": one.percent, "turn_s": one.turn_s} for one in mix.pressures]
        wanted = [one for one, case in zip(mix.pressures, cases, strict=True) if self.lab.wants(case)]
        if not wanted:
            return
        with self.rooms.enter() as room, self.lab.jobs(room.words(), mix.jobs) as programs:
            self.lab.sleep(BEGUN_S)
            alone = self._rates(room, programs, WINDOW_S)
            yield mix.case, {"passes_per_s": sum(alone.rates), "least_passes_per_s": min(alone.rates)}
            footprint = room.held() if self.pressed else 0
            for one in wanted if self.pressed else ():
                room.wait(one.wait_s)
                room.limit(footprint * 100 // one.percent)
                if self.takes_turns:
                    self.lab.sleep(FIRST_SETTLE_S if one is wanted[0] else SETTLE_S)
                    found = self._rounds(room, programs, one.seconds)
                else:
                    self.lab.sleep(UNTURNED_S)
                    found = self._rates(room, programs, UNTURNED_S)
                yield {**mix.case, "percent": one.percent, "turn_s": one.turn_s}, found.figures(alone, room.figures())
            if self.pressed:
                room.limit(None)
            for program in programs:
                program.finish()

    def _edge(self, program: Worked) -> None:
        """Returns as a program goes on that stood: windows are of whole rounds, of which one has two to ten. Where it
        stands not, some time later."""
        passes, since = program.passes, self.lab.now()
        until = since + ROUND_S
        while (now := self.lab.now()) < until:
            if program.passes != passes:
                if now - since >= STOOD_S:
                    return
                passes, since = program.passes, now
            self.lab.sleep(LOOK_S)

    def _rounds(self, room: Room, programs: Sequence[Worked], seconds: float) -> Rates:
        self._edge(programs[0])
        first = self._look(room, programs)
        self.lab.sleep(seconds)
        self._edge(programs[0])
        return Rates(first, self._look(room, programs))

    def _rates(self, room: Room, programs: Sequence[Worked], seconds: float) -> Rates:
        first = self._look(room, programs)
        self.lab.sleep(seconds)
        return Rates(first, self._look(room, programs))

    def _look(self, room: Room, programs: Sequence[Worked]) -> Look:
        carried = sum((one.carried() for one in programs), Carried())
        turns = room.figures().get("memory_turns", 0)
        return Look(self.lab.now(), [one.passes for one in programs], carried, turns)


@attrs.frozen
class Rates:
    """What came of a window."""

    first: Look
    """At its begin."""
    last: Look
    """At its end."""

    @property
    def seconds(self) -> float:
        """Its length, seconds."""
        return self.last.at - self.first.at

    @property
    def rates(self) -> Sequence[float]:
        """Passes a second of each program."""
        pairs = zip(self.first.passes, self.last.passes, strict=True)
        return [(last - first) / self.seconds for first, last in pairs]

    def figures(self, alone: Rates, told: Mapping[str, int]) -> dict[str, float]:
        """The figures beside those of the same programs with room for all. A program counts by the part of its own
        speed that it keeps: a pass of one takes as long as many of another."""
        kept = [one / other for one, other in zip(self.rates, alone.rates, strict=True) if other]
        moved = self.last.carried - self.first.carried
        found = {
            "passes_per_s": sum(self.rates),
            "kept": sum(kept) / len(kept),
            "least_kept": min(kept),
            "turns_per_s": (self.last.turns - self.first.turns) / self.seconds,
        }
        if moved.out_s > 0:
            found["out_gb_s"] = moved.out_bytes / moved.out_s / 1e9
        if moved.in_s > 0:
            found["in_gb_s"] = moved.in_bytes / moved.in_s / 1e9
        if moved.in_bytes:
            found["written_part"] = (moved.out_bytes - moved.clean_bytes) / moved.in_bytes
        if used := told.get("working_set"):
            found["missed_part"] = told.get("turn_missed_bytes", 0) / used
            found["over_part"] = told.get("turn_over_bytes", 0) / used
        return found


def subjects(lab: Lab, mixes: Sequence[Mix]) -> list[Bench]:
    """Those that are compared. Without turns none is longer than another."""
    once = [attrs.evolve(mix, pressures=[one for one in mix.pressures if one.turn_s < 1.0]) for mix in mixes]
    return [
        Bench(lab, mixes, WholeGpu(DRIVER), pressed=False),
        Bench(lab, mixes, Turned(TURNS, ["turns=on"])),
        Bench(lab, once, Turned(OFF, ["turns=off"], expected=BUSY), takes_turns=False),
    ]


def maker(name: str, mixes: Sequence[Mix]) -> Any:
    """What makes the scenario of some mixes."""

    def make(lab: Lab, seed: int, compared: Sequence[Subject] | None = None) -> Scenario:
        def bus() -> Mapping[str, Any]:
            """What it carries in this run, one way at a time, and both at once."""
            with lab.copied() as copy:
                out, back = copy()
            both_out, both_in = lab.both_ways()
            both = {"bus_both_out_gb_s": both_out, "bus_both_in_gb_s": both_in}
            return {"bus_out_gb_s": out, "bus_in_gb_s": back, **both}

        fixed = {"each_mib": EACH_MIB, "window_s": WINDOW_S, "settle_s": SETTLE_S, "first_settle_s": FIRST_SETTLE_S}
        return Scenario(name, DRIVER, subjects(lab, mixes) if compared is None else compared, bus, fixed)

    return make
