"""One GPU with a stock NVIDIA driver: find the processes that use it, and pull the levers on their TSGs.

A lever records the wanted state and then makes the hardware follow. The same step runs again for TSGs that appear
later, and for tenants that undid it (``keeper.py``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

import attrs
import trio

from backend.common.errors import fail
from backend.common.lasting import lasting
from backend.core.protocols import Bookkeeping, Gpu
from backend.core.reasons import LASTING, Engines, Off
from backend.core.records import Activity, Capability, Footprint, GpuInfo
from backend.core.settings import SM_MAX, TIMESLICE, Lever
from backend.core.turns import TurnEnd
from backend.core.workingset import WorkingSet
from backend.cuda.managed import Managed
from backend.nvidia import rm, thaw
from backend.nvidia.deadline import Deadline
from backend.nvidia.discover import TICK, Census, Tsg
from backend.nvidia.keeper import Keeper
from backend.nvidia.listed import ProcessList
from backend.nvidia.memory import ProgramMemory
from backend.nvidia.mover import Mover
from backend.nvidia.notes import NoNotes, Notes
from backend.nvidia.nvml import Nvml
from backend.nvidia.parts import Shared
from backend.nvidia.proven import GR_ALONE, Verdict
from backend.nvidia.readback import ChannelStates
from backend.nvidia.spaces import SpaceLevers
from backend.nvidia.swapped import SwappedPrograms
from backend.nvidia.tenant import Tenant
from backend.nvidia.trace import LAG_NS
from backend.nvidia.usage import SWITCH_US, Usage
from backend.nvidia.waiting import Waiter, Waiting
from backend.process.identity import Process

log = logging.getLogger(__name__)

POLL = 0.2
"""Seconds between two looks at NVML's list (50 us of CPU each): a process appears at most this long after its
context.
"""
NEWCOMER = 2.0
"""Seconds for which a program on NVML's list may be without a TSG."""
LEVER_DEADLINE = 2.0
"""Deadline of a lever, seconds; it usually takes 2 ms."""
RELEASES, RELEASE_AGAIN = 3, 0.1
"""Number of attempts to release a program at the end, and the seconds between them: no daemon would do it later."""
LOOK_DEADLINE = 10.0
"""Deadline of a wide look, seconds; the first one on a host that ran for months can take some."""
BACK, BACK_MOST = 5.0, 60.0
"""Seconds between two checks whether a lost GPU is back: at first, which doubles after each loss, and the longest. This
bounds the rate of messages about a GPU that comes and goes.
"""


