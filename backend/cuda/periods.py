"""The busy periods of the programs of one GPU: which program is held while which other one has something to do."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from backend.core.turns import YIELD_AHEAD_US
from backend.cuda.burst import BurstPage
from backend.cuda.program import LEADERS_MOST, Program
from backend.process.identity import Process

log = logging.getLogger(__name__)


class Periods:
    """See the module."""

    def __init__(self, index: int, programs: Mapping[Process, Program]) -> None:
        """`index` is that of the GPU, `programs` those that speak."""
        self._index = index
        self._programs = programs
        self._behind: Mapping[Process, Sequence[Process]] = {}
        self._hold_us = 0

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        """Take which programs each one goes behind; see :class:`backend.core.protocols.Gpu`."""
        self._behind, self._hold_us = behind, hold_us
        self.tell()

    def tell(self) -> None:
        """Tell programs that can take part in busy periods what has changed for them. What another one has the page of
        is decided here alone: by a page that it has no more a program holds no other."""
        if not self._behind and all(one.hold_us is None for one in self._programs.values()):
            return
        can = {process: one for process, one in self._programs.items() if one.is_met and one.mover.bursts}
        ahead = {
            process: [can[one] for one in self._behind.get(process, ()) if one in can][:LEADERS_MOST] for process in can
        }
        leaders = {id(one) for found in ahead.values() for one in found}
        for one in can.values():
            self._lead(one, self._hold_us if id(one) in leaders else None)
        for process, found in ahead.items():
            self._follow(can[process], [one.page for one in found if one.page is not None])

    def held_launches(self, process: Process) -> int | None:
        """Return the launches of a program that is held in the busy periods of all those that it goes behind; None for
        one that goes behind none, or behind one that cannot have it held: that has its library, or the other's, against
        it."""
        program, behind = self._programs.get(process), self._behind.get(process, ())
        if program is None or not behind:
            return None
        for one in behind:
            leader = self._programs.get(one)
            if leader is None or leader.page is None or leader.page not in program.ahead:
                return None
        return program.mover.launches(self._index)

    def busy_periods(self, process: Process) -> int | None:
        """Return the busy periods of a program, ever, by its own word; None for one that goes before none."""
        program = self._programs.get(process)
        if program is None or program.page is None:
            return None
        try:
            return program.page.periods()
        except OSError:  # its connection has ended
            return None

    def _lead(self, program: Program, hold_us: int | None) -> None:
        if hold_us == program.hold_us:
            return
        program.hold_us = hold_us
        try:
            program.page = program.mover.lead(self._index, hold_us)
        except OSError as error:  # no descriptor is left, say
            program.page = program.hold_us = None
            log.warning("process %d: no page for its busy periods: %s", program.holding.process.pid, error.strerror)

    def _follow(self, program: Program, pages: Sequence[BurstPage]) -> None:
        """Have a program go behind those of these pages. A slot keeps its page as long as that is one of them."""
        new = [page for page in pages if page not in program.ahead]
        for slot, page in enumerate(program.ahead):
            if page in pages:
                continue
            now = new.pop(0) if new else None
            if now is not page:
                program.ahead[slot] = now
                program.mover.follow(self._index, slot, now, YIELD_AHEAD_US)
