"""Silence: how long a program with the library may fail to speak to the daemon and still be expected to.

A program that has just begun, lost its connection, or was stopped as another daemon began will speak soon, and then its
memory can be moved. So its silence does not count against it at once. Mapping the library and speaking are a program's
own choice, so the time that it has is bounded, and renewed only by as much time as it has spoken.
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
"""Seconds that a running program with the library has to speak; also seconds after the start of a daemon in which all
of them connect anew."""

LOOKED_S = 3.0
"""Most seconds between two looks at a program that count as running time: it is looked at every second where that
matters, and may have been stopped for the rest of a longer time."""


@attrs.define
class Silence:
    """The silence of one program."""

    looked: float
    """Time of the last look, by trio's clock."""
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
        """Drop what is known of a process that is gone."""
        for gpu in self._gpus:
            self._silences.pop(Member(process, gpu), None)

    async def is_awaited(self, member: Member) -> bool:
        """Return whether a program that does not speak is still expected to. Time for which it is stopped does not
        count; a program that cannot be looked at has no more time than another."""
        pid = member.process.pid
        try:
            has: bool | None = await has_library(pid)
        except OSError:  # unknown
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
