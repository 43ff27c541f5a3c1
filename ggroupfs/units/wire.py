"""D-Bus messages (D-Bus Specification, "Message Protocol"): written, and read as far as somebody asks.

For a service that starts systemd tells of seven units by 4 KiB each, and of one of them, of two values, anybody here
wants to know. A library that makes objects of all the rest took half of the daemon's time.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

CALL, RETURN, ERROR, SIGNAL = 1, 2, 3, 4
"""Types of messages."""

PATH, INTERFACE, MEMBER, ERROR_NAME, REPLY_SERIAL, DESTINATION, SENDER, SIGNATURE = range(1, 9)
"""Fields of a header."""

FIXED = 16
"""Bytes of a header that say how long it all is."""

MOST = 1 << 27
"""Bytes of the longest message that there may be."""

_U32 = {ord("l"): struct.Struct("<I"), ord("B"): struct.Struct(">I")}


@attrs.frozen
class Arrived:
    """A message that has come."""

    raw: bytes
    """All of it."""
    body: int
    """Where its body begins."""
    fields: dict[int, Any]
    """What its header says, by field."""

    @property
    def type(self) -> int:
        """CALL, RETURN, ERROR or SIGNAL."""
        return self.raw[1]

    def values(self) -> tuple[Any, ...]:
        """Its body, of the types that are known here. ValueError for others."""
        body = _Body(self.raw, self.body)
        signature = self.fields.get(SIGNATURE, "")
        return tuple(body.value(one) for one in _types(signature))

    def first(self) -> Any:
        """The first value of its body; None where it has none."""
        signature = self.fields.get(SIGNATURE, "")
        return _Body(self.raw, self.body).value(_types(signature)[0]) if signature else None

    def named(self, name: str, kind: str) -> Any:
        """What the body has by a name, as in PropertiesChanged, of a type; None if it has nothing.

        It is found by its bytes: a string that long, and that variant behind it. No other string can look like that,
        since there is no NUL in one.
        """
        u32 = _U32[self.raw[0]]
        found = u32.pack(len(name)) + name.encode() + b"\0" + bytes((len(kind),)) + kind.encode() + b"\0"
        at = self.raw.find(found, self.body)
        return None if at < 0 else _Body(self.raw, at + len(found)).value(kind)


class Stream:
    """Takes bytes as they come, and gives the messages in them."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Arrived]:
        """The messages that are whole with these bytes. ValueError for what is none."""
        self._data += data
        at = 0
        while len(self._data) - at >= FIXED:
            u32 = _U32.get(self._data[at])
            if u32 is None:
                raise ValueError("no message of D-Bus")
            (body,), (fields,) = u32.unpack_from(self._data, at + 4), u32.unpack_from(self._data, at + 12)
            begins = _padded(FIXED + fields, 8)
            if begins + body > MOST:
                raise ValueError("a message of D-Bus that is too long")
            if len(self._data) - at < begins + body:
                break
            raw = bytes(self._data[at : at + begins + body])
            at += begins + body
            yield Arrived(raw, begins, _fields(raw, FIXED + fields))
        del self._data[:at]


def call(
    serial: int, destination: str, path: str, interface: str, member: str, *arguments: str | Sequence[str]
) -> bytes:
    """A method call, with strings and arrays of strings."""
    body, signature = bytearray(), ""
    for argument in arguments:
        if isinstance(argument, str):
            _put(body, argument)
            signature += "s"
        else:
            array = bytearray()
            for one in argument:
                _put(array, one)
            body += bytes(-len(body) % 4) + _U32[ord("l")].pack(len(array)) + array
            signature += "as"
    header = bytearray(struct.pack("<BBBBIII", ord("l"), CALL, 0, 1, len(body), serial, 0))
    rows = ((PATH, "o", path), (INTERFACE, "s", interface), (MEMBER, "s", member), (DESTINATION, "s", destination))
    for field, kind, text in rows:
        header += bytes(-len(header) % 8) + bytes((field, 1, ord(kind), 0))
        _put(header, text)
    if signature:
        header += bytes(-len(header) % 8) + bytes((SIGNATURE, 1, ord("g"), 0, len(signature)))
        header += signature.encode() + b"\0"
    struct.pack_into("<I", header, 12, len(header) - FIXED)
    return bytes(header + bytes(-len(header) % 8) + body)


def _put(data: bytearray, text: str) -> None:
    encoded = text.encode()
    data += bytes(-len(data) % 4) + _U32[ord("l")].pack(len(encoded)) + encoded + b"\0"


def _padded(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _fields(raw: bytes, end: int) -> dict[int, Any]:
    """What a header says."""
    body, fields = _Body(raw, FIXED), {}
    while body.at < end:
        body.at = _padded(body.at, 8)
        field = raw[body.at]
        body.at += 1
        fields[field] = body.value("v")
    return fields


@functools.lru_cache(64)
def _types(signature: str) -> Sequence[str]:
    """The complete types of a signature."""
    types, at = [], 0
    while at < len(signature):
        end = at
        while signature[end] == "a":
            end += 1
        if signature[end] == "(":
            end = signature.index(")", end)  # structures in structures: nobody here is told of any
        types.append(signature[at : end + 1])
        at = end + 1
    return types


class _Body:
    """Values, one behind the other."""

    def __init__(self, raw: bytes, at: int) -> None:
        self.raw, self.at = raw, at
        self._u32 = _U32[raw[0]]

    def value(self, kind: str) -> Any:
        """The next one, of a complete type."""
        match kind[0]:
            case "s" | "o":
                return self._text(self._number())
            case "u":
                return self._number()
            case "b":
                return bool(self._number())
            case "g":
                self.at += 1
                return self._text(self.raw[self.at - 1])
            case "v":
                return self.value(self.value("g"))
            case "a":
                return self._array(kind[1:])
            case "(":
                self.at = _padded(self.at, 8)
                return tuple([self.value(one) for one in _types(kind[1:-1])])
        raise ValueError(f"type {kind} of D-Bus is not known here")

    def _array(self, kind: str) -> bytes | list[Any]:
        length = self._number()
        if kind[0] == "(":
            self.at = _padded(self.at, 8)
        end = self.at + length
        if kind == "y":
            self.at = end
            return self.raw[end - length : end]
        values = []
        while self.at < end:
            values.append(self.value(kind))
        return values

    def _number(self) -> int:
        at = self.at = (self.at + 3) & ~3
        self.at += 4
        return int(self._u32.unpack_from(self.raw, at)[0])

    def _text(self, length: int) -> str:
        begin = self.at
        self.at += length + 1
        return self.raw[begin : begin + length].decode()
