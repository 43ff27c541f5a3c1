"""Reasons to be off the runlist: the hardware has their union, for any history, with no call too many."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from backend.core.reasons import FROZEN, ON, Engines, Off, Reason, counted, reasons_of
from backend.core.records import Place
from backend.ledgers.journal import format, state
from backend.ledgers.journal.file import RETRY_S, Journal
from backend.ledgers.journal.ledger import JournaledLedger
from backend.ledgers.journal.levers import JournaledGpu
from backend.nvidia import discover, rm
from backend.nvidia.deadline import Deadline, Precedence
from backend.nvidia.discover import ClientCounter, Handles
from backend.nvidia.readback import ChannelStates
from backend.nvidia.tenant import Tenant
from backend.process.identity import ROOT, Member, identify
from backend.soft.config import MIB, SoftConfig
from backend.soft.gpu import SoftGpu
from tests.support.fake_nvidia import GPU_IDS, FakeSystem, Object, Program
from tests.support.harness import Harness, StubGpu, running, settle, virtual
from tests.support.journaled import let_go

Spawn = Callable[..., subprocess.Popen[bytes]]
REASONS = tuple(Reason)
TAKING = (Engines.GR, Engines.ALL)
GR_CHANNELS, COPY_CHANNELS = 8, 12

CALLS = {
    (Engines.NONE, Engines.GR): (True, GR_CHANNELS),
    (Engines.NONE, Engines.ALL): (True, GR_CHANNELS + COPY_CHANNELS),
    (Engines.GR, Engines.ALL): (True, COPY_CHANNELS),
    (Engines.ALL, Engines.GR): (False, COPY_CHANNELS),
    (Engines.GR, Engines.NONE): (False, GR_CHANNELS),
    (Engines.ALL, Engines.NONE): (False, GR_CHANNELS + COPY_CHANNELS),
}
"""The single call, and its number of channels, for each change of what is off, for a program with one context."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try fewer handles where there are none."""
    monkeypatch.setattr(discover, "FIRST_RUN", 32)
    monkeypatch.setattr(discover, "WIDE_RUN", 32)


def tenant_of(fake: FakeSystem, program: Program, *, began: int = 0) -> Tenant:
    """Return a program's tenant, as kept by a daemon that began at that time."""
    waits = Deadline("it", 1.0)
    handles = Handles(fake, ClientCounter(fake), program.identity, Precedence(1.0))  # type: ignore[arg-type]
    states = ChannelStates(fake, rm.Card(GPU_IDS[0], "0000:01:00.0", 0))  # type: ignore[arg-type]
    return Tenant(program.identity, handles, waits, waits, fake, GPU_IDS[0], states, began=began)


def disabled(program: Program) -> Iterator[tuple[bool, int]]:
    """Yield for each channel on the first GPU whether its TSG runs kernels, and how often it is disabled."""
    objects = program.objects
    kernels = {one.parent for one in objects.values() if one.class_ == 0xCBC0}  # channels of kernels
    gr = {objects[channel].parent for channel in kernels}
    for channel in program.channels():
        tsg = objects[objects[channel].parent]
        if tsg.parent == program.devices[0]:
            yield objects[channel].parent in gr, objects[channel].disabled


def holds(program: Program, engines: Engines) -> bool:
    """Return whether exactly these engines are off, each channel disabled once, since disabling nests."""
    off = {True: int(engines is not Engines.NONE), False: int(engines is Engines.ALL)}
    return all(count == off[gr] for gr, count in disabled(program))


@pytest.mark.parametrize("one", REASONS)
def test_each_pair_of_reasons(one: Reason) -> None:
    """Engines that one reason holds stay off when another ends; each change of the union is one call."""
    for other, first, second in itertools.product(REASONS, TAKING, TAKING):
        if other is one:
            continue
        fake = FakeSystem()
        program = fake.program(5, 0)
        tenant = tenant_of(fake, program)
        sets = [ON, ON.with_(one, first)]
        sets.append(sets[-1].with_(other, second))
        sets += [sets[-1].without(one), ON]
        assert sets[2].engines is first | second
        assert sets[3].engines is second
        before = Engines.NONE
        for off in sets:
            fake.disables.clear()
            tenant.applied.engines = off.engines
            tenant.enforcement.enforce(False)
            assert holds(program, off.engines), (one, other, first, second, off)
            assert not tenant.applied.is_behind
            assert tuple(fake.disables) == ((CALLS[before, off.engines],) if off.engines is not before else ())
            before = off.engines


