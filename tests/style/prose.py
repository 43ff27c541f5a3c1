"""The prose of a file: comments, docstrings and pages, as lines with their numbers."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import attrs

C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
MD_CODE = re.compile(r"^```.*?^```[^\n]*$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`|\"[^\"\n]*\"")


@attrs.frozen
class Text:
    """A piece of prose: a comment, a docstring or a paragraph."""

    line: int
    """The line that it begins in, from 1."""
    words: str
    docstring: bool = False


def _python(source: str) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string.lstrip("#! "))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            if isinstance(statement.value.value, str):
                yield Text(statement.lineno, statement.value.value, docstring=True)


def _blank(match: re.Match[str]) -> str:
    """Return as many lines as were cut, so that numbers stay true."""
    return "\n" * match[0].count("\n")


def _c(source: str) -> Iterator[Text]:
    for match in C_COMMENT.finditer(source):
        yield Text(source.count("\n", 0, match.start()) + 1, match[0].strip("/* \n"))


def _page(source: str) -> Iterator[Text]:
    for number, line in enumerate(MD_CODE.sub(_blank, source).split("\n"), 1):
        yield Text(number, line)


def _hashed(source: str) -> Iterator[Text]:
    for number, line in enumerate(source.split("\n"), 1):
        if line.lstrip().startswith("#"):
            yield Text(number, line.lstrip("#! \t"))


READERS = {
    ".py": _python,
    ".c": _c,
    ".h": _c,
    ".def": _c,
    ".cu": _c,
    ".md": _page,
    ".5": _page,
    ".8": _page,
    ".sh": _hashed,
    ".mk": _hashed,
}
"""What reads the prose of a file, by the file's suffix."""


def texts(path: Path) -> list[Text]:
    """The prose of `path`, without what is quoted in it: names of code and strings are no prose."""
    reader = READERS.get(path.suffix)
    if reader is None:
        return []
    found = reader(path.read_text(encoding="utf-8"))
    return [attrs.evolve(text, words=CODE.sub(_blank, text.words)) for text in found]
