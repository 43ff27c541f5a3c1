"""Finds the RM objects of a process that knows nothing of us: clients, TSGs, channels, and the GPU of each.

There is no call that lists them, so handles are tried one after the other (CLIENT_GET_HANDLE_INFO takes no GPU lock,
about 3 us each). What makes that cheap, measured on driver 580:

- RM numbers clients with a counter: those of a process lie between the counter's value when it started and now.
- libcuda numbers its objects from 0x5C000000 upwards and does not reuse a number: new objects are past the highest.
- The host's total of clients and resources is one call: while it stands still there is nothing new to find.
"""

from __future__ import annotations

import bisect
import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from backend.nvidia import rm
from backend.nvidia.deadline import Narrow, Precedence
from backend.nvidia.linux import System
from backend.process.identity import Process

log = logging.getLogger(__name__)

HANDLE_BASE = 0x5C000000
"""Where libcuda starts to number the objects of a client."""
HANDLE_COUNT = 1 << 20
"""How far they are looked for."""
FIRST_RUN = 4096
"""The first look at a client ends after so many unused handles in a row (freed allocations leave gaps), 13 ms."""
QUICK_RUN = 24
"""The quick look, before a lever: 0.1 ms. A context makes its 110 objects with gaps of at most four."""
WIDE_RUN = 1024
"""The wide look, in the background."""
BACK = 8
"""Handles below the highest that are tried again: two threads of a program can finish theirs in either order."""
PATIENCE_S = 0.05
"""For a lever, which takes 2 ms."""
WAIT_S = 1.0
"""For another thread's call that is for the whole host: the usual one takes 4 us."""
TICK = os.sysconf("SC_CLK_TCK")


class Engine(enum.Enum):
    """What a TSG runs on."""

    GR = "gr"
    """Graphics and compute: what compute.timeslice divides."""
    COPY = "copy"
    """A copy engine."""
    UNKNOWN = "unknown"
    """Nothing under its channels yet: it is being made."""


@attrs.frozen
class Tsg:
    """A channel group: what a runlist schedules."""

    fd: int
    """The descriptor of /dev/nvidiactl, in the process, that its client belongs to."""
    client: int
    """RM client handle."""
    handle: int
    """RM object handle, class 0xA06C."""
    gpu_id: int
    """RM's name of the GPU."""
    subdevice: int
    """Handle of the client's subdevice object on that GPU: where FIFO controls go."""
    engine: Engine
    """What it runs on."""
    channels: tuple[int, ...]
    """Handles of its channels."""
    default_us: int
    """Its own timeslice, microseconds: what it had when it was found, or is known to have got from its maker since."""


def is_channel(class_: int) -> bool:
    """Whether that class is a GPFIFO channel: 0xC36F Volta, 0xC56F Ampere, 0xC86F Hopper, 0xC96F Blackwell, ..."""
    return class_ & 0xFF == 0x6F


def is_gr_object(class_: int) -> bool:
    """Whether that class is a compute (0xCBC0 Hopper, ...) or 3D (0xCB97, ...) object: what makes a channel GR."""
    return class_ > 0xFF and class_ & 0xFF in (0xC0, 0x97)


def _matters(class_: int) -> bool:
    # Memory objects are the many; they are not kept.
    fixed = (rm.CLASS_DEVICE, rm.CLASS_SUBDEVICE, rm.CLASS_TSG, rm.CLASS_CONTEXT_SHARE)
    return class_ in fixed or is_channel(class_) or is_gr_object(class_) or class_ & 0xFF == 0xB5


@attrs.frozen
class Found:
    """The outcome of trying a range of handles."""

    objects: Mapping[int, tuple[int, int]]
    """Handle to (class, parent), of the classes that matter."""
    top: int
    """Highest handle in use that was met, of any class; 0 when none was."""


def _on() -> None:
    pass


