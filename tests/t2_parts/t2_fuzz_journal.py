"""Journals of arbitrary bytes, of nonsense with valid checksums, and of damaged histories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.ledgers.journal import format, state
from backend.ledgers.journal.state import State
from tests.support.fuzzed import Target
from tests.support.journaled import BOOT, histories, quick, signed


def survives(data: bytes) -> None:
    """Check that bytes are read, refused or not ours, and that what was read is the same when written again."""
    try:
        found = format.read(data)
    except (format.NotOurs, format.Refused):
        return
    assert found.end <= len(data)
    text, _ = format.begin(found.boot or BOOT, found.state)
    assert format.read(text).state == found.state


@given(
    st.one_of(st.binary(max_size=300), st.binary(max_size=100).map(lambda tail: format.begin(BOOT, State())[0] + tail))
)
@quick
def test_arbitrary_bytes(data: bytes) -> None:
    survives(data)


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 1 << 70),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(("gpu", "add", "move", "remove", "put", "lever", "own", "give", "forget", "GPU-a", "/", "/a")),
    ),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(("high", "uid", "x", "1:2")), inner),
    max_leaves=12,
)


LINES = st.lists(values, max_size=4).map(lambda value: json.dumps(value).encode())


@given(st.lists(LINES, max_size=4))
@quick
def test_nonsense_with_the_right_checksums(bodies: list[bytes]) -> None:
    survives(signed([b'[["gpu","GPU-a"],["add","GPU-a","/a","/"]]', *bodies]))


@given(histories(), st.integers(0, 11), values)
@quick
def test_a_history_with_a_line_that_means_nothing(lines: list[list[state.Operation]], at: int, value: object) -> None:
    bodies = [json.dumps(line).encode() for line in lines]
    survives(signed([*bodies[:at], json.dumps([value]).encode(), *bodies[at:]]))


JOURNAL = Target("journal", survives, st.lists(LINES, max_size=4).map(signed))


@pytest.mark.parametrize("file", JOURNAL.kept())
def test_kept(file: Path) -> None:
    """A name that is no checksum begins with the expected result."""
    JOURNAL.replay(file)
    data, outcome = file.read_bytes(), file.name.partition("-")[0]
    match outcome:
        case "read":
            assert format.read(data).end == len(data)
        case "prefix":
            assert format.read(data).end < len(data)
        case "refused" | "foreign":
            with pytest.raises({"refused": format.Refused, "foreign": format.NotOurs}[outcome]):
                format.read(data)


def test_fresh() -> None:
    JOURNAL.fuzz()
