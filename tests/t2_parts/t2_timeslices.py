"""A TSG's native timeslice, which its maker may set late, against the one that ggroupfs gave it.

On a busy H100 the GR TSG of PyTorch programs had RM's default of 1024 us when it was found, and the CUDA library's
2048 us only seconds later (docs/nvidia.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from backend.nvidia import rm
from tests.support.fake_nvidia import Object, Program
from tests.support.nvidia_rig import Rig, Written, drive, running

AS_MADE, BY_CUDA = 1024, 2048


def new_contexts(rig: Rig, count: int = 1) -> tuple[Program, list[Object]]:
    """Return a program whose contexts are being made, and their GR TSGs before the CUDA library has set a timeslice."""
    program = rig.busy(5, *[0] * count)
    gr = [one for one in program.objects.values() if one.class_ == rm.CLASS_TSG and one.timeslice == BY_CUDA]
    assert len(gr) == count
    give(gr, AS_MADE)
    return program, gr


def give(gr: list[Object], us: int) -> None:
    """Set a timeslice as the maker of the TSGs does."""
    for one in gr:
        one.timeslice = us


def has(gr: list[Object]) -> set[int]:
    """Return the timeslices of the TSGs."""
    return {one.timeslice for one in gr}


def test_what_is_given_back_is_what_it_had_last() -> None:
    """Restored is the last native timeslice, not the one at discovery."""

    async def test(rig: Rig) -> None:
        rig.gpus[0].notes = written = Written()
        program, gr = new_contexts(rig, 2)
        async with running(rig):
            await trio.sleep(2)
            give(gr, BY_CUDA)
            await rig.gpus[0].set_timeslice(program.identity, 600)
            assert has(gr) == {300}
            assert set(written.notes[program.identity].values()) == {BY_CUDA}
            await rig.gpus[0].set_timeslice(program.identity, 0)
            assert has(gr) == {BY_CUDA}

    drive(test)


@pytest.mark.parametrize("late", [0.2, 0.8, 3.0])
def test_what_its_maker_sets_meanwhile_is_its_own(late: float) -> None:
    """Ours is set again and the program is not blamed; its own is restored, also by a later daemon."""

    async def test(rig: Rig) -> None:
        rig.gpus[0].notes = written = Written()
        program, gr = new_contexts(rig)
        async with running(rig):
            await rig.gpus[0].set_timeslice(program.identity, 600)
            assert set(written.notes[program.identity].values()) == {AS_MADE}
            await trio.sleep(late)
            give(gr, BY_CUDA)
            await trio.sleep(1)
            assert has(gr) == {600}
            assert rig.bookkeeper.brought_back[program.identity] == 0
            assert set(written.notes[program.identity].values()) == {BY_CUDA}
            await rig.gpus[0].set_timeslice(program.identity, 0)
            assert has(gr) == {BY_CUDA}
            assert not written.notes

    drive(test)


@pytest.mark.parametrize("then", [(0,), (700, 0), (BY_CUDA, 0), (AS_MADE, 0)])
def test_what_its_maker_set_just_before_it_is_given_another_is_its_own(then: Sequence[int]) -> None:
    """The scheduler may change a timeslice before any check whether it still is what was set."""

    async def test(rig: Rig) -> None:
        program, gr = new_contexts(rig)
        await rig.gpus[0].set_timeslice(program.identity, 600)
        give(gr, BY_CUDA)
        for us in then:
            await rig.gpus[0].set_timeslice(program.identity, us)
            assert has(gr) == {us or BY_CUDA}
        assert has(gr) == {BY_CUDA}
        assert not rig.gpus[0]._tenant(program.identity).has_policy

    drive(test)


@pytest.mark.logs(r"pid 5 undid its timeslice")
def test_a_longer_one_is_nobodys_own() -> None:
    """Only the CUDA library's value counts as native: a program that takes 100 ms meanwhile does not get them back."""

    async def test(rig: Rig) -> None:
        program, gr = new_contexts(rig)
        async with running(rig):
            await rig.gpus[0].set_timeslice(program.identity, 600)
            await trio.sleep(2)
            give(gr, 100_000)
            await trio.sleep(1)
            assert has(gr) == {600}
            assert rig.bookkeeper.brought_back[program.identity] == 1
            give(gr, 100_000)
            await rig.gpus[0].set_timeslice(program.identity, 0)
            assert has(gr) == {AS_MADE}

    drive(test)


@pytest.mark.logs(r"pid 5 undid its timeslice")
def test_who_is_given_what_it_has_is_held_to_it() -> None:
    """An explicit value is enforced, even if it equals the native one."""

    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        gr = [one for one in program.objects.values() if one.timeslice == BY_CUDA]
        async with running(rig):
            await rig.gpus[0].set_timeslice(program.identity, BY_CUDA)
            await trio.sleep(2)
            give(gr, 100_000)
            await trio.sleep(1)
            assert has(gr) == {BY_CUDA}
            assert rig.bookkeeper.brought_back[program.identity] == 1

    drive(test)


def test_who_is_given_what_it_was_found_with_gets_it() -> None:
    """Even though its maker has set another value meanwhile."""

    async def test(rig: Rig) -> None:
        program, gr = new_contexts(rig)
        async with running(rig):
            await trio.sleep(2)
            give(gr, BY_CUDA)
            await rig.gpus[0].set_timeslice(program.identity, AS_MADE)
            assert has(gr) == {AS_MADE}

    drive(test)


def test_what_it_was_given_before_the_gpu_was_lost_is_not_its_own() -> None:
    """The TSG may still have it, since it need not have been reset."""

    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        gr = [one for one in program.objects.values() if one.timeslice == BY_CUDA]
        await rig.gpus[0].set_timeslice(program.identity, 600)
        rig.gpus[0]._tenant(program.identity).enforcement.begin_again()
        await rig.gpus[0].set_timeslice(program.identity, 700)
        assert has(gr) == {700}
        await rig.gpus[0].set_timeslice(program.identity, 0)
        assert has(gr) == {BY_CUDA}

    drive(test)
