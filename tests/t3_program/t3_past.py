"""Programs whose library does not see all that they allocate: NVML has more than they charge."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from backend.core.oom import PAST_MOST
from backend.core.past import LOOK_S
from ggroupfs.commands import doctor
from ggroupfs.view.figures import SOURCES
from tests.support.cuda_session import GIB, MIB, Drive, Rig, drive, pieces

__all__ = ["drive", "pieces"]  # fixtures

PAST = "past its library"
"""What the log says of one."""
SEEN_S = 3 * LOOK_S
"""Seconds in which it is found: NVML is asked, and two looks see it."""


@pytest.mark.logs(PAST)
def test_what_nvml_has_more_than_is_charged_is_said(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    """Of the process and the slices above, for as long as it is so; in the log once."""

    async def test(rig: Rig) -> None:
        program, honest = await rig.program(1 * GIB, "/job/part"), await rig.program(1 * GIB, "/job/other")
        places = (program.file, "slice/job/part/0/", "slice/job/0/")
        await trio.sleep(SEEN_S)
        for place in (*places, honest.file):
            assert (await rig.stat(place + "gmem.events"))["past"] == 0
        program.context = PAST_MOST + 512 * MIB
        program.show()
        await trio.sleep(SEEN_S)
        for place in places:
            assert (await rig.stat(place + "gmem.events"))["past"] == 1
        for place in (honest.file, "slice/job/other/0/"):
            assert (await rig.stat(place + "gmem.events"))["past"] == 0
        assert (await rig.stat(program.file + "gmem.stat"))["implicit"] == program.context
        program.context = 512 * MIB
        program.show()
        await trio.sleep(SEEN_S)
        assert (await rig.stat("slice/job/0/gmem.events"))["past"] == 0
        program.context = PAST_MOST + GIB
        program.show()
        await trio.sleep(SEEN_S)
        assert (await rig.stat("slice/job/0/gmem.events"))["past"] == 1

    drive(test)
    (line,) = (line for line in caplog.messages if PAST in line)
    assert f"holds {PAST_MOST + 512 * MIB} bytes past its library" in line


def test_a_context_is_none_and_nor_is_what_is_charged(drive: Drive) -> None:
    """However much a program charges, and what NVML counts for a moment while it allocates."""

    async def test(rig: Rig) -> None:
        program = await rig.program(30 * GIB, "/job", context=PAST_MOST - 16 * MIB)
        await trio.sleep(SEEN_S)
        assert (await rig.stat(program.file + "gmem.events"))["past"] == 0

    drive(test)


def test_a_program_without_the_library_is_not_past_it(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        process = rig.process("/job")
        rig.driver_says(process.pid, 20 * GIB)
        await trio.sleep(SEEN_S)
        assert (await rig.stat("slice/job/0/gmem.events"))["past"] == 0

    drive(test)


def test_what_only_a_former_connection_claimed_is_not_past(drive: Drive) -> None:
    """A program that says less with every connection: what it said before is in the books, but no driver counts it."""

    async def test(rig: Rig) -> None:
        process = rig.process("/job")
        for _ in range(20):
            program = rig.connect(process)
            program.lag = 256 * MIB
            await program.manage(8 * GIB)
            await trio.sleep(LOOK_S / 8)
            program = rig.connect(process)
            program.lag = 256 * MIB
            await program.manage(1 * MIB)
            await trio.sleep(LOOK_S / 8)
            rig.h.controller._pasts.look()
            assert (await rig.stat(program.file + "gmem.events"))["past"] == 0

    drive(test)


@pytest.mark.logs(PAST)
def test_one_that_connects_again_and_again_is_past_it_all_the_same(drive: Drive) -> None:
    """What the driver counts as a program connects is known before the first look."""

    async def test(rig: Rig) -> None:
        process = rig.process("/job")
        rig.driver_says(process.pid, 20 * GIB)
        for _ in range(20):
            program = rig.connect(process)
            program.lag = 20 * GIB
            await program.manage(1 * MIB)
            await trio.sleep(LOOK_S / 4)
        assert (await rig.stat(program.file + "gmem.events"))["past"] == 1

    drive(test)


@pytest.mark.logs(PAST)
def test_nothing_is_kept_of_one_that_has_ended(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(1 * GIB, "/job")
        program.context = PAST_MOST + GIB
        program.show()
        await trio.sleep(SEEN_S)
        pasts = rig.h.controller._pasts
        assert pasts._past
        assert pasts._told
        await rig.die(program)
        await trio.sleep(SEEN_S)
        assert not pasts._past
        assert not pasts._told
        assert not pasts._seen

    drive(test)


def test_doctor_names_the_groups(tmp_path: Path) -> None:
    """Those over a limit, and those past a library, each by itself."""
    for name, events in {
        "slice/job/0": "over 0\npast 1\n",
        "slice/other/0": "over 1\npast 0\n",
        "42/0": "past 1\n",
        "43/0": "",
    }.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "gmem.events").write_text(events)
    assert doctor.flagged(tmp_path) == {
        "past": [Path("slice/job/0"), Path("42/0")],
        "over": [Path("slice/other/0")],
    }


def test_it_is_a_figure_of_its_own() -> None:
    """And no count of events."""
    found = SOURCES["gmem.events"].parse("max 3\nover 0\npast 1\n")
    assert found == {"events": {"max": 3}, "over": False, "past": True}
