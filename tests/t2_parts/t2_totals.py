"""Totals of slices against a model: work done in a slice is counted there, wherever its process is now, even if ended.

The model adds up every bit of work where it was done. A killed daemon loses what was done since the last save, and
nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.core.member import OF_PROGRAMS
from backend.core.population import Population
from backend.core.protocols import Gpu
from backend.core.records import Activity, Footprint, Throttled
from backend.core.tally import LOST, MIGRATED, UNDONE
from backend.core.totals import OF_WORK, Totals
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Group, Member, Node, Process, Slice, SliceOn

SLICES = [ROOT, *(Slice(path) for path in ("/a", "/a/b", "/a/b/c", "/d"))]
GPUS = (0, 1)


@attrs.define
class Counting:
    """A GPU that reports what each process has done there."""

    told: dict[Process, Counter[str]] = attrs.field(factory=dict)
    lost: bool = False
    """Whether the GPU is lost."""

    def activity(self, process: Process) -> Activity:
        """Return no figures for a process that it does not know."""
        if process not in self.told:
            return Activity()
        work: dict[str, Any] = {name: self.told[process][name] for name in OF_WORK}
        return Activity(**work, pending=0)

    def footprint(self, process: Process) -> Footprint:
        """Return no memory, only what was moved."""
        return Footprint(exchanged=self.told[process]["exchanged"] if process in self.told else None)


@attrs.define
class Left:
    """The figures that a daemon leaves to the next one."""

    figures: dict[tuple[int, Node], Mapping[str, int]] = attrs.field(factory=dict)

    def kept(self) -> Mapping[tuple[int, Node], Mapping[str, int]]:
        """Return the present figures."""
        return dict(self.figures)

    def keep(self, figures: Mapping[Group, Mapping[str, int]]) -> None:
        """Store figures."""
        for group, now in figures.items():
            self.figures[group.gpu, group.node] = now
            if not now:
                del self.figures[group.gpu, group.node]


WORK = (*OF_WORK, "exchanged", "nr_throttled", "throttled_usec")
FORGOTTEN = [name for name in WORK if name not in OF_PROGRAMS]
"""What programs do not tell the next daemon."""
NAMES = (*WORK, MIGRATED, UNDONE, LOST)


class Machine(RuleBasedStateMachine):
    """Members come, work, move, end, and change GPUs; and daemons are replaced."""

    @initialize()
    def begin(self) -> None:
        """Make slices that stay, without processes."""
        self.left = Left()
        self.pids = iter(range(10, 1000))
        self.where: dict[Process, Slice] = {}
        self.on: dict[Process, int] = {}
        self.did: Counter[tuple[int, Slice, str]] = Counter()
        self.own: Counter[tuple[Process, str]] = Counter()
        self.counting = {gpu: Counting() for gpu in GPUS}
        self.serve()

    def serve(self) -> None:
        """Start a daemon with what the previous one left."""
        ledger = SoftLedger()
        for gpu in GPUS:
            ledger.add_gpu(gpu, 1 << 30)
        self.population = Population(ledger, GPUS)
        for slice_ in SLICES[1:]:
            self.population.hold(slice_)
        for process, slice_ in self.where.items():
            self.population.admit(process, slice_, {self.on[process]})
        gpus = {gpu: cast(Gpu, counting) for gpu, counting in self.counting.items()}
        self.totals = Totals(gpus, self.population, self.throttled, ledger.held, self.left)
        self.totals._clock = lambda: 0.0
        self.totals.take_over()
        self.population.dropped.append(self.totals.left)

    def throttled(self, member: Member) -> Throttled:
        """Return a member's counts as the scheduler keeps them."""
        told = self.counting[member.gpu].told.get(member.node, Counter())
        return Throttled(told["nr_throttled"], told["throttled_usec"])

    def add(self, process: Process, name: str, amount: int, gpu: int, slice_: Slice) -> None:
        """Add work of a process in a slice to the slice and to all above it."""
        self.own[process, name] += amount
        level: Slice | None = slice_
        while level is not None:
            self.did[gpu, level, name] += amount
            level = level.parent

    def somebody(self, data: st.DataObject) -> Process:
        """Draw a live process."""
        return data.draw(st.sampled_from(sorted(self.where, key=lambda process: process.pid)))

    @rule(slice_=st.sampled_from(SLICES), gpu=st.sampled_from(GPUS))
    def come(self, slice_: Slice, gpu: int) -> None:
        """Add a process."""
        process = Process(next(self.pids), 1)
        self.where[process], self.on[process] = slice_, gpu
        self.counting[gpu].told[process] = Counter()
        self.population.admit(process, slice_, {gpu})

    @precondition(lambda self: self.where)
    @rule(data=st.data(), name=st.sampled_from(WORK), amount=st.integers(1, 1000))
    def work(self, data: st.DataObject, name: str, amount: int) -> None:
        """Have a process do some work."""
        process = self.somebody(data)
        self.counting[self.on[process]].told[process][name] += amount
        self.add(process, name, amount, self.on[process], self.where[process])

    @precondition(lambda self: self.where)
    @rule(data=st.data(), slice_=st.sampled_from(SLICES))
    def move(self, data: st.DataObject, slice_: Slice) -> None:
        """Move a process to another slice; its past work stays."""
        process = self.somebody(data)
        resident = self.population.resident(process)
        assert resident is not None
        self.totals.take_down([Member(process, self.on[process])])
        self.population.relocate(resident, slice_)
        self.where[process] = slice_

    @precondition(lambda self: self.where)
    @rule(data=st.data(), late=st.integers(0, 5))
    def end(self, data: st.DataObject, late: int) -> None:
        """End a process; some of its work is reported later."""
        process = self.somebody(data)
        gpu, slice_ = self.on.pop(process), self.where.pop(process)
        member = Member(process, gpu)
        self.totals.ended(member)
        del self.counting[gpu].told[process]
        self.population.expel(process)
        self.totals.late(member, {"gpu_usec": late})
        self.add(process, "gpu_usec", late, gpu, slice_)
        assert (gpu, process) not in self.left.figures

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def migrate(self, data: st.DataObject) -> None:
        """Move a process to the other GPU, where its own counts go on."""
        process = self.somebody(data)
        here, there = Member(process, self.on[process]), Member(process, 1 - self.on[process])
        self.totals.take_down([here])
        before = self.counting[here.gpu].told.pop(process)
        carried = {name: before[name] for name in OF_PROGRAMS}
        self.counting[there.gpu].told[process] = Counter(carried)
        self.population.admit(process, self.where[process], {there.gpu})
        self.population.migrated(here, there)
        self.on[process] = there.gpu
        resident = self.population.resident(process)
        assert resident is not None
        resident.moves += 1
        self.totals.tally.migrated(self.population.path(there), resident.moves)
        self.add(process, MIGRATED, 1, there.gpu, self.where[process])

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        """Have a process undo its settings."""
        process = self.somebody(data)
        self.totals.tally.undone(self.population.path(Member(process, self.on[process])))
        self.add(process, UNDONE, 1, self.on[process], self.where[process])

    @rule(gpu=st.sampled_from(GPUS), killed=st.booleans())
    def lose(self, gpu: int, killed: bool) -> None:
        """Lose a GPU and bring it back, perhaps under another daemon, which finds it lost, too."""
        processes = [process for process in self.on if self.on[process] == gpu]
        groups = [*(SliceOn(slice_, gpu) for slice_ in SLICES), *(Member(process, gpu) for process in processes)]
        self.totals.tally.lost(gpu, groups)
        if killed:
            self.totals.take_down(self.totals._everything())
            self.begin_anew()
            self.totals.tally.lost(gpu, groups)
        self.totals.tally.back(gpu)
        for slice_ in SLICES:
            self.did[gpu, slice_, LOST] += 1
        for process in processes:
            self.own[process, LOST] += 1

    @rule()
    def upgrade(self) -> None:
        """Replace the daemon: it counts from zero, and programs go on."""
        self.totals.take_all_down()
        self.begin_anew()

    @precondition(lambda self: self.where)
    @rule(data=st.data(), name=st.sampled_from(FORGOTTEN), amount=st.integers(1, 1000))
    def kill(self, data: st.DataObject, name: str, amount: int) -> None:
        """Kill the daemon: what was done since the last save is lost, and nothing else."""
        self.totals.take_all_down()
        process = self.somebody(data)
        self.counting[self.on[process]].told[process][name] += amount
        self.begin_anew()

    def begin_anew(self) -> None:
        """Reset the counts of the GPUs, as for another daemon; a program reports its own counts unchanged."""
        for counting in self.counting.values():
            for process, told in counting.told.items():
                kept = {name: told[name] for name in OF_PROGRAMS}
                counting.told[process] = Counter(kept)
        self.serve()

    @invariant()
    def everything_is_there(self) -> None:
        """Check for every slice on every GPU that it has the sum of all work done in it."""
        for gpu in GPUS:
            for slice_ in SLICES:
                group = SliceOn(slice_, gpu)
                activity, throttled = self.totals.activity(group), self.totals.throttled(group)
                found = {name: getattr(activity, name) for name in OF_WORK}
                found |= {name: self.totals.tally.counted(group, name) for name in (MIGRATED, UNDONE, LOST)}
                found |= {"exchanged": self.totals.footprint(group).exchanged}
                found |= {"nr_throttled": throttled.times, "throttled_usec": throttled.usec}
                assert {name: value or 0 for name, value in found.items()} == {
                    name: self.did[gpu, slice_, name] for name in NAMES
                }, group
        for process, gpu in self.on.items():
            activity = self.totals.activity(Member(process, gpu))
            assert all(getattr(activity, name) == self.own[process, name] for name in OF_WORK)
            for name in (MIGRATED, UNDONE, LOST):
                assert self.totals.tally.counted(Member(process, gpu), name) == self.own[process, name]


