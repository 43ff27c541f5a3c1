"""A journal as text: a line that identifies it, then a line for each change, each with a checksum.

    ggroupfs-journal 1 0f0e7a52-... 5f3c9a1e
    0a1b2c3d [["gpu","GPU-..."],["add","GPU-...","/job","/"],["put","GPU-...","/job",{"high":1073741824}]]

A line is taken whole or not at all: one call of the ledger is one line, and so is all that a compacted journal begins
with. Each checksum continues that of the line before (zlib's CRC-32), so a missing line ends the reading just as a
damaged one does. Whatever was cut off, what is read was true at some moment.

The version stays 1 as long as what 0.1 wrote and read means the same. What came later is carried (first.py).
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Iterator

import attrs

from backend.ledgers.journal.first import unwrapped, written
from backend.ledgers.journal.state import FIELDS, Nonsense, Operation, State

MAGIC = b"ggroupfs-journal "
VERSION = 1

PIECE = 64
"""Number of operations in each piece."""

_CHECKSUM = 8
"""Number of hexadecimal digits of a checksum."""

NO_CHECKSUM = b"0" * _CHECKSUM + b" "
"""Placeholder for a checksum that is not known yet."""

_encoder = json.JSONEncoder(separators=(",", ":"), check_circular=False)


class NotOurs(ValueError):
    """The file is no journal, and must be left as it is."""


class Refused(ValueError):
    """The journal cannot be used, for the reason given in words: it is of another version, or makes no sense."""


@attrs.frozen
class Content:
    """The content of a file."""

    boot: str
    """Boot ID of the machine that it is of; empty where it names none."""
    state: State
    """The state when its last whole line was written."""
    end: int
    """Number of bytes that were understood."""
    checksum: int
    """Checksum of the last line, which the next continues."""
    left_out: int = 0
    """Number of operations of a later version that were left out."""


def begin(boot: str, state: State) -> tuple[bytes, int]:
    """Return the text of a whole new journal, and the checksum that the next line continues."""
    first, checksum = head(boot)
    text, checksum = line(state.operations(), checksum)
    return first + text, checksum


def head(boot: str) -> tuple[bytes, int]:
    """Return the first line, and its checksum."""
    words = MAGIC + f"{VERSION} {boot}".encode()
    checksum = zlib.crc32(words)
    return words + b" %08x\n" % checksum, checksum


def pieces(operations: Iterable[Operation]) -> Iterator[bytes]:
    """Yield the text of one change, without its checksum, in pieces that each take little time."""
    left, before = written(operations), b"["
    while piece := list(itertools.islice(left, PIECE)):
        yield before + _encoder.encode(piece)[1:-1].encode()
        before = b","
    yield b"]" if before == b"," else b"[]"


def line(operations: Iterable[Operation], before: int) -> tuple[bytes, int]:
    """Return the line of one change, and its checksum."""
    body = b"".join(pieces(operations))
    checksum = zlib.crc32(body, before)
    return b"%08x %b\n" % (checksum, body), checksum


def read(data: bytes) -> Content:
    """Return the content of a file. NotOurs; Refused."""
    if not data.startswith(MAGIC):
        if not MAGIC.startswith(data):
            raise NotOurs("it does not begin as a journal does")
        return Content("", State(), 0, 0)
    first, newline, _ = data.partition(b"\n")
    if not newline:
        return Content("", State(), 0, 0)  # cut off within the first line
    boot, checksum = _first(first)
    state, at, left_out = State(), len(first) + 1, 0
    while (end := data.find(b"\n", at)) >= 0:
        body = data[at + _CHECKSUM + 1 : end]
        found = zlib.crc32(body, checksum)
        if data[at : at + _CHECKSUM + 1] != b"%08x " % found:
            break
        try:
            for operation in _operations(body):
                if (carried := unwrapped(operation)) is None:
                    state.apply(operation)
                else:
                    left_out += not _is_taken(state, carried)
        except Nonsense as error:
            raise Refused(f"at byte {at}: {error}") from None
        at, checksum = end + 1, found
    return Content(boot, state, at, checksum, left_out)


def _first(words: bytes) -> tuple[str, int]:
    fields = words[len(MAGIC) :].split(b" ")
    if fields[0] != b"%d" % VERSION:
        name = fields[0][:20].decode("ascii", "backslashreplace")
        raise Refused(f"it is of version {name}, and this program knows {VERSION}")
    checksum = zlib.crc32(words.rpartition(b" ")[0])
    if len(fields) != 3 or fields[2] != b"%08x" % checksum:
        raise Refused("its first line is damaged")
    return fields[1].decode("ascii", "backslashreplace"), checksum


def _is_taken(state: State, operation: Operation) -> bool:
    """Apply an operation that 0.1 did not know, as far as this version knows it. Return whether that is all of it."""
    try:
        match operation:
            case ["put", str(uuid), node, dict(fields)]:
                known = {name: value for name, value in fields.items() if name in FIELDS}
                later = {name: value for name, value in fields.items() if type(value) in (int, str)}
                state.apply(["put", uuid, node, known])
                state.keep(uuid, node, {name: value for name, value in later.items() if name not in FIELDS})
                return len(known.keys() | later.keys()) == len(fields)
            case _:
                state.apply(operation)
    except Nonsense:
        return False
    return True


def _operations(body: bytes) -> list[Operation]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Nonsense("no JSON") from None
    if not isinstance(found, list) or not all(isinstance(one, list) for one in found):
        raise Nonsense("no operations")
    return found
