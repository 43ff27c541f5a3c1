"""What the control files of a process or slice say, read into one record.

An open of a control file is four requests to the daemon, so only the files are read that are needed, and what several
of them tell is read once. What a machine cannot tell is None, never 0, and so is what is only in files that were not
needed.

Each file is named once, in SOURCES, and its value parsed as one that is written to it. That these are the files of the
table of controls a test sees to: the table is the daemon's, and loading it would load all that controls act on.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from ggroupfs.client import content, flat
from ggroupfs.text import values


@attrs.frozen
class Figures:
    """What the control files of a process or slice say, on one GPU. Sizes in bytes; None: not told, or not asked."""

    current: int | None = None
    """Memory on the GPU."""
    peak: int | None = None
    """Highest `current` so far."""
    swap: int | None = None
    """Memory in the host."""
    swap_peak: int | None = None
    """Highest `swap` so far."""
    high: int | None = None
    """gmem.limit.high; MAX: no limit."""
    low: int | None = None
    """gmem.limit.low; MAX: all of it is protected."""
    swap_max: int | None = None
    """gmem.swap.max; MAX: no limit."""
    limit_max: int | None = None
    """gmem.limit.max; MAX: no limit."""
    oom_group: bool | None = None
    """gmem.oom.group."""
    swapin: int | None = None
    """Moves to the GPU, ever."""
    swapin_bytes: int | None = None
    """Moved to the GPU, ever."""
    swapout: int | None = None
    """Moves to the host, ever."""
    swapout_bytes: int | None = None
    """Moved to the host, ever."""
    move_usec: int | None = None
    """Time those moves took, microseconds."""
    implicit: int | None = None
    """Memory that the driver counts and was not charged."""
    unmovable: int | None = None
    """Memory that stays on the GPU whatever the limits say."""
    disputed: int | None = None
    """Memory that was charged and the driver does not count."""
    exchanged_bytes: int | None = None
    """Bytes that changed places with colder ones, ever."""
    clean: int | None = None
    """Copies in the host of memory that is on the GPU."""
    byte_seconds: int | None = None
    """Memory on the GPU times how long it was there, ever, byte-seconds."""
    working_set: int | None = None
    """Bytes that it used in its last turn; this and what follows of one that had turns for the sake of memory."""
    working_set_resident: int | None = None
    """Bytes of them on the GPU."""
    unwritten: int | None = None
    """Bytes on the GPU that it has not written since the host had them last."""
    turn_fetched_bytes: int | None = None
    """Bytes that came for its turns, before they began."""
    turn_evicted_bytes: int | None = None
    """Bytes of it that went for the turns of others."""
    turn_missed_bytes: int | None = None
    """Bytes that its last turn used and that were not expected to be used."""
    turn_over_bytes: int | None = None
    """Bytes that were expected to be used in its last turn, and were not."""
    memory_turns: int | None = None
    """Turns that it had for the sake of memory."""
    memory_runs: int | None = None
    """Processes that have such a turn now."""
    memory_waits: int | None = None
    """Processes that wait for one."""
    timeslice: float | None = None
    """compute.timeslice, milliseconds; 0: ``default``."""
    freeze: bool | None = None
    """compute.freeze: what was asked of this very group."""
    frozen: bool | None = None
    """Whether nothing of it can run: it, or a slice above, is frozen."""
    populated: bool | None = None
    """Whether a process of it has a context on the GPU."""
    migrated: int | None = None
    """How often a process was moved to another GPU, or one of a slice to this one."""
    undone: int | None = None
    """How often a process undid its freeze or its timeslice by itself, and it was set again."""
    lost: int | None = None
    """How often its GPU was lost while it was there."""
    server_lost: int | None = None
    """How often the server of its space ended."""
    priority: int | None = None
    """compute.priority."""
    weight: int | None = None
    """compute.weight."""
    quota: int | None = None
    """compute.max: work on the GPU in each period, microseconds; MAX: no quota."""
    period: int | None = None
    """compute.max: the period, microseconds."""
    wait_max: float | None = None
    """compute.wait.max, milliseconds; 0: ``default``."""
    spatial: bool | None = None
    """compute.spatial."""
    sm_max: int | None = None
    """compute.sm.max, SMs; 0: ``max``."""
    submitted: int | None = None
    """Kernels launched, ever."""
    finished: int | None = None
    """Kernels finished, ever."""
    pending: int | None = None
    """Kernels that may still finish."""
    capped_launches: int | None = None
    """Launches that ran on the SMs of compute.sm.max alone."""
    uncapped_launches: int | None = None
    """Launches that ran on all SMs in spite of compute.sm.max."""
    gpu_usec: int | None = None
    """Time on the engine, microseconds."""
    gpu_usec_estimate: int | None = None
    """About that, where it cannot be measured, microseconds."""
    busy_usec: int | None = None
    """Time on the engine with work to do, microseconds."""
    busy_sampled_usec: int | None = None
    """What of that comes from the driver's samples, microseconds."""
    timeslice_usec: int | None = None
    """The timeslice that holds for it now, with all slices above, microseconds."""
    tsgs: int | None = None
    """TSGs of its contexts."""
    channels: int | None = None
    """Channels in them."""
    attached: int | None = None
    """TSGs that are on the runlist."""
    nr_periods: int | None = None
    """Periods of its quota in which it had something to do."""
    nr_throttled: int | None = None
    """Times that it was kept from running, for the turn of another or as a quota was used up."""
    throttled_usec: int | None = None
    """For how long, microseconds."""
    frozen_usec: int | None = None
    """How long it was to be frozen, microseconds."""
    since: int | None = None
    """Time since which all that grows is counted, seconds of the Unix epoch."""
    off: Mapping[str, int] | None = None
    """Processes off the runlist, by the names of the reasons, and ``gr``: those without the GR engine alone."""
    managed: bool | None = None
    """Whether its memory can be moved."""
    events: Mapping[str, int] | None = None
    """gmem.events, what is counted there."""
    over: bool | None = None
    """Whether it is over a limit, and reclaim has not changed that (gmem.events)."""
    past: bool | None = None
    """Whether a program in it holds much that its library did not see (gmem.events)."""


