"""A Gpu that notes what its levers are about to do and what holds, as the kernel does where it has the books.

So the next daemon knows which processes were off the runlist, and for which that is unknown. It also knows the
timeslices that TSGs had of their own: the driver forgets these once others are set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from backend.core.protocols import Gpu
from backend.core.reasons import Engines
from backend.core.settings import Lever
from backend.ledgers.forwarding import ForwardingGpu
from backend.ledgers.journal import state
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.state import UNTOUCHED, Key
from backend.ledgers.journal.state import Lever as Held
from backend.process.identity import Process


class JournaledGpu(ForwardingGpu):
    """A :class:`backend.core.protocols.Gpu` that forwards to another and writes into a journal. See the module."""

    def __init__(self, inner: Gpu, journal: Journal) -> None:
        super().__init__(inner)
        self._journal = journal

    async def set_lever(self, lever: Lever, process: Process, value: int) -> None:
        await self._inner.set_lever(lever, process, value)
        self._note(process, lambda held: held.with_(lever, value))

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        self._note(process, _moving)
        await self._inner.detach(process, engines)
        self._note(process, lambda held: held.without(engines))

    async def attach(self, process: Process) -> None:
        self._note(process, _moving)
        await self._inner.attach(process)
        self._note(process, lambda held: held.without(Engines.NONE))

    def _note(self, process: Process, change: Callable[[Held], Held]) -> None:
        key: Key = self.info.uuid, process
        if key not in self._journal.state.groups:
            return  # gone with its books before the lever returned
        before = self._journal.state.levers.get(key, UNTOUCHED)
        now = change(before)
        if now != before:
            self._journal.commit(state.lever(key, now))


def _moving(held: Held) -> Held:
    return attrs.evolve(held, moving=True)


class Timeslices:
    """The timeslices that the TSGs of programs on one GPU had of their own (:class:`backend.nvidia.notes.Notes`). For
    any thread."""

    def __init__(self, journal: Journal, uuid: str) -> None:
        self._journal = journal
        self._uuid = uuid

    def known(self, process: Process) -> Mapping[str, int]:
        """Return the noted timeslices of a process, in microseconds, by the names under which they were noted."""
        return self._journal.state.own.get((self._uuid, process), {})

    def note(self, process: Process, timeslices: Mapping[str, int]) -> None:
        """Note the timeslices that are to be given back, in place of earlier ones."""
        if timeslices != self.known(process):
            self._journal.commit(state.own((self._uuid, process), timeslices))
