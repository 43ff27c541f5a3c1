"""D-Bus messages with bodies that are parsed only on demand.

For every service that starts, systemd reports on seven units in messages of 4 KiB each, of which the daemon needs two
values of one unit. jeepney on its own turns everything into objects: measured, 336 us for a complete PropertiesChanged
of 4 KiB, where the header alone takes 17 us.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from jeepney import Message
from jeepney.low_level import Header, Parser

MOST = 1 << 27
"""Bytes of the longest message (D-Bus Specification, "Message Format")."""


NOTHING = re.compile(rb"(?<!\0\0\0)[\2-\xff](?=([ybnqiuxtdsogvha(){}]{0,253}\(\)[ybnqiuxtdsogvha(){}]{0,253})\0)")
"""Length byte of a signature that contains an empty structure. That occupies no bytes, so an array of it would never
end for jeepney. (A byte after three zeros is excluded: it belongs to the length of a string.)"""


class Malformed(ValueError):
    """The bytes are not a message, or do not match the message's signature."""


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Convert the many kinds of exceptions that jeepney raises for an invalid message to Malformed."""
    try:
        yield
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"no message of D-Bus: {error!r}") from None


class Unread(Message):  # type: ignore[misc]  # jeepney has no types
    """A message of which only the header was parsed."""

    def __init__(self, raw: bytes) -> None:
        with _reading():
            if b"()" in raw and any(len(found[1]) == found[0][-1] for found in NOTHING.finditer(raw)):
                raise Malformed("a structure of nothing")
            self.header, end = Header.from_buffer(raw)
        self._raw = raw
        self._end = end

    @cached_property
    def body(self) -> tuple[Any, ...]:
        """The parsed body. Malformed."""
        with _reading():
            return tuple(Message.from_buffer(self._raw).body)

    def named(self, name: str, kind: str) -> str | bytes | None:
        """Return a value by name, as in PropertiesChanged: a string (``s``) or bytes (``ay``); None if missing.

        It is found by its bytes: a string of that length and content, followed by the variant's signature. No other
        string contains those bytes, since a string contains no NUL. Malformed.
        """
        u32 = struct.Struct(self.header.endianness.struct_code() + "I")
        found = u32.pack(len(name)) + name.encode() + b"\0" + bytes((len(kind),)) + kind.encode() + b"\0"
        at = self._raw.find(found, self._end)
        if at < 0:
            return None
        at = (at + len(found) + 3) & ~3  # a length is aligned to its own size
        with _reading():
            (length,) = u32.unpack_from(self._raw, at)
            value = self._raw[at + 4 : at + 4 + length]
            if len(value) < length:
                raise Malformed("a value that is longer than its message")
            return value.decode() if kind == "s" else value


class Reader(Parser):  # type: ignore[misc]
    """jeepney's parser, changed to leave bodies unparsed. It continues where another parser stopped."""

    def __init__(self, other: Parser) -> None:
        super().__init__()
        self.next_msg_size: int | None = None
        if other.buf.bytes_buffered:
            self.add_data(other.buf.read(other.buf.bytes_buffered))

    def get_next_message(self) -> Unread | None:
        """Return the next complete message, or None. After Malformed there will be no further message."""
        with _reading():
            if self.bytes_desired() > 0:
                if (self.next_msg_size or 0) > MOST:
                    raise Malformed("longer than a message can be")
                return None
        raw = self.buf.read(self.next_msg_size)  # set by bytes_desired()
        self.next_msg_size = None
        return Unread(raw)
