"""The shape of a published cluster trace: its cited and its assumed properties, and a day of jobs of that shape.

Cited:

- **GPUs requested by a task**: table 1 of Weng et al., Beware of Fragmentation, USENIX ATC 2023 (the trace
  cluster-trace-gpu-v2023 of github.com/alibaba/clusterdata: 8152 tasks, 6212 GPUs). Of all tasks 13.3 % request no
  GPU, 37.8 % a part of one, 48.0 % one, and 0.2, 0.2 and 0.5 % request 2, 4 and 8.
- **Parts of a GPU**: `gpu_milli` of the 106 tasks with a part among openb-pod-4254 to 4479 of that trace
  (csv/openb_pod_list_default.csv). Their mean is 0.54; in table 1, 28.5 % of all requested GPUs are in such tasks,
  which gives a mean of 0.56.
- **Run time of an instance**: median 23 minutes, 90th percentile 4.5 hours, of Weng et al., MLaaS in the Wild, NSDI
  2022, section 3 (cluster-trace-gpu-v2020). These two determine a log-normal distribution, which is cut off at a day.
- **Utilization of its GPU**: `gpu_wrk_util` of the 3,033,232 instances of cluster-trace-gpu-v2020, as evaluated by
  affinode.io/case-studies/alibaba-gpu-v2020: 34.5 % never, median 1.5 %, 75.4 % below 10 %, 95 % below 50 %, mean
  10.5 %. Between these points it is linear here, up to full utilization.
- **Memory of a job with whole GPUs**: 55 % of the jobs on cards of 80 GB peak at half of it or less (Cankur et al.,
  Characterizing Production GPU Workloads, arXiv 2502.18680). Between 5, 50 and 95 % it is linear here.

Assumed, as neither source has it: a job with a part of a GPU holds the same fraction of its part as one with whole GPUs
holds of those; arrivals follow the time of day as a sine, from half to one and a half times their mean; sizes, run
times, memory and load are independent of each other. The cluster is empty at the start of the day.
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
"""Key in TASKS of a task that requests a part of a GPU."""
TASKS: dict[int, float] = {PART: 37.8, 1: 48.0, 2: 0.2, 4: 0.2, 8: 0.5}
"""Tasks by the number of requested GPUs, percent of all tasks, without those that need no GPU."""
PARTS: dict[int, int] = {81: 26, 65: 14, 59: 1, 48: 1, 47: 36, 46: 7, 32: 12, 22: 4, 16: 4, 11: 1}
"""Parts of a GPU, percent, each with the number of tasks that request it."""
DURATION_MEDIAN_S = 23 * 60
"""Median run time of an instance, seconds."""
DURATION_P90_S = 4.5 * 3600
"""90th percentile of the run time of an instance, seconds."""
BUSY: Sequence[tuple[float, float]] = ((0, 0), (0.345, 0), (0.5, 0.015), (0.754, 0.1), (0.95, 0.5), (1, 1))
"""Quantiles of the fraction of its time in which an instance uses its GPU."""
MEMORY: Sequence[tuple[float, float]] = ((0, 0.05), (0.55, 0.5), (1, 0.95))
"""Quantiles of the fraction of its GPUs' memory that a job holds."""
SWING = 0.5
"""Swing of the arrival rate about its mean, as a fraction of the mean."""
PEAK_S = 15 * 3600
"""Time of day at which most jobs arrive, seconds."""
JOBS_PER_GPU = 11.0
"""Jobs per day and GPU of the cluster; with whole GPUs more than fit at the peak."""


def day(seed: int, gpus: int, jobs: int | None = None) -> list[ClusterJob]:
    """Return a day of jobs for a cluster of `gpus` GPUs, by arrival; the same seed gives the same jobs."""
    chance = random.Random(seed)
    count = round(gpus * JOBS_PER_GPU) if jobs is None else jobs
    arrivals = sorted(_arrival(chance) for _ in range(count))
    return [_job(number, arrival, chance) for number, arrival in enumerate(arrivals)]


def quantile(points: Sequence[tuple[float, float]], part: float) -> float:
    """Return the quantile for a fraction, interpolated linearly between the points."""
    after = bisect.bisect_right(points, part, key=lambda point: point[0])
    if after == len(points):
        return points[-1][1]
    (left, low), (right, high) = points[after - 1], points[after]
    return low + (high - low) * (part - left) / (right - left)


def duration(part: float) -> float:
    """Return the quantile of run times for a fraction, in seconds: at least a second and at most a day."""
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
    """Return a random time of day in seconds, by rejection sampling."""
    while True:
        time = chance.random() * DAY_S
        rate = 1 + SWING * math.cos((time - PEAK_S) / DAY_S * math.tau)
        if chance.random() * (1 + SWING) < rate:
            return time
