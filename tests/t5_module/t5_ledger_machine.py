"""KernelLedger against the naive books and against SoftLedger: the same histories, with live processes.

Also what only books in the kernel can show: that they outlive their daemon, and that levers are moved through them.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from hypothesis.stateful import invariant, run_state_machine_as_test

from backend.core.protocols import Ledger
from backend.core.reasons import FROZEN
from backend.core.records import MAX, NOBODY, Books, Channel, Wanted
from backend.core.settings import TIMESLICE
from backend.door.wire import Op
from backend.ledgers import abi, kernel
from backend.ledgers.kernel import KernelLedger
from backend.ledgers.provider import ProviderGpu
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Member, Process, Slice, SliceOn, group_on, identify
from tests.support.harness import StubGpu, hang, refuses, until
from tests.support.ledger_machine import CAPACITIES, LedgerMachine, Twins
from tests.support.strategies import history

Spawn = Callable[..., subprocess.Popen[bytes]]

SECONDS = 60.0
"""Seconds that a lever may take in an emulated machine."""


def uuids(count: int) -> dict[int, str]:
    """Return names of GPUs that no other test has."""
    return {index: f"GPU-{uuid.uuid4()}" for index in range(count)}


@contextlib.contextmanager
def keeping(names: dict[int, str], *, forget: bool = True) -> Iterator[KernelLedger]:
    """Yield the books of these GPUs; without `forget` they stay at the end."""
    ledger = KernelLedger(names, temporary=names if forget else ())
    try:
        yield ledger
    finally:
        ledger.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Sequence[Process]]:
    """Five idle processes."""
    children = [subprocess.Popen(["sleep", "6000"]) for _ in range(5)]
    yield tuple(identify(child.pid) for child in children)
    for child in children:
        child.kill()
        child.wait()


# Histories


class KernelMachine(LedgerMachine):
    """The machine on books in the kernel, with GPUs of its own for every history."""

    kernel: KernelLedger

    def make_ledger(self) -> Ledger:
        self.kernel = KernelLedger(uuids(len(CAPACITIES)), temporary=CAPACITIES)
        return self.kernel

    @invariant()
    def everybody_was_told(self) -> None:
        """Check that every event was reported within its call; equal events come together."""
        assert Counter(self.told) == Counter(self.expected)
        self.told.clear()
        self.expected.clear()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.kernel.close()


class TwinMachine(KernelMachine):
    """The same calls to the specification and to the kernel."""

    def make_ledger(self) -> Ledger:
        twins: Any = Twins(SoftLedger(), super().make_ledger())
        return twins


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", [KernelMachine, TwinMachine])
def test_histories(machine: type[KernelMachine], processes: Sequence[Process]) -> None:
    run_state_machine_as_test(type("Machine", (machine,), {"processes": processes}), settings=history(150))


# Single cases


def test_what_is_here() -> None:
    assert kernel.check().startswith(f"version {abi.ABI_VERSION}, ")


def test_a_plan_of_any_length(processes: Sequence[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer grows until the plan fits."""
    monkeypatch.setattr(kernel, "TARGETS", 1)
    answers = []
    with keeping(uuids(1)) as books:
        ledgers: tuple[Ledger, ...] = (SoftLedger(), books)
        for ledger in ledgers:
            ledger.add_gpu(0, 1000)
            for share, process in enumerate(processes, 1):
                ledger.add(Member(process, 0), SliceOn(ROOT, 0))
                ledger.charge(Member(process, 0), 100 * share)
                ledger.configure(Member(process, 0), low=50)
            answers.append([list(ledger.plan(SliceOn(ROOT, 0), nbytes)) for nbytes in (-1, 0, 700, 1500, MAX, 1 << 70)])
    assert answers[0] == answers[1]
    assert len(answers[1][-1]) == 10


def test_a_process_that_does_not_live_is_not_taken(spawn: Spawn) -> None:
    child = spawn()
    process = identify(child.pid)
    with keeping(uuids(1)) as ledger:
        ledger.add_gpu(0, 1000)
        for dead in (attrs.evolve(process, start=process.start + 1), Process(4_194_304, 1)):
            with pytest.raises(ProcessLookupError):
                ledger.add(Member(dead, 0), SliceOn(ROOT, 0))
        child.kill()
        child.wait()
        with pytest.raises(ProcessLookupError):
            ledger.add(Member(process, 0), SliceOn(ROOT, 0))


