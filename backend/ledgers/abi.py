"""The interface of the kernel module ggroup, as Python sees it: kmod/uapi/ggroup.h, which says what everything means.

Names are those of the header without ``GGROUP_`` and ``struct ggroup_``; a test compares every size, offset, sign and
number in both. Structures are native, as they never leave the machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_char, c_int32, c_uint32, c_uint64

from backend.core.nextuse import NEXT_USE_MOST as NEXT_USE_MOST
from backend.core.nextuse import NEXT_USE_S as NEXT_USE_S
from backend.core.nextuse import NextUse
from backend.core.records import OVERCOMMIT as OVERCOMMIT
from backend.core.settings import GID, OOM_GROUP, PERIOD, PRIORITY, QUOTA, SETTINGS, WEIGHT, Lever, Setting
from backend.core.settings import LEVERS as _LEVERS
from backend.core.settings import MAX as MAX
from backend.core.settings import NOBODY as NOBODY
from backend.door import wire

ABI_VERSION = 1

UUID_LEN = 64
PATH_LEN = 4096
MAX_DEPTH = 32
MAX_DEPTH_ROOT = 128
MAX_SLICES_PER_USER = 4096
RESETS_MOST = 64
TIMEOUT_MS = 5000
TIMEOUT_MS_MOST = 600_000

PRIORITY_MOST, PRIORITY_DEFAULT = PRIORITY.most, PRIORITY.default
WEIGHT_MOST, WEIGHT_DEFAULT = WEIGHT.most, WEIGHT.default
QUOTA_LEAST_US = QUOTA.least
PERIOD_LEAST_US, PERIOD_MOST_US, PERIOD_DEFAULT_US = PERIOD.least, PERIOD.most, PERIOD.default

# struct ggroup_hello.features

FEATURE_BOOKS = 1 << 0
FEATURE_PROVIDER = 1 << 1
FEATURE_TENANT = 1 << 2
FEATURE_USERMEM = 1 << 3
FEATURE_COUNTERS = 1 << 4
FEATURE_BOUNDS = 1 << 5
FEATURE_PEAKS = 1 << 6
FEATURE_REASONS = 1 << 7
FEATURE_NEXT_USE = 1 << 8

# struct ggroup_gpu.flags, struct ggroup_unregister.flags

GPU_INHERITED = 1 << 0

UNREGISTER_RELEASED = 1 << 0
UNREGISTER_FORGET = 1 << 1

# struct ggroup_group.kind

KIND_ROOT = 0
KIND_SLICE = 1
KIND_PROCESS = 2

# struct ggroup_books.flags

BOOKS_ONLINE = 1 << 0
BOOKS_JOINED = 1 << 1
BOOKS_DEAD = 1 << 2
BOOKS_DETACHED = 1 << 3
BOOKS_DOUBTFUL = 1 << 4
BOOKS_DETACHED_GR = 1 << 5

# struct ggroup_books, struct ggroup_reasons: off_all, off_gr

REASON_FREEZE = 1 << 0
REASON_TURN = 1 << 1
REASON_QUOTA = 1 << 2
REASON_BUSY = 1 << 3
REASON_GANG = 1 << 4
REASON_MIGRATION = 1 << 5

# struct ggroup_use.next

NEXT_USE_SOON = int(NextUse.SOON)
USES_MOST = 1024

# struct ggroup_command.value of DETACH_TSG, and the fourth word of its message

ENGINES_ALL = 0
ENGINES_GR = 1

# struct ggroup_set.mask

SET = {setting.field: 1 << bit for bit, setting in enumerate(SETTINGS)}
"""Bits of the mask by field; in the header, ``GGROUP_SET_`` with the name of the setting's constant."""
_OF_THE_FIRST = SETTINGS[: SETTINGS.index(GID) + 1]


def settings_of(hello: Hello) -> frozenset[Setting]:
    """Return the settings that a module takes, given its hello; one that lists none takes those of the first
    version."""
    if not hello.settings:
        return frozenset(_OF_THE_FIRST)
    return frozenset(setting for setting in SETTINGS if hello.settings & SET[setting.field])


# struct ggroup_reset.what

PEAK_GMEM = 0
PEAK_SWAP = 1

# struct ggroup_note.event

EVENT_LOW = 0
EVENT_HIGH = 1
EVENT_MAX = 2
EVENT_OOM = 3
EVENT_RECLAIM = 4
EVENT_FAIL = 5
EVENT_OOM_KILL = 6
EVENT_OOM_GROUP_KILL = 7

# struct ggroup_target.flags

TARGET_BELOW_LOW = 1 << 0

# struct ggroup_event.channel

CHANNEL_GMEM = 1
CHANNEL_USERMEM = 2
CHANNEL_EXIT = 3
CHANNEL_SET = 4