@attrs.frozen
class Source:
    """A control file that figures come from."""

    fields: frozenset[str]
    """Those of `Figures` that it tells."""
    parse: Callable[[str], Mapping[str, Any]]
    """Its content -> field and value."""


RENAMED = {"resident": "current", "swapped": "swap"}
"""Keys of flat keyed files whose figure is called otherwise: as the file is that has it alone."""

SWITCHES = frozenset(("frozen", "populated", "managed"))
"""Keys of flat keyed files that are 0 or 1."""


def _one(field: str, parse: Callable[[str], Any] = int) -> Source:
    return Source(frozenset((field,)), lambda text: {field: parse(text)})


def _keyed(keys: str) -> Source:
    """A flat keyed file. Other keys are a newer daemon's."""
    fields = {key: RENAMED.get(key, key) for key in keys.split()}

    def parse(text: str) -> Mapping[str, Any]:
        found = ((key, value) for key, value in flat(text).items() if key in fields)
        return {fields[key]: bool(value) if key in SWITCHES else value for key, value in found}

    return Source(frozenset(fields.values()), parse)


def _events(text: str) -> Mapping[str, Any]:
    """Parse gmem.events: counts, and two states."""
    counts = dict(flat(text))
    states: dict[str, Any] = {key: bool(counts.pop(key)) for key in ("over", "past") if key in counts}
    return {"events": counts, **states}


OFF = "off_"
"""What the keys of gcgroup.stat begin with that say why processes are off the runlist."""