def test_a_set_of_reasons() -> None:
    """A reason takes what it was last told to take, and the hardware has the union."""
    off = FROZEN.with_(Reason.TURN, Engines.GR)
    assert (off.engines, off.without(Reason.FREEZE).engines, off.without(Reason.TURN)) == (
        Engines.ALL,
        Engines.GR,
        FROZEN,
    )
    assert off.with_(Reason.TURN, Engines.NONE) == FROZEN
    assert off.with_(Reason.FREEZE, Engines.GR).engines is Engines.GR
    assert off | Off(Reason.TURN) == Off(Reason.FREEZE | Reason.TURN)
    assert not ON
    assert reasons_of(1 << 20 | 3) == Reason.FREEZE | Reason.TURN
    assert [reason.value for reason in Reason] == [1, 2, 4, 8, 16, 32], "they stand in journals and in the module's ABI"


@pytest.mark.parametrize("engines", Engines)
@pytest.mark.parametrize("off", [ON, FROZEN, Off(gr=Reason.TURN), Off(Reason.FREEZE, Reason.TURN)], ids=str)
def test_noted_reasons_are_fitted_to_the_hardware(off: Off, engines: Engines) -> None:
    """Whatever was noted when a daemon was killed, the next one's belief matches the engines that are off."""
    assert off.held_in(engines).engines is engines
    if off.engines is engines:
        assert off.held_in(engines) == off


