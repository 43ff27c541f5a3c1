"""SoftGpu: a GPU in software. Real pages with real contents, a real runlist, and a clock that may be virtual.

Time is trio's: the wall clock in a mount, a MockClock in tests.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import trio

from backend.common.errors import fail
from backend.common.lasting import lasting
from backend.core.protocols import Bookkeeping, Gpu
from backend.core.reasons import Engines
from backend.core.records import Activity, Capability, Footprint, GpuInfo
from backend.core.settings import SETTINGS, Lever
from backend.core.turns import TurnEnd
from backend.process.identity import Process
from backend.soft.config import SoftConfig
from backend.soft.engine import Engine
from backend.soft.machine import Machine
from backend.soft.pages import Memory, Store
from backend.soft.runlist import US, Tsg
from backend.soft.tenant import NOTHING, Tenant

T = TypeVar("T")

log = logging.getLogger(__name__)

ENFORCED = ("gmem.reclaim", "usermemfd", *(one.control for one in SETTINGS if one.control and one.on_software_gpu))
_ALONE = dict.fromkeys(ENFORCED, Capability.ENFORCED) | {"compute.migrate": Capability.UNSUPPORTED}
_AMONG_OTHERS = _ALONE | {"compute.migrate": Capability.ENFORCED}
PAGES_AT_ONCE = 64
"""Pages worked on before others have a turn."""

KERNEL_MOST_US = 60_000_000
"""Microseconds that one kernel may take."""

FAULTS_S = 0.02
"""Seconds between two looks into the directory of faults, where there is one."""


class SoftGpu:
    """See :class:`backend.core.protocols.Gpu`, which it implements, and the module."""

    def __init__(self, index: int = 0, config: SoftConfig | None = None, machine: Machine | None = None) -> None:
        """`machine` is that of all GPUs between which programs can move; without it there is no other."""
        self.config = config or SoftConfig()
        self.machine = machine or Machine()
        self.info = GpuInfo(
            index=index,
            uuid=_uuid(index, self.config.identity),
            name="ggroupfs software GPU",
            pci="none",
            capacity=self.config.capacity,
            timeslice_default_us=self.config.timeslice_us,
            timeslice_min_us=10,
            granule=self.config.page,
        )
        self._frames, self._slots = Store(), Store()
        self._engine = Engine(self.config.switch_us * US)
        self._tenants: dict[Process, Tenant] = {}
        self._bookkeeper: Bookkeeping | None = None
        self.lost = False

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

    # A GPU that falls off the bus, and comes back by a reset

    def lose(self) -> None:
        """What is queued is never finished, what is in memory is lost, and every call gives ENODEV."""
        self._engine.advance()
        self.lost = True
        for tenant in self._tenants.values():
            tenant.dead = True
            for tsg in tenant.tsgs.values():
                tsg.drop()
        log.error("GPU %d is lost", self.info.index)
        self.booked.presence(self.info.index)

    def restore(self) -> None:
        """It works again, for contexts that are made from now on."""
        self.lost = False
        log.warning("GPU %d is back", self.info.index)
        self.booked.presence(self.info.index)

    def _require(self) -> None:
        if self.lost:
            raise fail(errno.ENODEV)

    def _living(self, process: Process) -> Tenant:
        """What is kept for a process that may use the GPU. ENODEV."""
        self._require()
        tenant = self._tenant(process)
        if tenant.dead:
            raise fail(errno.ENODEV)
        return tenant

    # Levers

    def activity(self, process: Process) -> Activity:
        tenant = self._tenants.get(process)
        if tenant is None:
            return NOTHING
        self._engine.advance()
        return tenant.activity()

    def manages(self, process: Process) -> bool:
        return True

    def footprint(self, process: Process) -> Footprint:
        return Footprint()

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

    async def end_turn(self, process: Process, bound_us: int) -> TurnEnd:
        self._require()
        return TurnEnd.UNGATED

    async def begin_turn(self, process: Process) -> None:
        self._require()

    def _take(self, process: Process, engines: Engines) -> None:
        tenant = self._tenant(process)
        tenant.asked = engines
        self._follow(tenant)

    def _follow(self, tenant: Tenant) -> None:
        self._engine.advance()  # up to now it ran, from now on it does not
        tenant.follow()
        self._engine.wake()

    async def copy(self, process: Process, nbytes: int) -> None:
        """Copies memory between the GPU and the host for a program, in pieces that each wait while its copy engine is
        off the runlist: the engine beside GR. ENODEV; ESRCH for a process that is gone."""
        while nbytes:
            tenant = self._living(process)
            await tenant.copies()
            piece = min(nbytes, self.config.batch)
            await trio.sleep(self._transfer_us(piece) / 1e6)
            tenant.copied += piece
            nbytes -= piece

    async def reclaim(self, process: Process, nbytes: int) -> int:
        self._require()
        tenant = self._tenants.get(process)
        if tenant is None or tenant.leaving:
            return 0
        bookkeeper, page = self.booked, self.config.page
        moved = 0
        while moved < nbytes and tenant.memory.resident:
            pages = min(self.config.batch // page, -(-(nbytes - moved) // page), tenant.memory.resident)
            batch = pages * page
            try:
                bookkeeper.moved_out(process, self.info.index, batch, self._transfer_us(batch))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break  # swap.max shrank, or another reclaim took the room, since this one was planned
            for _ in range(pages):
                tenant.memory.evict()
            moved += batch
            await trio.sleep(self._transfer_us(batch) / 1e6)
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
            try:
                # Out and in again, as a checkpoint and a restore: what is in the host stays there.
                await trio.sleep(2 * self._transfer_us(tenant.memory.resident * self.config.page) / 1e6)
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

    def hand_over(self) -> None:
        pass  # it ends with its daemon, whatever comes then

    # What tenants do, through backend.soft.server

    async def open_context(self, process: Process, channels: int, progress: Callable[[int], None]) -> int:
        """A context for a process; returns the number of its TSG. `progress` is told the kernels finished so far."""
        self._require()
        await self.booked.arrive(process, self.info.index)
        tenant = self._living(process)
        tsg = Tsg(self.config.timeslice_us * US, channels, tenant.attached)
        number = next(self.machine.tsgs)
        self._engine.advance()
        tenant.tsgs[number] = tsg
        self._engine.add(tsg, progress)
        tenant.split(self.config.timeslice_us)
        return number

    def close_context(self, process: Process, number: int) -> None:
        """A context is gone, with what it had queued. ENOENT where there is none."""
        tenant = self._tenant(process)
        if number not in tenant.tsgs:
            raise fail(errno.ENOENT)
        self._engine.advance()
        tsg = tenant.tsgs.pop(number)
        tenant.retire(tsg)
        self._engine.remove(tsg)
        tenant.split(self.config.timeslice_us)
        tenant.revive()

    async def allocate(self, process: Process, nbytes: int) -> range:
        """The pages that hold `nbytes` for a process. ENOMEM where the limits refuse them, and then none of them."""
        tenant, bookkeeper, page = self._living(process), self.booked, self.config.page
        count = -(-nbytes // page)
        if count <= 0:
            raise fail(errno.EINVAL)
        if (len(tenant.memory) + count) * page > self.config.overcommit * self.config.capacity:
            raise fail(errno.ENOMEM)
        pages = tenant.memory.reserve(count)
        try:
            for number in pages:
                if (number - pages.start) % PAGES_AT_ONCE == PAGES_AT_ONCE - 1:
                    await trio.lowlevel.checkpoint()
                tenant.memory.place(number)
                await bookkeeper.charge(process, self.info.index, page)
        except OSError:
            if self._tenants.get(process) is tenant:
                tenant.memory.free(number)  # placed, but not charged
                self.free(process, range(pages.start, number))
            else:
                tenant.memory.clear()  # it died meanwhile, and its books with it
            raise
        return pages

    def free(self, process: Process, pages: Iterable[int]) -> None:
        """Frees pages. EFAULT for one that is not there; those before it are freed."""
        tenant, bookkeeper = self._tenant(process), self.booked
        freed = Counter[bool]()
        try:
            for number in pages:
                freed[_mapped(tenant.memory.free, number)] += 1
        finally:
            if self._tenants.get(process) is tenant:
                for resident, count in freed.items():
                    bookkeeper.uncharge(process, self.info.index, count * self.config.page, swapped=not resident)
                tenant.revive()

    def write(self, process: Process, page: int, stamp: int) -> None:
        """Stores a stamp in a page. EFAULT where there is none."""
        _mapped(self._living(process).memory.write, page, stamp)

    def read(self, process: Process, page: int) -> int:
        """The stamp in a page. EFAULT where there is none."""
        return _mapped(self._living(process).memory.read, page)

    async def launch(self, process: Process, number: int, kernels: int, us: int, pages: range) -> None:
        """Queues kernels that each touch `pages`. ENOENT for the TSG, EAGAIN for a full queue, EFAULT for a page.

        A page in the host comes back if the limits have room for it; else each kernel reaches over PCIe for it.
        """
        tenant = self._living(process)
        tsg = tenant.tsgs.get(number)
        if tsg is None:
            raise fail(errno.ENOENT)
        if not (kernels > 0 and 0 < us <= KERNEL_MOST_US):
            raise fail(errno.EINVAL)
        if len(tsg.queue) + kernels > self.config.queue:
            raise fail(errno.EAGAIN)
        transfer = self._transfer_us(self.config.page)
        once = every = 0
        for page in pages:
            if (page - pages.start) % PAGES_AT_ONCE == PAGES_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            _mapped(tenant.memory.read, page)
            if tenant.memory.is_resident(page):
                continue
            if self.booked.move_in(process, self.info.index, self.config.page, transfer):
                tenant.memory.fetch(page)
                once += transfer
            else:
                every += transfer
        self._living(process)  # still
        self._engine.advance()
        if once:
            tsg.launch(1, (us + every + once) * US)
            kernels -= 1
        tsg.launch(kernels, (us + every) * US)
        self._engine.wake()

    # The small parts

    def _tenant(self, process: Process) -> Tenant:
        """What is kept for a process; ProcessLookupError for one that is gone, or never was."""
        tenant = self._tenants.get(process)
        if tenant is None:
            if not self.booked.knows(process, self.info.index):
                raise fail(errno.ESRCH)
            tenant = self._tenants[process] = Tenant(Memory(self._frames, self._slots))
        return tenant

    @property
    def booked(self) -> Bookkeeping:
        """The books, which it asks for what programs do."""
        if self._bookkeeper is None:
            raise fail(errno.ENODEV)
        return self._bookkeeper

    def _transfer_us(self, nbytes: int) -> int:
        return nbytes * 1_000_000 // self.config.pcie


def _uuid(index: int, identity: str) -> str:
    if not identity:
        return f"GPU-50f79900-0000-4000-8000-{index:012x}"
    name = os.fsencode(f"ggroup:{identity}:{index}")  # uuid5() takes no path that is not UTF-8
    return f"GPU-{uuid.UUID(bytes=hashlib.sha1(uuid.NAMESPACE_URL.bytes + name).digest()[:16], version=5)}"


def _mapped(access: Callable[..., T], *args: int) -> T:
    """The result of a memory access; EFAULT instead of the KeyError of a page that is not there."""
    try:
        return access(*args)
    except KeyError:
        raise fail(errno.EFAULT) from None
