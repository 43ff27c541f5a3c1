"""A new daemon on an older kernel module: each feature missing in turn, and every set of them.

Features of the module act as ever; for a missing one the daemon does without, or refuses as docs/semantics.md and
docs/upgrades.md say. The module is a double (tests/support/module_double.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend import choose
from backend.choose import Choice
from backend.core.controller import DEADLINE_S
from backend.core.nextuse import NEXT_USE_MOST, NextUse
from backend.core.protocols import Ledger
from backend.core.reasons import FROZEN, Engines, Off, Reason
from backend.core.records import MAX, Books
from backend.core.settings import REASONS, SETTINGS
from backend.ledgers import abi, kernel
from backend.ledgers.kernel import KernelLedger
from backend.ledgers.provider import ProviderGpu
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn
from tests.support import harness
from tests.support.harness import MIB, Harness, Spawn, StubGpu, running
from tests.support.module_double import OF_THE_FIRST, Module

ALL = sum(kernel.WITHOUT)
OPTIONAL = [bit for bit in kernel.WITHOUT if not kernel.NEEDED & bit]
"""Features that the daemon can do without."""
SETS = [ALL, *(ALL & ~bit for bit in OPTIONAL), kernel.NEEDED]
"""Sets of features: all, all but one optional feature, and only the needed ones."""

NAMES = {0: "GPU-0"}
SLICE, WHO, OTHER = SliceOn(Slice("/a"), 0), Member(Process(101, 1), 0), Member(Process(102, 2), 0)
GROUPS: Sequence[Group] = (SliceOn(ROOT, 0), SLICE, WHO, OTHER)
CAPACITY = 1000


def named(features: int) -> str:
    """Return what a set of features lacks, as the id of a test."""
    return f"lacks {','.join(kernel.lacking(kernel.Module(features))) or 'nothing'}"


each_set = pytest.mark.parametrize("features", SETS, ids=named)


# The books


groups, small = st.sampled_from(GROUPS), st.integers(0, 60)
bits = st.integers(0, REASONS + 1)
steps = st.one_of(
    st.tuples(st.sampled_from(("charge", "uncharge", "uncharge_swap", "swap_out", "swap_in", "press")), groups, small),
    st.tuples(st.just("observe"), groups, small),
    st.tuples(st.just("configure"), groups, st.sampled_from(SETTINGS), small | st.just(MAX)),
    st.tuples(st.just("set_reasons"), groups, bits, bits),
    st.tuples(st.just("reset_peak"), groups, st.sampled_from(("peak", "swap_peak"))),
    st.tuples(st.just("note"), groups, st.sampled_from(("low", "high", "reclaim", "fail"))),
    st.tuples(st.just("plan"), groups, st.integers(-1, 200)),
    st.tuples(st.just("set_next_use"), st.just(0), st.dictionaries(groups, st.integers(-1, NEXT_USE_MOST + 1))),
)


def result(ledger: Ledger, step: tuple[Any, ...]) -> Any:
    """Return the result of a step, or its errno."""
    name, group, *words = step
    try:
        if name == "configure":
            ledger.configure(group, **{words[0].field: words[1]})
            return None
        answer = getattr(ledger, name)(group, *words)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return list(answer) if answer is not None else None


def begun(ledger: Ledger) -> None:
    """Add the groups to empty books."""
    ledger.add_gpu(0, CAPACITY)
    for group, above in ((SLICE, SliceOn(ROOT, 0)), (WHO, SLICE), (OTHER, SliceOn(ROOT, 0))):
        ledger.add(group, above)


@given(st.sets(st.sampled_from(OPTIONAL)), st.lists(steps, max_size=40))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_books_are_the_same_whatever_is_missing(missing: set[int], history: list[tuple[Any, ...]]) -> None:
    """Except for the peak of swap, which is refused and stays 0 where the module keeps none, and for plans, which go by
    size alone where the module knows no next use."""
    module, specified = Module(ALL & ~sum(missing)), SoftLedger()
    with module.loaded():
        ledger = KernelLedger(NAMES)
        begun(ledger)
        begun(specified)
        for step in history:
            refused = "swap_peak" in step and not module.has(abi.FEATURE_PEAKS)
            expected = os.strerror(errno.EOPNOTSUPP) if refused else result(specified, step)
            if not module.has(abi.FEATURE_NEXT_USE):
                specified.set_next_use(0, {WHO: NextUse.SOON, OTHER: NextUse.SOON})
            assert result(ledger, step) == expected, step
            for group in GROUPS:
                known = specified.books(group)
                if not module.has(abi.FEATURE_PEAKS):
                    known = attrs.evolve(known, swap_peak=0, swap_peak_ever=0)
                assert ledger.books(group) == known, (group, step)
        ledger.close()
        if not module.has(abi.FEATURE_REASONS):
            assert abi.IOC_REASONS not in module.calls
        if not module.has(abi.FEATURE_NEXT_USE):
            assert abi.IOC_NEXT_USE not in module.calls


def test_what_one_call_cannot_say_of_next_use_several_do() -> None:
    """Processes that have left are skipped."""
    module, gone = Module(ALL), Member(Process(103, 3), 0)
    with module.loaded(), mock.patch.object(abi, "USES_MOST", 1):
        ledger = KernelLedger(NAMES)
        begun(ledger)
        ledger.charge(WHO, 10)
        ledger.charge(OTHER, 30)
        ledger.set_next_use(0, {WHO: NextUse.ASLEEP, gone: NextUse.ASLEEP, OTHER: NextUse.IDLE})
        assert module.calls.count(abi.IOC_NEXT_USE) == 2
        assert [(one.group, one.nbytes) for one in ledger.plan(SliceOn(ROOT, 0), 15)] == [(WHO, 10), (OTHER, 5)]
        ledger.close()


# A daemon


@pytest.fixture
def module(features: int) -> Iterator[Module]:
    """The loaded module, with the features of a test's parameter."""
    with Module(features).loaded() as found:
        yield found


