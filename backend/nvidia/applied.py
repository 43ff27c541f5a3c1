"""The state of a process on one GPU: the engines and timeslice wanted for it, and what was done to its TSGs."""

from __future__ import annotations

from collections.abc import Sequence, Set

import attrs

from backend.core.reasons import Engines
from backend.core.records import Activity
from backend.nvidia import levers
from backend.nvidia.discover import Engine, Handles, Tsg
from backend.nvidia.levers import Key


@attrs.define(eq=False)
class Applied:
    """Wanted and applied state of one process. The wanted state may change while a thread applies it."""

    handles: Handles
    """The RM objects of the process, on every GPU."""
    gpu_id: int
    """RM's id of the GPU."""
    engines: Engines = Engines.NONE
    """Wanted: the engines whose TSGs are off the runlist."""
    timeslice_us: int = 0
    """Wanted: microseconds in a round; 0 for the default."""
    off: set[Key] = attrs.field(factory=set)
    """The channels that were taken off the runlist."""
    slices: dict[Key, int] = attrs.field(factory=dict)
    """The TSGs whose timeslice was changed, with that timeslice in microseconds."""

    @property
    def stays_off(self) -> bool:
        """Whether any engine's TSGs are to be off the runlist."""
        return self.engines is not Engines.NONE

    @property
    def has_policy(self) -> bool:
        """Whether anything is wanted, or still has to be undone."""
        return self.stays_off or self.timeslice_us != 0 or bool(self.off or self.slices)

    @property
    def is_behind(self) -> bool:
        """Whether the hardware differs from what is wanted, as far as is known without a question to the driver."""
        tsgs = self.tsgs()
        if any((key in self.off) != self.takes(tsg) for tsg in tsgs for key in channels_of(tsg)):
            return True
        if self.off and not self.stays_off:
            return True
        return any(levers.differing(tsgs, self.timeslice_us, self.slices))

    def tsgs(self) -> Sequence[Tsg]:
        """The TSGs on this GPU, as last seen."""
        return [tsg for tsg in self.handles.tsgs() if tsg.gpu_id == self.gpu_id]

    def takes(self, tsg: Tsg) -> bool:
        """Return whether a TSG is to be off the runlist. A TSG whose engine is unknown may run kernels, so
        it counts as GR.
        """
        if self.engines is Engines.GR:
            return tsg.engine is not Engine.COPY
        return self.engines is Engines.ALL

    def takes_channel(self, key: Key) -> bool:
        """Return whether a channel is to be off the runlist; since it was chosen, fewer engines may be wanted."""
        return any(key in channels_of(tsg) for tsg in self.tsgs() if self.takes(tsg))

    def is_off(self, tsg: Tsg) -> bool:
        """Return whether any channel of a TSG was taken off the runlist."""
        return any(key in self.off for key in channels_of(tsg))

    def due(self) -> Set[Tsg]:
        """Return the TSGs with channels that have to go off the runlist, or back on it, as far as is known."""
        return {tsg for tsg in self.tsgs() if any((key in self.off) != self.takes(tsg) for key in channels_of(tsg))}

    def slices_due(self) -> Set[Tsg] | None:
        """Return the TSGs that the timeslice is split over, if any of them needs another one, as far as is known;
        None if none does.
        """
        tsgs = self.tsgs()
        if (self.slices and not self.timeslice_us) or any(levers.differing(tsgs, self.timeslice_us, self.slices)):
            return levers.shares(tsgs, 0).keys()
        return None

    def known_timeslices(self) -> dict[Key, int]:
        """Return the timeslices that were set and that the driver acknowledged, in microseconds."""
        return {key: us for key, us in dict(self.slices).items() if us != levers.UNKNOWN}

    def doubt_timeslices(self) -> None:
        """Mark every timeslice that was set as unknown: it may hold, or not."""
        self.slices = dict.fromkeys(self.slices, levers.UNKNOWN)

    def activity(self) -> Activity:
        """Return the number of TSGs, channels and contexts, as last seen."""
        tsgs = self.tsgs()
        return Activity(
            tsgs=len(tsgs),
            channels=sum(len(tsg.channels) for tsg in tsgs),
            contexts=sum(tsg.engine is Engine.GR for tsg in tsgs),
            attached=sum(not self.is_off(tsg) for tsg in tsgs),
        )


def channels_of(tsg: Tsg) -> list[Key]:
    """Return the channels of a TSG, each as (client, handle)."""
    return [(tsg.client, channel) for channel in tsg.channels]
