"""Actions on programs whose turns change, on their slice and on their daemon."""

from __future__ import annotations

import errno

import attrs
import trio

from tests.support.cuda_session import GIB
from tests.support.harness import answers
from tests.support.turn_answers import Answers
from tests.support.turn_orders import GIVEN_BYTES, HELD_BYTES, MOMENT_S, acted_on
from tests.support.turns import without


@attrs.define
class Actions(Answers):
    """The actions; see the module."""

    may_run: set[str] = attrs.field(factory=set)
    """Programs that were told in this order to run, or to move."""

    async def act(self, acting: trio.Nursery) -> bool:
        """Begin the actions in their order; return whether one of them ends the daemon."""
        while self.case.actions:
            action = self.case.actions.pop(0)
            if action in ("upgrade", "kill_daemon"):
                self.stage.life.dead = action == "kill_daemon"
                if action == "upgrade":
                    self.h.controller.hand_over()
                if not self.case.actions:
                    self.stage.cases.pop(0)
                return True
            if self.lives(acted_on(action)):
                self.begun.append(action)
                acting.start_soon(self.do, action)
            await trio.sleep(MOMENT_S)
        return False

    async def do(self, action: str) -> None:
        """Do one action, and check its answer."""
        before, verb, name = self.begun[:-1], action.split()[0], acted_on(action)
        found = self.found(name)
        code = await getattr(self, verb)(name)
        allowed = self.allowed(verb, name, before, found)
        assert code in allowed, (action, errno.errorcode.get(code), self.begun)

    async def write(self, name: str, file: str, value: object) -> int:
        """Write to a file of a program; return the errno, or 0."""
        return await answers(self.h.write(f"{self.program(name).process.pid}/0/{file}", value))

    async def limit(self, _: str) -> int:
        limit = len(self.case.names) * HELD_BYTES - GIVEN_BYTES
        return await answers(self.h.write("slice/job/0/gmem.limit.high", limit))

    async def own_limit(self, name: str) -> int:
        """Lower the limit of one program, so that no other program gives in its place."""
        code = await self.write(name, "gmem.limit.high", HELD_BYTES - GIVEN_BYTES)
        assert code or not self.lives(name) or self.program(name).resident <= HELD_BYTES - GIVEN_BYTES
        return code

    async def low(self, name: str) -> int:
        return await self.write(name, "gmem.limit.low", "max")

    async def swap_max(self, name: str) -> int:
        return await self.write(name, "gmem.swap.max", GIB)

    async def reclaim(self, name: str) -> int:
        return await self.write(name, "gmem.reclaim", GIB)

    async def freeze(self, name: str) -> int:
        """Freeze a program; from the answer on it must not run, even for a moment."""
        code = await self.write(name, "compute.freeze", 1)
        if not code and self.is_last("freeze", name):
            assert without(self.stage.machine.programs[name]) == (True, True)
        self.stand_still()
        return code

    async def thaw(self, name: str) -> int:
        """Thaw a program, which runs again in its turn; a gate that holds it back at least moves its memory."""
        self.may_run.add(name)
        self.let_run(name)
        code = await self.write(name, "compute.freeze", 0)
        if not code and self.is_last("thaw", name) and not self.is_ungated(name):
            assert not without(self.stage.machine.programs[name])[1]
        return code

    async def migrate(self, name: str) -> int:
        """Move a program. It has to stand by for that, which it can only do while it runs, and stays busy."""
        before = name in self.may_run
        self.may_run.add(name)
        self.let_run(name)
        self.away.add(name)
        try:
            code = await self.write(name, "compute.migrate", 1)
        finally:
            self.away.discard(name)
        if code == errno.EOPNOTSUPP and not self.program(name).resident:
            code = errno.EBUSY  # two limits have taken all its memory, and the driver moves no program without any
        else:
            assert name in self.moves or "kill" in self.done_to(name), "nothing moved it"
        if not before:
            self.may_run.discard(name)
        await trio.sleep(MOMENT_S)
        self.stand_still()
        return code

    async def kill(self, name: str) -> int:
        """Kill the program."""
        program = self.program(name)
        self.let_run(name)
        self.stage.machine.end(name)
        program.socket.close()
        await self.h.gone(program.process)
        return 0

    def stand_still(self) -> None:
        """Forbid frozen programs to run, unless they were asked to."""
        still = filter(self.lives, set(self.case.names) - self.may_run)
        self.stage.machine.fake.still = frozenset(
            self.program(name).process.pid for name in still if self.h.ledger.books(self.member(name)).frozen
        )

    def let_run(self, name: str) -> None:
        """Allow a program to run from now on."""
        self.stage.machine.fake.still -= {self.program(name).process.pid}
