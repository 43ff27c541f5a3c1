"""One GPU of a stock NVIDIA driver: finds the processes that use it, and pulls the levers on their TSGs.

A lever records what is wanted and then makes the hardware follow, in a thread and with a deadline; the same step runs
again twice a second for every process with a policy, for TSGs that came later and for tenants that undid it. Whatever
thread comes last applies what is wanted then, so a call that was given up can do no harm when it wakes up.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import attrs
import trio

from backend.cuda.managed import Managed
from backend.identity import Process
from backend.nvidia import levers, rm
from backend.nvidia.deadline import Deadline
from backend.nvidia.discover import TICK, Census, ClientCounter, Handles, Tsg
from backend.nvidia.levers import Key
from backend.nvidia.nvml import Nvml
from backend.nvidia.readback import ChannelStates
from backend.nvidia.selftest import Verdict, prove
from backend.protocols import Host
from backend.records import Activity, Capability, Footprint, GpuInfo

log = logging.getLogger(__name__)

GRANULE = 2 << 20
"""What CUDA's virtual memory management moves, and so the library in a program."""
POLL = 0.2
"""Seconds between two looks at NVML's list (50 us of CPU each): a process appears this long after its context."""
KEEP = 0.5
"""Seconds between two looks for new TSGs of processes that have a policy."""
SETTLE = 0.02
"""Seconds from a lever to the wide look that follows it: not in the way of another lever right behind."""
IDLE_LOOKS = 4
"""Processes without one are looked at this many times less often."""
FORCED_LOOKS = 20
"""Every so many looks are made although the host's totals stand still."""
NEWCOMER = 2.0
"""Seconds for which a program on NVML's list may be without a TSG."""
LEVER_DEADLINE = 2.0
"""Seconds for a lever; the usual one takes 2 ms."""
LOOK_DEADLINE = 10.0
"""Seconds for a wide look; the first one on a host that ran for months can take some."""


@attrs.define(eq=False)
class Tenant:
    """A process on this GPU, and what is wanted for it."""

    process: Process
    """Who."""
    handles: Handles
    """Its RM objects, on every GPU."""
    levers: Deadline
    """For calls that act on it."""
    looks: Deadline
    """For looks at it."""
    frozen: bool = False
    """Wanted: off the runlist."""
    timeslice_us: int = 0
    """Wanted: microseconds in a round, 0 the default."""
    off: set[Key] = attrs.field(factory=set)
    """Its channels that were taken off the runlist."""
    adopted: bool = False
    """Whether it was asked for channels that an earlier daemon left off."""
    touched_timeslice: bool = False
    """Some of its TSGs may have another timeslice than their own."""
    activity: Activity = attrs.field(factory=Activity)
    """As last seen."""
    acting: threading.Lock = attrs.field(factory=threading.Lock)
    """Held while the hardware is made to follow."""

    @property
    def has_policy(self) -> bool:
        """Whether anything is wanted, or left over."""
        return self.frozen or self.timeslice_us != 0 or bool(self.off) or self.touched_timeslice