class History(RuleBasedStateMachine):
    """Any history of reasons, of the program, and of daemons that are killed."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeSystem()
        self.program = self.fake.program(5, 0, 1)
        self.off = ON
        self.tenant = tenant_of(self.fake, self.program)
        self._enforce()

    def _enforce(self) -> None:
        self.tenant.applied.engines = self.off.engines
        self.tenant.enforcement.enforce(False)

    @rule(reason=st.sampled_from(REASONS), engines=st.sampled_from(TAKING))
    def take(self, reason: Reason, engines: Engines) -> None:
        self.off = self.off.with_(reason, engines)
        self._enforce()

    @rule(reason=st.sampled_from(REASONS))
    def end(self, reason: Reason) -> None:
        self.off = self.off.without(reason)
        self._enforce()

    @rule()
    def makes_a_context(self) -> None:
        """Make new TSGs, which the next look finds."""
        if len(self.program.objects) < 400:
            self.program.context(0)
            self.tenant.enforcement.look(True)
            self._enforce()

    @rule(data=st.data())
    def undoes(self, data: st.DataObject) -> None:
        """Have the program enable what is off: the keeper notices, and it is off again."""
        off = [h for h in self.program.channels() if self.program.objects[h].disabled]
        if off:
            channel: Object = self.program.objects[data.draw(st.sampled_from(off))]
            channel.disabled = 0
            rounds = 3 * len(self.program.channels())
            assert any(self.tenant.questions.is_thawed() for _ in range(rounds)), "it is asked for"
            assert self.tenant.enforcement.enforce(True) == "freeze"

    @rule()
    def killed(self) -> None:
        """Kill the daemon: the next one finds what is off, and goes on from there."""
        self.tenant.enforcement._states.close()
        self.tenant = tenant_of(self.fake, self.program, began=1 << 62)
        self._enforce()

    @invariant()
    def the_hardware_has_the_union(self) -> None:
        assert holds(self.program, self.off.engines)
        assert all(self.program.running()[20:40]), "its other GPU"
        assert not self.tenant.applied.is_behind

    def teardown(self) -> None:
        self.tenant.enforcement._states.close()


def test_any_history() -> None:
    """After each step the hardware has the union of the reasons."""
    few = settings(max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(History, settings=few)


def test_a_tsg_of_which_nothing_is_known_runs_no_kernel() -> None:
    """Its channels do not show yet what they run on: without GR it is off, and on again once it is a copy TSG."""
    fake = FakeSystem()
    program = fake.program(5, 0)
    tsg = program.add(0xA06C, program.device(0), timeslice=1024)
    channel = program.add(0xC86F, tsg)
    tenant = tenant_of(fake, program)
    tenant.applied.engines = Engines.GR
    tenant.enforcement.enforce(False)
    assert program.objects[channel].disabled == 1
    program.add(0xC8B5, channel)
    tenant.enforcement.look(True)
    assert tenant.applied.is_behind
    tenant.enforcement.enforce(False)
    assert program.objects[channel].disabled == 0


def test_counted() -> None:
    """Each process counts once for each of its reasons; `gr` counts those with no other engine off."""
    none = {"freeze": 0, "turn": 0, "quota": 0, "busy": 0, "gang": 0, "migration": 0, "gr": 0}
    assert counted([]) == counted([ON, Off()]) == none
    both, turn, gang = Off(Reason.FREEZE, Reason.TURN), Off(gr=Reason.TURN), Off(Reason.GANG)
    found = counted([both, ON, turn, gang, turn])
    assert found == none | {"freeze": 1, "turn": 3, "gang": 1, "gr": 2}
    assert list(found) == list(none), "as the file has them, whatever there is"


async def off(h: Harness, path: str) -> dict[str, int]:
    """Return the reasons in gcgroup.stat that any process has."""
    stat = (line.split() for line in (await h.read(f"{path}/0/gcgroup.stat")).splitlines())
    return {key: int(value) for key, value in stat if key.startswith("off_") and value != "0"}


@virtual
async def test_gcgroup_stat_says_why(spawn: Spawn) -> None:
    """For a process and the slices above it, from the lever's move on; another daemon goes on from the books."""
    gpu = StubGpu()
    async with running(gpu, StubGpu(1)) as h:
        program = spawn()
        one, two = [await h.arrive(pid, cgroup="/job/part") for pid in (program.pid, spawn().pid)]
        follower, where = h.controller._follower, "slice/job"
        for place in (Place(off=True, engines=Engines.GR), Place(off=True), Place()):
            follower.schedule(Member(one, 0), place)
            await follower.apply(Member(one, 0))
            said = {"off_turn": 1, "off_gr": 1} if place.off and place.engines is Engines.GR else {"off_turn": 1}
            assert await off(h, str(one.pid)) == await off(h, where) == (said if place.off else {})
        follower.schedule(Member(one, 0), Place(off=True, engines=Engines.GR))
        await follower.apply(Member(one, 0))
        await h.write("slice/job/0/compute.freeze", 1)
        assert await off(h, str(one.pid)) == {"off_freeze": 1, "off_turn": 1}
        assert await off(h, str(two.pid)) == {"off_freeze": 1}
        assert await off(h, where) == {"off_freeze": 2, "off_turn": 1}
        assert h.controller.books(Member(one, 0)).off_gr == Reason.TURN.value, "as the books say"
        program.kill()
        await h.gone(one)
        assert await off(h, where) == await off(h, "slice/job/part") == {"off_freeze": 1}
        await h.write("slice/job/0/compute.freeze", 0)
        assert await off(h, where) == {}
        async with follower.released(Member(two, 0), Member(two, 1)):
            assert await off(h, where) == {"off_migration": 1}
        assert await off(h, where) == {}


@virtual
async def test_books_that_fail_and_a_gpu(spawn: Spawn) -> None:
    """The GPU knows what is applied, whatever the books say, but of a process that is gone it is told nothing more."""
    gpu, told = StubGpu(), list[Off]()
    gpu.note_reasons = lambda process, off: told.append(off)  # type: ignore[method-assign]
    async with running(gpu) as h:
        one = Member(await h.arrive(spawn().pid), 0)
        follower = h.controller._follower

        async def place(off: bool) -> None:
            follower.schedule(one, Place(off=off))
            await follower.apply(one)

        await place(True)
        assert told[-1] == Off(Reason.TURN)
        with (
            mock.patch.object(h.ledger, "set_reasons", side_effect=OSError(errno.EIO, "no books")),
            pytest.raises(OSError, match="no books"),
        ):
            await place(False)
        assert told[-1] == ON
        await place(True)
        told.clear()
        with mock.patch.object(h.ledger, "set_reasons", side_effect=OSError(errno.ENODEV, "gone")):
            await place(False)
        assert not told


