"""The NVIDIA GPU against a driver in memory: levers, settings that outlive a look, processes that come and go."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import trio
from trio.testing import MockClock

from backend.core.reasons import Engines
from backend.core.records import Capability
from backend.nvidia import checkpoint, rm
from backend.nvidia.deadline import Deadline
from backend.nvidia.discover import QUICK_RUN
from backend.nvidia.mover import BEGUN_S
from backend.nvidia.nvml import Nvml, sysfs_address
from backend.nvidia.opening import open_gpus
from backend.nvidia.proven import GR_ALONE
from backend.process.identity import Process
from tests.support.cuda_session import until_then
from tests.support.fake_nvidia import FakeBookkeeper, FakeNvml, FakeSystem, patient
from tests.support.nvidia_rig import ON_THE_GPU, Rig, Written, drive, running

MIB = 1 << 20


def test_gpus() -> None:
    async def test(rig: Rig) -> None:
        assert [(gpu.info.index, gpu.info.uuid, gpu.info.pci) for gpu in rig.gpus] == [
            (0, "GPU-0", "0000:01:00.0"),
            (1, "GPU-1", "0000:02:00.0"),
        ]
        assert rig.gpus[0].info.name == "NVIDIA Fake"
        assert rig.gpus[0].info.timeslice_default_us == 2048
        capabilities = rig.gpus[0].capabilities()
        assert capabilities["compute.timeslice"] is Capability.ADVISORY  # nothing was proven
        assert capabilities["gmem.limit.high"] is Capability.ADVISORY  # for programs with the library
        # The other GPU is of the same model.
        assert capabilities["compute.migrate"] is (Capability.ADVISORY if len(rig.gpus) > 1 else Capability.UNSUPPORTED)
        assert rig.gpus[0].info.granule == 2 << 20

    drive(test)


def test_address() -> None:
    assert sysfs_address("00000000:1B:00.0") == "0000:1b:00.0"
    assert sysfs_address("00010000:01:00.0") == "10000:01:00.0"


def test_timeslice_is_split_over_the_gr_tsgs_of_that_gpu() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0, 0, 1)
        await rig.gpus[0].set_timeslice(program.identity, 1000)
        tsgs = [o for o in program.objects.values() if o.class_ == rm.CLASS_TSG]
        assert [tsg.timeslice for tsg in tsgs] == [500, 1024, 1024, 1024] * 2 + [2048, 1024, 1024, 1024]
        await rig.gpus[0].set_timeslice(program.identity, 0)
        assert [tsg.timeslice for tsg in tsgs] == [2048, 1024, 1024, 1024] * 3

    drive(test)


def test_default_is_what_the_program_had() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        gr = next(o for o in program.objects.values() if o.class_ == rm.CLASS_TSG)
        gr.timeslice = 777
        await rig.gpus[0].set_timeslice(program.identity, 4000)
        assert gr.timeslice == 4000
        await rig.gpus[0].set_timeslice(program.identity, 0)
        assert gr.timeslice == 777

    drive(test)


def test_seventy_channels_are_two_calls() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5)
        program.tsg(channels=70)
        await rig.gpus[0].detach(program.identity)
        assert rig.fake.disables == [(True, 64), (True, 6)]
        assert not any(program.running())
        await rig.gpus[0].attach(program.identity)
        assert rig.fake.disables[2:] == [(False, 64), (False, 6)]
        assert all(program.running())

    drive(test)


def test_freeze_takes_every_engine_of_that_gpu_only() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0, 1)
        await rig.gpus[1].detach(program.identity)
        assert program.running() == [True] * 20 + [False] * 20
        assert rig.gpus[1].activity(program.identity).attached == 0
        assert rig.gpus[1].activity(program.identity).tsgs == 4
        assert rig.gpus[1].activity(program.identity).channels == 20
        await rig.gpus[1].attach(program.identity)
        assert rig.gpus[1].activity(program.identity).attached == 4

    drive(test)


def test_freeze_does_not_nest() -> None:
    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        async with running(rig):
            for _ in range(3):
                await rig.gpus[0].detach(program.identity)
            await trio.sleep(2)  # for a few rounds of re-applying
            assert {program.objects[channel].disabled for channel in program.channels()} == {1}
            await rig.gpus[0].attach(program.identity)
            assert all(program.running())

    drive(test)


def test_thaw_enables_what_somebody_else_disabled_again() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        await rig.gpus[0].detach(program.identity)
        for channel in program.channels():
            program.objects[channel].disabled += 2
        await rig.gpus[0].attach(program.identity)
        assert all(program.running())

    drive(test)


@pytest.mark.logs(r"pid 5 undid its freeze")
def test_a_tenant_that_undoes_its_freeze_is_frozen_again() -> None:
    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        async with running(rig):
            await rig.gpus[0].detach(program.identity)
            for channel in program.channels():
                program.objects[channel].disabled = 0
            await trio.sleep(1)
            assert {program.objects[channel].disabled for channel in program.channels()} == {1}

    drive(test)


@pytest.mark.logs(r"pid 5 undid its timeslice")
def test_a_tenant_that_takes_a_longer_timeslice_loses_it_again() -> None:
    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        gr = next(o for o in program.objects.values() if o.class_ == rm.CLASS_TSG)
        async with running(rig):
            await rig.gpus[0].set_timeslice(program.identity, 500)
            await trio.sleep(2)
            gr.timeslice = 100_000
            await trio.sleep(1)
            assert gr.timeslice == 500
        assert gr.timeslice == 2048  # released when the daemon ends

    drive(test)


def test_a_lever_does_not_ask_for_what_it_knows() -> None:
    """One call for each GR TSG whose timeslice changes, and none for the others."""

    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0, 0)
        await rig.gpus[0].set_timeslice(program.identity, 1000)

        async def calls(lever: Awaitable[None]) -> list[int]:
            before = len(rig.fake.calls)
            await lever
            return [cmd for cmd, _, _ in rig.fake.calls[before:] if cmd in ON_THE_GPU]

        assert await calls(rig.gpus[0].set_timeslice(program.identity, 3000)) == [rm.SET_TIMESLICE] * 2
        assert await calls(rig.gpus[0].set_timeslice(program.identity, 3000)) == []
        assert await calls(rig.gpus[0].detach(program.identity)) == [rm.FIFO_DISABLE_CHANNELS]
        thaw = await calls(rig.gpus[0].attach(program.identity))
        assert thaw == [rm.FIFO_DISABLE_CHANNELS, rm.FIFO_GET_CHANNEL_STATE]
        assert await calls(rig.gpus[0].set_timeslice(program.identity, 0)) == [rm.SET_TIMESLICE] * 2
        assert not rig.gpus[0]._tenant(program.identity).has_policy

    drive(test)


def test_who_is_let_go_waits_for_no_look() -> None:
    """New objects cannot be off the runlist. The handle of each known one is checked, since handles are reused."""

    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        gpu = rig.gpus[0]
        known = len(program.channels()) + len([o for o in program.objects.values() if o.class_ == rm.CLASS_TSG])

        async def handles(lever: Awaitable[None]) -> int:
            rig.fake.calls.clear()
            await lever
            return [cmd for cmd, _, _ in rig.fake.calls].count(rm.CLIENT_GET_HANDLE_INFO)

        await gpu.set_timeslice(program.identity, 3000)
        assert await handles(gpu.detach(program.identity)) > known
        assert await handles(gpu.attach(program.identity)) == known
        assert all(program.running())
        assert await handles(gpu.set_timeslice(program.identity, 4000)) == 1, "its GR TSG, of which no channel is asked"
        program.context()
        assert await handles(gpu.set_timeslice(program.identity, 6000)) > known, "the host has made something"

    drive(test)


def on_gr_alone(rig: Rig) -> None:
    """Mark the first GPU as one on which GR alone was proven."""
    rig.gpus[0]._capabilities = {**rig.gpus[0].capabilities(), GR_ALONE: Capability.ENFORCED}


def test_a_turn_asks_for_what_it_acts_on_alone() -> None:
    """For the GR TSG with its 8 channels, out of 4 TSGs and 20 channels: driver calls for each lever of a turn."""

    async def test(rig: Rig) -> None:
        program, gpu = rig.fake.program(5, 0), rig.gpus[0]
        on_gr_alone(rig)

        async def calls(lever: Awaitable[None]) -> Counter[int]:
            rig.fake.calls.clear()
            await lever
            return Counter(cmd for cmd, _, _ in rig.fake.calls)

        await gpu.set_timeslice(program.identity, 50)
        for _ in range(2):
            off = {rm.GET_CLIENT_DATABASE_INFO: 1, rm.CLIENT_GET_HANDLE_INFO: 9, rm.FIFO_DISABLE_CHANNELS: 1}
            assert await calls(gpu.detach(program.identity, Engines.GR)) == off
            on = {rm.CLIENT_GET_HANDLE_INFO: 9, rm.FIFO_DISABLE_CHANNELS: 1, rm.FIFO_GET_CHANNEL_STATE: 1}
            assert await calls(gpu.attach(program.identity)) == on
        assert await calls(gpu.detach(program.identity, Engines.GR)) == off
        # A freeze takes the other TSGs as well, and looks for new ones whatever the totals say; a thaw in another
        # program's turn puts only those others on.
        freeze = await calls(gpu.detach(program.identity))
        assert freeze[rm.CLIENT_GET_HANDLE_INFO] > 3 + 12 + QUICK_RUN
        assert not any(program.running())
        thaw = await calls(gpu.detach(program.identity, Engines.GR))
        assert thaw[rm.CLIENT_GET_HANDLE_INFO] == 3 + 12
        assert await calls(gpu.attach(program.identity)) == on
        assert all(program.running())

    drive(test)


def test_a_context_that_has_just_come_is_off_in_the_turn_of_another() -> None:
    """The host's totals show that there may be one."""

    async def test(rig: Rig) -> None:
        program, gpu = rig.fake.program(5, 0), rig.gpus[0]
        on_gr_alone(rig)
        await gpu.set_timeslice(program.identity, 1000)
        new = program.context()
        await gpu.detach(program.identity, Engines.GR)
        assert all(program.objects[channel].disabled == 1 for channel in program.channels(new))
        newest = program.context()
        await gpu.set_timeslice(program.identity, 3000)
        assert [program.objects[tsg].timeslice for tsg in (new, newest)] == [1000, 1000]

    drive(test)