class NvidiaGpu:
    """See :class:`backend.protocols.Gpu`."""

    def __init__(self, info: GpuInfo, gpu_id: int, nvml: Nvml, census: Census, states: ChannelStates) -> None:
        self.info = info
        self.managed = Managed(info, self._is_frozen)
        """The programs whose memory can be moved; others the driver keeps where it is."""
        self._states = states
        self.verdicts: Sequence[Verdict] = ()
        self._gpu_id = gpu_id
        self._nvml = nvml
        self._census = census
        self._tenants: dict[Process, Tenant] = {}
        self._present: dict[Process, float] = {}  # since when NVML lists it
        self._held: dict[Process, int] = {}  # bytes, as NVML last said
        self._wake = trio.Event()
        self._nvml_answers = True
        self._began = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICK)

    def adopt(self, verdicts: Sequence[Verdict]) -> None:
        """Takes the outcome of the self-test as this GPU's capabilities."""
        self.verdicts = tuple(verdicts)

    def capabilities(self) -> Mapping[str, Capability]:
        return {verdict.control: verdict.capability for verdict in self.verdicts}

    # ---- finding processes -----------------------------------------------------------------------------------

    async def run(self, host: Host, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.managed.host = host
        try:
            async with trio.open_nursery() as nursery:
                async with trio.open_nursery() as first:
                    await self._poll(host, first)
                task_status.started()
                nursery.start_soon(self._keep)
                while True:
                    await trio.sleep(POLL)
                    await self._poll(host, nursery)
        finally:
            # Nobody is left to thaw them: a frozen program would stay so until it is killed.
            with trio.CancelScope(shield=True):
                await self._release_all()

    async def _poll(self, host: Host, nursery: trio.Nursery) -> None:
        try:
            usage = await self._nvml.usage(self.info.index)
        except OSError as error:
            if self._nvml_answers:
                log.warning("GPU %d: no list of processes: %s", self.info.index, error)
            self._nvml_answers = False
            return
        if not self._nvml_answers:
            log.info("GPU %d: NVML answers again", self.info.index)
            self._nvml_answers = True
        listed = set()
        for pid, nbytes in usage.items():
            try:
                process = Process(pid, self._census.system.start_time(pid))
            except ProcessLookupError:
                continue
            listed.add(process)
            if process not in self._present:
                self._present[process] = trio.current_time()
                nursery.start_soon(self._welcome, host, process, nbytes)
            elif nbytes is not None:
                self._see(process, nbytes)
        for process in self._present.keys() - listed:
            self._see(process, 0)

    def _see(self, process: Process, nbytes: int) -> None:
        """The driver says that a process holds so much; of a program that says so itself, it is compared with that."""
        self._held[process] = nbytes
        self.managed.look(process, nbytes)

    async def _welcome(self, host: Host, process: Process, nbytes: int | None) -> None:
        tenant = self._tenant(process)
        try:
            try:
                await self._look(tenant)
            except ProcessLookupError:
                raise
            except OSError as error:  # it is there, whether or not the levers will reach it
                log.warning("pid %d on GPU %d: its TSGs are unknown: %s", process.pid, self.info.index, error)
            await host.arrive(process, self.info.index)
        except ProcessLookupError:
            return
        if nbytes is not None and process in self._present:
            self._see(process, nbytes)

    # ---- keeping up with them --------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Applies policy to TSGs that came later, and again where a tenant undid it."""
        turn = 0
        due = trio.current_time() + KEEP
        while True:
            with trio.move_on_at(due):
                await self._wake.wait()
                await trio.sleep(SETTLE)
            self._wake = trio.Event()
            woken = trio.current_time() < due
            if not woken:
                turn += 1
                due = trio.current_time() + KEEP
            for tenant in list(self._tenants.values()):
                if not tenant.has_policy and (woken or turn % IDLE_LOOKS):
                    continue
                try:
                    known = self._mine(tenant)
                    await self._look(tenant, force=not woken and turn % FORCED_LOOKS == 0)
                    # Right after a lever only what it did not see; a lever that follows shall not wait for this.
                    if tenant.has_policy and (not woken or self._mine(tenant) != known):
                        await tenant.levers.call(partial(self._enforce, tenant, turn))
                except ProcessLookupError:
                    continue
                except OSError as error:
                    log.debug("pid %d on GPU %d: %s", tenant.process.pid, self.info.index, error)

    async def _look(self, tenant: Tenant, force: bool = False) -> None:
        def look() -> None:
            with self._alive(tenant):
                tenant.handles.wide(force)
                if not tenant.adopted:
                    with tenant.acting:
                        self._adopt_channels(tenant)
            self._count(tenant)

        await tenant.looks.call(look)

    def _adopt_channels(self, tenant: Tenant) -> None:
        """Learns, once, what a daemon before us left off: disabled once more it would stay so. `acting` is held."""
        tsgs = self._mine(tenant)
        if tsgs and not tenant.adopted:
            tenant.adopted = True
            if tenant.process.start < self._began:
                tenant.off |= levers.left_off(tsgs, self._states.enabled)

    async def _release_all(self) -> None:
        for tenant in self._tenants.values():
            tenant.frozen = False
            tenant.timeslice_us = 0
            if tenant.has_policy:
                try:
                    await tenant.levers.call(partial(self._enforce, tenant))
                except ProcessLookupError:
                    continue
                except OSError as error:
                    log.warning("pid %d on GPU %d was not released: %s", tenant.process.pid, self.info.index, error)

    def _tenant(self, process: Process) -> Tenant:
        tenant = self._tenants.get(process)
        if tenant is None:
            what = f"the driver, for pid {process.pid},"
            tenant = Tenant(
                process=process,
                handles=self._census.of(process),
                levers=Deadline(what, LEVER_DEADLINE),
                looks=Deadline(what, LOOK_DEADLINE),
            )
            self._tenants[process] = tenant
        return tenant

    def forget(self, process: Process) -> None:
        self._tenants.pop(process, None)
        self._present.pop(process, None)
        self._held.pop(process, None)
        self.managed.forget(process)
        self._census.forget(process)

    # ---- what is known ---------------------------------------------------------------------------------------

    def tsgs(self, process: Process) -> Sequence[Tsg]:
        """The TSGs of `process` on this GPU, as last seen."""
        tenant = self._tenants.get(process)
        return self._mine(tenant) if tenant else []

    def activity(self, process: Process) -> Activity:
        tenant = self._tenants.get(process)
        activity = tenant.activity if tenant else Activity()
        counts = self.managed.counts(process)
        if counts is None:
            return activity
        submitted, finished = counts
        pending = submitted - finished
        return attrs.evolve(activity, submitted=submitted, finished=finished, pending=pending, managed=True)

    def manages(self, process: Process) -> bool:
        return process in self.managed

    def footprint(self, process: Process) -> Footprint:
        if process in self.managed:
            return self.managed.footprint(process)
        held = self._held.get(process, 0)
        return Footprint(movable=0, implicit=held, unmovable=held, disputed=0)

    def offer(self, room: Callable[[Process], int]) -> None:
        self.managed.offer(room)

    def _is_frozen(self, process: Process) -> bool:
        """Whether its work is off the GPU: the copies that move memory are, too, and would wait for the thaw."""
        tenant = self._tenants.get(process)
        return tenant is not None and tenant.frozen

    def _mine(self, tenant: Tenant) -> Sequence[Tsg]:
        return [tsg for tsg in tenant.handles.tsgs() if tsg.gpu_id == self._gpu_id]

    def _count(self, tenant: Tenant) -> None:
        tsgs = self._mine(tenant)
        tenant.activity = Activity(
            tsgs=len(tsgs),
            channels=sum(len(tsg.channels) for tsg in tsgs),
            attached=sum(not any((tsg.client, channel) in tenant.off for channel in tsg.channels) for tsg in tsgs),
        )

    # ---- the levers ------------------------------------------------------------------------------------------

    async def set_timeslice(self, process: Process, us: int) -> None:
        await self._change(process, timeslice_us=us)

    async def detach(self, process: Process) -> None:
        await self._change(process, frozen=True)

    async def attach(self, process: Process) -> None:
        await self._change(process, frozen=False)

    async def reclaim(self, process: Process, nbytes: int) -> int:
        return await self.managed.reclaim(process, nbytes)

    async def _change(self, process: Process, *, frozen: bool | None = None, timeslice_us: int | None = None) -> None:
        tenant = self._tenant(process)
        before = (tenant.frozen, tenant.timeslice_us)
        if frozen is not None:
            tenant.frozen = frozen
        if timeslice_us is not None:
            tenant.timeslice_us = timeslice_us
        try:
            await tenant.levers.call(partial(self._enforce, tenant))
            if (tenant.frozen or tenant.timeslice_us) and not self._mine(tenant):
                await self._find_some(tenant)
        except ProcessLookupError:
            raise
        except BaseException:
            # Refused, or given up by the caller: what it did change is put back by the next round of _keep.
            tenant.frozen, tenant.timeslice_us = before
            raise
        finally:
            self._wake.set()  # the wide look, right after

    async def _find_some(self, tenant: Tenant) -> None:
        """EOPNOTSUPP for a program that uses the GPU, but through no TSG that we can find: one under MPS, or one that
        draws. Whoever has just come, or is yet to come, may still make some."""
        since = self._present.get(tenant.process)
        if since is None or trio.current_time() - since < NEWCOMER:
            return
        await self._look(tenant, force=True)
        if not self._mine(tenant):
            raise OSError(errno.EOPNOTSUPP, "no channel group of this program can be found")

    def _enforce(self, tenant: Tenant, turn: int | None = None) -> None:
        """Makes the hardware follow what is wanted. In a thread; the levers proper take about 1 ms.

        With `turn`, a periodic round: looks also whether the tenant undid it.
        """
        with tenant.acting, self._alive(tenant):
            handles = tenant.handles
            if not handles.fds():
                handles.wide()
            self._adopt_channels(tenant)
            with rm.borrowed(self._census.system, tenant.process, handles.fds()) as controls:
                handles.quick(controls)
                tsgs = levers.still_there(controls, self._mine(tenant))
                enabled = self._states.enabled
                if tenant.frozen:
                    if turn is not None and levers.undone(tsgs, tenant.off, enabled, turn):
                        log.warning("pid %d undid its freeze: frozen again", tenant.process.pid)
                    levers.detach(controls, tsgs, tenant.off, enabled)
                if tenant.timeslice_us or tenant.touched_timeslice:
                    wanted = tenant.timeslice_us
                    tenant.touched_timeslice = True
                    levers.set_timeslice(controls, tsgs, wanted)
                    tenant.touched_timeslice = wanted != 0
                if tenant.off and not tenant.frozen:
                    levers.attach(controls, tsgs, tenant.off, enabled)
                    tenant.off.clear()  # what is left in it was freed
        self._count(tenant)

    @contextmanager
    def _alive(self, tenant: Tenant) -> Iterator[None]:
        """Turns whatever went wrong because the process is gone into ProcessLookupError."""
        try:
            yield
        except OSError:
            if self._census.system.start_time(tenant.process.pid) != tenant.process.start:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
            raise


async def open_gpus(
    *, system: rm.System | None = None, nvml: Nvml | None = None, selftest: bool = True
) -> list[NvidiaGpu]:
    """The NVIDIA GPUs of this host, each with its verdicts. OSError(ENODEV) where there is no driver.

    The self-test takes some three seconds, all GPUs at the same time; without it the levers are advisory.
    """
    if nvml is None:
        nvml = Nvml()
    await nvml.open()
    if system is None:
        system = rm.LinuxSystem()
    deadline = Deadline("the driver", LOOK_DEADLINE)
    try:
        counter = await deadline.call(partial(ClientCounter, system))
    except FileNotFoundError:
        raise OSError(errno.ENODEV, f"no {rm.CONTROL_DEVICE}") from None
    cards = {card.pci: card for card in await deadline.call(counter.cards)}
    census = Census(system, counter)
    gpus = []
    for info in await nvml.gpus():
        if info.pci in cards:
            states = await deadline.call(partial(ChannelStates, system, cards[info.pci]))
            info = attrs.evolve(info, granule=GRANULE)
            gpus.append(NvidiaGpu(info, cards[info.pci].gpu_id, nvml, census, states))
        else:
            log.warning("GPU %d at %s is not in the driver's list", info.index, info.pci)
    async with trio.open_nursery() as nursery:
        for gpu in gpus:
            nursery.start_soon(_test, gpu, selftest)
    return gpus


async def _test(gpu: NvidiaGpu, selftest: bool) -> None:
    gpu.adopt(await prove(gpu, run=selftest))
