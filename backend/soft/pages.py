"""Pages of the software GPU: the place and contents of each page, and which one is moved out first. Pure.

The contents of a page are a 64-bit stamp. On the GPU it is in a frame, in the host in a swap slot. A move copies the
stamp and wipes the old place, so a page that is lost, duplicated or mixed up with another reads wrong.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import attrs

WIPED = 0xDEAD_DEAD_DEAD_DEAD
"""Stamp of a frame or slot without a page."""


@attrs.define(eq=False)
class Page:
    """One page of a process's GPU memory."""

    number: int
    """Its address, in pages, in the process's address space."""
    place: int
    """Frame number when resident, slot number when not."""
    resident: bool = True
    """Whether the page is on the GPU rather than in the host."""
    referenced: bool = True
    """Reference bit of CLOCK: whether the page was touched since the hand last passed."""
    used: int = 0
    """Number of the last turn in which a kernel used the page; 0 if none did."""
    used_before: int = 0
    """Number of the turn of the last use before `used`."""
    first: int = 0
    """Rank of its first use in turn `used`, in the order of all first uses."""

    def is_used_in(self, turn: int) -> bool:
        """Return whether a kernel used the page in `turn`, which must be the last turn or the one before."""
        return turn in (self.used, self.used_before)


class Store:
    """Numbered places that hold one stamp each: GPU frames, or host swap slots."""

    def __init__(self) -> None:
        self._stamps: list[int] = []
        self._free: list[int] = []

    def put(self, stamp: int) -> int:
        """Store a stamp in a free place; return its number."""
        if not self._free:
            self._free.append(len(self._stamps))
            self._stamps.append(WIPED)
        place = self._free.pop()
        self._stamps[place] = stamp
        return place

    def take(self, place: int) -> int:
        """Wipe and free a place; return the stamp that was there."""
        stamp, self._stamps[place] = self._stamps[place], WIPED
        self._free.append(place)
        return stamp

    def __getitem__(self, place: int) -> int:
        return self._stamps[place]

    def __setitem__(self, place: int, stamp: int) -> None:
        self._stamps[place] = stamp

    def __len__(self) -> int:
        return len(self._stamps) - len(self._free)


class Memory:
    """One process's pages, on a GPU whose frames and swap slots all processes share."""

    def __init__(self, frames: Store, slots: Store) -> None:
        self._frames = frames
        self._slots = slots
        self._pages: dict[int, Page] = {}
        self._clock: OrderedDict[int, Page] = OrderedDict()  # resident pages; the hand is at the start
        self._next = 0
        self._uses = 0  # number of first uses in any turn so far
        self.resident = 0
        """Number of pages on the GPU."""

    def __len__(self) -> int:
        return len(self._pages)

    def reserve(self, count: int) -> range:
        """Return consecutive numbers for `count` new pages, never used before."""
        first, self._next = self._next, self._next + count
        return range(first, self._next)

    def place(self, number: int) -> None:
        """Create a reserved page on the GPU, zeroed."""
        page = self._pages[number] = Page(number, self._frames.put(0))
        self._clock[page.number] = page
        self.resident += 1

    def free(self, number: int) -> bool:
        """Free a page; return whether it was on the GPU. KeyError for a missing page."""
        page = self._pages.pop(number)
        if page.resident:
            del self._clock[number]
            self._frames.take(page.place)
            self.resident -= 1
        else:
            self._slots.take(page.place)
        return page.resident

    def read(self, number: int) -> int:
        """Return the stamp in a page, wherever it is. KeyError for a missing page."""
        page = self._pages[number]
        page.referenced = True
        return (self._frames if page.resident else self._slots)[page.place]

    def write(self, number: int, stamp: int) -> None:
        """Store a stamp in a page, wherever it is. KeyError for a missing page."""
        page = self._pages[number]
        page.referenced = True
        (self._frames if page.resident else self._slots)[page.place] = stamp

    def is_resident(self, number: int) -> bool:
        """Return whether a page is on the GPU. KeyError for a missing page."""
        return self._pages[number].resident

    def use(self, number: int, turn: int) -> bool:
        """Note that a kernel uses a page in a turn; return whether the page is on the GPU. KeyError for a missing
        page.
        """
        page = self._pages[number]
        page.referenced = True
        if page.used != turn:
            page.used_before, page.used = page.used, turn
            self._uses += 1
            page.first = self._uses
        return page.resident

    def carry(self, turn: int) -> None:
        """Note that the pages used in `turn` are used in the next turn as well, because the kernels of that turn run
        on.
        """
        for page in self._pages.values():
            if page.is_used_in(turn):
                self.use(page.number, turn + 1)

    def used_in(self, turn: int) -> tuple[int, int]:
        """Return the number of pages that kernels used in `turn`, the last turn or the one before, and how many of
        these are on the GPU.
        """
        used = [page.resident for page in self._pages.values() if page.is_used_in(turn)]
        return len(used), sum(used)

    def misses(self, turn: int) -> tuple[int, int]:
        """Return the number of pages that kernels used in `turn`, the last turn, but not in the one before, and the
        number used only in the one before. The first turn has none of either.
        """
        if turn < 2:
            return 0, 0
        missed = sum(page.used == turn and page.used_before != turn - 1 for page in self._pages.values())
        return missed, sum(page.used == turn - 1 for page in self._pages.values())

    def missing(self, turn: int, most: int) -> Sequence[int]:
        """Return the first `most` pages in the host that kernels used in `turn`, the last turn or the one before, in
        the order of first use.
        """
        found = [page for page in self._pages.values() if not page.resident and page.is_used_in(turn)]
        return [page.number for page in sorted(found, key=lambda page: page.first)[:most]]

    def give(self, turn: int, count: int) -> None:
        """Move `count` pages to the host, no more than are on the GPU: first those that no kernel used in `turn`, the
        last turn or the one before, and then those with the latest first use.
        """
        found = sorted(self._clock.values(), key=lambda page: page.first if page.is_used_in(turn) else math.inf)
        for page in found[len(found) - count :]:
            self._put_out(page)

    def _put_out(self, page: Page) -> None:
        del self._clock[page.number]
        page.place = self._slots.put(self._frames.take(page.place))
        page.resident = False
        self.resident -= 1

    def evict(self) -> bool:
        """Move the first page that the CLOCK hand selects to the host; return False if none is on the GPU.

        A referenced page loses its bit and is passed over once (Ghost, section 4.2: one CLOCK per container).
        """
        while self._clock:
            number, page = next(iter(self._clock.items()))
            if page.referenced:
                page.referenced = False
                self._clock.move_to_end(number)
                continue
            self._put_out(page)
            return True
        return False

    def fetch(self, number: int) -> None:
        """Move a page from the host to the GPU."""
        page = self._pages[number]
        page.place = self._frames.put(self._slots.take(page.place))
        page.resident = page.referenced = True
        self._clock[page.number] = page
        self.resident += 1

    def transfer(self, frames: Store, slots: Store) -> None:
        """Move all pages to the frames and swap slots of another GPU, each with its number and its stamp."""
        for page in self._pages.values():
            if page.resident:
                page.place = frames.put(self._frames.take(page.place))
            else:
                page.place = slots.put(self._slots.take(page.place))
        self._frames, self._slots = frames, slots

    def clear(self) -> None:
        """Free all pages."""
        for number in list(self._pages):
            self.free(number)
