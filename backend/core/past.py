"""Programs whose library does not see all that they allocate: the driver counts more for them than they charged.

The library is found by what a program links to and looks up. What finds the driver in another way (a static program, a
namespace of the loader's own, a table of the driver that nothing documents), and what the driver allocates by itself
for graphs, is in the driver's figure alone. It is shown for as long as it is there, and told of once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import trio

from backend.core.oom import PAST_MOST
from backend.core.population import Population
from backend.core.protocols import Gpu
from backend.core.records import Channel
from backend.process.identity import Group, Member, Process

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at all programs with the library; what is past it for two of them is shown."""


class Pasts:
    """See the module."""

    def __init__(self, gpus: Mapping[int, Gpu], population: Population, tell: Callable[[Group, Channel], None]) -> None:
        self._gpus = gpus
        self._population = population
        self._tell = tell
        self._past: set[Member] = set()
        self._seen: set[Member] = set()  # at the last look
        self._told: set[Process] = set()

    def is_past(self, group: Group) -> bool:
        """Whether a group is, or has, a program that holds more than :data:`backend.core.oom.PAST_MOST` past its
        library."""
        if not self._past:
            return False
        if isinstance(group, Member):
            return group in self._past
        return any(Member(resident.process, group.gpu) in self._past for resident in self._population.below(group))

    async def run(self) -> None:
        """Look at programs until cancelled."""
        while True:
            await trio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Look at each once."""
        found = {
            member: nbytes
            for resident in list(self._population.residents())
            for gpu in list(resident.contexts)
            if (nbytes := self._nbytes(member := Member(resident.process, gpu))) > PAST_MOST
        }
        past = {member for member in found if member in self._seen or member in self._past}
        changed, self._past, self._seen = past ^ self._past, past, set(found)
        for member in changed:
            if self._population.holds(member):
                for level in self._population.path(member):
                    self._tell(level, Channel.GMEM)
        for member in past:
            if member.process not in self._told:
                self._told.add(member.process)
                log.warning(
                    "GPU %d: process %d holds %d bytes past its library, which limits do not move: it finds the driver"
                    " in another way, or has graphs that allocate (docs/nvidia.md)",
                    *(member.gpu, member.process.pid, found[member]),
                )

    def forget(self, process: Process) -> None:
        """Drop what is known of a process that has gone."""
        self._told.discard(process)

    def _nbytes(self, member: Member) -> int:
        """Bytes of a program with the library that are past it; 0 for one that moves as a whole."""
        gpu = self._gpus[member.gpu]
        if gpu.lost or not gpu.manages(member.process):
            return 0
        found = gpu.footprint(member.process)
        return 0 if found.whole or found.silent else found.past
