"""The content of a journal at one moment, and the operations that change it. Pure; strict, since it is read from a
file.

An operation is a list as JSON has it; the functions here make them, and :meth:`State.apply` applies them. A GPU is
known by its UUID, since NVML may number it otherwise for the next daemon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from backend.core import settings
from backend.core.entries import Life
from backend.core.reasons import Engines, Off, reasons_of
from backend.core.records import NOBODY, Books
from backend.core.settings import BY_FIELD, Kind
from backend.process.identity import ROOT, Node, Process, Slice

Operation = Sequence[Any]

Key = tuple[str, Node]
"""A group: the UUID of its GPU, and its node."""

Subject = str | Node | Key
"""The subject of a directory: ``root`` or ``gpus``, a process, a slice, or a group."""

FIELDS = tuple(field.name for field in attrs.fields(Books) if field.name not in ("current", "swap"))
"""Fields that are kept of a group. What it holds, hardware and programs report anew."""

FLAGS = {setting.field for setting in BY_FIELD.values() if setting.kind is Kind.SWITCH}

_OTHERS = {lever.field for lever in settings.LEVERS if lever is not settings.TIMESLICE}
_LARGEST = 1 << 128
_MASK = range(1 << 32)
_NAME = re.compile("[0-9a-f]{1,8}:[0-9a-f]{1,8}")
_BOOKS = Books()


class Nonsense(ValueError):
    """An operation is impossible: the journal is not ggroupfs's, or not whole."""


@attrs.frozen
class Entry:
    """A group."""

    above: Slice | None
    """The slice that it is in; None for a GPU's root."""
    fields: dict[str, int] = attrs.field(factory=dict)
    """Figures that differ from a new group's, by the names of :class:`Books`."""
    later: dict[str, int | str] = attrs.field(factory=dict)
    """Fields that a later version added: kept for it, and gone with the group."""


@attrs.frozen
class Lever:
    """The state of a process's levers on a GPU."""

    detached: bool = False
    """Whether the TSGs of every engine are off the runlist."""
    timeslice_us: int = 0
    """Its timeslice in microseconds; 0 for the driver's default."""
    moving: bool = False
    """Whether TSGs were about to be taken off or put back, with an unknown result."""
    gr: bool = False
    """Whether the TSGs of the GR engine alone are off the runlist."""
    others: Mapping[str, int] = attrs.field(factory=dict)
    """Values of the levers that came after 0.1, by the field of their setting; without those at 0."""

    def at(self, lever: settings.Lever) -> int:
        """Return the value of a lever."""
        return self.timeslice_us if lever is settings.TIMESLICE else self.others.get(lever.field, 0)

    def with_(self, lever: settings.Lever, value: int) -> Lever:
        """Return the same state with a lever at another value."""
        if lever is settings.TIMESLICE:
            return attrs.evolve(self, timeslice_us=value)
        others = dict(self.others)
        _enter(others, lever.field, value, value != 0)
        return attrs.evolve(self, others=others)

    def without(self, engines: Engines) -> Lever:
        """Return the same state with the TSGs of exactly these engines off the runlist, and that certain."""
        return attrs.evolve(self, detached=engines is Engines.ALL, gr=engines is Engines.GR, moving=False)

    @property
    def engines(self) -> Engines:
        """The engines that are off the runlist."""
        return Engines.ALL if self.detached else Engines.GR if self.gr else Engines.NONE


@attrs.frozen
class Owned:
    """The owner and mode that chown(2) and chmod(2) set on one file; None for what they did not set."""

    uid: int | None = None
    """Owner."""
    gid: int | None = None
    """Group."""
    permissions: int | None = None
    """Permission bits."""
    lent: int | None = None
    """The user that had the file by delegation and set this, which holds while that user has it. None: it holds in any
    case."""


@attrs.frozen
class Moving:
    """A move of a program to another GPU whose end was not seen."""

    source: str
    """UUID of the GPU that it was on."""
    target: str
    """UUID of the GPU that it was to go to."""
    before: Mapping[str, int] | None
    """Settings of its group on the target before, by the names of :class:`Books`; None where it had none there."""


