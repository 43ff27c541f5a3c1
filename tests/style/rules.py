"""The rules of docs/style.md that a program can check."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.style.prose import Text

PERSON = re.compile(r"\b(he|him|his|she|her|hers|who|whom|whoever|somebody|anybody|everybody|nobody)\b", re.IGNORECASE)
PEOPLE = re.compile(
    r"\b(operators?|users?|developers?|people|persons?|strangers?|admins?|authors?|maintainers?)\s+who\b",
    re.IGNORECASE,
)
"""Where "who" is right."""
SUBJECT_MOST = 72
"""The longest subject of a commit, in characters."""


def prose(text: Text) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault for each place of `text` that breaks a rule."""
    if text.docstring and text.words.startswith("..."):
        yield text.line, "a docstring that continues the one before it"
    for offset, line in enumerate(PEOPLE.sub("", text.words).split("\n")):
        for match in PERSON.finditer(line):
            yield text.line + offset, f"'{match[0]}' for a program or a thing: name it by a noun"


def subject(words: str) -> str | None:
    """Say what is wrong with a commit's subject; None if nothing is."""
    if len(words) > SUBJECT_MOST:
        return f"{len(words)} characters, {SUBJECT_MOST} at most"
    return None
