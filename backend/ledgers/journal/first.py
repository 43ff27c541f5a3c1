"""What ggroupfs 0.1 reads of a journal, and how later versions write so that it skips what it does not know.

0.1 reads strictly: an operation or a field that it does not know makes it put the whole journal aside, and forget all
limits. So what came later is **carried** by the one operation that it takes with any name, and that does nothing where
nothing has that name: to forget the owners of a directory's files. No cgroup's path has a zero byte in it.

    ["put", "GPU-...", "/job", {"high": 1, "new": 2}]   is written as
    ["put", "GPU-...", "/job", {"high": 1}], ["forget", "/\\0[\\"put\\",\\"GPU-...\\",\\"\\u002fjob\\",{\\"new\\":2}]"]

A reader takes what it knows of what is carried. Unknown fields of a group it keeps as they are, for later versions;
unknown operations it leaves out. Nothing that is carried makes a journal refused. So a new field or operation needs
nothing here, and an operation may get more words at its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

OPERATIONS: Mapping[str, int] = {
    "gpu": 2,
    "add": 4,
    "move": 4,
    "remove": 3,
    "put": 4,
    "lever": 6,
    "own": 4,
    "moving": 5,
    "moved": 2,
    "give": 4,
    "forget": 2,
}
"""Operations that 0.1 knows, with their number of words."""

_COUNT, _SIZE = range(1 << 128), range(1 << 63)
_ID = range(1 << 32)

FIELDS: Mapping[str, range] = {
    **{name: _SIZE for name in ("high", "low", "swap_max", "timeslice_us")},
    **{name: _COUNT for name in ("peak", "swapin_bytes", "swapout_bytes", "swapins", "swapouts", "move_usec")},
    **{f"events_{name}": _COUNT for name in ("low", "high", "max", "oom", "reclaim", "fail")},
    **{name: _COUNT for name in ("pressure_bytes", "pressure_seq")},
    **{name: range(2) for name in ("frozen", "kept")},
    "priority": range(16),
    "weight": range(1, 10_001),
    "uid": _ID,
    "gid": _ID,
}
"""Fields of a group that 0.1 knows, with the values that it takes."""

CARRIER = "/\0"
"""Beginning of the name that carries an operation, as JSON without a slash."""

_encoder = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def written(operations: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yield operations as they are written: what 0.1 knows of each, and what it does not."""
    for operation in operations:
        name = operation[0]
        if name == "put":
            *words, fields = operation
            known = {field: value for field, value in fields.items() if _is_known(field, value)}
            if len(known) == len(fields):
                yield operation
                continue
            if known:
                yield [*words, known]
            yield _carried([*words, {field: value for field, value in fields.items() if field not in known}])
        elif name == "moving" and operation[4] and not all(_is_known(*item) for item in operation[4].items()):
            yield [*operation[:4], {field: value for field, value in operation[4].items() if _is_known(field, value)}]
            yield _carried(operation)
        elif len(operation) == OPERATIONS.get(name, 0):
            yield operation
        else:
            if name in OPERATIONS:
                yield operation[: OPERATIONS[name]]
            yield _carried(operation)


def unwrapped(operation: Sequence[Any]) -> Sequence[Any] | None:
    """Return the operation that this one carries; None for one that carries none, an empty list for one that is
    damaged."""
    match operation:
        case ["forget", str(text)] if text.startswith(CARRIER):
            try:
                found = json.loads(text[len(CARRIER) :])
            except (ValueError, RecursionError):
                return []
            return found if isinstance(found, list) else []
    return None


def _is_known(field: str, value: Any) -> bool:
    return type(value) in (int, bool) and value in FIELDS.get(field, ())


def _carried(operation: Sequence[Any]) -> Sequence[Any]:
    return ["forget", CARRIER + _encoder.encode(operation).replace("/", "\\u002f")]