@contextlib.asynccontextmanager
async def daemon(module: Module, gpu: StubGpu) -> AsyncIterator[Harness]:
    """Run a daemon whose books and levers go through the module, until it is killed."""
    ledger: Any = KernelLedger(NAMES)
    count = harness.descriptors

    def descriptors() -> int:
        """Return the number of the daemon's descriptors, without the double's."""
        return count() - module.descriptors()

    with mock.patch.object(harness, "descriptors", descriptors):
        async with running(ProviderGpu(gpu, ledger, DEADLINE_S), ledger=ledger) as h:
            yield h
            h.kill()
    ledger.close()
    module.bereave()


@each_set
def test_every_control_acts_or_is_refused_as_the_pages_say(features: int, module: Module, spawn: Spawn) -> None:
    """A written value is read back and reaches the GPU. Only gmem.swap.peak, without `peaks`, is EOPNOTSUPP."""
    gpu = StubGpu()

    async def test() -> None:
        async with daemon(module, gpu) as h:
            who = await h.arrive(spawn().pid, gmem=8 * MIB)
            place = f"{who.pid}/0/"
            for file, value, shown in (
                ("gmem.limit.high", "4M", f"{4 * MIB}\n"),
                ("gmem.limit.low", "1M", f"{MIB}\n"),
                ("gmem.swap.max", "16M", f"{16 * MIB}\n"),
                ("compute.timeslice", "4", "4\n"),
                ("compute.freeze", "1", "1\n"),
            ):
                await h.write(place + file, value)
                assert await h.read(place + file) == shown
            assert (gpu.timeslices, gpu.detached) == ({who: 4000}, {who})
            assert await h.read(place + "gmem.current") == f"{4 * MIB}\n"
            assert await h.read(place + "gmem.swap.current") == f"{4 * MIB}\n"
            assert h.controller.books(Member(who, 0)).off_all == Reason.FREEZE.value
            await h.write(place + "compute.freeze", "0")
            assert gpu.detached == set()
            await h.write(place + "gmem.peak", "0")
            assert int(await h.read(place + "gmem.peak")) == 8 * MIB, "a reset is of the file that it was written to"
            if features & abi.FEATURE_PEAKS:
                assert await h.read(place + "gmem.swap.peak") == f"{4 * MIB}\n"
                await h.write(place + "gmem.swap.peak", "0")
            else:
                assert await harness.answers(h.read(place + "gmem.swap.peak")) == errno.EOPNOTSUPP
                assert await h.refused(place + "gmem.swap.peak", "0") == errno.EOPNOTSUPP

    trio.run(test)


