"""Content of gcgroup.record: the state that the daemon keeps of a process or slice on one GPU, for people.

There is one value per line. Its name begins with the part of the daemon that keeps it, like the fields of
:mod:`backend.core.member`. Programs should use the other files: a name here exists only as long as that part keeps the
value.
"""

from __future__ import annotations

from collections.abc import Iterator

import trio

from backend.core.controller import Controller
from backend.core.member import Compute, Followed, Memory, Record, Scheduled, Taken, Turned
from backend.core.reasons import Off, name_of
from backend.core.records import Books, Place, Wanted
from backend.core.settings import BY_CONTROL, SECOND, Kind
from backend.process.identity import Group, Member, Slice
from ggroupfs.text import values

Lines = Iterator[tuple[str, object]]
"""Pairs of a name and its value."""

PATH_MOST = 200
"""Number of characters of a slice's path that are shown; with all else the file stays below one page, like the
others.
"""

NONE = "none"
"""Value shown where there is no reason, failure or place."""


def show(controller: Controller, group: Group) -> str:
    """Return the content of the file of a group. ENODEV when the group is gone."""
    books, record = controller.books(group), controller.population.record(group)
    lines = [*_group(controller, group), *_asked(books), *_noted(books, record)]
    for name, pending in controller.pending(group).items():
        lines += _background(name, getattr(record, name), pending)
    if isinstance(group, Member):
        lines += [*_compute(record.compute, controller.wanted(group)), *_scheduled(record.scheduled)]
    lines += [*_memory(record.memory), *_taken(record.taken)]
    return "".join(f"{name} {value}\n" for name, value in lines)


def off(reasons: Off) -> str:
    """Return a set of reasons in words: ``freeze,turn/gr``, where ``/gr`` marks a reason that takes only the GR engine
    off; or ``none``.
    """
    words = [name_of(one) + ("/gr" if one & reasons.gr else "") for one in reasons.reasons]
    return ",".join(words) or NONE


def _group(controller: Controller, group: Group) -> Lines:
    """Yield what the group is, and where."""
    if isinstance(group, Member):
        resident = controller.population.resident(group.process)
        yield "process", group.process.pid
        yield "start", group.process.start
        if resident is not None:
            yield "slice", _path(resident.slice)
            yield "cgroup", _path(resident.cgroup)
    else:
        yield "slice", _path(group.slice)
    yield "gpu", group.gpu
    yield "contexts", controller.population.sharers(group)


def _path(slice_: Slice) -> str:
    """Return a path quoted on one line, whatever bytes it has."""
    return f"{slice_.path[:PATH_MOST]!a:.{2 * PATH_MOST}}"


def _switch(value: bool) -> str:
    return "yes" if value else "no"


def _asked(books: Books) -> Lines:
    """Yield the settings, by the names of their control files."""
    for name, setting in BY_CONTROL.items():
        value = getattr(books, setting.field)
        if setting.kind is Kind.QUOTA:
            yield f"asked.{name}", values.show_quota(value, getattr(books, SECOND[setting.field].field))
        elif setting.kind is Kind.SMS:
            yield f"asked.{name}", values.show_sms(value)
        else:
            yield f"asked.{name}", values.show_size(value) if setting.kind is Kind.SIZE else int(value)


def _noted(books: Books, record: Record) -> Lines:
    """Yield the other values in the books and the record."""
    yield "current", books.current
    yield "swap", books.swap
    yield "pressure.bytes", books.pressure_bytes
    yield "pressure.seq", books.pressure_seq
    yield "off", off(record.compute.noted)
    yield "written", _switch(record.is_written())
    yield "undecided", _switch(record.is_decided_on())


def _background(name: str, work: Followed, pending: bool) -> Lines:
    """Yield the state of one kind of background work for the group."""
    yield f"{name}.pending", _switch(pending)
    yield f"{name}.put_off_s", f"{work.put_off_s:g}"


