"""The options of a mount, as ``-o`` lists, mount(8) and fstab(5) write them."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

import attrs

from backend.choose import GPUS, LEDGERS, Choice
from backend.core.controller import DEADLINE_S
from backend.core.turns import HOLD_MOST_US, HOLD_US
from backend.process.ushering import CUDA
from backend.scheduler.memory.turns import WAIT_US
from ggroupfs.errors import UsageError
from ggroupfs.installed import SLICES_D
from ggroupfs.text import values
from ggroupfs.units.policy import WAIT_S

IGNORED = frozenset(
    (
        *("rw", "suid", "nosuid", "dev", "nodev", "exec", "noexec", "sync", "async", "dirsync", "defaults"),
        *("atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime", "strictatime", "nostrictatime"),
        *("lazytime", "nolazytime", "iversion", "noiversion", "mand", "nomand", "silent", "loud"),
        *("auto", "noauto", "user", "nouser", "users", "nousers", "owner", "noowner", "group", "nogroup"),
        *("nofail", "_netdev", "_rnetdev"),
        *("allow_other", "default_permissions", "poll", "selftest"),
    )
)
"""Options that mount(8) passes on and that are ignored, because they mean nothing here or hold anyway."""

COMMENTS = frozenset(("comment", "user"))
"""Options with a value that are ignored: comments for readers of the table of mounts."""

USERSPACE = ("x-", "X-")
"""Prefixes of options for mount(8), systemd and other programs."""

PASSED = frozenset(("ro", "debug", "auto_unmount"))
"""Options that are passed to libfuse."""


@attrs.frozen
class MountOptions:
    """The options of one mount."""

    mountpoint: Path
    """The directory to mount on."""
    choice: Choice = Choice()  # noqa: RUF009 - frozen
    """The GPUs and the ledger that serve it."""
    poll: bool = True
    """Whether poll(2) asks the daemon: then events wake pollers, but every poll of any file waits for an answer."""
    socket: Path | None = None
    """Socket to which programs on the GPUs connect; by default under /run/ggroupfs, named after the mountpoint."""
    also: Path | None = None
    """Second place of the tree, in a directory for containers. (A bind mount of the tree itself dies with its
    daemon.)
    """
    journal: Path | None = None
    """File for the state that must survive a killed daemon; by default under /run/ggroupfs."""
    keep_journal: bool = True
    """Whether there is a journal."""
    deadline: float = DEADLINE_S
    """Deadline of the hardware to answer a write, seconds."""
    scheduler: bool = True
    """Whether priorities and weights decide which program has the GPU."""
    hold_us: int | None = HOLD_US
    """Microseconds for which programs of worse priority are held after the last request of a better one. With None they
    are not held at all, not even while there are requests.
    """
    turns: bool = True
    """Whether programs that use more memory than there is room for take turns."""
    turns_wait: float = WAIT_US / 1e6
    """Longest wait of a program for such a turn, seconds."""
    units: bool = True
    """Whether unit files configure slices."""
    units_wait: float = WAIT_S
    """Longest wait of a program for the limits of its slices, seconds."""
    slices_d: Path = SLICES_D
    """Directory of the files that configure cgroups without a unit."""
    usher: tuple[str, ...] = ()
    """Files whose opening is delayed for programs of frozen slices: absolute paths, and CUDA for the driver's
    library.
    """
    bus: str | None = None
    """Address of the bus that systemd is on; None for the system bus, if systemd runs the machine."""
    fuse: frozenset[str] = frozenset()
    """Options for libfuse."""


def parse(mountpoint: Path, gpu: str, ledger: str, lists: list[str]) -> MountOptions:
    """Return the options of one command line. UsageError for an unknown option or an invalid value."""
    options = MountOptions(mountpoint, Choice(gpu, ledger))
    for word in (word for words in lists for word in words.split(",") if word):
        key, equals, value = word.partition("=")
        try:
            options = _apply(options, key, value if equals else None)
        except (OSError, ValueError):
            raise UsageError(f"option {key}: {value!r} makes no sense") from None
    return options


def _apply(options: MountOptions, key: str, value: str | None) -> MountOptions:
    """Return `options` with one more applied."""
    choice = options.choice
    if value is None:
        if key in IGNORED or key.startswith(USERSPACE):
            return options
        if key in PASSED:
            return attrs.evolve(options, fuse=options.fuse | {key})
        if key == "nopoll":
            return attrs.evolve(options, poll=False)
        if key == "nojournal":
            return attrs.evolve(options, keep_journal=False)
        if key == "noselftest":
            return attrs.evolve(options, choice=attrs.evolve(choice, selftest=False))
    elif key == "gpu":
        return attrs.evolve(options, choice=attrs.evolve(choice, gpu=_one_of(GPUS, value)))
    elif key == "ledger":
        return attrs.evolve(options, choice=attrs.evolve(choice, ledger=_one_of(LEDGERS, value)))
    elif key == "socket":
        return attrs.evolve(options, socket=Path(os.path.abspath(_something(value))))
    elif key == "also":
        return attrs.evolve(options, also=_absolute(value))
    elif key == "journal":
        return attrs.evolve(options, journal=_absolute(value), keep_journal=True)
    elif key == "deadline":
        return attrs.evolve(options, deadline=_seconds(value))
    elif key == "scheduler":
        return attrs.evolve(options, scheduler=_one_of(("on", "off"), value) == "on")
    elif key == "hold":
        return attrs.evolve(options, hold_us=None if value == "no" else _hold(value))
    elif key == "turns":
        return attrs.evolve(options, turns=_one_of(("on", "off"), value) == "on")
    elif key == "turns.wait":
        return attrs.evolve(options, turns_wait=_seconds(value))
    elif key == "units":
        return attrs.evolve(options, units=_one_of(("auto", "no"), value) == "auto")
    elif key == "units.wait":
        return attrs.evolve(options, units_wait=_seconds(value))
    elif key == "slices.d":
        return attrs.evolve(options, slices_d=Path(_something(value)))
    elif key == "usher":
        return attrs.evolve(options, usher=tuple(map(_file, value.split(":"))))
    elif key == "bus":
        return attrs.evolve(options, bus=_something(value))
    elif key == "soft.gpus":
        return attrs.evolve(options, choice=attrs.evolve(choice, soft_gpus=values.integer(value, 1, 16)))
    elif key == "soft.gmem":
        capacity = values.amount(value)
        if capacity < choice.soft_config.page:
            raise ValueError("not one page")
        config = attrs.evolve(choice.soft_config, capacity=capacity)
        return attrs.evolve(options, choice=attrs.evolve(choice, soft_config=config))
    elif key == "soft.switch":
        config = attrs.evolve(choice.soft_config, switch_us=values.span(value) if value != "0" else 0)
        return attrs.evolve(options, choice=attrs.evolve(choice, soft_config=config))
    elif key == "soft.faults":
        config = attrs.evolve(choice.soft_config, faults=_something(value))
        return attrs.evolve(options, choice=attrs.evolve(choice, soft_config=config))
    elif key in COMMENTS or key.startswith(USERSPACE):
        return options
    raise UsageError(f"unknown option {key}" + ("" if value is None else f"={value}"))


def _one_of(names: Collection[str], value: str) -> str:
    if value not in names:
        raise ValueError(f"not one of {names}")
    return value


def _something(value: str) -> str:
    if not value:
        raise ValueError("empty")
    return value


def _absolute(value: str) -> Path:
    path = Path(value)
    if not path.is_absolute() or not path.name:
        raise ValueError("the daemon is in another directory")
    return path


def _file(value: str) -> str:
    return value if value == CUDA else os.fspath(_absolute(value))


def _hold(value: str) -> int:
    us = 0 if value == "0" else values.span(value)
    if value == "default" or us > HOLD_MOST_US:
        raise ValueError(f"more than {HOLD_MOST_US} microseconds")
    return us


def _seconds(value: str) -> float:
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError("not a time to wait")
    return seconds
