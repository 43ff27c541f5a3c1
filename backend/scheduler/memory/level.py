"""A level: a slice, or a GPU's root, whose programs together need more memory than it may have.

What is over a limit is reclaimed at that level, on its own members, and so are turns: they are of the programs below
one level, on one GPU. What the others have, and what does not contend, is none of its room.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import attrs
import trio

from backend.core.member import Turned
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.core.records import Books
from backend.core.settings import MAX
from backend.process.identity import Group, Member, Process, SliceOn
from backend.scheduler.memory.claims import Claim, Name
from backend.scheduler.memory.gangs import Ties
from backend.scheduler.memory.planner import Plan, Program
from backend.scheduler.memory.turns import Waiter
from backend.scheduler.order import leads
from backend.scheduler.shares import Contender, due

NEWS_S = 0.1
"""Seconds after which programs are looked at again, where nothing was told of them."""


@attrs.frozen
class Levers:
    """What the scheduler does to a process, and knows of it."""

    end: Callable[[Process, int], Awaitable[None]]
    """Ends its turn; so many bytes of it are to go before the next one."""
    begin: Callable[[Process], Awaitable[None]]
    """Begins its turn."""
    is_off: Callable[[Process], bool]
    """Whether it waits for a turn of memory."""
    wants: Callable[[Process], bool]
    """Whether it has something to do."""
    wait_us: Callable[[Process], int]
    """How long it may wait for a turn, microseconds."""
    levers_us: Callable[[Process], int]
    """In how many microseconds the calls of the driver come back that a turn of it takes."""


class Level:
    """See the module, and :class:`backend.scheduler.memory.hands.Hands`, which it is."""

    def __init__(
        self,
        gpu: Gpu,
        ledger: Ledger,
        population: Population,
        group: SliceOn,
        contenders: Callable[[], Sequence[Contender]],
        levers: Levers,
    ) -> None:
        """`contenders` are those below it that no level below it has turns for."""
        self.group = group
        """The slice."""
        self._gpu = gpu
        self._ledger = ledger
        self._population = population
        self._contenders = contenders
        self._levers = levers
        self._news = trio.Event()
        self._taking: frozenset[Name] = frozenset()  # that had turns by the last plan

    def poke(self) -> None:
        """Something else is known of its programs."""
        self._news.set()

    # What is known

    def programs(self) -> Mapping[Name, Program]:
        contenders = [one for one in self._contenders() if self._population.holds(self._member(one.process))]
        ahead, parts = leads(contenders), due(contenders, {})
        found: dict[Name, Program] = {}
        for one in contenders:
            try:
                claim, ties = self._claim(one.process)
                waits_us, levers_us = self._levers.wait_us(one.process), self._levers.levers_us(one.process)
                waiter = Waiter(waits_us, parts[one.process], levers_us)
            except OSError:
                continue  # it has died, and that is still to be told
            is_ahead, wants = one.process in ahead, self._levers.wants(one.process)
            found[one.process] = Program({self.group.gpu: claim}, ties, waiter, is_ahead, wants)
        return found

    def rooms(self) -> Mapping[int, int]:
        if self._gpu.lost:
            return {}
        try:
            books = self._ledger.books(self.group)
            ours = sum(self._books(one.process).current for one in self._contenders() if self._is_there(one.process))
        except OSError:
            return {}
        return {self.group.gpu: max(0, books.high - (books.current - ours))}

    def _claim(self, process: Process) -> tuple[Claim, Ties]:
        """What a process claims, and what ties it to others. Of one whose library tells no working set that is all it
        has, and it has no turns."""
        books = self._books(process)
        found, shared = self._gpu.working_set(process), self._gpu.shares(process)
        resident = self._population.resident(process)
        gpus = frozenset(resident.contexts if resident is not None else ())
        if found is None or shared is None or len(gpus) > 1:
            # One on several GPUs has to have its turns on all of them together, and they have a level each.
            return Claim(books.current, books.current, leaves=0), Ties(gpus)
        here = min(found.resident, books.current)
        used = here + min(found.missing, books.swap)
        leaves = min(self._gpu.footprint(process).movable, self._may_swap(process))
        claim = Claim(used, here, books.current - here, min(found.unwritten, books.current), leaves)
        return claim, Ties(gpus, shared, is_known=True)

    def _may_swap(self, process: Process) -> int:
        """How many bytes a process may give: what its protection and each swap.max leave."""
        path: Sequence[Group] = self._population.path(self._member(process))
        each = [self._ledger.books(level) for level in path]
        swap = min((one.swap_max - one.swap if one.swap_max < MAX else MAX for one in each), default=MAX)
        return max(0, min(swap, each[0].current - min(each[0].low, each[0].current)))

    def _books(self, process: Process) -> Books:
        return self._ledger.books(self._member(process))

    def _member(self, process: Process) -> Member:
        return Member(process, self.group.gpu)

    def _is_there(self, process: Process) -> bool:
        return self._population.holds(self._member(process))

    def is_off(self, name: Name) -> bool:
        assert isinstance(name, Process)
        return self._levers.is_off(name)

    # What is done

    async def end(self, name: Name, leaves: int) -> None:
        assert isinstance(name, Process)
        await self._levers.end(name, leaves)

    async def begin(self, name: Name) -> None:
        assert isinstance(name, Process)
        await self._levers.begin(name)

    async def evict(self, gpu: int, name: Name, nbytes: int) -> int:
        assert isinstance(name, Process)
        moved = await self._gpu.reclaim(name, nbytes)
        if (slot := self._slot(name)) is not None:
            slot.evicted += moved
        return moved

    async def fetch(self, gpu: int, name: Name, nbytes: int) -> int:
        assert isinstance(name, Process)
        moved = await self._gpu.prepare(name, nbytes)
        if (slot := self._slot(name)) is not None:
            slot.fetched += moved
        return moved

    def planned(self, plan: Plan) -> None:
        taking = frozenset[Name]().union(*plan.sets) if plan.has_turns else frozenset[Name]()
        for name in taking | self._taking:
            assert isinstance(name, Process)
            if (slot := self._slot(name)) is not None:
                slot.runs, slot.waits = int(name in taking - plan.waits), int(name in taking & plan.waits)
        self._taking = taking

    def turned(self, names: frozenset[Name]) -> None:
        for name in names:
            assert isinstance(name, Process)
            if (slot := self._slot(name)) is not None:
                slot.turns += 1

    def _slot(self, process: Process) -> Turned | None:
        """What is counted of a process; None for one that is gone."""
        if not self._is_there(process):
            return None
        scheduled = self._population.record(self._member(process)).scheduled
        if scheduled.turned is None:
            scheduled.turned = Turned()
        return scheduled.turned

    async def news(self) -> None:
        with trio.move_on_after(NEWS_S):
            await self._news.wait()
        self._news = trio.Event()