def test_who_died_stays_until_he_is_removed(spawn: Spawn) -> None:
    """Nothing changes behind the daemon's back; the charges go when the daemon removes the process."""
    child = spawn()
    group = Member(identify(child.pid), 0)
    with keeping(uuids(1)) as ledger:
        ledger.add_gpu(0, 1000)
        ledger.add(group, SliceOn(ROOT, 0))
        ledger.charge(group, 10)
        child.kill()
        child.wait()
        assert ledger.books(group).current == 10
        ledger.remove(group)
        assert ledger.books(SliceOn(ROOT, 0)).current == 0
        with pytest.raises(OSError, match="No such device"):
            ledger.remove(group)


def test_a_group_that_somebody_else_removed_is_removed(processes: Sequence[Process]) -> None:
    group = Member(processes[0], 0)
    with keeping(uuids(1)) as ledger:
        ledger.add_gpu(0, 1000)
        ledger.add(group, SliceOn(ROOT, 0))
        kernel._ask(ledger._control, abi.IOC_REMOVE, abi.Id(id=ledger._ids[group]))
        with pytest.raises(OSError, match="No such device"):
            ledger.books(group)
        ledger.remove(group)
        ledger.add(group, SliceOn(ROOT, 0))


def test_a_path_that_is_too_long() -> None:
    with keeping(uuids(1)) as ledger:
        ledger.add_gpu(0, 1000)
        ledger.add(SliceOn(Slice("/" + "a" * (abi.PATH_LEN - 2)), 0), SliceOn(ROOT, 0))
        with pytest.raises(OSError, match="File name too long"):
            ledger.add(SliceOn(Slice("/" + "b" * (abi.PATH_LEN - 1)), 0), SliceOn(ROOT, 0))


def test_one_half_of_an_owner() -> None:
    """User and group may each be set without the other."""
    slice_ = SliceOn(Slice("/a"), 0)
    with keeping(uuids(1)) as ledger:
        ledger.add_gpu(0, 1000)
        ledger.add(slice_, SliceOn(ROOT, 0))
        ledger.configure(slice_, uid=1000)
        assert (ledger.books(slice_).uid, ledger.books(slice_).gid) == (1000, NOBODY)
        ledger.configure(slice_, gid=100)
        assert (ledger.books(slice_).uid, ledger.books(slice_).gid) == (1000, 100)


STRANGER = """
import os, sys
from backend.ledgers import abi, kernel
kernel._ask(os.open(kernel.DEVICE, os.O_RDWR), abi.IOC_SET, abi.Set(id=int(sys.argv[1]), mask=abi.SET["low"], low=9))
"""


def test_what_others_do_is_told_too(processes: Sequence[Process]) -> None:
    """Events that no call of ours has caused come through run(), and so do settings of another process."""
    group, told, configured = Member(processes[0], 0), [], []
    with keeping(uuids(1)) as ledger:
        ledger.add_gpu(0, 1000)
        ledger.add(group, SliceOn(ROOT, 0))
        ledger.listen(lambda group, channel: told.append((group, channel)), configured.append)
        ledger.configure(group, low=8)

        async def listen() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ledger.run)
                await trio.run_process([sys.executable, "-c", STRANGER, str(ledger._ids[group])])
                await until(lambda: configured, "what a stranger set")
                kernel._ask(ledger._control, abi.IOC_NOTE, abi.Note(id=ledger._ids[group], event=abi.EVENT_FAIL))
                await until(lambda: len(told) >= 2, "both are told")
                nursery.cancel_scope.cancel()

        trio.run(listen)
        assert ledger.books(group).low == 9
    assert configured == [group]  # and not for our own settings
    assert Counter(told) == Counter([(group, Channel.GMEM), (SliceOn(ROOT, 0), Channel.GMEM)])


# Books that outlive a daemon


