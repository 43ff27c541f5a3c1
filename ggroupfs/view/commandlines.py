"""The full command lines of processes, which a process can have its readers wait for.

The kernel reads them from the memory of the process: a page of that which comes from a file system of its own, or from
userfaultfd(2), comes when the process likes. So they are read in a thread that is left behind where one does not come.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence

import attrs

from backend.process import procfs

PATIENCE_S = 0.5
"""Seconds that a command line may take, before its process is never asked again."""
STUCK_MOST = 8
"""Threads that wait for a process, at most: with so many, no command line is read any more."""

Key = tuple[int, int]
"""Pid, and the number that tells the process from another one of that pid."""


@attrs.define
class Batch:
    """What one thread reads, from first to last."""

    keys: Sequence[Key]
    """The processes."""
    answers: queue.SimpleQueue[str | None] = attrs.field(factory=queue.SimpleQueue)
    """A command line for each, in their order; None for one that cannot be read."""
    abandoned: bool = False
    """Whether nothing waits for the rest."""

    def work(self) -> None:
        """The thread."""
        for pid, _ in self.keys:
            if self.abandoned:
                return
            try:
                text = procfs.command_line(pid)
            except OSError:  # it has ended, or is hidden
                text = ""
            self.answers.put(text or None)


class CommandLines:
    """Reads command lines, and remembers which processes do not let theirs be read."""

    def __init__(self) -> None:
        self._stuck: set[Key] = set()

    def read(self, keys: Iterable[Key]) -> Mapping[Key, str]:
        """Return the command lines of processes, but of those that have none, have ended or have us wait."""
        found: dict[Key, str] = {}
        left = [key for key in keys if key not in self._stuck]
        while left and len(self._stuck) < STUCK_MOST:
            batch = Batch(left)
            threading.Thread(target=batch.work, name="ggroupfs-command-lines", daemon=True).start()
            left = []
            for place, key in enumerate(batch.keys):
                try:
                    text = batch.answers.get(timeout=PATIENCE_S)
                except queue.Empty:
                    batch.abandoned = True
                    self._stuck.add(key)
                    left = [*batch.keys[place + 1 :]]
                    break
                if text is not None:
                    found[key] = text
        return found