def try_handles(control: rm.Control, client: int, start: int, run: int, before: Callable[[], None] = _on) -> Found:
    """Tries the handles from `start` upwards until `run` of them in a row are unused; calls `before` before each."""
    objects: dict[int, tuple[int, int]] = {}
    top = 0
    handle = start
    end = start + run
    while handle < min(end, HANDLE_BASE + HANDLE_COUNT):
        before()
        class_ = control.class_of(client, handle)
        if class_ is not None:
            top = handle
            end = handle + 1 + run
            if _matters(class_):
                parent = control.parent_of(client, handle)
                if parent is not None:
                    objects[handle] = (class_, parent)
        handle += 1
    return Found(objects, top)


class ClientCounter:
    """RM's counter of clients, and what it said earlier. Has a client of its own. For any thread."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._fd = system.open_control()
        self._narrow = Narrow("the driver", WAIT_S)
        self._samples: list[tuple[int, int]] = []
        try:
            self._control = rm.Control(system, self._fd)
            self._root = self._control.allocate(0, 0, 0, rm.CLASS_ROOT)
            self.sample()
        except OSError:
            system.close(self._fd)
            raise

    def close(self) -> None:
        """Gives back the descriptor, and with it our client."""
        self._system.close(self._fd)

    def cards(self) -> Sequence[rm.Card]:
        """The GPUs of the driver."""
        with self._narrow.passed():
            return self._control.cards()

    def totals(self) -> tuple[int, ...]:
        """Clients and resources of the whole host: while they stay the same nothing new was made (4 us)."""
        with self._narrow.passed():
            return self._control.query(self._root, self._root, rm.GET_CLIENT_DATABASE_INFO, rm.DATABASE_INFO, 0, 0)

    def sample(self) -> int:
        """The index that the next client will get. Learnt by making a client and dropping it, which uses one up."""
        with self._narrow.passed():
            client = self._control.allocate(0, 0, 0, rm.CLASS_ROOT)
            self._control.free(client, client, client)
            index = (client - rm.CLIENT_BASE + 1) % rm.CLIENT_COUNT
            self._samples.append((int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICK), index))
            return index

    def since(self, start: int) -> int:
        """An index that no client made after `start` (clock ticks since boot) is below; 0 from before our time."""
        at = bisect.bisect_left(self._samples, (start, 0))  # others only append, what is later
        return self._samples[at - 1][1] if at else 0


def indices(low: int, high: int) -> Iterable[int]:
    """The counter's values from `low` up to but not `high`, newest first; it may have wrapped between them."""
    count = (high - low) % rm.CLIENT_COUNT
    return ((high - 1 - n) % rm.CLIENT_COUNT for n in range(count))


class _Client:
    """What is known about the objects of one client. Changed under the lock of its Handles only."""

    def __init__(self, fd: int, handle: int) -> None:
        self.fd = fd
        self.handle = handle
        self.top = HANDLE_BASE
        self.cursor = HANDLE_BASE
        self.objects: dict[int, tuple[int, int]] = {}
        self.gpu_ids: dict[int, int] = {}
        self.defaults: dict[int, int] = {}

    def tsgs(self) -> Iterable[Tsg]:
        gpus = {self.objects[sub][1]: (sub, gpu) for sub, gpu in self.gpu_ids.items() if sub in self.objects}
        under: dict[int, list[tuple[int, int]]] = {}
        for handle, (class_, parent) in sorted(self.objects.items()):
            under.setdefault(parent, []).append((handle, class_))
        for handle, (class_, device) in self.objects.items():
            if class_ != rm.CLASS_TSG or device not in gpus:
                continue
            children = under.get(handle, [])
            channels = tuple(child for child, kind in children if is_channel(kind))
            kinds = {kind for child, _ in children for _, kind in under.get(child, [])}
            kinds.update(kind for _, kind in children)
            engine = Engine.UNKNOWN
            if rm.CLASS_CONTEXT_SHARE in kinds or any(is_gr_object(kind) for kind in kinds):
                engine = Engine.GR
            elif any(kind & 0xFF == 0xB5 for kind in kinds):
                engine = Engine.COPY
            subdevice, gpu_id = gpus[device]
            default = self.defaults.get(handle, 0)
            yield Tsg(self.fd, self.handle, handle, gpu_id, subdevice, engine, channels, default)


