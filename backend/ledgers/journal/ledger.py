"""A SoftLedger that outlives its daemon: changes of the books are in a journal before listeners are told of them.

Settings and the tree are written with the call that changes them. Figures that the hardware changes all the time
(peaks, counts of what moved) are collected, and written before they are read, or soon: there are as many changes as
pages that move.

Why a process is off the runlist is written together with what its lever is about to do
(:mod:`backend.ledgers.journal.levers`): before the hardware takes more of it off, in one write for both. Where the
hardware puts some back, or no lever moves, it comes with the next write: the next daemon fits reasons to the hardware
(:meth:`backend.core.reasons.Off.held_in`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import trio

from backend.core.protocols import Inherited
from backend.core.reasons import Off, reasons_of
from backend.core.records import Books, Peak, Wanted
from backend.core.settings import LEVERS
from backend.ledgers.account import Account
from backend.ledgers.journal import state
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.state import FIELDS, FLAGS, UNTOUCHED, Key, Operation
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Group, SliceOn, group_on

_kept = attrgetter(*FIELDS)

SOON_S = 0.05
"""Seconds after which figures are written that were not read before."""


class Watched(Account):
    """An account that reports its changes."""

    __slots__ = ("_changed", "written")

    def __init__(self, changed: Callable[[Account], None], group: Group, parent: Account | None, granule: int) -> None:
        super().__init__(group, parent, granule)
        self._changed = changed
        self.written = Books()
        """The books, as the journal has them."""

    def update(self, **changes: object) -> None:
        super().update(**changes)
        self._changed(self)


class JournaledLedger(SoftLedger):
    """A :class:`backend.core.protocols.Ledger` in memory and in a journal. See the module."""

    def __init__(self, journal: Journal, names: Mapping[int, str]) -> None:
        """`names` has the UUID of each GPU, by index."""
        super().__init__()
        self._journal = journal
        self._names = dict(names)
        self._changed: dict[Account, None] = {}
        self._inherited: list[Inherited] = []
        self._wake = trio.Event()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            await trio.sleep(SOON_S)
            self._wake = trio.Event()
            self._write()

    def close(self, *, released: bool = False, handed_over: bool = False) -> None:
        self._write()

    # The tree

    def add_gpu(self, index: int, capacity: int, granule: int = 1) -> None:
        super().add_gpu(index, capacity, granule)
        uuid = self._names[index]
        if (uuid, ROOT) in self._journal.state.groups:
            self._take_over(index, uuid)
        self._write(state.gpu(uuid))

    def inherited(self) -> Sequence[Inherited]:
        return tuple(self._inherited)

    def add(self, group: Group, parent: SliceOn) -> None:
        super().add(group, parent)
        self._write(state.add(self._key(group), parent.slice))

    def move(self, group: Group, parent: SliceOn) -> None:
        super().move(group, parent)
        self._write(state.move(self._key(group), parent.slice))

    def remove(self, group: Group) -> None:
        account = self._account(group)
        super().remove(group)
        self._changed.pop(account, None)
        self._write(state.remove(self._key(group)))

    # Reading and configuring

    def books(self, group: Group) -> Books:
        if self._changed:
            self._write()
        return self._account(group).figures

    def configure(self, group: Group, **changes: int | bool) -> None:
        super().configure(group, **changes)
        if self._changed:
            self._write()

    def set_reasons(self, group: Group, off_all: int, off_gr: int) -> None:
        if self._changed:
            self._write()
        super().set_reasons(group, off_all, off_gr)
        key, off = self._key(group), Off(reasons_of(off_all), reasons_of(off_gr))
        if off != self._journal.state.reasons.get(key, Off()):
            self._journal.later(state.reasons(key, off), *self._collected())

    def reset_peak(self, group: Group, peak: Peak) -> None:
        super().reset_peak(group, peak)
        self._write()

    # Helpers

    def _open(self, group: Group, parent: Account | None, granule: int = 1) -> Account:
        return Watched(self._note, group, parent, granule)

    def _note(self, account: Account) -> None:
        self._changed[account] = None
        self._wake.set()

    def _key(self, group: Group) -> Key:
        return self._names[group.gpu], group.node

    def _write(self, *operations: Operation) -> None:
        """Write everything that changed since the last time into the journal, whole or not at all."""
        told = [*operations, *self._collected()]
        if told:
            self._journal.commit(*told)

    def _collected(self) -> Sequence[Operation]:
        """Return the operations for what changed since the last time."""
        told = []
        for account in self._changed:
            assert isinstance(account, Watched)
            now, before = account.figures, account.written
            account.written = now
            news, olds = _kept(now), _kept(before)
            if news != olds:
                each = zip(FIELDS, news, olds, strict=True)
                fields = {name: int(new) for name, new, old in each if new != old}  # flags are numbers there
                told.append(state.put(self._key(account.group), fields))
        self._changed.clear()
        return told

    def _take_over(self, index: int, uuid: str) -> None:
        """Take over the books as the former daemon left them, except what is held, which programs and hardware report
        anew."""
        found = self._journal.state
        root = self._accounts[SliceOn(ROOT, index)]
        high = root.figures.high
        for key in [(uuid, ROOT), *found.ordered(uuid)]:
            group, entry = group_on(key[1], index), found.groups[key]
            if entry.above is not None:
                above = SliceOn(entry.above, index)
                super().add(group, above)
                self._inherited.append(self._inherit(group, key, above))
            account = self._accounts[group]
            assert isinstance(account, Watched)
            fields: dict[str, Any] = {name: bool(n) if name in FLAGS else n for name, n in entry.fields.items()}
            account.figures = account.written = Books(**fields)
            _reset_by_nobody(account)
        root.update(high=high)

    def _inherit(self, group: Group, key: Key, above: Group) -> Inherited:
        held = self._journal.state.levers.get(key, UNTOUCHED)
        off = self._journal.state.reasons.get(key, Off()).held_in(held.engines)
        applied = Wanted(off)
        for lever in LEVERS:
            applied = applied.with_(lever, held.at(lever))
        return Inherited(group, above, applied, held.moving)


def _reset_by_nobody(account: Account) -> None:
    """Undo all resets, which were made with the former daemon. The journal of an earlier version has no peak of all
    time."""
    books = account.figures
    peak, swap_peak = max(books.peak, books.peak_ever), max(books.swap_peak, books.swap_peak_ever)
    account.update(peak=peak, peak_ever=peak, swap_peak=swap_peak, swap_peak_ever=swap_peak)
