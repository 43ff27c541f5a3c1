"""The messages between a job and the policy `lanes`: lines of text over a Unix socket. Pure, and plain Python.

    job {"name": "a", "persistent": 1073741824, "ephemeral": 4294967296, "duration": 36000000000000}
                     announces the job, which then waits. Sizes in bytes, remaining run time alone in nanoseconds
    go               the job may use the GPU until the end of an iteration
    end              the iteration has ended; the job waits for the next `go`
    refused WHY      the job will never get a turn
    bye              the policy ends and has thawed the job, which continues on its own

A job sends `job` once, and `end` once for each `go`; a peer that sends anything else is disconnected. A job that hangs
up, or dies, is finished.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

DEFAULT_SOCKET = Path("/run/ggroupfs/lanes.sock")

LINE_MOST = 1024
"""Bytes of the longest line, including its end."""
NAME_MOST = 64
"""Characters of the longest name."""
NUMBER_MOST = (1 << 63) - 1

GO, END, BYE = "go", "end", "bye"
JOB, REFUSED = "job ", "refused "


class Announcement(NamedTuple):  # not an attrs record: the program of the job need not have attrs
    """The announcement of a job."""

    name: str
    """Name for people; may be empty, and need not be unique."""
    persistent: int
    """Memory held throughout, bytes: P."""
    ephemeral: int
    """Additional memory during an iteration, bytes: E."""
    duration: int
    """Remaining run time with the GPU to itself, nanoseconds."""

    def line(self) -> bytes:
        """Return the line to send. ValueError for values that the policy would reject."""
        line = f"{JOB}{json.dumps(self._asdict())}\n".encode()
        if len(line) > LINE_MOST:
            raise ValueError("the name is too long")
        self.parse(line.decode().rstrip("\n"))
        return line

    @classmethod
    def parse(cls, line: str) -> Announcement:
        """Parse a line without its end. ValueError with the reason."""
        if not line.startswith(JOB):
            raise ValueError("a job says first what it is")
        try:
            said = json.loads(line.removeprefix(JOB))
        except RecursionError:
            raise ValueError("no JSON object") from None
        if not isinstance(said, dict) or set(said) != set(cls._fields):
            raise ValueError(f"not an object with {', '.join(cls._fields)}")
        name = said["name"]
        if not isinstance(name, str) or len(name) > NAME_MOST or not (name.isprintable() and name.isascii()):
            raise ValueError(f"the name is not {NAME_MOST} characters of ASCII at most")
        for key in ("persistent", "ephemeral", "duration"):
            number = said[key]
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= NUMBER_MOST:
                raise ValueError(f"{key} is no whole number from 0 to {NUMBER_MOST}")
        return cls(**said)


class Lines:
    """Splits received bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines completed by `data`, without their ends.

        ValueError for one that is too long or not ASCII.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) >= LINE_MOST for line in (*whole, self._rest)):
            raise ValueError(f"a line of more than {LINE_MOST} bytes")
        return [line.decode("ascii") for line in whole]  # UnicodeDecodeError is a ValueError
