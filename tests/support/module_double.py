"""A double of the kernel module: its ioctls, queues and events, with the features that a test gives it.

Its books are a SoftLedger, and outlive the daemon that opened it. A feature that it lacks is unknown to it: the call is
ENOTTY, the field is neither read nor filled, and an unknown field that is not 0 is E2BIG, as with
copy_struct_from_user() in kmod/ioctl.c.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import attrs

from backend.common.errors import fail
from backend.core.records import Channel, Peak
from backend.core.settings import BY_FIELD, GID, LIMIT_MAX, SETTINGS, Setting
from backend.door.wire import SIZE, Message, Op
from backend.ledgers import abi, kernel
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn, group_on

ANSWER_S = 60.0
"""Seconds that a lever waits for its provider."""

PEAKS: Mapping[int, Peak] = {abi.PEAK_GMEM: "peak", abi.PEAK_SWAP: "swap_peak"}
SINCE_PEAKS = ("swap_peak", "peak_ever", "swap_peak_ever")
"""Fields of the books that came with FEATURE_PEAKS."""
SINCE_LIMIT_MAX = ("events_oom_kill", "events_oom_group_kill")
"""Counts in the books that came with the setting limit_max."""
OF_THE_FIRST = frozenset(SETTINGS[: SETTINGS.index(GID) + 1])
"""Settings of the first version."""
NUMBERS: Mapping[int, Op] = {getattr(abi, f"IOC_{op.name}"): op for op in abi.LEVERS}
"""Commands of the levers with a number, by the request that pulls each."""
ON, OFF, OFF_GR = range(3)
"""Values of a runlist lever, as in enum ggroup_runlist of kmod/queue.h."""
CHANNELS = {Channel.GMEM: abi.CHANNEL_GMEM, Channel.USERMEM: abi.CHANNEL_USERMEM}


class Lever:
    """One lever of a process, as struct ggroup_lever in kmod/lever.h: what holds, and is sent to a new provider."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        """Held by the caller whose command is in progress; others wait, as on the lever's list."""
        self.held = 0
        """Value that a provider acknowledged last and that was not released since."""
        self.doubtful = False
        """Whether the last command failed or went unanswered, so that the hardware's state is unknown."""
        self.answered = threading.Event()
        """Cleared while a command is in flight."""
        self.answered.set()
        self.sent = 0
        """Value of the command that was sent last."""
        self.answer = Message(0, 0)
        """The provider's answer to it."""

    def settle(self, answer: Message) -> None:
        """Take the provider's answer."""
        self.answer, self.doubtful = answer, bool(answer.status)
        if not answer.status:
            self.held = self.sent
        self.answered.set()


@attrs.define
class Levers:
    """The levers of one process."""

    numbers: Mapping[Op, Lever] = attrs.field(factory=lambda: {op: Lever() for op in abi.LEVERS})
    """Those with a number, by the command that carries it; 0 for the default."""
    runlist: Lever = attrs.field(factory=Lever)
    """ON, OFF or OFF_GR."""

    @property
    def doubtful(self) -> bool:
        """Whether one of the levers is doubtful."""
        return any(lever.doubtful for lever in (*self.numbers.values(), self.runlist))


class Device:
    """A registered GPU: its provider's queue, and the listener to its events."""

    def __init__(self) -> None:
        self.provider: socket.socket | None = None
        self.events: int | None = None
        self._flights: dict[int, Lever] = {}
        self._thread: threading.Thread | None = None
        self._last = 0

    def register(self, descriptor: int) -> None:
        """Make the queue of a provider for this open file."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        os.dup2(theirs.fileno(), descriptor, inheritable=False)
        theirs.close()
        self.provider = ours
        self._thread = threading.Thread(target=self._answers, args=(ours,), daemon=True)
        self._thread.start()

    def command(self, lever: Lever, op: int, process: Process, value: int, sent: int) -> Message:
        """Send `sent` and return the provider's answer. ENODEV where the provider is gone, ETIMEDOUT for none."""
        self.send(lever, op, process, value, sent)
        if not lever.answered.wait(ANSWER_S):
            raise fail(errno.ETIMEDOUT)
        return lever.answer.check()

    def send(self, lever: Lever, op: int, process: Process, value: int, sent: int) -> None:
        """Queue a command without waiting."""
        if self.provider is None:
            raise fail(errno.ENODEV)
        self._last += 1
        lever.sent = sent
        lever.answered.clear()
        self._flights[self._last] = lever
        self.provider.send(Message(op, self._last, args=(1, process.pid, process.start, value)).encode())

    def _answers(self, provider: socket.socket) -> None:
        with provider:
            while raw := provider.recv(SIZE):
                message = Message.decode(raw)
                if (lever := self._flights.pop(message.seq, None)) is not None:
                    lever.settle(message)
        if self.provider is provider:
            self.provider = None
            while self._flights:  # their provider died
                _, lever = self._flights.popitem()
                lever.settle(Message(0, 0, status=-errno.ENODEV))

    def close(self) -> None:
        """Forget the listener and the provider."""
        if self.events is not None:
            os.close(self.events)
        if self.provider is not None:
            with contextlib.suppress(OSError):  # the other end is gone already
                self.provider.shutdown(socket.SHUT_RDWR)
        self.bereave()

    def bereave(self) -> None:
        """Wait until a provider whose file is closed is gone, with all that was open for it."""
        if self._thread is not None:
            self._thread.join()


