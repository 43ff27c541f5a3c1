"""What one CUDA program holds on one GPU: as it says, as the driver says, and as the books have it.

The books follow ``charged + implicit``. `charged` is what the program says, message by message, at once and exact.
`implicit` is what the driver counts besides: the context, code, memory that the library does not place. It is learnt by
looking: the driver's figure, less what was charged at that time. "That time" is the trouble: a program says that it
will allocate before it does, and that it freed after it did. So a figure is judged one look later, against all that may
have been charged from the look before it to the look after it. If that was one amount, the figure says exactly what is
implicit; if it was a range, what is known of the implicit part is kept as far as the range allows. A program that
allocates and frees does not make the books flap, and one that lies is found out however busy it keeps itself.

What was let back may come much later than it was granted: a batch waits until nothing runs, in vain where the turn of
the program is over meanwhile, and comes with its next turn, without a word. So it stays in the books until it is seen.
"""

from __future__ import annotations

import contextlib
import errno

from backend.common.errors import fail
from backend.core.protocols import Bookkeeping
from backend.core.records import MAX, OVERCOMMIT, Footprint
from backend.process.identity import Process

TOLERANCE = 16 << 20
"""Bytes by which the driver may count less than was charged without a word about it."""

AWAY_MOST = 2 << 30
"""Bytes that are off the GPU for a moment at most, whatever a program says: the library exchanges half as much at a
time. A program that charges more than it has may have so much too much in the books without being found out."""

DUE_MOST = 4 << 30
"""Bytes that were let back and are not on the GPU yet, at most, whatever a program says: what its library moves at a
time (``BYTES_MOST`` of ``library/move/batch.c``)."""

USEC_MOST = 60_000_000
"""A move that is said to have taken longer took this long."""


