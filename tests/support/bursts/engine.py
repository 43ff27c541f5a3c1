"""Model of one engine with the real cost of a switch, programs that serve requests, and a filler, in virtual time
(engine.c).

It behaves as an H200 did (`tests/t7_nvidia/t7_bursts.py`): the run-ahead of a filler is run in slices of 50 us, and
each gap between two requests pays for two switches. All times are nanoseconds unless stated otherwise.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from ctypes import c_int64

import attrs

US = 1_000
SHAPE = 0.5
"""Shape of the gamma distribution of gaps between requests: the standard deviation is 1.4 times the mean."""


def arrivals(seed: str, load: float, bursts: bool, service: int, seconds: float) -> list[int]:
    """Return the arrivals of requests: a gamma process; or, with `bursts`, twice the load for half of each second."""
    source, now, found = random.Random(seed), 0.0, list[int]()
    rate = (2 * load if bursts else load) / service
    while True:
        now += source.gammavariate(SHAPE, 1 / rate / SHAPE)
        wall = now + 0.5e9 * int(now / 0.5e9) if bursts else now
        if wall > seconds * 1e9:
            return found
        found.append(round(wall))


def alone(requests: Sequence[int], took: int) -> list[int]:
    """Return the latencies of requests that are served one after the other on a GPU of their own, and take `took`
    each.
    """
    free, found = 0, list[int]()
    for arrival in requests:
        free = max(free, arrival) + took
        found.append(free - arrival)
    return found


@attrs.frozen
class Fill:
    """A filler: a program that launches kernels as fast as it may, and goes behind the programs that serve."""

    kernel: int
    """Engine time of each kernel."""
    ahead_us: int
    """Run-ahead below which it launches more, microseconds; 0 stands for 64 kernels."""
    timeslice: int
    """Longest run in a round."""
    obeys: bool = True
    """Whether it launches nothing while it is held."""


@attrs.define(eq=False)
class Model:
    """Programs that serve requests one after the other, and at most one filler."""

    rules: ctypes.CDLL
    """The compiled rules (:func:`tests.support.bursts.rules.compiled`)."""
    requests: Sequence[Sequence[int]]
    """Arrivals of requests, for each program that serves."""
    service: int
    """Engine time of each request."""
    hold: int
    """Time for which the filler is held after a request if no other comes; negative for never."""
    fill: Fill | None = None
    _latencies: list[ctypes.Array[c_int64]] = attrs.field(factory=list)
    _kept: list[ctypes.Array[c_int64]] = attrs.field(factory=list)
    _model: int = 0

    def __attrs_post_init__(self) -> None:
        self._model = self.rules.model_new()
        assert self._model
        for one in self.requests:
            self._kept.append((c_int64 * len(one))(*one))
            self._latencies.append((c_int64 * len(one))())
            words = (self._kept[-1], len(one), self.service, self.hold, self._latencies[-1])
            self.rules.model_lead(self._model, *words)
        if (fill := self.fill) is not None:
            self.rules.model_fill(self._model, fill.kernel, fill.ahead_us, fill.timeslice, fill.obeys)

    def __del__(self) -> None:
        self.rules.model_free(self._model)

    def run(self, until: int) -> None:
        """Simulate up to a time."""
        self.rules.model_run(self._model, until)

    def serve(self) -> None:
        """Simulate until all requests are served."""
        while self.rules.model_served(self._model) < sum(map(len, self.requests)):
            self.run(self.now + 10_000 * US)

    @property
    def latencies(self) -> list[list[int]]:
        """Return the latencies of the requests of each program that serves."""
        return [list(one) for one in self._latencies]

    @property
    def now(self) -> int:
        return int(self.rules.model_now(self._model))

    @property
    def idle(self) -> int:
        """Return the time in which nothing ran."""
        return int(self.rules.model_idle(self._model))

    @property
    def filled(self) -> int:
        """Return the engine time of the filler, without switches."""
        return int(self.rules.model_filled(self._model))

    @property
    def periods(self) -> int:
        """Return the number of busy periods of all programs that serve."""
        return int(self.rules.model_periods(self._model))

    @property
    def stays(self) -> int:
        """Return the number of times that the filler came onto the engine."""
        return int(self.rules.model_stays(self._model))