@pytest.mark.parametrize("attaches", [True, False])
def test_a_handle_that_is_reused_is_not_acted_on_in_a_turn(attaches: bool) -> None:
    """It was verified a turn ago, and its class is asked for each time."""

    async def test(rig: Rig) -> None:
        program, gpu = rig.fake.program(5, 0), rig.gpus[0]
        on_gr_alone(rig)
        await gpu.detach(program.identity, Engines.GR)
        if not attaches:
            await gpu.attach(program.identity)
        gone, *left = program.channels(next(h for h, o in program.objects.items() if o.class_ == rm.CLASS_TSG))
        program.objects[gone].class_ = 0x3E
        before = program.objects[gone].disabled
        await (gpu.attach(program.identity) if attaches else gpu.detach(program.identity, Engines.GR))
        assert program.objects[gone].disabled == before
        assert {program.objects[channel].disabled for channel in left} == {0 if attaches else 1}

    drive(test)


def test_timeslices_of_what_is_gone_are_known_no_more() -> None:
    async def test(rig: Rig) -> None:
        program, gpu = rig.busy(5, 0), rig.gpus[0]
        async with running(rig):
            await gpu.set_timeslice(program.identity, 1000)
            program.destroy()
            await trio.sleep(5)
            await gpu.set_timeslice(program.identity, 0)
            assert not gpu._tenant(program.identity).has_policy

    drive(test)


