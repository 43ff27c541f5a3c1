"""Records of groups: after any history each group in the tree has one, and no other group is known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import trio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from trio.testing import MockClock

from backend.core.controller import Controller
from backend.core.member import Record
from backend.ledgers.soft import SoftLedger
from backend.process.identity import Group, Member, Process, Slice, SliceOn
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine

PIDS = st.integers(2, 4)
GPUS = st.integers(0, 1)
SLICES = st.sampled_from([Slice("/a"), Slice("/a/b"), Slice("/c")])
USEC = st.integers(1, 1000)
WORK = "gpu_usec"


class Records(RuleBasedStateMachine):
    """Processes and slices that come, go and move, in every possible way."""

    @initialize()
    def begin(self) -> None:
        machine = Machine(2)
        self.controller = Controller(SoftLedger(), [SoftGpu(index, machine=machine) for index in (0, 1)])
        self.population = self.controller.population
        self.starts: dict[int, int] = {}
        self.worked: dict[Member, int] = {}
        self.dropped: list[tuple[Record, Record | None]] = []
        self.population.dropped.append(lambda record, heir: self.dropped.append((record, heir)))

    def process(self, pid: int) -> Process:
        """Return the process that has the pid now, or would have it."""
        return Process(pid, self.starts.get(pid, 1))

    @rule(pid=PIDS, slice_=SLICES, gpus=st.sets(GPUS, min_size=1))
    def comes(self, pid: int, slice_: Slice, gpus: set[int]) -> None:
        self.population.admit(self.process(pid), slice_, gpus)

    @rule(pid=PIDS, gpu=GPUS, usec=USEC)
    def works(self, pid: int, gpu: int, usec: int) -> None:
        """Save the work of a process."""
        member = Member(self.process(pid), gpu)
        if self.population.holds(member):
            total = self.population.record(member).taken.total
            total[WORK] = self.worked[member] = total.get(WORK, 0) + usec

    @rule(pid=PIDS, recycled=st.booleans())
    def ends(self, pid: int, recycled: bool) -> None:
        """End a process; its pid may be another process's later."""
        self.population.expel(self.process(pid))
        for gpu in (0, 1):
            self.worked.pop(Member(self.process(pid), gpu), None)
        if recycled:
            self.starts[pid] = self.process(pid).start + 1

    @rule(pid=PIDS, slice_=SLICES)
    def moves(self, pid: int, slice_: Slice) -> None:
        resident = self.population.by_pid(pid)
        if resident is not None:
            self.population.relocate(resident, slice_)

    @rule(pid=PIDS, gpu=GPUS, migrates=st.booleans())
    def leaves(self, pid: int, gpu: int, migrates: bool) -> None:
        """Move a process to the other GPU, along with what is known of its work; or take a directory from it."""
        resident = self.population.by_pid(pid)
        if resident is None or resident.gpus != {0, 1}:
            return
        here, there = Member(resident.process, gpu), Member(resident.process, 1 - gpu)
        did = self.worked.pop(here, 0)
        if migrates:
            self.in_trio(lambda: self.population.migrated(here, there))
            self.worked[there] = did
        else:
            self.population.leave(here)
        record, heir = self.dropped[-1]
        assert record.group == here
        assert heir is (self.population.record(there) if migrates else None)

    @rule(slice_=SLICES, there=st.booleans())
    def slice_is_made_or_unmade(self, slice_: Slice, there: bool) -> None:
        with contextlib.suppress(OSError, KeyError):
            (self.population.make if there else self.population.unmake)(slice_)

    @rule(pid=PIDS, gpu=GPUS)
    def is_asked_for_when_it_is_not_there(self, pid: int, gpu: int) -> None:
        """Write into the record of a missing group, which no reader sees."""
        stranger = Member(Process(pid, 99), gpu)
        self.population.record(stranger).taken.total[WORK] = 1
        assert not self.population.record(stranger).taken

    @staticmethod
    def in_trio(work: Callable[[], None]) -> None:
        """Run work that notes the time."""

        async def main() -> None:
            work()

        trio.run(main, clock=MockClock())

    @invariant()
    def there_is_one_of_each(self) -> None:
        groups: set[Group] = {SliceOn(slice_, gpu) for slice_ in self.population.slices() for gpu in (0, 1)}
        groups |= {Member(one.process, gpu) for one in self.population.residents() for gpu in one.gpus}
        records = list(self.population.records())
        assert {record.group for record in records} == groups
        assert len(records) == len(groups)
        for resident in self.population.residents():
            for gpu, record in resident.records.items():
                assert record is self.population.record(Member(resident.process, gpu))

    @invariant()
    def what_it_did_is_known_where_it_is(self) -> None:
        for record in self.population.records():
            if isinstance(record.group, Member):
                assert record.taken.total.get(WORK, 0) == self.worked.get(record.group, 0), record.group

    @invariant()
    def other_tables_know_no_other_group(self) -> None:
        follower, peaks = self.controller._follower, self.controller._peaks
        assert all(map(self.population.holds, follower._placed))
        assert all(map(self.population.holds, peaks._marks))


TestRecords = Records.TestCase
