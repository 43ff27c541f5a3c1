"""Find the RM objects of a process that does not cooperate: clients, TSGs, channels, and the GPU of each.

No call lists them, so handles are tried one after the other (CLIENT_GET_HANDLE_INFO takes no GPU lock, about 3 us
each). Three facts make that cheap, measured on driver 580:

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
"""First handle that libcuda gives to an object of a client."""
HANDLE_COUNT = 1 << 20
"""Number of handles that are searched from there."""
FIRST_RUN = 4096
"""Unused handles in a row that end the first look at a client: 13 ms. Freed allocations leave gaps."""
QUICK_RUN = 24
"""The same for the quick look, before a lever: 0.1 ms. A context makes its 110 objects with gaps of at most four."""
WIDE_RUN = 1024
"""The same for the wide look, in the background."""
BACK = 8
"""Handles below the highest that are tried again: two threads of a program can finish theirs in either order."""
PATIENCE_S = 0.05
"""Longest wait of a look for a lever, seconds. A lever takes 2 ms."""
WAIT_S = 1.0
"""Longest wait for another thread's call about the whole host, seconds; usually a call takes 4 us."""
TICK = os.sysconf("SC_CLK_TCK")


class Engine(enum.Enum):
    """The kind of engine that a TSG runs on."""

    GR = "gr"
    """Graphics and compute, the engine that compute.timeslice divides."""
    COPY = "copy"
    """A copy engine."""
    UNKNOWN = "unknown"
    """Unknown as long as there is nothing under the TSG's channels: it is being made."""


@attrs.frozen
class Tsg:
    """A timeslice group: the unit that a runlist schedules."""

    fd: int
    """The process's descriptor of /dev/nvidiactl that the TSG's client belongs to."""
    client: int
    """RM client handle."""
    handle: int
    """RM object handle, class 0xA06C."""
    gpu_id: int
    """RM's id of the GPU."""
    subdevice: int
    """Handle of the client's subdevice object on that GPU: the target of FIFO controls."""
    engine: Engine
    """The kind of engine that the TSG runs on."""
    channels: tuple[int, ...]
    """Handles of the TSG's channels."""
    default_us: int
    """Native timeslice of the TSG, microseconds: the one it had when it was found, or later got from its maker."""


def is_gr_object(class_: int) -> bool:
    """Return whether a class is a compute (0xCBC0 Hopper, ...) or 3D (0xCB97, ...) object, which
    makes a channel GR.
    """
    return class_ > 0xFF and class_ & 0xFF in (0xC0, 0x97)


def _matters(class_: int) -> bool:
    #     # Most objects are memory, and are not kept.
    fixed = (rm.CLASS_DEVICE, rm.CLASS_SUBDEVICE, rm.CLASS_TSG, rm.CLASS_CONTEXT_SHARE)
    return class_ in fixed or rm.is_channel(class_) or is_gr_object(class_) or class_ & 0xFF == 0xB5


@attrs.frozen
class Found:
    """The result of trying a range of handles."""

    objects: Mapping[int, tuple[int, int]]
    """Class and parent of each relevant object, by handle."""
    top: int
    """Highest handle in use in the range, of any class; 0 if none is in use."""


def _on() -> None:
    pass


def try_handles(control: rm.Control, client: int, start: int, run: int, before: Callable[[], None] = _on) -> Found:
    """Try handles upwards from `start` until `run` in a row are unused; call `before` before each."""
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
    """RM's counter of clients, with its earlier values. It has a client of its own. For any thread."""

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
        """Close the descriptor, and our client with it."""
        self._system.close(self._fd)

    def cards(self) -> Sequence[rm.Card]:
        """Return the GPUs that the driver has."""
        with self._narrow.passed():
            return self._control.cards()

    def totals(self) -> tuple[int, ...]:
        """Return the counts of clients and resources of the whole host (4 us): while they stay the same,
        nothing new was made.
        """
        with self._narrow.passed():
            return self._control.query(self._root, self._root, rm.GET_CLIENT_DATABASE_INFO, rm.DATABASE_INFO, 0, 0)

    def sample(self) -> int:
        """Return the index that the next client will get. To learn it takes a client, made and freed,
        and so one index.
        """
        with self._narrow.passed():
            client = self._control.allocate(0, 0, 0, rm.CLASS_ROOT)
            self._control.free(client, client, client)
            index = (client - rm.CLIENT_BASE + 1) % rm.CLIENT_COUNT
            self._samples.append((int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICK), index))
            return index

    def since(self, start: int) -> int:
        """Return a lower bound for the index of any client made after `start` (clock ticks since boot); 0 if that
        is before the first sample.
        """
        at = bisect.bisect_left(self._samples, (start, 0))  # other threads only append later samples
        return self._samples[at - 1][1] if at else 0


def indices(low: int, high: int) -> Iterable[int]:
    """Return the counter's values from `low` up to but not `high`, newest first; it may have wrapped between them."""
    count = (high - low) % rm.CLIENT_COUNT
    return ((high - 1 - n) % rm.CLIENT_COUNT for n in range(count))


