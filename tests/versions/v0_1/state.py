"""The reader of journals of 0.1 (249ae3a, backend/journal/state.py), word for word, but for what it would import of
today's Books and SoftLedger: that is frozen here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from backend.process.identity import ROOT, Node, Process, Slice

NOBODY = 0xFFFFFFFF
MAX = 0x7FFF_FFFF_FFFF_FFFF
RANGES = {
    "high": range(MAX + 1),
    "low": range(MAX + 1),
    "swap_max": range(MAX + 1),
    "timeslice_us": range(1 << 63),
    "frozen": range(2),
    "priority": range(16),
    "weight": range(1, 10001),
    "kept": range(2),
    "uid": range(NOBODY),
    "gid": range(NOBODY),
}

Operation = Sequence[Any]

Key = tuple[str, Node]
"""A group: the UUID of its GPU, and its node."""

Subject = str | Node | Key
"""What a directory is of: ``root`` or ``gpus``, a process, a slice, or a group."""

DEFAULTS = {
    **{"high": MAX, "low": 0, "swap_max": MAX, "peak": 0, "swapin_bytes": 0, "swapout_bytes": 0, "swapins": 0},
    **{"swapouts": 0, "move_usec": 0, "events_low": 0, "events_high": 0, "events_max": 0, "events_oom": 0},
    **{"events_reclaim": 0, "events_fail": 0, "timeslice_us": 0, "frozen": 0, "priority": 8, "weight": 100},
    **{"pressure_bytes": 0, "pressure_seq": 0, "kept": 0, "uid": NOBODY, "gid": NOBODY},
}
FIELDS = tuple(DEFAULTS)
"""What is kept of a group. What it holds the hardware and the programs say again."""

FLAGS = {"frozen", "kept"}

_LARGEST = 1 << 128
_NAME = re.compile("[0-9a-f]{1,8}:[0-9a-f]{1,8}")


class Nonsense(ValueError):
    """An operation that cannot be: of a journal that is not ours, or not whole."""


@attrs.define
class Entry:
    """A group."""

    above: Slice | None
    """The slice that it is in; None for a GPU's root."""
    fields: dict[str, int] = attrs.field(factory=dict)
    """What is not as in a new group, by their names."""


@attrs.frozen
class Lever:
    """What holds for a process on a GPU."""

    detached: bool = False
    """Its TSGs are off the runlist."""
    timeslice_us: int = 0
    """Its timeslice, microseconds; 0 is the driver's default."""
    moving: bool = False
    """They were about to be taken off, or put back, and nobody knows what came of it."""


@attrs.frozen
class Owned:
    """What chown(2) and chmod(2) set on one file; None where they did not."""

    uid: int | None = None
    """Owner."""
    gid: int | None = None
    """Group."""
    permissions: int | None = None
    """Permission bits."""
    lent: int | None = None
    """Whose it was by delegation who set this: it holds while it is his. None: it holds whosever it is."""


@attrs.frozen
class Moving:
    """A program that was to go to another GPU, and nobody has seen the end of it."""

    source: str
    """UUID of the GPU that it was on."""
    target: str
    """UUID of the one that it was to go to."""
    before: Mapping[str, int] | None
    """What was asked for it there before, by their names; None where it had no group there."""


UNTOUCHED = Lever()


# What can happen


def gpu(uuid: str) -> Operation:
    """The books of a GPU were opened."""
    return ["gpu", uuid]


def add(key: Key, above: Slice) -> Operation:
    """A group is below a slice of the same GPU."""
    return ["add", key[0], _raw(key[1]), above.path]


def move(key: Key, above: Slice) -> Operation:
    """It is below another one."""
    return ["move", key[0], _raw(key[1]), above.path]


def remove(key: Key) -> Operation:
    """It is gone, with all that was known of it on this GPU."""
    return ["remove", key[0], _raw(key[1])]


def put(key: Key, fields: Mapping[str, int]) -> Operation:
    """Some of its figures are others."""
    return ["put", key[0], _raw(key[1]), dict(fields)]


def lever(key: Key, state: Lever) -> Operation:
    """What holds of its levers."""
    return ["lever", key[0], _raw(key[1]), state.detached, state.timeslice_us, state.moving]


def own(key: Key, timeslices: Mapping[str, int]) -> Operation:
    """The timeslices that TSGs of a process had before they were given others, microseconds, by client and handle
    (``c1d00019:5c000003``)."""
    return ["own", key[0], _raw(key[1]), dict(timeslices)]


def moving(process: Process, move: Moving) -> Operation:
    """A process is about to go to another GPU."""
    before = None if move.before is None else dict(move.before)
    return ["moving", _raw(process), move.source, move.target, before]


def moved(process: Process) -> Operation:
    """It is there, or has stayed, and the books say so."""
    return ["moved", _raw(process)]


def give(subject: Subject, file: str, owned: Owned | None) -> Operation:
    """A file in a directory, or (empty) the directory itself, is somebody's; None: as it was at first."""
    value = None if owned is None else [*attrs.astuple(owned)]
    return ["give", _raw_subject(subject), file, value]


def forget(subject: Subject) -> Operation:
    """The directory is gone: nothing in it is anybody's."""
    return ["forget", _raw_subject(subject)]


