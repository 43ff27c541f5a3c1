"""SoftGpu: a GPU in software, with pages that have contents, a runlist, and a clock that may be virtual.

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
from backend.core.reasons import Engines, Off
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
"""Shortest time between two checks whether a program has drained, seconds."""

STUCK_S = 0.01
"""Time after which a program is found not to drain any more, because it was taken off the runlist, seconds."""

FAULTS_S = 0.02
"""Time between two looks into the directory of faults, if there is one, seconds."""


class SoftGpu(Hardware):
    """A GPU in software; implements :class:`backend.core.protocols.Gpu`."""

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
        """Lose the GPU: queued work is never finished, the contents of its memory are lost, and every call raises
        ENODEV.
        """
        self._engine.advance()
        self.lost = True
        for tenant in self._tenants.values():
            tenant.lose()
        log.error("GPU %d is lost", self.info.index)
        self.booked.presence(self.info.index)

    def restore(self) -> None:
        """Bring the GPU back; it works for contexts that are made from now on."""
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
        return False  # it moves in parallel with the work of the program

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
        self._engine.advance()  # the program ran up to now, and does not from now on
        tenant.follow()
        self._engine.wake()

    def note_reasons(self, process: Process, off: Off) -> None:
        pass  # its programs' work ends with the daemon

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
            return TurnEnd.UNGATED  # the gate was opened meanwhile
        return TurnEnd.LATE if self._is_late(tenant) else TurnEnd.DRAINED

    async def _drained(self, tenant: Tenant) -> None:
        """Return once no work of a program with a closed gate runs."""
        while True:
            if not self._is_late(tenant):
                return
            await trio.sleep(max(tenant.pending / 1e9, DRAIN_S))  # it takes at least as long as this

    async def _moves(self, tenant: Tenant) -> bool:
        """Return whether memory of a program can move. If work that it launched before the end of its turn is still
        running, wait for that first; False if the work has stopped before its end.
        """
        while True:
            if not self._is_late(tenant) or tenant.is_stuck:
                return not tenant.is_late
            await trio.sleep(min(max(tenant.pending / 1e9, DRAIN_S), STUCK_S))

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        """Ignore ranks: a software GPU has no busy periods, and the better program has the engine as soon as it has
        work.
        """

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
                break  # since the plan, swap.max shrank or another reclaim took the room
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
        """Let a program share memory under these names with all programs that use the same names. Its own memory is
        unaffected.
        """
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
            tenant.gate.open()  # it leaves its turn; launches that waited at the gate now wait outside of it
            try:
                # Out and in again, like a checkpoint and a restore; memory in the host stays there.
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
        """Return whether a process has contexts or memory here: a second tenant of the process cannot be merged with
        it.
        """
        tenant = self._tenants.get(process)
        return tenant is not None and tenant.holds_work

    def _pass_on(self, process: Process, target: SoftGpu) -> None:
        """Move the tenant to another GPU, attached and with its timeslices; nothing of it stays here."""
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
        pass  # the software GPU ends with its daemon, whatever comes next
