"""The one table of control files: what each is called, its permission bits, what it shows, and what a write does.

Every operation on them consults it. The files of settings come from the rows of :mod:`backend.core.settings`; what is
here besides is what makes one hold (`ACTS`), the files of figures and events, and the actions.

What they promise is docs/semantics.md, which a test executes.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs

from backend.core import settings
from backend.core.controller import Controller
from backend.core.peaks import Mark
from backend.core.records import MAX, Books, Channel, Peak
from backend.core.settings import Kind, Setting
from backend.process.identity import Group, SliceOn
from ggroupfs.fs import record
from ggroupfs.text import values

Show = Callable[[Controller, Group], str]
Parse = Callable[[str], Any]
Apply = Callable[[Controller, Group, Any], Awaitable[None]]

PARSED = 64
"""Texts of each setting whose values are kept: a write has 4095 bytes at most."""


@attrs.frozen
class Control:
    """One control file, the same for a process and for a slice."""

    name: str
    """Its name in the directory, and in ggroup.capabilities."""
    mode: int
    """Permission bits: 0644, 0444, 0400 or 0200."""
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
    if not us and isinstance(group, SliceOn):
        return "default\n"
    return values.show_ms(us or controller.gpus[group.gpu].info.timeslice_default_us) + "\n"


def _sm_max(controller: Controller, group: Group) -> str:
    """What holds of the SMs that are asked for, of this group alone."""
    return values.show_sms(controller.gpus[group.gpu].info.sms_of(controller.books(group).sm_max)) + "\n"


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
            "oom_kill": books.events_oom_kill,
            "oom_group_kill": books.events_oom_group_kill,
            "over": int(controller.is_over(group)),
            "past": int(controller.is_past(group)),
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
            "clean": footprint.clean,
            "byte_seconds": controller.byte_seconds(group),
            **_turn_memory(controller, group),
        }
    )


def _turn_memory(controller: Controller, group: Group) -> Mapping[str, int]:
    """What is there of a group that has, or had, turns for the sake of memory."""
    turned = controller.turned(group)
    if turned is None:
        return {}
    found = controller.working_set(group)
    return {
        "working_set": found.used,
        "working_set_resident": found.resident,
        "unwritten": found.unwritten,
        "turn_fetched_bytes": turned.fetched,
        "turn_evicted_bytes": turned.evicted,
        "turn_missed_bytes": found.missed,
        "turn_over_bytes": found.over,
    }


def _compute_events(controller: Controller, group: Group) -> str:
    controller.books(group)
    return values.flat_keyed(
        {
            "populated": int(controller.is_populated(group)),
            "frozen": int(controller.is_frozen(group)),
            "migrated": controller.moved(group),
            "undone": controller.undone_count(group),
            "lost": controller.losses(group),
            "server_lost": controller.servers_lost(group),  # None where there is none
        }
    )


def _gcgroup_stat(controller: Controller, group: Group) -> str:
    activity, throttled, turned = controller.activity(group), controller.throttled(group), controller.turned(group)
    return values.flat_keyed(
        {
            "submitted": activity.submitted,
            "finished": activity.finished,
            "pending": activity.pending,
            "capped_launches": activity.capped,
            "uncapped_launches": activity.uncapped,
            "gpu_usec": activity.gpu_usec,
            "gpu_usec_estimate": activity.gpu_usec_estimate,
            "busy_usec": activity.busy_usec,
            "busy_sampled_usec": activity.busy_sampled_usec,
            "timeslice_usec": controller.applied_timeslice(group) or None,
            "tsgs": activity.tsgs,
            "channels": activity.channels,
            "attached": activity.attached,
            "nr_periods": controller.periods(group),
            "nr_throttled": throttled.times,
            "throttled_usec": throttled.usec,
            "memory_turns": None if turned is None else turned.turns,
            "memory_runs": None if turned is None else turned.runs,
            "memory_waits": None if turned is None else turned.waits,
            "frozen_usec": controller.frozen_usec(group),
            **{f"off_{name}": processes for name, processes in controller.off(group).items()},
            "managed": int(activity.managed),
            "since": controller.began(group),
        }
    )


def _peak(name: str) -> Control:
    """The highest value of a figure."""
    peak = PEAKS[name]

    async def reset(controller: Controller, group: Group, value: None) -> None:
        """A reset is of one open file (ggroupfs.fs.files.PeakFile). Of one that is never read, nothing is seen."""
        unread = Mark(peak)
        controller.reset_peak(group, unread)
        controller.leave_peak(group, unread)

    return Control(name, 0o644, lambda controller, group: f"{controller.peak(group, peak)}\n", values.anything, reset)


def shown(setting: Setting) -> Show:
    """What its control file shows, as its parser takes it."""
    if setting is settings.TIMESLICE:
        return _timeslice
    if setting.kind is Kind.SMS:
        return _sm_max
    if setting.kind is Kind.QUOTA:
        period = settings.SECOND[setting.field].field
        return _books(lambda books: values.show_quota(getattr(books, setting.field), getattr(books, period)))
    if setting.kind is Kind.SPAN:
        return _books(lambda books: values.show_span(getattr(books, setting.field)))
    if setting.kind is Kind.SIZE:
        return _books(lambda books: values.show_size(getattr(books, setting.field)))
    return _books(lambda books: int(getattr(books, setting.field)))


def _parser(setting: Setting) -> Parse:
    """What reads a value; the same few are written again and again."""
    return functools.lru_cache(PARSED)(values.parser(setting))


def _set(setting: Setting) -> Apply:
    return lambda controller, group, value: controller.set_value(group, setting, value)


ACTS: dict[Setting, Apply] = {
    settings.HIGH: Controller.set_high,
    settings.LIMIT_MAX: Controller.set_max,
    settings.FROZEN: Controller.set_frozen,
    settings.QUOTA: Controller.set_quota,
    settings.SPATIAL: Controller.set_spatial,
    settings.SM_MAX: Controller.set_sms,
}
"""What makes a setting hold, where it takes more than to have it in the books, or a lever follow."""


def _controls(family: str) -> tuple[Control, ...]:
    """The control files of the settings of a family, ``gmem`` or ``compute``."""
    return tuple(
        Control(name, 0o644, shown(setting), _parser(setting), ACTS.get(setting) or _set(setting), lever=True)
        for name, setting in settings.BY_CONTROL.items()
        if name.startswith(f"{family}.")
    )


def _device(word: str) -> str:
    """A GPU: its index or its UUID."""
    return word if word.startswith("GPU-") else str(values.integer(word, 0, MAX))


PEAKS: Mapping[str, Peak] = {"gmem.peak": "peak", "gmem.swap.peak": "swap_peak"}
"""Files of highest values, and what those are called in the books."""

CONTROLS = (
    *_controls("gmem"),
    Control("gmem.current", 0o444, _books(lambda books: books.current)),
    _peak("gmem.peak"),
    Control("gmem.swap.current", 0o444, _books(lambda books: books.swap)),
    _peak("gmem.swap.peak"),
    Control("gmem.reclaim", 0o200, None, values.amount, Controller.reclaim, lever=True),
    Control("gmem.events", 0o444, _gmem_events, channel=Channel.GMEM),
    Control("gmem.stat", 0o444, _gmem_stat),
    # Records, not text: ggroupfs.fs.files reads them for each opener.
    Control("usermemfd", 0o444, channel=Channel.USERMEM, lever=True),
    *_controls("compute"),
    Control("compute.migrate", 0o200, None, _device, Controller.migrate, lever=True),
    Control("compute.events", 0o444, _compute_events, channel=Channel.COMPUTE),
    Control("gcgroup.stat", 0o444, _gcgroup_stat),
    Control("gcgroup.record", 0o400, record.show),
)

LEVERS = tuple(control.name for control in CONTROLS if control.lever)
