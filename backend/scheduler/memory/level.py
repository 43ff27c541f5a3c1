"""A level: a slice, or the root of GPUs, whose programs together need more memory than it may have.

What is over a limit is reclaimed at that level, on its own members, and so are turns: they are of the programs below
one level. What the others have, and what does not contend, is none of its room. It is of one GPU, or of all those that
gangs tie together: a program that has contexts on several has its turns on all of them at once.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import attrs
import trio

from backend.common.errors import errno_of, fail
from backend.core.member import Turned
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.core.records import Books
from backend.core.settings import MAX
from backend.core.workingset import ANY
from backend.process.identity import Member, Process, Slice, SliceOn
from backend.scheduler.memory.claims import Claim, Name
from backend.scheduler.memory.gangs import Ties
from backend.scheduler.memory.kept import kept
from backend.scheduler.memory.planner import Plan, Program, claims_on
from backend.scheduler.memory.turns import Waiter
from backend.scheduler.order import leads
from backend.scheduler.shares import Contender, due

NEWS_S = 0.1
"""Seconds after which programs are looked at again, where nothing was told of them."""


@attrs.frozen
class Levers:
    """What the scheduler of one GPU does to a process, and knows of it."""

    end: Callable[[Process, int], Awaitable[bool]]
    """Ends its turn; so many bytes of it are to go before the next one. Returns whether it is drained."""
    begin: Callable[[Process], Awaitable[None]]
    """Begins its turn."""
    is_off: Callable[[Process], bool]
    """Whether it waits for a turn of memory."""
    is_drained: Callable[[Process], bool]
    """Whether it does, and all that it launched has run."""
    is_stuck: Callable[[Process], bool]
    """Whether it does, and is off the runlist without having been drained."""
    wants: Callable[[Process], bool]
    """Whether it has something to do."""
    wait_us: Callable[[Process], int]
    """How long it may wait for a turn, microseconds."""
    levers_us: Callable[[Process], int]
    """In how many microseconds the calls of the driver come back that a turn of it takes."""


@attrs.frozen
class Place:
    """Where a level is."""

    slice: Slice
    """The slice."""
    gpus: frozenset[int]
    """The GPUs."""

    def on(self, gpu: int) -> SliceOn:
        """Return the group of the slice on a GPU."""
        return SliceOn(self.slice, gpu)

    def __str__(self) -> str:
        first, *others = sorted(self.gpus)
        gpus = f"GPUs {', '.join(map(str, (first, *others)))}" if others else f"GPU {first}"
        return f"{gpus}, slice {self.slice.path}"


def shared_by(process: Process, gpus: Iterable[Gpu]) -> frozenset[object]:
    """Return the names of what a process shares on any GPU, and ANY for one of which that is not known."""
    found: set[object] = set()
    for gpu in gpus:
        names = gpu.shares(process)
        found |= {ANY} if names is None else names
    return frozenset(found)


class Level:
    """See the module, and :class:`backend.scheduler.memory.hands.Hands`, which it is."""

    def __init__(
        self,
        place: Place,
        gpus: Mapping[int, Gpu],
        ledger: Ledger,
        population: Population,
        contenders: Callable[[int], Sequence[Contender]],
        levers: Mapping[int, Levers],
        freed: Callable[[int], None] = lambda gpu: None,
    ) -> None:
        """`gpus` are all that there are; `contenders` are those of a GPU below the level that no level below it has
        turns for, and `levers` are those of each GPU. `freed` is called with a GPU where a program has no turns any
        more, for which there may be room."""
        self.place = place
        """Where it is."""
        self._gpus = gpus
        self._ledger = ledger
        self._population = population
        self._contenders = contenders
        self._levers = levers
        self._freed = freed
        self._news = trio.Event()
        self._taking: frozenset[Name] = frozenset()  # that had turns by the last plan

    def poke(self) -> None:
        """Something else is known of its programs."""
        self._news.set()

    # What is known

    def programs(self) -> Mapping[Name, Program]:
        found: dict[Name, Program] = {}
        for process, seen in self._seen().items():
            try:
                found[process] = self._program(process, seen)
            except OSError:
                continue  # it has died, and that is still to be told
        self._keep(found)
        if any(one.ties.shared and one.ties.is_known for one in found.values()) and self._may_share_outside(found):
            # One that has no turns here is of their gang, perhaps.
            for name, one in found.items():
                if one.ties.shared:
                    found[name] = attrs.evolve(one, ties=attrs.evolve(one.ties, is_known=False))
        return found

    def _seen(self) -> Mapping[Process, Mapping[int, tuple[bool, float]]]:
        """Each program, with the GPUs on which it contends: whether it leads there, and its part."""
        found: dict[Process, dict[int, tuple[bool, float]]] = {}
        for gpu in sorted(self.place.gpus):
            contenders = [one for one in self._contenders(gpu) if self._population.holds(Member(one.process, gpu))]
            ahead, parts = leads(contenders), due(contenders, {})
            for one in contenders:
                found.setdefault(one.process, {})[gpu] = one.process in ahead, parts[one.process]
        return found

    def _program(self, process: Process, seen: Mapping[int, tuple[bool, float]]) -> Program:
        claims = {gpu: self._claim(process, gpu) for gpu in seen}
        resident = self._population.resident(process)
        contexts = frozenset(resident.contexts if resident is not None else ())
        shared = shared_by(process, [self._gpus[gpu] for gpu in contexts if gpu in self._gpus])
        # One that is frozen on a GPU, say, cannot have its turns together.
        is_known = contexts == seen.keys() and None not in claims.values()
        of = [self._levers[gpu] for gpu in seen]
        waiter = Waiter(
            min(one.wait_us(process) for one in of),
            min(part for _, part in seen.values()),
            max(one.levers_us(process) for one in of),
        )
        return Program(
            {gpu: claim or self._whole(process, gpu) for gpu, claim in claims.items()},
            Ties(contexts, shared, is_known),
            waiter,
            any(is_ahead for is_ahead, _ in seen.values()),
            any(one.wants(process) for one in of),
        )

    def _may_share_outside(self, programs: Mapping[Name, Program]) -> bool:
        """Whether a process may share memory that is none of these."""
        for resident in self._population.residents():
            there = [self._gpus[gpu] for gpu in resident.contexts if gpu in self._gpus]
            if resident.process not in programs and there and shared_by(resident.process, there):
                return True
        return False

    def rooms(self) -> Mapping[int, int]:
        return self._rooms(above=True)

    def own_rooms(self) -> Mapping[int, int]:
        """As :meth:`rooms`, by the limit of this level alone: whether one above is short is a matter of that."""
        return self._rooms(above=False)

    def _rooms(self, *, above: bool) -> Mapping[int, int]:
        found = {}
        for gpu in self.place.gpus:
            if self._gpus[gpu].lost:
                return {}
            there = [one.process for one in self._contenders(gpu) if self._population.holds(Member(one.process, gpu))]
            try:
                path = self._population.path(self.place.on(gpu))
                each = [self._ledger.books(level) for level in (path if above else path[:1])]
                ours = sum(self._books(process, gpu).current for process in there)
            except OSError:
                return {}
            found[gpu] = max(0, min(books.limit - (books.current - ours) for books in each))
        return found

    def chunk(self, gpu: int) -> int:
        return max(self._gpus[gpu].info.chunk, self._gpus[gpu].info.granule)

    def _claim(self, process: Process, index: int) -> Claim | None:
        """What a process claims of a GPU; None where its library does not tell. What cannot come, whatever others give,
        is no claim: what limits below this level, and swap.max, have no room for, and what the GPU has not."""
        gpu, path = self._gpus[index], self._population.path(Member(process, index))
        each = {level: self._ledger.books(level) for level in path}
        books, top = each[path[0]], self.place.on(index)
        found = gpu.working_set(process)
        if found is None or gpu.shares(process) is None:
            return None
        here = min(found.resident, books.current)
        footprint = gpu.footprint(process)
        movable = max(0, footprint.movable - (footprint.unmovable or 0))
        leaves = max(0, min(movable, *(one.swap_max - one.swap for one in each.values() if one.swap_max < MAX), MAX))
        claim = Claim(here, here, books.current - here, min(found.unwritten, books.current), leaves)
        most = min(gpu.info.capacity, *(each[level].limit for level in path[: path.index(top)])) - claim.stays
        missing = min(found.missing, books.swap, *(one.swap_max for one in each.values()))
        return attrs.evolve(claim, used=max(here, min(here + missing, most)))

    def _whole(self, process: Process, gpu: int) -> Claim:
        """What one claims whose library tells no working set: all that it has, of which it gives nothing."""
        current = self._books(process, gpu).current
        return Claim(current, current, leaves=0)

    def _keep(self, programs: dict[Name, Program]) -> None:
        """Has each program keep what low protects of it."""
        for gpu in self.place.gpus:
            used = {name: one.used for name, one in claims_on(gpu, programs).items() if isinstance(name, Process)}
            try:
                protected = kept(self.place.on(gpu), used, self._ledger, self._population)
            except OSError:
                continue  # a group has gone, and that is still to be told
            for name, nbytes in protected.items():
                if name in used and nbytes:
                    claim = programs[name].claims[gpu].protect(nbytes)
                    programs[name] = attrs.evolve(programs[name], claims={**programs[name].claims, gpu: claim})

    def _books(self, process: Process, gpu: int) -> Books:
        return self._ledger.books(Member(process, gpu))

    def _on(self, name: Name) -> tuple[Process, list[int]]:
        """The process of a name, and those of our GPUs that it has a context on."""
        assert isinstance(name, Process)
        resident = self._population.resident(name)
        contexts = resident.contexts if resident is not None else frozenset[int]()
        return name, [gpu for gpu in sorted(self.place.gpus) if gpu in contexts]

    def is_off(self, name: Name) -> bool:
        process, gpus = self._on(name)
        return bool(gpus) and all(self._levers[gpu].is_off(process) for gpu in gpus)

    def is_on(self, name: Name) -> bool:
        assert isinstance(name, Process)
        return not any(self._levers[gpu].is_off(name) for gpu in self.place.gpus)

    def is_drained(self, name: Name) -> bool:
        process, gpus = self._on(name)
        return all(self._levers[gpu].is_drained(process) for gpu in gpus)

    def is_stuck(self, name: Name) -> bool:
        process, gpus = self._on(name)
        return any(self._levers[gpu].is_stuck(process) for gpu in gpus)

    # What is done

    async def end(self, name: Name, leaves: Mapping[int, int]) -> bool:
        process, gpus = self._on(name)
        drained: list[bool] = []

        async def end(gpu: int) -> None:
            drained.append(await self._levers[gpu].end(process, leaves.get(gpu, 0)))

        await _together(end, [gpu for gpu in gpus if not self._levers[gpu].is_off(process)])
        return all(drained)

    async def begin(self, name: Name) -> None:
        assert isinstance(name, Process)
        process = name
        await _together(
            lambda gpu: self._levers[gpu].begin(process),
            [gpu for gpu in sorted(self.place.gpus) if self._levers[gpu].is_off(process)],
        )
        if name not in self._taking:
            self._tell_of_room()

    def _tell_of_room(self) -> None:
        """A program has no turns any more, and nothing is planned for it."""
        for gpu in self.place.gpus:
            self._freed(gpu)

    async def evict(self, gpu: int, name: Name, nbytes: int) -> int:
        assert isinstance(name, Process)
        moved = await self._gpus[gpu].reclaim(name, nbytes)
        if (slot := self._slot(name, gpu)) is not None:
            slot.evicted += moved
        return moved

    async def fetch(self, gpu: int, name: Name, nbytes: int) -> int:
        assert isinstance(name, Process)
        moved = await self._gpus[gpu].prepare(name, nbytes)
        if (slot := self._slot(name, gpu)) is not None:
            slot.fetched += moved
        return moved

    def planned(self, plan: Plan) -> None:
        taking = frozenset[Name]().union(*plan.sets) if plan.has_turns else frozenset[Name]()
        for name in taking | self._taking:
            for slot in self._slots(name):
                slot.runs, slot.waits = int(name in taking - plan.waits), int(name in taking & plan.waits)
        if self._taking - taking:
            self._tell_of_room()
        self._taking = taking

    def turned(self, names: frozenset[Name]) -> None:
        for name in names:
            for slot in self._slots(name):
                slot.turns += 1

    def _slots(self, name: Name) -> Sequence[Turned]:
        """What is counted of a process on each of our GPUs."""
        process, gpus = self._on(name)
        return [slot for gpu in gpus if (slot := self._slot(process, gpu)) is not None]

    def _slot(self, process: Process, gpu: int) -> Turned | None:
        """What is counted of a process; None for one that is gone."""
        if not self._population.holds(Member(process, gpu)):
            return None
        scheduled = self._population.record(Member(process, gpu)).scheduled
        if scheduled.turned is None:
            scheduled.turned = Turned()
        return scheduled.turned

    async def news(self) -> None:
        with trio.move_on_after(NEWS_S):
            await self._news.wait()
        self._news = trio.Event()


async def _together(act: Callable[[int], Awaitable[None]], gpus: Sequence[int]) -> None:
    """Does something on each GPU, at once. OSError of one of those that fail: all were tried."""
    if len(gpus) == 1:
        await act(gpus[0])
        return
    failed: list[OSError] = []

    async def one(gpu: int) -> None:
        try:
            await act(gpu)
        except OSError as error:
            failed.append(error)

    async with trio.open_nursery() as nursery:
        for gpu in gpus:
            nursery.start_soon(one, gpu)
    if failed:
        raise fail(max((errno_of(error) for error in failed), key=lambda code: code != errno.ESRCH))
