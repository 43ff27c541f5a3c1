"""The schedulers of a machine: one for each GPU that can do what they need."""

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
from backend.core.settings import BY_CONTROL, OF_THE_SCHEDULER
from backend.process.identity import Group, Member
from backend.scheduler.memory.levels import Levels
from backend.scheduler.memory.turns import WAIT_US
from backend.scheduler.scheduler import Scheduler

LEVERS = tuple(dict.fromkeys(lever for setting in OF_THE_SCHEDULER for lever in setting.needs))
"""What they pull."""
CONTROLS = tuple(setting.control for setting in OF_THE_SCHEDULER if setting.control is not None)
"""What they act on."""
FIGURES = frozenset((*(BY_CONTROL[lever].field for lever in LEVERS), *(setting.field for setting in OF_THE_SCHEDULER)))
"""What of the books they look at."""


class Schedulers:
    """See the module."""

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
    ) -> None:
        """Not `on`, there are none: the GPUs are shared as their drivers do it. `periods` is told of periods of quotas
        that have ended. `hold_us` and `wait_us` are as of :class:`Scheduler`; where the latter is None, there are no
        turns for the sake of memory."""
        self._gpus = gpus
        self._on = on
        self._levels = Levels(gpus, ledger, population, wait_us is not None)
        self._each = {
            index: Scheduler(
                *(gpu, ledger, population, follower, seconds, periods, hold_us),
                *(self._levels, WAIT_US if wait_us is None else wait_us),
            )
            for index, gpu in gpus.items()
            if self._verdict(gpu.capabilities()) is not Capability.UNSUPPORTED
        }
        self._tables: dict[Gpu, tuple[Mapping[str, Capability], Mapping[str, Capability]]] = {}  # as it said, and ours
        follower.watcher = self.poke

    async def run(self) -> None:
        """Schedules until cancelled."""
        async with trio.open_nursery() as nursery:
            self._levels.nursery = nursery
            for index, scheduler in self._each.items():
                nursery.start_soon(lasting, f"the scheduler of GPU {index}", scheduler.run)

    def capabilities(self, gpu: Gpu) -> Mapping[str, Capability]:
        """What each control does on a GPU, with its scheduler: priorities and weights are as good as its levers."""
        table = gpu.capabilities()
        said, ours = self._tables.get(gpu, (None, table))
        if said is not table:  # every write of a control asks
            ours = {**table, **dict.fromkeys(CONTROLS, self._verdict(table))}
            self._tables[gpu] = table, ours
        return ours

    def weakest(self) -> Mapping[str, Capability]:
        """What each control does on this machine: with several GPUs, the weakest counts."""
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
        """Look soon: a process came, went or moved on a GPU, or something is asked of it."""
        if gpu in self._each:
            self._each[gpu].poke()

    def ended(self, group: Member) -> None:
        """Takes note that a process is about to be gone from a GPU."""
        if group.gpu in self._each:
            self._each[group.gpu].ended(group.process)

    def late(self, group: Member, figures: Mapping[str, int]) -> None:
        """Takes note of what a process did on a GPU that has ended, beyond what was told of it then."""
        if group.gpu in self._each and "gpu_usec" in figures:
            self._each[group.gpu].late(group.process, figures["gpu_usec"])

    def greet(self, group: Member) -> None:
        """Takes note that a program of a process speaks on a GPU, as the first of it or anew."""
        if group.gpu in self._each:
            self._each[group.gpu].greet(group.process)

    def order(self, gpu: int) -> Order:
        """Return what comes on a GPU; nothing is known where it has no scheduler."""
        scheduler = self._each.get(gpu)
        return NO_ORDER if scheduler is None else scheduler.order()

    def configured(self, gpu: int, changes: Iterable[str]) -> None:
        """Something was set on a group of a GPU, by these names of the books."""
        if not FIGURES.isdisjoint(changes):
            self.poke(gpu)

    def throttled(self, gpu: int, residents: Iterable[Resident]) -> Throttled:
        """How often, and for how long, some processes were kept off the runlist of a GPU, all together."""
        scheduler = self._each.get(gpu)
        if scheduler is None:
            return Throttled()
        return sum((scheduler.throttled(resident) for resident in residents), Throttled())