def test_the_books_go_on(processes: Sequence[Process], spawn: Spawn) -> None:
    """All settings, counts and owners; parents first, whatever was moved; charges have to be reported anew."""
    names = uuids(2)
    a, deep, root = SliceOn(Slice("/a"), 0), SliceOn(Slice("/a/deep"), 0), SliceOn(ROOT, 0)
    one, other, dead = Member(processes[0], 0), Member(processes[1], 0), spawn()
    elsewhere = Member(processes[0], 1)
    with keeping(names, forget=False) as ledger:
        for index in names:
            ledger.add_gpu(index, 1000)
        ledger.add(deep, root)
        ledger.add(one, deep)
        ledger.add(a, root)
        ledger.move(deep, a)
        ledger.add(other, a)
        ledger.add(elsewhere, SliceOn(ROOT, 1))
        ledger.add(Member(identify(dead.pid), 0), a)
        ledger.charge(one, 100)
        ledger.configure(a, high=10, kept=True, uid=1000, gid=100)
        ledger.configure(one, low=1, swap_max=2, timeslice_us=3, frozen=True, priority=4, weight=5)
        ledger.set_reasons(one, abi.REASON_FREEZE, abi.REASON_TURN)
        ledger.press(one, 7)
        ledger.note(one, "high")
        ledger.swap_out(one, 2, 9)
        before = {group: ledger.books(group) for group in (a, deep, one, other, elsewhere)}
        ledger.reset_peak(one, "peak")
        ledger.reset_peak(one, "swap_peak")
        assert (ledger.books(one).peak, ledger.books(one).swap_peak) == (98, 2)
        ledger.uncharge_swap(one, 2)  # a reset belongs to its ledger, and the next one has none
    dead.kill()
    dead.wait()
    with keeping(names) as ledger:
        for index in names:
            ledger.add_gpu(index, 2000)
        inherited = ledger.inherited()
        assert {item.group: item.parent for item in inherited} == {
            a: root,
            deep: a,
            one: deep,
            other: a,
            elsewhere: SliceOn(ROOT, 1),
        }
        seen = {root, SliceOn(ROOT, 1)}
        for item in inherited:
            assert item.parent in seen, "the one above comes first"
            assert (item.applied, item.doubtful) == (Wanted(), False)
            seen.add(item.group)
        for group, books in before.items():
            assert ledger.books(group) == attrs.evolve(books, current=0, swap=0), group
        assert ledger.books(root).high == 2000


def test_one_at_a_time() -> None:
    """Two daemons must not pull the levers of one GPU."""
    names = uuids(1)
    with keeping(names) as ledger:
        ledger.add_gpu(0, 1000)
        second = KernelLedger(names)
        with pytest.raises(OSError, match=rf"GPU 0 \({names[0]}\) is served by another mount") as caught:
            second.add_gpu(0, 1000)
        assert caught.value.errno == errno.EBUSY
        second.close()


@pytest.mark.parametrize("handed_over", [False, True])
def test_the_end(handed_over: bool) -> None:
    """Books of a GPU that is gone with its mount are closed, unless another daemon goes on; others are not."""
    names = uuids(2)
    slices = [SliceOn(Slice("/a"), index) for index in names]
    ledger = KernelLedger(names, temporary=[1])
    for group in slices:
        ledger.add_gpu(group.gpu, 1000)
        ledger.add(group, SliceOn(ROOT, group.gpu))
    ledger.close(released=True, handed_over=handed_over)
    with keeping(names) as ledger:
        for index in names:
            ledger.add_gpu(index, 1000)
        assert [item.group for item in ledger.inherited()] == slices[: 1 + handed_over]
        assert ledger.books(slices[0]) == Books()


# Levers


@contextlib.asynccontextmanager
async def served(ledger: KernelLedger, gpu: StubGpu, seconds: float = SECONDS) -> Any:
    """Serve a Gpu whose levers go through the kernel."""
    provided = ProviderGpu(gpu, ledger, seconds)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(SECONDS):
            await nursery.start(partial(provided.run, Bookkeeping(ledger)))
            yield provided
        nursery.cancel_scope.cancel()


