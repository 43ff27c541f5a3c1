"""Runs the jobs of a trace on one GPU in virtual time. Pure, in integer nanoseconds: equal traces give equal results.

The engine is the software GPU's runlist: one kernel at a time, timeslices, and the cost of switches. An iteration is
one stretch of GPU work followed by an idle part, during which it keeps its lane and its ephemeral memory (iterations
are serialized within a lane, Salus section 3.3). So jobs in different lanes gain in only one way: one computes while
the other is idle. No job computes faster for being packed.
"""

from __future__ import annotations

import errno
import heapq
from collections.abc import Callable, Sequence

import attrs

from backend.common.errors import fail
from backend.soft.runlist import US, Runlist, Tsg
from ggroupfs.policies.face import Admit, Decision, Figures, Move, Policy, Progress, Refuse, carry_out
from ggroupfs.replay.records import Outcome, Result, Span
from ggroupfs.replay.trace import TraceJob


@attrs.frozen
class Machine:
    """The simulated GPU.

    The defaults are those of an H200 where they were measured, except for the memory, a P100's.
    """

    capacity: int = 16 << 30
    """GPU memory, bytes; that of the GPUs in the paper."""
    timeslice_us: int = 20_000
    """Turn of a job next to others: the scheduler's round of jobs that are always busy, for three of them."""
    switch_us: int = 197
    """Engine time lost when another job's kernels take over."""
    lever_us: int = 2_000
    """Duration of a freeze, and of a thaw. The lane waits for both when another job has its turn."""
    pcie: int = 33_000_000_000
    """Transfer rate between GPU and host, bytes per second."""


@attrs.define(eq=False)
class Running:
    """A job that has arrived."""

    trace: TraceJob
    tsg: Tsg
    number: int
    """Number of jobs that arrived earlier."""
    done: int = 0
    """Iterations that ended."""
    ran: int = 0
    """Time during which iterations were under way, nanoseconds."""
    began: int | None = None
    """Start of the iteration under way; None if there is none."""
    due: int | None = None
    """Start of the next iteration, which the job was permitted to begin; None if there is none."""
    frozen: bool = True
    listed: bool = False
    """Whether its TSG is on the runlist. Those frozen between two iterations are left off, as they would be skipped."""
    resident_since: int | None = None
    """Time since which its persistent memory has been on the GPU; None while it is not."""
    swapped: bool = False
    """Whether its persistent memory is in the host."""
    span: int = -1
    """Start of the present uninterrupted run; -1 before the first one."""
    span_end: int = -1
    started: int | None = None
    withdrawals: int = 0
    lane: int = 0


ARRIVE, BEGIN, END = range(3)