def test_looks_stand_aside_while_a_lever_is_pulled() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        levers = rig.gpus[0]._tenant(program.identity).applied.handles.levers
        other = rig.gpus[1]._tenant(rig.fake.program(6, 1).identity).applied.handles.levers
        assert other is levers, "those of all programs, on all GPUs"
        at_work: dict[int, set[int]] = {}
        rig.fake.before = lambda cmd: at_work.setdefault(cmd, set()).add(len(levers._at_work))
        await rig.gpus[0].set_timeslice(program.identity, 3000)  # its first setting, for which it is looked at
        await rig.gpus[0].detach(program.identity)
        await rig.gpus[0].attach(program.identity)
        assert at_work[rm.SET_TIMESLICE] == at_work[rm.FIFO_DISABLE_CHANNELS] == {1}
        assert at_work[rm.CLIENT_GET_HANDLE_INFO] == {0, 1}, "a lever that needs a look first does not wait for itself"
        assert not levers._at_work

    drive(test)


def test_a_timeslice_that_was_refused_for_one_context_is_put_back() -> None:
    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0, 0)
        gr = [h for h, o in program.objects.items() if o.class_ == rm.CLASS_TSG and o.timeslice == 2048]
        async with running(rig):
            rig.fake.refuse = lambda cmd, client, handle: (
                rm.Status.GENERIC if cmd == rm.SET_TIMESLICE and handle == gr[1] else 0
            )
            with pytest.raises(OSError, match="GENERIC"):
                await rig.gpus[0].set_timeslice(program.identity, 1000)
            assert [program.objects[handle].timeslice for handle in gr] == [500, 2048]
            rig.fake.refuse = lambda cmd, client, handle: 0
            await trio.sleep(1)
            assert [program.objects[handle].timeslice for handle in gr] == [2048, 2048]

    drive(test)


def test_policy_reaches_contexts_that_come_later() -> None:
    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        async with running(rig):
            await rig.gpus[0].set_timeslice(program.identity, 1000)
            await rig.gpus[0].detach(program.identity)
            second = program.context()
            await trio.sleep(1)
            assert not any(program.running())
            assert program.objects[second].timeslice == 500
        assert all(program.running())

    drive(test)


def test_policy_before_the_first_context() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5)
        await rig.gpus[0].detach(program.identity)
        async with running(rig):
            program.context()
            await trio.sleep(1)
            assert not any(program.running())

    drive(test)