def test_a_module_without_limit_max_has_none(spawn: Spawn) -> None:
    """A limit is refused and never reported to hold; its default is accepted, and counts read as ever."""

    async def test() -> None:
        with Module(ALL, OF_THE_FIRST).loaded() as module:
            async with daemon(module, StubGpu()) as h:
                who = await h.arrive(spawn().pid, gmem=8 * MIB)
                place = f"{who.pid}/0/"
                for file, value, shown in (("gmem.limit.max", "4M", "max\n"), ("gmem.oom.group", "1", "0\n")):
                    assert await h.refused(place + file, value) == errno.EOPNOTSUPP
                    assert await h.read(place + file) == shown
                    assert f"{file} unsupported\n" in await h.read("ggroup.capabilities")
                await h.write(place + "gmem.limit.high", "4M")
                assert await h.read(place + "gmem.current") == f"{4 * MIB}\n"
                assert "oom_kill 0\noom_group_kill 0\nover 0\n" in await h.read(place + "gmem.events")

    trio.run(test)


def test_a_charge_that_meets_limit_max_waits_for_reclaim(spawn: Spawn) -> None:
    """The module reports that the charge met the limit; the daemon has memory moved, and then the charge succeeds."""

    async def test() -> None:
        with Module(ALL).loaded() as module:
            async with daemon(module, StubGpu()) as h:
                who = await h.arrive(spawn().pid, gmem=8 * MIB)
                place = f"{who.pid}/0/"
                await h.write(place + "gmem.limit.max", "10M")
                await h.controller.bookkeeper.charge(who, 0, 6 * MIB)
                assert await h.read(place + "gmem.current") == f"{10 * MIB}\n"
                assert int(await h.read(place + "gmem.peak")) == 10 * MIB
                with pytest.raises(OSError, match="Cannot allocate memory"):
                    await h.controller.bookkeeper.charge(who, 0, 11 * MIB)
                events = await h.read(place + "gmem.events")
                assert "max 2\noom 1\n" in events

    trio.run(test)