UNTOUCHED = Lever()


# The operations


def gpu(uuid: str) -> Operation:
    """Return the operation that opens the books of a GPU."""
    return ["gpu", uuid]


def add(key: Key, above: Slice) -> Operation:
    """Return the operation that adds a group below a slice of the same GPU."""
    return ["add", key[0], _raw(key[1]), above.path]


def move(key: Key, above: Slice) -> Operation:
    """Return the operation that moves a group below another slice."""
    return ["move", key[0], _raw(key[1]), above.path]


def remove(key: Key) -> Operation:
    """Return the operation that removes a group, with all that was known of it on this GPU."""
    return ["remove", key[0], _raw(key[1])]


def put(key: Key, fields: Mapping[str, int | str]) -> Operation:
    """Return the operation that changes some figures of a group."""
    return ["put", key[0], _raw(key[1]), dict(fields)]


def lever(key: Key, state: Lever) -> Operation:
    """Return the operation that notes the state of a process's levers."""
    found = ["lever", key[0], _raw(key[1]), state.detached, state.timeslice_us, state.moving]
    if state.others:
        return [*found, state.engines.name, dict(state.others)]
    return [*found, Engines.GR.name] if state.gr else found


def reasons(key: Key, off: Off) -> Operation:
    """Return the operation that notes why a process is off the runlist, as two masks of
    :class:`backend.core.reasons.Reason`: the reasons that take every engine, and those that take the GR engine alone.
    """
    return ["reasons", key[0], _raw(key[1]), off.all.value, off.gr.value]


def own(key: Key, timeslices: Mapping[str, int]) -> Operation:
    """Return the operation that notes the timeslices that TSGs of a process had before others were set, in
    microseconds, by client and handle (``c1d00019:5c000003``)."""
    return ["own", key[0], _raw(key[1]), dict(timeslices)]


def moving(process: Process, move: Moving) -> Operation:
    """Return the operation that notes that a process is about to move to another GPU."""
    before = None if move.before is None else dict(move.before)
    return ["moving", _raw(process), move.source, move.target, before]


def moved(process: Process) -> Operation:
    """Return the operation that notes that a move has ended, one way or the other, and is in the books."""
    return ["moved", _raw(process)]


def done(key: Key, figures: Mapping[str, int]) -> Operation:
    """Return the operation that notes what was done in a group, ever, by figure; an empty mapping drops it."""
    return ["done", key[0], _raw(key[1]), dict(figures)]


def give(subject: Subject, file: str, owned: Owned | None) -> Operation:
    """Return the operation that sets the owner of a file in a directory, or, with an empty name, of the directory
    itself; None for the owner that it had at first."""
    value = None if owned is None else [*attrs.astuple(owned)]
    return ["give", _raw_subject(subject), file, value]


def forget(subject: Subject) -> Operation:
    """Return the operation that drops a directory, with the owners of everything in it."""
    return ["forget", _raw_subject(subject)]


def live(slice_: Slice, life: Life | None) -> Operation:
    """Return the operation that notes the life of a slice; None for one that is gone, or was not made."""
    return ["live", slice_.path, None] if life is None else ["live", slice_.path, *attrs.astuple(life)]


