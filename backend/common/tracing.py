"""The trace of turns of memory: where the time from one turn to the next goes, for people who look for what takes long.

It is written where the environment variable GGROUP_TURNS_TRACE of the daemon names a file: a JSON object a line, with
microseconds. ``python -m tests.bench.timeline FILE`` makes a table of it. No more than MOST bytes are written.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from typing import TextIO

import trio

log = logging.getLogger(__name__)

VARIABLE = "GGROUP_TURNS_TRACE"
"""Environment variable that names the file."""
MOST = 3 << 20
"""Bytes that are written at most."""


class Trace:
    """See the module. Of one daemon; without a file it does nothing."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        """The file, or none."""
        self._file: TextIO | None = None
        self._left = MOST
        self._sums: dict[str, Counter[str]] = {}

    def note(self, what: str, **figures: object) -> None:
        """Writes that something happened, now."""
        if self.path is None:
            return
        line = json.dumps({"at": round(trio.current_time() * 1e6), "what": what, **figures}) + "\n"
        self._left -= len(line)
        if self._left < 0:
            return
        try:
            if self._file is None:
                self._file = open(self.path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - as long as the daemon
            self._file.write(line)
        except OSError as error:
            log.warning("%s: turns are not traced: %s", self.path, error.strerror)
            self.path = None

    def add(self, sum_: str, **figures: int) -> None:
        """Adds to a sum, which the next :meth:`flush` writes: what happens too often for a line each time."""
        if self.path is not None:
            self._sums.setdefault(sum_, Counter()).update(figures)

    def flush(self, what: str, **figures: object) -> None:
        """Writes that something is over, now, with all that was added since the last time."""
        if self.path is not None:
            self.note(what, **figures, **{name: dict(sums) for name, sums in self._sums.items()})
            self._sums.clear()

    def close(self) -> None:
        """Writes nothing more."""
        self.path = None
        if self._file is not None:
            self._file.close()


TRACE = Trace(os.environ.get(VARIABLE) or None)
"""That of this process."""
