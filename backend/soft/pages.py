"""The pages of the software GPU: where each one lives, what it holds, and which one goes first. Pure.

A page is a 64-bit stamp of contents. On the GPU it sits in a frame, in the host in a swap slot; moving it copies
the stamp and wipes the place that it left, so a page that is lost, doubled or mixed up with another reads wrong.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import attrs

WIPED = 0xDEAD_DEAD_DEAD_DEAD
"""Stamp of a frame or slot that belongs to no page."""


@attrs.define(eq=False)
class Page:
    """One page of a process's GPU memory."""

    number: int
    """Its address, in pages, in the process's address space."""
    place: int
    """Frame number when resident, slot number when not."""
    resident: bool = True
    """On the GPU, or in the host."""
    referenced: bool = True
    """The CLOCK's bit: touched since the hand last passed."""
    used: int = 0
    """Number of the last turn in which a kernel used it; 0: in none."""
    used_before: int = 0
    """Number of the last turn before that in which one did."""
    first: int = 0
    """Number of its first use in the last turn that used it, among all such."""

    def is_used_in(self, turn: int) -> bool:
        """Return whether a kernel used it in a turn, which is the last one or the one before."""
        return turn in (self.used, self.used_before)


class Store:
    """Numbered places that hold one stamp each: GPU frames, or host swap slots."""

    def __init__(self) -> None:
        self._stamps: list[int] = []
        self._free: list[int] = []

    def put(self, stamp: int) -> int:
        """Stores a stamp in a free place and returns its number."""
        if not self._free:
            self._free.append(len(self._stamps))
            self._stamps.append(WIPED)
        place = self._free.pop()
        self._stamps[place] = stamp
        return place

    def take(self, place: int) -> int:
        """Empties a place, wipes it and returns the stamp that was there."""
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
        self._clock: OrderedDict[int, Page] = OrderedDict()  # resident pages, the hand at the start
        self._next = 0
        self._uses = 0  # first uses in a turn, ever
        self.resident = 0
        """Pages on the GPU."""

    def __len__(self) -> int:
        return len(self._pages)

    def reserve(self, count: int) -> range:
        """Numbers for `count` new pages, one after the other, never used before."""
        first, self._next = self._next, self._next + count
        return range(first, self._next)

    def place(self, number: int) -> None:
        """Makes a reserved page, on the GPU and zeroed."""
        page = self._pages[number] = Page(number, self._frames.put(0))
        self._clock[page.number] = page
        self.resident += 1

    def free(self, number: int) -> bool:
        """Frees a page; whether it was on the GPU. KeyError when there is no such page."""
        page = self._pages.pop(number)
        if page.resident:
            del self._clock[number]
            self._frames.take(page.place)
            self.resident -= 1
        else:
            self._slots.take(page.place)
        return page.resident

    def read(self, number: int) -> int:
        """The stamp in a page, wherever it is. KeyError when there is no such page."""
        page = self._pages[number]
        page.referenced = True
        return (self._frames if page.resident else self._slots)[page.place]

    def write(self, number: int, stamp: int) -> None:
        """Stores a stamp in a page, wherever it is. KeyError when there is no such page."""
        page = self._pages[number]
        page.referenced = True
        (self._frames if page.resident else self._slots)[page.place] = stamp

    def is_resident(self, number: int) -> bool:
        """Whether a page is on the GPU. KeyError when there is no such page."""
        return self._pages[number].resident

    def use(self, number: int, turn: int) -> bool:
        """Notes that a kernel uses a page in a turn; returns whether it is on the GPU. KeyError when there is no such
        page."""
        page = self._pages[number]
        page.referenced = True
        if page.used != turn:
            page.used_before, page.used = page.used, turn
            self._uses += 1
            page.first = self._uses
        return page.resident

    def carry(self, turn: int) -> None:
        """Notes that what was used in a turn is used in the next one, too: its kernels run on."""
        for page in self._pages.values():
            if page.is_used_in(turn):
                self.use(page.number, turn + 1)

    def used_in(self, turn: int) -> tuple[int, int]:
        """Return how many pages kernels used in a turn, the last one or the one before, and how many of them are on the
        GPU."""
        used = [page.resident for page in self._pages.values() if page.is_used_in(turn)]
        return len(used), sum(used)

    def misses(self, turn: int) -> tuple[int, int]:
        """Return how many pages kernels used in a turn, the last one, and not in the one before; and the other way
        round. Before the first one there is none."""
        if turn < 2:
            return 0, 0
        missed = sum(page.used == turn and page.used_before != turn - 1 for page in self._pages.values())
        return missed, sum(page.used == turn - 1 for page in self._pages.values())

    def missing(self, turn: int, most: int) -> Sequence[int]:
        """Return the pages that kernels used in a turn, the last one or the one before, and that are in the host; the
        first of them, in the order of their first use."""
        found = [page for page in self._pages.values() if not page.resident and page.is_used_in(turn)]
        return [page.number for page in sorted(found, key=lambda page: page.first)[:most]]

    def give(self, turn: int, count: int) -> None:
        """Moves pages to the host: first those that no kernel used in a turn, the last one or the one before, then
        those that were used last. There are as many."""
        found = sorted(self._clock.values(), key=lambda page: page.first if page.is_used_in(turn) else math.inf)
        for page in found[len(found) - count :]:
            self._put_out(page)

    def _put_out(self, page: Page) -> None:
        del self._clock[page.number]
        page.place = self._slots.put(self._frames.take(page.place))
        page.resident = False
        self.resident -= 1

    def evict(self) -> bool:
        """Moves the page that the CLOCK hand finds first to the host; False when none is on the GPU.

        A referenced page loses its bit and is passed over once (Ghost, section 4.2: a CLOCK a container).
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
        """Moves a page from the host to the GPU."""
        page = self._pages[number]
        page.place = self._frames.put(self._slots.take(page.place))
        page.resident = page.referenced = True
        self._clock[page.number] = page
        self.resident += 1

    def transfer(self, frames: Store, slots: Store) -> None:
        """All of it goes to the frames and swap slots of another GPU, each page with its number and its stamp."""
        for page in self._pages.values():
            if page.resident:
                page.place = frames.put(self._frames.take(page.place))
            else:
                page.place = slots.put(self._slots.take(page.place))
        self._frames, self._slots = frames, slots

    def clear(self) -> None:
        """Frees everything."""
        for number in list(self._pages):
            self.free(number)