def test_a_lever_without_a_tsg_to_act_on_is_refused() -> None:
    """A program under MPS, or one that only draws: NVML lists it, and it has no channel group of its own."""

    async def test(rig: Rig) -> None:
        program = rig.fake.program(7)
        rig.nvml.compute[0] = [(7, 100)]
        async with running(rig):
            gpu, process = rig.gpus[0], program.identity
            await gpu.detach(process)  # new, so it may be about to make some
            await gpu.attach(process)
            await trio.sleep(3)
            for lever in (gpu.detach(process), gpu.set_timeslice(process, 500)):
                with pytest.raises(OSError, match="no channel group") as caught:
                    await lever
                assert caught.value.errno == errno.EOPNOTSUPP
            await gpu.attach(process)
            await gpu.set_timeslice(process, 0)

    drive(test)


def test_one_that_ends_as_it_is_met_leaves_nothing_behind() -> None:
    """Its files are closed and NVML still lists it: the driver has to return its memory first."""

    async def test(rig: Rig) -> None:
        ending = rig.busy(5, 0)
        files = rig.fake.control_fds

        def control_fds(pid: int) -> Sequence[int]:
            if pid == 5:
                raise ProcessLookupError(errno.ESRCH, "it ends")
            return files(pid)

        rig.fake.control_fds = control_fds
        async with running(rig):
            other = rig.busy(6, 0)
            await trio.sleep(1)
            assert rig.bookkeeper.arrived == [(other.identity, 0)]
            assert ending.identity not in rig.gpus[0]._tenants
            rig.fake.kill(5)
            rig.nvml.compute[0] = [(6, 100)]
            await trio.sleep(1)
            assert list(rig.gpus[0]._tenants) == list(rig.gpus[0]._listed._since) == [other.identity]

    drive(test)


def test_a_thaw_is_refused_to_nobody() -> None:
    """A program got a timeslice when it came and might still make TSGs, and it made none. A caller that takes it off
    the runlist gets an error, and one that puts it on again does not."""

    async def test(rig: Rig) -> None:
        program = rig.fake.program(7)
        rig.nvml.compute[0] = [(7, 100)]
        async with running(rig):
            gpu, process = rig.gpus[0], program.identity
            await gpu.set_timeslice(process, 500)
            await trio.sleep(3)
            with pytest.raises(OSError, match="no channel group"):
                await gpu.detach(process)
            await gpu.attach(process)

    drive(test)


def test_one_that_destroyed_its_contexts_is_refused_nothing() -> None:
    """A program does so some time before it ends, or before it makes others: NVML no longer lists it, nothing of it can
    run, and settings are applied to what it makes later."""

    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        async with running(rig):
            gpu, process = rig.gpus[0], program.identity
            await trio.sleep(3)
            await gpu.set_timeslice(process, 3000)
            await gpu.detach(process)
            program.destroy()
            await trio.sleep(3)
            with pytest.raises(OSError, match="no channel group"):  # NVML still says that it uses the GPU
                await gpu.set_timeslice(process, 4000)
            rig.nvml.compute[0] = []
            await gpu.attach(process)
            await gpu.set_timeslice(process, 1000)
            await gpu.detach(process)
            tsg = program.context()
            await trio.sleep(1)
            assert not any(program.running())
            assert program.objects[tsg].timeslice == 1000

    drive(test)


def test_a_list_that_does_not_come_excuses_nobody() -> None:
    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        async with running(rig):
            await trio.sleep(3)
            program.destroy()
            await trio.sleep(3)
            rig.nvml.compute[0], rig.nvml.error = [], FakeNvml.NVML_ERROR_TIMEOUT
            with pytest.raises(OSError, match="no channel group") as caught:
                await rig.gpus[0].detach(program.identity)
            assert caught.value.errno == errno.EOPNOTSUPP
            rig.nvml.error = 0

    drive(test)


def test_a_reused_handle_is_not_acted_upon() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        await rig.gpus[0].set_timeslice(program.identity, 1000)
        tsg = rig.gpus[0].tsgs(program.identity)[0]
        program.objects[tsg.handle].class_ = 0x40  # freed, and now the handle of a piece of memory
        program.objects[tsg.handle].timeslice = 0
        program.objects[tsg.channels[0]].class_ = 0x40
        await rig.gpus[0].set_timeslice(program.identity, 3000)
        await rig.gpus[0].detach(program.identity)
        assert program.objects[tsg.handle].timeslice == 0
        assert program.objects[tsg.channels[0]].disabled == 0

    drive(test)


