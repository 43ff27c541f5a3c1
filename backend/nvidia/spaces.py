"""The levers of spaces on one GPU: what is pulled on one client of an MPS server acts on all of them.

Measured on driver 580 (docs/nvidia.md): the first channel of any client's TSG off the runlist stops all clients, and
the server's own TSG stops none. So the levers of a space are pulled on one of its programs, its *lead*, and all of what
the others are to have is only noted. A space goes off the runlist once all of its programs are to be off, and back on
once all may run: where they differ, one has been told and others are about to be.

This is the one place that knows how levers reach clients of MPS.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

import attrs
import trio

from backend.core.reasons import Engines
from backend.process.identity import Process
from backend.space.space import Space

@attrs.define(eq=False)
class Joint:
    """The levers of one space."""

    lead: Process
    """The program on which they are pulled."""
    engines: dict[Process, Engines] = attrs.field(factory=dict)
    """The engines that each of its programs is to be without."""
    timeslices: dict[Process, int] = attrs.field(factory=dict)
    """The timeslice that each is to have, microseconds; 0 is the default."""
    off: Engines | None = None
    """The engines that all of them are without; None while that is not known, as it was another daemon, or a lead that
    has ended, on which levers were pulled last."""
    timeslice_us: int | None = None
    """The timeslice of all of them; None while that is not known."""
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while a lever is pulled."""

    @property
    def wanted(self) -> Engines | None:
        """The engines that the space is to be without, as of what all of its programs are to be without."""
        found = set(self.engines.values())
        if Engines.NONE in found:
            return Engines.NONE if len(found) == 1 else self.off
        return Engines.GR if Engines.GR in found else Engines.ALL


class SpaceLevers:
    """The levers of all spaces of a GPU."""

    def __init__(self) -> None:
        self._joints: dict[Space, Joint] = {}
        self._whose: dict[Process, Space] = {}

    def note(self, clients: Mapping[Process, Space]) -> Collection[Process]:
        """Take these programs as the clients from now on; return those that have become one, or are none any more."""
        before, self._whose = self._whose, dict(clients)
        changed = {process for process in {*before, *clients} if before.get(process) != clients.get(process)}
        for process in changed:
            if process in before:
                self._drop(process, before[process])
            if process in clients:
                space = clients[process]
                joint = self._joints.setdefault(space, Joint(process))
                joint.engines.setdefault(process, Engines.NONE)
                joint.timeslices.setdefault(process, 0)
        return changed

    def forget(self, process: Process) -> None:
        """Forget a program that has ended."""
        space = self._whose.pop(process, None)
        if space is not None:
            self._drop(process, space)

    def _drop(self, process: Process, space: Space) -> None:
        joint = self._joints[space]
        joint.engines.pop(process, None)
        joint.timeslices.pop(process, None)
        if not joint.engines:
            del self._joints[space]
        elif joint.lead == process:
            # Its channels are gone, and with them what was pulled on them: the next lead is pulled anew.
            joint.lead, joint.off, joint.timeslice_us = next(iter(joint.engines)), None, None

    def space_of(self, process: Process) -> Space | None:
        """Return the space of a client; None of any other program."""
        return self._whose.get(process)

    def members(self, space: Space) -> Collection[Process]:
        """Return the clients in a space."""
        return self._joints[space].engines.keys() if space in self._joints else ()

    def off(self, process: Process) -> Engines:
        """Return the engines that a client is without, since its space is."""
        space = self._whose.get(process)
        return Engines.NONE if space is None else self._joints[space].off or Engines.NONE

    def behind(self) -> Collection[Process]:
        """Return a program of each space whose levers are not where they are to be, or not known to be there."""
        return [
            joint.lead
            for joint in self._joints.values()
            if not joint.turn.locked()
            and (joint.wanted is not joint.off or max(joint.timeslices.values()) != joint.timeslice_us)
        ]

    async def take(self, process: Process, engines: Engines, pull: Callable[[Process, Engines], Awaitable[None]]) -> None:
        """Note the engines that a client is to be without, and pull the lever of its space where all agree."""
        joint = self._joints[self._whose[process]]
        async with joint.turn:
            before = joint.engines.get(process, Engines.NONE)
            joint.engines[process] = engines
            try:
                await self._follow(joint, pull)
            except BaseException:
                if process in joint.engines:
                    joint.engines[process] = before
                raise

    async def _follow(self, joint: Joint, pull: Callable[[Process, Engines], Awaitable[None]]) -> None:
        wanted, lead = joint.wanted, joint.lead
        if wanted is not None and wanted is not joint.off:
            for process in [lead] if joint.off is not None else [*joint.engines]:
                await pull(process, wanted)
            if joint.lead == lead:
                joint.off = wanted

    async def set_timeslice(self, process: Process, us: int, pull: Callable[[Process, int], Awaitable[None]]) -> None:
        """Note the timeslice of a client, and give its space the longest of all."""
        joint = self._joints[self._whose[process]]
        async with joint.turn:
            before = joint.timeslices.get(process, 0)
            joint.timeslices[process] = us
            longest, lead = max(joint.timeslices.values()), joint.lead
            try:
                if longest != joint.timeslice_us:
                    for one in [lead] if joint.timeslice_us is not None else [*joint.timeslices]:
                        await pull(one, longest)
                    if joint.lead == lead:
                        joint.timeslice_us = longest
            except BaseException:
                if process in joint.timeslices:
                    joint.timeslices[process] = before
                raise

    async def again(
        self,
        process: Process,
        take: Callable[[Process, Engines], Awaitable[None]],
        set_timeslice: Callable[[Process, int], Awaitable[None]],
    ) -> None:
        """Pull the levers of the space of a client that are not where they are to be."""
        space = self._whose.get(process)
        if space is None:
            return
        joint = self._joints[space]
        await self.set_timeslice(process, joint.timeslices[process], set_timeslice)
        await self.take(process, joint.engines[process], take)
