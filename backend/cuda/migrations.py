"""The programs that are moved from one GPU to another: how each stands by, and until when it is expected back."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import attrs
import trio

from backend.cuda.program import HALTED_LOOK_S, Program
from backend.process.identity import Process

DEPART_S = 5.0
"""Seconds for a program to stand by: 43 ms for 8 GiB, 0.3 s for 6 GiB in chunks of 2 MiB, and until nothing runs."""

RETURN_S = 5.0
"""Seconds in which a program that was moved connects again: it counts as one with the library meanwhile, and a write to
its files is not refused for that."""

RETURN_WAIT_S = 2.0
"""Seconds of those in which it is waited for: its library tries once a second, and a write has 5 s for all it does."""

HOME_S = 30.0
"""Seconds in which what a program brought along from another GPU is where it runs now: 3 to 5 s for 16 GiB, and as long
as it is frozen or stopped nothing comes (docs/nvidia.md)."""


@attrs.frozen
class Standby:
    """How a program with the library is had to stand by, so that the driver can move it."""

    page: int
    """The descriptor of its page, which says that it does (:func:`backend.cuda.page.stands`)."""
    begin: Callable[[], Awaitable[None]]
    """Returns once it does. OSError: it runs on."""
    end: Callable[[], None]
    """Has it go on: it is unlocked."""
    over: trio.Event
    """To be set once no agent is at it any more, if it was begun: before, the driver is slow to do what it asks for."""


@attrs.define(eq=False)
class Expected:
    """A program that was moved, and has not connected again yet."""

    movable: int
    """Bytes that it will be able to move then."""
    waited_until: float
    """When it is not waited for any more, by trio's clock."""
    until: float
    """When it is not expected any more, by trio's clock."""
    over: trio.Event = attrs.field(factory=trio.Event)
    """It has, or never will."""


class Migrations:
    """The migrations from one GPU, and to it."""

    def __init__(
        self,
        index: int,
        programs: Mapping[Process, Program],
        halted: Callable[[Process], bool],
        end: Callable[[Process], None],
    ) -> None:
        """`index` is that of the GPU, `programs` those that speak. `halted` says which one cannot act now, and `end`
        ends what speaks for one."""
        self._index = index
        self._programs = programs
        self._halted = halted
        self._end = end
        self._expected: dict[Process, Expected] = {}
        self._moving: dict[Process, trio.Event] = {}  # until when nothing is begun with it

    def standby(self, process: Process, target: Migrations, near: bool) -> Standby:
        """Return how a program that speaks is had to stand by; `near` says whether where it goes can use memory of this
        GPU. The descriptor is for the caller to close. OSError."""
        program, over = self._programs.get(process), trio.Event()
        if program is None:
            raise OSError(errno.EBUSY, "it speaks no more")

        async def begin() -> None:
            for one in (self, target):
                one._moving[process] = over
            await self._depart(process, near)

        return Standby(os.dup(program.mover.page), begin, partial(self._let_go, process), over)

    async def moved(self, process: Process) -> None:
        """Return once no agent is at a program to move it from here, or to here."""
        if (over := self._moving.get(process)) is not None:
            await over.wait()
            self._moving.pop(process, None)

    def placed(self, process: Process) -> int:
        """Return the bytes on the GPU that the library has placed, as the program says."""
        program = self._programs.get(process)
        return 0 if program is None else max(0, program.holding.charged - program.holding.unmovable)

    def follows(self, process: Process) -> int:
        """Return the bytes of those that go from GPU to GPU without the driver: by the descriptors of the library."""
        program = self._programs.get(process)
        return 0 if program is None else max(0, self.placed(process) - program.holding.intact)

    def departs(self, process: Process) -> bool:
        """Return whether a program stands by, or is about to: what it asks for it is given when it is back."""
        program = self._programs.get(process)
        return program is not None and program.departs

    def expect(self, process: Process, placed: int) -> None:
        """Note that a program has moved here, with so many bytes that its library has placed. It may be here by now."""
        if (program := self._programs.get(process)) is not None:
            self._came(program)
        else:
            now = trio.current_time()
            self._expected[process] = Expected(placed, now + RETURN_WAIT_S, now + RETURN_S)

    def look(self, program: Program) -> None:
        """Look whether the memory that a program brought along is taken to have come."""
        if not program.holding.twice:
            return
        if self._halted(program.holding.process):
            program.home_by = trio.current_time() + HOME_S
        elif program.home_by <= trio.current_time():
            program.holding.comes(0)

    async def returned(self, process: Process) -> None:
        """Return once a program that is expected speaks, or is not waited for any more; one that is stopped is not."""
        if process not in self._programs and (expected := self._expected.get(process)) is not None:
            with trio.move_on_at(expected.waited_until):
                while not expected.over.is_set() and not self._halted(process):
                    with trio.move_on_after(HALTED_LOOK_S):
                        await expected.over.wait()

    def expects(self, process: Process) -> bool:
        """Return whether a program has moved here, and is about to speak."""
        expected = self._expected.get(process)
        return expected is not None and trio.current_time() < expected.until

    def stay(self, process: Process, placed: int) -> None:
        """Note that a program is not moved after all: it is to go on, if it stands by, or has gone on and comes back
        here."""
        self._let_go(process)
        self.expect(process, placed)

    def awaits(self, process: Process) -> bool:
        """Return whether a program has moved here, and has not spoken since."""
        return process in self._expected

    def movable(self, process: Process) -> int:
        """Return the bytes that a program that is awaited will be able to move; 0 where it is not waited for."""
        expected = self._expected[process]
        comes = trio.current_time() < expected.waited_until and not self._halted(process)
        return expected.movable if comes else 0

    def begin(self, program: Program) -> None:
        """Note that a program speaks."""
        if (expected := self._expected.pop(program.holding.process, None)) is not None:
            self._came(program)
            expected.over.set()

    def forget(self, process: Process) -> None:
        """Forget a process that exited, or runs elsewhere."""
        if (over := self._moving.get(process)) is not None and over.is_set():
            del self._moving[process]
        if (expected := self._expected.pop(process, None)) is not None:
            expected.over.set()

    def _let_go(self, process: Process) -> None:
        program = self._programs.get(process)
        if program is not None and program.departs:
            self._end(process)

    async def _depart(self, process: Process, near: bool) -> None:
        program = self._programs.get(process)
        if program is None:
            raise OSError(errno.EBUSY, "it speaks no more")
        async with program.turn:  # nothing else is asked of it any more
            program.departs = True
            try:
                await program.mover.depart(self._index, near, DEPART_S)
            except OSError as error:
                program.departs = error.errno == errno.ETIMEDOUT  # then it may do so yet
                raise

    def _came(self, program: Program) -> None:
        """Note that a program speaks, from where it was moved to: its memory follows."""
        program.home_by = trio.current_time() + HOME_S
        program.holding.comes(program.holding.charged)