@attrs.define
class State:
    """The content of a journal. See the module."""

    groups: dict[Key, Entry] = attrs.field(factory=dict)
    """The books."""
    levers: dict[Key, Lever] = attrs.field(factory=dict)
    """States of levers, where they are not untouched."""
    reasons: dict[Key, Off] = attrs.field(factory=dict)
    """Reasons for which processes are off the runlist."""
    own: dict[Key, dict[str, int]] = attrs.field(factory=dict)
    """Timeslices that are to be given back, in microseconds, by TSG."""
    moves: dict[Process, Moving] = attrs.field(factory=dict)
    """Moves whose end was not seen."""
    given: dict[Subject, dict[str, Owned]] = attrs.field(factory=dict)
    """Owners and modes, by directory and file."""
    done: dict[Key, dict[str, int]] = attrs.field(factory=dict)
    """What was done in each group, by figure; kept also where another ledger has the books."""
    lives: dict[Slice, Life] = attrs.field(factory=dict)
    """The lives of slices; kept also where another ledger has the books."""
    _below: dict[Key, int] = attrs.field(factory=dict, init=False, eq=False)
    """Number of groups directly in a group, where there are any."""

    def copy(self) -> State:
        """Return a copy of the current state. Quick, whatever the size: what is in the tables is replaced, never
        changed."""
        tables = self.groups, self.levers, self.reasons, self.own, self.moves, self.given, self.done, self.lives
        return State(*(dict(table) for table in tables))  # type: ignore[arg-type]

    def apply(self, operation: Operation) -> None:
        """Apply an operation. Nonsense where it is impossible."""
        match operation:
            case ["gpu", str(uuid)]:
                self.groups.setdefault((uuid, ROOT), Entry(None))
            case ["add", str(uuid), node, str(above)]:
                self._add((uuid, _node(node)), _slice(above))
            case ["move", str(uuid), node, str(above)]:
                self._move((uuid, _node(node)), _slice(above))
            case ["remove", str(uuid), node]:
                self._remove((uuid, _node(node)))
            case ["put", str(uuid), node, dict(fields)]:
                self._put((uuid, _node(node)), fields)
            case ["lever", str(uuid), [_, _] as process, bool(detached), int(us), bool(moving)]:
                self._lever((uuid, _node(process)), Lever(detached, us, moving))
            case ["lever", str(uuid), [_, _] as process, bool(detached), int(us), bool(moving), name, dict(found), *_]:
                others = {field: _within(found[field], range(1 << 63)) for field in found if field in _OTHERS}
                self._lever((uuid, _node(process)), Lever(detached, us, moving, name == Engines.GR.name, others))
            case ["lever", str(uuid), [_, _] as process, bool(detached), int(us), bool(moving), Engines.GR.name, *_]:
                self._lever((uuid, _node(process)), Lever(detached, us, moving, gr=True))
            case ["reasons", str(uuid), [_, _] as process, int(all_), int(gr)]:
                off = Off(reasons_of(_within(all_, _MASK)), reasons_of(_within(gr, _MASK)))
                _enter(self.reasons, (uuid, _node(process)), off, bool(off))
            case ["own", str(uuid), [_, _] as process, dict(timeslices)]:
                for name, us in timeslices.items():
                    _within(us, range(_LARGEST))
                    _expect(_NAME.fullmatch(name) is not None)
                _enter(self.own, (uuid, _node(process)), dict(timeslices), bool(timeslices))
            case ["moving", [_, _] as process, str(source), str(target), dict() | None as before]:
                self._moving(_process(process), Moving(source, target, before))
            case ["moved", [_, _] as process]:
                self.moves.pop(_process(process), None)
            case ["done", str(uuid), node, dict(figures)]:
                for value in figures.values():
                    _within(value, range(_LARGEST))
                _enter(self.done, (uuid, _node(node)), dict(figures), bool(figures))
            case ["give", subject, str(file), [uid, gid, permissions, lent]]:
                ids = [_or_none(one, NOBODY) for one in (uid, gid, lent)]
                found_ = Owned(ids[0], ids[1], _or_none(permissions, 0o10000), ids[2])
                known = _subject(subject)
                self.given[known] = {**self.given.get(known, {}), file: found_}
            case ["give", subject, str(file), None]:
                known = _subject(subject)
                files = {name: owned for name, owned in self.given.get(known, {}).items() if name != file}
                _enter(self.given, known, files, bool(files))
            case ["live", str(path), int(since), int(cgroup), int() | None as timeout, int(maker), bool(is_over), *_]:
                times = _within(since, range(1 << 63)), _within(cgroup, range(1 << 64)), _or_none(timeout, 1 << 63)
                _expect(_slice(path) != ROOT)
                self.lives[_slice(path)] = Life(*times, _within(maker, range(1 << 32)), is_over)
            case ["live", str(path), None]:
                self.lives.pop(_slice(path), None)
            case ["forget", subject]:
                self.given.pop(_subject(subject), None)
            case _:
                raise Nonsense(f"unknown operation {str(operation)[:80]}")

    def keep(self, uuid: str, node: object, later: Mapping[str, int | str]) -> None:
        """Keep fields of a group that a later version wrote. Nonsense."""
        key = uuid, _node(node)
        _expect(key in self.groups)
        self.groups[key] = attrs.evolve(self.groups[key], later={**self.groups[key].later, **later})

    @property
    def is_empty(self) -> bool:
        """Whether the next daemon would find nothing in it."""
        books = any(entry.fields or entry.later or entry.above for entry in self.groups.values())
        tables = self.levers, self.reasons, self.own, self.moves, self.given, self.done, self.lives
        return not (books or any(tables))

    def operations(self) -> Iterator[Operation]:
        """Yield operations that make this state from an empty one."""
        for uuid in [uuid for (uuid, _), entry in self.groups.items() if entry.above is None]:
            yield gpu(uuid)
        for key in self._in_order():
            above = self.groups[key].above
            assert above is not None
            yield add(key, above)
        for key, entry in self.groups.items():
            if entry.fields or entry.later:
                yield put(key, {**entry.fields, **entry.later})
        for key, held in self.levers.items():
            yield lever(key, held)
        for key, off in self.reasons.items():
            yield reasons(key, off)
        for key, timeslices in self.own.items():
            yield own(key, timeslices)
        for process, move in self.moves.items():
            yield moving(process, move)
        for key, figures in self.done.items():
            yield done(key, figures)
        for slice_, life in self.lives.items():
            yield live(slice_, life)
        for subject, files in self.given.items():
            for file, owned in files.items():
                yield give(subject, file, owned)

    def ordered(self, uuid: str) -> list[Key]:
        """Return the groups of a GPU, except its root, each after the one above it."""
        return [key for key in self._in_order() if key[0] == uuid]

    def _in_order(self) -> Iterator[Key]:
        """Yield all groups except the roots, each after the one above it: a move may have left them in another
        order."""
        found: set[Key] = set()
        for key in self.groups:
            chain: list[Key] = []
            while key[1] != ROOT and key not in found:
                chain.append(key)
                found.add(key)
                above = self.groups[key].above
                assert above is not None
                key = (key[0], above)
            yield from reversed(chain)

    def drop(self, gone: Iterable[Key]) -> None:
        """Drop processes that are gone, wherever they were."""
        for key in gone:
            entry = self.groups.get(key)
            if entry is not None and entry.above is not None:
                self._count((key[0], entry.above), -1)
            for table in (self.groups, self.levers, self.reasons, self.own, self.given, self.done):
                table.pop(key, None)
            self.given.pop(key[1], None)
            if isinstance(key[1], Process):
                self.moves.pop(key[1], None)

    def forget_gpu(self, uuid: str) -> None:
        """Drop a GPU, with its books."""
        for table in (self.groups, self._below, self.levers, self.reasons, self.own, self.given, self.done):
            for key in [key for key in table if isinstance(key, tuple) and key[0] == uuid]:
                del table[key]
        for process in [process for process, move in self.moves.items() if uuid in (move.source, move.target)]:
            del self.moves[process]
        nodes = {node for _, node in self.groups}
        self.lives = {slice_: life for slice_, life in self.lives.items() if slice_ in nodes}
        for subject in list(self.given):
            if not nodes or (isinstance(subject, (Process, Slice)) and subject not in nodes):
                del self.given[subject]

    # Helpers

    def _lever(self, key: Key, found: Lever) -> None:
        _within(found.timeslice_us, range(1 << 63))
        _expect(not (found.detached and found.gr))
        _enter(self.levers, key, found, found != UNTOUCHED)

    def _add(self, key: Key, above: Slice) -> None:
        _expect(key not in self.groups and (key[0], above) in self.groups)
        self.groups[key] = Entry(above)
        self._count((key[0], above), 1)

    def _move(self, key: Key, above: Slice) -> None:
        entry = self.groups.get(key)
        _expect(entry is not None and entry.above is not None and (key[0], above) in self.groups)
        assert entry is not None
        level: Slice | None = above
        while level is not None:  # not below itself
            _expect((key[0], level) != key)
            level = self.groups[key[0], level].above
        assert entry.above is not None
        self._count((key[0], entry.above), -1)
        self._count((key[0], above), 1)
        self.groups[key] = attrs.evolve(entry, above=above)

    def _remove(self, key: Key) -> None:
        entry = self.groups.get(key)
        _expect(entry is not None and entry.above is not None and key not in self._below)
        assert entry is not None
        assert entry.above is not None
        self._count((key[0], entry.above), -1)
        del self.groups[key]
        for table in (self.levers, self.reasons, self.own, self.done):
            table.pop(key, None)

    def _put(self, key: Key, fields: Mapping[str, Any]) -> None:
        entry = self.groups.get(key)
        _expect(entry is not None)
        assert entry is not None
        _check(fields)
        now = dict(entry.fields)
        for name, value in fields.items():
            _enter(now, name, value, value != getattr(_BOOKS, name))
        self.groups[key] = attrs.evolve(entry, fields=now)

    def _count(self, key: Key, change: int) -> None:
        count = self._below.get(key, 0) + change
        _enter(self._below, key, count, count != 0)

    def _moving(self, process: Process, move: Moving) -> None:
        _expect(move.source != move.target)
        _check(move.before or {})
        self.moves[process] = move