@pytest.mark.parametrize("readback", [True, False])
@pytest.mark.parametrize("class_", [None, 0x40, rm.CLASS_TSG])
def test_a_channel_that_was_freed_before_the_call(class_: int | None, readback: bool) -> None:
    """Its number is no object's, or another's: no call names it, and every other channel is off exactly once."""

    def prepare(fake: FakeSystem, _nvml: FakeNvml) -> None:
        fake.readback = readback

    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        gpu = rig.gpus[0]
        await gpu.detach(program.identity)
        await gpu.attach(program.identity)
        victim = program.channels()[3]
        if class_ is None:
            del program.objects[victim]
        else:
            program.objects[victim].class_ = class_
        assert victim not in program.channels()
        rig.fake.disables.clear()
        await gpu.detach(program.identity)
        assert rig.fake.disables == [(True, len(program.channels()))]
        assert {program.objects[channel].disabled for channel in program.channels()} == {1}
        await gpu.attach(program.identity)
        assert all(program.running())
        assert {count for _, count in rig.fake.disables} == {len(program.channels())}
        assert class_ is None or not program.objects[victim].disabled
        assert not gpu._tenant(program.identity).has_policy

    drive(test, prepare)


@pytest.mark.parametrize("readback", [True, False])
def test_a_channel_freed_during_the_call(readback: bool) -> None:
    def prepare(fake: FakeSystem, _nvml: FakeNvml) -> None:
        fake.readback = readback

    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        victim = program.channels()[3]

        def free(cmd: int) -> None:
            if cmd == rm.FIFO_DISABLE_CHANNELS:
                program.objects.pop(victim, None)

        rig.fake.before = free
        await rig.gpus[0].detach(program.identity)
        assert {program.objects[channel].disabled for channel in program.channels()} == {1}
        await rig.gpus[0].attach(program.identity)
        assert all(program.running())

    drive(test, prepare)


@pytest.mark.parametrize(
    "status", [rm.Status.NOT_SUPPORTED, rm.Status.TIMEOUT, rm.Status.INSUFFICIENT_PERMISSIONS, rm.Status.GENERIC]
)
def test_a_refused_freeze_changes_nothing(status: rm.Status) -> None:
    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        async with running(rig):
            rig.fake.refuse = lambda cmd, client, handle: status if cmd == rm.FIFO_DISABLE_CHANNELS else 0
            with pytest.raises(OSError, match="disable channels") as caught:
                await rig.gpus[0].detach(program.identity)
            assert isinstance(caught.value, rm.RmError)
            assert caught.value.status == status
            rig.fake.refuse = lambda cmd, client, handle: 0
            await trio.sleep(2)
            assert all(program.running())

    drive(test)


def test_half_a_freeze_is_put_back() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5)
        program.tsg(channels=70)
        rig.nvml.compute[0] = [(5, 1)]

        def refuse(cmd: int, client: int, handle: int) -> int:
            return rm.Status.NO_MEMORY if cmd == rm.FIFO_DISABLE_CHANNELS and len(rig.fake.disables) == 1 else 0

        async with running(rig):
            rig.fake.refuse = refuse
            with pytest.raises(OSError, match="NO_MEMORY"):
                await rig.gpus[0].detach(program.identity)
            assert sum(program.running()) == 6
            rig.fake.refuse = lambda cmd, client, handle: 0
            await trio.sleep(1)
            assert all(program.running())

    drive(test)


@pytest.mark.parametrize(
    "when", [rm.CLIENT_GET_HANDLE_INFO, rm.GET_TIMESLICE, rm.SET_TIMESLICE, rm.FIFO_DISABLE_CHANNELS]
)
def test_death_in_the_middle(when: int) -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        await rig.gpus[0].set_timeslice(program.identity, 1000)
        program.context()

        def die(cmd: int) -> None:
            if cmd == when and 5 in rig.fake.programs:
                rig.fake.kill(5)

        rig.fake.before = die
        # The borrowed file keeps its objects until the operation ends; the next operation finds none.
        for lever in (rig.gpus[0].set_timeslice(program.identity, 2000), rig.gpus[0].detach(program.identity)):
            with trio.move_on_after(1):
                with contextlib.suppress(ProcessLookupError):
                    await lever
        with pytest.raises(ProcessLookupError):
            await rig.gpus[0].detach(program.identity)
        assert 5 not in rig.fake.programs
        assert not program.files[9].clients  # nothing keeps the dead program's memory

    drive(test)


def test_dead_before() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        rig.fake.kill(5)
        with pytest.raises(ProcessLookupError):
            await rig.gpus[0].detach(program.identity)
        rig.gpus[0].forget(program.identity)
        assert rig.gpus[0].activity(program.identity).tsgs == 0

    drive(test)


def test_a_lever_that_is_late_notes_nothing_of_the_dead() -> None:
    """It was in progress in a thread when the program was forgotten: no later step would drop its timeslices."""

    async def test(rig: Rig) -> None:
        gpu, program = rig.gpus[0], rig.fake.program(5, 0)
        gpu.notes = written = Written()
        await gpu.set_timeslice(program.identity, 500)
        assert list(written.notes) == [program.identity]
        tenant = gpu._tenants[program.identity]
        gpu.forget(program.identity)
        tenant.applied.timeslice_us = 700
        await tenant.enforce()
        assert written.notes == {}

    drive(test)