@contextlib.contextmanager
def journal_at(path: Path) -> Iterator[Journal]:
    """Yield the journal of a daemon that is killed at the end."""
    journal = Journal(path, boot="b")
    try:
        yield journal
    finally:
        let_go(journal)


@virtual
async def test_a_lever_of_a_turn_is_two_writes(spawn: Spawn, tmp_path: Path) -> None:
    """The reason for being off is in the write that announces the lever; being on is in the next one."""
    gpu, path = StubGpu(), tmp_path / "one.journal"
    with journal_at(path) as journal:
        seen: list[Off] = []

        async def look() -> None:
            found = format.read(path.read_bytes()).state
            seen.extend(off for key, off in found.reasons.items() if found.levers[key].moving)

        async with running(JournaledGpu(gpu, journal), ledger=JournaledLedger(journal, {0: gpu.info.uuid})) as h:
            one, two = [Member(await h.arrive(spawn().pid), 0) for _ in range(2)]
            follower = h.controller._follower

            async def writes(group: Member, place: Place) -> int:
                """Return the number of writes for another place of a program."""
                journal.commit()
                before = path.read_bytes().count(b"\n")
                follower.schedule(group, place)
                await follower.apply(group)
                return path.read_bytes().count(b"\n") - before

            off = Place(off=True, engines=Engines.GR)
            gpu.script("detach", look)
            assert await writes(one, off) == 2, "what is about to be, and what is"
            assert seen == [Off(gr=Reason.TURN)], "before the lever moves"
            assert await writes(one, Place()) == 2
            assert format.read(path.read_bytes()).state.reasons, "not known yet, and not needed: the hardware has less"
            for place in (off, Place(), off):
                follower.schedule(two, place)
                await follower.apply(two)
            found = format.read(path.read_bytes()).state
            assert {key[1]: why for key, why in found.reasons.items()} == {two.process: Off(gr=Reason.TURN)}
            assert found.reasons == journal.state.reasons


@virtual
async def test_what_is_written_later_is_written_soon(tmp_path: Path) -> None:
    """With the next commit, in one line and before it; by itself within a second; and at a clean end."""
    path, key = tmp_path / "one.journal", ("GPU-a", identify(os.getpid()))
    off = state.reasons(key, FROZEN)

    def known() -> bool:
        found = format.read(path.read_bytes()).state
        assert found.reasons.keys() <= found.groups.keys()
        return key in found.reasons

    with journal_at(path) as journal:
        journal.commit(state.gpu("GPU-a"), state.add(key, ROOT))
        journal.later(off)
        assert key in journal.state.reasons
        assert not known()
    again = Journal(path, boot="b")
    assert key not in again.state.reasons, "that daemon was killed"
    again.later(off)
    lines = path.read_bytes().count(b"\n")
    again.commit(state.remove(key))
    assert path.read_bytes().count(b"\n") == lines + 1
    assert not known(), "its group has left after that"
    again.commit(state.add(key, ROOT))
    again.later(off)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(again.run)
        await trio.sleep(RETRY_S / 2)
        assert not known()
        await trio.sleep(RETRY_S)
        assert known()
        nursery.cancel_scope.cancel()
    again.later(state.reasons(key, ON))
    again.close()
    assert not known()