def _range(name: str) -> range:
    setting = BY_FIELD.get(name)
    if setting is None:
        return range(_LARGEST)
    return range(NOBODY + 1) if setting.kind is Kind.OWNER else setting.allowed


_RANGES = {name: _range(name) for name in FIELDS}
"""Values that each field can have. Figures that cannot be set are counts."""


def _enter(table: dict[Any, Any], key: Any, value: Any, wanted: bool) -> None:
    if wanted:
        table[key] = value
    else:
        table.pop(key, None)


def _check(fields: Mapping[str, Any]) -> None:
    _expect(fields.keys() <= set(FIELDS))
    for name, value in fields.items():
        _within(int(value) if name in FLAGS and isinstance(value, bool) else value, _RANGES[name])


def _expect(holds: bool) -> None:
    if not holds:
        raise Nonsense("it does not fit what was before")


def _within(value: Any, allowed: range) -> int:
    _expect(type(value) is int and value in allowed)
    return int(value)


def _or_none(value: Any, end: int) -> int | None:
    return None if value is None else _within(value, range(end))


def _raw(node: Node) -> object:
    return node.path if isinstance(node, Slice) else [node.pid, node.start]


def _raw_subject(subject: Subject) -> object:
    if isinstance(subject, tuple):
        return [subject[0], _raw(subject[1])]
    return subject if isinstance(subject, str) else _raw(subject)


def _node(raw: object) -> Node:
    match raw:
        case str(path):
            return _slice(path)
        case [int(pid), int(start)]:
            return Process(_within(pid, range(1, 1 << 31)), _within(start, range(1 << 63)))
    raise Nonsense("no process and no slice")


def _process(raw: object) -> Process:
    found = _node(raw)
    _expect(isinstance(found, Process))
    assert isinstance(found, Process)
    return found


def _slice(path: str) -> Slice:
    _expect(path == "/" or (path.startswith("/") and not path.endswith("/") and "//" not in path))
    return Slice(path)


def _subject(raw: object) -> Subject:
    match raw:
        case "root" | "gpus":
            return str(raw)
        case [str(uuid), node]:
            return uuid, _node(node)
    return _node(raw)
