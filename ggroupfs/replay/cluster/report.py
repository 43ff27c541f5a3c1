"""The report: the GPUs that each policy needs, and the cost to jobs, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from ggroupfs.replay.cluster.fleet import Fleet
from ggroupfs.replay.cluster.fractions import Fractions
from ggroupfs.replay.cluster.jobs import ClusterJob
from ggroupfs.replay.cluster.mig import Mig
from ggroupfs.replay.cluster.placement import Placement
from ggroupfs.replay.cluster.published import DAY_S
from ggroupfs.replay.cluster.shares import Memory, Shares
from ggroupfs.replay.cluster.simulation import Run, Simulation
from ggroupfs.replay.cluster.whole import Whole

POLICIES: Mapping[str, Callable[[], Placement]] = {
    "whole": Whole,
    "mig": Mig,
    "fractions": Fractions,
    "shares": Shares,
    "memory": Memory,
}
"""Policies by name, in the order of the table."""
MINUTE_S = 60
SLOWED = 1.1
"""Factor on the run time alone above which a job counts as slowed down."""
WAITED_S = 60.0
"""Wait above which a job counts as having waited, seconds."""


@attrs.frozen
class Row:
    """The results of one policy; times in minutes."""

    policy: str
    needed: int
    """GPUs with which no job waits: the largest number in use on a fleet that grows."""
    in_use: float
    """GPUs with a job on the given fleet, mean over the day."""
    asked: float
    """Shares requested by its jobs, as a fraction of those."""
    busy: float
    """Time at work of GPUs with a job, as a fraction of those."""
    waited: float
    """Fraction of the jobs that waited for more than a minute."""
    wait_mean_min: float
    wait_p99_min: float
    slowed: float
    """Fraction of the jobs that took more than a tenth longer than alone."""
    slowdown_mean: float
    """Time from start to end relative to the run time alone: mean."""
    slowdown_p99: float
    completion_mean_min: float
    """Time from arrival to end."""


def row(trace: Sequence[ClusterJob], policy: str, nodes: int, per_node: int) -> Row:
    """Return the results of one policy: from one run on a fleet that grows, and one on `nodes` nodes."""
    placement = POLICIES[policy]()
    _, unbounded = Simulation(trace, placement, Fleet(placement, 0, per_node, grows=True), DAY_S).run()
    runs, use = Simulation(trace, placement, Fleet(placement, nodes, per_node), DAY_S).run()
    waits = sorted(run.started_s - run.job.arrival_s for run in runs)
    slowdowns = sorted((_ended(run) - run.started_s) / run.job.duration_s for run in runs)
    return Row(
        policy=policy,
        needed=unbounded.peak,
        in_use=use.mean,
        asked=use.asked / use.mean,
        busy=use.busy / use.mean,
        waited=sum(wait > WAITED_S for wait in waits) / len(runs),
        wait_mean_min=sum(waits) / len(runs) / MINUTE_S,
        wait_p99_min=percentile(waits, 99) / MINUTE_S,
        slowed=sum(slowdown > SLOWED for slowdown in slowdowns) / len(runs),
        slowdown_mean=sum(slowdowns) / len(runs),
        slowdown_p99=percentile(slowdowns, 99),
        completion_mean_min=sum(_ended(run) - run.job.arrival_s for run in runs) / len(runs) / MINUTE_S,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile of sorted values."""
    return values[-(-len(values) * percent // 100) - 1]


COLUMNS: Sequence[tuple[str, Callable[[Row], str]]] = (
    ("policy", lambda row: row.policy),
    ("GPUs needed", lambda row: f"{row.needed:,}"),
    ("in use, mean", lambda row: f"{row.in_use:,.0f}"),
    ("asked of them", lambda row: f"{100 * row.asked:.0f} %"),
    ("at work", lambda row: f"{100 * row.busy:.1f} %"),
    ("jobs that waited", lambda row: f"{100 * row.waited:.1f} %"),
    ("wait: mean, p99, min", lambda row: f"{row.wait_mean_min:.1f}, {row.wait_p99_min:.0f}"),
    ("jobs slowed", lambda row: f"{100 * row.slowed:.2f} %"),
    ("slowdown: mean, p99", lambda row: f"{row.slowdown_mean:.3f}, {row.slowdown_p99:.2f}"),
    ("completion, min", lambda row: f"{row.completion_mean_min:.1f}"),
)
"""Columns of the table."""


def as_text(rows: Sequence[Row]) -> str:
    """Return the table, in Markdown."""
    lines = ["| " + " | ".join(head for head, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(show(row) for _, show in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def _ended(run: Run) -> float:
    if run.ended_s is None:
        raise RuntimeError(f"{run.job.job} did not end")
    return run.ended_s