def test_a_hung_driver_costs_one_wait_and_one_thread() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        other = rig.fake.program(6, 0)
        await rig.gpus[0].set_timeslice(program.identity, 1000)
        rig.fake.hang = {rm.FIFO_DISABLE_CHANNELS}
        start = trio.current_time()
        with pytest.raises(OSError, match="does not answer") as caught:
            await rig.gpus[0].detach(program.identity)
        assert caught.value.errno == errno.ETIMEDOUT
        assert 2 <= trio.current_time() - start < 3
        start = trio.current_time()
        for _ in range(10):
            with pytest.raises(OSError, match="does not answer"):
                await rig.gpus[0].detach(program.identity)
        assert trio.current_time() - start < 0.5
        assert rig.fake.stuck == 1
        await rig.gpus[0].set_timeslice(other.identity, 1000)  # the others are not held up
        rig.fake.hang = set()
        rig.fake.release.set()
        with trio.fail_after(60):
            while True:  # until its thread has come back
                with contextlib.suppress(TimeoutError):
                    await rig.gpus[0].detach(program.identity)
                    break
                await trio.sleep(0.01)
        assert not any(program.running())
        await rig.gpus[0].attach(program.identity)
        assert all(program.running())

    drive(test)


def test_a_freeze_that_timed_out_does_not_happen_later() -> None:
    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        async with running(rig):
            rig.fake.hang = {rm.FIFO_DISABLE_CHANNELS}
            with pytest.raises(OSError, match="does not answer"):
                await rig.gpus[0].detach(program.identity)
            rig.fake.hang = set()
            rig.fake.release.set()
            await until_then(lambda: not rig.fake.stuck and all(program.running()))
            await trio.sleep(3)
            assert all(program.running())

    drive(test)


def test_deadline_lets_the_next_caller_in_when_the_thread_is_back() -> None:
    async def main() -> None:
        release = threading.Event()
        deadline = Deadline("it", 1.0)
        with pytest.raises(OSError, match="it does not answer"):
            await deadline.call(release.wait)
        with pytest.raises(OSError, match="it does not answer"):
            await deadline.call(lambda: 1)
        release.set()
        with trio.move_on_after(60):
            while True:
                try:
                    assert await deadline.call(lambda: 2) == 2
                    return
                except OSError:
                    await trio.sleep(0.01)
        raise AssertionError("still refused")

    clock = MockClock(autojump_threshold=0.005)
    with patient(clock, lambda: True):
        trio.run(main, clock=clock)


# ---- processes that come and go --------------------------------------------------------------------------------


def test_arrivals_and_memory() -> None:
    async def test(rig: Rig) -> None:
        first = rig.busy(5, 0, nbytes=700)
        async with running(rig):
            # The first look is done by the time that run() reports its start.
            assert rig.bookkeeper.arrived == [(first.identity, 0)]
            assert rig.bookkeeper.seen == {(first.identity, 0): 700}
            start = trio.current_time()
            second = rig.busy(6, 0, nbytes=None)
            while (second.identity, 0) not in rig.bookkeeper.arrived:  # noqa: ASYNC110 - found by polling
                await trio.sleep(0.01)
            assert trio.current_time() - start < 0.5
            assert rig.gpus[0].activity(second.identity).tsgs == 4
            assert (second.identity, 0) not in rig.bookkeeper.seen  # the driver does not report it
            rig.nvml.compute[0] = [(5, 900), (6, 50), (5, 900)]  # listed twice
            rig.nvml.graphics[0] = [(5, 900)]
            await trio.sleep(0.5)
            assert rig.bookkeeper.seen == {(first.identity, 0): 900, (second.identity, 0): 50}
            rig.nvml.compute[0] = [(6, 50)]
            rig.nvml.graphics[0] = []
            await trio.sleep(0.5)
            assert rig.bookkeeper.seen[first.identity, 0] == 0
            rig.fake.kill(6)
            rig.gpus[0].forget(second.identity)
            await trio.sleep(0.5)
            assert rig.bookkeeper.arrived == [(first.identity, 0), (second.identity, 0)]

    drive(test)


def test_a_recycled_pid_arrives_anew() -> None:
    async def test(rig: Rig) -> None:
        old = rig.busy(5, 0)
        async with running(rig):
            rig.fake.kill(5)
            rig.gpus[0].forget(old.identity)
            new = rig.fake.program(5, 0, start=old.start + 7)
            await trio.sleep(1)
            assert [process for process, _ in rig.bookkeeper.arrived] == [old.identity, new.identity]

    drive(test)


def test_arrival_may_freeze() -> None:
    async def test(rig: Rig) -> None:
        rig.bookkeeper.on_arrive = {5: rig.gpus[0].detach}
        program = rig.busy(5, 0)
        async with running(rig):
            assert not any(program.running())
        assert all(program.running())  # after the end nothing would thaw it

    drive(test)