# struct ggroup_message.op: the format and the numbers are those of backend.door.wire

MESSAGE_REPLY = wire.REPLY

OP_ARRIVE = wire.Op.ARRIVE
OP_SET_TIMESLICE = wire.Op.SET_TIMESLICE
OP_ATTACH_TSG = wire.Op.ATTACH_TSG
OP_DETACH_TSG = wire.Op.DETACH_TSG
OP_RECLAIM = wire.Op.RECLAIM
OP_SET_SM_MAX = wire.Op.SET_SM_MAX

LEVERS = {wire.Op[f"SET_{lever.constant}"]: lever for lever in _LEVERS}
"""Levers with a number for their value, by the command that carries it."""
OPS = {lever: op for op, lever in LEVERS.items()}


_NARROW = frozenset(("frozen", "priority", "weight", "kept", "uid", "gid"))
"""Fields of the settings that are a __u32 in the structures of the first version."""


def _type(setting: Setting) -> type[c_uint32] | type[c_uint64]:
    """Return the C type of a setting: those after the first version have 64 bits, so that no structure has a hole."""
    return c_uint32 if setting.field in _NARROW else c_uint64


_BEFORE_KILLS = SETTINGS[len(_OF_THE_FIRST) : SETTINGS.index(OOM_GROUP) + 1]
"""Settings added to the books after the first version and before they counted kills."""
_SINCE_KILLS = SETTINGS[SETTINGS.index(OOM_GROUP) + 1 :]


def _of_books(settings: tuple[Setting, ...]) -> Iterator[tuple[str, type[c_uint32] | type[c_uint64]]]:
    """Yield the fields that settings take in the books of a group: the setting, and, for a lever, the value that
    holds."""
    for setting in settings:
        yield setting.field, _type(setting)
        if isinstance(setting, Lever):
            yield f"lever_{setting.field}", c_uint64


class Hello(ctypes.Structure):
    _fields_ = (("version", c_uint32), ("reserved", c_uint32), ("features", c_uint64), ("settings", c_uint64))


class Gpu(ctypes.Structure):
    _fields_ = (
        ("uuid", c_char * UUID_LEN),
        ("capacity", c_uint64),
        ("granule", c_uint64),
        ("headroom", c_uint64),
        ("root", c_uint64),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    )


class Unregister(ctypes.Structure):
    _fields_ = (("flags", c_uint32), ("reserved", c_uint32))


class Group(ctypes.Structure):
    _fields_ = (
        ("root", c_uint64),
        ("parent", c_uint64),
        ("id", c_uint64),
        ("start", c_uint64),
        ("pid", c_int32),
        ("kind", c_uint32),
        ("path", c_char * PATH_LEN),
    )


class Move(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("parent", c_uint64))


class Id(ctypes.Structure):
    _fields_ = (("id", c_uint64),)


class Books(ctypes.Structure):
    _fields_ = (
        ("id", c_uint64),
        ("high", c_uint64),
        ("low", c_uint64),
        ("swap_max", c_uint64),
        ("current_bytes", c_uint64),
        ("peak", c_uint64),
        ("swap", c_uint64),
        ("swapin_bytes", c_uint64),
        ("swapout_bytes", c_uint64),
        ("swapins", c_uint64),
        ("swapouts", c_uint64),
        ("move_usec", c_uint64),
        ("events_low", c_uint64),
        ("events_high", c_uint64),
        ("events_max", c_uint64),
        ("events_oom", c_uint64),
        ("events_reclaim", c_uint64),
        ("events_fail", c_uint64),
        ("timeslice_us", c_uint64),
        ("pressure_bytes", c_uint64),
        ("pressure_seq", c_uint64),
        ("frozen", c_uint32),
        ("priority", c_uint32),
        ("weight", c_uint32),
        ("kept", c_uint32),
        ("uid", c_uint32),
        ("gid", c_uint32),
        ("parent", c_uint64),
        ("lever_timeslice_us", c_uint64),
        ("submitted", c_uint64),
        ("finished", c_uint64),
        ("flags", c_uint32),
        ("reserved", c_uint32),
        ("swap_peak", c_uint64),
        ("peak_ever", c_uint64),
        ("swap_peak_ever", c_uint64),
        ("off_all", c_uint32),
        ("off_gr", c_uint32),
        *_of_books(_BEFORE_KILLS),
        ("events_oom_kill", c_uint64),
        ("events_oom_group_kill", c_uint64),
        *_of_books(_SINCE_KILLS),
    )


class Set(ctypes.Structure):
    _fields_ = (
        ("id", c_uint64),
        ("mask", c_uint64),
        *((setting.field, _type(setting)) for setting in SETTINGS),
    )


