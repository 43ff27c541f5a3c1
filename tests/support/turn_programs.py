"""Programs whose turns change, as one daemon sees them: held at each step of their gates, and reconnected."""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio

from backend.core.turns import TurnEnd
from backend.cuda.migrations import Standby
from backend.cuda.page import CounterPage
from backend.cuda.server import Session
from backend.door import tenants
from backend.door.wire import CUDA, Feature, Message
from backend.nvidia.gpu import NvidiaGpu
from backend.process.identity import Member
from tests.support.harness import Harness
from tests.support.killed import Life, Machine
from tests.support.turn_daemons import first_gpu, serve
from tests.support.turn_orders import HELD_BYTES, MOMENT_S, Case, Kind
from tests.support.turns import Gated, without

RECONNECT_S = 0.3
"""Seconds after which a program connects again: the library tries once a second."""


class Held(Gated):
    """A program with a gate that may be held before it does as it is asked."""

    arrive: Callable[[str], Awaitable[None]]
    """Called with each step of its gate; returns when the gate may go on."""
    steps: Sequence[str] = ()
    """Names of the steps: before its gate closes, once it is closed, when it is asked again, before it opens."""

    async def begin_turn(self, message: Message) -> Message:
        """Open the gate."""
        if message.args[0] and self.is_closed:
            await self.arrive(self.steps[3])
        return await super().begin_turn(message)

    async def end_turn(self, message: Message) -> Message:
        """Close the gate."""
        if self.is_closed:
            await self.arrive(self.steps[2])
        else:
            await self.arrive(self.steps[0])
            self.is_closed, self.pending, self.closed_at = True, True, trio.current_time()
            await self.arrive(self.steps[1])
        return await super().end_turn(message)


class Ungated(Held):
    """A program without a gate."""

    features = CUDA & ~Feature.TURNS


@attrs.define
class Stage:
    """A machine whose daemons come and go, and the orders that are left."""

    machine: Machine
    kind: Kind
    cases: list[Case]
    pages: list[CounterPage] = attrs.field(factory=list)
    """Counter pages of killed daemons, which no longer read them."""
    programs: dict[str, Held] = attrs.field(factory=dict)
    life: Life = attrs.field(factory=Life)
    at: int | None = None
    """Point of the next daemon's life at which it is killed; None for a clean end."""


@attrs.define
class Programs:
    """The programs; see the module."""

    stage: Stage
    h: Harness
    case: Case = attrs.field(factory=lambda: Case("", []))
    """Present order."""
    moves: set[str] = attrs.field(factory=set)
    """Programs whose move was begun in this order."""
    arrived: trio.Event = attrs.field(factory=trio.Event)
    """Set when the step of the order has come."""
    go: trio.Event = attrs.field(factory=trio.Event)
    """Set when the order's actions have begun."""

    @property
    def gpu(self) -> NvidiaGpu:
        """The first GPU, without its wrappers."""
        return first_gpu(self.h)

    @property
    def fake(self) -> Any:
        """The driver, as a program knows it."""
        return self.stage.machine.fake

    def program(self, name: str) -> Held:
        """Return a program that is connected to this daemon."""
        return self.stage.programs[name]

    def member(self, name: str) -> Member:
        """Return the group of a program."""
        return Member(self.program(name).process, 0)

    def lives(self, name: str) -> bool:
        """Return whether a program lives, as far as this daemon knows."""
        known = self.h.controller.population
        return name in self.stage.machine.programs and known.holds(self.member(name))

    def driver_says(self, pid: int, nbytes: int, gpu: int = 0) -> None:
        """Have NVML count `nbytes` for a process."""
        nvml = self.stage.machine.nvml
        if pid in self.fake.programs:
            nvml.compute[gpu] = [*[entry for entry in nvml.compute.get(gpu, []) if entry[0] != pid], (pid, nbytes)]

    async def connected(self, nursery: trio.Nursery) -> None:
        """Wait until all programs of the order are connected. New ones, and all after a restart, are connected here."""
        for name in self.case.names:
            found: Any = self.stage.programs.get(name)
            if found is None or name not in self.stage.machine.programs or found.rig is not self:
                await self.connect(nursery, name)
        with trio.fail_after(60):
            while any(self.program(name).ended.is_set() for name in self.case.names):  # noqa: ASYNC110
                await trio.sleep(MOMENT_S)

    async def connect(self, nursery: trio.Nursery, name: str) -> None:
        """Connect a live program, with the memory that it had; start a new one, with some memory."""
        machine, before = self.stage.machine, self.stage.programs.get(name)
        if name not in machine.programs:
            machine.start(name, "/job")
        process = machine.programs[name].identity
        resident, swapped = HELD_BYTES, 0
        if before is not None and before.process == process:
            resident, swapped = before.resident, before.swapped
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kind, is_a = self.stage.kind, name == "a"
        made = Ungated if is_a and kind.end is TurnEnd.UNGATED else Held
        program = made(self, process, trio.socket.from_stdlib_socket(ours))  # type: ignore[arg-type]
        session = Session(process, {0: self.gpu.managed}, tenants.Line(trio.socket.from_stdlib_socket(theirs), process))

        nursery.start_soon(serve, session, theirs, program, self.stage.life, self.stage.pages)
        nursery.start_soon(program.run)
        program.context, program.arrive = 0, self.arrive
        program.steps = ("asked", "drains", "waits", "begins") if is_a else ("", "", "", "next" if name == "b" else "")
        program.drain_s = kind.drain_s if is_a else 0.0
        await program.manage(resident, swapped)
        self.stage.programs[name] = program
        nursery.start_soon(self.connect_again, nursery, name, program)

    async def connect_again(self, nursery: trio.Nursery, name: str, program: Held) -> None:
        """Reconnect a program once its connection has ended, which a move does; the library does the same."""
        await program.ended.wait()
        await trio.sleep(RECONNECT_S)
        found = self.stage.machine.programs.get(name)
        if found is not None and found.identity == program.process and self.stage.programs[name] is program:
            await self.connect(nursery, name)

    async def move(self, *words: Any) -> None:
        """Stand in for the agent of checkpoints: the program must run and be able to launch, and then stays busy."""
        process, standby = words[0], words[-1]
        assert isinstance(standby, Standby)
        (name,) = [name for name in self.case.names if self.program(name).process == process]
        program = self.program(name)
        self.moves.add(name)
        if self.lives(name):
            assert without(self.stage.machine.programs[name]) == (False, False)
            with trio.move_on_after(1):  # the library may be busy, or held
                while program.is_closed:  # noqa: ASYNC110
                    await trio.sleep(MOMENT_S / 3)
            assert not program.is_closed, "it was not told that it is to leave its turn"
        await standby.begin()
        assert not program.is_closed
        standby.over.set()
        raise OSError(errno.EBUSY, "it does not come to a rest")

    async def arrive(self, step: str) -> None:
        """Reach a step of the change; at the step of the order, wait until its actions have begun."""
        if step and step == self.case.step and not self.go.is_set():
            self.arrived.set()
            await self.go.wait()