class Simulator:
    """The simulation of one trace. It is the :class:`ggroupfs.policies.face.Platform` of its policy."""

    def __init__(
        self,
        trace: Sequence[TraceJob],
        policy: Policy,
        machine: Machine | None = None,
        watch: Callable[[int, str, Progress], None] | None = None,
    ) -> None:
        """`watch` is called with the time, the job and its progress after each iteration, including the last."""
        self.machine = machine or Machine()
        self._policy = policy
        self._watch = watch
        self._runlist = Runlist(self.machine.switch_us * US)
        self._jobs: dict[str, Running] = {}
        self._by_tsg: dict[Tsg, Running] = {}
        self._events: list[tuple[int, int, int, str]] = []  # (time, kind, number, job): no two are equal
        self._traces = {job.job: (number, job) for number, job in enumerate(trace)}
        for number, job in enumerate(trace):
            heapq.heappush(self._events, (job.arrival_us * US, ARRIVE, number, job.job))
        self._levers = 0  # duration of the levers pulled in answer to the present event
        self._used = 0
        self._peak = 0
        self._switches = 0
        self._outcomes: dict[str, Outcome] = {}
        self._ran: list[Span] = []
        self._resident: list[Span] = []

    def run(self) -> Result:
        """Run to the end of the last job. RuntimeError for a policy that overcommits memory or forgets a job."""
        runlist, events = self._runlist, self._events
        while len(self._outcomes) < len(self._traces):
            horizon = events[0][0] if events else 1 << 62
            tsg = runlist.advance_to_finish(horizon)
            if tsg is not None:
                running = self._by_tsg[tsg]
                if tsg.queue:
                    raise AssertionError("one iteration is one kernel")
                end = runlist.now + running.trace.idle_us * US
                heapq.heappush(events, (end, END, running.number, running.trace.job))
            elif events:
                _, kind, _, name = heapq.heappop(events)
                self._levers = 0
                (self._arrive, self._begin, self._end)[kind](name)
            else:
                raise RuntimeError(f"the policy lets no job run, and {self._left()} waits")
        outcomes = [self._outcomes[name] for name in self._traces]
        return Result(self.machine.capacity, outcomes, self._ran, self._resident, self._switches, self._peak)

    # Events

    def _arrive(self, name: str) -> None:
        number, trace = self._traces[name]
        tsg = Tsg(self.machine.timeslice_us * US)
        self._jobs[name] = self._by_tsg[tsg] = Running(trace, tsg, number)
        self._obey(self._policy.job_arrive(trace.described()))

    def _begin(self, name: str) -> None:
        """Begin an iteration, unless its job was stopped or rescheduled after this was planned."""
        running, now = self._jobs.get(name), self._runlist.now
        if running is None or running.due != now:
            return
        running.due = None
        running.began = now
        if running.resident_since is None:
            running.resident_since, running.swapped = now, False
            self._use(running.trace.persistent)
        self._use(running.trace.ephemeral)
        if running.started is None:
            running.started = now
        if running.span_end != now:
            self._close_span(running)
            running.span = now
        running.tsg.launch(1, running.trace.gpu_us * US)

    def _end(self, name: str) -> None:
        running, now = self._jobs[name], self._runlist.now
        assert running.began is not None
        running.ran += now - running.began
        running.began, running.span_end = None, now
        running.done += 1
        self._use(-running.trace.ephemeral)
        progress = Progress(running.ran, running.tsg.busy)
        if self._watch is not None:
            self._watch(now, name, progress)
        if running.done == running.trace.iterations:
            self._depart(running, now)
            self._obey(self._policy.job_finish(name))
            return
        self._obey(self._policy.iteration_end(name, progress))
        if not running.frozen and running.due is None:
            self._plan(running, now)

    # Levers of Platform

    @property
    def capacity(self) -> int:
        return self.machine.capacity

    def figures(self, job: str) -> Figures:
        running = self._job(job)
        ephemeral = 0 if running.began is None else running.trace.ephemeral
        return Figures(
            resident=ephemeral + (0 if running.resident_since is None else running.trace.persistent),
            swapped=running.trace.persistent if running.swapped else 0,
            service=running.tsg.busy,
            frozen=running.frozen,
        )

    def thaw(self, job: str) -> None:
        running = self._job(job)
        if not running.frozen:
            return
        running.frozen, running.tsg.attached = False, True
        self._list(running, True)
        self._levers += self.machine.lever_us * US
        if running.began is None:
            back = self._transfer(running.trace.persistent) if running.swapped else 0
            self._plan(running, self._runlist.now + self._levers + back)

    def freeze(self, job: str) -> None:
        running = self._job(job)
        if running.frozen:
            return
        running.frozen, running.tsg.attached, running.due = True, False, None
        if running.began is None:
            self._list(running, False)
            self._close_span(running)
        self._levers += self.machine.lever_us * US
        self._switches += 1

    def reclaim(self, job: str, nbytes: int) -> None:
        """Evict persistent memory as a whole; any other memory belongs to an iteration, which needs it."""
        running = self._job(job)
        if not running.frozen:
            raise fail(errno.EBUSY)
        if nbytes and running.resident_since is not None:
            self._evict(running, self._runlist.now)
            running.swapped = True
            running.withdrawals += 1
            self._levers += self._transfer(running.trace.persistent)

    # Helpers

    def _obey(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Admit | Move):
                self._jobs[decision.job].lane = decision.lane
            elif isinstance(decision, Refuse):
                self._depart(self._jobs[decision.job], None)
        carry_out(decisions, self)

    def _list(self, running: Running, listed: bool) -> None:
        if listed != running.listed:
            (self._runlist.add if listed else self._runlist.remove)(running.tsg)
            running.listed = listed

    def _plan(self, running: Running, time: int) -> None:
        running.due = time
        heapq.heappush(self._events, (time, BEGIN, running.number, running.trace.job))

    def _depart(self, running: Running, finished: int | None) -> None:
        """Remove a job that ended or was refused."""
        name = running.trace.job
        self._close_span(running)
        if finished is not None:
            self._evict(running, finished)
        self._list(running, False)
        del self._jobs[name], self._by_tsg[running.tsg]
        self._outcomes[name] = Outcome(running.trace, running.started, finished, running.tsg.busy, running.withdrawals)

    def _evict(self, running: Running, now: int) -> None:
        assert running.resident_since is not None
        self._resident.append(Span(running.trace.job, running.resident_since, now))
        running.resident_since = None
        self._use(-running.trace.persistent)

    def _close_span(self, running: Running) -> None:
        if running.span_end > running.span >= 0:
            self._ran.append(Span(running.trace.job, running.span, running.span_end, running.lane))
        running.span = running.span_end = -1

    def _use(self, nbytes: int) -> None:
        self._used += nbytes
        self._peak = max(self._peak, self._used)
        if self._used > self.machine.capacity:
            raise RuntimeError(f"the policy has {self._used} bytes in use, of {self.machine.capacity}")

    def _transfer(self, nbytes: int) -> int:
        return nbytes * 1_000_000_000 // self.machine.pcie

    def _job(self, name: str) -> Running:
        if name not in self._jobs:
            raise fail(errno.ENOENT)
        return self._jobs[name]

    def _left(self) -> str:
        return next(name for name in self._traces if name not in self._outcomes)
