"""Work that no writer waits for: done soon, one group after the other, and never the end of the mount."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from backend.deadline import deadline
from backend.identity import Group
from backend.population import Population

log = logging.getLogger(__name__)


class Background:
    """Groups that something is to be done for."""

    def __init__(
        self, what: str, population: Population, act: Callable[[Group], Awaitable[None]], seconds: float
    ) -> None:
        self._what = what
        self._population = population
        self._act = act
        self._seconds = seconds
        self._groups: dict[Group, None] = {}
        self._wake = trio.Event()

    def __len__(self) -> int:
        """Groups that it is still to be done for."""
        return len(self._groups)

    def later(self, group: Group) -> None:
        """Has it done for a group soon, once however often it is asked for."""
        self._groups[group] = None
        self._wake.set()

    async def run(self) -> None:
        """Does what it is asked, until cancelled. What fails is logged: nobody else would hear of it."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            groups, self._groups = self._groups, {}
            for group in groups:
                if not self._population.holds(group):
                    continue
                try:
                    with deadline(self._seconds):
                        await self._act(group)
                except ProcessLookupError:
                    pass  # it died, and took along what was to be done
                except Exception as error:
                    if self._population.holds(group):
                        log.error("GPU %d does not follow for %s (%s): %s", group.gpu, group.node, self._what, error)
