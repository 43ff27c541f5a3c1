"""A lever is a row: everything between a writer and a GPU also accepts a lever that is added later."""

from __future__ import annotations

import pytest

from backend.core import settings
from backend.core.records import Wanted
from backend.core.settings import LEVERS, TIMESLICE, Kind, Lever
from backend.ledgers.journal.state import UNTOUCHED
from tests.support.harness import Spawn, running, virtual
from tests.support.nvidia_rig import Rig, drive

LATER = Lever(field="later", kind=Kind.NUMBER, most=10, along=max)
"""A lever of a future version."""


def test_what_holds_has_each_by_its_field() -> None:
    for lever in LEVERS:
        assert Wanted().at(lever) == UNTOUCHED.at(lever) == 0
        assert (Wanted().with_(lever, 5).at(lever), UNTOUCHED.with_(lever, 5).at(lever)) == (5, 5)
        assert Wanted().with_(lever, 5).with_(lever, 0) == Wanted()
    assert settings.FROZEN not in LEVERS, "it is one of the reasons for which a process is off the runlist"


@virtual
async def test_a_software_gpu_refuses_what_it_does_not_have(spawn: Spawn) -> None:
    async with running() as h:
        who, gpu = await h.arrive(spawn().pid), h.controller.gpus[0]
        with pytest.raises(OSError, match="Operation not supported"):
            await gpu.set_lever(LATER, who, 1)
        await gpu.set_lever(LATER, who, 0)
        await gpu.set_lever(TIMESLICE, who, 4000)


def test_an_nvidia_gpu_refuses_what_it_does_not_have() -> None:
    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0)
        with pytest.raises(OSError, match="Operation not supported"):
            await rig.gpus[0].set_lever(LATER, program.identity, 1)
        await rig.gpus[0].set_lever(LATER, program.identity, 0)
        await rig.gpus[0].set_lever(TIMESLICE, program.identity, 1000)
        assert program.objects

    drive(test)
