"""Traces of jobs: text, one JSON object a line. docs/policies/replay.md says what the keys mean."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import attrs

from ggroupfs.errors import UsageError
from ggroupfs.policies.face import Job

US = 1000
MOST = 1 << 62
"""The greatest number that a trace may have."""


@attrs.frozen
class TraceJob:
    """One job of a trace. Each of its iterations computes on the GPU, then is idle there (input, host code)."""

    job: str
    """Its name, unlike any other's in the trace."""
    arrival_us: int
    """When it comes, from the begin of the trace."""
    persistent: int
    """Memory that it keeps from its first iteration to its end, bytes."""
    ephemeral: int
    """Memory that it has during an iteration, bytes."""
    iterations: int
    """How many."""
    gpu_us: int
    """What an iteration computes, in GPU time."""
    idle_us: int = 0
    """What an iteration spends without the GPU, afterwards, its ephemeral memory still held."""

    @property
    def duration_us(self) -> int:
        """How long it takes with the GPU to itself."""
        return self.iterations * (self.gpu_us + self.idle_us)

    def described(self) -> Job:
        """As a policy is told of it."""
        return Job(self.job, self.persistent, self.ephemeral, self.duration_us * US)


LEAST = {field.name: 1 if field.name in ("iterations", "gpu_us") else 0 for field in attrs.fields(TraceJob)}
"""Of each key that is a number, the least that it may be."""
OPTIONAL = {"idle_us"}


def parse(lines: Iterable[str]) -> list[TraceJob]:
    """The jobs of a trace, by arrival. Empty lines, and those that begin with #, say nothing. UsageError."""
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
    """A trace as text."""
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
