"""Messages of D-Bus whose bodies are read when somebody asks for them.

For a service that starts systemd tells of seven units by 4 KiB each, and of one of them, of two values, anybody here
wants to know. jeepney by itself makes objects of all of it: measured, 336 us for a whole PropertiesChanged of 4 KiB,
where the header alone takes 17 us.
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
"""The length of a signature that has a structure of nothing in it. That takes no bytes: for jeepney, an array of it has
no end. (What has three zeros before it is a string, with the length of a string.)"""


class Malformed(ValueError):
    """What came is no message, or not what its signature says."""


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """What jeepney makes of what is no message are exceptions of many kinds."""
    try:
        yield
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"no message of D-Bus: {error!r}") from None


class Unread(Message):  # type: ignore[misc]  # jeepney has no types
    """A message of which only the header was looked at."""

    def __init__(self, raw: bytes) -> None:
        with _reading():
            if b"()" in raw and any(len(found[1]) == found[0][-1] for found in NOTHING.finditer(raw)):
                raise Malformed("a structure of nothing")
            self.header, end = Header.from_buffer(raw)
        self._raw = raw
        self._end = end

    @cached_property
    def body(self) -> tuple[Any, ...]:
        """What is in it. Malformed."""
        with _reading():
            return tuple(Message.from_buffer(self._raw).body)

    def named(self, name: str, kind: str) -> str | bytes | None:
        """What the body has by a name, as in PropertiesChanged: a string (``s``) or bytes (``ay``); None for nothing.
        Malformed.

        It is found by its bytes: a string that long, and that variant behind it. No other string can look like that,
        since there is no NUL in one.
        """
        u32 = struct.Struct(self.header.endianness.struct_code() + "I")
        found = u32.pack(len(name)) + name.encode() + b"\0" + bytes((len(kind),)) + kind.encode() + b"\0"
        at = self._raw.find(found, self._end)
        if at < 0:
            return None
        at = (at + len(found) + 3) & ~3  # a length is aligned to what it is long
        with _reading():
            (length,) = u32.unpack_from(self._raw, at)
            value = self._raw[at + 4 : at + 4 + length]
            if len(value) < length:
                raise Malformed("a value that is longer than its message")
            return value.decode() if kind == "s" else value


class Reader(Parser):  # type: ignore[misc]
    """jeepney's parser, that leaves bodies unread. It goes on where another stopped."""

    def __init__(self, other: Parser) -> None:
        super().__init__()
        self.next_msg_size: int | None = None
        if other.buf.bytes_buffered:
            self.add_data(other.buf.read(other.buf.bytes_buffered))

    def get_next_message(self) -> Unread | None:
        """The next message that is whole, None where there is none. Malformed: there will be none any more."""
        with _reading():
            if self.bytes_desired() > 0:
                if (self.next_msg_size or 0) > MOST:
                    raise Malformed("longer than a message can be")
                return None
        raw = self.buf.read(self.next_msg_size)  # which bytes_desired() has learnt
        self.next_msg_size = None
        return Unread(raw)
