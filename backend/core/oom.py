"""Out of memory: what becomes of a level that stays over its gmem.limit.max.

Programs with the library never bring it there: an allocation that does not fit is refused. What the driver alone counts
is not asked before. So members whose memory cannot be moved are killed, NOTICE_S after the notice in gmem.events: the
largest first, one after the other, until the level is under its limit. As with memory.max, members of that level alone,
and those that have an oom_score_adj of -1000 are spared (:mod:`backend.process.victims`). A program with the library is
killed with a slice whose gmem.oom.group says so, or where it goes past the library, and for no other reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import trio

from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.process.identity import Group, Member, Process, SliceOn
from backend.process.victims import spared

log = logging.getLogger(__name__)

NOTICE_S = 1.0
"""Seconds for which a level is over its gmem.limit.max, by a member that cannot be moved, before one is killed."""

EXIT_S = 5.0
"""Seconds in which a process that was killed is expected to be gone; after that the next one is looked for."""

EXIT_LOOK_S = 0.02
"""Seconds between two looks whether it is."""

PAST_MOST = 2 << 30
"""Bytes that the driver counts for a program with the library and that no call charged, at most: contexts and code take
some 0.5 GiB. One that has more allocates past the library, and counts as one without it."""

RETURN_S = 10.0
"""Seconds after the start of a daemon in which no process is killed: programs with the library connect anew."""


class OomKiller:
    """See the module."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Mapping[int, Gpu],
        population: Population,
        kill: Callable[[Process], bool],
    ) -> None:
        """`kill` sends SIGKILL to that very process; whether it was there."""
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._kill = kill
        self._begun: float | None = None
        self._sent: set[Process] = set()  # SIGKILL, and they are not gone

    def begin(self) -> None:
        """Note that the daemon begins now."""
        self._begun = trio.current_time()

    def is_early(self) -> bool:
        """Whether the daemon began so recently that no process is killed yet."""
        return self._begun is None or trio.current_time() - self._begun < RETURN_S

    def beyond(self, level: Group) -> int:
        """Return the bytes by which a level is over its gmem.limit.max; 0 for one that is gone."""
        if not self._population.holds(level):
            return 0
        books = self._ledger.books(level)
        return max(0, books.current - books.limit_max)

    def obstacles(self, level: Group) -> Sequence[Member]:
        """Return the members at or below a level whose memory cannot be moved, the largest first."""
        members = [Member(resident.process, level.gpu) for resident in self._population.below(level)]
        stay = [one for one in members if self._stays(one) and self._ledger.books(one).current]
        return sorted(stay, key=lambda one: self._ledger.books(one).current, reverse=True)

    def _stays(self, member: Member) -> bool:
        """Whether the memory of a member cannot be moved: it is without the library, or goes past it."""
        gpu = self._gpus[member.gpu]
        past = gpu.footprint(member.process).implicit or 0
        return past > PAST_MOST or not gpu.manages(member.process)

    async def killable(self, level: Group) -> int:
        """Return the bytes of members of a level that may be killed now."""
        nbytes = 0
        for member in self.obstacles(level) if not self.is_early() else ():
            if await self._may_be(member):
                nbytes += self._ledger.books(member).current
        return nbytes

    async def relieve(self, level: Group) -> None:
        """Kill members of a level until it is under its gmem.limit.max, or none is left that may be killed."""
        if self._gpus[level.gpu].lost or not self.beyond(level):
            return
        victim = await self._next(level)
        if victim is None:
            return
        self._ledger.note(level, "oom")
        while victim is not None and self.beyond(level):
            await self._end(level, victim)
            victim = await self._next(level)

    async def _next(self, level: Group) -> Member | None:
        for member in self.obstacles(level):
            if member.process not in self._sent and await self._may_be(member) and self.beyond(level):
                return member
        return None

    async def _may_be(self, member: Member) -> bool:
        try:
            return await spared(member.process) is None and self._population.holds(member)
        except OSError:  # it is gone
            return False

    async def _end(self, level: Group, victim: Member) -> None:
        """Kill a member of a level, and all of the slice that is to end as a whole; return once they are gone."""
        whole = self._whole(level, victim)
        if whole is not None:
            self._ledger.note(whole, "oom_group_kill")
        group = [Member(one.process, level.gpu) for one in self._population.below(whole)] if whole else [victim]
        books, limit = self._ledger.books(victim), self._ledger.books(level).limit_max
        log.error(
            "GPU %d: %s is over its gmem.limit.max of %d: process %d holds %d that cannot be moved: killed%s",
            *(level.gpu, level.node, limit, victim.process.pid, books.current),
            f" with all of {whole.node}" if whole is not None else "",
        )
        for member in group:
            if await self._may_be(member) and self._population.holds(member) and self._kill(member.process):
                self._sent.add(member.process)
                self._ledger.note(member, "oom_kill")
        ending, until = [member for member in group if member.process in self._sent], trio.current_time() + EXIT_S
        while trio.current_time() < until:
            ending = [member for member in ending if self._population.holds(member)]
            if not ending:
                break
            await trio.sleep(EXIT_LOOK_S)
        self._sent = {process for process in self._sent if self._population.resident(process) is not None}

    def _whole(self, level: Group, victim: Member) -> SliceOn | None:
        """The highest slice from a victim to the level that ends as a whole, as mem_cgroup_get_oom_group() finds it."""
        found = None
        for above in self._population.path(victim):
            if isinstance(above, SliceOn) and self._ledger.books(above).oom_group:
                found = above
            if above == level:
                break
        return found
