"""compute.events against cgroup.events of the running kernel: the value of `frozen`, and which pollers are woken when.

The kernel's rules are in kernel/cgroup/freezer.c: a cgroup is frozen once that was asked for, of it or of one above it,
and nothing in it or below it runs. Every change is an event, and so is a write of cgroup.freeze that changes nothing.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.cgroups import cgroup2
from tests.support.mounted import Mounted
from tests.support.strategies import history

PLACES = ("a", "a/b", "a/b/c", "a/e")
"""Places below the top of either tree. All are empty, since there the kernel's first answer is final, while a task
takes a moment to freeze, and two to be frozen again (t3_freeze_events.py has processes)."""
LATE_MS = 5000
"""Milliseconds to wait for an event: the kernel reports a file once in 10 ms (CGROUP_FILE_NOTIFY_MIN_INTV), later
events by a timer."""
PASSING = ("a/b/d", "a/f")
"""Places that come and go."""


@attrs.frozen
class Side:
    """One of the two trees."""

    top: Path
    freeze: str
    events: str

    def frozen(self, place: str) -> str:
        lines = (self.top / place / self.events).read_text().splitlines()
        return next(line for line in lines if line.startswith("frozen "))


@pytest.fixture(scope="module")
def sides(module_mount: Mounted) -> Iterator[tuple[Side, Side]]:
    top = cgroup2() / f"ggroupfs-freeze-{os.getpid()}"
    ours = module_mount / "slice" / top.name
    with ExitStack() as stack:
        for path in (top, ours):
            path.mkdir()
            stack.callback(path.rmdir)
        yield Side(top, "cgroup.freeze", "cgroup.events"), Side(ours, "0/compute.freeze", "0/compute.events")
    module_mount.check_log()


class Freezes(RuleBasedStateMachine):
    """Each step is done in both trees; then both agree on every directory, and have woken the same pollers."""

    sides: ClassVar[tuple[Side, Side]]

    @initialize()
    def begin(self) -> None:
        self.there: set[str] = set()
        self.stack = ExitStack()
        self.files: dict[str, tuple[int, int]] = {}
        for place in PLACES:  # new ones, since the kernel may still have events of the old ones
            self.make_or_remove(place)

    def opened(self, place: str) -> tuple[int, int]:
        """Open and read the events file of a place in each tree, so that it waits for the next event."""
        fds = []
        for side in self.sides:
            fd = os.open(side.top / place / side.events, os.O_RDONLY)
            self.stack.callback(os.close, fd)
            os.read(fd, 4096)
            fds.append(fd)
        return fds[0], fds[1]

    def agree(self) -> None:
        kernel, ours = self.sides
        for place in self.there:
            assert ours.frozen(place) == kernel.frozen(place), place

    @rule(place=st.sampled_from(PLACES + PASSING), value=st.sampled_from("01"))
    def freeze(self, place: str, value: str) -> None:
        if place in self.there:
            for side in self.sides:
                (side.top / place / side.freeze).write_text(value)

    @rule(place=st.sampled_from(PASSING))
    def come_or_go(self, place: str) -> None:
        self.make_or_remove(place)

    def make_or_remove(self, place: str) -> None:
        if place in self.there:
            self.remove(place)
            del self.files[place]
        else:
            for side in self.sides:
                (side.top / place).mkdir()
            self.files[place] = self.opened(place)
        self.there ^= {place}

    def remove(self, place: str) -> None:
        """Remove ours first: a slice goes with its cgroup, perhaps before it can be removed."""
        for side in reversed(self.sides):
            (side.top / place).rmdir()

    @invariant()
    def both_say_the_same(self) -> None:
        if not hasattr(self, "there"):
            return
        self.agree()
        for place, (kernel, ours) in self.files.items():
            told = self.is_woken(ours, 0)
            assert self.is_woken(kernel, LATE_MS if told else 0) == told, f"{place}: ours was woken: {told}"

    @staticmethod
    def is_woken(fd: int, milliseconds: int) -> bool:
        """Return whether there was an event since the last look, or is one soon."""
        poller = select.poll()
        poller.register(fd, select.POLLPRI)
        woken = bool(poller.poll(milliseconds))
        os.pread(fd, 4096, 0)
        return woken

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()
            for place in sorted(self.there, reverse=True):
                self.remove(place)


def test_a_history_of_freezes(sides: tuple[Side, Side]) -> None:
    Freezes.sides = sides
    run_state_machine_as_test(Freezes, settings=history(8, 25, shrink=False))  # type: ignore[no-untyped-call]
