"""The reader of journals of 0.1 (249ae3a, backend/journal/format.py), word for word, but for what it would import of
today's Books and SoftLedger: that is frozen here."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable

import attrs

from tests.versions.v0_1.state import Nonsense, Operation, State

MAGIC = b"ggroupfs-journal "
VERSION = 1

_CHECKSUM = 8
"""Hexadecimal digits."""

_encoder = json.JSONEncoder(separators=(",", ":"), check_circular=False)


class NotOurs(ValueError):
    """No journal at all: it is to be left as it is."""


class Refused(ValueError):
    """A journal that cannot be obeyed, in words: of another version, or one that makes no sense."""


@attrs.frozen
class Content:
    """What a file says."""

    boot: str
    """Of which boot of the machine; empty where it is not said."""
    state: State
    """What was true when its last whole line was written."""
    end: int
    """Bytes of it that were understood."""
    checksum: int
    """Of the last line, from which the next goes on."""


def begin(boot: str, state: State) -> tuple[bytes, int]:
    """The text of a whole new journal, and the checksum that the next line goes on from."""
    words = MAGIC + f"{VERSION} {boot}".encode()
    checksum = zlib.crc32(words)
    first = words + b" %08x\n" % checksum
    text, checksum = line(list(state.operations()), checksum)
    return first + text, checksum


def line(operations: Iterable[Operation], before: int) -> tuple[bytes, int]:
    """The text of one change, and its checksum."""
    body = _encoder.encode(list(operations)).encode()
    checksum = zlib.crc32(body, before)
    return b"%08x %b\n" % (checksum, body), checksum


def read(data: bytes) -> Content:
    """What a file says. NotOurs; Refused."""
    if not data.startswith(MAGIC):
        if not MAGIC.startswith(data):
            raise NotOurs("it does not begin as a journal does")
        return Content("", State(), 0, 0)
    first, newline, _ = data.partition(b"\n")
    if not newline:
        return Content("", State(), 0, 0)  # cut off before it said anything
    boot, checksum = _first(first)
    state, at = State(), len(first) + 1
    while (end := data.find(b"\n", at)) >= 0:
        body = data[at + _CHECKSUM + 1 : end]
        found = zlib.crc32(body, checksum)
        if data[at : at + _CHECKSUM + 1] != b"%08x " % found:
            break
        try:
            for operation in _operations(body):
                state.apply(operation)
        except Nonsense as error:
            raise Refused(f"at byte {at}: {error}") from None
        at, checksum = end + 1, found
    return Content(boot, state, at, checksum)


def _first(words: bytes) -> tuple[str, int]:
    fields = words[len(MAGIC) :].split(b" ")
    if fields[0] != b"%d" % VERSION:
        name = fields[0][:20].decode("ascii", "backslashreplace")
        raise Refused(f"it is of version {name}, and this program knows {VERSION}")
    checksum = zlib.crc32(words.rpartition(b" ")[0])
    if len(fields) != 3 or fields[2] != b"%08x" % checksum:
        raise Refused("its first line is damaged")
    return fields[1].decode("ascii", "backslashreplace"), checksum


def _operations(body: bytes) -> list[Operation]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Nonsense("no JSON") from None
    if not isinstance(found, list) or not all(isinstance(one, list) for one in found):
        raise Nonsense("no operations")
    return found
