"""What processes have said of their families before they come to a GPU, and the places that are kept for them.

A process that has said so is watched, and may never come: so each user can have as many of them as families.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence

import attrs

from backend.common.errors import fail
from backend.core import bounds
from backend.core.families import Families
from backend.core.population import Population
from backend.process.identity import Process, Slice


@attrs.frozen
class Promise:
    """What a process was promised."""

    process: Process
    """The process, which is watched, and is not in the tree."""
    families: Families
    """Families that it is in when it comes to a GPU, each in the one before; one at least."""
    slices: Sequence[Slice]
    """Their slices below the cgroup in which it was as it asked: a place is kept for each."""

    @property
    def user(self) -> int:
        """The user for which it counts."""
        return self.families[-1].user


class Promises:
    """The promises of one tree."""

    def __init__(self, population: Population) -> None:
        self._population = population
        self._by_pid: dict[int, Promise] = {}
        self._counts: Counter[int] = Counter()  # by user

    def __len__(self) -> int:
        return len(self._by_pid)

    def by_pid(self, pid: int) -> Promise | None:
        """What the process was promised that bears a number."""
        return self._by_pid.get(pid)

    def families(self, process: Process) -> Families:
        """The families that were promised to exactly that process; none where nothing was."""
        promise = self._by_pid.get(process.pid)
        return promise.families if promise is not None and promise.process == process else ()

    def make(self, process: Process, cgroup: Slice, families: Families) -> None:
        """Promises a process of a cgroup its families, instead of what it was promised before. EAGAIN for too many, of
        its user or of all."""
        former, user = self._by_pid.get(process.pid), families[-1].user
        if self._counts[user] - (former is not None and former.user == user) >= bounds.FAMILIES_OF_USER:
            raise fail(errno.EAGAIN)
        slices = self._population.promise(cgroup, families)
        if former is not None:  # perhaps of one that bore the pid before, and whose exit was not noticed yet
            self.end(former.process)
        self._note(Promise(process, families, slices))

    def end(self, process: Process) -> Promise | None:
        """A process is promised nothing any more: it comes, or has gone. Return what it was promised."""
        promise = self._by_pid.get(process.pid)
        if promise is None or promise.process != process:
            return None
        del self._by_pid[process.pid]
        self._counts[promise.user] -= 1
        if not self._counts[promise.user]:
            del self._counts[promise.user]
        self._population.withdraw(promise.slices)
        return promise

    def renew(self, promise: Promise) -> None:
        """Promises anew what was ended a moment ago: the process could not come."""
        self._population.renew(promise.slices, promise.user)
        self._note(promise)

    def _note(self, promise: Promise) -> None:
        self._by_pid[promise.process.pid] = promise
        self._counts[promise.user] += 1
