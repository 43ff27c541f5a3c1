"""Background work: acts on groups that no writer waits for, done soon, one group after the other.

A failure is logged once and retried, since nothing else would do the work once the reason is gone. No failure ends the
mount.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable

import trio

from backend.core.deadlines import Deadlines
from backend.core.member import Followed, Record
from backend.core.population import Population
from backend.process.identity import Group

log = logging.getLogger(__name__)


AGAIN_S, AGAIN_MOST_S = 1.0, 60.0
"""Seconds until a failed act is retried: the first wait, doubled after each failure, and the longest one."""


class Background:
    """The groups that one act is still to be done for."""

    def __init__(
        self,
        what: str,
        population: Population,
        act: Callable[[Group], Awaitable[None]],
        deadlines: Deadlines,
        slot: Callable[[Record], Followed],
    ) -> None:
        """`what` names the act in the log; `slot` selects the part of a record that notes failures."""
        self._what = what
        self._population = population
        self._act = act
        self._deadlines = deadlines
        self._groups: dict[Group, None] = {}
        self._slot = slot
        self._nursery: trio.Nursery | None = None
        self._wake = trio.Event()

    def __len__(self) -> int:
        """Number of groups that the act is still to be done for."""
        return len(self._groups)

    def __contains__(self, group: Group) -> bool:
        """Return whether the act is still to be done for a group."""
        return group in self._groups

    def later(self, group: Group) -> None:
        """Do the act for a group soon: once, however often it is asked for meanwhile."""
        self._groups[group] = None
        self._wake.set()

    def failed(self, group: Group, error: Exception) -> None:
        """Note that the act failed for a group: log it once, and retry until it succeeds."""
        # ENODEV: the group or its GPU is gone. The code that notices it logs it, and a GPU that is back is followed
        # anew.
        if not self._population.holds(group) or getattr(error, "errno", None) == errno.ENODEV:
            self._of(group).put_off_s = 0.0
            return
        slot = self._of(group)
        if not slot.put_off_s:
            log.error("GPU %d does not follow for %s (%s): %s", group.gpu, group.node, self._what, error)
        wait = slot.put_off_s = min(AGAIN_MOST_S, 2 * (slot.put_off_s or AGAIN_S / 2))
        if self._nursery is not None:
            self._nursery.start_soon(self._later, group, wait)

    def _of(self, group: Group) -> Followed:
        return self._slot(self._population.record(group))

    async def _later(self, group: Group, seconds: float) -> None:
        await trio.sleep(seconds)
        if self._of(group).put_off_s:
            self.later(group)

    async def run(self) -> None:
        """Do the acts that are asked for, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await self._work()

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            groups, self._groups = self._groups, {}
            for group in groups:
                if not self._population.holds(group):
                    continue
                try:
                    with self._deadlines.deadline(group):
                        await self._act(group)
                except ProcessLookupError:
                    pass  # the process died, and nothing is left to be done for it
                except Exception as error:
                    self.failed(group, error)
                else:
                    self._of(group).put_off_s = 0.0
