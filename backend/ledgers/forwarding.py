"""Base of the Gpus that wrap another one: each call is passed to the wrapped Gpu unless it is overridden."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import trio

from backend.core.protocols import Bookkeeping, Gpu
from backend.core.reasons import Engines, Off
from backend.core.records import Activity, Capability, Footprint
from backend.core.settings import Lever
from backend.core.turns import TurnEnd
from backend.core.workingset import WorkingSet
from backend.process.identity import Process


class ForwardingGpu:
    """See :class:`backend.core.protocols.Gpu`."""

    def __init__(self, inner: Gpu) -> None:
        self.info = inner.info
        self.late_us = inner.late_us
        self.switch_us = inner.switch_us
        self._inner = inner

    @property
    def lost(self) -> bool:
        return self._inner.lost

    def capabilities(self) -> Mapping[str, Capability]:
        return self._inner.capabilities()

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        await self._inner.run(bookkeeper, task_status=task_status)

    def activity(self, process: Process) -> Activity:
        return self._inner.activity(process)

    def manages(self, process: Process) -> bool:
        return self._inner.manages(process)

    def spoken(self, process: Process) -> float:
        return self._inner.spoken(process)

    def footprint(self, process: Process) -> Footprint:
        return self._inner.footprint(process)

    def is_leaving(self, process: Process) -> bool:
        return self._inner.is_leaving(process)

    def offer(self, room: Callable[[Process], int]) -> None:
        self._inner.offer(room)

    async def set_lever(self, lever: Lever, process: Process, value: int) -> None:
        await self._inner.set_lever(lever, process, value)

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        await self._inner.detach(process, engines)

    async def attach(self, process: Process) -> None:
        await self._inner.attach(process)

    def note_reasons(self, process: Process, off: Off) -> None:
        self._inner.note_reasons(process, off)

    async def end_turn(self, process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
        return await self._inner.end_turn(process, bound_us, leaves)

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        self._inner.rank(behind, hold_us)

    async def begin_turn(self, process: Process) -> None:
        await self._inner.begin_turn(process)

    def working_set(self, process: Process) -> WorkingSet | None:
        return self._inner.working_set(process)

    def shares(self, process: Process) -> frozenset[Hashable] | None:
        return self._inner.shares(process)

    async def prepare(self, process: Process, nbytes: int) -> int:
        return await self._inner.prepare(process, nbytes)

    async def reclaim(self, process: Process, nbytes: int) -> int:
        return await self._inner.reclaim(process, nbytes)

    async def migrate(self, process: Process, target: Gpu) -> None:
        await self._inner.migrate(process, target._inner if isinstance(target, ForwardingGpu) else target)

    async def finds(self, process: Process) -> bool | None:
        return await self._inner.finds(process)

    def forget(self, process: Process) -> None:
        self._inner.forget(process)

    def hand_over(self) -> None:
        self._inner.hand_over()
