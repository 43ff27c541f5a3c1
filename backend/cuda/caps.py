"""The caps of the programs of one GPU: on how many of its SMs the kernels of each run at most, and on which."""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from functools import partial

import trio

from backend.cuda.program import Program
from backend.cuda.sms import Groups, Shape
from backend.process.identity import Process

SPEAKS_S = 1.4
"""Seconds in which a program whose context is known is waited for to speak: after its daemon is gone a library tries
once a second whether there is another one (RECONNECT of ``library/daemon/contact.c``), and then has to be met. With
PLACE_S of ``placements.py`` it is less than the 5 s that a writer waits."""


class Caps:
    """See the module."""

    def __init__(self, index: int, programs: Mapping[Process, Program]) -> None:
        """`index` is that of the GPU, `programs` those that speak."""
        self._index = index
        self._programs = programs
        self._groups = Groups()
        self._shapes: dict[Process, Shape] = {}  # of the SMs, by the word of each program, for itself alone
        self._awaited: dict[Process, trio.Event] = {}  # those that are waited for to speak
        self._silent: set[Process] = set()  # those that were, and did not: each wait delays what comes after it
        self._sms: dict[Process, int] = {}  # those with a limit of SMs, as it was asked for
        self._opened: float | None = None  # since when programs are heard, by trio's clock
        self._unheard: set[Process] = set()  # those with a limit from before that

    def open(self) -> Collection[Process]:
        """Note that programs are heard from now on. Return those that have a limit and could not speak before: it may
        not hold, and is to be asked for again."""
        self._opened = trio.current_time()
        return frozenset(self._unheard)

    async def limit(self, process: Process, sms: int, *, here: bool) -> None:
        """Have the kernels of a program run on so many SMs at most, 0 for all; return once the next launch does. It
        holds for a program that is not here yet, too, once it speaks, and before :meth:`open`. EOPNOTSUPP for one that
        is `here` and does not speak.
        """
        before = self._sms.get(process, 0)
        if not sms and not before and process not in self._programs:
            return
        self._wants(process, sms)
        try:
            await self._limit(process, here=here)
        except BaseException:
            self._wants(process, before)
            program, mask = self._programs.get(process), self._mask(process)
            if program is not None and mask is not None:  # it may have followed, and not said so in time
                program.mover.place_soon(self._index, mask)
            raise

    def begin(self, process: Process) -> None:
        """Note that a program speaks."""
        self._silent.discard(process)
        self._unheard.discard(process)
        if (awaited := self._awaited.pop(process, None)) is not None:
            awaited.set()

    def met(self, program: Program, groups: int) -> None:
        """Tell a program that knows that its memory is managed where its kernels are to run, if they do not: they run
        on these groups of SMs, 0 for all."""
        wanted = self._mask(program.holding.process)
        if wanted is None:
            program.mover.shape_soon(self._index, partial(self._shaped, program))
        elif wanted != groups:
            program.mover.place_soon(self._index, wanted)

    def forget(self, process: Process) -> None:
        """Forget a process that exited, or runs elsewhere."""
        self._sms.pop(process, None)
        self._shapes.pop(process, None)
        self._groups.forget(process)
        self._silent.discard(process)
        self._unheard.discard(process)
        if (awaited := self._awaited.pop(process, None)) is not None:
            awaited.set()

    def launches(self, process: Process) -> tuple[int, int] | None:
        """Return the launches of a program that ran on the SMs of its limit, and on all SMs in spite of it; None for a
        program that does not count them."""
        program = self._programs.get(process)
        return None if program is None else program.mover.placed(self._index)

    def _wants(self, process: Process, sms: int) -> None:
        """Note the limit of a program, 0 for none."""
        if sms:
            self._sms[process] = sms
        else:
            self._sms.pop(process, None)

    async def _limit(self, process: Process, *, here: bool) -> None:
        if self._opened is None and self._sms.get(process):
            self._unheard.add(process)
            return
        if here and process not in self._programs and process not in self._silent and self._sms.get(process):
            await self._spoken_for(process)
        program = self._programs.get(process)
        if program is None:
            if here and self._sms.get(process):
                raise OSError(errno.EOPNOTSUPP, "the program was started without the library (ggroupfs run)")
            return
        await program.met.wait()
        if self._sms.get(process) and process not in self._shapes:
            self._shapes[process] = await program.mover.place(self._index, 0, ask=True)
        mask = self._mask(process)
        if mask or program.mover.places:
            try:
                await program.mover.place(self._index, mask or 0)
            except OSError as error:
                if error.errno != errno.EBUSY or mask or self._programs.get(process) is program:
                    raise
                # Its connection has ended: one that connects anew begins with all SMs, and is told of a limit.

    async def _spoken_for(self, process: Process) -> None:
        """Return once a program speaks, or was waited for: its context may be known before its library's word. Those
        that could not be heard at first are waited for together.
        """
        since = self._opened if process in self._unheard and self._opened is not None else trio.current_time()
        with trio.move_on_at(since + SPEAKS_S) as waited:
            await self._awaited.setdefault(process, trio.Event()).wait()
        if waited.cancelled_caught:
            self._silent.add(process)
        self._awaited.pop(process, None)

    def _shaped(self, program: Program, shape: Shape) -> None:
        """A program has said how the SMs are split, of which a limit waits for it."""
        process = program.holding.process
        self._shapes[process] = shape
        if self._programs.get(process) is program and (mask := self._mask(process)):
            program.mover.place_soon(self._index, mask)

    def _mask(self, process: Process) -> int | None:
        """Return the groups of SMs that a program is to have, 0 for all; None while it is not known what there is."""
        sms = self._sms.get(process, 0)
        if not sms:
            self._groups.forget(process)
            return 0
        shape = self._shapes.get(process)
        return None if shape is None else self._groups.take(process, shape.count(sms), shape.groups)
