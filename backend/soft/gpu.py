"""SoftGpu: a GPU in software. Real pages with real contents, a real runlist, and a clock that may be virtual.

Time is trio's: the wall clock in a mount, a MockClock in tests.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import trio

from backend.common.errors import fail
from backend.common.lasting import lasting
from backend.core.protocols import Bookkeeping, Gpu
from backend.core.reasons import Engines
from backend.core.records import Activity, Capability, Footprint
from backend.core.settings import SETTINGS, Lever
from backend.core.turns import TurnEnd
from backend.process.identity import Process
from backend.soft.bus import Way
from backend.soft.hardware import Hardware
from backend.soft.tenant import NOTHING, Tenant

log = logging.getLogger(__name__)

ENFORCED = ("gmem.reclaim", "usermemfd", *(one.control for one in SETTINGS if one.control and one.on_software_gpu))
_ALONE = dict.fromkeys(ENFORCED, Capability.ENFORCED) | {"compute.migrate": Capability.UNSUPPORTED}
_AMONG_OTHERS = _ALONE | {"compute.migrate": Capability.ENFORCED}

DRAIN_S = 0.0001
"""Seconds between two looks whether a program has drained, at least."""

STUCK_S = 0.01
"""Seconds after which is seen that a program does not drain any more: it was taken off the runlist."""

FAULTS_S = 0.02
"""Seconds between two looks into the directory of faults, where there is one."""


class SoftGpu(Hardware):
    """See :class:`backend.core.protocols.Gpu`, which it implements, and the module."""

    late_us = 0
    switch_us = 0

    def capabilities(self) -> Mapping[str, Capability]:
        return _AMONG_OTHERS if self.machine.gpus > 1 else _ALONE

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        self._bookkeeper = bookkeeper
        self._engine.start()
        task_status.started()
        async with trio.open_nursery() as nursery:
            if self.config.faults:
                nursery.start_soon(self._follow_faults, Path(self.config.faults, str(self.info.index)))
            await lasting(f"the engine of GPU {self.info.index}", self._engine.report)

    async def _follow_faults(self, path: Path) -> None:
        while True:
            self._follow_fault(path)
            await trio.sleep(FAULTS_S)

    def _follow_fault(self, path: Path) -> None:
        if path.exists() != self.lost:
            (self.restore if self.lost else self.lose)()

    # A GPU that is gone, and comes back by a reset

    def lose(self) -> None:
        """What is queued is never finished, what is in memory is lost, and every call gives ENODEV."""
        self._engine.advance()
        self.lost = True
        for tenant in self._tenants.values():
            tenant.lose()
        log.error("GPU %d is lost", self.info.index)
        self.booked.presence(self.info.index)

    def restore(self) -> None:
        """It works again, for contexts that are made from now on."""
        self.lost = False
        log.warning("GPU %d is back", self.info.index)
        self.booked.presence(self.info.index)

    # Levers

    def activity(self, process: Process) -> Activity:
        tenant = self._tenants.get(process)
        if tenant is None:
            return NOTHING
        self._engine.advance()
        return tenant.activity()

    def manages(self, process: Process) -> bool:
        return True

    def spoken(self, process: Process) -> float:
        return 0.0

    def footprint(self, process: Process) -> Footprint:
        tenant = self._tenants.get(process)
        if tenant is None or not (self._is_late(tenant) and tenant.is_stuck):
            return Footprint()
        return Footprint(movable=0, unmovable=tenant.memory.resident * self.config.page)

    def is_leaving(self, process: Process) -> bool:
        return False  # it moves beside what the program does

    def offer(self, room: Callable[[Process], int]) -> None:
        pass  # pages come back when a launch touches them

    async def set_lever(self, lever: Lever, process: Process, value: int) -> None:
        self._require()
        self._engine.advance()
        tenant = self._tenant(process)
        tenant.set_lever(lever, value)
        tenant.split(self.config.timeslice_us)

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        self._require()
        self._take(process, engines)

    async def attach(self, process: Process) -> None:
        self._require()
        self._take(process, Engines.NONE)

    def _take(self, process: Process, engines: Engines) -> None:
        tenant = self._tenant(process)
        tenant.asked = engines
        self._follow(tenant)

    def _follow(self, tenant: Tenant) -> None:
        self._engine.advance()  # up to now it ran, from now on it does not
        tenant.follow()
        self._engine.wake()

    # Turns

    async def end_turn(self, process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
        self._require()
        tenant = self._tenant(process)
        if not tenant.is_gated:
            return TurnEnd.UNGATED
        if not tenant.gate.is_closed:
            tenant.misses = tenant.memory.misses(tenant.gate.turn)
            tenant.gate.close()
        with trio.move_on_after(bound_us / 1e6):
            await self._drained(tenant)
        self._require()
        if self._tenant(process) is not tenant or not tenant.gate.is_closed:
            return TurnEnd.UNGATED  # it was opened meanwhile
        return TurnEnd.LATE if self._is_late(tenant) else TurnEnd.DRAINED

    async def _drained(self, tenant: Tenant) -> None:
        """Returns once nothing of a program runs whose gate is closed."""
        while True:
            if not self._is_late(tenant):
                return
            await trio.sleep(max(tenant.pending / 1e9, DRAIN_S))  # it takes as long at least

    async def _moves(self, tenant: Tenant) -> bool:
        """Whether memory of a program moves; returns once what it launched before the end of its turn has run, if that
        goes on."""
        while True:
            if not self._is_late(tenant) or tenant.is_stuck:
                return not tenant.is_late
            await trio.sleep(min(max(tenant.pending / 1e9, DRAIN_S), STUCK_S))

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        """Its programs have no busy periods: the one that goes before has the engine as soon as it has work."""

    async def begin_turn(self, process: Process) -> None:
        self._require()
        self._engine.advance()
        self._tenant(process).begin_turn()

    # Moves

    async def reclaim(self, process: Process, nbytes: int) -> int:
        self._require()
        tenant = self._tenants.get(process)
        if tenant is None or tenant.leaving:
            return 0
        bookkeeper, page = self.booked, self.config.page
        moved = 0
        while moved < nbytes and await self._moves(tenant):
            self._require()
            if not tenant.memory.resident or tenant.leaving or self._tenants.get(process) is not tenant:
                break
            pages = min(self.config.batch // page, -(-(nbytes - moved) // page), tenant.memory.resident)
            batch = pages * page
            try:
                usec = self.bus.expected_usec(Way.OUT, batch)
                bookkeeper.moved_out(process, self.info.index, batch, usec)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break  # swap.max shrank, or another reclaim took the room, since this one was planned
            if tenant.gate.is_closed:
                tenant.memory.give(tenant.gate.ended, pages)
            else:
                for _ in range(pages):
                    tenant.memory.evict()
            moved += batch
            await self.bus.move(Way.OUT, batch)
            self._require()
        return moved

    def shares(self, process: Process) -> frozenset[Hashable] | None:
        tenant = self._tenants.get(process)
        return tenant.shared if tenant is not None and tenant.is_gated else None

    def share(self, process: Process, names: Iterable[Hashable]) -> None:
        """Has a program share memory of these names with all others that do. Of what it has nothing follows."""
        self._tenant(process).shared = frozenset(names)

    async def prepare(self, process: Process, nbytes: int) -> int:
        self._require()
        tenant = self._tenants.get(process)
        page, moved = self.config.page, 0
        while tenant is not None and not tenant.leaving and self._tenants.get(process) is tenant:
            most = min(self.config.batch, nbytes - moved) // page
            batch = 0
            for number in tenant.memory.missing(tenant.gate.ended, most):
                if not self.booked.move_in(process, self.info.index, page, self.bus.usec(Way.IN, page)):
                    break
                tenant.memory.fetch(number)
                batch += page
            if not batch:
                break
            moved += batch
            await self.bus.move(Way.IN, batch)
            self._require()
        return moved

    async def migrate(self, process: Process, target: Gpu) -> None:
        if not isinstance(target, SoftGpu) or target.machine is not self.machine:
            raise fail(errno.EXDEV)
        if target.config.page != self.config.page:
            raise fail(errno.EXDEV)
        self._living(process)
        async with self.machine.gate(process).shut():
            tenant = self._tenant(process)
            tenant.leaving = True
            self._follow(tenant)
            tenant.gate.open()  # it leaves its turn; what waited there waits outside of this gate now
            try:
                # Out and in again, as a checkpoint and a restore: what is in the host stays there.
                await self.bus.move(Way.OUT, tenant.memory.resident * self.config.page)
                await target.bus.move(Way.IN, tenant.memory.resident * self.config.page)
                self._require()
                target._require()
                if self._tenants.get(process) is not tenant or target._holds_work(process):
                    raise fail(errno.EEXIST if self._tenants.get(process) is tenant else errno.ESRCH)
                self._pass_on(process, target)
            finally:
                tenant.leaving = False
                if self._tenants.get(process) is tenant:
                    self._follow(tenant)

    async def finds(self, process: Process) -> bool | None:
        return self._holds_work(process)

    def _holds_work(self, process: Process) -> bool:
        """Whether a process has contexts or memory here: two of one would have to become one."""
        tenant = self._tenants.get(process)
        return tenant is not None and tenant.holds_work

    def _pass_on(self, process: Process, target: SoftGpu) -> None:
        """The tenant is the other's from now on, attached and with its timeslices; nothing of it is left here."""
        self._engine.advance()
        target._engine.advance()
        self.booked.take_down(process, self.info.index)
        tenant = self._tenants.pop(process)
        tenant.memory.transfer(target._frames, target._slots)
        for tsg in tenant.tsgs.values():
            target._engine.add(tsg, self._engine.remove(tsg))
        target._tenants[process] = tenant
        tenant.leaving = False
        target._take(process, Engines.NONE)
        tenant.split(target.config.timeslice_us)
        self.machine.exchange(process, self.info.index, target.info.index)

    def forget(self, process: Process) -> None:
        self.machine.forget(process)
        tenant = self._tenants.pop(process, None)
        if tenant is not None:
            self._engine.advance()
            for tsg in tenant.tsgs.values():
                self._engine.remove(tsg)
            tenant.memory.clear()
            tenant.lose()

    def hand_over(self) -> None:
        pass  # it ends with its daemon, whatever comes then
