"""The books of one group in the SoftLedger."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import attrs

from backend.common import clock
from backend.core.held import Held
from backend.core.nextuse import NEXT_USE_S, NextUse
from backend.core.records import Books
from backend.process.identity import Group

_NAMES = tuple(field.name for field in attrs.fields(Books))
_PLACES = {name: place for place, name in enumerate(_NAMES)}
_figures = attrgetter(*_NAMES)


class Account:
    """The books of one group: the fields of :class:`Books`, mutable, and its place in the tree."""

    __slots__ = ("_foreseen", "_foreseen_usec", "children", "figures", "granule", "group", "held", "parent")

    def __init__(self, group: Group, parent: Account | None, granule: int = 1) -> None:
        self.group = group
        self.parent = parent
        self.granule: int = granule if parent is None else parent.granule
        self.children: dict[Group, Account] = {}
        self.figures = Books()
        self.held = Held(at_usec=clock.boot_usec())
        """Its memory over time, since it came into these books."""
        self._foreseen, self._foreseen_usec = int(NextUse.SOON), 0
        if parent is not None:
            parent.children[group] = self

    def update(self, **changes: Any) -> None:
        """Replace figures; readers keep the record that they have."""
        if "current" in changes:
            self.held = self.held.changed(changes["current"], clock.boot_usec())
        # As attrs.evolve(), in less than half the time: every write and every page that moves comes by here.
        figures = list(_figures(self.figures))
        for name, value in changes.items():
            figures[_PLACES[name]] = value
        self.figures = Books(*figures)

    def foresee(self, next_use: int) -> None:
        """Set the rank of its next use, which holds from now on for NEXT_USE_S."""
        self._foreseen, self._foreseen_usec = next_use, clock.boot_usec()

    def next_use(self, now_usec: int) -> int:
        """Return the rank of its next use at `now_usec`, of this boot's clock; SOON where none was set, or too long
        ago."""
        is_old = now_usec - self._foreseen_usec >= NEXT_USE_S * 1_000_000
        return int(NextUse.SOON) if is_old else self._foreseen

    def room(self) -> int:
        """Return the number of granules that this account's own swap.max still lets go to the host."""
        return max(0, self.figures.swap_max - self.figures.swap) // self.granule

    def path(self) -> Iterator[Account]:
        """Yield this account and every one above it, up to the GPU's root."""
        account: Account | None = self
        while account is not None:
            yield account
            account = account.parent