def test_what_a_crashed_daemon_left_frozen_is_thawed() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.programs[5]
        assert not any(program.running())
        async with running(rig):
            await trio.sleep(1)
            assert all(program.running())

    def prepare(fake: FakeSystem, nvml: FakeNvml) -> None:
        program = fake.program(5, 0, start=1)
        nvml.compute[0] = [(5, 1)]
        for channel in program.channels():
            program.objects[channel].disabled = 1

    drive(test, prepare)


def test_a_freeze_that_a_crashed_daemon_left_is_taken_over() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.programs[5]
        await rig.gpus[0].detach(program.identity)
        assert {program.objects[channel].disabled for channel in program.channels()} == {1}
        await rig.gpus[0].attach(program.identity)
        assert all(program.running())

    def prepare(fake: FakeSystem, _nvml: FakeNvml) -> None:
        program = fake.program(5, 0, start=1)
        for channel in program.channels():
            program.objects[channel].disabled = 1

    drive(test, prepare)


@pytest.mark.logs(r"pid 6 undid its timeslice")
def test_levers_that_follow_each_other_do_not_stop_the_rounds() -> None:
    async def test(rig: Rig) -> None:
        program, other = rig.busy(5, 0), rig.busy(6, 0)
        gr = next(o for o in other.objects.values() if o.class_ == rm.CLASS_TSG)
        async with running(rig):
            await rig.gpus[0].set_timeslice(other.identity, 500)
            await trio.sleep(2)
            gr.timeslice = 9000
            for _ in range(10):
                await rig.gpus[0].detach(program.identity)
                await rig.gpus[0].attach(program.identity)
                await trio.sleep(0.15)
            assert gr.timeslice == 500

    drive(test)


@pytest.mark.logs(r"no list of processes")
def test_nvml_that_fails_and_comes_back() -> None:
    async def test(rig: Rig) -> None:
        async with running(rig):
            rig.nvml.error = FakeNvml.NVML_ERROR_TIMEOUT
            await trio.sleep(1)
            rig.nvml.error = 0
            program = rig.busy(5, 0)
            await trio.sleep(1)
            assert rig.bookkeeper.arrived == [(program.identity, 0)]

    drive(test)


@pytest.mark.logs(r"no list of processes: .*NVML does not answer")
def test_nvml_that_hangs_costs_one_thread_and_no_lever() -> None:
    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        async with running(rig):
            rig.nvml.hang = True
            calls = rig.nvml.calls
            await trio.sleep(6)
            assert rig.nvml.stuck == 1
            assert rig.nvml.calls == calls + 1
            await rig.gpus[0].detach(program.identity)
            assert not any(program.running())
            rig.nvml.hang = False
            rig.nvml.release.set()
            later = rig.busy(6, 0)
            await until_then(lambda: (later.identity, 0) in rig.bookkeeper.arrived)

    drive(test)


