"""Level 3: programs that fight what is set for them, against a driver in memory whose calls take their time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import attrs
import pytest
import trio
from trio.testing import MockClock

from backend.identity import Process
from backend.nvidia import discover, rm
from backend.nvidia.gpu import open_gpus
from backend.nvidia.keeper import QUESTIONS, TICK
from backend.nvidia.nvml import Nvml
from tests.fake_nvidia import FakeHost, FakeNvml, FakeSystem, Program, patient
from tests.t2_nvidia_gpu import Rig, running

COSTS = {rm.FIFO_GET_CHANNEL_STATE: 200e-6, rm.SET_TIMESLICE: 300e-6}
"""Seconds of a call of the driver (docs/nvidia.md)."""
LOOK_UP = 5e-6
"""... that it answers from its own memory, with our part."""
A_CHANNEL = 50e-6
"""FIFO_DISABLE_CHANNELS, for each channel: 0.94 ms for 20."""
SECOND = 1.0 + 0.001


@attrs.define
class Costly(Rig):
    """The clock goes on by what calls cost."""

    clock: MockClock
    spent: float = 0.0
    """Seconds in the driver."""
    calls: Counter[int] = attrs.field(factory=Counter)

    def undo(self, program: Program, channels: Sequence[int] | None = None) -> None:
        """What FIFO_DISABLE_CHANNELS does for a program with channels of its own."""
        for channel in program.channels() if channels is None else channels:
            program.objects[channel].disabled = 0

    async def until_all(self, condition: Callable[[], bool], seconds: float) -> float:
        """How long it took, in virtual seconds."""
        began = trio.current_time()
        with trio.move_on_after(seconds):
            while not condition():  # noqa: ASYNC110 - it is found by polling
                await trio.sleep(0.01)
        assert condition(), f"not within {seconds} s"
        return trio.current_time() - began


def drive(test: Callable[[Costly], Awaitable[None]], trace: bool = True) -> None:
    """Runs a test with two GPUs whose calls cost time."""
    fake, nvml = FakeSystem(), FakeNvml()
    if not trace:
        fake.trace = None
    clock = MockClock(autojump_threshold=0.005)

    async def main() -> None:
        gpus = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        rig = Costly(fake, nvml, gpus, FakeHost(), clock)

        def cost(cmd: int) -> None:
            seconds = COSTS.get(cmd, LOOK_UP)
            if cmd == rm.FIFO_DISABLE_CHANNELS:
                seconds = A_CHANNEL * 20
            rig.spent += seconds
            rig.calls[cmd] += 1
            clock.jump(seconds)

        fake.before = cost
        await test(rig)

    with patient(clock, lambda: False):
        trio.run(main, clock=clock)


class KnowsAll(FakeHost):
    def knows(self, process: Process, gpu: int) -> bool:
        return True


def frozen(programs: Sequence[Program]) -> bool:
    return all(program.objects[channel].disabled for program in programs for channel in program.channels())


@pytest.mark.logs(r"undid its freeze")
@pytest.mark.parametrize(("many", "contexts"), [(1, 1), (1, 8), (20, 3), (100, 3)])
def test_all_who_undo_their_freeze_at_once_are_frozen_again_within_a_second(many: int, contexts: int) -> None:
    """... and no channel is disabled twice, so that each of them runs after its thaw."""

    async def test(rig: Costly) -> None:
        programs = [rig.busy(pid, *[0] * contexts) for pid in range(100, 100 + many)]
        async with running(rig):
            for program in programs:
                await rig.gpus[0].detach(program.identity)
            await trio.sleep(3)
            for program in programs:
                rig.undo(program)
            await rig.until_all(lambda: frozen(programs), SECOND)
            await trio.sleep(3)
            counts = {program.objects[channel].disabled for program in programs for channel in program.channels()}
            assert counts == {1}
            assert all(rig.host.brought_back[program.identity] == 1 for program in programs), "counted once"

    drive(test, trace=False)


@pytest.mark.logs(r"undid its freeze")
@pytest.mark.parametrize("many", [1, 20])
def test_one_channel_that_runs_kernels_is_enough(many: int) -> None:
    """Without a trace it is found in the round: c / 200 s, where c are the channels of all. With it, within a second of
    what is seen there."""

    async def test(rig: Costly) -> None:
        programs = [rig.busy(pid, 0) for pid in range(100, 100 + many)]
        async with running(rig):
            for program in programs:
                await rig.gpus[0].detach(program.identity)
            await trio.sleep(3)
            channel = programs[-1].channels()[random.randrange(8)]
            rig.undo(programs[-1], [channel])
            law = max(1.0, many * 20 / 200)
            await rig.until_all(lambda: frozen(programs), 2 * law)  # at worst at the end of the second round

    drive(test, trace=False)


@pytest.mark.logs(r"undid its freeze")
def test_who_had_the_engine_is_asked_before_the_others() -> None:
    """A hundred frozen programs of three contexts, 6000 channels: one enables a single channel."""

    async def test(rig: Costly) -> None:
        programs = [rig.busy(pid, 0, 0, 0) for pid in range(100, 200)]
        culprit = programs[57]
        used = Counter[int]()
        rig.gpus[0]._usage.exact = lambda process: used[process.pid]  # type: ignore[method-assign]
        rig.gpus[0]._keeper._used = rig.gpus[0]._usage.exact
        async with running(rig):
            for program in programs:
                await rig.gpus[0].detach(program.identity)
            await trio.sleep(3)
            rig.undo(culprit, [culprit.channels()[24]])  # of its second context's kernels
            used[culprit.pid] += 5000
            await rig.until_all(lambda: frozen(programs), SECOND)

    drive(test)


@pytest.mark.logs(r"undid its timeslice")
@pytest.mark.parametrize(("many", "contexts"), [(1, 8), (20, 3), (100, 3)])
def test_all_who_take_longer_timeslices_lose_them_within_a_second(many: int, contexts: int) -> None:
    async def test(rig: Costly) -> None:
        programs = [rig.busy(pid, *[0] * contexts) for pid in range(100, 100 + many)]
        gr = [o for p in programs for o in p.objects.values() if o.class_ == rm.CLASS_TSG and o.timeslice == 2048]
        async with running(rig):
            for program in programs:
                await rig.gpus[0].set_timeslice(program.identity, 600)
            share = {tsg.timeslice for tsg in gr}
            assert share == {600 // contexts}
            await trio.sleep(3)
            for tsg in gr:
                tsg.timeslice = 1_000_000
            await rig.until_all(lambda: {tsg.timeslice for tsg in gr} == share, SECOND)
            await trio.sleep(2)
            assert all(rig.host.brought_back[program.identity] == 1 for program in programs)

    drive(test, trace=False)


@pytest.mark.parametrize("many", [20, 100, 1000])
def test_what_keeping_costs_does_not_grow_with_the_programs(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than 200 questions a second, 4 percent of a CPU, and a tenth of one for looks at what is new. Everybody
    has his turn: every max(0.5, n / 200) s."""

    monkeypatch.setattr(discover, "FIRST_RUN", 64)  # the first looks are not what this is about

    async def test(rig: Costly) -> None:
        gpu, asked = rig.gpus[0], dict[int, list[float]]()
        for pid in range(100, 100 + many):
            rig.fake.program(pid).tsg(channels=2)
        identities = [program.identity for program in rig.fake.programs.values()]
        cost, rig.fake.before = rig.fake.before, lambda cmd: None
        async with trio.open_nursery() as nursery:
            for identity in identities:
                nursery.start_soon(gpu.detach, identity)
        rig.fake.before = cost
        gpu.managed.host = KnowsAll()  # type: ignore[assignment]
        law = max(0.5, many / 200)
        real = gpu._states.enabled

        def enabled(client: int, channel: int) -> bool | None:
            asked.setdefault(client, []).append(rig.clock.current_time())
            return real(client, channel)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(gpu._keeper.run)
            await trio.sleep(law)
            gpu._states.enabled = enabled  # type: ignore[method-assign]
            before, seconds = rig.spent, 2.5 * law
            await trio.sleep(seconds)
            assert rig.spent - before < 0.14 * seconds
            nursery.cancel_scope.cancel()
        assert len(asked) == many
        assert sum(map(len, asked.values())) <= QUESTIONS / TICK * seconds + QUESTIONS
        for times in asked.values():
            assert max(b - a for a, b in itertools.pairwise(times)) <= law * 1.1 + TICK

    drive(test, trace=False)


@pytest.mark.logs(r"undid its freeze")
def test_one_who_never_stops_costs_a_bounded_share_and_hides_nobody() -> None:
    """Twenty that undo it in a loop, one that does once: that one is found as soon, and more than a third of the time
    nobody is in the driver."""

    async def test(rig: Costly) -> None:
        loop = [rig.busy(pid, *[0] * 8) for pid in range(100, 120)]
        once = rig.busy(500, 0)
        async with running(rig):
            for program in [*loop, once]:
                await rig.gpus[0].detach(program.identity)
            await trio.sleep(3)

            async def undo() -> None:
                while True:
                    for program in loop:
                        rig.undo(program)
                    await trio.sleep(0.01)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(undo)
                await trio.sleep(1)
                before, began = rig.spent, trio.current_time()
                rig.undo(once)
                await rig.until_all(lambda: frozen([once]), SECOND)
                await trio.sleep(5)
                assert rig.spent - before < 0.67 * (trio.current_time() - began)
                nursery.cancel_scope.cancel()
            assert min(rig.host.brought_back[program.identity] for program in loop) > 5

    drive(test, trace=False)
