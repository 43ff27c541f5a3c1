"""What came of a replay, and the figures that the paper gives of one (Salus, table 2)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ggroupfs.replay.trace import TraceJob

S = 1_000_000_000


@attrs.frozen
class Span:
    """A time in which a job did something without a break."""

    job: str
    start: int
    """Nanoseconds from the begin of the trace."""
    end: int
    """Nanoseconds."""
    lane: int = 0
    """The lane it ran in; 0 where the policy has none."""


@attrs.frozen
class Outcome:
    """What became of one job."""

    trace: TraceJob
    """What it was."""
    started: int | None
    """Begin of its first iteration, nanoseconds from the begin of the trace; None if it was refused."""
    finished: int | None
    """Its end; None if it was refused."""
    service: int
    """GPU time it used, nanoseconds."""
    withdrawals: int
    """How often its persistent memory went to the host."""

    @property
    def arrived(self) -> int:
        """Nanoseconds."""
        return self.trace.arrival_us * 1000

    @property
    def completion(self) -> int:
        """JCT, nanoseconds: from its arrival to its end. ValueError for one that was refused."""
        if self.finished is None:
            raise ValueError(f"{self.trace.job} was refused")
        return self.finished - self.arrived

    @property
    def queuing(self) -> int:
        """From its arrival to its first iteration, nanoseconds. ValueError for one that was refused."""
        if self.started is None:
            raise ValueError(f"{self.trace.job} was refused")
        return self.started - self.arrived


@attrs.frozen
class Summary:
    """The columns of table 2, in seconds, and what the GPU did."""

    jobs: int
    """That ran to their end."""
    refused: int
    """That never fit."""
    makespan_s: float
    """From the first arrival to the last end."""
    queuing_mean_s: float
    """From arrival to the first iteration."""
    completion_mean_s: float
    """From arrival to end: JCT."""
    completion_p95_s: float
    """Of the JCT, the nearest-rank percentile."""
    gpu_busy: float
    """Part of the makespan in which kernels ran."""
    switches: int
    """How often a lane went from one job to another."""
    withdrawals: int
    """How often persistent memory went to the host."""
    memory_peak: int
    """The most memory in use at any time, bytes."""


@attrs.frozen
class Result:
    """All of a replay."""

    capacity: int
    """Bytes of GPU memory."""
    outcomes: Sequence[Outcome]
    """By arrival."""
    ran: Sequence[Span]
    """Which job ran, by end: iterations that followed each other are one span."""
    resident: Sequence[Span]
    """When each one's persistent memory was on the GPU."""
    switches: int
    """See :class:`Summary`."""
    memory_peak: int
    """See :class:`Summary`."""

    def summary(self) -> Summary:
        """The figures. RuntimeError where no job ran."""
        done = [outcome for outcome in self.outcomes if outcome.finished is not None]
        if not done:
            raise RuntimeError("no job of the trace fits on the GPU")
        completions = sorted(outcome.completion for outcome in done)
        makespan = max(o.arrived + o.completion for o in done) - min(o.arrived for o in self.outcomes)
        return Summary(
            jobs=len(done),
            refused=len(self.outcomes) - len(done),
            makespan_s=makespan / S,
            queuing_mean_s=sum(o.queuing for o in done) / len(done) / S,
            completion_mean_s=sum(completions) / len(done) / S,
            completion_p95_s=completions[-(-len(done) * 95 // 100) - 1] / S,
            gpu_busy=sum(o.service for o in done) / makespan,
            switches=self.switches,
            withdrawals=sum(o.withdrawals for o in done),
            memory_peak=self.memory_peak,
        )
