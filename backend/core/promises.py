"""Promises: the families that processes named before they come to a GPU, and the places that are kept for them.

A process with a promise is watched, and may never come. So each user can have as many promises as families.
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
    """A promise to one process."""

    process: Process
    """The process, which is watched and not in the tree."""
    families: Families
    """The families that it will be in when it comes to a GPU, each in the one before; at least one."""
    slices: Sequence[Slice]
    """Their slices, below the cgroup that it was in as it asked: a place is kept for each."""

    @property
    def user(self) -> int:
        """The user that it counts for."""
        return self.families[-1].user


class Promises:
    """The promises of one tree."""

    def __init__(self, population: Population) -> None:
        self._population = population
        self._by_pid: dict[int, Promise] = {}
        self._counts: Counter[int] = Counter()  # number of promises, by user

    def __len__(self) -> int:
        return len(self._by_pid)

    def by_pid(self, pid: int) -> Promise | None:
        """Return the promise to the process that bears a pid; None for none."""
        return self._by_pid.get(pid)

    def families(self, process: Process) -> Families:
        """Return the families promised to exactly that process; empty for none."""
        promise = self._by_pid.get(process.pid)
        return promise.families if promise is not None and promise.process == process else ()

    def make(self, process: Process, cgroup: Slice, families: Families) -> None:
        """Promise a process of a cgroup its families, in place of an earlier promise. EAGAIN for too many, of its user
        or of all."""
        former, user = self._by_pid.get(process.pid), families[-1].user
        if self._counts[user] - (former is not None and former.user == user) >= bounds.FAMILIES_OF_USER:
            raise fail(errno.EAGAIN)
        slices = self._population.promise(cgroup, families)
        if former is not None:  # may be of an earlier process of that pid, if its exit is not noticed yet
            self.end(former.process)
        self._note(Promise(process, families, slices))

    def end(self, process: Process) -> Promise | None:
        """End and return the promise to a process that comes or is gone; None for none."""
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
        """Renew a promise that was ended a moment ago, as the process could not come."""
        self._population.renew(promise.slices, promise.user)
        self._note(promise)

    def _note(self, promise: Promise) -> None:
        self._by_pid[promise.process.pid] = promise
        self._counts[promise.user] += 1
