"""Peaks: each open file has its own, as memory.peak and memory.swap.peak do since Linux 6.12.

The rules are those of peak_write() and peak_show() in mm/memcontrol.c.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.core.peaks import Mark, Peaks
from backend.core.records import Peak
from backend.ledgers import abi, kernel
from backend.ledgers.journal import state
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.ledger import JournaledLedger
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Member, Process, Slice, SliceOn
from tests.support.strategies import chosen, pick

GROUP = Member(Process(2, 1), 0)


class PeaksOfMany(RuleBasedStateMachine):
    """Compares each file's peak with what it would have seen by looking all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SoftLedger()
        self.ledger.add_gpu(0, 1000)
        self.ledger.add(GROUP, SliceOn(ROOT, 0))
        self.peaks = Peaks(self.ledger)
        self.held: dict[Peak, list[int]] = {"peak": [0], "swap_peak": [0]}
        self.marks: list[tuple[Mark, int]] = []  # each with its time

    def look(self) -> None:
        books = self.ledger.books(GROUP)
        self.held["peak"].append(books.current)
        self.held["swap_peak"].append(books.swap)

    @rule(nbytes=st.integers(0, 1000))
    def hold(self, nbytes: int) -> None:
        self.ledger.observe(GROUP, nbytes)
        self.look()

    @rule(part=st.integers(0, 100))
    def move_out(self, part: int) -> None:
        self.ledger.swap_out(GROUP, self.ledger.books(GROUP).current * part // 100)
        self.look()

    @rule(part=st.integers(0, 100), free=st.booleans())
    def bring_in_or_free(self, part: int, free: bool) -> None:
        books = self.ledger.books(GROUP)
        nbytes = min(books.swap * part // 100, 1000 - books.current)
        (self.ledger.uncharge_swap if free else self.ledger.swap_in)(GROUP, nbytes)
        self.look()

    @precondition(lambda self: len(self.marks) < 4)
    @rule(peak=st.sampled_from(("peak", "swap_peak")))
    def open_and_reset(self, peak: Peak) -> None:
        self.marks.append((Mark(peak), 0))
        self.reset(len(self.marks) - 1)

    @precondition(lambda self: self.marks)
    @rule(index=pick)
    def reset(self, index: int) -> None:
        mark, _ = chosen(self.marks, index)
        self.peaks.reset(GROUP, mark)
        self.marks[index % len(self.marks)] = mark, len(self.held[mark.peak]) - 1

    @precondition(lambda self: self.marks)
    @rule(index=pick)
    def close(self, index: int) -> None:
        gone = chosen(self.marks, index)
        self.marks.remove(gone)
        self.peaks.leave(GROUP, gone[0])

    @invariant()
    def each_has_its_own(self) -> None:
        for peak, held in self.held.items():
            assert self.peaks.ever(GROUP, peak) == max(held)
        for mark, since in self.marks:
            assert self.peaks.highest(GROUP, mark) == max(self.held[mark.peak][since:])

    def teardown(self) -> None:
        for mark, _ in self.marks:
            self.peaks.leave(GROUP, mark)
        assert not self.peaks._marks, "closed files are forgotten"


TestPeaks = PeaksOfMany.TestCase


def test_a_reset_is_of_nobody_that_comes_later(tmp_path: Path) -> None:
    """A file was reset, and then the daemon was replaced: the next one knows no file that has reset the peak."""
    group, names = SliceOn(Slice("/a"), 0), {0: "GPU-0"}
    process = Member(Process(2, 1), 0)

    def opened() -> tuple[Journal, JournaledLedger]:
        journal = Journal(tmp_path / "one.journal", boot="boot")
        ledger = JournaledLedger(journal, names)
        ledger.add_gpu(0, 1000)
        return journal, ledger

    journal, ledger = opened()
    ledger.add(group, SliceOn(ROOT, 0))
    ledger.add(process, group)
    ledger.charge(process, 70)
    ledger.swap_out(process, 50)
    ledger.uncharge_swap(process, 40)
    ledger.remove(process)
    peaks, mark, swapped = Peaks(ledger), Mark("peak"), Mark("swap_peak")
    for one in (mark, swapped):
        peaks.reset(group, one)
    assert (peaks.highest(group, mark), peaks.highest(group, swapped)) == (0, 0)
    ledger.close(handed_over=True)
    journal.close()
    journal, ledger = opened()
    after = Peaks(ledger)
    assert (after.ever(group, "peak"), after.ever(group, "swap_peak")) == (70, 50)
    journal.close()


def test_the_journal_of_a_version_that_had_no_peak_ever(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one.journal", boot="boot")
    key = "GPU-0", Slice("/a")
    journal.commit(state.gpu("GPU-0"), state.add(key, ROOT), state.put(key, {"peak": 7, "kept": 1}))
    ledger = JournaledLedger(journal, {0: "GPU-0"})
    ledger.add_gpu(0, 1000)
    assert Peaks(ledger).ever(SliceOn(Slice("/a"), 0), "peak") == 7
    journal.close()


class Module:
    """The kernel module of 0.1, as far as peaks go: one group, whose single peak any reset restarts."""

    def __init__(self) -> None:
        self.current = self.peak = 0

    def ask(self, file: int, number: int, argument: Any = None) -> None:
        if number == abi.IOC_HELLO:
            argument.version, argument.features = abi.ABI_VERSION, abi.FEATURE_BOOKS | abi.FEATURE_PROVIDER
        elif number == abi.IOC_GET:
            argument.current_bytes, argument.peak = self.current, self.peak
        elif number == abi.IOC_RESET_PEAK:
            assert bytes(argument)[abi.Reset.what.offset :] == bytes(ctypes.sizeof(abi.Reset) - abi.Reset.what.offset)
            self.peak = self.current

    def hold(self, nbytes: int) -> None:
        self.current, self.peak = nbytes, max(self.peak, nbytes)


def test_a_module_that_knows_one_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon keeps what the module forgets at a reset; the missing peak is not made up."""
    module, group = Module(), SliceOn(Slice("/a"), 0)
    monkeypatch.setattr(kernel, "DEVICE", os.devnull)
    monkeypatch.setattr(kernel, "_ask", module.ask)
    ledger = kernel.KernelLedger({0: "GPU-0"})
    ledger._ids[group] = 7
    peaks, mark, swapped = Peaks(ledger), Mark("peak"), Mark("swap_peak")
    module.hold(70)
    module.hold(10)
    peaks.reset(group, mark)
    module.hold(20)
    assert (peaks.ever(group, "peak"), peaks.highest(group, mark)) == (70, 20)
    for refused in (lambda: peaks.ever(group, "swap_peak"), lambda: peaks.reset(group, swapped)):
        with pytest.raises(OSError, match=r".") as caught:
            refused()
        assert caught.value.errno == errno.EOPNOTSUPP
    ledger.close()