@each_set
def test_the_farthest_give_first_where_the_module_knows_of_it(features: int, module: Module, spawn: Spawn) -> None:
    """Elsewhere the largest give first, and the module is not asked about what it does not know."""

    async def test() -> None:
        async with daemon(module, StubGpu()) as h:
            small, large = [Member(await h.arrive(spawn().pid, "/job", gmem=size * MIB), 0) for size in (4, 8)]
            memory = h.controller.population.record(small).memory
            await harness.until(lambda: memory.next_use is not None, "the daemon says once what it knows")
            h.controller.ledger.set_next_use(0, {small: NextUse.ASLEEP, large: NextUse.SOON})
            await h.write("slice/job/0/gmem.limit.high", "10M")
            held = [h.controller.books(one).current // MIB for one in (small, large)]
            assert held == ([2, 8] if features & abi.FEATURE_NEXT_USE else [4, 6])

    trio.run(test)


@each_set
def test_gr_alone_becomes_all_engines_where_the_module_knows_no_other(
    features: int, module: Module, spawn: Spawn
) -> None:
    """A program that was to stop is stopped, and the books have the reasons that hold."""
    gpu = StubGpu()

    async def test() -> None:
        async with daemon(module, gpu) as h:
            who = await h.arrive(spawn().pid)
            await h.controller.gpus[0].detach(who, Engines.GR)
            assert (gpu.without_gr, gpu.detached) == (
                ({who}, set()) if features & abi.FEATURE_REASONS else (set(), {who})
            )
            await h.controller.gpus[0].attach(who)
            assert (gpu.without_gr, gpu.detached) == (set(), set())

    trio.run(test)


@each_set
def test_the_next_daemon_goes_on_with_what_holds(features: int, module: Module, spawn: Spawn) -> None:
    """Limits, a freeze and a timeslice hold again, on any module. Further reasons are known where the module keeps
    reasons, and the peak before a reset where it keeps peaks."""
    pid = spawn().pid
    first, second = StubGpu(), StubGpu()

    async def before() -> Process:
        async with daemon(module, first) as h:
            who = await h.arrive(pid, gmem=8 * MIB)
            await h.write(f"{pid}/0/compute.timeslice", "4")
            await h.write(f"{pid}/0/gmem.limit.high", "4M")
            await h.write(f"{pid}/0/gmem.peak", "0")
            await h.write(f"{pid}/0/compute.freeze", "1")
            h.ledger.set_reasons(Member(who, 0), Reason.FREEZE.value | Reason.MIGRATION.value, 0)
            return who

    async def after(who: Process) -> None:
        async with daemon(module, second) as h:
            [found] = [one for one in h.ledger.inherited() if one.group == Member(who, 0)]
            off = Off(Reason.FREEZE | Reason.MIGRATION) if features & abi.FEATURE_REASONS else FROZEN
            assert (found.applied.off, found.applied.timeslice_us) == (off, 4000)
            await harness.until(lambda: second.detached == {who}, "it is frozen again")
            await harness.until(lambda: second.timeslices == {who: 4000}, "it has its timeslice again")
            assert await h.read(f"{pid}/0/compute.freeze") == "1\n"
            assert await h.read(f"{pid}/0/gmem.limit.high") == f"{4 * MIB}\n"
            peak = 8 * MIB if features & abi.FEATURE_PEAKS else 4 * MIB
            assert int(await h.read(f"{pid}/0/gmem.peak")) == peak, "without `peaks` it begins at the last reset"
            await h.write(f"{pid}/0/compute.freeze", "0")
            assert second.detached == set()

    trio.run(after, trio.run(before))


# A module that cannot serve


@pytest.mark.parametrize("missing", [abi.FEATURE_BOOKS, abi.FEATURE_PROVIDER, ALL], ids=["books", "provider", "all"])
def test_a_module_that_cannot_serve_is_refused_in_words_or_left_alone(missing: int) -> None:
    """`--ledger kmod` names the missing features; otherwise the daemon keeps the books, and does not use the module."""
    with Module(ALL & ~missing).loaded() as module:
        for call in (kernel.check, partial(choose.backend, Choice(ledger="kmod"), [], DEADLINE_S)):
            with pytest.raises(OSError, match=f"lacks features: {ALL & ~missing:#x}") as caught:
                call()
            assert caught.value.errno == errno.EPROTO
        assert choose.backend(Choice(), [], DEADLINE_S).ledger.name == "soft"
        assert set(module.calls) == {abi.IOC_HELLO}


@each_set
def test_what_is_missing_is_named(features: int, module: Module, caplog: pytest.LogCaptureFixture) -> None:
    """The log has a line for each, and ledger.lacks lists them."""
    chosen = choose.backend(Choice(ledger="kmod"), [], DEADLINE_S)
    chosen.ledger.close()
    assert list(chosen.lacks) == [name for bit, (name, _) in kernel.WITHOUT.items() if not features & bit]
    assert len(caplog.records) == len(chosen.lacks)
    assert all(f"lacks {name}: " in caplog.text for name in chosen.lacks)
    caplog.clear()


def test_an_unknown_field_of_the_books_is_zero() -> None:
    """A field that an older module does not fill reads as 0, and not as what the caller's memory held."""
    with Module(kernel.NEEDED, OF_THE_FIRST).loaded():
        ledger = KernelLedger(NAMES)
        begun(ledger)
        assert ledger.books(WHO) == Books()
        for setting in ledger.lacks:
            ledger.configure(WHO, **{setting.field: setting.default})
            other = setting.least if setting.least != setting.default else setting.most
            with pytest.raises(OSError, match="not supported"):
                ledger.configure(WHO, **{setting.field: other})
        ledger.close()
