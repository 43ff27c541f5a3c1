"""The schedulers of a machine: one for each GPU that has the levers they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import trio

from backend.common.lasting import lasting
from backend.core.entries import Resident
from backend.core.follower import Follower
from backend.core.nextuse import NO_ORDER, Order
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.core.records import Capability, Throttled
from backend.core.settings import BY_CONTROL, OF_THE_SCHEDULER, WAIT_MAX
from backend.process.identity import Group, Member
from backend.scheduler.memory.levels import Levels
from backend.scheduler.memory.turns import WAIT_US
from backend.scheduler.scheduler import Scheduler
from backend.space.space import Space

LEVERS = tuple(dict.fromkeys(lever for setting in OF_THE_SCHEDULER for lever in setting.needs))
"""Names of the levers that schedulers use."""
CONTROLS = tuple(setting.control for setting in OF_THE_SCHEDULER if setting.control is not None)
"""Names of the controls that schedulers serve."""
FIGURES = frozenset((*(BY_CONTROL[lever].field for lever in LEVERS), *(setting.field for setting in OF_THE_SCHEDULER)))
"""Fields of the books that schedulers read; a change of one wakes the scheduler of its GPU."""


class Schedulers:
    """The schedulers of all GPUs of a machine, and the levels of memory turns that they share."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Mapping[int, Gpu],
        population: Population,
        follower: Follower,
        seconds: float,
        on: bool,
        periods: Callable[[Group, int], None],
        hold_us: int | None,
        wait_us: int | None = WAIT_US,
        space_of: Callable[[Member], Space | None] = lambda member: None,
        freed: Callable[[int], None] = lambda gpu: None,
    ) -> None:
        """If `on` is false there are no schedulers, and the GPUs are shared as their drivers do it. `periods` is called
        with a group and the number of quota periods that ended for it. `hold_us`, `wait_us` and `space_of` are those of
        :class:`Scheduler`; a `wait_us` of None turns memory turns off. `freed` is as of
        :class:`backend.scheduler.memory.level.Level`.
        """
        self._gpus = gpus
        self._on = on
        self._has_turns = wait_us is not None
        self._levels = Levels(gpus, ledger, population, self._has_turns, freed)
        self._each = {
            index: Scheduler(
                *(gpu, ledger, population, follower, seconds, periods, hold_us),
                *(self._levels, WAIT_US if wait_us is None else wait_us, space_of),
            )
            for index, gpu in gpus.items()
            if self._verdict(gpu.capabilities()) is not Capability.UNSUPPORTED
        }
        # the table of the GPU, and ours made of it
        self._tables: dict[Gpu, tuple[Mapping[str, Capability], Mapping[str, Capability]]] = {}
        follower.watcher = self.poke

    async def run(self) -> None:
        """Run all schedulers until cancelled."""
        async with trio.open_nursery() as nursery:
            self._levels.nursery = nursery
            for index, scheduler in self._each.items():
                nursery.start_soon(lasting, f"the scheduler of GPU {index}", scheduler.run)

    def capabilities(self, gpu: Gpu) -> Mapping[str, Capability]:
        """Return what each control does on a GPU with its scheduler. Priorities and weights are as good as the weakest
        of LEVERS. Without turns of memory there is no wait for one.
        """
        table = gpu.capabilities()
        said, ours = self._tables.get(gpu, (None, table))
        if said is not table:  # cached, because every write of a control asks
            ours = {**table, **dict.fromkeys(CONTROLS, self._verdict(table))}
            if not self._has_turns:
                ours[str(WAIT_MAX.control)] = Capability.UNSUPPORTED
            self._tables[gpu] = table, ours
        return ours

    def weakest(self) -> Mapping[str, Capability]:
        """Return what each control does on this machine: the weakest of its GPUs counts."""
        tables = [self.capabilities(gpu) for gpu in self._gpus.values()]
        names = sorted({name for table in tables for name in table})
        return {
            name: Capability.weakest([table.get(name, Capability.UNSUPPORTED) for table in tables]) for name in names
        }

    def _verdict(self, table: Mapping[str, Capability]) -> Capability:
        if not self._on:
            return Capability.UNSUPPORTED
        return Capability.weakest([table.get(name, Capability.UNSUPPORTED) for name in LEVERS])

    def poke(self, gpu: int) -> None:
        """Make the scheduler of a GPU look soon: a process came, left or moved, or a setting changed."""
        if gpu in self._each:
            self._each[gpu].poke()

    def ended(self, group: Member) -> None:
        """Note that a process is about to leave a GPU."""
        if group.gpu in self._each:
            self._each[group.gpu].ended(group.process)

    def late(self, group: Member, figures: Mapping[str, int]) -> None:
        """Note figures of a process that has left a GPU, beyond those that were reported when it left."""
        if group.gpu in self._each and "gpu_usec" in figures:
            self._each[group.gpu].late(group.process, figures["gpu_usec"])

    def greet(self, group: Member) -> None:
        """Note that a program of a process has connected for a GPU, for the first time or again."""
        if group.gpu in self._each:
            self._each[group.gpu].greet(group.process)

    def order(self, gpu: int) -> Order:
        """Return the order of the next turns on a GPU; NO_ORDER if it has no scheduler."""
        scheduler = self._each.get(gpu)
        return NO_ORDER if scheduler is None else scheduler.order()

    def configured(self, gpu: int, changes: Iterable[str]) -> None:
        """Note that settings of a group on a GPU changed; `changes` are their names in the books."""
        if not FIGURES.isdisjoint(changes):
            self.poke(gpu)

    def throttled(self, gpu: int, residents: Iterable[Resident]) -> Throttled:
        """Return how often and for how long `residents` were kept off the runlist of a GPU, summed."""
        scheduler = self._each.get(gpu)
        if scheduler is None:
            return Throttled()
        return sum((scheduler.throttled(resident) for resident in residents), Throttled())
