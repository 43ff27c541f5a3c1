"""The jobs of the paper: its workloads (Salus, table 3), a trace of 100 of them (5.1), and 300 equal ones (5.2).

Some of the numbers were published, others were not:

- Peak memory and iteration time of the 11 convolutional networks are the authors' own measurements, by batch size
  (tests/workloads.csv of github.com/SymbioticLab/Salus). The time is the difference of the runs of 10 and 1 minutes,
  so that it does not include the startup.
- The idle part of an iteration was not published. It is taken as the part that does not grow with the batch: the
  intercept of a line through the three batch sizes. That makes resnet50_50 idle for 11 %, so packing could speed it up
  1.12 times at most; the paper measured 1.07.
- Persistent memory is known at both ends, 110.9 MB for googlenet_25 and 822.2 MB for resnet152_75 (section 2.2), and
  interpolated between them by the number of parameters; none is larger, as the paper says. For networks with few and
  large layers that would be more than their total use. So it is limited to a third of the peak with the smallest
  batch, since the paper finds it significantly smaller than ephemeral memory (observation 2).
- Little is known of vae, superres, speech and seq2seq, and the rest is assumed: see OTHERS.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist, linear_regression

import attrs

from ggroupfs.replay.trace import TraceJob

MB = 1 << 20
MINUTE_US = 60_000_000

MEASURED: dict[str, tuple[float, tuple[tuple[int, float, float], ...]]] = {
    "alexnet": (61.1, ((25, 630.8, 54.7), (50, 1062.6, 56.9), (100, 1240.0, 60.7))),
    "googlenet": (7.0, ((25, 742.6, 58.5), (50, 1399.4, 100.2), (100, 2530.6, 179.9))),
    "inception3": (23.8, ((25, 2478.7, 198.2), (50, 4794.5, 360.6), (100, 9390.0, 683.4))),
    "inception4": (42.7, ((25, 4435.1, 404.9), (50, 8529.3, 728.0), (75, 12610.8, 1055.1))),
    "overfeat": (145.9, ((25, 3255.3, 135.5), (50, 3416.5, 143.1), (100, 6184.0, 155.0))),
    "resnet50": (25.6, ((25, 2104.0, 124.8), (50, 4005.5, 226.1), (75, 5906.9, 324.6))),
    "resnet101": (44.6, ((25, 3225.1, 215.1), (50, 6102.6, 380.8), (75, 8980.7, 579.5))),
    "resnet152": (60.2, ((25, 4546.6, 308.3), (50, 8634.2, 542.6), (75, 12717.8, 783.9))),
    "vgg11": (132.9, ((25, 6615.1, 173.2), (50, 9738.1, 305.0), (100, 12809.6, 545.2))),
    "vgg16": (138.4, ((25, 6614.3, 300.3), (50, 9738.1, 545.3), (100, 12962.3, 998.0))),
    "vgg19": (143.7, ((25, 6614.3, 358.2), (50, 9738.2, 646.9), (100, 12549.7, 1173.0))),
}
"""For each network, millions of parameters, and by batch size its peak memory in MB and the time of an iteration
in ms."""

SUPERRES_BUSY = 1 / 2.38
"""Fraction of an iteration of superres_128 in which it computes, at most: packing cannot gain more than its inverse,
and the paper measured 2.38 (5.2). This assumption gives packing as little to gain as that measurement allows."""


@attrs.frozen
class Workload:
    """One line of table 3, at one batch size."""

    name: str
    """Name in the paper, such as resnet50_25."""
    persistent: int
    """Persistent memory, bytes."""
    ephemeral: int
    """Peak ephemeral memory, bytes."""
    gpu_us: int
    """GPU time of an iteration."""
    idle_us: int
    """Remaining time of an iteration."""

    @property
    def iteration_us(self) -> int:
        """Time of an iteration with the GPU to itself."""
        return self.gpu_us + self.idle_us

    def job(self, name: str, arrival_us: int, duration_us: float) -> TraceJob:
        """Return a job of this workload that takes about `duration_us` alone."""
        iterations = max(1, round(duration_us / self.iteration_us))
        return TraceJob(name, arrival_us, self.persistent, self.ephemeral, iterations, self.gpu_us, self.idle_us)


def _other(name: str, persistent_mb: float, peak_mb: float, iteration_ms: float, busy: float) -> Workload:
    gpu = round(iteration_ms * busy * 1000)
    ephemeral = round((peak_mb - persistent_mb) * MB)
    return Workload(name, round(persistent_mb * MB), ephemeral, gpu, round(iteration_ms * 1000) - gpu)


OTHERS = (
    # Memory of vae: figure 1. Everything else is assumed to be as for superres, in proportion to the batch.
    _other("vae_64", 20, 29, 25, SUPERRES_BUSY),
    _other("vae_128", 20, 32, 50, SUPERRES_BUSY),
    _other("vae_256", 20, 35, 100, SUPERRES_BUSY),
    # Memory of superres: that of its layers, forward and backward, for crops of 85 x 85. Times are assumed.
    _other("superres_32", 40, 340, 25, SUPERRES_BUSY),
    _other("superres_64", 40, 640, 50, SUPERRES_BUSY),
    _other("superres_128", 40, 1240, 100, SUPERRES_BUSY),
    # Assumed, as an average network.
    _other("speech_25", 300, 1500, 200, 0.9),
    _other("speech_50", 300, 2700, 400, 0.9),
    _other("speech_75", 300, 3900, 600, 0.9),
    _other("seq2seq_small", 200, 1000, 100, 0.9),
    _other("seq2seq_medium", 400, 2500, 200, 0.9),
    _other("seq2seq_large", 800, 6000, 400, 0.9),
)
"""Workloads whose numbers were not published, as assumed here."""


def _persistent_mb(millions: float, peak: float) -> float:
    least, most = (7.0, 110.9), (60.2, 822.2)
    slope = (most[1] - least[1]) / (most[0] - least[0])
    return min(most[1], peak / 3, least[1] + (millions - least[0]) * slope)


def _measured() -> list[Workload]:
    found = []
    for network, (millions, rows) in MEASURED.items():
        idle_ms = max(0.0, linear_regression([row[0] for row in rows], [row[2] for row in rows]).intercept)
        persistent = _persistent_mb(millions, rows[0][1])
        for batch, peak, iteration in rows:
            idle = min(idle_ms, iteration * 0.99)
            found.append(_other(f"{network}_{batch}", persistent, peak, iteration, 1 - idle / iteration))
    return found


WORKLOADS = {workload.name: workload for workload in (*_measured(), *OTHERS)}
"""All 45 workloads of table 3."""


def salus(seed: int = 1, jobs: int = 100) -> list[TraceJob]:
    """Return the trace of section 5.1: jobs of table 3, equally likely, with the load of the row FIFO of table 2.

    - Durations are heavy-tailed, as in the production cluster that the paper follows: log-normal, with the mean of
      table 2 (303.4 min of work in 100 jobs) and a median of 1 min (the shortest duration at which the authors measured
      their workloads). They are the quantiles of that distribution in random order, so the load is the same for every
      seed. That fixes the spread; nothing is tuned to the result of SRTF.
    - Arrivals are a Poisson process over 40 min: with FIFO, the last jobs end at 303 min, and 95 % take 251 or less.
    """
    chance = random.Random(seed)
    mean = 303.4 / 100 * MINUTE_US
    spread = math.sqrt(2 * math.log(mean / MINUTE_US))
    normal = NormalDist(0, spread)
    durations = [math.exp(normal.inv_cdf((index + 0.5) / jobs)) for index in range(jobs)]
    scale = mean * jobs / sum(durations)
    chance.shuffle(durations)
    arrivals = sorted(chance.randrange(40 * MINUTE_US) for _ in range(jobs))
    names = [chance.choice(list(WORKLOADS)) for _ in range(jobs)]
    return [
        WORKLOADS[name].job(f"{number}-{name}", arrival, duration * scale)
        for number, (name, arrival, duration) in enumerate(zip(names, arrivals, durations, strict=True))
    ]


def equal(workload: str, jobs: int = 300, duration_us: int = MINUTE_US) -> list[TraceJob]:
    """Return the hyper-parameter search of section 5.2: equal jobs that are all there from the beginning."""
    return [WORKLOADS[workload].job(f"{number}-{workload}", 0, duration_us) for number in range(jobs)]


def day(seed: int = 1) -> list[TraceJob]:
    """Return a day of a cluster's GPU: the mix of :func:`salus`, arriving all day, with a load of 0.9."""
    chance = random.Random(seed)
    hours = 24 * 60 * MINUTE_US
    found = salus(seed, 100 * round(0.9 * 24 * 60 / 303.4))
    arrivals = sorted(chance.randrange(hours) for _ in found)
    return [attrs.evolve(job, arrival_us=arrival) for job, arrival in zip(found, arrivals, strict=True)]
