"""The syntax of unit files (systemd.syntax(7)): text to assignments, each with the place where it stands. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

BLANKS = " \t\n\r"
"""What systemd calls WHITESPACE."""

END_OF_LINE = re.compile(r"\r\n|[\n\r\0]")


@attrs.frozen
class Place:
    """Where something stands."""

    file: Path
    """The file."""
    line: int
    """Number of the line that it begins in, from 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@attrs.frozen
class Assignment:
    """One ``KEY=VALUE``."""

    section: str
    """What is in the brackets above it, empty before the first. A header without its end is there with its bracket."""
    key: str
    """Without blanks; of a line without a ``=``, that line."""
    value: str | None
    """Without blanks, empty to reset; None in a line without a ``=``."""
    place: Place
    """Where it is."""


def assignments(text: str, file: Path) -> Iterator[Assignment]:
    """The assignments of a file, in their order. Whatever the text is, this has an answer."""
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
    """Lines, without comments, where a backslash at the end takes the next one along: as config_parse() reads."""
    whole, first = "", 0
    for number, line in enumerate(END_OF_LINE.split(text.removeprefix("\ufeff")), 1):
        line = line.lstrip(BLANKS)
        if line[:1] in ("#", ";") and line:
            continue  # between two lines that belong together, too
        first = first or number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            whole += line[:-1] + " "
            continue
        yield first, (whole + line).strip(BLANKS)
        whole, first = "", 0
    if whole:
        yield first, whole.strip(BLANKS)
