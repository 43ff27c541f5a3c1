"""Traces of jobs: text with one JSON object per line; docs/policies/replay.md describes the keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import attrs

from ggroupfs.errors import UsageError
from ggroupfs.policies.face import Job

US = 1000
MOST = 1 << 62
"""Bound of numbers in a trace, which have to be smaller."""


@attrs.frozen
class TraceJob:
    """One job of a trace. Each of its iterations computes on the GPU and then leaves it idle (input, host code)."""

    job: str
    """Name, unique in the trace."""
    arrival_us: int
    """Arrival time from the start of the trace."""
    persistent: int
    """Memory from its first iteration to its end, bytes."""
    ephemeral: int
    """Memory during an iteration, bytes."""
    iterations: int
    """Number of iterations."""
    gpu_us: int
    """GPU time of an iteration."""
    idle_us: int = 0
    """Time of an iteration without the GPU, after the GPU time; its ephemeral memory is still held."""

    @property
    def duration_us(self) -> int:
        """Run time with the GPU to itself."""
        return self.iterations * (self.gpu_us + self.idle_us)

    def described(self) -> Job:
        """Return the job as a policy is told of it."""
        return Job(self.job, self.persistent, self.ephemeral, self.duration_us * US)


LEAST = {field.name: 1 if field.name in ("iterations", "gpu_us") else 0 for field in attrs.fields(TraceJob)}
"""Smallest allowed value of each numeric key."""
OPTIONAL = {"idle_us"}


def parse(lines: Iterable[str]) -> list[TraceJob]:
    """Parse the jobs of a trace, by arrival. Empty lines and lines that begin with # are ignored. UsageError."""
    jobs: dict[str, TraceJob] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            job = _job(json.loads(line))
            if job.job in jobs:
                raise ValueError(f"there is a job {job.job!r} already")
        except (ValueError, RecursionError) as error:
            raise UsageError(f"line {number} of the trace: {error}") from None
        jobs[job.job] = job
    if not jobs:
        raise UsageError("the trace has no jobs")
    return sorted(jobs.values(), key=lambda job: job.arrival_us)


def dump(jobs: Sequence[TraceJob], comment: str = "") -> str:
    """Format a trace as text."""
    head = [f"# {line}" for line in comment.splitlines()]
    return "\n".join([*head, *(json.dumps(attrs.asdict(job)) for job in jobs)]) + "\n"


def _job(entry: object) -> TraceJob:
    if not isinstance(entry, dict):
        raise ValueError("it is no object")
    for key in entry:
        if key not in LEAST:
            raise ValueError(f"unknown key {key!r}")
    for key in LEAST:
        if key not in entry and key not in OPTIONAL:
            raise ValueError(f"there is no {key!r}")
    if not isinstance(entry["job"], str) or not entry["job"]:
        raise ValueError("'job' is no name")
    for key, value in entry.items():
        if key != "job" and (type(value) is not int or not LEAST[key] <= value < MOST):
            raise ValueError(f"{key!r} is no integer of {LEAST[key]} or more")
    return TraceJob(**entry)
