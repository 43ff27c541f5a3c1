"""KernelLedger: the books, kept by the kernel module ggroup. They outlive the daemon, and the module pulls every lever.

See kmod/uapi/ggroup.h, which says what each call does, and :class:`backend.ledgers.soft.SoftLedger`, which specifies
the answers. A number too large for a field is sent as the field's largest, so that the kernel refuses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import math
import os
import select
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import attrs
import trio

from backend.common import clock
from backend.common.errors import fail
from backend.common.threads import in_a_thread
from backend.core.held import Held
from backend.core.protocols import Inherited, Target
from backend.core.reasons import Engines, Off, reasons_of
from backend.core.records import PEAKS, Books, Channel, Peak, Wanted
from backend.core.settings import LEVERS, LIMIT_MAX, REASONS, SETTINGS, Kind, Setting
from backend.door.wire import Op
from backend.ledgers import abi
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn, group_on

log = logging.getLogger(__name__)

DEVICE = "/dev/ggroup"

NEEDED = abi.FEATURE_BOOKS | abi.FEATURE_PROVIDER

WITHOUT: Mapping[int, tuple[str, str]] = {
    abi.FEATURE_BOOKS: ("books", "it keeps no books"),
    abi.FEATURE_PROVIDER: ("provider", "no program can serve a GPU"),
    abi.FEATURE_TENANT: ("tenant", "no program can charge for itself"),
    abi.FEATURE_USERMEM: ("usermem", "no program can listen there to what it is to give back"),
    abi.FEATURE_COUNTERS: ("counters", "no program can count its kernels there"),
    abi.FEATURE_BOUNDS: ("bounds", "a user can make as many groups as there is room for"),
    abi.FEATURE_PEAKS: (
        "peaks",
        "gmem.swap.peak is EOPNOTSUPP; after a restart gmem.peak begins at its last reset",
    ),
    abi.FEATURE_REASONS: (
        "reasons",
        "a turn takes all engines, and memory with them; after a restart no reason is known but a freeze",
    ),
    abi.FEATURE_NEXT_USE: ("next_use", "reclaim takes from the largest first, however busy it is"),
}
"""Features that this program knows: the name of each, and the consequence where the loaded module lacks it."""

LEVERS_AT_ONCE = 64
"""Most levers that are waited for at the same time, each in a thread."""

TARGETS = 64
"""Number of targets that a plan has room for at first; it grows."""

EVENTS_AT_ONCE = 256

TOLD_MOST = 1000
"""Most calls of a listener for events that came as one: a program that causes many must not keep the daemon busy."""

_OFF = ("off_all", "off_gr")
"""Fields of the reasons, which this program keeps itself for a module that does not."""

_FLAGS = tuple(setting.field for setting in SETTINGS if setting.kind is Kind.SWITCH)
"""Fields of settings that are 0 or 1 in the kernel."""
_SAME = tuple(field.name for field in attrs.fields(Books) if field.name not in ("current", *_FLAGS))
"""Fields with the same name in the kernel."""

_NOTED = {
    "low": abi.EVENT_LOW,
    "high": abi.EVENT_HIGH,
    "reclaim": abi.EVENT_RECLAIM,
    "fail": abi.EVENT_FAIL,
    "max": abi.EVENT_MAX,
    "oom": abi.EVENT_OOM,
    "oom_kill": abi.EVENT_OOM_KILL,
    "oom_group_kill": abi.EVENT_OOM_GROUP_KILL,
}
"""Events by name. Those of limit_max only where the module keeps that setting."""

OLD_PEAKS: frozenset[Peak] = frozenset(("peak",))
"""Peaks that a module of 0.1 keeps."""
_PEAKS: Mapping[Peak, int] = {"peak": abi.PEAK_GMEM, "swap_peak": abi.PEAK_SWAP}

_CHANNELS = {abi.CHANNEL_GMEM: Channel.GMEM, abi.CHANNEL_USERMEM: Channel.USERMEM}
"""Channels of events. Exits are left out: :class:`backend.process.exits.ExitWatch` reports them with any ledger."""

_PULLS: Mapping[Op, int] = {
    op: getattr(abi, f"IOC_{op.name}") for op in (*abi.LEVERS, Op.ATTACH_TSG, Op.DETACH_TSG, Op.RECLAIM)
}
"""The ioctl that has a lever moved, by the provider's command of the same name."""


@attrs.frozen
class Module:
    """The abilities of a kernel module."""

    features: int
    """Features, as bits."""
    settings: frozenset[Setting] = frozenset(SETTINGS)
    """Settings that it keeps."""