def _compute(compute: Compute, wanted: Wanted) -> Lines:
    """Yield the state that is wanted on the runlist, and the state that holds."""
    for name, state in (("wanted", wanted), ("applied", compute.applied)):
        yield f"compute.{name}.off", off(state.off)
        yield f"compute.{name}.timeslice_us", state.timeslice_us
    yield "compute.place", _place(compute.place)
    yield "compute.spent", NONE if compute.spent is None else compute.spent.name.lower()
    yield "compute.turn_end", NONE if compute.turn_end is None else compute.turn_end.value
    yield "compute.draining", _switch(compute.draining is not None)
    yield "compute.lever", "pulled" if compute.is_busy() else "idle"
    yield "compute.doubtful", _switch(compute.doubtful)
    yield "compute.pulls", compute.pulls
    yield "compute.held", _switch(compute.held)
    yield "compute.inherited", _switch(compute.inherited)
    yield "compute.unasked", _switch(compute.unasked)
    yield "compute.shown", _switch(compute.shown)


def _place(place: Place) -> str:
    """Return the place that the scheduler wants: the timeslice, the engines that are off, and the timeslice with which
    the process drains before they go off.
    """
    words = [f"timeslice_us={place.timeslice_us}"] if place.timeslice_us else []
    words += [f"off={place.engines.name.lower()}"] if place.off else []
    return ",".join([*words, *([f"drain_us={place.drain_us}"] if place.drains else [])]) or NONE


def _memory(memory: Memory) -> Lines:
    """Yield the number of reclaims that wait for the group, how long a listening program is not waited for, the next
    use of its memory, and whether memory may be on its way back.
    """
    yield "memory.waiting", 0 if memory.waiting is None else len(memory.waiting)
    yield "memory.ignored_s", _left(memory.ignored_until)
    yield "memory.next_use", NONE if memory.next_use is None else memory.next_use.name.lower()
    yield "memory.coming", _switch(memory.may_come())
    yield "memory.settling", _switch(memory.is_settling())


def _scheduled(scheduled: Scheduled) -> Lines:
    """Yield the scheduler's counts of a process, and whether its levers move."""
    if (throttle := scheduled.throttle) is not None:
        yield "scheduled.throttle.times", throttle.times
        yield "scheduled.throttle.usec", throttle.usec
        yield "scheduled.throttle.now", _switch(throttle.since is not None)
    failure = scheduled.failure
    yield "scheduled.failure", NONE if failure is None else f"again_s={_left(failure.again)},wait_s={failure.wait:g}"
    late = scheduled.undrained
    yield "scheduled.undrained", NONE if late is None else f"again_s={_left(late.again)},wait_s={late.wait:g}"
    yield "scheduled.rests", _switch(scheduled.rests)
    turned = scheduled.turned or Turned()
    yield "scheduled.turned", f"turns={turned.turns},fetched={turned.fetched},evicted={turned.evicted}"
    yield "scheduled.ending", _switch(scheduled.ending)


def _taken(taken: Taken) -> Lines:
    """Yield the figures that were taken down of the group, and those that the GPU reported of a process then."""
    for name, figures in (("total", taken.total), ("said", taken.said)):
        yield from ((f"taken.{name}.{figure}", value) for figure, value in figures.items())
    yield "taken.since_usec", taken.since_usec
    yield "taken.began", NONE if taken.began is None else taken.began
    for figure, value in taken.held._asdict().items():
        yield f"taken.held.{figure}", value
    yield "taken.booked", taken.booked
    yield "taken.stale", _switch(taken.stale)
    yield "taken.noted_usec", taken.noted_usec
    yield "taken.absent", _switch(taken.absent)
    yield "taken.told", _switch(taken.told is not None)


def _left(until: float) -> str:
    """Return the seconds until a time of trio's clock; 0 if it has passed."""
    return f"{max(0.0, until - trio.current_time()):.3f}" if until else "0"
