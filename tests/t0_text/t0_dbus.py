"""The reader of D-Bus messages, which parses only the parts of a message that are asked for."""

from __future__ import annotations

import pytest
from jeepney import DBusAddress, HeaderFields, Message, new_signal
from jeepney.low_level import Endianness, Parser

from ggroupfs.units.wire import Malformed, Reader, Unread

PLACE = DBusAddress("/org/example/place", "org.example", "org.example.Interface")


@pytest.mark.parametrize("endianness", list(Endianness))
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_messages_are_those_of_the_library(endianness: Endianness, size: int) -> None:
    """The reader finds the same messages as jeepney, in pieces of any size and wherever another reader stopped."""
    data = b"".join(_signal(endianness, n, "su", ("x" * n, n)) for n in range(20))
    other = Parser()
    other.add_data(data[:300])
    assert other.get_next_message().body == ("", 0)
    reader = Reader(other)
    found = list(iter(reader.get_next_message, None))
    for at in range(300, len(data), size):
        reader.add_data(data[at : at + size])
        found += iter(reader.get_next_message, None)
    assert [one.header.fields[HeaderFields.member] for one in found] == [f"Told{n}" for n in range(1, 20)]
    assert [one.body for one in found] == [("x" * n, n) for n in range(1, 20)]


@pytest.mark.parametrize("endianness", list(Endianness))
def test_a_value_is_found_by_its_name(endianness: Endianness) -> None:
    """A key or a value that only resembles the name is not taken for it."""
    changed = {
        "ActiveStateX": ("s", "no"),
        "NoActiveState": ("s", "no"),
        "Following": ("s", "ActiveState"),
        "Names": ("as", ["ActiveState", "s", "no"]),
        "ActiveState": ("s", "activating"),
        "InvocationID": ("ay", b"0123456789abcdef"),
    }
    raw = _signal(endianness, 0, "sa{sv}as", ("org.example", changed, []))
    message = Unread(raw)
    assert message.named("ActiveState", "s") == "activating"
    assert message.named("InvocationID", "ay") == b"0123456789abcdef"
    assert message.named("ActiveState", "ay") is None
    assert message.named("State", "s") is None


def _signal(endianness: Endianness, number: int, signature: str, body: tuple[object, ...]) -> bytes:
    message: Message = new_signal(PLACE, f"Told{number}", signature or None, body)
    message.header.endianness = endianness
    return bytes(message.serialise(serial=number + 1))


@pytest.mark.parametrize("endianness", list(Endianness))
def test_words_with_brackets_are_no_structures(endianness: Endianness) -> None:
    """Strings with brackets in them are read as strings. An empty structure in a signature is refused."""
    raw = _signal(endianness, 0, "ss", ("auto()", "ay()"))
    assert Unread(raw).body == ("auto()", "ay()")
    raw = _signal(endianness, 0, "v", (("(y)", (1,)),))
    assert Unread(raw).body == (("(y)", (1,)),)
    with pytest.raises(Malformed, match="a structure of nothing"):
        _ = Unread(raw.replace(b"\x03(y)", b"\x03a()")).body