def _hello(device: int) -> abi.Hello:
    """Return the hello of an opened device."""
    hello = abi.Hello()
    _ask(device, abi.IOC_HELLO, hello)
    return hello


def features() -> Module:
    """Return the abilities of the kernel module here. OSError, with its reason in words, where there is none that can
    be used."""
    try:
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise OSError(errno.ENOENT, f"there is no {DEVICE}: load the kernel module ggroup") from None
    except OSError as error:
        raise OSError(error.errno, f"{DEVICE}: {error.strerror}") from None
    try:
        hello = _hello(device)
    except OSError as error:
        raise OSError(error.errno, f"{DEVICE} is not of the kernel module ggroup: {error.strerror}") from None
    finally:
        os.close(device)
    if hello.version != abi.ABI_VERSION:
        text = f"the kernel module ggroup speaks version {hello.version}, and this program {abi.ABI_VERSION}"
        raise OSError(errno.EPROTO, text)
    if hello.features & NEEDED != NEEDED:
        raise OSError(errno.EPROTO, f"the kernel module ggroup lacks features: {hello.features:#x}")
    return Module(int(hello.features), abi.settings_of(hello))


def lacking(found: Module) -> Mapping[str, str]:
    """Return what a module lacks of what this program knows: names, with the consequence of each. Abilities that this
    program does not know are not used."""
    lacks = {name: words for bit, (name, words) in WITHOUT.items() if not found.features & bit}
    without = [setting for setting in SETTINGS if setting not in found.settings and setting.in_file_of is None]
    return lacks | {setting.field: f"{setting.control or setting.field} is refused" for setting in without}


def check() -> str:
    """Return a description of the kernel module here. OSError, with its reason in words, where there is none that can
    be used."""
    found = features()
    here = ",".join(name for bit, (name, _) in WITHOUT.items() if found.features & bit)
    lacks = "".join(f"; lacks {name}: {words}" for name, words in lacking(found).items())
    return f"version {abi.ABI_VERSION}, features {here}{lacks}"


