"""The checker of docs/style.md finds the faults that it is for, and lets pass what it has to let pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.style import prose, rules

FOUND = {
    "a.py": '"""Who comes has waited."""\n\n\ndef f() -> None:\n    """... and its timeslice."""\n    # Nobody asks.\n',
    "b.c": "/* Whoever holds the lock. */\nint a; // he waits\n",
    "c.md": "The program, who waits.\n\n```console\n$ echo who\n```\n\nA file `who`.\n",
    "d.5": ".It Pa x\nSomebody reads it.\n",
}
LINES = {"a.py": [1, 5, 6], "b.c": [1, 2], "c.md": [1], "d.5": [2]}
"""The lines of each file above that break a rule."""

STANDS = {
    "a.py": '"""Operators who mount it."""\n\nX = "who"\n# It says `who`.\n',
    "b.md": 'Users who share a GPU. Never "he".\n',
}


def lines(folder: Path, name: str, text: str) -> list[int]:
    path = folder / name
    path.write_text(text)
    return sorted(line for piece in prose.texts(path) for line, _ in rules.prose(piece))


@pytest.mark.parametrize("name", FOUND)
def test_what_breaks_a_rule_is_found_with_its_line(tmp_path: Path, name: str) -> None:
    assert lines(tmp_path, name, FOUND[name]) == LINES[name]


@pytest.mark.parametrize("name", STANDS)
def test_what_breaks_none_stands(tmp_path: Path, name: str) -> None:
    assert lines(tmp_path, name, STANDS[name]) == []


def test_a_subject_has_72_characters_at_most() -> None:
    assert rules.subject("x" * 72) is None
    assert rules.subject("x" * 73) == "73 characters, 72 at most"
