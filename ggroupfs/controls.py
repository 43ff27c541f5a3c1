"""The one table of control files: what each is called, who may open it, what it shows, and what a write means and does.

Every operation on them consults it. The books and the hardware behind it have to know what a new one is about.

What they promise is docs/semantics.md, which a test executes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs

from backend.controller import Controller
from backend.identity import Group, Slice
from backend.peaks import Mark
from backend.records import MAX, Books, Channel
from ggroupfs import values

Show = Callable[[Controller, Group], str]
Parse = Callable[[str], Any]
Apply = Callable[[Controller, Group, Any], Awaitable[None]]


@attrs.frozen
class Control:
    """One control file, the same for a process and for a slice."""

    name: str
    """Its name in the directory, and in ggroup.capabilities."""
    mode: int
    """Permission bits: 0644, 0444 or 0200."""
    show: Show | None = None
    """Its content, newline included; None for a file that cannot be read. ENODEV when the group is gone."""
    parse: Parse | None = None
    """What a write means; None for a file that cannot be written. EINVAL or ERANGE."""
    apply: Apply | None = None
    """Makes a parsed value hold, or raises and leaves everything as it was."""
    channel: Channel | None = None
    """The events that wake its pollers; None for a file that is always ready."""
    lever: bool = False
    """Whether ggroup.capabilities says what it does on this machine."""


def _books(render: Callable[[Books], object]) -> Show:
    """Shows something of the books."""
    return lambda controller, group: f"{render(controller.ledger.books(group))}\n"


def _timeslice(controller: Controller, group: Group) -> str:
    """What is asked for, else what the driver gives; a slice that asks for nothing says so."""
    us = controller.books(group).timeslice_us
    if not us and isinstance(group.node, Slice):
        return "default\n"
    return values.show_ms(us or controller.gpus[group.gpu].info.timeslice_default_us) + "\n"


def _gmem_events(controller: Controller, group: Group) -> str:
    books = controller.books(group)
    return values.flat_keyed(
        {
            "low": books.events_low,
            "high": books.events_high,
            "max": books.events_max,
            "oom": books.events_oom,
            "reclaim": books.events_reclaim,
            "fail": books.events_fail,
        }
    )


def _gmem_stat(controller: Controller, group: Group) -> str:
    books, footprint = controller.books(group), controller.footprint(group)
    return values.flat_keyed(
        {
            "resident": books.current,
            "swapped": books.swap,
            "swapin": books.swapins,
            "swapin_bytes": books.swapin_bytes,
            "swapout": books.swapouts,
            "swapout_bytes": books.swapout_bytes,
            "move_usec": books.move_usec,
            "implicit": footprint.implicit,
            "unmovable": footprint.unmovable,
            "disputed": footprint.disputed,
            "exchanged_bytes": footprint.exchanged,
        }
    )


def _compute_events(controller: Controller, group: Group) -> str:
    controller.books(group)
    return values.flat_keyed(
        {
            "populated": int(controller.is_populated(group)),
            "frozen": int(controller.is_frozen(group)),
            "migrated": controller.moved(group),
            "undone": controller.undone_count(group),
            "lost": controller.losses(group),
        }
    )


def _gcgroup_stat(controller: Controller, group: Group) -> str:
    activity, throttled = controller.activity(group), controller.throttled(group)
    return values.flat_keyed(
        {
            "submitted": activity.submitted,
            "finished": activity.finished,
            "pending": activity.pending,
            "gpu_usec": activity.gpu_usec,
            "gpu_usec_estimate": activity.gpu_usec_estimate,
            "timeslice_usec": controller.applied_timeslice(group) or None,
            "tsgs": activity.tsgs,
            "channels": activity.channels,
            "attached": activity.attached,
            "nr_throttled": throttled.times,
            "throttled_usec": throttled.usec,
            "frozen_usec": controller.frozen_usec(group),
            "managed": int(activity.managed),
        }
    )


async def _reset_peak(controller: Controller, group: Group, value: None) -> None:
    """A reset is of one open file (ggroupfs.files.PeakFile). Of one that is never read, nobody notices anything."""
    unread = Mark()
    controller.reset_peak(group, unread)
    controller.leave_peak(group, unread)


def _share(name: str) -> Apply:
    """A control that the scheduler acts on."""
    return lambda controller, group, value: controller.set_share(group, name, value)


def _device(word: str) -> str:
    """A GPU: its index or its UUID."""
    return word if word.startswith("GPU-") else str(values.integer(word, 0, MAX))


PEAK = "gmem.peak"

CONTROLS = (
    Control(
        "gmem.limit.high",
        0o644,
        _books(lambda books: values.show_size(books.high)),
        values.size,
        Controller.set_high,
        lever=True,
    ),
    Control(
        "gmem.limit.low",
        0o644,
        _books(lambda books: values.show_size(books.low)),
        values.size,
        Controller.set_low,
        lever=True,
    ),
    Control("gmem.current", 0o444, _books(lambda books: books.current)),
    Control(
        PEAK,
        0o644,
        lambda controller, group: f"{controller.peak(group)}\n",
        values.anything,
        _reset_peak,
    ),
    Control("gmem.swap.current", 0o444, _books(lambda books: books.swap)),
    Control(
        "gmem.swap.max",
        0o644,
        _books(lambda books: values.show_size(books.swap_max)),
        values.size,
        Controller.set_swap_max,
        lever=True,
    ),
    Control("gmem.reclaim", 0o200, None, values.amount, Controller.reclaim, lever=True),
    Control("gmem.events", 0o444, _gmem_events, channel=Channel.GMEM),
    Control("gmem.stat", 0o444, _gmem_stat),
    # Records, not text: ggroupfs.files reads them for each opener.
    Control("usermemfd", 0o444, channel=Channel.USERMEM, lever=True),
    Control("compute.timeslice", 0o644, _timeslice, values.timeslice, Controller.set_timeslice, lever=True),
    Control(
        "compute.freeze",
        0o644,
        _books(lambda books: int(books.frozen)),
        values.switch,
        Controller.set_frozen,
        lever=True,
    ),
    Control(
        "compute.priority",
        0o644,
        _books(lambda books: books.priority),
        lambda word: values.integer(word, 0, 15),
        _share("compute.priority"),
        lever=True,
    ),
    Control(
        "compute.weight",
        0o644,
        _books(lambda books: books.weight),
        lambda word: values.integer(word, 1, 10000),
        _share("compute.weight"),
        lever=True,
    ),
    Control("compute.migrate", 0o200, None, _device, Controller.migrate, lever=True),
    Control("compute.events", 0o444, _compute_events, channel=Channel.COMPUTE),
    Control("gcgroup.stat", 0o444, _gcgroup_stat),
)

LEVERS = tuple(control.name for control in CONTROLS if control.lever)
