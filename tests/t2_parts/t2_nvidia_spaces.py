"""Spaces on an NVIDIA GPU, against a driver in memory: clients of an MPS server, and levers that act on all of them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable

import attrs
import pytest
import trio
import trio.testing

from backend.core.reasons import Engines
from backend.core.turns import TurnEnd
from backend.nvidia.spaces import SpaceLevers
from backend.process.identity import Process, Slice
from backend.space.space import Space
from tests.support.fake_nvidia import Program
from tests.support.nvidia_rig import Rig, drive, running

SPACE, OTHER = Space(Slice("/jobs"), 1000, 7), Space(Slice("/other"), 1000, 8)
ALL, GR, NONE = Engines.ALL, Engines.GR, Engines.NONE


@contextlib.asynccontextmanager
async def clients(rig: Rig, *pids: int) -> AsyncIterator[list[Program]]:
    """Programs that are in the space, and clients of a server by the driver's word."""
    programs = [rig.busy(pid, 0) for pid in pids]
    rig.bookkeeper.spaces |= {program.identity: SPACE for program in programs}
    rig.nvml.clients[0] = [*rig.nvml.clients.get(0, []), *pids]
    async with running(rig):
        yield programs


def run(program: Program) -> bool:
    """Return whether all of a program is on the runlist; all or nothing is."""
    (found,) = set(program.running())
    return found


def test_a_server_is_no_program_of_its_own() -> None:
    """It is listed by the driver, with memory of its own. One that holds much more is a program after all."""

    async def test(rig: Rig) -> None:
        server = rig.busy(9, 0)
        rig.bookkeeper.servers = {9}
        async with clients(rig, 5, 6) as programs:
            await trio.sleep(1)
            assert {process for process, _ in rig.bookkeeper.arrived} == {one.identity for one in programs}
            rig.bookkeeper.servers = set()
            await trio.sleep(1)
            assert (server.identity, 0) in rig.bookkeeper.arrived

    drive(test)


def test_a_client_is_not_blamed_for_a_timeslice_that_another_one_was_given() -> None:
    """All of them have one, by the driver: it is set again, and nothing is said."""

    async def test(rig: Rig) -> None:
        async with clients(rig, 5, 6) as programs:
            await trio.sleep(1)
            for program in programs:
                await rig.gpus[0].set_timeslice(program.identity, 4000)
            gr = [one for program in programs for one in program.objects.values() if one.timeslice == 4000]
            assert len(gr) == 2
            await trio.sleep(2)
            gr[0].timeslice = 9000
            await trio.sleep(2)
            assert [one.timeslice for one in gr] == [4000, 4000]
            assert not rig.bookkeeper.brought_back

    drive(test)


def test_a_space_goes_off_and_on_with_the_last_of_its_programs() -> None:
    async def test(rig: Rig) -> None:
        gpu = rig.gpus[0]
        async with clients(rig, 5, 6) as (one, other):
            await gpu.detach(one.identity)
            assert (run(one), run(other)) == (True, True), "the other has not been told yet"
            await gpu.detach(other.identity)
            assert (run(one), run(other)) == (False, False)
            assert gpu.activity(one.identity).attached == 0
            await gpu.attach(one.identity)
            assert (run(one), run(other)) == (False, False)
            await gpu.attach(other.identity)
            assert (run(one), run(other)) == (True, True)

    drive(test)


def test_one_that_only_says_that_it_is_a_client_is_alone() -> None:
    """The driver knows. So no program gets out of what the levers do to it."""

    async def test(rig: Rig) -> None:
        gpu = rig.gpus[0]
        async with clients(rig, 5, 6) as (one, other):
            liar = rig.busy(7, 0)
            rig.bookkeeper.spaces[liar.identity] = SPACE
            await trio.sleep(1)
            assert gpu.activity(one.identity).beside
            assert not gpu.activity(liar.identity).beside
            await gpu.detach(liar.identity)
            assert (run(one), run(other), run(liar)) == (True, True, False)

    drive(test)


def test_one_that_becomes_a_client_is_reported() -> None:
    async def test(rig: Rig) -> None:
        async with clients(rig, 5) as (one,):
            rig.nvml.clients[0] = []
            await trio.sleep(1)
            assert rig.bookkeeper.beside == [one.identity]
            assert not rig.gpus[0].activity(one.identity).beside

    drive(test)