@attrs.define
class Bookkeeping:
    """The part of a Controller that a StubGpu uses."""

    ledger: KernelLedger

    def moved_out(self, process: Process, gpu: int, nbytes: int, usec: int) -> None:
        self.ledger.swap_out(Member(process, gpu), nbytes, usec)

    def knows(self, process: Process, gpu: int) -> bool:
        return True

    def levels(self, process: Process, gpu: int) -> list[Books]:
        return [self.ledger.books(group_on(node, gpu)) for node in (process, ROOT)]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_levers_reach_the_gpu_and_are_remembered(processes: Sequence[Process]) -> None:
    """A value that holds is not commanded again; the next provider is told; its answer goes back to the caller."""
    names, (who, other, *_) = uuids(1), processes
    first, second = StubGpu(), StubGpu()

    async def before(ledger: KernelLedger) -> None:
        async with served(ledger, first) as gpu:
            await gpu.set_lever(TIMESLICE, who, 4000)
            await gpu.detach(who)
            await gpu.detach(who)
            assert [name for name, _, _ in first.calls] == ["set_timeslice", "detach"]
            await gpu.detach(other)
            await gpu.attach(other)
            ledger.charge(Member(who, 0), 100)
            assert await gpu.reclaim(who, 60) == 60
            assert (ledger.books(Member(who, 0)).current, ledger.books(Member(who, 0)).swap) == (40, 60)
            first.script("detach", refuses(errno.EIO))
            with pytest.raises(OSError, match="Input/output"):
                await gpu.detach(other)

    async def after(ledger: KernelLedger) -> None:
        assert {item.group.node: (item.applied, item.doubtful) for item in ledger.inherited()} == {
            who: (Wanted(FROZEN, 4000), False),
            other: (Wanted(), True),
        }
        async with served(ledger, second) as gpu:
            assert (second.detached, second.timeslices) == ({who}, {who: 4000})
            assert ("attach", other.pid, 0) in second.calls, "in doubt: as it was before it was told"
            await gpu.attach(who)
            assert second.detached == set()

    with keeping(names, forget=False) as ledger:
        ledger.add_gpu(0, 1000)
        for process in (who, other):
            ledger.add(Member(process, 0), SliceOn(ROOT, 0))
        trio.run(before, ledger)
    with keeping(names) as ledger:
        ledger.add_gpu(0, 1000)
        trio.run(after, ledger)


def test_who_dies_with_a_lever_in_hand_leaves_a_doubt(processes: Sequence[Process]) -> None:
    names, who = uuids(1), processes[0]

    async def die(ledger: KernelLedger) -> None:
        gpu = StubGpu()
        gpu.script("detach", hang)
        with trio.CancelScope() as scope:
            async with served(ledger, gpu) as provided, trio.open_nursery() as nursery:
                nursery.start_soon(provided.detach, who)
                await until(lambda: gpu.calls, "the lever moves")
                scope.cancel()

    with keeping(names, forget=False) as ledger:
        ledger.add_gpu(0, 1000)
        ledger.add(Member(who, 0), SliceOn(ROOT, 0))
        trio.run(die, ledger)
    with keeping(names) as ledger:
        ledger.add_gpu(0, 1000)
        assert [item.doubtful for item in ledger.inherited()] == [True]


def test_a_lever_has_a_deadline_and_is_free_after_it(processes: Sequence[Process]) -> None:
    who = processes[0]

    async def wait(ledger: KernelLedger) -> None:
        gpu = StubGpu()
        gpu.script("detach", hang)
        async with served(ledger, gpu, 0.5) as provided:
            with pytest.raises(OSError, match="timed out"):
                await provided.detach(who)
            with trio.fail_after(SECONDS):
                while gpu.detached != {who}:
                    with contextlib.suppress(TimeoutError):
                        await provided.detach(who)

    with keeping(uuids(1)) as ledger:
        ledger.add_gpu(0, 1000)
        ledger.add(Member(who, 0), SliceOn(ROOT, 0))
        trio.run(wait, ledger)


def test_a_lever_of_who_is_gone(spawn: Spawn) -> None:
    """ESRCH, whether or not the exit was noticed; and never success without a provider."""
    child = spawn()
    who = identify(child.pid)

    async def pull(ledger: KernelLedger) -> None:
        async with served(ledger, StubGpu()) as provided:
            child.kill()
            child.wait()
            for _ in range(2):
                with pytest.raises(ProcessLookupError):
                    await provided.detach(who)
                if Member(who, 0) in ledger._ids:
                    ledger.remove(Member(who, 0))
        with pytest.raises(OSError, match="No such device"):
            await ledger.pull(Op.DETACH_TSG, Member(who, 0), 0, SECONDS)

    with keeping(uuids(1)) as ledger:
        ledger.add_gpu(0, 1000)
        ledger.add(Member(who, 0), SliceOn(ROOT, 0))
        trio.run(pull, ledger)
