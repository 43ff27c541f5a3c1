"""The levers of spaces on one GPU: what is pulled on one client of an MPS server acts on all of its clients.

Measured on driver 580 (docs/nvidia.md): the first channel of any client's TSG off the runlist stops all clients, and
the server's own TSG stops none. So the levers of a space are pulled for all of its programs together: it goes off the
runlist once all of them are to be off, and back on once all may run. Where they differ, some have been told and others
are about to be, and it stays as it is. One that its gate stops, as it is frozen and others are not, may differ for long
and counts only once none is left but such ones. They are pulled on each client, as a program is a client by its own
word alone, and one that is none would run on otherwise.

This is the one place that knows how levers reach clients of MPS.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping

import attrs
import trio

from backend.common.errors import fail
from backend.core.reasons import Engines
from backend.process.identity import Process
from backend.space.space import Space

Take = Callable[[Process, Engines], Awaitable[None]]
"""Takes these engines of one program off the runlist, and puts the others on."""
SetTimeslice = Callable[[Process, int], Awaitable[None]]
"""Sets the timeslice of one program, microseconds."""


@attrs.define(eq=False)
class Joint:
    """The levers of one space."""

    engines: dict[Process, Engines] = attrs.field(factory=dict)
    """The engines that each of its programs is to be without."""
    timeslices: dict[Process, int] = attrs.field(factory=dict)
    """The timeslice that each is to have, microseconds; 0 is the default."""
    gated: set[Process] = attrs.field(factory=set)
    """Those that stand at their gate, whatever the others do."""
    off: Engines | None = None
    """The engines that all of them are without; None while that is not known, as after a lever that failed."""
    timeslice_us: int | None = None
    """The timeslice of all of them; None while that is not known."""
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while a lever is pulled."""

    @property
    def wanted(self) -> Engines | None:
        """The engines that the space is to be without, as of what all of its programs are to be without."""
        found = {engines for one, engines in self.engines.items() if one not in self.gated} or {Engines.ALL}
        if Engines.NONE in found:
            return Engines.NONE if len(found) == 1 else self.off
        return Engines.GR if Engines.GR in found else Engines.ALL

    @property
    def due(self) -> Engines | None:
        """The engines that the space is to be without and, as far as is known, is not; None where no lever is due."""
        return None if self.wanted is self.off else self.wanted

    @property
    def longest_us(self) -> int:
        """The longest timeslice of all of its programs, microseconds."""
        return max(self.timeslices.values())


class SpaceLevers:
    """The levers of all spaces of a GPU."""

    def __init__(self, take: Take, set_timeslice: SetTimeslice) -> None:
        """`take` and `set_timeslice` pull the levers of one program, whatever space it is in."""
        self._take = take
        self._set_timeslice = set_timeslice
        self._joints: dict[Space, Joint] = {}
        self._whose: dict[Process, Space] = {}

    def note(self, clients: Mapping[Process, Space]) -> Collection[Process]:
        """Take these programs as the clients from now on; return those that have become one, or are none any more, and
        those whose levers are due, as one of their space is none any more.
        """
        before, self._whose = self._whose, dict(clients)
        changed = [one for one in {**before, **clients} if before.get(one) != clients.get(one)]
        behind = dict[Process, None]()
        for process in changed:
            if process in before:
                behind.update(dict.fromkeys(self._drop(process, before[process])))
            if process in clients:
                joint = self._joints.setdefault(clients[process], Joint())
                joint.engines[process], joint.timeslices[process] = Engines.NONE, 0
                joint.off = joint.timeslice_us = None
        return {**dict.fromkeys(changed), **behind}

    def forget(self, process: Process) -> Collection[Process]:
        """Forget a program that has ended; return those whose levers are due now, as its own wish was another."""
        space = self._whose.pop(process, None)
        return () if space is None else self._drop(process, space)

    def _drop(self, process: Process, space: Space) -> Collection[Process]:
        joint = self._joints[space]
        del joint.engines[process], joint.timeslices[process]
        joint.gated.discard(process)
        if not joint.engines:
            del self._joints[space]
        return [*joint.engines] if joint.due is not None else ()

    @contextlib.asynccontextmanager
    async def _joint(self, process: Process) -> AsyncIterator[Joint]:
        """Hold the levers of the space of a client. EAGAIN where it is none any more once they are free."""
        joint = self._joints[self._whose[process]]
        async with joint.turn:
            if process not in joint.engines:
                raise fail(errno.EAGAIN)
            yield joint

    def space_of(self, process: Process) -> Space | None:
        """Return the space of a client; None of any other program."""
        return self._whose.get(process)

    def members(self, space: Space) -> Collection[Process]:
        """Return the clients in a space."""
        return self._joints[space].engines.keys() if space in self._joints else ()

    def spaces(self) -> Mapping[Space, Collection[Process]]:
        """Return the clients in each space."""
        return {space: joint.engines.keys() for space, joint in self._joints.items()}

    def off(self, process: Process) -> Engines:
        """Return the engines that a client is without, as its space is."""
        space = self._whose.get(process)
        off = None if space is None else self._joints[space].off
        return Engines.NONE if off is None else off

    def is_held(self, process: Process) -> bool:
        """Return whether a client stands at its gate."""
        return (space := self._whose.get(process)) is not None and process in self._joints[space].gated

    def hold(self, process: Process) -> None:
        """Note that a client stands at its gate, until engines are put back on for it."""
        if (space := self._whose.get(process)) is not None:
            self._joints[space].gated.add(process)

    async def take(self, process: Process, engines: Engines) -> None:
        """Note the engines that a client is to be without, and pull the levers of its space where all agree."""
        async with self._joint(process) as joint:
            before = joint.engines[process]
            joint.engines[process] = engines
            if engines is not Engines.ALL:
                joint.gated.discard(process)
            wanted = joint.due
            if wanted is None:
                return
            pulled = [*joint.engines]
            try:
                for one in pulled:
                    if one in joint.engines:  # it has not ended meanwhile
                        await _pull(process, one, self._take(one, wanted))
            except BaseException:
                joint.off = None
                if process in joint.engines:
                    joint.engines[process] = before
                raise
            joint.off = wanted if joint.engines.keys() <= {*pulled} else None

    async def set_timeslice(self, process: Process, us: int) -> None:
        """Note the timeslice of a client, and give all of its space the longest."""
        async with self._joint(process) as joint:
            before = joint.timeslices[process]
            joint.timeslices[process] = us
            longest_us = joint.longest_us
            if longest_us == joint.timeslice_us:
                return
            pulled = [*joint.timeslices]
            try:
                for one in pulled:
                    if one in joint.timeslices:
                        await _pull(process, one, self._set_timeslice(one, longest_us))
            except BaseException:
                joint.timeslice_us = None
                if process in joint.timeslices:
                    joint.timeslices[process] = before
                raise
            joint.timeslice_us = longest_us if joint.timeslices.keys() <= {*pulled} else None


async def _pull(asked: Process, one: Process, lever: Awaitable[None]) -> None:
    """Await a lever of one program of a space. That another one than was asked for has ended means nothing."""
    try:
        await lever
    except ProcessLookupError:
        if one == asked:
            raise
