"""The syntax of unit files (systemd.syntax(7)): parses text into assignments with their places. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

BLANKS = " \t\n\r"
"""Blanks; WHITESPACE in systemd."""

END_OF_LINE = re.compile(r"\r\n|[\n\r\0]")


@attrs.frozen
class Place:
    """A place in a file."""

    file: Path
    """Path of the file."""
    line: int
    """Number of the first line, from 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@attrs.frozen
class Assignment:
    """One ``KEY=VALUE``."""

    section: str
    """Section header without brackets, empty before the first one. An unterminated header keeps its bracket."""
    key: str
    """Key without surrounding blanks; the whole line if it has no ``=``."""
    value: str | None
    """Value without surrounding blanks, empty to reset; None for a line without a ``=``."""
    place: Place
    """Place of the assignment."""


def assignments(text: str, file: Path) -> Iterator[Assignment]:
    """Yield the assignments of a file, in order. Any text is accepted."""
    section = ""
    for number, line in _logical_lines(text):
        if line.startswith("["):
            section = line[1:-1] if line.endswith("]") else line
        elif line:
            key, equals, value = line.partition("=")
            place = Place(file, number)
            if equals:
                yield Assignment(section, key.strip(BLANKS), value.strip(BLANKS), place)
            else:
                yield Assignment(section, line, None, place)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield logical lines without comments; a backslash at the end joins the next line, as in config_parse()."""
    whole, first = "", 0
    for number, line in enumerate(END_OF_LINE.split(text.removeprefix("\ufeff")), 1):
        line = line.lstrip(BLANKS)
        if line[:1] in ("#", ";") and line:
            continue  # also between two lines that are joined
        first = first or number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            whole += line[:-1] + " "
            continue
        yield first, (whole + line).strip(BLANKS)
        whole, first = "", 0
    if whole:
        yield first, whole.strip(BLANKS)
