"""The change of turns, as the scheduler makes it: `a` ends its turn, the others have one each, and `a` begins again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import trio

from backend.core.records import Place
from backend.core.turns import TurnEnd
from backend.scheduler.ends import DRAIN_MOST_US, DRAIN_SLICE_US
from tests.support.turn_actions import Actions
from tests.support.turn_orders import BOUND_US, MOMENT_S, Kind
from tests.support.turns import follower


@attrs.define
class Changes(Actions):
    """The change of turns; see the module."""

    async def change(self) -> None:
        """`a` ends its turn, the others have one each, and `a` begins again."""
        kind = self.stage.kind
        await self.arrive("runs")
        end = await self.finish("a", kind.bound_us, stays=kind.stays)
        if self.is_plain:
            assert end is kind.end, end
        await self.arrive("ended")
        self.lengthen()
        await self.apply("a")
        if kind.stays:
            await self.change_while_it_drains(kind)
        else:
            await self.arrive("off")
            await self.start("b")
        for name, follows in zip(self.case.names[1:], (*self.case.names[2:], "a"), strict=True):
            await self.finish(name, BOUND_US)
            await self.apply(name)
            if follows != "a" or not kind.returns:
                await self.start(follows)
        self.arrived.set()  # at the latest here: a program without a gate is held at no step

    async def change_while_it_drains(self, kind: Kind) -> None:
        """`b` has its turn, and `a` goes off once it is drained or its wait is over; or `a` begins its next turn
        before."""
        await self.start("b")
        found: list[TurnEnd | None] = []

        async def drain() -> None:
            if self.lives("a"):
                async with self.may_be_gone("a"):
                    found.append(await follower(self.h).turning.drain(self.member("a"), DRAIN_MOST_US))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            if kind.returns:
                await trio.sleep(2 * MOMENT_S)
                await self.arrive("waits")
                await self.start("a")
        if self.is_plain:
            assert found == [kind.drained], found
        await self.arrive("drained")
        await self.apply("a")
        await self.arrive("off")

    def lengthen(self) -> None:
        """Have `a` use the slice of a draining program, if it drains."""
        if self.lives("a") and (place := follower(self.h).place(self.member("a"))).drains:
            follower(self.h).schedule(self.member("a"), attrs.evolve(place, drain_us=DRAIN_SLICE_US))

    @property
    def is_plain(self) -> bool:
        """Whether no action was begun that changes how the turn of `a` ends."""
        return {"migrate", "kill", "freeze"}.isdisjoint(self.done_to("a"))

    async def finish(self, name: str, bound_us: int, *, stays: bool = False) -> TurnEnd | None:
        """End the turn of a program, if it lives and is not frozen."""
        if not self.lives(name) or self.h.ledger.books(self.member(name)).frozen:
            return None
        group, acting = self.member(name), follower(self.h)
        async with self.may_be_gone(name):
            return await acting.turning.end(group, Place(off=True), bound_us, stays=stays)
        acting.fall_back(group) if self.h.controller.population.holds(group) else None
        return None

    async def apply(self, name: str) -> None:
        """Apply what is wanted of a program, if it lives."""
        if self.lives(name):
            async with self.may_be_gone(name):
                await follower(self.h).apply(self.member(name))

    async def start(self, name: str) -> None:
        """Begin the turn of a program, and wait until the program was told."""
        if self.lives(name):
            follower(self.h).schedule(self.member(name), Place())
            await self.apply(name)
            await trio.sleep(MOMENT_S)

    @contextlib.asynccontextmanager
    async def may_be_gone(self, name: str) -> AsyncIterator[None]:
        """Ignore an OSError of a program that was killed meanwhile."""
        try:
            yield
        except OSError:
            if "kill" not in self.done_to(name):
                raise
