"""Results of a replay, and the figures that the paper gives of one (Salus, table 2)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ggroupfs.replay.trace import TraceJob

S = 1_000_000_000


@attrs.frozen
class Span:
    """A time during which a job did something without a break."""

    job: str
    start: int
    """Nanoseconds from the beginning of the trace."""
    end: int
    """Nanoseconds from the beginning of the trace."""
    lane: int = 0
    """Lane in which the job ran; 0 if the policy has none."""


@attrs.frozen
class Change:
    """A change of the memory that a job has on the GPU."""

    time: int
    """Nanoseconds from the beginning of the trace."""
    job: str
    nbytes: int
    """Bytes gained; negative for bytes that left."""


@attrs.frozen
class Outcome:
    """Result of one job."""

    trace: TraceJob
    """The job in the trace."""
    started: int | None
    """Beginning of its first iteration, nanoseconds from the beginning of the trace; None if it was refused."""
    finished: int | None
    """Its end, nanoseconds from the beginning of the trace; None if it was refused."""
    service: int
    """GPU time used, nanoseconds."""
    withdrawals: int
    """Number of times that its persistent memory was moved to the host."""

    @property
    def arrived(self) -> int:
        """Its arrival, nanoseconds from the beginning of the trace."""
        return self.trace.arrival_us * 1000

    @property
    def completion(self) -> int:
        """JCT, nanoseconds: from arrival to end. ValueError if it was refused."""
        if self.finished is None:
            raise ValueError(f"{self.trace.job} was refused")
        return self.finished - self.arrived

    @property
    def queuing(self) -> int:
        """Time from arrival to the first iteration, nanoseconds. ValueError if it was refused."""
        if self.started is None:
            raise ValueError(f"{self.trace.job} was refused")
        return self.started - self.arrived


@attrs.frozen
class Summary:
    """The columns of table 2, in seconds, and the use of the GPU."""

    jobs: int
    """Number of jobs that ran to their end."""
    refused: int
    """Number of jobs that do not fit on the GPU."""
    makespan_s: float
    """Time from the first arrival to the last end."""
    queuing_mean_s: float
    """Mean time from arrival to the first iteration."""
    completion_mean_s: float
    """Mean time from arrival to end (JCT)."""
    completion_p95_s: float
    """Nearest-rank 95th percentile of the JCT."""
    gpu_busy: float
    """Fraction of the makespan in which kernels ran."""
    switches: int
    """Number of times that a lane went from one job to another."""
    withdrawals: int
    """Number of times that persistent memory was moved to the host."""
    memory_peak: int
    """Greatest use of GPU memory at any time, bytes."""


@attrs.frozen
class Result:
    """The complete result of a replay."""

    capacity: int
    """GPU memory, bytes."""
    outcomes: Sequence[Outcome]
    """Results of all jobs, by arrival."""
    ran: Sequence[Span]
    """Times in which jobs ran, by end; consecutive iterations are one span."""
    resident: Sequence[Span]
    """Times in which the persistent memory of a job was on the GPU."""
    switches: int
    """See :class:`Summary`."""
    memory_peak: int
    """See :class:`Summary`."""
    changes: Sequence[Change] = ()
    """Changes of the memory of jobs on the GPU, by time, if a policy moves parts of it."""

    def summary(self) -> Summary:
        """Return the figures. RuntimeError if no job ran."""
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