@pytest.mark.parametrize("error", [FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND, FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver(error: int) -> None:
    async def main() -> None:
        with pytest.raises(OSError, match="NVML") as caught:
            await open_gpus(system=FakeSystem(), nvml=Nvml(FakeNvml(error=error)))  # type: ignore[arg-type]
        assert caught.value.errno == errno.ENODEV

    trio.run(main, clock=MockClock())  # which stands still, however busy the machine is


def test_memory_cannot_be_moved() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        with pytest.raises(OSError, match="cannot be moved") as caught:
            await rig.gpus[0].reclaim(program.identity, 1)
        assert caught.value.errno == errno.EOPNOTSUPP
        assert not rig.gpus[0].manages(program.identity)

    drive(test)


@pytest.mark.logs(r"pid 5 on GPU 0: its TSGs are unknown")
def test_a_program_that_we_may_not_look_into_arrives_all_the_same() -> None:
    async def test(rig: Rig) -> None:
        def refuse(pidfd: int, fd: int) -> int:
            raise PermissionError(errno.EPERM, "no CAP_SYS_PTRACE")

        rig.fake.pidfd_getfd = refuse  # type: ignore[method-assign]
        program = rig.busy(5, 0)
        async with running(rig):
            assert rig.bookkeeper.arrived == [(program.identity, 0)]
            with pytest.raises(PermissionError):
                await rig.gpus[0].detach(program.identity)

    drive(test)


@pytest.mark.parametrize("speaks", [False, True])
def test_what_was_seen_of_one_before_it_was_met_is_old(monkeypatch: pytest.MonkeyPatch, *, speaks: bool) -> None:
    """The program allocates while it is being looked at: its books do not go back to the first figure."""

    async def test(rig: Rig) -> None:
        gpu, mover = rig.gpus[0], SimpleNamespace(end=lambda: None, counts=lambda gpu: None)
        seen: list[int] = []
        books = SimpleNamespace(current=0, swap=0, frozen=False)
        monkeypatch.setattr(FakeBookkeeper, "observe", lambda bookkeeper, process, gpu, nbytes: seen.append(nbytes))
        monkeypatch.setattr(FakeBookkeeper, "levels", lambda bookkeeper, process, gpu: [books])

        async def arrive(process: Process) -> None:
            rig.nvml.compute[0] = [(5, 2000 * MIB)]
            if speaks:
                gpu.managed.begin(process, mover, 1500 * MIB, 0)  # type: ignore[arg-type]
            await trio.sleep(1)

        rig.bookkeeper.on_arrive = {5: arrive}
        async with running(rig):
            program = rig.busy(5, 0, nbytes=600 * MIB)
            await trio.sleep(2)
            assert gpu.manages(program.identity) == speaks
            assert min(seen) >= 1500 * MIB
            assert seen[-1] == 2000 * MIB

    drive(test)


def answering(said: Callable[[int], bool]) -> Callable[[int], Awaitable[bool]]:
    """Return a function that says whether the library is in a program, by `said`."""

    async def has_library(pid: int) -> bool:
        return said(pid)

    return has_library


def test_one_that_was_moved_is_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bytes that the driver counts for it; what this GPU knew of it is forgotten, and known there."""
    # The real process with that pid may not be looked at.
    monkeypatch.setattr("backend.nvidia.memory.has_library", answering(lambda pid: False))

    async def test(rig: Rig) -> None:
        program = rig.busy(77, 0, nbytes=4096)
        process = Process(77, program.start)
        asked: list[tuple[object, ...]] = []

        async def move(*words: object) -> None:
            asked.append(words)
            rig.nvml.compute[0].clear()

        async with running(rig):
            await trio.sleep(1)
            assert rig.gpus[0].mover is rig.gpus[1].mover is not None
            rig.gpus[0].mover.move = move  # type: ignore[method-assign, assignment]
            await rig.gpus[0].migrate(process, rig.gpus[1])
            assert asked == [(process, rig.gpus[0].info, rig.gpus[1].info, 4096)]
            assert process not in rig.gpus[0]._tenants
            assert process not in rig.gpus[0]._listed._since
            await trio.sleep(1)
            assert process not in rig.gpus[0]._listed._since

    drive(test)


def test_one_that_cannot_be_moved_is_refused_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose library is not connected (its memory in the host is not restored by the driver), or one of
    unknown size."""

    async def test(rig: Rig) -> None:
        program = rig.busy(77, 0, nbytes=None)
        process = Process(77, program.start)
        async with running(rig):
            await trio.sleep(1)
            with pytest.raises(OSError, match="does not say") as refused:
                await rig.gpus[0].migrate(process, rig.gpus[1])
            assert refused.value.errno == errno.EOPNOTSUPP
            rig.nvml.compute[0] = [(77, 4096)]
            monkeypatch.setattr("backend.nvidia.memory.has_library", answering(lambda pid: pid == 77))
            with pytest.raises(OSError, match="library") as refused:
                await rig.gpus[0].migrate(process, rig.gpus[1])
            assert refused.value.errno == errno.EBUSY
            assert process in rig.gpus[0]._listed._since

    drive(test)


def test_where_a_program_that_was_moved_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NVML says at that moment, once it is known that no agent is at work."""
    monkeypatch.setattr(checkpoint, "left", tuple)

    async def test(rig: Rig) -> None:
        program = rig.busy(5, 1)
        async with running(rig):
            assert [await gpu.finds(program.identity) for gpu in rig.gpus] == [None, None]
            await trio.sleep(BEGUN_S + 0.1)
            assert [await gpu.finds(program.identity) for gpu in rig.gpus] == [False, True]
            rig.nvml.compute = {0: [(5, 100)]}
            assert [await gpu.finds(program.identity) for gpu in rig.gpus] == [True, False]
            rig.gpus[0].lost = True
            assert await rig.gpus[0].finds(program.identity) is None
            rig.gpus[0].lost = False

    drive(test)


def test_a_gpu_whose_name_is_no_text_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """pynvml decodes the driver's name for it, and raises an error if that is not UTF-8."""

    def ask(device: int, buffer: Any, size: object) -> int:
        buffer.value = b"NVIDIA \xff\n9"
        return 0

    def pointer(name: str) -> Callable[..., int]:
        return ask

    class Odd(FakeNvml):
        nvmlDeviceGetName = staticmethod(pynvml.nvmlDeviceGetName)

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", pointer)
    with pytest.raises(UnicodeDecodeError):
        pynvml.nvmlDeviceGetName(0)
    (gpu, *_) = trio.run(Nvml(Odd()).gpus)  # type: ignore[arg-type]
    assert gpu.name == r"NVIDIA \xff\n9"