class NvidiaGpu:
    """See :class:`backend.core.protocols.Gpu`."""

    late_us = LAG_NS // 1000
    switch_us = SWITCH_US

    def __init__(
        self,
        info: GpuInfo,
        gpu_id: int,
        nvml: Nvml,
        census: Census,
        states: ChannelStates,
        usage: Usage,
        mover: Mover,
        present: Callable[[], None] = lambda: None,
    ) -> None:
        """`mover` is shared by all GPUs of its model. `present` makes a request of the GPU, in a thread: OSError if the
        GPU is not there.
        """
        self.info = info
        self.lost = False
        self.mover = mover
        """Moves programs to another GPU of the same model."""
        self._usage = usage
        usage.lost = self._lose
        usage.programs = self._working
        usage.standing = self._off_uncounted
        usage.late = self._late
        usage.spaces = self._shared
        self._ask_it = present
        self._back_s = BACK
        self.managed = Managed(info, self._is_frozen, lambda: self.lost, self._counted)
        """Programs whose memory can be moved; the driver keeps the memory of others where it is."""
        self.managed.spoke = self._spoke
        self.managed.unheard = self._follow_anew
        self.swapped = SwappedPrograms(info, self._freeze, self._anew)
        """Frozen programs without the library whose memory is in the host."""
        mover.watchers.append(self.swapped.returned)
        self._states = states
        self.notes: Notes = NoNotes()
        """The TSGs' own timeslices, kept for the next daemon."""
        self.waiting: Waiting | None = None
        """What is off the runlist, kept for the guard of the daemon."""
        self._goes_back: set[Process] = set()  # processes that are off by decisions of this daemon alone
        self.adopt(())
        self._gpu_id = gpu_id
        self._nvml = nvml
        self._census = census
        self._tenants: dict[Process, Tenant] = {}
        self._spaces = SpaceLevers(self._take_one, self._set_timeslice)
        self._clients: frozenset[int] = frozenset()  # of MPS servers, by pid, as the driver said last
        self._at_gate: set[Process] = set()  # clients that are frozen, among others that are not
        self._turn_over: set[Process] = set()  # clients whose gate is closed for the end of a turn, too
        self._listed = ProcessList(info.index, nvml, census.system, self._knows, self._see)
        self.memory = ProgramMemory(info, nvml, self._listed, mover, self.managed, self.swapped, self._standing)
        """Where the memory of each program is."""
        self._looked = 0.0  # time of the last request for the list
        self._keeper = Keeper(
            *(info.index, self._tenants, census.counter.totals, usage.exact, self._asked_to_stand, self._undone),
            lambda process: self._spaces.space_of(process) is not None,
        )
        self._bookkeeper: Bookkeeping | None = None
        self._probe = Deadline("the driver", LEVER_DEADLINE)
        self._handed_over = False
        self._began = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICK)

    def adopt(self, verdicts: Sequence[Verdict]) -> None:
        """Take the outcome of the self-test as this GPU's capabilities."""
        self.verdicts = tuple(verdicts)
        self._capabilities = {verdict.control: verdict.capability for verdict in self.verdicts}

    def capabilities(self) -> Mapping[str, Capability]:
        return self._capabilities

    # ---- finding processes -----------------------------------------------------------------------------------

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        self._bookkeeper = self.managed.bookkeeper = self.swapped.bookkeeper = bookkeeper
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._usage.run)
                async with trio.open_nursery() as first:
                    await self._poll(bookkeeper, first)
                task_status.started()
                if self.mover.home == self.info.index:
                    nursery.start_soon(lasting, "the look for moves", self.mover.run)
                while True:
                    async with trio.open_nursery() as keeping:
                        keeping.start_soon(lasting, f"keeping on GPU {self.info.index}", self._keeper.run)
                        while not self.lost:
                            await trio.sleep(POLL)
                            await self._poll(bookkeeper, nursery)
                        keeping.cancel_scope.cancel()
                    await self._until_back()
                    await self._poll(bookkeeper, nursery)
        finally:
            self.swapped.ends = True
            # Without a daemon nothing thaws programs: a frozen one would stay so until it is killed.
            if not self._handed_over:
                with trio.CancelScope(shield=True):
                    await self._release_all()

    async def _poll(self, bookkeeper: Bookkeeping, nursery: trio.Nursery) -> None:
        self._looked = trio.current_time()
        try:
            new = await self._listed.look()
            await self._find_clients(bookkeeper, new)
            for process in new:
                if bookkeeper.is_server(process.pid, self._listed.held(process)):
                    self._listed.forget(process)  # it is asked for again: one that holds much more is a program
                    continue
                if process in self.managed:  # it registered itself, so it is in the books
                    self._listed.tell(process, self.managed.look)
                nursery.start_soon(self._welcome, bookkeeper, process)
        except OSError as error:  # ENODEV
            self._lose(error)
        except Exception:
            log.exception("GPU %d: a look at its programs failed", self.info.index)

    async def _find_clients(self, bookkeeper: Bookkeeping, new: Sequence[Process]) -> None:
        """Find the programs that are clients of the server of their space: by the driver's word, not their own."""
        spaces = {process: bookkeeper.space_of(process) for process in (*self._tenants, *new)}
        pids = await self.clients() if any(spaces.values()) else frozenset()
        found = {process: space for process, space in spaces.items() if space is not None and process.pid in pids}
        self._follow_anew(self._spaces.note(found))

    async def clients(self) -> frozenset[int]:
        """Return the pids of the clients of MPS servers, as the driver said last; none where it does not say."""
        try:
            self._clients = await self._nvml.clients(self.info.index)
        except OSError as error:
            if error.errno == errno.ENODEV:
                raise
        return self._clients

    async def _counted(self, process: Process) -> int:
        try:
            return await self._nvml.held(self.info.index, process.pid)
        except OSError:
            return 0  # a later look shows it

    def _knows(self, process: Process) -> bool:
        return self._bookkeeper is not None and self._bookkeeper.knows(process, self.info.index)

    def _see(self, process: Process, nbytes: int) -> None:
        """Report the driver's figure, which the books follow. While a program moves to or from the host, report it only
        once the move is over.
        """
        if not self.swapped.moved_since(process, self._looked):
            self.managed.look(process, nbytes)
            if nbytes:
                self.swapped.seen(process)

    async def _welcome(self, bookkeeper: Bookkeeping, process: Process) -> None:
        tenant = self._tenant(process)
        try:
            if not await tenant.has_files():
                # A client outlives the process that made it if another process has its file; the pid may have been
                # reused.
                self.forget(process)
                return
            try:
                await tenant.look()
            except ProcessLookupError:
                raise
            except OSError as error:  # it is there, whether or not the levers will reach it
                if not self._is_loss(error):
                    log.warning("pid %d on GPU %d: its TSGs are unknown: %s", process.pid, self.info.index, error)
            await bookkeeper.arrive(process, self.info.index)
            space = self._spaces.space_of(process)
            if space is not None and len(self._spaces.members(space)) > 1:
                # It became a client before it was in the books, and those that are there may stop the whole space.
                self._follow_anew([process])
        except ProcessLookupError:
            self.forget(process)
            return
        except OSError as error:
            self._listed.not_met(process, error)
            return
        except Exception:
            log.exception("pid %d on GPU %d: not welcomed", process.pid, self.info.index)
            return  # it stays on the list: this process is not asked for again, and others are
        self._listed.met(process)
        self._listed.tell(process, self.managed.met)

    # ---- a lost GPU ------------------------------------------------------------------------------------------

    def _is_loss(self, error: OSError) -> bool:
        """Return whether the driver reports by this error that the GPU is gone; if so, note the loss."""
        is_loss = isinstance(error, rm.RmError) and error.lost
        if is_loss:
            self._lose(error)
        return is_loss

    def _lose(self, error: OSError) -> None:
        """Note that the driver reports the GPU as gone: from now on no requests are made of it and none of its files is
        held open, so that it can be reset. Nor does the guard make any: what is off once it is back is noted anew.
        """
        for tenant in self._tenants.values():
            tenant.enforcement.waiter.clear()
        if self.lost:
            return
        self.lost = True
        log.error("GPU %d is lost: %s", self.info.index, error)
        self._usage.gone()
        self.managed.open_all()
        self._spaces = SpaceLevers(
            self._take_one, self._set_timeslice
        )  # its clients are gone, and what comes later is found anew
        self._at_gate.clear()
        self._turn_over.clear()
        if self._bookkeeper is not None:
            self._bookkeeper.presence(self.info.index)

    async def _until_back(self) -> None:
        """Return once the GPU is there again. Its programs are new, or have to be found again."""
        await self._in_a_thread(self._states.close)
        while True:
            await trio.sleep(self._back_s)
            try:
                await self._nvml.usage(self.info.index)
                await self._probe.call(self._ask_it)
            except OSError as error:
                log.debug("GPU %d is still lost: %s", self.info.index, error)
            else:
                break
        self._back_s = min(BACK_MOST, 2 * self._back_s)
        await self._in_a_thread(self._states.open)
        for tenant in self._tenants.values():
            tenant.enforcement.begin_again()
        self.lost = False
        self._usage.back()
        log.warning("GPU %d is back", self.info.index)
        if self._bookkeeper is not None:
            self._bookkeeper.presence(self.info.index)

    async def _in_a_thread(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            await self._probe.call(work)

    async def _release_all(self) -> None:
        async with trio.open_nursery() as nursery:  # in parallel, so that one that hangs does not delay the others
            for tenant in self._tenants.values():
                tenant.applied.engines = Engines.NONE
                tenant.applied.timeslice_us = 0
                if tenant.has_policy and not self.lost:
                    nursery.start_soon(self._release, tenant)

    async def _release(self, tenant: Tenant) -> None:
        for left in reversed(range(RELEASES)):
            try:
                await tenant.enforce()
            except ProcessLookupError:
                return
            except OSError as error:
                if self._is_loss(error):
                    return
                if not left or isinstance(error, TimeoutError):
                    log.warning("pid %d on GPU %d was not released: %s", tenant.process.pid, self.info.index, error)
                    return
            else:
                return
            await trio.sleep(RELEASE_AGAIN)

    def _undone(self, process: Process) -> None:
        """Report that a tenant had undone a setting, which holds again."""
        bookkeeper = self.managed.bookkeeper
        if bookkeeper is not None and bookkeeper.knows(process, self.info.index):
            bookkeeper.undone(process, self.info.index)

    async def free(self) -> Sequence[thaw.Freed]:
        """Let every program of this GPU run with its own timeslices, where these are known; for use without a daemon.
        OSError if the programs of the GPU cannot be listed.
        """
        listed = []
        for pid in await self._nvml.usage(self.info.index):
            try:
                listed.append(Process(pid, self._census.system.start_time(pid)))  # may block, since nothing else runs
            except ProcessLookupError:
                pass
            except OSError as error:
                log.warning("pid %d on GPU %d is left as it is: %s", pid, self.info.index, error)
        return await thaw.free(listed, self._tenant)

    def _tenant(self, process: Process) -> Tenant:
        tenant = self._tenants.get(process)
        if tenant is None:
            what = f"the driver, for pid {process.pid},"
            tenant = Tenant(
                process=process,
                handles=self._census.of(process),
                levers=Deadline(what, LEVER_DEADLINE),
                looks=Deadline(what, LOOK_DEADLINE),
                system=self._census.system,
                gpu_id=self._gpu_id,
                states=self._states,
                began=self._began,
                notes=self.notes,
                waiter=Waiter(self.waiting, process),
            )
            tenant.enforcement.waiter.decide(process in self._goes_back)
            self._tenants[process] = tenant
        return tenant

    def forget(self, process: Process) -> None:
        self._drop_tenant(process)
        self._listed.forget(process)
        self.managed.forget(process)
        self.swapped.forget(process)
        self._usage.forget(process)
        self._follow_anew(self._spaces.forget(process))
        self._at_gate.discard(process)
        self._turn_over.discard(process)
        self._goes_back.discard(process)

    def _spoke(self, process: Process) -> None:
        """Have the gate of a frozen client closed again that speaks anew: its library opened it meanwhile."""
        if process in self._at_gate:
            self._follow_anew([process])

    def _follow_anew(self, processes: Iterable[Process]) -> None:
        for process in processes:
            if self._bookkeeper is not None and self._bookkeeper.knows(process, self.info.index):
                self._bookkeeper.beside_changed(process, self.info.index)

    def _anew(self, process: Process) -> None:
        """Drop the clients and TSGs of a process that now has others, and keep its timeslice."""
        before = self._drop_tenant(process)
        if before is not None:  # it lives
            self._tenant(process).applied.timeslice_us = before.applied.timeslice_us

    def _drop_tenant(self, process: Process) -> Tenant | None:
        """Forget the clients and TSGs of a process, and what is noted of them."""
        tenant = self._tenants.pop(process, None)
        if tenant is not None:
            tenant.enforcement.forget()
        else:
            self.notes.note(process, {})
        self._census.forget(process)
        return tenant

    def hand_over(self) -> None:
        self._handed_over = True

    # ---- what is known ---------------------------------------------------------------------------------------

    def tsgs(self, process: Process) -> Sequence[Tsg]:
        """Return the TSGs of `process` on this GPU, as last seen."""
        tenant = self._tenants.get(process)
        return tenant.tsgs() if tenant else []

    def activity(self, process: Process) -> Activity:
        tenant = self._tenants.get(process)
        activity = attrs.evolve(
            tenant.activity if tenant else Activity(),
            gpu_usec=self._usage.exact(process),
            gpu_usec_estimate=self._usage.estimate(process),
            stays=self._usage.stays(process),
        )
        busy, sampled = self._usage.busy(process)
        activity = attrs.evolve(activity, managed=process in self.managed, busy_usec=busy, busy_sampled_usec=sampled)
        if self._spaces.space_of(process) is not None:
            # The trace has the time of all clients under one name: what each had is an estimate.
            activity = attrs.evolve(
                activity, beside=True, gpu_usec=None, stays=None, busy_usec=None, busy_sampled_usec=None
            )
            if self._spaces.off(process) is not Engines.NONE:
                activity = attrs.evolve(activity, attached=0)
        counts = self.managed.counts(process)
        if counts is None:
            watched, worked = self._usage.watched(process) or (None, None)
            return attrs.evolve(activity, watched_usec=watched, watched_busy_usec=worked)
        if (placed := self.managed.placed_launches(process)) is not None:
            activity = attrs.evolve(activity, capped=placed[0], uncapped=placed[1])
        submitted, finished = counts
        pending, pending_us = submitted - finished, self.managed.pending_us(process)
        activity = attrs.evolve(
            activity, submitted=submitted, finished=finished, pending=pending, pending_usec=pending_us
        )
        launches, periods = self.managed.held_launches(process), self.managed.busy_periods(process)
        return attrs.evolve(activity, held_launches=launches, busy_periods=periods)

    def _working(self) -> Iterator[tuple[Process, bool | None]]:
        """Yield each process on this GPU, and whether it has pending kernels that may run; None if it does not count
        kernels.
        """
        for process in self._tenants:
            counts = self.managed.counts(process)
            yield process, None if counts is None else counts[0] > counts[1] and not self._is_off(process)

    def _shared(self) -> Iterator[Shared]:
        """Yield the spaces with their clients. One that does not count its kernels is taken to have some."""
        for space, clients in self._spaces.spaces().items():
            servers = () if self._bookkeeper is None else self._bookkeeper.servers_of(space)
            counts = {client: self.managed.counts(client) for client in clients}
            pending = {client: each is None or each[0] > each[1] for client, each in counts.items()}
            yield Shared(space, {*servers, *(client.pid for client in clients)}, pending)

    def _off_uncounted(self) -> Collection[Process]:
        """Return the programs that are off the runlist and do not count their kernels."""
        return frozenset(one for one in self._tenants if self._is_off(one) and self.managed.counts(one) is None)

    def _late(self, process: Process, figures: Mapping[str, int]) -> None:
        if self._bookkeeper is not None:
            self._bookkeeper.late(process, self.info.index, figures)

    def manages(self, process: Process) -> bool:
        return self.memory.manages(process)

    def spoken(self, process: Process) -> float:
        return self.managed.spoken(process)

    def footprint(self, process: Process) -> Footprint:
        return self.memory.footprint(process)

    def is_leaving(self, process: Process) -> bool:
        return self.memory.is_leaving(process)

    def offer(self, room: Callable[[Process], int]) -> None:
        if not self.lost:
            self.managed.offer(room)

    def _standing(self, process: Process) -> Tenant | None:
        """Return the tenant of a process that was frozen and has all its work off the GPU, otherwise None. A process
        that the scheduler took off the runlist for a moment is not frozen, and one that uses another GPU as well still
        runs there.
        """
        tenant = self._tenants.get(process)
        if tenant is None or tenant.applied.engines is not Engines.ALL or not self._asked_to_stand(process):
            return None
        if self._spaces.space_of(process) is not None:  # no client can be checkpointed
            return None
        return None if any(tsg.gpu_id != self._gpu_id for tsg in tenant.applied.handles.tsgs()) else tenant

    def _asked_to_stand(self, process: Process) -> bool:
        """Return whether a process, or a slice above it, is frozen. One without books, which comes or goes, is not."""
        bookkeeper = self.managed.bookkeeper
        if bookkeeper is None:
            return False
        with contextlib.suppress(OSError):
            return any(books.frozen for books in bookkeeper.levels(process, self.info.index))
        return False

    def _is_frozen(self, process: Process) -> bool:
        """Return whether the memory of a process cannot be moved until it is back on the runlist. Without the copy
        engines, the copies of a move would wait. Without GR, the library would wait for kernels, unless the process is
        drained.
        """
        engines = self._engines(process)
        if engines is Engines.NONE:
            return False
        return engines is Engines.ALL or not self.managed.is_drained(process)

    def _is_off(self, process: Process) -> bool:
        """Return whether the kernels of a process are off the GPU, finished or not."""
        return self._engines(process) is not Engines.NONE

    def _engines(self, process: Process) -> Engines:
        """Return the engines that a process is without."""
        if self._spaces.space_of(process) is not None:
            return self._spaces.off(process)
        tenant = self._tenants.get(process)
        return Engines.NONE if tenant is None else tenant.applied.engines

    # ---- the levers ------------------------------------------------------------------------------------------

    async def set_lever(self, lever: Lever, process: Process, value: int) -> None:
        if lever is TIMESLICE:
            await self.set_timeslice(process, value)
        elif lever is SM_MAX:
            await self.managed.limit_sms(process, value, here=bool(self.tsgs(process)))
        elif value:
            raise fail(errno.EOPNOTSUPP)

    async def set_timeslice(self, process: Process, us: int) -> None:
        """Set the longest run of a process in a round, microseconds; 0 restores the defaults of its TSGs."""
        if self.swapped.has(process):  # none of it runs; it gets the timeslice once it does
            self._tenant(process).applied.timeslice_us = us
            return
        if self._spaces.space_of(process) is not None:
            await self._spaces.set_timeslice(process, us)
        else:
            await self._set_timeslice(process, us)

    async def _set_timeslice(self, process: Process, us: int) -> None:
        await self._change(process, timeslice_us=us)

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        if engines is Engines.GR and self._capabilities.get(GR_ALONE) is not Capability.ENFORCED:
            engines = Engines.ALL  # that stops at least what is to be stopped, on any driver
        if engines is Engines.ALL:
            if not self.swapped.has(process):  # a program in the host does not run
                await self._stop_at_gate(process)
                await self.take(process, engines)
        else:
            await self._let_go(process, engines)

    async def _stop_at_gate(self, process: Process) -> None:
        """Have a client that is frozen while others of its space are not stop at its gate. EOPNOTSUPP where none holds
        it; ETIMEDOUT where what it launched does not end.
        """
        space = self._spaces.space_of(process)
        if space is None or not self._asked_to_stand(process):
            return
        if all(self._asked_to_stand(other) for other in self._spaces.members(space)):
            return  # the runlist stops all of them
        if await self._close_gate(process, round(LEVER_DEADLINE / 2 * 1e6)) is TurnEnd.LATE:
            raise OSError(errno.ETIMEDOUT, "others of its space run, and what it launched has not ended")

    async def _close_gate(self, process: Process, bound_us: int) -> TurnEnd:
        """Close the gate of a client that is frozen, until :meth:`_leave_gate`. EOPNOTSUPP where none holds it."""
        self._at_gate.add(process)  # whatever comes of it: a library that answers too late closes it all the same
        end = await self.managed.end_turn(process, bound_us)
        if not self._asked_to_stand(process):  # it was thawed meanwhile
            self._leave_gate(process)
        elif end is TurnEnd.UNGATED:
            raise OSError(errno.EOPNOTSUPP, "others of its space run, and nothing holds what it launches")
        else:
            self._spaces.hold(process)
        return end

    async def _hold_frozen(self, process: Process) -> None:
        """Close the gates of clients that are frozen, and that so far the runlist stopped with the whole space, before
        another one of it goes on. EOPNOTSUPP where nothing holds one.
        """
        space = self._spaces.space_of(process)
        for other in list(self._spaces.members(space)) if space is not None else ():
            if other != process and not self._spaces.is_held(other) and self._asked_to_stand(other):
                await self._close_gate(other, 0)

    def _leave_gate(self, process: Process) -> None:
        if process in self._at_gate:
            self._at_gate.discard(process)
            if process not in self._turn_over:
                self.managed.begin_turn(process)

    async def attach(self, process: Process) -> None:
        await self._let_go(process, Engines.NONE)

    def note_reasons(self, process: Process, off: Off) -> None:
        # Without any reason, too: a client that is to run stays off until the others of its space are to run.
        goes_back = not off.reasons & LASTING
        if off and goes_back:
            self._goes_back.add(process)
        else:
            self._goes_back.discard(process)
        if (tenant := self._tenants.get(process)) is not None:
            tenant.enforcement.waiter.decide(goes_back)

    async def end_turn(self, process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
        self._require()
        if self._capabilities.get(GR_ALONE) is not Capability.ENFORCED:
            return TurnEnd.UNGATED  # its copy engines go off as well, so it gains nothing by being drained
        self._turn_over.add(process)
        return await self.managed.end_turn(process, bound_us, leaves)

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        self.managed.rank(behind, hold_us)

    async def begin_turn(self, process: Process) -> None:
        self._turn_over.discard(process)
        if process not in self._at_gate:
            self.managed.begin_turn(process)

    async def _let_go(self, process: Process, engines: Engines) -> None:
        """Put all engines back on except these. A program that is in the host comes back first."""
        self._require()
        if self.mover.is_due(process):
            raise OSError(errno.EAGAIN, "it is in the host since before this mount, and not back yet")
        await self.swapped.back(process)
        if engines is Engines.NONE and not self._asked_to_stand(process):
            await self._hold_frozen(process)
        await self.take(process, engines)
        self._leave_gate(process)

    async def _freeze(self, process: Process, frozen: bool) -> None:
        await self.take(process, Engines.ALL if frozen else Engines.NONE)

    async def take(self, process: Process, engines: Engines) -> None:
        """Take the TSGs of these engines off the runlist and put the others on, whether or not this was proven to
        work. Of a client of a space, that is done once all of its clients are to have it.
        """
        if self._spaces.space_of(process) is not None:
            await self._spaces.take(process, engines)
        else:
            await self._take_one(process, engines)

    async def _take_one(self, process: Process, engines: Engines) -> None:
        await self._change(process, engines=engines)

    def working_set(self, process: Process) -> WorkingSet | None:
        return self.managed.working_set(process)

    def shares(self, process: Process) -> frozenset[Hashable] | None:
        return self.managed.shares(process)

    async def prepare(self, process: Process, nbytes: int) -> int:
        self._require()
        return await self.managed.prepare(process, nbytes)

    async def reclaim(self, process: Process, nbytes: int) -> int:
        self._require()
        return await self.memory.reclaim(process, nbytes)

    async def migrate(self, process: Process, target: Gpu) -> None:
        self._require()
        if not isinstance(target, NvidiaGpu):
            raise OSError(errno.EXDEV, "there is no way to that GPU")
        if self._spaces.space_of(process) is not None:
            raise OSError(errno.EOPNOTSUPP, "a client of MPS cannot leave its server")
        target._require()
        await self.memory.migrate(process, target.memory)
        if self._bookkeeper is not None:
            self._bookkeeper.take_down(process, self.info.index)
        self.forget(process)

    async def finds(self, process: Process) -> bool | None:
        if self.lost or self.mover.is_at(process):
            return None
        return process.pid in await self._nvml.usage(self.info.index)

    async def _change(
        self, process: Process, *, engines: Engines | None = None, timeslice_us: int | None = None
    ) -> None:
        self._require()
        tenant = self._tenant(process)
        applied = tenant.applied
        before = (applied.engines, applied.timeslice_us)
        if engines is not None:
            if engines is not Engines.NONE:
                self._usage.turns(process, is_on=False)
            applied.engines = engines
        if timeslice_us is not None:
            applied.timeslice_us = timeslice_us
        try:
            await tenant.enforce()
            if engines is Engines.NONE:
                self._usage.turns(process, is_on=True)
            takes = engines not in (None, Engines.NONE) or bool(timeslice_us)
            if takes and not tenant.tsgs():  # to release a program needs no TSG
                await self._find_some(tenant)
        except ProcessLookupError:
            raise
        except BaseException as error:
            # Refused, or cancelled by the caller: the keeper puts back what was changed.
            applied.engines, applied.timeslice_us = before
            if applied.engines is Engines.NONE:
                self._usage.turns(process, is_on=True)
            if isinstance(error, OSError):
                self._is_loss(error)
                if error.errno == errno.ENOENT:  # a TSG that was there a moment ago is gone, again and again
                    raise OSError(errno.EIO, error.strerror) from None
            raise
        finally:
            self._keeper.wake(process)  # the wide look runs right after this

    def _require(self) -> None:
        """Raise ENODEV while the GPU is lost."""
        if self.lost:
            raise fail(errno.ENODEV)

    async def _find_some(self, tenant: Tenant) -> None:
        """Look for a TSG of a program once more. EOPNOTSUPP if it uses the GPU through none that can be found, as under
        MPS or for graphics. A program that has just come, or is yet to come, may still create some, so it is excused;
        so is one that NVML no longer lists: it has destroyed its contexts, as programs do some time before they end,
        and none of its work runs.
        """
        since = self._listed.since(tenant.process)
        if since is None or trio.current_time() - since < NEWCOMER:
            return
        await tenant.look(force=True)
        if tenant.tsgs():
            return
        with contextlib.suppress(OSError):  # without a list, nothing is excused
            if await self.finds(tenant.process) is False:
                return
        raise OSError(errno.EOPNOTSUPP, "no channel group of this program can be found")