def test_what_each_had_of_the_engine_is_not_told() -> None:
    async def test(rig: Rig) -> None:
        async with clients(rig, 5, 6) as (one, _):
            activity = rig.gpus[0].activity(one.identity)
            assert (activity.beside, activity.gpu_usec, activity.stays, activity.busy_usec) == (True, None, None, None)

    drive(test)


def test_the_longest_timeslice_is_that_of_all() -> None:
    async def test(rig: Rig) -> None:
        gpu = rig.gpus[0]

        def slices(program: Program) -> set[int]:
            return {one.timeslice for one in program.objects.values() if one.class_ == 0xA06C} - {1024}

        async with clients(rig, 5, 6) as (one, other):
            await gpu.set_timeslice(one.identity, 4000)
            await gpu.set_timeslice(other.identity, 6000)
            assert slices(one) == slices(other) == {6000}
            await gpu.set_timeslice(other.identity, 0)
            assert slices(one) == slices(other) == {4000}
            await gpu.set_timeslice(one.identity, 0)
            assert slices(one) == slices(other) == {2048}

    drive(test)


def test_a_freeze_of_one_is_of_its_gate_or_refused() -> None:
    async def test(rig: Rig) -> None:
        gpu, ends, begun = rig.gpus[0], [TurnEnd.UNGATED], list[Process]()

        async def end_turn(process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
            return ends[0]

        gpu.managed.end_turn = end_turn  # type: ignore[method-assign]
        gpu.managed.begin_turn = begun.append  # type: ignore[method-assign]
        async with clients(rig, 5, 6) as (one, other):
            rig.bookkeeper.thawed = {other.identity}
            with pytest.raises(OSError, match="nothing holds") as raised:
                await gpu.detach(one.identity)
            assert raised.value.errno == errno.EOPNOTSUPP
            ends[0] = TurnEnd.LATE
            with pytest.raises(OSError, match="has not ended") as raised:
                await gpu.detach(one.identity)
            assert raised.value.errno == errno.ETIMEDOUT
            ends[0] = TurnEnd.DRAINED
            await gpu.detach(one.identity)
            assert (run(one), run(other)) == (True, True), "it stands at its gate"
            await gpu.begin_turn(one.identity)
            assert not begun, "its next turn does not let it go"
            await gpu.attach(one.identity)
            assert begun == [one.identity]
            rig.bookkeeper.thawed = set()
            ends[0] = TurnEnd.UNGATED
            await gpu.detach(one.identity)
            await gpu.detach(other.identity)
            assert (run(one), run(other)) == (False, False), "all of them the runlist stops"

    drive(test)


def test_a_gate_that_a_turn_closed_stays_closed_after_a_freeze() -> None:
    async def test(rig: Rig) -> None:
        gpu, begun = rig.gpus[0], list[Process]()

        async def end_turn(process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
            return TurnEnd.DRAINED

        gpu.managed.end_turn = end_turn  # type: ignore[method-assign]
        gpu.managed.begin_turn = begun.append  # type: ignore[method-assign]
        async with clients(rig, 5, 6) as (one, other):
            rig.bookkeeper.thawed = {other.identity}
            await gpu.detach(one.identity)
            gpu._turn_over.add(one.identity)
            await gpu.attach(one.identity)
            assert not begun
            await gpu.begin_turn(one.identity)
            assert begun == [one.identity]

    drive(test)


def test_no_client_moves() -> None:
    async def test(rig: Rig) -> None:
        async with clients(rig, 5) as (one,):
            with pytest.raises(OSError, match="cannot leave its server") as raised:
                await rig.gpus[0].migrate(one.identity, rig.gpus[1])
            assert raised.value.errno == errno.EOPNOTSUPP

    drive(test)


@attrs.define
class Levers:
    """Levers of programs, as they were pulled."""

    pulled: list[tuple[int, Engines]] = attrs.field(factory=list)
    error: Exception | None = None

    async def take(self, process: Process, engines: Engines) -> None:
        if self.error is not None:
            raise self.error
        self.pulled.append((process.pid, engines))

    async def set_timeslice(self, process: Process, us: int) -> None:
        raise AssertionError("not asked for")


A, B, C = Process(1, 1), Process(2, 1), Process(3, 1)


def levers(test: Callable[[SpaceLevers, Levers], Awaitable[None]]) -> None:
    pulled = Levers()
    trio.run(test, SpaceLevers(pulled.take, pulled.set_timeslice), pulled)


def test_an_unknown_state_is_made_known() -> None:
    """As what another daemon left: what is on already is put on all the same, once."""

    async def test(spaces: SpaceLevers, pulled: Levers) -> None:
        assert set(spaces.note({A: SPACE, B: SPACE, C: OTHER})) == {A, B, C}
        await spaces.take(A, NONE)
        assert pulled.pulled == [(1, NONE), (2, NONE)]
        await spaces.take(B, NONE)
        assert len(pulled.pulled) == 2

    levers(test)


def test_a_lever_that_fails_is_pulled_anew() -> None:
    async def test(spaces: SpaceLevers, pulled: Levers) -> None:
        spaces.note({A: SPACE, B: SPACE})
        await spaces.take(A, ALL)
        pulled.error = OSError(errno.EIO, "the driver")
        with pytest.raises(OSError, match="the driver"):
            await spaces.take(B, GR)
        assert spaces.off(A) is NONE
        pulled.error = None
        await spaces.take(B, GR)
        assert pulled.pulled == [(1, GR), (2, GR)], "GR is what both are to be without"
        assert spaces.off(A) is spaces.off(B) is GR

    levers(test)


def test_one_that_ended_keeps_nobody_waiting() -> None:
    async def test(spaces: SpaceLevers, pulled: Levers) -> None:
        spaces.note({A: SPACE, B: SPACE})
        await spaces.take(A, ALL)
        spaces.forget(B)
        assert spaces.members(SPACE) == {A}
        await spaces.take(A, ALL)
        assert pulled.pulled == [(1, ALL)]
        spaces.forget(A)
        assert spaces.members(SPACE) == ()
        assert spaces.space_of(A) is None

    levers(test)


def test_the_wish_of_the_rest_is_due_once_another_one_ended() -> None:
    """No other freeze or thaw need follow: what the rest is to be without is told as soon as it agrees."""

    async def test(spaces: SpaceLevers, pulled: Levers) -> None:
        spaces.note({A: SPACE, B: SPACE, C: OTHER})
        assert set(spaces.forget(B)) == {A}, "what holds is not known"
        await spaces.take(A, NONE)
        spaces.note({A: SPACE, B: SPACE, C: OTHER})
        await spaces.take(B, NONE)
        await spaces.take(A, ALL)
        assert set(spaces.note({A: SPACE, C: OTHER})) == {A, B}
        await spaces.take(A, ALL)
        assert pulled.pulled[-1] == (1, ALL)
        assert not spaces.forget(A), "none is left"

    levers(test)


def gated(rig: Rig, begun: list[Process]) -> None:
    """Every program has a gate that holds it."""

    async def end_turn(process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
        return TurnEnd.DRAINED

    rig.gpus[0].managed.end_turn = end_turn  # type: ignore[method-assign]
    rig.gpus[0].managed.begin_turn = begun.append  # type: ignore[method-assign]


def test_one_that_is_frozen_keeps_no_other_from_its_turns() -> None:
    """It stands at its gate, and the others have turns among the programs outside."""

    async def test(rig: Rig) -> None:
        gpu = rig.gpus[0]
        gated(rig, [])
        async with clients(rig, 5, 6) as (one, other):
            rig.bookkeeper.thawed = {other.identity}
            await gpu.detach(one.identity)
            for _ in range(2):
                await gpu.detach(other.identity, ALL)
                assert (run(one), run(other)) == (False, False)
                await gpu.attach(other.identity)
                assert (run(one), run(other)) == (True, True)

    drive(test)


def test_a_newcomer_runs_beside_one_that_is_frozen() -> None:
    async def test(rig: Rig) -> None:
        gpu = rig.gpus[0]
        begun = list[Process]()
        gated(rig, begun)
        async with clients(rig, 5) as (one,):
            await gpu.detach(one.identity)
            assert not run(one)
            new = rig.busy(6, 0)
            rig.bookkeeper.spaces[new.identity] = SPACE
            rig.bookkeeper.thawed = {new.identity}
            rig.nvml.clients[0] = [5, 6]
            await trio.sleep(1)
            await gpu.attach(new.identity)
            assert (run(one), run(new)) == (True, True)
            await gpu.attach(one.identity)
            assert begun == [one.identity], "it stood at its gate"

    drive(test)


def test_a_thaw_of_the_slice_is_refused_where_nothing_holds_one_that_is_frozen_itself() -> None:
    async def test(rig: Rig) -> None:
        gpu = rig.gpus[0]
        async with clients(rig, 5, 6) as (one, other):
            await gpu.detach(one.identity)
            await gpu.detach(other.identity)
            rig.bookkeeper.thawed = {other.identity}
            with pytest.raises(OSError, match="nothing holds") as raised:
                await gpu.attach(other.identity)
            assert raised.value.errno == errno.EOPNOTSUPP
            assert (run(one), run(other)) == (False, False)

    drive(test)


def test_a_freeze_of_one_that_is_given_up_opens_its_gate_again() -> None:
    """The writer has waited for long enough, or the answer came too late: the library may close the gate all the
    same."""

    async def test(rig: Rig) -> None:
        gpu, begun, ends = rig.gpus[0], list[Process](), [trio.sleep_forever, trio.lowlevel.checkpoint]

        async def end_turn(process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
            await ends.pop(0)()
            return TurnEnd.UNGATED

        gpu.managed.end_turn = end_turn  # type: ignore[method-assign]
        gpu.managed.begin_turn = begun.append  # type: ignore[method-assign]
        async with clients(rig, 5, 6) as (one, other):
            rig.bookkeeper.thawed = {other.identity}
            with trio.move_on_after(1):
                await gpu.detach(one.identity)
            rig.bookkeeper.thawed = {one.identity, other.identity}
            await gpu.attach(one.identity)
            assert begun == [one.identity]
            rig.bookkeeper.thawed = {other.identity}
            with pytest.raises(OSError, match="nothing holds"):
                await gpu.detach(one.identity)
            rig.bookkeeper.thawed = {one.identity, other.identity}
            await gpu.attach(one.identity)
            assert begun == [one.identity] * 2

    drive(test)


def test_a_thaw_of_the_slice_lets_none_go_that_is_frozen_itself() -> None:
    async def test(rig: Rig) -> None:
        gpu = rig.gpus[0]
        begun = list[Process]()
        gated(rig, begun)
        async with clients(rig, 5, 6) as (one, other):
            await gpu.detach(one.identity)
            await gpu.detach(other.identity)
            assert (run(one), run(other)) == (False, False)
            rig.bookkeeper.thawed = {other.identity}
            await gpu.attach(other.identity)
            assert (run(one), run(other)) == (True, True)
            await gpu.attach(one.identity)
            assert begun == [one.identity], "it stood at its gate"

    drive(test)


def test_one_that_ends_while_a_lever_is_awaited_is_forgotten() -> None:
    async def test() -> None:
        release = trio.Event()
        pulled: list[tuple[int, Engines]] = []

        async def take(process: Process, engines: Engines) -> None:
            await release.wait()
            pulled.append((process.pid, engines))

        async def set_timeslice(process: Process, us: int) -> None:
            await release.wait()

        async def ends() -> None:
            with pytest.raises(BlockingIOError):
                await spaces.take(B, NONE)

        async def ends_too() -> None:
            with pytest.raises(BlockingIOError):
                await spaces.set_timeslice(B, 9000)

        spaces = SpaceLevers(take, set_timeslice)
        spaces.note({A: SPACE, B: SPACE})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(spaces.take, A, NONE)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ends)
            nursery.start_soon(ends_too)
            await trio.testing.wait_all_tasks_blocked()
            spaces.forget(B)
            release.set()
        assert spaces.members(SPACE) == {A}
        await spaces.take(A, ALL)
        assert pulled[-1] == (1, ALL)
        spaces.forget(A)
        assert spaces.members(SPACE) == ()

    trio.run(test)