class Holding:
    """See the module. Every call is synchronous but :meth:`charge`, and raises OSError for what cannot be."""

    def __init__(
        self,
        bookkeeper: Bookkeeping,
        process: Process,
        gpu: int,
        capacity: int,
        resident: int,
        swapped: int,
        counted: int = 0,
    ) -> None:
        """Takes the books over, at what the program says that it has, and the driver that it has at least. EINVAL where
        no program can have that."""
        if resident > capacity or resident + swapped > OVERCOMMIT * capacity:
            raise fail(errno.EINVAL)
        self.process = process
        self.gpu = gpu
        self.charged = resident
        """Bytes on the GPU that it said it has, those that it is about to have included."""
        self.swapped = swapped
        """Bytes in the host that it said it has."""
        self.unmovable = 0
        """Bytes that it reports to have and not to be able to move."""
        self.intact = 0
        """Bytes that it reports to be as the program made them: its library does not carry them from GPU to GPU."""
        self.clean = 0
        """Bytes in the host of copies of what it has on the GPU, as it says."""
        self.exchanged = 0
        """Bytes that it said came back in the place of others."""
        self.promised = 0
        """Bytes of `charged` that it was not told yet that it may allocate."""
        self.asked = 0
        """Bytes of `charged` that it was asked to move, and did not say yet that it did."""
        self.away = 0
        """Bytes of `charged` that may be off the GPU for a moment: hot memory takes the place of cold."""
        self.lent = 0
        """Bytes of `charged` that it reports to have let go of, and that live by descriptors which others may have: the
        driver counts them for no process."""
        self.uncounted = 0
        """Bytes of `charged` that the program reports as managed memory: the driver counts that for no process."""
        self.due = 0
        """Bytes of `charged` that were let back, and that the driver was not seen to count yet."""
        self._granted = 0  # bytes of those since the last look
        self.twice = 0
        """Bytes of `charged` that the driver may count twice: they come from another GPU, and are copied."""
        self.given = 0
        """Bytes that left the GPU, freed or moved, since it speaks."""
        self.closed = False
        """Whether another connection speaks for the program now, or none."""
        self._bookkeeper = bookkeeper
        self._capacity = capacity
        books = bookkeeper.levels(process, gpu)[0]
        # More than 0: implicit; less: disputed.
        self._correction = max(0, books.current - resident, min(counted, capacity) - resident)
        self._least = self._most = resident  # of `charged`, since the last look
        self._look: tuple[int, int, int] | None = None  # least and most before the last look, and what it showed
        self._seen = counted  # what the driver counted last
        missing = max(0, swapped - books.swap)  # the books are younger than the program
        bookkeeper.observe(process, gpu, resident + self._correction + missing)
        if missing:
            bookkeeper.moved_out(process, gpu, missing, 0, already=True)
        elif books.swap > swapped:
            bookkeeper.uncharge(process, gpu, books.swap - swapped, swapped=True)

    @property
    def footprint(self) -> Footprint:
        """What is to be told of it. `movable` is what it has for certain."""
        implicit = max(0, self._correction)
        return Footprint(
            movable=max(0, self.charged - self.promised - self.asked),
            implicit=implicit,
            unmovable=self.unmovable,
            disputed=max(0, -self._correction),
            exchanged=self.exchanged,
            clean=self.clean,
            past=min(implicit, self._seen),
        )

    # What the program says

    async def charge(self, nbytes: int) -> None:
        """It wants to allocate; returns once every level is back under its high. ENOMEM."""
        if not 0 < nbytes <= self._capacity or self.charged + self.swapped + nbytes > OVERCOMMIT * self._capacity:
            raise fail(errno.ENOMEM if nbytes else errno.EINVAL)
        self._charged(nbytes)
        self.promised += nbytes
        try:
            await self._bookkeeper.charge(self.process, self.gpu, nbytes)
        except OSError:
            self._charged(-nbytes)  # refused at once: no look came between
            raise
        finally:
            self.promised -= nbytes
            self._mark()

    def uncharge(self, resident: int, swapped: int) -> None:
        """It freed memory. EINVAL for more than it has."""
        if resident > self.charged - self.promised or swapped > self.swapped:
            raise fail(errno.EINVAL)
        if resident:
            self._charged(-resident)
            self.given += resident
            self._correction = max(self._correction, -self.charged)
            less = self._bookkeeper.levels(self.process, self.gpu)[0].current - (self.charged + self._correction)
            self._bookkeeper.uncharge(self.process, self.gpu, max(0, less), swapped=False)
        if swapped:
            self.swapped -= swapped
            self._bookkeeper.uncharge(self.process, self.gpu, swapped, swapped=True)

    def move_in(self, nbytes: int, usec: int) -> None:
        """It wants memory back on the GPU: booked there, or EAGAIN."""
        if not 0 < nbytes <= self.swapped:
            raise fail(errno.EINVAL)
        if not self._bookkeeper.move_in(self.process, self.gpu, nbytes, min(usec, USEC_MOST)):
            raise fail(errno.EAGAIN)
        self._granted += nbytes
        self.due = min(self.due + nbytes, DUE_MOST)
        self._charged(nbytes)
        self.swapped -= nbytes

    def moved_out(self, nbytes: int, usec: int) -> None:
        """It moved memory to the host, as it was asked to. EINVAL for more than it has."""
        if nbytes > self.charged - self.promised:
            raise fail(errno.EINVAL)
        if not nbytes:
            return
        short = nbytes - self._bookkeeper.levels(self.process, self.gpu)[0].current
        if short > 0:  # the driver was believed, and by that it cannot have had that much
            self._correction += short
            self._bookkeeper.observe(self.process, self.gpu, self.charged + self._correction)
        self._bookkeeper.moved_out(self.process, self.gpu, nbytes, min(usec, USEC_MOST), already=True)
        self._charged(-nbytes)
        self.given += nbytes
        self.swapped += nbytes
        self._correction = max(self._correction, -self.charged)

    def report(self, nbytes: int, exchanged: int, away: int, intact: int = 0, lent: int = 0) -> None:
        """So much it cannot move, and so much has changed places, ever: its own word, for people. So much may be off
        the GPU from now on, until it says otherwise: the driver counts less then, and nothing has become free. So much
        the driver carries with the program, which says so at most some seconds late. And so much lives without it, and
        is charged to it still: it may say so of what it has charged, which is no more than it may have."""
        self.unmovable = min(nbytes, self._capacity)
        self.intact = min(intact, self._capacity)
        self.exchanged = min(exchanged, MAX)
        self.away = min(away, AWAY_MOST)
        self.lent = min(lent, self._capacity)
        self._mark()

    def uncounts(self, nbytes: int) -> None:
        """Note the bytes of what the program has charged that the driver does not count: the program's own word, and no
        more than it has charged. A look that falls between its charge and this report counts them either way."""
        self._mark()
        self.uncounted = min(nbytes, self._capacity)
        self._mark()

    def copies(self, nbytes: int) -> None:
        """Of so much that is on the GPU the host has a copy: its own word, for people."""
        self.clean = min(nbytes, self._capacity)

    def ask(self, nbytes: int) -> None:
        """It is asked to move so much, or (less than 0) has answered."""
        self.asked += nbytes
        self._mark()

    def comes(self, nbytes: int) -> None:
        """So much of what it has was on another GPU, and is copied to memory of this one: both are counted for it here
        for a moment. 0: it has come."""
        self.twice = nbytes
        self._mark()

    # What the driver says

    def look(self, nbytes: int) -> None:
        """The driver's figure for the process, as of now."""
        self._come(nbytes)
        self._seen = nbytes
        before, self._look = self._look, (self._least, self._most, nbytes)
        if before is not None:
            least, most = min(before[0], self._least), max(before[1], self._most)
            correction = min(max(self._correction, before[2] - most), before[2] - least)
            if -TOLERANCE <= correction < 0:
                correction = 0
            if correction != self._correction:
                self._correction = max(correction, -self.charged)
                self._bookkeeper.observe(self.process, self.gpu, self.charged + self._correction)
        self._least = self._most = self._counted
        self._mark()  # what is promised, asked for, away or due may not be there, and what comes may be there twice

    def _come(self, nbytes: int) -> None:
        """What was due before the last look is no more than what the driver counts too little now."""
        missing = max(0, self._most - self._granted - self.lent + self._correction - nbytes)
        self.due = min(self.due, missing + self._granted)
        self._granted = 0

    # The end

    def close(self) -> None:
        """It speaks no more, but lives: what the driver says is all that is known now, and of the host nothing."""
        self.closed = True
        with contextlib.suppress(OSError):  # the process is gone from the books
            if self._look is None:  # its own word is the best there is; else the next look goes on from here
                self._bookkeeper.observe(self.process, self.gpu, max(0, self._correction))
            self._bookkeeper.uncharge(self.process, self.gpu, self.swapped, swapped=True)

    def _charged(self, change: int) -> None:
        self.charged += change
        self._mark()

    def _mark(self) -> None:
        lent = min(self.lent, self._counted)
        gone = self.promised + self.asked + self.away + lent + self.due
        self._least = min(self._least, self._counted - gone)
        self._most = max(self._most, self._counted + self.twice)

    @property
    def _counted(self) -> int:
        """Bytes of `charged` that the driver counts, once they are there."""
        return self.charged - min(self.uncounted, self.charged)
