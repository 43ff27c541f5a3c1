"""MIG: a job has the smallest profile of a card of 80 GB that holds it.

Use it when programs are strangers to each other, fill a seventh or more of the SMs for most of the time, and fit a
profile: an instance has its own SMs and its own memory, and no neighbour slows it. It loses what a profile has more
than its job needs, and what is left between profiles: one of four sevenths has place at the begin of a card only.

The simulation is kind to it: instances are made and removed in no time, a profile may have a tenth less than what a
job asks for, and a job has no more use for SMs than the share that it asks for, so an instance of that size slows it
by that tenth at most. NVIDIA's MIG user guide has the profiles and where they begin.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs

from ggroupfs.replay.cluster.jobs import WHOLE, ClusterJob
from ggroupfs.replay.cluster.placement import State, Taken

MEMORY_SLICES, COMPUTE_SLICES = 8, 7
"""Slices of a card."""
LENIENCE = 0.1
"""Part of the share that is asked for which a profile may lack."""


@attrs.frozen
class Profile:
    """A size of an instance."""

    name: str
    compute: int
    """Compute slices."""
    memory: int
    """Memory slices."""
    begins: Sequence[int]
    """Memory slices at which it may begin, the one that leaves most first."""

    def holds(self, share: int, memory: int) -> bool:
        """Return whether a job of that many percent fits: its memory whole, its share but for the lenience."""
        enough = self.compute / COMPUTE_SLICES >= share / WHOLE * (1 - LENIENCE)
        return enough and self.memory / MEMORY_SLICES >= memory / WHOLE

    def mask(self, begin: int) -> int:
        """Return the memory slices of an instance that begins there, a bit each."""
        return ((1 << self.memory) - 1) << begin


PROFILES = (
    Profile("1g.10gb", 1, 1, (6, 4, 5, 2, 3, 0, 1)),
    Profile("1g.20gb", 1, 2, (6, 4, 2, 0)),
    Profile("2g.20gb", 2, 2, (4, 2, 0)),
    Profile("3g.40gb", 3, 4, (4, 0)),
    Profile("4g.40gb", 4, 4, (0,)),
    Profile("7g.80gb", 7, 8, (0,)),
)
"""Profiles of an H100 with 80 GB, the smallest first."""


class Mig:
    """See the module. The state is the memory slices that are taken, a bit each; the place, profile and begin."""

    name = "mig"
    empty: State = 0

    def take(self, state: State, job: ClusterJob) -> Taken | None:
        """Return the first begin of the job's profile at which all slices are free."""
        assert isinstance(state, int)
        number, profile = self.profile(job)
        for begin in profile.begins:
            mask = profile.mask(begin)
            if not state & mask:
                return Taken(state | mask, number * MEMORY_SLICES + begin)
        return None

    def give(self, state: State, job: ClusterJob, place: int) -> State:
        """Return the card without the job's instance."""
        assert isinstance(state, int)
        number, begin = divmod(place, MEMORY_SLICES)
        return state & ~PROFILES[number].mask(begin)

    def full(self, state: State) -> int:
        """Return the part of the memory slices that are taken, percent."""
        assert isinstance(state, int)
        return state.bit_count() * WHOLE // MEMORY_SLICES

    def need(self, job: ClusterJob) -> int:
        """Return the part of the memory slices that the job's profile has, percent."""
        return self.profile(job)[1].memory * WHOLE // MEMORY_SLICES

    def paces(self, jobs: Sequence[tuple[ClusterJob, int]]) -> Sequence[float]:
        """Return the pace of each job: its busy time is longer where its instance is smaller than its share."""
        found = []
        for job, place in jobs:
            part = PROFILES[place // MEMORY_SLICES].compute / COMPUTE_SLICES
            longer = max(1.0, job.share / WHOLE / part)
            found.append(1 / (1 + job.busy * (longer - 1)))
        return found

    @staticmethod
    def profile(job: ClusterJob) -> tuple[int, Profile]:
        """Return the smallest profile for a job, with its number."""
        return _smallest(job.share, job.memory)


@functools.cache
def _smallest(share: int, memory: int) -> tuple[int, Profile]:
    return next((number, profile) for number, profile in enumerate(PROFILES) if profile.holds(share, memory))
