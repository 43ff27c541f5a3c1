"""A program that is moved to another GPU in the middle of a turn, and arrives."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from backend.core.turns import TurnEnd
from backend.cuda.migrations import Standby
from backend.process.identity import Member
from tests.support.cuda_session import GIB, LOOKS, Drive, Rig, drive, pieces, until_then
from tests.support.turns import Gated, begin_turn, drain, end_turn, gated, proven, without

__all__ = ["drive", "pieces"]  # fixtures

HELD_BYTES = 8 * GIB
"""Bytes that it has on the GPU."""


async def in_a_turn(rig: Rig, how: str) -> Gated:
    """Start a program whose turn has ended."""
    program = await gated(rig, HELD_BYTES, "/", 0)
    program.drain_s = {"drained": 0.0, "draining": 0.3}.get(how, 3600.0)
    end = await end_turn(rig.h, program, stays=how in ("draining", "stuck"))
    assert end is (TurnEnd.DRAINED if how == "drained" else TurnEnd.LATE)
    if how == "stuck":
        assert await drain(rig.h, program, 100_000) is TurnEnd.LATE
    assert program.is_closed
    return program


@pytest.mark.parametrize("how", ["drained", "draining", "stuck", "late"])
def test_a_program_that_is_moved_in_a_turn_has_none_there(drive: Drive, how: str) -> None:
    """It runs while it stands by and once it is there; its memory moves there, and its next turn ends there."""

    async def test(rig: Rig) -> None:
        program, target = await in_a_turn(rig, how), rig.others[0]
        proven(target)
        hardware = rig.fake.programs[program.process.pid]

        async def move(*words: Any) -> None:
            standby = words[-1]
            assert isinstance(standby, Standby)
            assert without(hardware) == (False, False)
            with trio.fail_after(1):
                await until_then(lambda: not program.is_closed)
            await standby.begin()
            hardware.checkpointed(keeps_file=True)
            hardware.restored(1, hardware.ctl)
            program.gpu = 1
            program.show()
            standby.over.set()

        rig.gpu.mover.move = move  # type: ignore[method-assign, assignment]
        await rig.h.write(f"{program.process.pid}/0/compute.migrate", 1)
        await until_then(program.ended.is_set)
        assert await rig.h.listdir(str(program.process.pid)) == ["1"]
        again = rig.connect(program.process, Gated)
        assert isinstance(again, Gated)
        again.gpu, again.context = 1, 0
        await again.manage(program.resident, program.swapped)
        await trio.sleep(LOOKS)
        assert again.process in target.managed
        assert again.process not in rig.gpu.managed
        assert rig.h.controller.population.record(Member(again.process, 1)).compute.turn_end is None
        assert without(hardware) == (False, False)
        assert not again.is_closed
        await rig.h.write(again.file + "gmem.limit.high", "6G")
        assert again.resident == 6 * GIB
        assert await end_turn(rig.h, again) is TurnEnd.DRAINED
        assert without(hardware) == (True, False)
        assert again.is_closed
        await rig.h.write(again.file + "gmem.limit.high", "5G")
        assert again.resident == 5 * GIB
        await begin_turn(rig.h, again)
        assert without(hardware) == (False, False)
        assert not again.is_closed

    drive(test, count=2)
