"""A process on one NVIDIA GPU: what is wanted for it (applied.py), the steps that make its TSGs follow (enforce.py) and
what the keeper knows of it (watch.py), with deadlines for whatever waits in the driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from backend.core.records import Activity
from backend.nvidia.applied import Applied
from backend.nvidia.deadline import Deadline
from backend.nvidia.discover import Handles, Tsg
from backend.nvidia.enforce import Enforcement
from backend.nvidia.linux import System
from backend.nvidia.notes import NoNotes, Notes
from backend.nvidia.questions import Questions
from backend.nvidia.readback import ChannelStates
from backend.nvidia.timeslices import Timeslices
from backend.nvidia.watch import Watch
from backend.process.identity import Process

log = logging.getLogger(__name__)

SAY_AGAIN_S = 60.0
"""Seconds after which it is said again of a program that it undoes what was set: it may do so ten times a second."""


class Tenant:
    """See the module."""

    def __init__(
        self,
        process: Process,
        handles: Handles,
        levers: Deadline,
        looks: Deadline,
        system: System,
        gpu_id: int,
        states: ChannelStates,
        began: int,
        notes: Notes | None = None,
    ) -> None:
        """`levers` is for calls that act on it and `looks` for looks at it; `gpu_id` is what the driver calls the GPU,
        and the others are as of :class:`Enforcement`. Without `notes` nothing is known of an earlier daemon's."""
        self.process = process
        self.applied = Applied(handles, gpu_id)
        """What is wanted, and what was done."""
        self.questions = Questions(self.applied, states)
        """Whether it undid a freeze."""
        self.timeslices = Timeslices(process, system, self.applied)
        """Whether it undid a timeslice."""
        self.enforcement = Enforcement(
            process, system, self.applied, states, self.questions, self.timeslices, began, notes or NoNotes()
        )
        """The steps, for a thread."""
        self.watch = Watch()
        """The keeper's."""
        self.activity = Activity()
        """As last seen."""
        self._levers = levers
        self._looks = looks
        self._system = system
        self._said: float | None = None  # when it was last said that it undid something

    @property
    def has_policy(self) -> bool:
        """Whether anything is wanted, or left over."""
        return self.applied.has_policy

    def tsgs(self) -> Sequence[Tsg]:
        """The TSGs on this GPU, as last seen."""
        return self.applied.tsgs()

    async def has_files(self) -> bool:
        """Whether it has the driver's device open. OSError."""
        return bool(await self._looks.call(partial(self._system.control_fds, self.process.pid)))

    async def look(self, force: bool = False) -> None:
        """Finds its TSGs; with `force` also where the host's totals say that there are no new ones. OSError."""
        await self._looks.call(partial(self._look, force))

    async def left_off(self) -> set[tuple[int, int]]:
        """The channels that are off the runlist, by the GPU's own word, each by client and handle. OSError."""
        return await self._looks.call(self.enforcement.left_off)

    async def enforce(self, *, again: bool = False, anew: bool = False) -> str:
        """Makes the hardware follow what is wanted. OSError.

        With `again` the tenant seems to have undone it: it is asked once more, and what it undid is done again. What
        that was; empty for nothing. With `anew` it is not known what of it still holds: all is done again, nothing
        twice.
        """
        return await self._levers.call(partial(self._enforce, again, anew))

    def blame(self, what: str) -> None:
        """Says, now and then, that it undid something."""
        now = time.monotonic()
        if self._said is None or now - self._said >= SAY_AGAIN_S:
            self._said = now
            log.warning("pid %d undid its %s: set again", self.process.pid, what)

    # In threads

    def _look(self, force: bool) -> None:
        self.enforcement.look(force)
        self.activity = self.applied.activity()

    def _enforce(self, again: bool, anew: bool) -> str:
        undone = self.enforcement.enforce(again, anew)
        self.activity = self.applied.activity()
        return undone
