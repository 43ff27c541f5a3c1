"""Messages of D-Bus as they are written and read here, against a library's (jeepney)."""

from __future__ import annotations

import pytest
from jeepney import DBusAddress, Message, new_method_call, new_signal
from jeepney.low_level import Endianness

from ggroupfs.units import wire

PLACE = DBusAddress("/org/example/place", "org.example", "org.example.Interface")

BODIES = (
    ("", ()),
    ("s", ("über",)),
    ("so", ("a.service", "/a_2eservice")),
    ("sb", ("one", True)),
    ("as", ([],)),
    ("vas", (("as", ["one", "three"]), ["", "four"])),
    ("a(ssssssouso)", ([(*"abcdef", "/g", 7, "h", "/i"), (*"ABCDEF", "/G", 1 << 31, "", "/")],)),
)


@pytest.mark.parametrize("arguments", [(), ("one",), ("one", "four"), ([], ["*.slice", "x"]), (["one"], "two")])
def test_a_call_is_the_librarys(arguments: tuple[str | list[str], ...]) -> None:
    signature = "".join("s" if isinstance(one, str) else "as" for one in arguments)
    message = new_method_call(PLACE, "Method", signature or None, arguments)
    ours = wire.call(7, PLACE.bus_name, PLACE.object_path, PLACE.interface, "Method", *arguments)
    assert ours == message.serialise(serial=7)


@pytest.mark.parametrize("endianness", list(Endianness))
def test_what_the_library_writes_is_read(endianness: Endianness) -> None:
    """However it is cut in pieces."""
    data, size = b"", 0
    for number, (signature, body) in enumerate(BODIES):
        data += _signal(endianness, number, signature, body)
    for size in (1, 7, 64, len(data)):
        stream = wire.Stream()
        found = [one for at in range(0, len(data), size) for one in stream.feed(data[at : at + size])]
        assert [one.fields[wire.MEMBER] for one in found] == [f"Told{number}" for number in range(len(BODIES))]
        assert {one.type for one in found} == {wire.SIGNAL}
        for one, (_, body) in zip(found, BODIES, strict=True):
            values = tuple(value[1] if isinstance(value, tuple) else value for value in body)  # a variant's type
            assert one.values() == values
            assert one.first() == (values[0] if values else None)


@pytest.mark.parametrize("endianness", list(Endianness))
def test_a_value_is_found_by_its_name(endianness: Endianness) -> None:
    """And by nothing that looks like it."""
    changed = {
        "ActiveStateX": ("s", "no"),
        "NoActiveState": ("s", "no"),
        "Following": ("s", "ActiveState"),
        "Names": ("as", ["ActiveState", "s", "no"]),
        "ActiveState": ("s", "activating"),
        "InvocationID": ("ay", b"0123456789abcdef"),
    }
    raw = _signal(endianness, 0, "sa{sv}as", ("org.example", changed, []))
    (message,) = wire.Stream().feed(raw)
    assert message.named("ActiveState", "s") == "activating"
    assert message.named("InvocationID", "ay") == b"0123456789abcdef"
    assert message.named("ActiveState", "ay") is None
    assert message.named("State", "s") is None


@pytest.mark.parametrize("raw", [b"GET / HTTP/1.1\r\n", b"l\4\1\1" + b"\xff" * 12])
def test_what_is_no_message(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"a message|no message"):
        list(wire.Stream().feed(raw))


def test_a_type_that_is_not_known() -> None:
    (message,) = wire.Stream().feed(_signal(Endianness.little, 0, "d", (1.5,)))
    with pytest.raises(ValueError, match="type d"):
        message.values()


def _signal(endianness: Endianness, number: int, signature: str, body: tuple[object, ...]) -> bytes:
    message: Message = new_signal(PLACE, f"Told{number}", signature or None, body)
    message.header.endianness = endianness
    return bytes(message.serialise(serial=number + 1))
