"""Hardware of a software GPU as programs use it: contexts, pages, launches, copies.

Time is trio's: the wall clock in a mount, a MockClock in tests.
"""

from __future__ import annotations

import errno
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

import trio

from backend.common.errors import fail
from backend.core.protocols import Bookkeeping
from backend.core.records import GpuInfo
from backend.core.workingset import WorkingSet
from backend.process import procfs
from backend.process.identity import Process
from backend.soft.bus import Bus, Way
from backend.soft.config import SoftConfig
from backend.soft.engine import Engine
from backend.soft.machine import Machine
from backend.soft.pages import Memory, Store
from backend.soft.runlist import US, Tsg
from backend.soft.tenant import Tenant

T = TypeVar("T")

PAGES_AT_ONCE = 64
"""Number of pages that are worked on before other tasks run."""

KERNEL_MOST_US = 60_000_000
"""Longest kernel, microseconds."""


AHEAD_LEAST_S, AHEAD_MOST_S = 0.001, 0.01
"""Time between two checks whether a program is still too far ahead, at least and at most, seconds: its bound may end
meanwhile, or its turn.
"""


class Hardware:
    """The hardware of one GPU; :class:`backend.soft.gpu.SoftGpu` adds the levers and reports to the books."""

    def __init__(self, index: int = 0, config: SoftConfig | None = None, machine: Machine | None = None) -> None:
        """`machine` is shared by all GPUs between which programs can move; without it there is only this GPU."""
        self.config = config or SoftConfig()
        self.machine = machine or Machine()
        self.info = GpuInfo(
            index=index,
            uuid=self.config.uuid_of(index),
            name="ggroupfs software GPU",
            pci="none",
            capacity=self.config.capacity,
            timeslice_default_us=self.config.timeslice_us,
            timeslice_min_us=10,
            granule=self.config.page,
            sms=self.config.sms,
            sm_step=self.config.sm_step,
        )
        self._frames, self._slots = Store(), Store()
        self._engine = Engine(self.config.switch_us * US)
        self.bus = Bus(self.config.out_bytes_per_s, self.config.in_bytes_per_s, self._engine)
        self._tenants: dict[Process, Tenant] = {}
        self._bookkeeper: Bookkeeping | None = None
        self.lost = False

    # Contexts

    async def open_context(
        self, process: Process, channels: int, progress: Callable[[int], None], *, gated: bool = False
    ) -> int:
        """Open a context for a process; return the number of its TSG. `progress` is called with the number of kernels
        finished so far.

        `gated` says that the client knows that a launch may wait for the program's next turn. ENODEV; ESRCH for a
        process that is gone.
        """
        self._require()
        await self.booked.arrive(process, self.info.index)
        tenant = self._living(process)
        if not tenant.tsgs:
            await self.booked.enter(process, procfs.descent(process.pid).uid)
            if self._living(process) is not tenant:
                raise fail(errno.ESRCH)
            tenant.space = self.booked.space_of(process)
        tsg = Tsg(self.config.timeslice_us * US, channels, tenant.attached)
        number = next(self.machine.tsgs)
        self._engine.advance()
        tenant.tsgs[number] = tsg
        if not gated:
            tenant.ungated.add(number)
        tenant.regate()
        self._engine.add(tsg, progress, tenant.space)
        tenant.split(self.config.timeslice_us)
        return number

    def close_context(self, process: Process, number: int) -> None:
        """Close a context and drop its queue. ENOENT if there is none."""
        tenant = self._tenant(process)
        if number not in tenant.tsgs:
            raise fail(errno.ENOENT)
        self._engine.advance()
        tsg = tenant.tsgs.pop(number)
        tenant.ungated.discard(number)
        tenant.regate()
        tenant.retire(tsg)
        self._engine.remove(tsg)
        tenant.split(self.config.timeslice_us)
        tenant.revive()

    # Memory

    async def allocate(self, process: Process, nbytes: int) -> range:
        """Allocate `nbytes` for a process; return the numbers of the pages. EINVAL for a size of 0 or less; ENOMEM if
        the limits refuse a page, and then none is allocated.
        """
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
                tenant.memory.free(number)  # it was placed but not charged
                self.free(process, range(pages.start, number))
            else:
                tenant.memory.clear()  # the process died meanwhile, and its books are gone
            raise
        return pages

    def free(self, process: Process, pages: Iterable[int]) -> None:
        """Free pages. EFAULT for a missing page; those before it are freed."""
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
        """Store a stamp in a page. EFAULT for a missing page."""
        _mapped(self._living(process).memory.write, page, stamp)

    def read(self, process: Process, page: int) -> int:
        """Return the stamp in a page. EFAULT for a missing page."""
        return _mapped(self._living(process).memory.read, page)

    def working_set(self, process: Process) -> WorkingSet:
        """Return how much a process used in its last turn, and how much of that is on the GPU; empty if it has nothing
        here.
        """
        tenant = self._tenants.get(process)
        if tenant is None:
            return WorkingSet()
        used, resident = tenant.memory.used_in(tenant.gate.ended)
        missed, over = tenant.misses
        page = self.config.page
        return WorkingSet(used * page, resident * page, missed=missed * page, over=over * page)

    # Work, which waits for the turn of its program

    async def let_through(self, process: Process) -> None:
        """Return once a copy of a process need not wait for its turn, or the process is gone."""
        while (tenant := self._tenants.get(process)) is not None and tenant.gate.is_closed:
            await tenant.gate.change()

    async def let_launch(self, process: Process) -> None:
        """Return once a kernel of a process need not wait, either for its turn or for its run-ahead to shrink, or the
        process is gone.
        """
        while True:
            await self.let_through(process)
            tenant = self._tenants.get(process)
            if tenant is None or (ahead_us := self._ahead_us(tenant)) <= 0:
                return
            await trio.sleep(max(AHEAD_LEAST_S, min(ahead_us / 1e6, AHEAD_MOST_S)))

    def _ahead_us(self, tenant: Tenant) -> float:
        """Return :meth:`Tenant.ahead_us` as of now."""
        if tenant.gate.ahead_us < math.inf:
            self._engine.advance()
        return tenant.ahead_us

    def _is_late(self, tenant: Tenant) -> bool:
        if tenant.gate.is_closed:
            self._engine.advance()
        return tenant.is_late

    async def launch(self, process: Process, number: int, kernels: int, us: int, pages: range) -> None:
        """Queue kernels that each touch `pages`, in the turn of the process, as its run-ahead allows. Errors as of
        :meth:`launch_some`.
        """
        while True:
            await self.let_launch(process)
            kernels -= await self.launch_some(process, number, kernels, us, pages)
            if not kernels:
                return

    async def launch_some(self, process: Process, number: int, kernels: int, us: int, pages: range) -> int:
        """Queue as many of `kernels` kernels as need not wait; return their number. Each takes `us` microseconds and
        touches `pages`. ENOENT for the TSG, EINVAL for a number or a time out of range, EAGAIN for a full queue, EFAULT
        for a missing page.

        A page in the host comes back if the limits have room for it; otherwise each kernel reads it over the bus.
        """
        tenant = self._living(process)
        tsg = tenant.tsgs.get(number)
        if tsg is None:
            raise fail(errno.ENOENT)
        if not (kernels > 0 and 0 < us <= KERNEL_MOST_US):
            raise fail(errno.EINVAL)
        us = self._stretched_us(tenant, us)
        ahead_us = self._ahead_us(tenant)
        if len(tsg.queue) + kernels > self.config.queue:
            raise fail(errno.EAGAIN)
        if tenant.gate.is_closed or ahead_us > 0:
            return 0
        with tenant.gate.passed():
            once, every = await self._touch(process, tenant, pages)
            self._living(process)  # raises if the GPU or the process was lost meanwhile
            self._engine.advance()
            room_us = -tenant.ahead_us - once  # other kernels may have been queued meanwhile
            through = kernels if room_us == math.inf else min(kernels, 1 + max(0, int(room_us / (us + every))))
            if once:
                tsg.launch(1, (us + every + once) * US, (every + once) * US)
            tsg.launch(through - bool(once), (us + every) * US, every * US)
        self._engine.wake()
        return through

    def _stretched_us(self, tenant: Tenant, us: int) -> int:
        """Return how long a kernel takes on the SMs that the tenant may use, of one that all of them take `us` for."""
        sms = self.info.sms_of(tenant.sm_max)
        return -(-us * self.info.sms // sms) if sms else us

    async def _touch(self, process: Process, tenant: Tenant, pages: range) -> tuple[int, int]:
        """Use pages, and fetch those in the host for which there is room. Return the microseconds on the bus that this
        takes once, and those that each kernel takes for the pages that remain in the host. EFAULT for a missing page.
        """
        transfer = self.bus.usec(Way.IN, self.config.page)
        once = every = 0
        for page in pages:
            if (page - pages.start) % PAGES_AT_ONCE == PAGES_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            if _mapped(tenant.memory.use, page, tenant.gate.turn):
                continue
            if self.booked.move_in(process, self.info.index, self.config.page, transfer):
                tenant.memory.fetch(page)
                once += transfer
            else:
                every += transfer
        return once, every

    async def copy(self, process: Process, nbytes: int, way: Way = Way.OUT) -> None:
        """Copy `nbytes` between the GPU and the host for a program, in its turn. Each piece waits while its copy
        engine, the engine besides GR, is off the runlist. ENODEV; ESRCH for a process that is gone.
        """
        await self.let_through(process)
        with self._living(process).gate.passed():
            while nbytes:
                tenant = self._living(process)
                await tenant.copies()
                self._living(process)  # raises if the GPU or the process was lost meanwhile
                piece = min(nbytes, self.config.batch)
                await self.bus.move(way, piece)
                tenant.copied += piece
                nbytes -= piece

    # The small parts

    def _require(self) -> None:
        if self.lost:
            raise fail(errno.ENODEV)

    def _living(self, process: Process) -> Tenant:
        """Return the tenant of a process that may use the GPU. ENODEV."""
        self._require()
        tenant = self._tenant(process)
        if tenant.dead:
            raise fail(errno.ENODEV)
        return tenant

    def _tenant(self, process: Process) -> Tenant:
        """Return the tenant of a process, made if it is in the books. ProcessLookupError for a process that is gone or
        unknown.
        """
        tenant = self._tenants.get(process)
        if tenant is None:
            if not self.booked.knows(process, self.info.index):
                raise fail(errno.ESRCH)
            tenant = self._tenants[process] = Tenant(Memory(self._frames, self._slots))
        return tenant

    @property
    def booked(self) -> Bookkeeping:
        """The bookkeeper to which the use of the GPU by programs is reported. ENODEV before the GPU runs."""
        if self._bookkeeper is None:
            raise fail(errno.ENODEV)
        return self._bookkeeper


def _mapped(access: Callable[..., T], *args: int) -> T:
    """Return the result of a memory access, with EFAULT instead of KeyError for a missing page."""
    try:
        return access(*args)
    except KeyError:
        raise fail(errno.EFAULT) from None