class Handles:
    """What is known about the RM objects of one process; every look adds to it. For any thread."""

    def __init__(self, system: System, counter: ClientCounter, process: Process, levers: Precedence) -> None:
        """Wide looks stand aside for `levers`, of whatever process: a look at a PyTorch program is some 2000 calls."""
        self.process = process
        self.levers = levers
        self._system = system
        self._counter = counter
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._clients: dict[tuple[int, int], _Client] = {}
        self._fds: frozenset[int] = frozenset()
        self._searched = counter.since(process.start)
        self._totals: tuple[int, ...] = (0, 0)
        self._tsgs: tuple[Tsg, ...] | None = None
        self._recalled: dict[tuple[int, int], int] = {}

    def recall(self, defaults: Mapping[tuple[int, int], int]) -> None:
        """Timeslices that TSGs (client, handle) had of their own before a daemon before us gave them others."""
        with self._lock:
            self._recalled |= defaults
        self.learn(defaults)

    def learn(self, defaults: Mapping[tuple[int, int], int]) -> None:
        """Timeslices that TSGs (client, handle) which are known have of their own, whatever they were found with."""
        with self._lock:
            for client in self._clients.values():
                own = {handle: us for (root, handle), us in defaults.items() if root == client.handle}
                client.defaults |= {handle: us for handle, us in own.items() if handle in client.objects}
            self._tsgs = None

    def fds(self) -> Sequence[int]:
        """The descriptors, in the process, that its clients belong to."""
        with self._lock:
            return sorted({client.fd for client in self._clients.values()})

    def tsgs(self) -> Sequence[Tsg]:
        """The TSGs known, each with its GPU. The very same sequence while nothing was found or dropped."""
        with self._lock:
            if self._tsgs is None:
                self._tsgs = tuple(tsg for client in self._clients.values() for tsg in client.tsgs())
            return self._tsgs

    def quick(self, controls: Mapping[int, rm.Control]) -> None:
        """Looks just past the highest handle of each client."""
        for client in self._known(controls):
            start = max(HANDLE_BASE, client.top - BACK)
            self._merge(client, controls[client.fd], try_handles(controls[client.fd], client.handle, start, QUICK_RUN))

    def may_be_new(self) -> bool:
        """Whether the host made anything since the last wide look (one call, instead of some 40): what comes and goes
        in equal numbers is missed until the next one."""
        try:
            return self._counter.totals() != self._totals
        except OSError:
            return True

    def wide(self, force: bool = False) -> bool:
        """Looks for new clients and further past the highest handle. Returns at once when the host made nothing new,
        unless `force`; whether it looked. ProcessLookupError when the process is gone."""
        with self._looking:
            return self._wide(force)

    def _wide(self, force: bool) -> bool:
        totals = self._counter.totals()
        if totals == self._totals and self._clients and not force:
            return False
        fds = frozenset(self._system.control_fds(self.process.pid))
        with rm.borrowed(self._system, self.process, sorted(fds)) as controls:
            self._drop_gone(controls)
            # Each search uses up one of RM's numbers: not for what the totals say is only memory come and gone.
            if controls and (force or not self._clients or fds != self._fds or totals[0] != self._totals[0]):
                self._find_clients(controls)
            for client in self._known(controls):
                control = controls[client.fd]
                new = client.top == HANDLE_BASE
                start = HANDLE_BASE if new else max(HANDLE_BASE, client.top - BACK)
                run = FIRST_RUN if new else WIDE_RUN
                found = try_handles(control, client.handle, start, run, self.levers.stand_aside)
                self._merge(client, control, found)
                self._deep(client, control)
        # Read before looking: what was made meanwhile is looked for the next time.
        self._totals = totals
        return True

    def _known(self, controls: Mapping[int, rm.Control]) -> Sequence[_Client]:
        with self._lock:
            return [client for client in self._clients.values() if client.fd in controls]

    def _find_clients(self, controls: Mapping[int, rm.Control]) -> None:
        now = self._counter.sample()
        for fd, control in controls.items():
            # A descriptor that we have not met can hold any client since the process began.
            low = self._searched if fd in self._fds else self._counter.since(self.process.start)
            for index in indices(low, now):
                self.levers.stand_aside()
                handle = rm.CLIENT_BASE + index
                if control.is_client(handle):
                    with self._lock:
                        self._clients.setdefault((fd, handle), _Client(fd, handle))
        self._searched = now
        self._fds = frozenset(controls)

    def _drop_gone(self, controls: Mapping[int, rm.Control]) -> None:
        """Forgets what was freed. A number that was closed and opened again is another file: its clients are gone."""
        with self._lock:
            clients = list(self._clients.items())
        for key, client in clients:
            control = controls.get(client.fd)
            if control is None or control.class_of(client.handle, client.handle) is None:
                with self._lock:
                    del self._clients[key]
                    self._tsgs = None
                self._fds -= {client.fd}
                continue
            gone = [
                handle
                for handle, (class_, _) in list(client.objects.items())
                if control.class_of(client.handle, handle) != class_
            ]
            if not gone:
                continue
            with self._lock:
                self._tsgs = None
                for handle in gone:
                    client.objects.pop(handle, None)
                    client.gpu_ids.pop(handle, None)
                    client.defaults.pop(handle, None)

    def _deep(self, client: _Client, control: rm.Control) -> None:
        """Tries the next stretch of the whole range: a gap longer than WIDE_RUN hides what is past it."""
        start = max(client.cursor, client.top + WIDE_RUN)
        for handle in range(start, start + WIDE_RUN, QUICK_RUN):
            found = try_handles(control, client.handle, handle, QUICK_RUN, self.levers.stand_aside)
            if found.top > client.top:
                self._merge(client, control, found)
        past = start + WIDE_RUN
        client.cursor = past if past < HANDLE_BASE + HANDLE_COUNT else HANDLE_BASE

    def _merge(self, client: _Client, control: rm.Control, found: Found) -> None:
        gpu_ids, defaults = {}, {}
        # A subdevice whose GPU could not be learnt is asked again: without it all its TSGs are out of reach. Not so a
        # TSG for its default: it may have what was set for it by now.
        again = {handle: value for handle, value in client.objects.items() if handle not in client.gpu_ids}
        again = {handle: value for handle, value in again.items() if value[0] == rm.CLASS_SUBDEVICE}
        for handle, (class_, _) in (again | {**found.objects}).items():
            try:
                if class_ == rm.CLASS_SUBDEVICE and handle not in client.gpu_ids:
                    gpu_ids[handle] = control.query(client.handle, handle, rm.GPU_GET_ID, rm.GPU_ID, 0)[0]
                elif class_ == rm.CLASS_TSG and handle not in client.objects:
                    now = control.query(client.handle, handle, rm.GET_TIMESLICE, rm.TIMESLICE, 0)[0]
                    defaults[handle] = self._recalled.get((client.handle, handle), now)
            except rm.RmError as error:  # freed meanwhile, or a GPU that fell off the bus
                log.debug("object 0x%x of pid %d: %s", handle, self.process.pid, error)
        with self._lock:
            if any(client.objects.get(handle) != value for handle, value in found.objects.items()) or gpu_ids:
                self._tsgs = None
            client.objects.update(found.objects)
            client.gpu_ids.update(gpu_ids)
            client.defaults.update(defaults)
            client.top = max(client.top, found.top)


class Census:
    """The Handles of every process, shared by the GPUs: a process that uses several has one set of clients."""

    def __init__(self, system: System, counter: ClientCounter) -> None:
        self.system = system
        self.counter = counter
        self._levers = Precedence(PATIENCE_S)
        self._handles: dict[Process, Handles] = {}

    def of(self, process: Process) -> Handles:
        """The Handles of a process, nothing known yet for a new one."""
        found = self._handles.get(process)
        if found is None:
            found = self._handles[process] = Handles(self.system, self.counter, process, self._levers)
        return found

    def forget(self, process: Process) -> None:
        """The process exited."""
        self._handles.pop(process, None)
