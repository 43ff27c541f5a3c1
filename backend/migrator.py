"""Moves running programs to another GPU: the Gpu moves them, and the books, the levers and the directory follow.

The room is booked on the target first, so that nobody else is given it; then the program is let run freely, since it
has to come to a rest by itself (a frozen one never would); then it is moved; then what was asked for it holds where it
is. On any failure it goes on where it was, and the books say so.
"""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import trio

from backend.errors import fail
from backend.follower import Follower
from backend.identity import Group, Node, Process
from backend.population import Population, Resident
from backend.protocols import Gpu, Ledger
from backend.records import Books, Channel

FOLLOWS = ("high", "low", "swap_max", "timeslice_us", "frozen", "priority", "weight")
"""What is asked for a process, and goes with it."""


class Migrator:
    """See the module. One move at a time: they share the bus and the host's memory."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Mapping[int, Gpu],
        population: Population,
        follower: Follower,
        admit: Callable[[Process, Iterable[int]], Resident],
        tell: Callable[[Group, Channel], None],
    ) -> None:
        """`admit` gives a process a directory for some GPUs."""
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._follower = follower
        self._admit = admit
        self._tell = tell
        self._turn = trio.Lock()
        self._moved: Counter[tuple[int, Node]] = Counter()  # onto a GPU and, of a process, 0

    def target(self, name: str) -> int:
        """The index of a GPU, by its index or its UUID. ENODEV where there is none."""
        for index, gpu in self._gpus.items():
            if name in (str(index), gpu.info.uuid):
                return index
        raise fail(errno.ENODEV)

    def moved(self, group: Group) -> int:
        """How often a process was moved; or, of a slice, how often one came to this GPU by that. Since the mount."""
        return self._moved[self._key(group)]

    def forget(self, group: Group) -> None:
        """The group is gone."""
        if not self._population.holds(group) and not (
            isinstance(group.node, Process) and self._population.resident(group.node)
        ):
            self._moved.pop(self._key(group), None)

    async def migrate(self, group: Group, target: int) -> None:
        """Returns once the process runs on `target`, another GPU. Errors are those of :meth:`Gpu.migrate`; besides,
        EINVAL for a process that is not on its GPU, and ENOSPC where a limit there leaves no room for it."""
        process = group.node
        assert isinstance(process, Process)
        async with self._turn:
            resident = self._population.resident(process)
            if resident is None or not self._population.holds(group):
                raise fail(errno.ENODEV)
            if group.gpu not in resident.contexts:
                raise fail(errno.EINVAL)
            if target in resident.contexts:
                raise fail(errno.EEXIST)
            there = Group(target, process)
            with self._booked(group, there):
                async with self._follower.released(group, there):
                    await self._gpus[group.gpu].migrate(process, self._gpus[target])
                    self._arrived(group, there)
            with contextlib.suppress(ProcessLookupError):
                await self._follower.apply(there)

    def _arrived(self, here: Group, there: Group) -> None:
        """It runs there: without a pause in which anybody could see it on both, or on none."""
        if not self._population.holds(there):
            raise fail(errno.ESRCH)  # it died there at once
        before = self._population.path(here)
        self._population.migrated(here, there)
        for level in self._population.path(there):
            self._moved[self._key(level)] += 1
            self._tell(level, Channel.COMPUTE)
        for level in before[1:]:
            self._tell(level, Channel.COMPUTE)
        self._follower.sharers_changed(there)
        self._follower.sharers_changed(before[1])

    @contextlib.contextmanager
    def _booked(self, here: Group, there: Group) -> Iterator[None]:
        """The target's books have what the process holds, and what is asked for it. Taken back where the body fails."""
        process = _process(here)
        resident = self._population.resident(process)
        fresh = resident is not None and there.gpu not in resident.gpus
        self._admit(process, {there.gpu})
        before = self._ledger.books(there)
        try:
            self._book(there, self._ledger.books(here))
            yield
        except BaseException:
            if self._population.holds(there) and self._population.holds(here):
                if fresh:
                    self._population.leave(there)
                else:
                    self._unbook(there, before)
            raise

    def _book(self, there: Group, held: Books) -> None:
        """ENOSPC where some level above has no room: nobody else on that GPU is to give way."""
        self._ledger.configure(there, **{name: getattr(held, name) for name in FOLLOWS})
        for level in self._population.path(there)[1:]:
            books = self._ledger.books(level)
            if books.current + held.current > books.high or books.swap + held.swap > books.swap_max:
                raise fail(errno.ENOSPC)
        if held.swap:
            self._ledger.observe(there, held.swap)
            self._ledger.swap_out(there, held.swap)
        self._ledger.observe(there, held.current)

    def _unbook(self, there: Group, before: Books) -> None:
        self._ledger.configure(there, **{name: getattr(before, name) for name in FOLLOWS})
        now = self._ledger.books(there)
        self._ledger.observe(there, before.current)
        if now.swap > before.swap:
            self._ledger.uncharge_swap(there, now.swap - before.swap)

    @staticmethod
    def _key(group: Group) -> tuple[int, Node]:
        return (0 if isinstance(group.node, Process) else group.gpu), group.node


def _process(group: Group) -> Process:
    assert isinstance(group.node, Process)
    return group.node
