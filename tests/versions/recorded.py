"""The messages of 0.1 on the socket, as record.py recorded them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from backend.door.wire import Message

SESSION = Path(__file__).parent / "v0_1" / "session"


@attrs.frozen
class Line:
    """One line of the recording."""

    by: str
    """``>`` for the library, ``<`` for the daemon, ``!`` for an action."""
    raw: bytes = b""
    """The message, encoded."""
    descriptor: bool = False
    """Whether a descriptor came with the message."""
    done: str = ""
    """The action."""

    @property
    def message(self) -> Message:
        """The message, decoded."""
        return Message.decode(self.raw)


def session() -> Iterator[Line]:
    """The lines of the recording, in their order."""
    for line in SESSION.read_text(encoding="ascii").splitlines():
        by, rest = line.split(" ", 1)
        if by == "!":
            yield Line(by, done=rest)
        else:
            words = rest.split()
            yield Line(by, bytes.fromhex(words[0]), "+" in words)
