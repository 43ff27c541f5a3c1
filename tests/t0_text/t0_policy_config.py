"""The configuration of a policy: what a file may contain, and the complaint about everything else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggroupfs.errors import UsageError
from ggroupfs.policies.config import Table


def test_a_file_that_keeps_its_reader_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "policy.toml")
    with pytest.raises(OSError, match="no regular file"):
        Table.load(tmp_path / "policy.toml")


def table(text: str, tmp_path: Path) -> Table:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    return Table.load(file)


@pytest.mark.parametrize(
    ("line", "get", "value"),
    [
        ('k = "8G"', lambda t: t.size("k"), 8 << 30),
        ("k = 4096", lambda t: t.size("k"), 4096),
        ("", lambda t: t.size("k", 7), 7),
        ('k = "50ms"', lambda t: t.seconds("k"), 0.05),
        ('k = "1s 500us"', lambda t: t.seconds("k"), 1.0005),
        ("", lambda t: t.seconds("k", 0.0), 0.0),
        ("k = 2", lambda t: t.number("k"), 2),
        ("k = 0.25", lambda t: t.number("k", 1, low=0, high=1), 0.25),
        ("k = 3", lambda t: t.whole("k"), 3),
        ("k = false", lambda t: t.flag("k", True), False),
        ('k = "b"', lambda t: t.choice("k", ("a", "b")), "b"),
        ('k = ""', lambda t: t.text("k"), ""),
        ("", lambda t: t.text("k", "x"), "x"),
        ("", lambda t: t.tables("k"), []),
    ],
)
def test_what_it_says(tmp_path: Path, line: str, get: Callable[[Table], Any], value: object) -> None:
    config = table(line, tmp_path)
    assert get(config) == value
    config.finish()


@pytest.mark.parametrize(
    ("line", "get", "why"),
    [
        ("", lambda t: t.size("k"), "k: is missing"),
        ('k = "8X"', lambda t: t.size("k"), "k: '8X' is no size: bytes, or a string with K, M, G or T"),
        ('k = "max"', lambda t: t.size("k"), "k: 'max' is no size: bytes, or a string with K, M, G or T"),
        ("k = -1", lambda t: t.size("k"), "k: -1 is no size: bytes, or a string with K, M, G or T"),
        ("k = 1.5", lambda t: t.size("k"), "k: not a size: bytes, or a string with K, M, G or T"),
        ("k = true", lambda t: t.size("k"), "k: not a size: bytes, or a string with K, M, G or T"),
        ("k = 50", lambda t: t.seconds("k"), 'k: a time span has a unit: "50ms", "2s"'),
        ('k = "50"', lambda t: t.seconds("k"), 'k: a time span has a unit: "50ms", "2s"'),
        ('k = "5 ms 3"', lambda t: t.seconds("k"), 'k: a time span has a unit: "50ms", "2s"'),
        ('k = "soon"', lambda t: t.seconds("k"), "k: not a time span: milliseconds, or with us or ms"),
        ('k = "0ms"', lambda t: t.seconds("k"), "k: no time at all"),
        ('k = "1"', lambda t: t.number("k"), "k: not a number"),
        ("k = nan", lambda t: t.number("k"), "k: not a number"),
        ("k = true", lambda t: t.number("k"), "k: not a number"),
        ("k = -0.5", lambda t: t.number("k", low=0), "k: less than 0"),
        ("k = 1.5", lambda t: t.number("k", high=1), "k: more than 1"),
        ("k = 1.0", lambda t: t.whole("k"), "k: not a whole number"),
        ("k = -1", lambda t: t.whole("k"), "k: less than 0"),
        ("k = 1", lambda t: t.flag("k"), "k: neither true nor false"),
        ("k = 1", lambda t: t.text("k"), "k: not a string"),
        ('k = "c"', lambda t: t.choice("k", ("a", "b")), "k: not one of a, b"),
        ("k = [1]", lambda t: t.choice("k", ("a", "b")), "k: not one of a, b"),
        ("[k]", lambda t: t.tables("k"), "k: not tables: each begins with [[k]]"),
        ("k = 1", lambda t: t.text("j", "") and None, "k: there is no such key"),
    ],
)
def test_what_it_may_not(tmp_path: Path, line: str, get: Callable[[Table], Any], why: str) -> None:
    config = table(line, tmp_path)

    def read() -> None:
        get(config)
        config.finish()

    with pytest.raises(UsageError) as raised:
        read()
    assert str(raised.value) == f"{tmp_path}/policy.toml: {why}"


def test_tables_in_it(tmp_path: Path) -> None:
    """A complaint says which table it is about, and finish() of the whole file finds the unread keys of all tables."""
    config = table("[[job]]\npid = 1\n[[job]]\npid = 2\nname = 3\n", tmp_path)
    one, other = config.tables("job")
    assert [one.whole("pid"), other.whole("pid")] == [1, 2]
    assert "name" in other
    assert "name" not in one
    with pytest.raises(UsageError, match=r"policy.toml: job 2: name: there is no such key$"):
        config.finish()
    with pytest.raises(UsageError, match=r"policy.toml: job 2: name: not a string$"):
        other.text("name")
    config.finish()  # it was asked for


@pytest.mark.parametrize("content", [b"k = ", b"\xff\xfe", b"k = 1\nk = 2"])
def test_no_toml(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "policy.toml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"policy\.toml: "):
        Table.load(file)