TestTotals = Machine.TestCase


def test_a_program_that_begins_anew_goes_on_in_the_slice() -> None:
    """It called execve(2), so its counts are another program's."""
    machine = Machine()
    machine.begin()
    machine.come(Slice("/a"), 0)
    (process,) = machine.where
    told = machine.counting[0].told[process]
    for submitted in (10, 0, 4):
        told["submitted"] = submitted
        machine.totals.take_down([Member(process, 0)])
    assert machine.totals.activity(SliceOn(Slice("/a"), 0)).submitted == 14


def test_what_was_told_is_there_when_it_is_told_no_more() -> None:
    """The library's connection may end before the process does."""
    machine = Machine()
    machine.begin()
    machine.come(Slice("/a"), 0)
    (process,) = machine.where
    machine.counting[0].told[process]["submitted"] = 10
    machine.totals.take_down([Member(process, 0)])
    del machine.counting[0].told[process]
    assert machine.totals.activity(SliceOn(Slice("/a"), 0)).submitted == 10
    machine.come(Slice("/a"), 0)
    machine.counting[0].told.clear()
    assert machine.totals.activity(SliceOn(Slice("/a"), 0)).submitted is None, "one there never told"


def test_who_comes_late_is_dropped() -> None:
    """If the GPU reports nothing of a process that ended, nothing is left behind."""
    machine = Machine()
    machine.begin()
    now = 0.0
    machine.totals._clock = lambda: now
    machine.come(ROOT, 0)
    (process,) = machine.where
    machine.totals.ended(Member(process, 0))
    assert machine.totals._late
    now = 60.0
    machine.totals._expire()
    assert not machine.totals._late
