"""GPUs among which the policy `balance` moves programs, in simulated time.

Engines, schedulers and policy are the real ones: the runlists of the software GPU, the daemon's scheduler core, and the
policy's core with the code that turns counters into pictures. A move takes as long as on an H200, during which the
program stands still.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

import attrs

from ggroupfs.policies.balance.choice import Plan
from ggroupfs.policies.balance.core import Core, Decision, Pace
from ggroupfs.policies.balance.demand import LOOKS, Demand, Seen
from ggroupfs.policies.balance.picture import Bound, Card, Move, Picture
from ggroupfs.policies.slo.samples import Interval, Statistic
from tests.support.scheduled import Machine, Program

GIB = 1 << 30
INTERVAL_S = 0.5
FIXED_S = 0.5
BYTES_PER_S = 1.3 * GIB
"""Rate of a move: 4.7 GB in 4.1 s were measured."""


class Balanced:
    """Simulated GPUs with the policy's core; see the module."""

    def __init__(
        self,
        gpus: Sequence[Sequence[Program]],
        *,
        memory: Mapping[int, int] | None = None,
        bounds: Mapping[int, Bound] | None = None,
        refusals: Mapping[int, int] | None = None,
        capacity: int = 64 * GIB,
        pace: Pace | None = None,
        blind: bool = False,
    ) -> None:
        """`memory` (bytes), `bounds` and `refusals` (errnos) are by pid. `blind`: loads do not say if they wait."""
        self.machines = [Machine(*programs) for programs in gpus]
        self.core = Core(pace)
        self.moves: list[tuple[float, Move]] = []
        """Moves that were made, each with the time in seconds at which it ended."""
        self.refused: list[tuple[float, Move]] = []
        """Moves that were refused, each with its time in seconds."""
        self.told: list[Decision] = []
        """Decisions other than plans."""
        self._memory, self._bounds, self._refusals = memory or {}, bounds or {}, refusals or {}
        self._capacity = capacity
        self._demand = Demand(LOOKS * INTERVAL_S)
        self._intervals = {pid: Interval(Statistic("p99")) for pid in self._bounds}
        self._heard = dict.fromkeys(self._bounds, 0)
        self._blind = blind

    @property
    def now(self) -> float:
        """Simulated time in seconds."""
        return self.machines[0].runlist.now / 1e9

    def pids(self, gpu: int) -> set[int]:
        """Return the pids of the programs on a GPU."""
        return {program.pid for program in self.machines[gpu].programs}

    def run(self, until: float) -> Balanced:
        """Advance the simulation to the time `until`, in seconds."""
        while self.now < until:
            self._pass(INTERVAL_S)
            picture = self._look()
            for pid, sample in self._samples().items():
                if sample is not None:
                    self.core.sample(self.now, str(pid), sample)
            for one in self.core.decide(self.now, picture):
                if isinstance(one, Plan):
                    self._carry_out(picture, one)
                    self._samples()
                else:
                    self.told.append(one)
        return self

    def _pass(self, seconds: float) -> None:
        for machine in self.machines:
            machine.run(seconds)

    def _held(self, gpu: int) -> int:
        return sum(self._memory.get(pid, GIB) for pid in self.pids(gpu))

    def _look(self) -> Picture:
        seen = [
            Seen(
                str(one.pid),
                gpu,
                used_us=one.used // 1000,
                waits=None if self._blind else any(tsg.queue for tsg in one.tsgs),
                held=self._memory.get(one.pid, GIB),
                weight=one.weight,
                priority=one.priority,
            )
            for gpu, machine in enumerate(self.machines)
            for one in machine.programs
        ]
        cards = {gpu: Card(self._capacity, self._held(gpu)) for gpu in range(len(self.machines))}
        loads = self._demand.look(self.now, seen)
        return Picture.of(cards, [attrs.evolve(load, bound=self._bounds.get(int(load.name))) for load in loads])

    def _samples(self) -> dict[int, float | None]:
        found = {}
        for machine in self.machines:
            for one in machine.programs:
                if one.pid in self._intervals:
                    self._intervals[one.pid].add(took / 1e9 for took in one.latencies[self._heard[one.pid] :])
                    self._heard[one.pid] = len(one.latencies)
                    found[one.pid] = self._intervals[one.pid].take()
        return found

    def _carry_out(self, picture: Picture, plan: Plan) -> None:
        for move in plan.moves:
            here, there, pid = self.machines[move.load.gpu], self.machines[move.to], int(move.load.name)
            code = self._refusals.get(pid, 0)
            if self._held(move.to) + self._memory.get(pid, GIB) > self._capacity:
                code = errno.ENOSPC
            if code:
                self.refused.append((self.now, move))
                self.core.refused(self.now, picture, move, code)
                return
            (program,) = (one for one in here.programs if one.pid == pid)
            here.programs = tuple(one for one in here.programs if one is not program)
            for tsg in program.tsgs:
                here.runlist.remove(tsg)
            self._pass(FIXED_S + self._memory.get(pid, GIB) / BYTES_PER_S)
            there.programs = (*there.programs, program)
            for tsg in program.tsgs:
                there.runlist.add(tsg)
            self.core.moved(self.now, picture, move)
            self.moves.append((self.now, move))
