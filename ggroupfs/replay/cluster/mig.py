"""MIG: a job gets the smallest profile of an 80 GB card that holds it.

Use it when programs do not trust each other, fill a seventh or more of the SMs for most of the time, and fit a profile:
an instance has its own SMs and its own memory, and no neighbour slows it down. The excess of a profile over the job's
needs is lost, and so is what remains between profiles: one of four sevenths fits only at the start of a card.

The simulation favours MIG: instances are made and removed instantly, a profile may be a tenth smaller than the
requested share, and a job cannot use more SMs than that share, so an instance of that size slows it down by that tenth
at most. NVIDIA's MIG user guide lists the profiles and their start positions.
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
"""Fraction of the requested share by which a profile may fall short."""


@attrs.frozen
class Profile:
    """A size of an instance."""

    name: str
    compute: int
    """Compute slices."""
    memory: int
    """Memory slices."""
    begins: Sequence[int]
    """Memory slices at which it may begin; the one that leaves most comes first."""

    def holds(self, share: int, memory: int) -> bool:
        """Return whether a job of that size, in percent, fits: its whole memory, and its share but for LENIENCE."""
        enough = self.compute / COMPUTE_SLICES >= share / WHOLE * (1 - LENIENCE)
        return enough and self.memory / MEMORY_SLICES >= memory / WHOLE

    def mask(self, begin: int) -> int:
        """Return the memory slices of an instance that begins there, one bit each."""
        return ((1 << self.memory) - 1) << begin


PROFILES = (
    Profile("1g.10gb", 1, 1, (6, 4, 5, 2, 3, 0, 1)),
    Profile("1g.20gb", 1, 2, (6, 4, 2, 0)),
    Profile("2g.20gb", 2, 2, (4, 2, 0)),
    Profile("3g.40gb", 3, 4, (4, 0)),
    Profile("4g.40gb", 4, 4, (0,)),
    Profile("7g.80gb", 7, 8, (0,)),
)
"""Profiles of an H100 with 80 GB, smallest first."""


class Mig:
    """Placement by MIG.

    The state of a card is a bit for each taken memory slice; the place encodes profile and begin.
    """

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
        """Return the fraction of the memory slices that are taken, percent."""
        assert isinstance(state, int)
        return state.bit_count() * WHOLE // MEMORY_SLICES

    def need(self, job: ClusterJob) -> int:
        """Return the fraction of the memory slices that the job's profile has, percent."""
        return self.profile(job)[1].memory * WHOLE // MEMORY_SLICES

    def paces(self, jobs: Sequence[tuple[ClusterJob, int]]) -> Sequence[float]:
        """Return the pace of each job: its busy time is longer if its instance is smaller than its share."""
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