class _Client:
    """The known objects of one client. Changed only under the lock of its Handles."""

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
            channels = tuple(child for child, kind in children if rm.is_channel(kind))
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
    """The known RM objects of one process; each look adds to them. For any thread."""

    def __init__(self, system: System, counter: ClientCounter, process: Process, levers: Precedence) -> None:
        """Wide looks stand aside for `levers` of any process: a look at a PyTorch program takes some 2000 calls."""
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
        """Recall timeslices that TSGs, as (client, handle), had before an earlier daemon changed them,
        in microseconds.
        """
        with self._lock:
            self._recalled |= defaults
        self.learn(defaults)

    def learn(self, defaults: Mapping[tuple[int, int], int]) -> None:
        """Correct the native timeslices of known TSGs, as (client, handle), in microseconds."""
        with self._lock:
            for client in self._clients.values():
                own = {handle: us for (root, handle), us in defaults.items() if root == client.handle}
                client.defaults |= {handle: us for handle, us in own.items() if handle in client.objects}
            self._tsgs = None

    def fds(self) -> Sequence[int]:
        """Return the process's descriptors that its clients belong to."""
        with self._lock:
            return sorted({client.fd for client in self._clients.values()})

    def tsgs(self) -> Sequence[Tsg]:
        """Return the known TSGs on every GPU; the same object as long as nothing was found or dropped."""
        with self._lock:
            if self._tsgs is None:
                self._tsgs = tuple(tsg for client in self._clients.values() for tsg in client.tsgs())
            return self._tsgs

    def quick(self, controls: Mapping[int, rm.Control]) -> None:
        """Look just past the highest handle of each client."""
        for client in self._known(controls):
            start = max(HANDLE_BASE, client.top - BACK)
            self._merge(client, controls[client.fd], try_handles(controls[client.fd], client.handle, start, QUICK_RUN))

    def may_be_new(self) -> bool:
        """Return whether the host made anything since the last wide look. This takes one call instead of some 40.
        Objects that come and go in equal numbers are missed until the next wide look.
        """
        try:
            return self._counter.totals() != self._totals
        except OSError:
            return True

    def wide(self, force: bool = False) -> bool:
        """Look for new clients, and further past the highest handle of each client; return whether it looked.
        Without `force`, it does not look if the host made nothing new. Raises ProcessLookupError when the
        process is gone.
        """
        with self._looking:
            return self._wide(force)

    def _wide(self, force: bool) -> bool:
        totals = self._counter.totals()
        if totals == self._totals and self._clients and not force:
            return False
        fds = frozenset(self._system.control_fds(self.process.pid))
        with rm.borrowed(self._system, self.process, sorted(fds)) as controls:
            self._drop_gone(controls)
            # Each search uses up one of RM's numbers, so none is made where only memory came and went, by the totals.
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
        # Read before looking: objects made meanwhile are looked for the next time.
        self._totals = totals
        return True

    def _known(self, controls: Mapping[int, rm.Control]) -> Sequence[_Client]:
        with self._lock:
            return [client for client in self._clients.values() if client.fd in controls]

    def _find_clients(self, controls: Mapping[int, rm.Control]) -> None:
        now = self._counter.sample()
        for fd, control in controls.items():
            # A descriptor not met before can hold any client made since the process began.
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
        """Forget freed objects. A number that was closed and opened again is another file, so its
        clients are gone.
        """
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
        """Try the next stretch of the whole range: a gap longer than WIDE_RUN hides what is past it."""
        start = max(client.cursor, client.top + WIDE_RUN)
        for handle in range(start, start + WIDE_RUN, QUICK_RUN):
            found = try_handles(control, client.handle, handle, QUICK_RUN, self.levers.stand_aside)
            if found.top > client.top:
                self._merge(client, control, found)
        past = start + WIDE_RUN
        client.cursor = past if past < HANDLE_BASE + HANDLE_COUNT else HANDLE_BASE

    def _merge(self, client: _Client, control: rm.Control, found: Found) -> None:
        gpu_ids, defaults = {}, {}
        # A subdevice whose GPU could not be learnt is asked again, since without it all its TSGs are out of reach. A
        # TSG is not asked again for its default: by now it may have a timeslice that was set.
        again = {handle: value for handle, value in client.objects.items() if handle not in client.gpu_ids}
        again = {handle: value for handle, value in again.items() if value[0] == rm.CLASS_SUBDEVICE}
        for handle, (class_, _) in (again | {**found.objects}).items():
            try:
                if class_ == rm.CLASS_SUBDEVICE and handle not in client.gpu_ids:
                    gpu_ids[handle] = control.query(client.handle, handle, rm.GPU_GET_ID, rm.GPU_ID, 0)[0]
                elif class_ == rm.CLASS_TSG and handle not in client.objects:
                    now = control.query(client.handle, handle, rm.GET_TIMESLICE, rm.TIMESLICE, 0)[0]
                    defaults[handle] = self._recalled.get((client.handle, handle), now)
            except rm.RmError as error:  # freed meanwhile, or the GPU fell off the bus
                log.debug("object 0x%x of pid %d: %s", handle, self.process.pid, error)
        with self._lock:
            if any(client.objects.get(handle) != value for handle, value in found.objects.items()) or gpu_ids:
                self._tsgs = None
            client.objects.update(found.objects)
            client.gpu_ids.update(gpu_ids)
            client.defaults.update(defaults)
            client.top = max(client.top, found.top)


class Census:
    """The Handles of every process, shared by all GPUs: a process has one set of clients for all
    GPUs that it uses.
    """

    def __init__(self, system: System, counter: ClientCounter) -> None:
        self.system = system
        self.counter = counter
        self._levers = Precedence(PATIENCE_S)
        self._handles: dict[Process, Handles] = {}

    def of(self, process: Process) -> Handles:
        """Return the Handles of a process; those of a new process are empty."""
        found = self._handles.get(process)
        if found is None:
            found = self._handles[process] = Handles(self.system, self.counter, process, self._levers)
        return found

    def forget(self, process: Process) -> None:
        """Forget a process that has ended."""
        self._handles.pop(process, None)
