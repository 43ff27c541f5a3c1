"""Reads the full command lines of processes, although a process can make its readers wait.

The kernel reads a command line from the memory of the process. A page backed by a filesystem of the process's own, or
by userfaultfd(2), arrives whenever the process likes. So the reading happens in a thread, which is abandoned if the
page does not arrive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence

import attrs

from backend.process import procfs

PATIENCE_S = 0.5
"""Seconds that one command line may take; a slower process is never asked again."""
STUCK_MOST = 8
"""Threads that may wait for a process; once so many do, no command line is read any more."""

Key = tuple[int, int]
"""Pid, and the number that distinguishes the process from others with that pid."""


@attrs.define
class Batch:
    """The processes that one thread reads, in order."""

    keys: Sequence[Key]
    """Processes to read."""
    answers: queue.SimpleQueue[str | None] = attrs.field(factory=queue.SimpleQueue)
    """Command line of each process, in the same order; None for one that cannot be read."""
    abandoned: bool = False
    """Whether the caller has stopped waiting for the rest."""

    def work(self) -> None:
        """Read all command lines; this is the body of the thread."""
        for pid, _ in self.keys:
            if self.abandoned:
                return
            try:
                text = procfs.command_line(pid)
            except OSError:  # it has ended, or is hidden
                text = ""
            self.answers.put(text or None)


class CommandLines:
    """Reads command lines, and remembers the processes whose command lines cannot be read in time."""

    def __init__(self) -> None:
        self._stuck: set[Key] = set()

    def read(self, keys: Iterable[Key]) -> Mapping[Key, str]:
        """Return the command lines of processes, without those that are empty, gone, or not read in time."""
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
