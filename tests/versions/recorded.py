"""What 0.1 said at the socket, as record.py wrote it down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from backend.door.wire import Message

SESSION = Path(__file__).parent / "v0_1" / "session"


@attrs.frozen
class Line:
    """One line of it."""

    by: str
    """``>`` the library, ``<`` the daemon, ``!`` what is done."""
    raw: bytes = b""
    """The message."""
    descriptor: bool = False
    """Whether one came with it."""
    done: str = ""
    """What is done."""

    @property
    def message(self) -> Message:
        """The message, decoded."""
        return Message.decode(self.raw)


def session() -> Iterator[Line]:
    """The lines, in the order in which they were said."""
    for line in SESSION.read_text(encoding="ascii").splitlines():
        by, rest = line.split(" ", 1)
        if by == "!":
            yield Line(by, done=rest)
        else:
            words = rest.split()
            yield Line(by, bytes.fromhex(words[0]), "+" in words)
