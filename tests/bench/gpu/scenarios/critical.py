"""Scenario: a latency-critical program beside others that use more memory than there is, and take turns of it.

The critical program has priority (`compute.priority` 0), so it is in every set and none of its memory is moved out. It
serves bursts of requests that alone would keep it busy 35 % of the time (core.arrivals), with room for all programs and
with room for two thirds of their memory. In a system without priorities it is one program among many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario, Subject
from tests.bench.gpu.faces import Critical, Job, Lab, Room, Rooms, Served, Worked
from tests.bench.gpu.scenarios import latency
from tests.bench.gpu.scenarios.oversubscribed import BUSY, DRIVER, EACH_MIB, OFF, SETTLE_S, TURNS
from tests.bench.gpu.systems import Turned, WholeGpu

NAME = "oversubscribed-critical"
KIND, LOAD, PERCENT, WAIT_S = "convolution", 0.35, 150, 2.0
BURSTS = 2
"""Number of bursts of one case; together they last latency.SECONDS."""
OTHERS = tuple(Job("decode", EACH_MIB, graph=True) for _ in range(3))


@attrs.define
class Beside:
    """The critical program and the others in one system."""

    bench: latency.Bench
    rooms: Rooms
    pressed: bool = True
    """Whether the cases without room for all are measured."""

    @property
    def name(self) -> str:
        """The name of the system."""
        return self.rooms.name

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Yield cases and figures; see runner.Subject."""
        lab = self.bench.lab
        with (
            self.rooms.enter() as room,
            lab.critical(room.words("compute.priority=0"), KIND) as critical,
            lab.jobs(room.words(), OTHERS) as others,
        ):
            lab.sleep(SETTLE_S)
            yield {}, self._burst(lab, critical, others, repetition)
            if self.pressed:
                self._press(lab, room)
                yield {"percent": PERCENT}, self._burst(lab, critical, others, repetition)
                room.limit(None)
            for one in others:
                one.finish()

    def _press(self, lab: Lab, room: Room) -> None:
        room.wait(WAIT_S)
        room.limit(room.held() * 100 // PERCENT)
        lab.sleep(SETTLE_S)

    def _burst(self, lab: Lab, critical: Critical, others: Sequence[Worked], repetition: int) -> Figures:
        """Return the figures of some bursts together, with the passes of the other programs per second."""
        before, start = sum(one.passes for one in others), lab.now()
        served = [self.bench.burst(critical, LOAD, BURSTS * repetition + number) for number in range(BURSTS)]
        rate = (sum(one.passes for one in others) - before) / (lab.now() - start)
        latencies = [one for burst in served for one in burst.latencies]
        given_up = sum(burst.given_up for burst in served)
        return {**latency.waited(Served(latencies, given_up)), "passes_per_s": rate}


def make(lab: Lab, seed: int, compared: Sequence[Rooms] | None = None) -> Scenario:
    """Return the scenario."""
    bench = latency.Bench(lab, KIND, seed)
    found: Sequence[Rooms] = (
        [WholeGpu(DRIVER), Turned(TURNS, ["turns=on"]), Turned(OFF, ["turns=off"], expected=BUSY)]
        if compared is None
        else compared
    )
    subjects: list[Subject] = [Beside(bench, one, pressed=number > 0) for number, one in enumerate(found)]
    fixed: dict[str, Any] = {"seed": seed, "kind": KIND, "load": LOAD, "seconds": latency.SECONDS, "each_mib": EACH_MIB}
    return Scenario(NAME, DRIVER, subjects, bench.calibrate, fixed)
