"""Room notices: when memory was freed or a limit was raised, let memory in the host come back to the GPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import trio

from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.process.identity import Member, Process

log = logging.getLogger(__name__)

OFFER_S = 0.01
"""Seconds between two notices at least, because a tenant that ends frees its memory piece by piece."""


class RoomNotices:
    """Tells each GPU when it may have room again."""

    def __init__(self, ledger: Ledger, gpus: Mapping[int, Gpu], population: Population) -> None:
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._roomy: set[int] = set()
        self._wake = trio.Event()

    def freed(self, gpu: int) -> None:
        """Note that there is, or may be, room on a GPU."""
        self._roomy.add(gpu)
        self._wake.set()

    async def run(self) -> None:
        """Send the notices until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            roomy, self._roomy = self._roomy, set()
            for gpu in roomy:
                try:
                    self._gpus[gpu].offer(partial(self._room, gpu))
                except Exception:
                    log.exception("GPU %d: that there is room is not told", gpu)
            await trio.sleep(OFFER_S)

    def _room(self, gpu: int, process: Process) -> int:
        """Return the bytes that a process could get without a level above it going over its limits. One that has turns
        of memory is told of none: what comes then, and for which of them, is planned."""
        group = Member(process, gpu)
        if not self._population.holds(group):
            return 0
        scheduled = self._population.record(group).scheduled
        if scheduled.rests or (scheduled.turned is not None and (scheduled.turned.runs or scheduled.turned.waits)):
            return 0
        try:
            path = [self._ledger.books(level) for level in self._population.path(group)]
        except OSError:
            return 0  # the kernel has seen the process die, and the daemon has not yet
        return max(0, min(books.limit - books.current for books in path))
