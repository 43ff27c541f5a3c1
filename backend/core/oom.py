"""The out-of-memory killer: what happens to a level that stays over its gmem.limit.max.

Programs with the library never cause that, since an allocation that does not fit is refused. Memory that only the
driver counts is not asked for first. So members whose memory cannot be moved are killed, NOTICE_S after the notice in
gmem.events, one after the other, the largest holder of such memory first, until the level is under its limit. As with
memory.max, only members of that level are killed, and an oom_score_adj of -1000 spares a process
(:mod:`backend.process.victims`). None is killed where all that may be killed together do not hold enough.

A program with the library is killed only with a slice whose gmem.oom.group says so, or where it allocates past the
library. One that does not speak to the daemon is given some time to do so (:mod:`backend.core.silence`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs
import trio

from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.core.silence import RETURN_S, Silences
from backend.process.identity import Group, Member, Process, SliceOn
from backend.process.running import is_ending
from backend.process.victims import spared

log = logging.getLogger(__name__)

NOTICE_S = 1.0
"""Seconds that a level must be over its gmem.limit.max, by a member that cannot be moved, before a process is
killed."""

EXIT_S = 5.0
"""Seconds in which a killed process is expected to begin its exit; after that the next victim is chosen."""

TEARDOWN_S = 60.0
"""Seconds in which an exiting process is expected to be gone, while the driver takes down what it holds."""

EXIT_LOOK_S = 0.02
"""Seconds between two looks whether it is gone."""

PAST_MOST = 2 << 30
"""Most bytes that the driver may count for a program with the library beyond what was charged: contexts and code take
some 0.5 GiB. A program with more allocates past the library, and counts as one without it."""


@attrs.frozen
class Obstacle:
    """A member of a level that holds memory which cannot be moved."""

    member: Member
    """The member."""
    nbytes: int
    """Bytes of its memory that cannot be moved."""
    past: bool = False
    """Whether it has the library and allocated these bytes past it."""


class OomKiller:
    """See the module."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Mapping[int, Gpu],
        population: Population,
        send: Callable[[Process, int], None],
        locate: Callable[[Process], None],
    ) -> None:
        """`send` sends a signal to exactly that process (:meth:`backend.process.exits.ExitWatch.signal`); `locate`
        follows a process to its current cgroup."""
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._send = send
        self._locate = locate
        self._silences = Silences(gpus)
        self._begun: float | None = None
        self._ends: dict[Process, float] = {}  # when it was sent SIGKILL, or seen to exit
        self._held: Counter[Group] = Counter()  # writes of the level's limit in progress
        self._refused: set[Process] = set()  # those that cannot be killed, for as long as they live
        self._kills: Counter[Group] = Counter()  # victims, by level

    def begin(self) -> None:
        """Note that the daemon begins now."""
        self._begun = trio.current_time()

    def forget(self, process: Process) -> None:
        """Drop what is known of a process that is gone."""
        self._ends.pop(process, None)
        self._refused.discard(process)
        self._silences.forget(process)

    def left(self, level: Group) -> None:
        """Drop what is known of a level that is gone."""
        self._kills.pop(level, None)

    def kills(self, level: Group) -> int:
        """Return how many victims were killed for a level."""
        return self._kills[level]

    def is_early(self) -> bool:
        """Return whether the daemon began too recently to kill: programs with the library are still connecting."""
        return self._begun is None or trio.current_time() - self._begun < RETURN_S

    def beyond(self, level: Group) -> int:
        """Return the bytes by which a level is over its gmem.limit.max; 0 for a level that is gone."""
        if not self._population.holds(level):
            return 0
        books = self._ledger.books(level)
        return max(0, books.current - books.limit_max)

    def obstacles(self, level: Group) -> Sequence[Obstacle]:
        """Return the members at or below a level that hold memory which cannot be moved, the largest holder of it
        first."""
        members = [Member(resident.process, level.gpu) for resident in self._population.below(level)]
        found = [one for member in members if (one := self._obstacle(member)) is not None]
        return sorted(found, key=lambda one: one.nbytes, reverse=True)

    def lasting(self, level: Group) -> Sequence[Obstacle]:
        """Return the obstacles that are not exiting: a program with the library closes its connection as it exits, and
        then looks like one without."""
        return [one for one in self.obstacles(level) if not _is_ending(one.member.process)]

    def fixed(self, level: Group) -> Sequence[Obstacle]:
        """Return the members at or below a level with memory that their library cannot move, the largest holder of it
        first. None of them is killed for it."""
        gpu = self._gpus[level.gpu]
        members = [Member(resident.process, level.gpu) for resident in self._population.below(level)]
        spoken = [one for one in members if gpu.manages(one.process)]
        found = [Obstacle(one, gpu.footprint(one.process).unmovable or 0) for one in spoken]
        return sorted((one for one in found if one.nbytes), key=lambda one: one.nbytes, reverse=True)

    def _obstacle(self, member: Member) -> Obstacle | None:
        """Return what a member holds that cannot be moved; None where it has the library and does not allocate past
        it."""
        gpu, held = self._gpus[member.gpu], self._ledger.books(member).current
        if not held:
            return None
        if not gpu.manages(member.process):
            return Obstacle(member, held)
        found = gpu.footprint(member.process)
        if found.silent:
            return Obstacle(member, held)
        if found.whole or found.past <= PAST_MOST:  # a program that moves as a whole leaves nothing behind
            return None
        return Obstacle(member, min(held, found.past + (found.unmovable or 0)), past=True)

    async def doomed(self, level: Group) -> Mapping[Member, bool]:
        """Return the members of a level that may be killed for it now, with all that end with them: True for each that
        may be killed for what it holds itself."""
        found: dict[Member, bool] = {}
        for one in self.obstacles(level) if not self.is_early() else ():
            if one.member.process in self._ends or not await self._is_choice(level, one.member):
                continue
            found[one.member] = True
            if (whole := self._whole(level, one.member)) is not None:
                for resident in list(self._population.below(whole)):
                    member = Member(resident.process, level.gpu)
                    if member not in found and await self._may_be(whole, member):
                        found[member] = False
        return found

    def held_by(self, members: Collection[Member]) -> int:
        """Return the bytes that members hold, as far as they are still there."""
        return sum(self._ledger.books(member).current for member in members if self._population.holds(member))

    async def is_enough(self, level: Group) -> bool:
        """Return whether killing all that may be killed now would bring a level under its gmem.limit.max."""
        doomed = await self.doomed(level)
        return self.held_by(doomed) >= self.beyond(level)

    @contextlib.contextmanager
    def held(self, level: Group) -> Iterator[None]:
        """Kill no member for a level while the body runs: its limit is being written, and may still be refused, or be
        met by reclaim."""
        self._held[level] += 1
        try:
            yield
        finally:
            self._held[level] -= 1
            if not self._held[level]:
                del self._held[level]

    def is_held(self, level: Group) -> bool:
        """Return whether a write of a level's limit is in progress (:meth:`held`)."""
        return level in self._held

    async def relieve(self, level: Group, lasts: Callable[[], bool]) -> int:
        """Kill members of a level until it is under its gmem.limit.max, while the notice of that `lasts`.

        No victim is chosen while another exits, for this level or any other, since its memory may be enough. Nor is one
        chosen where all that may be killed do not hold enough. Return how much those hold in that case; else 0.
        """
        told = False
        while self._is_to_be_relieved(level) and lasts():
            self._see_ends(level)
            if self._ends_in(level):
                await trio.sleep(EXIT_LOOK_S)
                continue
            doomed = await self.doomed(level)
            victim = self._next(level, doomed)
            if victim is not None and not await self._is_choice(level, victim.member):
                await trio.lowlevel.checkpoint()
                continue
            # The state may have changed while they were looked at.
            if not self._is_to_be_relieved(level) or not lasts() or self._ends_in(level):
                continue
            if (held := self.held_by(doomed)) < self.beyond(level):
                return held
            if victim is None:
                return 0
            if not told:
                told = True
                self._note(level, "oom")
            await self._end(level, victim)
        return 0

    def _is_to_be_relieved(self, level: Group) -> bool:
        return not self._gpus[level.gpu].lost and not self.is_held(level) and self.beyond(level) > 0

    def _see_ends(self, level: Group) -> None:
        """Note the members of a level that exit by themselves."""
        for one in self.obstacles(level):
            process = one.member.process
            if process not in self._ends and _is_ending(process):
                self._ends[process] = trio.current_time()

    def _ends_in(self, level: Group) -> bool:
        """Return whether a process of a level is exiting and is waited for."""
        return any(self._is_waited_for(one.process) for one in self._population.below(level))

    def _is_waited_for(self, process: Process) -> bool:
        since = self._ends.get(process)
        if since is None:
            return False
        ago = trio.current_time() - since
        return ago < EXIT_S or (ago < TEARDOWN_S and _is_ending(process))

    def _next(self, level: Group, doomed: Mapping[Member, bool]) -> Obstacle | None:
        """Return the largest holder of immovable memory among those that may be killed for it."""
        return next((one for one in self.obstacles(level) if doomed.get(one.member)), None)

    async def _is_choice(self, level: Group, member: Member) -> bool:
        """Return whether a member of a level may be killed for what it holds itself. It may have connected, or moved
        elsewhere, while it was looked at."""
        found = self._obstacle(member)
        if found is None or (not found.past and await self._silences.is_awaited(member)):
            return False
        return await self._may_be(level, member) and self._obstacle(member) is not None

    async def _may_be(self, top: Group, member: Member) -> bool:
        """Return whether a process may be killed as a member at or below `top`; where it is, is read anew."""
        if member.process in self._refused:
            return False
        try:
            if await spared(member.process) is not None:
                return False
        except OSError:  # it is gone, or a resource is short and it is looked at again
            return False
        return self._is_in(top, member) and self._sends(member.process, 0)

    def _is_in(self, top: Group, member: Member) -> bool:
        """Return whether a member is at or below `top` now, by its cgroup: moves are noticed only now and then."""
        self._locate(member.process)
        return self._population.holds(member) and top in self._population.path(member)

    def _sends(self, process: Process, number: int) -> bool:
        """Send a signal to a process, and return whether that worked. A process that cannot be sent one is not chosen
        again: it would be the next victim, too, and the tries would follow each other without a pause."""
        try:
            self._send(process, number)
        except ProcessLookupError:
            self._ends.setdefault(process, trio.current_time())  # gone, but not noticed yet
            return False
        except OSError as error:  # it is in a user namespace of another, or a security module forbids it
            self._refused.add(process)
            log.warning("process %d cannot be killed: %s", process.pid, error.strerror)
            return False
        return True

    async def _end(self, level: Group, obstacle: Obstacle) -> None:
        """Kill a member of a level, with all of the slice that is to end as a whole."""
        victim = obstacle.member
        whole = self._whole(level, victim)
        group = [Member(one.process, level.gpu) for one in self._population.below(whole)] if whole else []
        limit = self._ledger.books(level).limit_max
        if not self._kill(victim):
            return
        self._kills[level] += 1
        if whole is not None:
            self._note(whole, "oom_group_kill")
        log.error(
            "GPU %d: %s is over its gmem.limit.max of %d: process %d holds %d that cannot be moved: killed%s",
            *(level.gpu, level.node, limit, victim.process.pid, obstacle.nbytes),
            f" with all of {whole.node}" if whole is not None else "",
        )
        for member in group:
            if whole is not None and member != victim and await self._may_be(whole, member):
                self._kill(member)

    def _kill(self, member: Member) -> bool:
        """Send SIGKILL to a member, and return whether that worked."""
        if not self._sends(member.process, signal.SIGKILL):
            return False
        self._ends[member.process] = trio.current_time()
        self._note(member, "oom_kill")
        return True

    def _note(self, group: Group, event: str) -> None:
        """Count an event. A group that is gone from the kernel's books, and not yet from the daemon's, counts none."""
        with contextlib.suppress(OSError):
            self._ledger.note(group, event)

    def _whole(self, level: Group, victim: Member) -> SliceOn | None:
        """Return the highest slice between a victim and the level, included, that is to end as a whole, as
        mem_cgroup_get_oom_group() finds it; None for none."""
        found = None
        for above in self._population.path(victim):
            if isinstance(above, SliceOn) and self._ledger.books(above).oom_group:
                found = above
            if above == level:
                break
        return found


def _is_ending(process: Process) -> bool:
    """Return whether a process is exiting, and so gives back what it holds."""
    try:
        return is_ending(process.pid)
    except OSError:  # a resource is short
        return False
