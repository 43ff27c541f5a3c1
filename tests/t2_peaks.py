"""Peaks: each open file has its own, as memory.peak since Linux 6.12 (mm/memcontrol.c: peak_write(), peak_show())."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.identity import ROOT, Group, Process
from backend.peaks import Mark, Peaks
from backend.soft.ledger import SoftLedger
from tests.strategies import chosen, pick

GROUP = Group(0, Process(2, 1))


class PeaksOfMany(RuleBasedStateMachine):
    """Against what each would have seen, had it looked all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SoftLedger()
        self.ledger.add_gpu(0, 1000)
        self.ledger.add(GROUP, Group(0, ROOT))
        self.peaks = Peaks(self.ledger)
        self.held: list[int] = [0]
        self.marks: list[tuple[Mark, int]] = []  # and since when

    @rule(nbytes=st.integers(0, 1000))
    def hold(self, nbytes: int) -> None:
        self.ledger.observe(GROUP, nbytes)
        self.held.append(nbytes)

    @precondition(lambda self: len(self.marks) < 3)
    @rule()
    def open_and_reset(self) -> None:
        self.marks.append((Mark(), 0))
        self.reset(len(self.marks) - 1)

    @precondition(lambda self: self.marks)
    @rule(index=pick)
    def reset(self, index: int) -> None:
        mark, _ = chosen(self.marks, index)
        self.peaks.reset(GROUP, mark)
        self.marks[index % len(self.marks)] = mark, len(self.held) - 1

    @precondition(lambda self: self.marks)
    @rule(index=pick)
    def close(self, index: int) -> None:
        gone = chosen(self.marks, index)
        self.marks.remove(gone)
        self.peaks.leave(GROUP, gone[0])

    @invariant()
    def each_has_its_own(self) -> None:
        assert self.peaks.highest(GROUP) == max(self.held)
        for mark, since in self.marks:
            assert self.peaks.highest(GROUP, mark) == max(self.held[since:])

    def teardown(self) -> None:
        for mark, _ in self.marks:
            self.peaks.leave(GROUP, mark)
        assert not self.peaks._marks, "closed files are forgotten"
        self.peaks.forget(GROUP)
        assert not self.peaks._highest


TestPeaks = PeaksOfMany.TestCase