@pytest.mark.logs("forgets", "is kept again")
def test_what_is_to_be_written_is_not_written_behind_a_state_that_has_it(tmp_path: Path) -> None:
    """The disk failed meanwhile: a deferred record is part of the rewritten file, or is obsolete."""
    path, key, now = tmp_path / "one.journal", ("GPU-a", identify(os.getpid())), [0.0]
    with journal_at(path) as journal:
        journal._clock = lambda: now[0]
        journal.commit(state.gpu("GPU-a"), state.add(key, ROOT))
        journal.later(state.reasons(key, FROZEN))
        with mock.patch("backend.ledgers.journal.file.os.fdatasync", side_effect=OSError(errno.EIO, "EIO")):
            journal.sync()
        journal.commit(state.remove(key))
        now[0] += RETRY_S
        journal.commit()
        journal.commit(state.gpu("GPU-b"))
        found = format.read(path.read_bytes()).state
        assert found == journal.state
        assert (found.groups.keys(), found.reasons) == ({("GPU-a", ROOT), ("GPU-b", ROOT)}, {})


@virtual
async def test_a_thaw_in_a_turn_of_another(spawn: Spawn) -> None:
    """It puts the copy engines on and leaves GR off; compute.events reports only the freeze."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid)
        group, follower = Member(who, 0), h.controller._follower
        place = Place(off=True, engines=Engines.GR)

        async def turn(place: Place) -> None:
            follower.schedule(group, place)
            await follower.apply(group)

        await turn(place)
        assert (gpu.without_gr, gpu.detached) == ({who}, set())
        assert "frozen 0" in await h.read(f"{who.pid}/0/compute.events")
        await h.write(f"{who.pid}/0/compute.freeze", 1)
        assert (gpu.without_gr, gpu.detached) == (set(), {who})
        assert "frozen 1" in await h.read(f"{who.pid}/0/compute.events")
        await h.write(f"{who.pid}/0/compute.freeze", 0)
        assert (gpu.without_gr, gpu.detached) == ({who}, set())
        assert "frozen 0" in await h.read(f"{who.pid}/0/compute.events")
        await h.write(f"{who.pid}/0/compute.freeze", 1)
        calls = len(gpu.calls)
        await turn(Place())
        assert gpu.detached == {who}, "still frozen"
        assert len(gpu.calls) == calls, "the union is the same: no lever is pulled"
        await h.write(f"{who.pid}/0/compute.freeze", 0)
        assert (gpu.without_gr, gpu.detached) == (set(), set())
        await settle()


class Told:
    """A host that accepts whatever a software GPU says."""

    async def arrive(self, process: object, gpu: int) -> None:
        pass

    async def charge(self, process: object, gpu: int, nbytes: int) -> None:
        pass

    async def enter(self, process: object, uid: int) -> int:
        return 0

    def space_of(self, process: object) -> None:
        return None

    def __getattr__(self, name: str) -> object:
        return lambda *args, **keywords: True


@virtual
async def test_without_gr_copies_and_moves_go_on_in_software(spawn: Spawn) -> None:
    """Kernels stop; without any engine copies wait, too, and later go on where they were."""
    gpu = SoftGpu(0, SoftConfig(capacity=64 * MIB, page=MIB))
    gpu._bookkeeper = Told()  # type: ignore[assignment]
    gpu._engine.start()
    who = identify(spawn().pid)
    tsg = await gpu.open_context(who, 1, lambda finished: None)
    await gpu.allocate(who, 4 * MIB)
    await gpu.launch(who, tsg, 10_000, 1000, range(0))

    async def progress() -> tuple[int, int]:
        before = gpu.activity(who).finished, gpu._tenant(who).copied
        await trio.sleep(0.1)
        return (gpu.activity(who).finished or 0) - (before[0] or 0), gpu._tenant(who).copied - before[1]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(gpu.copy, who, 1 << 50)
        kernels, copied = await progress()
        assert kernels > 0
        assert copied > 0
        await gpu.detach(who, Engines.GR)
        kernels, copied = await progress()
        assert kernels == 0
        assert copied > 0
        assert await gpu.reclaim(who, 2 * MIB) == 2 * MIB
        await gpu.detach(who)
        await trio.sleep(0.1)  # until running work has ended
        assert await progress() == (0, 0)
        await gpu.detach(who, Engines.GR)
        kernels, copied = await progress()
        assert kernels == 0
        assert copied > 0, "thawed in the turn of another"
        await gpu.attach(who)
        kernels, copied = await progress()
        assert kernels > 0
        assert copied > 0
        nursery.cancel_scope.cancel()