def _work(keys: str) -> Source:
    """Return the source of gcgroup.stat: its keys, and those that begin with `OFF` as one figure."""
    other = _keyed(keys)

    def parse(text: str) -> Mapping[str, Any]:
        off = {key.removeprefix(OFF): value for key, value in flat(text).items() if key.startswith(OFF)}
        return {**other.parse(text), **({"off": off} if off else {})}

    return Source(other.fields | {"off"}, parse)


SOURCES: Mapping[str, Source] = {
    "gmem.current": _one("current"),
    "gmem.swap.current": _one("swap"),
    "gmem.stat": _keyed(
        "resident swapped swapin swapin_bytes swapout swapout_bytes move_usec"
        " implicit unmovable disputed exchanged_bytes clean byte_seconds"
        " working_set working_set_resident unwritten turn_fetched_bytes turn_evicted_bytes"
        " turn_missed_bytes turn_over_bytes"
    ),
    "gmem.peak": _one("peak"),
    "gmem.swap.peak": _one("swap_peak"),
    "gmem.limit.high": _one("high", values.size),
    "gmem.limit.low": _one("low", values.size),
    "gmem.swap.max": _one("swap_max", values.size),
    "gmem.limit.max": _one("limit_max", values.size),
    "gmem.oom.group": _one("oom_group", values.switch),
    "gmem.events": Source(frozenset(("events", "over", "past")), _events),
    "compute.timeslice": _one("timeslice", lambda text: values.span(text) / 1000),
    "compute.freeze": _one("freeze", values.switch),
    "compute.events": _keyed("frozen populated migrated undone lost server_lost"),
    "compute.priority": _one("priority"),
    "compute.weight": _one("weight"),
    "compute.max": Source(
        frozenset(("quota", "period")),
        lambda text: dict(zip(("quota", "period"), values.quota(text.strip()), strict=True)),
    ),
    "compute.sm.max": _one("sm_max", lambda text: int(values.sms(text))),
    "compute.wait.max": _one("wait_max", lambda text: values.span(text) / 1000),
    "compute.spatial": _one("spatial", values.switch),
    "gcgroup.stat": _work(
        "submitted finished pending capped_launches uncapped_launches gpu_usec gpu_usec_estimate busy_usec"
        " busy_sampled_usec timeslice_usec tsgs"
        " channels attached nr_periods nr_throttled throttled_usec memory_turns memory_runs memory_waits"
        " frozen_usec managed since"
    ),
}
"""Where each figure is found. Of several files that tell the same, the first is the one for it alone."""

LATER = frozenset(
    ("compute.max", "gmem.limit.max", "gmem.oom.group", "compute.wait.max", "compute.spatial", "compute.sm.max")
)
"""Control files that a daemon of an earlier version does not have: it serves until it is upgraded."""

EVERYTHING = frozenset(field.name for field in attrs.fields(Figures))


def files_for(fields: Iterable[str]) -> tuple[str, ...]:
    """The fewest control files that tell these figures. KeyError for what no file tells."""
    wanted = set(fields)
    if unknown := wanted - EVERYTHING:
        raise KeyError(f"no control file tells {', '.join(sorted(unknown))}")
    chosen = []
    while wanted:
        best = max(SOURCES, key=lambda name: len(SOURCES[name].fields & wanted))  # the first of equals
        chosen.append(best)
        wanted -= SOURCES[best].fields
    return tuple(chosen)


def figures_of(directory: str | os.PathLike[str], files: Iterable[str]) -> Figures:
    """What some control files of a group say, but for those that this machine refuses, or that its daemon is too old to
    have. OSError when it is gone."""
    path = os.fspath(directory)
    told: dict[str, Any] = {}
    for name in files:
        try:
            text = content(f"{path}/{name}")
        except OSError as error:
            is_older = error.errno == errno.ENOENT and name in LATER and os.path.isdir(path)
            if error.errno != errno.EOPNOTSUPP and not is_older:
                raise
        else:
            told |= SOURCES[name].parse(text)
    return Figures(**told)
