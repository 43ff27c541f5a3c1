"""Out of memory: what becomes of a level that stays over its gmem.limit.max.

Programs with the library never bring it there: an allocation that does not fit is refused. What the driver alone counts
is not asked before. So members whose memory cannot be moved are killed, NOTICE_S after the notice in gmem.events: the
one that holds most of such memory first, one after the other, until the level is under its limit. As with memory.max,
members of that level alone, and those that have an oom_score_adj of -1000 are spared (:mod:`backend.process.victims`).
None is killed where all that may be killed do not hold enough.
A program with the library is killed with a slice whose gmem.oom.group says so, or where it goes past the library, and
for no other reason; one that does not speak has some time to do so (:mod:`backend.core.silence`).
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
"""Seconds for which a level is over its gmem.limit.max, by a member that cannot be moved, before one is killed."""

EXIT_S = 5.0
"""Seconds in which a process that was killed is expected to end; after that the next one is looked for."""

TEARDOWN_S = 60.0
"""Seconds in which one that ends is expected to be gone, while the driver takes down what it holds."""

EXIT_LOOK_S = 0.02
"""Seconds between two looks whether it is."""

PAST_MOST = 2 << 30
"""Bytes that the driver counts for a program with the library and that no call charged, at most: contexts and code take
some 0.5 GiB. One that has more allocates past the library, and counts as one without it."""


@attrs.frozen
class Obstacle:
    """A member of a level that holds what cannot be moved."""

    member: Member
    """The member."""
    nbytes: int
    """Bytes of its memory that cannot be moved."""
    past: bool = False
    """Whether it has the library, and they are past that."""


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
        """`send` sends a signal to that very process (:meth:`backend.process.exits.ExitWatch.signal`), and `locate` has
        it be where its cgroup is now."""
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._send = send
        self._locate = locate
        self._silences = Silences(gpus)
        self._begun: float | None = None
        self._ends: dict[Process, float] = {}  # since when it was sent SIGKILL, or seen to end by itself
        self._held: Counter[Group] = Counter()  # writes of its limit that are not decided
        self._refused: set[Process] = set()  # that cannot be killed: they are spared for as long as they live
        self._kills: Counter[Group] = Counter()  # for each level

    def begin(self) -> None:
        """Note that the daemon begins now."""
        self._begun = trio.current_time()

    def forget(self, process: Process) -> None:
        """Drop what is known of a process that has gone."""
        self._ends.pop(process, None)
        self._refused.discard(process)
        self._silences.forget(process)

    def left(self, level: Group) -> None:
        """Drop what is known of a level that has gone."""
        self._kills.pop(level, None)

    def kills(self, level: Group) -> int:
        """Return how many victims were killed for a level."""
        return self._kills[level]

    def is_early(self) -> bool:
        """Whether the daemon began so recently that no process is killed yet: programs with the library connect."""
        return self._begun is None or trio.current_time() - self._begun < RETURN_S

    def beyond(self, level: Group) -> int:
        """Return the bytes by which a level is over its gmem.limit.max; 0 for one that is gone."""
        if not self._population.holds(level):
            return 0
        books = self._ledger.books(level)
        return max(0, books.current - books.limit_max)

    def obstacles(self, level: Group) -> Sequence[Obstacle]:
        """Return the members at or below a level that hold what cannot be moved, those with most of that first."""
        members = [Member(resident.process, level.gpu) for resident in self._population.below(level)]
        found = [one for member in members if (one := self._obstacle(member)) is not None]
        return sorted(found, key=lambda one: one.nbytes, reverse=True)

    def lasting(self, level: Group) -> Sequence[Obstacle]:
        """Return those of them that do not end by themselves: one that exits has closed its connection by then, and
        looks like one without the library."""
        return [one for one in self.obstacles(level) if not _is_ending(one.member.process)]

    def fixed(self, level: Group) -> Sequence[Obstacle]:
        """Return the members at or below a level whose library has what it cannot move, those with most of that first.
        None of them is killed for that."""
        gpu = self._gpus[level.gpu]
        members = [Member(resident.process, level.gpu) for resident in self._population.below(level)]
        spoken = [one for one in members if gpu.manages(one.process)]
        found = [Obstacle(one, gpu.footprint(one.process).unmovable or 0) for one in spoken]
        return sorted((one for one in found if one.nbytes), key=lambda one: one.nbytes, reverse=True)

    def _obstacle(self, member: Member) -> Obstacle | None:
        """What a member holds that cannot be moved; None where it has the library, and does not go past it."""
        gpu, held = self._gpus[member.gpu], self._ledger.books(member).current
        if not held:
            return None
        if not gpu.manages(member.process):
            return Obstacle(member, held)
        found = gpu.footprint(member.process)
        if found.silent:
            return Obstacle(member, held)
        past = found.implicit or 0
        if found.whole or past <= PAST_MOST:  # what goes into the host as a whole leaves nothing
            return None
        return Obstacle(member, min(held, past + (found.unmovable or 0)), past=True)

    async def doomed(self, level: Group) -> Mapping[Member, bool]:
        """Return the members of a level that may be killed for it now, with all that end with them; and of each whether
        it may be for what it holds itself."""
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
        """Return the bytes that members hold, as far as they are there."""
        return sum(self._ledger.books(member).current for member in members if self._population.holds(member))

    async def is_enough(self, level: Group) -> bool:
        """Whether the end of all that may be killed now brings a level under its gmem.limit.max."""
        doomed = await self.doomed(level)
        return self.held_by(doomed) >= self.beyond(level)

    @contextlib.contextmanager
    def held(self, level: Group) -> Iterator[None]:
        """No member is killed for a level meanwhile: its limit is being written, and may be refused yet, or made to
        hold by reclaim."""
        self._held[level] += 1
        try:
            yield
        finally:
            self._held[level] -= 1
            if not self._held[level]:
                del self._held[level]

    def is_held(self, level: Group) -> bool:
        """Whether that is so of a level now."""
        return level in self._held

    async def relieve(self, level: Group, lasts: Callable[[], bool]) -> int:
        """Kill members of a level until it is under its gmem.limit.max, while the notice of that `lasts`. None is
        chosen while another ends, for this level or any other: what that holds may be enough. Nor is one where all that
        may be killed do not hold enough: how much they hold is returned; else 0."""
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
            # By what happened while they were looked at.
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
        """Note those of a level that end by themselves."""
        for one in self.obstacles(level):
            process = one.member.process
            if process not in self._ends and _is_ending(process):
                self._ends[process] = trio.current_time()

    def _ends_in(self, level: Group) -> bool:
        """Whether a process of a level is on its way out, and is waited for."""
        return any(self._is_waited_for(one.process) for one in self._population.below(level))

    def _is_waited_for(self, process: Process) -> bool:
        since = self._ends.get(process)
        if since is None:
            return False
        ago = trio.current_time() - since
        return ago < EXIT_S or (ago < TEARDOWN_S and _is_ending(process))

    def _next(self, level: Group, doomed: Mapping[Member, bool]) -> Obstacle | None:
        """The one with most that cannot be moved of those that may be killed for it."""
        return next((one for one in self.obstacles(level) if doomed.get(one.member)), None)

    async def _is_choice(self, level: Group, member: Member) -> bool:
        """Whether a member of a level may be killed for what it holds itself. It may have connected, or have been moved
        elsewhere, while it was looked at."""
        found = self._obstacle(member)
        if found is None or (not found.past and await self._silences.is_awaited(member)):
            return False
        return await self._may_be(level, member) and self._obstacle(member) is not None

    async def _may_be(self, top: Group, member: Member) -> bool:
        """Whether a process may be killed as a member at or below `top`, which it is once it was looked at."""
        if member.process in self._refused:
            return False
        try:
            if await spared(member.process) is not None:
                return False
        except OSError:  # it is gone; or something is short here, and it is looked at again
            return False
        return self._is_in(top, member) and self._sends(member.process, 0)

    def _is_in(self, top: Group, member: Member) -> bool:
        """Whether a member is at or below `top` now, by its cgroup: a move is followed only now and then."""
        self._locate(member.process)
        return self._population.holds(member) and top in self._population.path(member)

    def _sends(self, process: Process, number: int) -> bool:
        """Whether a signal was sent to a process. One to which it cannot be is not chosen again: as it would be the
        next victim, too, nothing would come between the tries."""
        try:
            self._send(process, number)
        except ProcessLookupError:
            self._ends.setdefault(process, trio.current_time())  # and we have not seen that yet
            return False
        except OSError as error:  # it is in a user namespace that is not ours, or a security module forbids it
            self._refused.add(process)
            log.warning("process %d cannot be killed: %s", process.pid, error.strerror)
            return False
        return True

    async def _end(self, level: Group, obstacle: Obstacle) -> None:
        """Kill a member of a level, and all of the slice that is to end as a whole."""
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
        """Whether a member was sent SIGKILL."""
        if not self._sends(member.process, signal.SIGKILL):
            return False
        self._ends[member.process] = trio.current_time()
        self._note(member, "oom_kill")
        return True

    def _note(self, group: Group, event: str) -> None:
        """Count an event; what has gone by the kernel's books, and not yet by ours, counts none."""
        with contextlib.suppress(OSError):
            self._ledger.note(group, event)

    def _whole(self, level: Group, victim: Member) -> SliceOn | None:
        """The highest slice from a victim to the level that ends as a whole, as mem_cgroup_get_oom_group() finds it.
        The victim is in that level."""
        found = None
        for above in self._population.path(victim):
            if isinstance(above, SliceOn) and self._ledger.books(above).oom_group:
                found = above
            if above == level:
                break
        return found


def _is_ending(process: Process) -> bool:
    """Whether a process runs no more, and gives back what it holds."""
    try:
        return is_ending(process.pid)
    except OSError:  # something is short here
        return False