class Module:
    """The module; see the top of this file. `features` are the bits of its HELLO, `settings` those that it accepts
    and keeps; with only the settings of the first version, its HELLO does not list them."""

    def __init__(self, features: int, settings: Collection[Setting] = SETTINGS) -> None:
        self.features = features
        self.settings = frozenset(settings)
        self.calls: list[int] = []
        """Requests of the ioctls that it accepted."""
        self._books = SoftLedger()
        self._books.listen(self._happened, lambda group: None)
        self._indices: dict[bytes, int] = {}
        self._devices: dict[int, Device] = {}
        self._ids: dict[Group, int] = {}
        self._groups: dict[int, Group] = {}
        self._levers: dict[Group, Levers] = {}
        self._calls: Mapping[int, Callable[[int, Any], None]] = {
            abi.IOC_HELLO: self._hello,
            abi.IOC_REGISTER: self._register,
            abi.IOC_EVENTS: self._listen,
            abi.IOC_ADD: self._add,
            abi.IOC_NEXT: self._next,
            abi.IOC_MOVE: lambda _, it: self._books.move(self._group(it.id), self._slice(it.parent)),
            abi.IOC_REMOVE: self._remove,
            abi.IOC_GET: self._get,
            abi.IOC_SET: self._set,
            abi.IOC_RESET_PEAK: self._reset,
            abi.IOC_REASONS: self._reasons,
            abi.IOC_NEXT_USE: self._next_use,
            abi.IOC_CHARGE: lambda _, it: self._books.charge(self._group(it.id), it.nbytes),
            abi.IOC_UNCHARGE: lambda _, it: self._books.uncharge(self._group(it.id), it.nbytes),
            abi.IOC_UNCHARGE_SWAP: lambda _, it: self._books.uncharge_swap(self._group(it.id), it.nbytes),
            abi.IOC_SWAP_OUT: lambda _, it: self._books.swap_out(self._group(it.id), it.nbytes, it.usec),
            abi.IOC_SWAP_IN: lambda _, it: self._books.swap_in(self._group(it.id), it.nbytes, it.usec),
            abi.IOC_OBSERVE: lambda _, it: self._books.observe(self._group(it.id), it.nbytes),
            abi.IOC_PRESS: lambda _, it: self._books.press(self._group(it.id), it.nbytes),
            abi.IOC_NOTE: self._note,
            abi.IOC_PLAN: self._plan,
            **{request: partial(self._pull, op) for request, op in NUMBERS.items()},
            abi.IOC_ATTACH_TSG: partial(self._pull, Op.ATTACH_TSG),
            abi.IOC_DETACH_TSG: partial(self._pull, Op.DETACH_TSG),
            abi.IOC_RECLAIM: partial(self._pull, Op.RECLAIM),
        }

    @contextlib.contextmanager
    def loaded(self) -> Iterator[Module]:
        """Have backend.ledgers.kernel open and call this double."""
        with mock.patch.multiple(kernel, DEVICE="/dev/null", _ask=self.ioctl):
            try:
                yield self
            finally:
                for device in self._devices.values():
                    device.close()

    def descriptors(self) -> int:
        """Return how many descriptors it has open, without those that it handed out."""
        devices = self._devices.values()
        return sum((device.events is not None) + (device.provider is not None) for device in devices)

    def bereave(self) -> None:
        """Wait until providers whose files are closed are gone."""
        for device in self._devices.values():
            device.bereave()

    def has(self, feature: int) -> bool:
        """Return whether it knows a feature."""
        return bool(self.features & feature)

    def ioctl(self, descriptor: int, request: int, argument: ctypes.Structure) -> None:
        """Answer as the module does; ENOTTY for an unknown request."""
        since = {abi.IOC_REASONS: abi.FEATURE_REASONS, abi.IOC_NEXT_USE: abi.FEATURE_NEXT_USE}
        if request in since and not self.has(since[request]):
            raise fail(errno.ENOTTY)
        if request in NUMBERS and abi.LEVERS[NUMBERS[request]] not in self.settings:
            raise fail(errno.ENOTTY)
        self.calls.append(request)
        self._calls[request](descriptor, argument)

    # The small parts

    def _group(self, id_: int) -> Group:
        if id_ not in self._groups:
            raise fail(errno.ENODEV)
        return self._groups[id_]

    def _slice(self, id_: int) -> SliceOn:
        group = self._group(id_)
        if not isinstance(group, SliceOn):
            raise fail(errno.EINVAL)
        return group

    def _member(self, id_: int) -> Member:
        group = self._group(id_)
        if not isinstance(group, Member):
            raise fail(errno.EINVAL)
        return group

    def _enter(self, group: Group) -> int:
        id_ = max(self._groups, default=0) + 1
        self._ids[group], self._groups[id_] = id_, group
        return id_

    def _happened(self, group: Group, channel: Channel) -> None:
        stream = self._devices[group.gpu].events
        if stream is not None and channel in CHANNELS:
            os.write(stream, bytes(abi.Event(self._ids[group], CHANNELS[channel], 1)))

    # Calls

    def _hello(self, _: int, argument: abi.Hello) -> None:
        argument.version, argument.features = abi.ABI_VERSION, self.features
        if self.settings != OF_THE_FIRST:  # the first version does not list them
            argument.settings = self._known

    def _register(self, descriptor: int, argument: abi.Gpu) -> None:
        index = self._indices.setdefault(argument.uuid, len(self._indices))
        root = SliceOn(ROOT, index)
        device = self._devices.setdefault(index, Device())
        if root in self._ids:
            argument.flags |= abi.GPU_INHERITED
        else:
            self._enter(root)
            self._books.add_gpu(index, argument.capacity, argument.granule)
        argument.root = self._ids[root]
        device.register(descriptor)
        for group in list(self._ids):
            if isinstance(group, Member) and group.gpu == index:
                self._command_again(device, group)

    def _levers_of(self, group: Group) -> Levers:
        return self._levers.setdefault(group, Levers())

    def _command_again(self, device: Device, group: Member) -> None:
        """Send a new provider what held before; its charges are reported anew by the provider."""
        books, levers = self._books.books(group), self._levers_of(group)
        self._books.uncharge(group, books.current)
        self._books.uncharge_swap(group, books.swap)
        for op, lever in levers.numbers.items():
            if lever.held or lever.doubtful:
                device.send(lever, op, group.process, lever.held, lever.held)
        runlist = levers.runlist
        if runlist.held or runlist.doubtful:
            op = Op.DETACH_TSG if runlist.held else Op.ATTACH_TSG
            engines = abi.ENGINES_GR if runlist.held == OFF_GR else abi.ENGINES_ALL
            device.send(runlist, op, group.process, engines, runlist.held)

    def _listen(self, _: int, argument: abi.Fd) -> None:
        device = self._devices[self._group(argument.id).gpu]
        if device.events is not None:
            os.close(device.events)
        argument.fd, device.events = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def _add(self, _: int, argument: abi.Group) -> None:
        above = self._slice(argument.parent)
        if argument.kind == abi.KIND_PROCESS:
            node: Process | Slice = Process(argument.pid, argument.start)
        else:
            node = Slice(os.fsdecode(argument.path))
        group = group_on(node, above.gpu)
        self._books.add(group, above)
        argument.id = self._enter(group)

    def _next(self, _: int, argument: abi.Group) -> None:
        gpu = self._group(argument.root).gpu
        later = [id_ for id_, group in self._groups.items() if id_ > argument.id and group.gpu == gpu]
        if not later:
            raise fail(errno.ENOENT)
        argument.id = min(later)
        group = self._groups[argument.id]
        above = self._books.parent(group)
        argument.parent = self._ids[above] if above is not None else 0
        if isinstance(group, Member):
            argument.kind, argument.pid, argument.start = abi.KIND_PROCESS, group.process.pid, group.process.start
        else:
            argument.kind, argument.path = abi.KIND_SLICE, os.fsencode(group.slice.path)

    def _remove(self, _: int, argument: abi.Id) -> None:
        group = self._group(argument.id)
        self._books.remove(group)
        del self._ids[group], self._groups[argument.id]
        self._levers.pop(group, None)

    def _get(self, _: int, argument: abi.Books) -> None:
        group = self._group(argument.id)
        books, levers, above = self._books.books(group), self._levers_of(group), self._books.parent(group)
        for field in attrs.fields(type(books)):
            name = "current_bytes" if field.name == "current" else field.name
            lacking = name in SINCE_PEAKS and not self.has(abi.FEATURE_PEAKS)
            lacking = lacking or (name in ("off_all", "off_gr") and not self.has(abi.FEATURE_REASONS))
            lacking = lacking or (name in abi.SET and BY_FIELD[name] not in self.settings)
            lacking = lacking or (name in SINCE_LIMIT_MAX and LIMIT_MAX not in self.settings)
            if not lacking:
                setattr(argument, name, getattr(books, field.name))
        argument.parent = self._ids[above] if above is not None else 0
        for op, setting in abi.LEVERS.items():
            if setting in self.settings:
                setattr(argument, f"lever_{setting.field}", levers.numbers[op].held)
        argument.flags = abi.BOOKS_DETACHED if levers.runlist.held else 0
        argument.flags |= abi.BOOKS_DETACHED_GR if levers.runlist.held == OFF_GR else 0
        argument.flags |= abi.BOOKS_DOUBTFUL if levers.doubtful else 0

    @property
    def _known(self) -> int:
        return sum(abi.SET[setting.field] for setting in self.settings)

    def _set(self, _: int, argument: abi.Set) -> None:
        if argument.mask & ~self._known:
            raise fail(errno.EINVAL)
        fields = [setting.field for setting in SETTINGS if argument.mask & abi.SET[setting.field]]
        self._books.configure(self._group(argument.id), **{name: getattr(argument, name) for name in fields})

    def _reset(self, _: int, argument: abi.Reset) -> None:
        if not self.has(abi.FEATURE_PEAKS) and argument.what:
            raise fail(errno.E2BIG)
        self._books.reset_peak(self._group(argument.id), PEAKS[argument.what])

    def _reasons(self, _: int, argument: abi.Reasons) -> None:
        self._books.set_reasons(self._group(argument.id), argument.off_all, argument.off_gr)

    def _next_use(self, _: int, argument: abi.Uses) -> None:
        if argument.reserved or argument.count > abi.USES_MOST:
            raise fail(errno.EINVAL)
        uses = (abi.Use * argument.count).from_address(argument.uses)
        classes = {self._member(use.id): use.next for use in uses if use.id in self._groups}
        self._books.set_next_use(self._slice(argument.root).gpu, classes)

    def _note(self, _: int, argument: abi.Note) -> None:
        names = {
            abi.EVENT_LOW: "low",
            abi.EVENT_HIGH: "high",
            abi.EVENT_RECLAIM: "reclaim",
            abi.EVENT_FAIL: "fail",
        }
        if LIMIT_MAX in self.settings:
            names |= {
                abi.EVENT_MAX: "max",
                abi.EVENT_OOM: "oom",
                abi.EVENT_OOM_KILL: "oom_kill",
                abi.EVENT_OOM_GROUP_KILL: "oom_group_kill",
            }
        if argument.event not in names:
            raise fail(errno.EINVAL)
        self._books.note(self._group(argument.id), names[argument.event])

    def _plan(self, _: int, argument: abi.Plan) -> None:
        plan = self._books.plan(self._group(argument.id), argument.nbytes)
        argument.count = len(plan)
        if len(plan) > argument.capacity:
            raise fail(errno.ENOSPC)
        targets = (abi.Target * argument.capacity).from_address(argument.targets)
        for place, target in zip(targets, plan, strict=False):
            place.id, place.nbytes = self._ids[target.group], target.nbytes
            place.flags = abi.TARGET_BELOW_LOW if target.below_low else 0

    def _pull(self, op: Op, _: int, argument: abi.Command) -> None:
        """Move a lever; a value that holds already is not sent again."""
        member = self._member(argument.id)
        levers, device, value = self._levers_of(member), self._devices[member.gpu], argument.value
        if op is Op.RECLAIM:
            argument.value = device.command(Lever(), op, member.process, value, value).args[0]
            return
        lever = levers.numbers.get(op, levers.runlist)
        if op is Op.DETACH_TSG:
            is_gr = value == abi.ENGINES_GR and self.has(abi.FEATURE_REASONS)
            wanted, value = (OFF_GR, abi.ENGINES_GR) if is_gr else (OFF, abi.ENGINES_ALL)
        else:
            wanted = value if op in levers.numbers else ON
        with lever.turn:
            lever.answered.wait(ANSWER_S)  # the answer to a command without a waiting caller
            if lever.doubtful or lever.held != wanted:
                device.command(lever, op, member.process, value, wanted)
