"""Generated histories of a ledger, against books that are kept the naive way, with every sum made from scratch.

The ledger under test comes from :meth:`LedgerMachine.make_ledger`. The same histories run on any other ledger, or on
two at once that must give equal answers (:class:`Twins`).
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import ClassVar

import attrs
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from backend.core.protocols import Ledger, Target
from backend.core.records import MAX
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn
from tests.support.ledger_machine import LedgerMachine, Twins, outcome
from tests.support.strategies import history

SoftLedgerTest = LedgerMachine.TestCase
SoftLedgerTest.settings = history(150)


# A machine that finds nothing proves nothing: it must find these mistakes


class ForgetsTheTop(SoftLedger):
    """Swaps by its own limit, and ignores those above."""

    def swap_out(self, group: Group, nbytes: int, usec: int = 0) -> None:
        own = self._accounts.get(group)
        tops = [] if own is None else [level for level in own.path() if level is not own]
        limits_ = [level.figures for level in tops]
        for level in tops:
            level.update(swap_max=MAX)
        try:
            super().swap_out(group, nbytes, usec)
        finally:
            for level, before in zip(tops, limits_, strict=True):
                level.update(swap_max=before.swap_max)


class PlansWithoutLow(SoftLedger):
    """Takes from all groups alike."""

    def plan(self, group: Group, nbytes: int) -> list[Target]:
        return [attrs.evolve(target, below_low=False) for target in super().plan(group, nbytes)]


class KeepsWhatMoved(SoftLedger):
    """Moves a group and leaves its charges behind."""

    def move(self, group: Group, parent: Group) -> None:
        super().move(group, parent)
        above = self.parent(group)
        while above is not None:
            self._accounts[above].update(peak=self._accounts[above].figures.current)
            above = self.parent(above)


class KeepsReasons(SoftLedger):
    """Adds reasons, and removes none."""

    def set_reasons(self, group: Group, off_all: int, off_gr: int) -> None:
        books = self.books(group)
        super().set_reasons(group, off_all | books.off_all & ~off_gr, off_gr | books.off_gr & ~off_all)


class ForeseesNothing(SoftLedger):
    """Plans by size alone."""

    def set_next_use(self, gpu: int, classes: Mapping[Member, int]) -> None:
        super().set_next_use(gpu, dict.fromkeys(classes, 0))


class Planted(LedgerMachine):
    """The machine on a ledger with a mistake."""

    ledger_type: ClassVar[type[SoftLedger]] = SoftLedger

    def make_ledger(self) -> Ledger:
        return self.ledger_type()


@pytest.mark.parametrize("ledger_type", [ForgetsTheTop, PlansWithoutLow, KeepsWhatMoved, KeepsReasons, ForeseesNothing])
def test_the_machine_finds_a_planted_mistake(ledger_type: type[SoftLedger]) -> None:
    machine = type("Machine", (Planted,), {"ledger_type": ledger_type})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine,
            settings=settings(
                history(2000),  # it ends with the first history that finds the mistake
                phases=(Phase.generate,),
                derandomize=True,
                database=None,
                print_blob=False,
                report_multiple_bugs=False,
            ),
        )


def test_twins_agree_with_themselves_and_not_with_a_mistake() -> None:
    class Both(LedgerMachine):
        def make_ledger(self) -> Ledger:
            return Twins(SoftLedger(), SoftLedger())

    run_state_machine_as_test(Both, settings=history(10))
    twins = Twins(SoftLedger(), ForgetsTheTop())
    twins.add_gpu(0, 100)
    slice_, process = SliceOn(Slice("/a"), 0), Member(Process(1, 0), 0)
    twins.add(slice_, SliceOn(ROOT, 0))
    twins.add(process, slice_)
    twins.charge(process, 10)
    twins.configure(slice_, swap_max=5)
    with pytest.raises(AssertionError):
        twins.swap_out(process, 10)


def test_nobody_ever_holds_more_than_there_can_be() -> None:
    """2^63 - 1 bytes is "no limit", and no group holds more: the lowest level that would exceed it counts the event."""
    ledger = SoftLedger()
    root, slice_ = SliceOn(ROOT, 0), SliceOn(Slice("/a"), 0)
    one, other = Member(Process(1, 0), 0), Member(Process(2, 0), 0)
    ledger.add_gpu(0, 100)
    ledger.add(slice_, root)
    for process in (one, other):
        ledger.add(process, slice_)
    ledger.charge(one, MAX)
    assert outcome(ledger.charge, other, 1) == (None, errno.ENOMEM)
    assert outcome(ledger.observe, other, 1) == (None, errno.EINVAL)
    assert [ledger.books(group).events_max for group in (other, slice_, root)] == [0, 0, 0]
    assert [ledger.books(group).events_oom for group in (other, slice_, root)] == [1, 1, 1]
    ledger.observe(one, MAX - 1)
    ledger.observe(other, 1)
    assert ledger.books(root).current == MAX
