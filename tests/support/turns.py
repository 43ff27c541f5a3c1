"""CUDA programs whose library has a gate of turns, and the scheduler's calls that give and end turns in a test."""

from __future__ import annotations

import errno

import trio

from backend.core.follower import Follower
from backend.core.records import Capability, Place
from backend.core.turns import TurnEnd
from backend.door.wire import Message, Op
from backend.nvidia.gpu import NvidiaGpu
from backend.nvidia.proven import GR_ALONE
from backend.process.identity import Member
from tests.support import fake_nvidia
from tests.support.cuda_session import CONTEXT, GIB, Program, Rig
from tests.support.harness import Harness

LOOK_S = 0.05
"""Seconds between two looks of a program at an engine that it waits for."""

BOUND_US = 50_000
"""Microseconds that a program has to drain."""

LONG_S, GIVEN_UP_S = 2.0, 0.3
"""Seconds for which the library waits for running kernels before it moves memory: as long as kernels end meanwhile, and
for a single kernel (QUEUE_US and WORK_US of ``library/move``)."""

COPY_CHANNELS = 12
"""Channels of the copy engines of a program with one context; the channels before them run kernels."""


def without(program: fake_nvidia.Program) -> tuple[bool, bool]:
    """Return whether a program is without its GR engine, and without its copy engines. None may be disabled twice."""
    objects = program.objects
    kernels = {objects[one.parent].parent for one in objects.values() if one.class_ == 0xCBC0}
    gr, copies = set[int](), set[int]()
    for channel in program.channels():
        (gr if objects[channel].parent in kernels else copies).add(objects[channel].disabled)
    assert (len(gr), len(copies)) == (1, 1), "all of an engine, or none"
    assert gr | copies <= {0, 1}
    return bool(gr.pop()), bool(copies.pop())


class Gated(Program):
    """A program that handles its gate as the library does. Its memory moves only once none of its kernels run, and only
    while the engines needed for that are on: the copy engines and, while its kernels are pending, GR."""

    def __init__(self, rig: Rig, *words: object) -> None:
        super().__init__(rig, *words)  # type: ignore[arg-type]
        self.obey = self.library
        self.is_closed = False
        """Whether the gate is closed."""
        self.ahead_us = 0
        """Run-ahead that it was told last, in microseconds."""
        self.drain_s = 0.0
        """Seconds from the closing of the gate until its launched work has run."""
        self.closed_at = 0.0
        """Time at which the gate closed."""
        self.listens = trio.Lock()
        """Held while it obeys the daemon or has memory come back: the library has one thread for both."""
        self.pending = False
        """Whether its kernels were unfinished when it was last asked."""
        self.departs = False
        """Whether it stands by to be moved, up to the end of its connection."""
        self.told: list[tuple[Op, int]] = []
        """Messages about its gate, each with its first argument."""

    async def library(self, message: Message) -> Message | None:
        """Answer a message of the daemon."""
        async with self.listens:
            match message.op:
                case Op.END_TURN:
                    self.told.append((Op.END_TURN, message.args[0]))
                    return message.refuse(errno.EBUSY) if self.departs else await self.end_turn(message)
                case Op.BEGIN_TURN:
                    self.told.append((Op.BEGIN_TURN, message.args[0]))
                    return await self.begin_turn(message)
                case Op.DEPART:
                    self.is_closed, self.pending, self.ahead_us, self.departs = False, False, 0, True
                    return message.answer()
            if self.departs:
                return message.answer()
            return await self.move(message) if await self.is_quiet() else message.answer()

    async def end_turn(self, message: Message) -> Message:
        """Close the gate, and let running work drain."""
        if not self.is_closed:
            self.closed_at = trio.current_time()
        self.is_closed = self.pending = True
        bound_s, left_s = message.args[0] / 1e6, max(0.0, self.closed_at + self.drain_s - trio.current_time())
        await trio.sleep(min(bound_s, left_s))
        found = self.rig.fake.programs.get(self.process.pid)
        stands = left_s > 0 and found is not None and without(found)[0]
        self.pending = left_s > bound_s or stands
        if stands:  # work that does not run does not end
            self.closed_at = trio.current_time()
        return message.answer(int(not self.pending), round(min(bound_s, left_s) * 1e6))

    async def begin_turn(self, message: Message) -> Message:
        """Open the gate."""
        self.is_closed, self.pending, self.ahead_us = False, False, message.args[0]
        return message.answer()

    async def is_quiet(self) -> bool:
        """Wait, as long as the library does, until none of its work runs; return whether its memory can move then."""
        drained_at = self.closed_at + self.drain_s if self.pending else 0.0
        left_s = drained_at - trio.current_time()
        given_up_at = trio.current_time() + (LONG_S if left_s <= LONG_S else GIVEN_UP_S)
        while trio.current_time() < given_up_at:
            if self.process.pid not in self.rig.fake.programs:
                return False
            gr, copies = without(self.rig.fake.programs[self.process.pid])
            is_done = not self.pending or (not gr and trio.current_time() >= drained_at)
            if is_done and not copies:
                return True
            await trio.sleep(LOOK_S if is_done or gr else min(LOOK_S, drained_at - trio.current_time()))
        return False

    async def run(self) -> None:
        """Serve the connection until it ends, which opens the gate."""
        await super().run()
        self.is_closed = False


async def gated(rig: Rig, resident: int = 0, cgroup: str = "/", context: int = CONTEXT) -> Gated:
    """Start a program with a gate and `resident` bytes, on a GPU that can take GR alone off the runlist."""
    proven(rig.gpu)
    program = rig.connect(rig.process(cgroup), Gated)
    assert isinstance(program, Gated)
    program.context = context
    await program.manage()
    if resident:
        assert await program.alloc(resident) == 0
    return program


def proven(gpu: NvidiaGpu) -> None:
    """Mark a GPU as proven to take GR alone off the runlist."""
    capabilities = gpu.capabilities()
    assert isinstance(capabilities, dict)
    capabilities[GR_ALONE] = Capability.ENFORCED


def follower(h: Harness) -> Follower:
    """Return the object that gives and ends turns."""
    return h.controller._follower


async def end_turn(h: Harness, program: Program, bound_us: int = BOUND_US, *, stays: bool = False) -> TurnEnd:
    """Have a program wait for its turn, as the scheduler does; with `stays`, a late one drains on the runlist."""
    group = Member(program.process, program.gpu)
    end = await follower(h).turning.end(group, Place(off=True), bound_us, stays=stays)
    await follower(h).apply(group)
    return end


async def drain(h: Harness, program: Program, bound_us: int) -> TurnEnd | None:
    """Take a draining program off the runlist, as the scheduler does."""
    group = Member(program.process, program.gpu)
    end = await follower(h).turning.drain(group, bound_us)
    await follower(h).apply(group)
    return end


async def begin_turn(h: Harness, program: Program) -> None:
    """Have a program run again, and wait until it was told."""
    group = Member(program.process, program.gpu)
    follower(h).schedule(group, Place())
    await follower(h).apply(group)
    await trio.sleep(LOOK_S)


async def coming_back(program: Gated) -> None:
    """Move memory of a program back in, which takes a while."""
    async with program.listens:
        (await program.ask(Op.MOVE_IN, GIB, 0)).check()
        program.swapped, program.resident = program.swapped - GIB, program.resident + GIB
        await trio.sleep(0.3)
        program.show()
