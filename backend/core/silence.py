"""Programs that have the library in them and do not speak to the daemon: for how long they are taken to be about to.

One that has just begun, whose connection was lost, or that was stopped as another daemon began, speaks soon, and its
memory can be moved then. So its silence is not held against it at once. What a program maps is its own choice, and so
is when it speaks: the time that it has is bounded, and only as much as it has spoken is given to it anew.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import trio

from backend.core.protocols import Gpu
from backend.process.identity import Member, Process
from backend.process.inside import has_library
from backend.process.running import is_stopped

RETURN_S = 10.0
"""Seconds in which a program that has the library speaks, while it runs; and after the start of a daemon, in which all
of them connect anew."""

LOOKED_S = 3.0
"""Seconds between two looks at a program that count as time in which it ran, at most: it is looked at every second
where that matters, and may have been stopped for the rest of a longer time."""


@attrs.define
class Silence:
    """What is known of a program that does not speak."""

    looked: float
    """When it was looked at last, by trio's clock."""
    spoken: float
    """Seconds for which it had spoken by then (:meth:`backend.core.protocols.Gpu.spoken`)."""
    left: float = RETURN_S
    """Seconds for which it may still be silent."""


class Silences:
    """See the module."""

    def __init__(self, gpus: Mapping[int, Gpu]) -> None:
        self._gpus = gpus
        self._silences: dict[Member, Silence] = {}

    def __len__(self) -> int:
        return len(self._silences)

    def forget(self, process: Process) -> None:
        """Drop what is known of a process that has gone."""
        for gpu in self._gpus:
            self._silences.pop(Member(process, gpu), None)

    async def is_awaited(self, member: Member) -> bool:
        """Whether a program that does not speak is taken to be about to. A program that is stopped has all the time
        that it is; one that does not let itself be looked at has no more than another."""
        pid = member.process.pid
        try:
            has: bool | None = await has_library(pid)
        except OSError:  # it is not known
            has = None
        if has is False:
            return False
        now, spoken = trio.current_time(), self._gpus[member.gpu].spoken(member.process)
        one = self._silences.setdefault(member, Silence(now, spoken))
        one.left = min(RETURN_S, one.left + max(0.0, spoken - one.spoken))
        if not (has and is_stopped(pid)):
            one.left -= min(LOOKED_S, now - one.looked)
        one.looked, one.spoken = now, spoken
        return one.left > 0