@attrs.define
class State:
    """See the module."""

    groups: dict[Key, Entry] = attrs.field(factory=dict)
    """The books."""
    levers: dict[Key, Lever] = attrs.field(factory=dict)
    """What holds, where it is not as it always was."""
    own: dict[Key, dict[str, int]] = attrs.field(factory=dict)
    """Timeslices that are to be given back."""
    moves: dict[Process, Moving] = attrs.field(factory=dict)
    """Who is on the way from one GPU to another."""
    given: dict[Subject, dict[str, Owned]] = attrs.field(factory=dict)
    """Owners and modes, by directory and file."""

    def apply(self, operation: Operation) -> None:
        """Has one thing happen. Nonsense where it cannot."""
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
                found = Lever(detached, _within(us, range(1 << 63)), moving)
                _enter(self.levers, (uuid, _node(process)), found, found != UNTOUCHED)
            case ["own", str(uuid), [_, _] as process, dict(timeslices)]:
                for name, us in timeslices.items():
                    _within(us, range(_LARGEST))
                    _expect(_NAME.fullmatch(name) is not None)
                _enter(self.own, (uuid, _node(process)), dict(timeslices), bool(timeslices))
            case ["moving", [_, _] as process, str(source), str(target), dict() | None as before]:
                self._moving(_process(process), Moving(source, target, before))
            case ["moved", [_, _] as process]:
                self.moves.pop(_process(process), None)
            case ["give", subject, str(file), [uid, gid, permissions, lent]]:
                ids = [_or_none(one, NOBODY) for one in (uid, gid, lent)]
                found_ = Owned(ids[0], ids[1], _or_none(permissions, 0o10000), ids[2])
                self.given.setdefault(_subject(subject), {})[file] = found_
            case ["give", subject, str(file), None]:
                files = self.given.get(_subject(subject), {})
                files.pop(file, None)
                if not files:
                    self.given.pop(_subject(subject), None)
            case ["forget", subject]:
                self.given.pop(_subject(subject), None)
            case _:
                raise Nonsense(f"unknown operation {str(operation)[:80]}")

    @property
    def is_empty(self) -> bool:
        """Whether the next daemon would find nothing in it."""
        books = any(entry.fields or entry.above for entry in self.groups.values())
        return not (books or self.levers or self.own or self.moves or self.given)

    def operations(self) -> Iterator[Operation]:
        """What makes this state of an empty one."""
        for uuid in [uuid for uuid, node in self.groups if node == ROOT]:
            yield gpu(uuid)
            for key in self.ordered(uuid):
                above = self.groups[key].above
                assert above is not None
                yield add(key, above)
        for key, entry in self.groups.items():
            if entry.fields:
                yield put(key, entry.fields)
        for key, held in self.levers.items():
            yield lever(key, held)
        for key, timeslices in self.own.items():
            yield own(key, timeslices)
        for process, move in self.moves.items():
            yield moving(process, move)
        for subject, files in self.given.items():
            for file, owned in files.items():
                yield give(subject, file, owned)

    def ordered(self, uuid: str) -> list[Key]:
        """The groups of a GPU but its root, each after the one above: a move can have put it the other way."""
        found: dict[Key, None] = {}
        for key in self.groups:
            chain: list[Key] = []
            while key[0] == uuid and key[1] != ROOT and key not in found:
                chain.append(key)
                above = self.groups[key].above
                assert above is not None
                key = (uuid, above)
            found.update(dict.fromkeys(reversed(chain)))
        return list(found)

    def drop(self, gone: Iterable[Key]) -> None:
        """Processes that are no more, wherever they were."""
        for key in gone:
            for table in (self.groups, self.levers, self.own, self.given):
                table.pop(key, None)
            self.given.pop(key[1], None)
            if isinstance(key[1], Process):
                self.moves.pop(key[1], None)

    def forget_gpu(self, uuid: str) -> None:
        """A GPU is gone, with its books."""
        for table in (self.groups, self.levers, self.own, self.given):
            for key in [key for key in table if isinstance(key, tuple) and key[0] == uuid]:
                del table[key]
        for process in [process for process, move in self.moves.items() if uuid in (move.source, move.target)]:
            del self.moves[process]
        nodes = {node for _, node in self.groups}
        for subject in list(self.given):
            if not nodes or (isinstance(subject, (Process, Slice)) and subject not in nodes):
                del self.given[subject]

    # The small parts

    def _add(self, key: Key, above: Slice) -> None:
        _expect(key not in self.groups and (key[0], above) in self.groups)
        self.groups[key] = Entry(above)

    def _move(self, key: Key, above: Slice) -> None:
        entry = self.groups.get(key)
        _expect(entry is not None and entry.above is not None and (key[0], above) in self.groups)
        assert entry is not None
        level: Slice | None = above
        while level is not None:  # not below itself
            _expect((key[0], level) != key)
            level = self.groups[key[0], level].above
        entry.above = above

    def _remove(self, key: Key) -> None:
        _expect(key in self.groups and key[1] != ROOT)
        if isinstance(key[1], Slice):
            _expect(not any(entry.above == key[1] and at[0] == key[0] for at, entry in self.groups.items()))
        del self.groups[key]
        self.levers.pop(key, None)
        self.own.pop(key, None)

    def _put(self, key: Key, fields: Mapping[str, Any]) -> None:
        entry = self.groups.get(key)
        _expect(entry is not None)
        assert entry is not None
        _check(fields)
        for name, value in fields.items():
            _enter(entry.fields, name, value, value != DEFAULTS[name])

    def _moving(self, process: Process, move: Moving) -> None:
        _expect(move.source != move.target)
        _check(move.before or {})
        self.moves[process] = move


_RANGES = {name: range(NOBODY + 1) if name in ("uid", "gid") else RANGES.get(name, range(_LARGEST)) for name in FIELDS}
"""Of each field. Figures that nobody configures are counts."""


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
