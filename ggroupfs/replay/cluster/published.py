"""The shape of a published cluster trace: what of it is cited, what is assumed, and a day of jobs of that shape.

Cited:

- **How many GPUs a task asks for**: table 1 of Weng et al., Beware of Fragmentation, USENIX ATC 2023 (the trace
  cluster-trace-gpu-v2023 of github.com/alibaba/clusterdata: 8152 tasks, 6212 GPUs). Of all tasks 13.3 % ask for no
  GPU, 37.8 % for a part of one, 48.0 % for one, 0.2, 0.2 and 0.5 % for 2, 4 and 8.
- **Which parts of a GPU**: `gpu_milli` of the 106 tasks with a part among openb-pod-4254 to 4479 of that trace
  (csv/openb_pod_list_default.csv). Their mean is 0.54; table 1 has 28.5 % of all requested GPUs in such tasks, which
  makes a mean of 0.56.
- **How long an instance runs**: median 23 minutes, 90th percentile 4.5 hours, of Weng et al., MLaaS in the Wild, NSDI
  2022, section 3 (cluster-trace-gpu-v2020). A log-normal distribution has these two. It ends at a day here.
- **How busy it keeps its GPU**: `gpu_wrk_util` of the 3,033,232 instances of cluster-trace-gpu-v2020, as evaluated by
  affinode.io/case-studies/alibaba-gpu-v2020: 34.5 % never, median 1.5 %, 75.4 % below 10 %, 95 % below 50 %, mean
  10.5 %. Between these it is linear here, and all of it at most.
- **Memory of a job with whole GPUs**: 55 % of the jobs on cards of 80 GB peak at half of it or less (Cankur et al.,
  Characterizing Production GPU Workloads, arXiv 2502.18680). Between 5, 50 and 95 % it is linear here.

Assumed, as neither publishes it: a job with a part of a GPU holds as much of that part as one with whole GPUs holds of
those; arrivals follow the hour as a sine, from half to one and a half times their mean; sizes, durations, memory and
load have nothing to do with each other. The cluster is empty as the day begins.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from ggroupfs.replay.cluster.jobs import WHOLE, ClusterJob

DAY_S = 86_400
"""Length of the trace, and of the longest job, seconds."""
PART = 0
"""Number of GPUs, in TASKS, of a task that asks for a part of one."""
TASKS: dict[int, float] = {PART: 37.8, 1: 48.0, 2: 0.2, 4: 0.2, 8: 0.5}
"""Tasks that use a GPU by the number of GPUs that they ask for, percent of all tasks."""
PARTS: dict[int, int] = {81: 26, 65: 14, 59: 1, 48: 1, 47: 36, 46: 7, 32: 12, 22: 4, 16: 4, 11: 1}
"""Parts of a GPU, percent, each with the number of tasks that ask for it."""
DURATION_MEDIAN_S = 23 * 60
"""Median of the duration of an instance, seconds."""
DURATION_P90_S = 4.5 * 3600
"""Its 90th percentile, seconds."""
BUSY: Sequence[tuple[float, float]] = ((0, 0), (0.345, 0), (0.5, 0.015), (0.754, 0.1), (0.95, 0.5), (1, 1))
"""Quantiles of the part of its time in which an instance has its GPU at work."""
MEMORY: Sequence[tuple[float, float]] = ((0, 0.05), (0.55, 0.5), (1, 0.95))
"""Quantiles of the part of its GPUs' memory that a job holds."""
SWING = 0.5
"""Swing of the rate of arrivals about its mean, part of that."""
PEAK_S = 15 * 3600
"""Time of the day at which most jobs arrive, seconds."""
JOBS_PER_GPU = 11.0
"""Jobs in a day for each GPU of the cluster: with whole GPUs more than there is room for at the peak."""


def day(seed: int, gpus: int, jobs: int | None = None) -> list[ClusterJob]:
    """Return a day of jobs for a cluster of so many GPUs, by arrival; the same seed gives the same jobs."""
    chance = random.Random(seed)
    count = round(gpus * JOBS_PER_GPU) if jobs is None else jobs
    arrivals = sorted(_arrival(chance) for _ in range(count))
    return [_job(number, arrival, chance) for number, arrival in enumerate(arrivals)]


def quantile(points: Sequence[tuple[float, float]], part: float) -> float:
    """Return the value below which that part lies, by lines between the points."""
    after = bisect.bisect_right(points, part, key=lambda point: point[0])
    if after == len(points):
        return points[-1][1]
    (left, low), (right, high) = points[after - 1], points[after]
    return low + (high - low) * (part - left) / (right - left)


def duration(part: float) -> float:
    """Return the duration below which that part of the jobs lies, seconds; at most a day, and a second at least."""
    spread = math.log(DURATION_P90_S / DURATION_MEDIAN_S) / NormalDist().inv_cdf(0.9)
    if not 0 < part < 1:
        return DAY_S if part else 1
    return min(DAY_S, max(1.0, DURATION_MEDIAN_S * math.exp(spread * NormalDist().inv_cdf(part))))


def _job(number: int, arrival: float, chance: random.Random) -> ClusterJob:
    asked = chance.choices(list(TASKS), list(TASKS.values()))[0]
    share = chance.choices(list(PARTS), list(PARTS.values()))[0] if asked == PART else WHOLE
    held = quantile(MEMORY, chance.random()) * share
    return ClusterJob(
        job=f"j{number}",
        arrival_s=round(arrival, 3),
        duration_s=round(duration(chance.random()), 3),
        gpus=max(1, asked),
        share=share,
        memory=max(1, math.ceil(held)),
        busy=round(quantile(BUSY, chance.random()), 4),
    )


def _arrival(chance: random.Random) -> float:
    """Return a time of the day, by rejection: seconds."""
    while True:
        time = chance.random() * DAY_S
        rate = 1 + SWING * math.cos((time - PEAK_S) / DAY_S * math.tau)
        if chance.random() * (1 + SWING) < rate:
            return time