class KernelLedger:
    """A :class:`backend.core.protocols.Ledger` in the kernel. See the module."""

    name = "kernel"

    def __init__(self, names: Mapping[int, str], *, temporary: Collection[int] = ()) -> None:
        """`names` has the UUID of each GPU, by index. The books of `temporary` GPUs end with :meth:`close`, unless
        another daemon takes over."""
        self._names = dict(names)
        self._temporary = frozenset(temporary)
        self._control = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        hello = _hello(self._control)
        features = hello.features
        self.lacks = frozenset(SETTINGS) - abi.settings_of(hello)
        """Settings that the module does not keep: any value but the default is refused with EOPNOTSUPP."""
        self.peaks = PEAKS if features & abi.FEATURE_PEAKS else OLD_PEAKS
        self._has_reasons = bool(features & abi.FEATURE_REASONS)
        self._has_next_use = bool(features & abi.FEATURE_NEXT_USE)
        self._off: dict[Group, tuple[int, int]] = {}  # the reasons, for a module without them
        self._reset: dict[Group, int] = {}  # the peak before the last reset, for a module that forgets it
        self._held: dict[Group, Held] = {}  # as seen here: the module keeps nothing over time
        self._queues: dict[int, int] = {}
        self._streams: list[int] = []
        self._events = select.epoll()  # one descriptor that waits for all of them
        self._ids: dict[Group, int] = {}
        self._groups: dict[int, Group] = {}
        self._inherited: list[Inherited] = []
        self._listeners: list[Callable[[Group, Channel], None]] = []
        self._configured: list[Callable[[Group], None]] = []
        self._limiter = trio.CapacityLimiter(LEVERS_AT_ONCE)

    def close(self, *, released: bool = False, handed_over: bool = False) -> None:
        for index, queue in self._queues.items():
            flags = abi.UNREGISTER_RELEASED if released else 0
            if index in self._temporary and not handed_over:
                flags |= abi.UNREGISTER_FORGET
            if flags:
                _ask(queue, abi.IOC_UNREGISTER, abi.Unregister(flags=flags))
        for descriptor in (*self._queues.values(), *self._streams, self._control):
            os.close(descriptor)
        self._events.close()

    # Events

    def listen(self, listener: Callable[[Group, Channel], None], configured: Callable[[Group], None]) -> None:
        self._listeners.append(listener)
        self._configured.append(configured)

    async def run(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._events.fileno())
            self._tell()

    def _tell(self) -> None:
        """Pass on what happened since the last time, whether or not this daemon caused it."""
        size = ctypes.sizeof(abi.Event)
        for stream in self._streams:
            with contextlib.suppress(BlockingIOError):
                while True:
                    raw = os.read(stream, EVENTS_AT_ONCE * size)
                    for start in range(0, len(raw), size):
                        self._tell_one(abi.Event.from_buffer_copy(raw, start))

    def _tell_one(self, event: abi.Event) -> None:
        group, channel = self._groups.get(event.id), _CHANNELS.get(event.channel)
        if group is not None and event.channel == abi.CHANNEL_SET:
            for configured in self._configured:
                try:
                    configured(group)
                except Exception:  # other events are still read
                    log.exception("%s: what is asked is not followed", group)
        if group is not None and channel is not None:
            for _ in range(min(event.count, TOLD_MOST)):
                for listener in self._listeners:
                    listener(group, channel)

    # The tree

    def add_gpu(self, index: int, capacity: int, granule: int = 1) -> None:
        root = SliceOn(ROOT, index)
        if root in self._ids:
            raise fail(errno.EEXIST)
        uuid = self._names[index]
        gpu = abi.Gpu(uuid=uuid.encode(), capacity=_word(capacity), granule=_word(granule))
        queue = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _ask(queue, abi.IOC_REGISTER, gpu)
        except OSError as error:
            os.close(queue)
            if error.errno == errno.EBUSY:
                raise OSError(errno.EBUSY, f"GPU {index} ({uuid}) is served by another mount") from None
            raise
        self._queues[index] = queue
        self._enter(root, gpu.root)
        stream = abi.Fd(id=gpu.root, flags=os.O_CLOEXEC | os.O_NONBLOCK)
        _ask(self._control, abi.IOC_EVENTS, stream)
        self._streams.append(stream.fd)
        self._events.register(stream.fd, select.EPOLLIN)
        self._take_over(root)

    def inherited(self) -> Sequence[Inherited]:
        return tuple(self._inherited)

    def add(self, group: Group, parent: SliceOn) -> None:
        if group in self._ids:
            raise fail(errno.EEXIST)
        above = self._id(parent)
        if parent.gpu != group.gpu:
            raise fail(errno.EXDEV)
        argument = abi.Group(root=self._id(SliceOn(ROOT, group.gpu)), parent=above)
        if isinstance(group, Member):
            process = group.process
            argument.kind, argument.pid, argument.start = abi.KIND_PROCESS, process.pid, process.start
        else:
            path = os.fsencode(group.slice.path)
            if len(path) >= abi.PATH_LEN:
                raise fail(errno.ENAMETOOLONG)
            argument.kind, argument.path = abi.KIND_SLICE, path
        _ask(self._control, abi.IOC_ADD, argument)
        self._enter(group, argument.id)

    def move(self, group: Group, parent: SliceOn) -> None:
        _ask(self._control, abi.IOC_MOVE, abi.Move(id=self._id(group), parent=self._id(parent)))

    def remove(self, group: Group) -> None:
        id_ = self._id(group)
        try:
            _ask(self._control, abi.IOC_REMOVE, abi.Id(id=id_))
        except OSError as error:
            if error.errno != errno.ENODEV:  # gone already is as good
                raise
        del self._ids[group], self._groups[id_]
        self._reset.pop(group, None)
        self._off.pop(group, None)
        self._held.pop(group, None)

    def parent(self, group: Group) -> Group | None:
        return self._groups.get(self._get(group).parent)

    # Reading and configuring

    def books(self, group: Group) -> Books:
        found = self._get(group)
        self._seen(group, found.current_bytes)
        same = {name: getattr(found, name) for name in _SAME} | {name: bool(getattr(found, name)) for name in _FLAGS}
        if self.peaks is OLD_PEAKS:
            same["peak_ever"] = max(found.peak, self._reset.get(group, 0))
        if not self._has_reasons:
            same |= zip(_OFF, self._off.get(group, (0, 0)), strict=True)
        for setting in self.lacks:
            same[setting.field] = setting.default
        return Books(current=found.current_bytes, **same)

    def configure(self, group: Group, **changes: int | bool) -> None:
        if not changes.keys() <= abi.SET.keys():
            raise fail(errno.EINVAL)
        argument = abi.Set(id=self._id(group))
        for setting in self.lacks:
            if changes.pop(setting.field, setting.default) != setting.default:
                raise fail(errno.EOPNOTSUPP)
        for name, value in changes.items():
            argument.mask |= abi.SET[name]
            setattr(argument, name, _word(value, 32 if getattr(abi.Set, name).size == 4 else 64))
        _ask(self._control, abi.IOC_SET, argument)

    def set_reasons(self, group: Group, off_all: int, off_gr: int) -> None:
        argument = abi.Reasons(id=self._id(group), off_all=_word(off_all, 32), off_gr=_word(off_gr, 32))
        if self._has_reasons:
            _ask(self._control, abi.IOC_REASONS, argument)
            return
        self._get(group)  # ENODEV where it is gone
        if isinstance(group, SliceOn) or (off_all | off_gr) & ~REASONS or off_all & off_gr:
            raise fail(errno.EINVAL)
        self._off[group] = off_all, off_gr

    def set_next_use(self, gpu: int, ranks: Mapping[Member, int]) -> None:
        root = self._id(SliceOn(ROOT, gpu))
        for group, rank in ranks.items():
            if not isinstance(group, Member) or group.gpu != gpu or not 0 <= rank <= abi.NEXT_USE_MOST:
                raise fail(errno.EINVAL)
        if not self._has_next_use:
            return  # such a module plans by size alone
        known = [abi.Use(id=self._ids[group], next=ranks[group]) for group in ranks if group in self._ids]
        for start in range(0, len(known), abi.USES_MOST):
            part = known[start : start + abi.USES_MOST]
            uses = (abi.Use * len(part))(*part)
            argument = abi.Uses(root=root, uses=ctypes.addressof(uses), count=len(part))
            _ask(self._control, abi.IOC_NEXT_USE, argument)

    def held(self, group: Group) -> Held:
        return self._seen(group, self._get(group).current_bytes)

    def reset_peak(self, group: Group, peak: Peak) -> None:
        # Resets count for this open file alone: GET by any other does not see them.
        if peak not in self.peaks:
            raise fail(errno.EOPNOTSUPP)
        before = self.books(group).peak_ever
        _ask(self._control, abi.IOC_RESET_PEAK, abi.Reset(id=self._id(group), what=_PEAKS[peak]))
        if self.peaks is OLD_PEAKS:
            self._reset[group] = before

    # Charging

    def charge(self, group: Group, nbytes: int) -> None:
        try:
            self._amount(abi.IOC_CHARGE, group, nbytes)
        except OSError:
            self._tell()
            raise

    def uncharge(self, group: Group, nbytes: int) -> None:
        self._amount(abi.IOC_UNCHARGE, group, nbytes)

    def uncharge_swap(self, group: Group, nbytes: int) -> None:
        self._amount(abi.IOC_UNCHARGE_SWAP, group, nbytes)

    def swap_out(self, group: Group, nbytes: int, usec: int = 0) -> None:
        self._amount(abi.IOC_SWAP_OUT, group, nbytes, usec)

    def swap_in(self, group: Group, nbytes: int, usec: int = 0) -> None:
        self._amount(abi.IOC_SWAP_IN, group, nbytes, usec)

    def observe(self, group: Group, nbytes: int) -> None:
        self._amount(abi.IOC_OBSERVE, group, nbytes)

    # Reclaim

    def excess(self, group: Group) -> int:
        found = self._get(group)
        most = int(found.high) if LIMIT_MAX in self.lacks else min(int(found.high), int(found.limit_max))
        return max(0, int(found.current_bytes) - most)

    def plan(self, group: Group, nbytes: int) -> Sequence[Target]:
        # Anything beyond GGROUP_MAX means all there is.
        argument = abi.Plan(id=self._id(group), nbytes=min(max(0, nbytes), abi.MAX), capacity=TARGETS)
        while True:
            targets = (abi.Target * argument.capacity)()
            argument.targets = ctypes.addressof(targets)
            try:
                _ask(self._control, abi.IOC_PLAN, argument)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                argument.capacity = max(argument.count, 2 * argument.capacity)
            else:
                break
        # Groups that another program added are unknown here, and cannot be taken from.
        return [
            Target(member, target.nbytes, bool(target.flags & abi.TARGET_BELOW_LOW))
            for target in targets[: argument.count]
            if isinstance(member := self._groups.get(target.id), Member)
        ]

    def note(self, group: Group, event: str) -> None:
        if event not in _NOTED:
            raise fail(errno.EINVAL)
        _ask(self._control, abi.IOC_NOTE, abi.Note(id=self._id(group), event=_NOTED[event]))
        self._tell()

    def press(self, group: Group, nbytes: int) -> None:
        self._amount(abi.IOC_PRESS, group, nbytes)
        self._tell()

    # Levers

    def queue(self, index: int) -> int:
        """Return the descriptor of a GPU's commands, not blocking; :class:`backend.ledgers.provider.ProviderGpu` serves
        them."""
        return self._queues[index]

    async def pull(self, lever: Op, group: Group, value: int, seconds: float) -> int:
        """Have the kernel move a lever of a process, and return once the GPU's provider has done it; raise the
        provider's errno.

        The value is in the unit of the setting for SET_*, bytes for RECLAIM, and ENGINES_* for DETACH_TSG, which takes
        all engines with a module without FEATURE_REASONS.

        Returns the bytes moved for RECLAIM. ENODEV when the group is gone or the GPU has no provider, ETIMEDOUT after
        `seconds`, EAGAIN where no thread is to be had.

        May be cancelled; the kernel goes on waiting then, and later calls of the same lever come after this one.
        """
        milliseconds = min(max(1, math.ceil(seconds * 1000)), abi.TIMEOUT_MS_MOST)
        if lever is Op.DETACH_TSG and not self._has_reasons:
            value = abi.ENGINES_ALL  # the only choice of this module: what must stop, stops
        argument = abi.Command(id=self._id(group), value=_word(value), timeout_ms=milliseconds)
        call = partial(_ask, self._control, _PULLS[lever], argument)
        await in_a_thread("the kernel module", call, self._limiter)
        return int(argument.value)

    # Helpers

    def _id(self, group: Group) -> int:
        try:
            return self._ids[group]
        except KeyError:
            raise fail(errno.ENODEV) from None

    def _enter(self, group: Group, id_: int) -> None:
        self._ids[group], self._groups[id_] = id_, group

    def _get(self, group: Group) -> abi.Books:
        found = abi.Books(id=self._id(group))
        _ask(self._control, abi.IOC_GET, found)
        return found

    def _seen(self, group: Group, nbytes: int) -> Held:
        """Note what a group holds now, and return its memory over time. Between two looks it counts as holding what it
        held at the first."""
        now = clock.boot_usec()
        held = self._held[group] = self._held.get(group, Held(at_usec=now)).changed(nbytes, now)
        return held

    def _amount(self, request: int, group: Group, nbytes: int, usec: int = 0) -> None:
        _ask(self._control, request, abi.Amount(id=self._id(group), nbytes=_word(nbytes), usec=_word(usec)))

    def _take_over(self, root: Group) -> None:
        """Make the groups that exist already known, those above first: a move may have left them in another order."""
        found = {group.id: group for group in self._walk(self._ids[root])}
        pending = list(found)
        while pending:
            group = found[pending[-1]]
            if group.parent in found and group.parent not in self._groups:
                pending.append(group.parent)
                continue
            pending.pop()
            if group.id not in self._groups:
                self._inherit(root.gpu, group)

    def _walk(self, root: int) -> Iterator[abi.Group]:
        last = root  # the oldest of them
        while True:
            group = abi.Group(root=root, id=last)
            try:
                _ask(self._control, abi.IOC_NEXT, group)
            except FileNotFoundError:
                return
            last = group.id
            yield group

    def _inherit(self, gpu: int, found: abi.Group) -> None:
        above = self._groups.get(found.parent)
        if above is None:
            return  # added meanwhile by another process
        if found.kind == abi.KIND_PROCESS and not found.pid:  # in a pid namespace that is not visible: out of reach
            _ask(self._control, abi.IOC_REMOVE, abi.Id(id=found.id))
            return
        node = Slice(os.fsdecode(found.path)) if found.kind == abi.KIND_SLICE else Process(found.pid, found.start)
        group = group_on(node, gpu)
        self._enter(group, found.id)
        books = self._get(group)
        applied = Wanted(_off(books), **{lever.field: getattr(books, f"lever_{lever.field}") for lever in LEVERS})
        doubtful, joined = bool(books.flags & abi.BOOKS_DOUBTFUL), bool(books.flags & abi.BOOKS_JOINED)
        self._inherited.append(Inherited(group, above, applied, doubtful, joined))


def _off(books: abi.Books) -> Off:
    """Return the reasons for which another daemon left a process off the runlist, as far as the levers that it pulled
    go."""
    engines = Engines.NONE
    if books.flags & abi.BOOKS_DETACHED:
        engines = Engines.GR if books.flags & abi.BOOKS_DETACHED_GR else Engines.ALL
    return Off(reasons_of(books.off_all), reasons_of(books.off_gr)).held_in(engines)


def _word(number: int, bits: int = 64) -> int:
    """Return a number as a field of so many bits takes it."""
    most = (1 << bits) - 1
    return number if 0 <= number <= most else most


def _ask(descriptor: int, request: int, argument: ctypes.Structure) -> None:
    """Call ioctl(2), again after each signal."""
    while True:
        try:
            fcntl.ioctl(descriptor, request, argument)
        except InterruptedError:
            continue
        return
