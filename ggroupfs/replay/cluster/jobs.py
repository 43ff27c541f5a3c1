"""Jobs of a cluster's trace, as text and as objects: one JSON object per line, as in the traces of one GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

WHOLE = 100
"""A whole GPU; shares and memory are percentages of one."""


@attrs.frozen
class ClusterJob:
    """The request of one job, and its behaviour."""

    job: str
    """Unique name."""
    arrival_s: float
    """Seconds from the start of the trace."""
    duration_s: float
    """Run time with its GPUs to itself, seconds."""
    gpus: int
    """GPUs of one node that it needs at the same time. A job with several has them whole."""
    share: int
    """Requested share of a GPU, percent."""
    memory: int
    """GPU memory that it holds, percent of a GPU."""
    busy: float
    """Fraction of its run time alone during which it uses its GPU."""


NUMBERS: Mapping[str, tuple[float, float]] = {
    "arrival_s": (0, math.inf),
    "duration_s": (1e-3, math.inf),
    "gpus": (1, 64),
    "share": (1, WHOLE),
    "memory": (1, WHOLE),
    "busy": (0, 1),
}
"""Smallest and largest value of each numeric key."""
WHOLE_NUMBERS = frozenset({"gpus", "share", "memory"})
"""Numeric keys without a fraction."""


def parse(lines: Iterable[str]) -> list[ClusterJob]:
    """Parse the jobs of a trace, by arrival. ValueError, with the number of the line, for an invalid one."""
    found: dict[str, ClusterJob] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            job = _job(json.loads(text))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if job.job in found:
            raise ValueError(f"line {number}: another job is called {job.job!r}")
        found[job.job] = job
    return sorted(found.values(), key=lambda job: job.arrival_s)


def dump(jobs: Iterable[ClusterJob], comment: str) -> Iterator[str]:
    """Yield the lines of a trace."""
    yield f"# {comment}\n"
    for job in jobs:
        yield json.dumps(attrs.asdict(job)) + "\n"


def _job(entry: object) -> ClusterJob:
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    keys = {"job", *NUMBERS}
    if entry.keys() != keys:
        raise ValueError(f"its keys are not {', '.join(sorted(keys))}")
    if not isinstance(entry["job"], str) or not entry["job"]:
        raise ValueError("'job' is no name")
    for key, (least, most) in NUMBERS.items():
        _hold(key, entry, least, most)
    if entry["gpus"] > 1 and entry["share"] != WHOLE:
        raise ValueError("a job of several GPUs has them whole: its 'share' is 100")
    return ClusterJob(**entry)


def _hold(key: str, entry: Mapping[str, Any], least: float, most: float) -> None:
    value = entry[key]
    kinds = (int,) if key in WHOLE_NUMBERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most or math.isinf(value):
        kind = "integer" if key in WHOLE_NUMBERS else "number"
        raise ValueError(f"{key!r} is no {kind} from {least:g} to {most:g}")
