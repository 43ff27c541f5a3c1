"""One process on one NVIDIA GPU.

It combines what is wanted for the process (applied.py), the steps that make its TSGs follow (enforce.py) and the
state that the keeper has of it (watch.py), with deadlines for all calls that wait in the driver.
"""

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
from backend.nvidia.waiting import Waiter
from backend.nvidia.watch import Watch
from backend.process.identity import Process

log = logging.getLogger(__name__)

SAY_AGAIN_S = 60.0
"""Seconds between two log lines about a program that undoes its settings, which it may do ten times a second."""


class Tenant:
    """A process on a GPU, with the levers that act on it."""

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
        waiter: Waiter | None = None,
    ) -> None:
        """`levers` is the deadline for calls that act on the process, `looks` that for looks at it. `gpu_id` is
        RM's id of the GPU; the others are as of :class:`Enforcement`. Without `notes`, nothing is known from an
        earlier daemon; without a `waiter`, nothing is noted for the case that this one is killed.
        """
        self.process = process
        self.applied = Applied(handles, gpu_id)
        """The wanted and the applied state."""
        self.questions = Questions(self.applied, states)
        """The questions whether the process undid a freeze."""
        self.timeslices = Timeslices(process, system, self.applied)
        """The questions whether the process undid a timeslice."""
        self.enforcement = Enforcement(
            *(process, system, self.applied, states, self.questions, self.timeslices, began, notes or NoNotes()),
            waiter or Waiter(None, process),
        )
        """The steps that act on the process, for a thread."""
        self.watch = Watch()
        """The keeper's state of the process."""
        self.activity = Activity()
        """TSGs, channels and contexts, as last seen."""
        self._levers = levers
        self._looks = looks
        self._system = system
        self._said: float | None = None  # when the log last said that it undid something

    @property
    def has_policy(self) -> bool:
        """Whether anything is wanted, or still has to be undone."""
        return self.applied.has_policy

    def tsgs(self) -> Sequence[Tsg]:
        """The TSGs on this GPU, as last seen."""
        return self.applied.tsgs()

    async def has_files(self) -> bool:
        """Return whether the process has the driver's device open. Raises OSError."""
        return bool(await self._looks.call(partial(self._system.control_fds, self.process.pid)))

    async def look(self, force: bool = False) -> None:
        """Find the process's TSGs; with `force`, even if the host's totals say that there are no new ones.
        Raises OSError.
        """
        await self._looks.call(partial(self._look, force))

    async def left_off(self) -> set[tuple[int, int]]:
        """Return the channels that are off the runlist according to the GPU, each as (client, handle).
        Raises OSError.
        """
        return await self._looks.call(self.enforcement.left_off)

    async def enforce(self, *, again: bool = False, anew: bool = False) -> str:
        """Make the hardware follow what is wanted; return what the process undid, empty for nothing. Raises OSError.

        With `again`, the process seems to have undone a setting: it is asked once more, and whatever it undid is set
        again. With `anew`, it is unknown what still holds: everything is set again, nothing twice.
        """
        return await self._levers.call(partial(self._enforce, again, anew))

    def blame(self, what: str) -> None:
        """Log that the process undid a setting, at most once in SAY_AGAIN_S."""
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