class Reset(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("what", c_uint32), ("reserved", c_uint32))


class Reasons(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("off_all", c_uint32), ("off_gr", c_uint32))


class Amount(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("nbytes", c_uint64), ("usec", c_uint64))


class Note(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("event", c_uint32), ("reserved", c_uint32))


class Target(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("nbytes", c_uint64), ("flags", c_uint32), ("reserved", c_uint32))


class Plan(ctypes.Structure):
    _fields_ = (
        ("id", c_uint64),
        ("nbytes", c_uint64),
        ("targets", c_uint64),
        ("capacity", c_uint32),
        ("count", c_uint32),
    )


class Use(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("next", c_uint32), ("reserved", c_uint32))


class Uses(ctypes.Structure):
    _fields_ = (("root", c_uint64), ("uses", c_uint64), ("count", c_uint32), ("reserved", c_uint32))


class Command(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("value", c_uint64), ("timeout_ms", c_uint32), ("reserved", c_uint32))


class Join(ctypes.Structure):
    _fields_ = (
        ("uuid", c_char * UUID_LEN),
        ("root", c_uint64),
        ("id", c_uint64),
        ("timeout_ms", c_uint32),
        ("reserved", c_uint32),
    )


class Fd(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("flags", c_uint32), ("fd", c_int32))


class Event(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("channel", c_uint32), ("count", c_uint32))


class Pressure(ctypes.Structure):
    _fields_ = (("nbytes", c_uint64), ("seq", c_uint64))


class Counters(ctypes.Structure):
    _fields_ = (("submitted", c_uint64), ("finished", c_uint64), ("reserved", c_uint64 * 6))


class Message(ctypes.Structure):
    _fields_ = (
        ("op", c_uint32),
        ("status", c_int32),
        ("seq", c_uint64),
        ("gpu", c_uint32),
        ("flags", c_uint32),
        ("args", c_uint64 * wire.ARGS),
    )


IOC_MAGIC = 0xE9

_WRITE, _READ = 1, 2


def _ioc(direction: int, number: int, argument: type[ctypes.Structure]) -> int:
    """Return an ioctl's number, as _IOC() of asm-generic/ioctl.h makes it on x86 and ARM."""
    return direction << 30 | ctypes.sizeof(argument) << 16 | IOC_MAGIC << 8 | number


IOC_HELLO = _ioc(_READ, 0, Hello)

IOC_JOIN = _ioc(_WRITE | _READ, 1, Join)
IOC_CHARGE = _ioc(_WRITE, 2, Amount)
IOC_UNCHARGE = _ioc(_WRITE, 3, Amount)
IOC_UNCHARGE_SWAP = _ioc(_WRITE, 4, Amount)
IOC_SWAP_OUT = _ioc(_WRITE, 5, Amount)
IOC_SWAP_IN = _ioc(_WRITE, 6, Amount)
IOC_USERMEM = _ioc(_WRITE | _READ, 7, Fd)
IOC_GET = _ioc(_WRITE | _READ, 8, Books)

IOC_ADD = _ioc(_WRITE | _READ, 16, Group)
IOC_FIND = _ioc(_WRITE | _READ, 17, Group)
IOC_NEXT = _ioc(_WRITE | _READ, 18, Group)
IOC_MOVE = _ioc(_WRITE, 19, Move)
IOC_REMOVE = _ioc(_WRITE, 20, Id)
IOC_SET = _ioc(_WRITE, 21, Set)
IOC_RESET_PEAK = _ioc(_WRITE, 22, Reset)
IOC_OBSERVE = _ioc(_WRITE, 23, Amount)
IOC_NOTE = _ioc(_WRITE, 24, Note)
IOC_PRESS = _ioc(_WRITE, 25, Amount)
IOC_PLAN = _ioc(_WRITE | _READ, 26, Plan)
IOC_SET_TIMESLICE = _ioc(_WRITE, 27, Command)
IOC_ATTACH_TSG = _ioc(_WRITE, 28, Command)
IOC_DETACH_TSG = _ioc(_WRITE, 29, Command)
IOC_RECLAIM = _ioc(_WRITE | _READ, 30, Command)
IOC_REASONS = _ioc(_WRITE, 31, Reasons)
IOC_NEXT_USE = _ioc(_WRITE, 32, Uses)
IOC_SET_SM_MAX = _ioc(_WRITE, 33, Command)

IOC_REGISTER = _ioc(_WRITE | _READ, 48, Gpu)
IOC_UNREGISTER = _ioc(_WRITE, 49, Unregister)
IOC_FORGET = _ioc(_WRITE, 50, Gpu)
IOC_EVENTS = _ioc(_WRITE | _READ, 51, Fd)
