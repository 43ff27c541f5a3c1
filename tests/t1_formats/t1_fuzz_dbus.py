"""Fuzzes the D-Bus reader: in pieces and read late, a message is what jeepney reads; all else is Malformed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from jeepney import DBusAddress, HeaderFields, Message, new_signal
from jeepney.low_level import Endianness, Parser, calc_msg_size

from ggroupfs.units.wire import MOST, Malformed, Reader
from tests.support.fuzzed import Target, outcome

NAMES = ("ActiveState", "InvocationID", "State", "Active")


def check(raw: bytes) -> None:
    """The first byte is the size of the pieces in which the reader gets the other bytes."""
    size, raw = (raw[0] or 1, raw[1:]) if raw else (1, raw)
    reader, found, malformed = Reader(Parser()), [], ""
    for at in range(0, len(raw), size):
        reader.add_data(raw[at : at + size])
        while not malformed:
            message, malformed = outcome(reader.get_next_message, Malformed)
            if message is None:
                break
            found.append(message)
        if malformed:
            break
    for message in found:
        whole, raw = raw[: calc_msg_size(raw)], raw[calc_msg_size(raw) :]
        body, _ = outcome(lambda message=message: message.body, Malformed)
        values = [outcome(lambda n=n, k=k, m=message: m.named(n, k), Malformed)[0] for n in NAMES for k in ("s", "ay")]
        if body is None:
            continue
        same = Message.from_buffer(whole)
        assert (body, message.header.fields) == (same.body, same.header.fields)
        if message.header.fields.get(HeaderFields.signature) == "sa{sv}as" and proper(same, whole):
            changed: dict[str, Any] = body[1]
            wanted = [
                changed[n][1] if n in changed and changed[n][0] == k else None for n in NAMES for k in ("s", "ay")
            ]
            assert values == wanted
    if not malformed and len(raw) >= 16:  # no whole message is left
        assert len(raw) < calc_msg_size(raw) <= MOST


def proper(message: Message, raw: bytes) -> bool:
    """Whether a bus would pass this message on, and no bytes in it happen to look like a name that is searched for."""
    name, changed, others = message.body
    strings = [name, *others, *changed, *(one for _, value in changed.values() for one in flat(value))]
    return (
        not any("\0" in one for one in strings if isinstance(one, str))
        and all(kind in ("s", "u", "as") or name == "InvocationID" for name, (kind, _) in changed.items())
        and not any(name.encode() in one for one in strings if isinstance(one, bytes) for name in NAMES)
        and outcome(lambda: message.serialise(serial=message.header.serial), ValueError)[0] == raw
    )


def flat(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


PLACE = DBusAddress("/org/freedesktop/systemd1/unit/a_2eservice", "org.example", "org.freedesktop.DBus.Properties")
WORD = st.one_of(
    st.sampled_from([*NAMES, "s", "ay", "", "inactive"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4),
)
VALUE = st.one_of(
    st.tuples(st.just("s"), WORD),
    st.tuples(st.just("u"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("as"), st.lists(WORD, max_size=3)),
    st.tuples(st.just("ay"), st.binary(max_size=20)),
    st.tuples(st.just("(uo)"), st.just((0, "/"))),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    raw = bytes([draw(st.integers(0, 255))])
    for serial in range(1, draw(st.integers(1, 4)) + 1):
        signature, body = draw(
            st.one_of(
                st.tuples(WORD, st.dictionaries(WORD, VALUE, max_size=4), st.lists(WORD, max_size=2)).map(
                    lambda body: ("sa{sv}as", body)
                ),
                st.tuples(WORD, WORD).map(lambda body: ("ss", body)),
                st.just((None, ())),
            )
        )
        message = new_signal(PLACE, "PropertiesChanged", signature, body)
        message.header.endianness = draw(st.sampled_from(list(Endianness)))
        one = bytearray(message.serialise(serial=serial))
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
            one[draw(st.integers(0, len(one) - 1))] = draw(st.integers(0, 255))
        raw += one[: draw(st.integers(0, len(one)))] if draw(st.integers(0, 9)) == 0 else one
    return raw


DBUS = Target("dbus", check, streams(), examples=300)


@pytest.mark.parametrize("file", DBUS.kept())
def test_kept(file: Path) -> None:
    DBUS.replay(file)


def test_fresh() -> None:
    DBUS.fuzz()
