"""Level 0: the bounds in docs/security.md are those of the code, and each bound has tests.

t0_pages.py checks, for every page that names tests, that the tests exist.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.core import bounds
from backend.ledgers import abi
from tests.support.page import DOCS, section

ROOT = Path(__file__).parents[2]

UNITS = {"": 1, "us": 1e-6, "ms": 1e-3, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
ENDINGS = {"US": "us", "USEC": "us", "MS": "ms"}
"""Endings of the names of constants that are not in seconds."""
NUMBER = re.compile(r"(?<![\w.^-])(-?\d[\d,]*(?:\.\d+)?)(?:\^(\d+) - (\d+))?(?: (us|ms|s|KiB|MiB|GiB)\b)?")
NAMED = re.compile(r"`((?:backend|ggroupfs)(?:\.\w+)+|GGROUP_[A-Z_]+|\w+_per_user)`")


def table() -> list[list[str]]:
    """Return what a tenant does, the bound, what is beyond it, and the tests, of each item of the list."""
    text = section("What a tenant can hold or cause", DOCS / "security.md")
    found = []
    for item in re.split(r"^- (?=\*\*)", text, flags=re.MULTILINE)[1:]:
        title, *lines = re.split(r"^  - ", item.partition("\n\n")[0], flags=re.MULTILINE)
        fields = dict(" ".join(line.split()).split(": ", 1) for line in lines)
        assert set(fields) <= {"bound", "beyond it", "tests"}, item
        words = " ".join(title.split()).strip("*")
        found.append([words, *(fields.get(name, "") for name in ("bound", "beyond it", "tests"))])
    return found


def said(text: str) -> list[float]:
    """The numbers in a text, converted to bytes and seconds."""
    numbers = []
    for number, power, less, unit in NUMBER.findall(text):
        value = float(number.replace(",", ""))
        numbers.append(value ** int(power) - int(less) if power else value * UNITS[unit])
    return numbers


def constant(name: str) -> Sequence[float]:
    """The value of a constant of the daemon or of the kernel module: one number, or several."""
    value = in_the_daemon(name) if "." in name else in_the_module(name)
    match value:
        case range():
            return value.start, value.stop - 1
        case tuple():
            return value
    unit = next((unit for ending, unit in ENDINGS.items() if re.search(rf"[._]{ending}(_MOST)?$", name)), "")
    return (value * UNITS[unit],)


def in_the_daemon(name: str) -> Any:
    """The value of a constant of a Python module, or the default of a class's field."""
    inside, _, last = name.rpartition(".")
    place = pkgutil.resolve_name(inside)
    return getattr(place() if isinstance(place, type) else place, last)


def in_the_module(name: str) -> int:
    """The value of a macro of the kernel module, or the default of one of its parameters."""
    pattern = rf"^(?:#define\s+{name}\s+|static unsigned int {name} = )(0x\w+|\d+)"
    found = [
        one
        for path in sorted((ROOT / "kmod").rglob("*.[ch]"))
        for one in re.findall(pattern, path.read_text(), re.MULTILINE)
    ]
    assert len(found) == 1, f"{name}: {found}"
    return int(re.sub("[UL]+$", "", found[0]), 0)


def numbered() -> list[tuple[str, str]]:
    """Each constant that a row names, with the text of the row between the previous constant and this one."""
    found = []
    for _, bound, beyond, _ in table():
        for cell in (bound, beyond):
            begin = 0
            for match in NAMED.finditer(cell):
                found.append((match[1], cell[begin : match.start()]))
                begin = match.end()
    return found


@pytest.mark.parametrize(("name", "text"), numbered(), ids=[name for name, _ in numbered()])
def test_a_number_on_the_page_is_the_constant_s(name: str, text: str) -> None:
    """The numbers right before a constant's name are its value."""
    wanted = constant(name)
    assert said(text)[-len(wanted) :] == pytest.approx(list(wanted), rel=0, abs=1e-9), text


def test_there_are_as_many_as_there_were() -> None:
    """At least as many rows and constants are found as before: none is skipped because it is spelled differently."""
    assert len(table()) >= 80
    assert len({name for name, _ in numbered()}) >= 55
    in_ticks = {one for row in table() for cell in row[1:3] for one in re.findall(r"`([^`]*\.[A-Z]\w*[^`]*)`", cell)}
    assert in_ticks <= {name for name, _ in numbered()}


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
def test_each_row_has_a_bound_and_tests(row: list[str]) -> None:
    assert len(row) == 4
    assert row[0]
    assert row[1]
    assert re.fullmatch(r"`test_\w+`(, `test_\w+`)*", row[3]), row[3]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (bounds.SLICES_MOST, abi.MAX_SLICES_PER_USER),
        (bounds.DEPTH_MOST, abi.MAX_DEPTH),
        (bounds.DEPTH_MOST_ROOT, abi.MAX_DEPTH_ROOT),
    ],
)
def test_the_tree_refuses_what_the_kernel_s_books_refuse(ours: int, theirs: int) -> None:
    """The bounds of the daemon are those of abi.py; t1_abi.py compares abi.py with the header."""
    assert ours == theirs


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("65,536 (", [65536]),
        ("2 GiB more, 50 ms (", [2 << 30, 0.05]),
        ("2^63 - 1 (", [float((1 << 63) - 1)]),
        ("-4095 to 0 (", [-4095, 0]),
        ("none (", []),
    ],
)
def test_numbers_are_read(text: str, numbers: list[float]) -> None:
    assert said(text) == numbers
