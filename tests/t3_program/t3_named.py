"""Sections of slices.d that are names of units, as the policy of a Controller: they act as the unit files would."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.core.records import MAX
from ggroupfs.units import Units
from tests.support.harness import MIB, Harness, Spawn, settle, virtual
from tests.support.units import FakeManager, books, manager, policy

__all__ = ["manager"]  # a fixture


async def hang_up(h: Harness) -> None:
    """Reload as the daemon does for SIGHUP."""
    units = h.controller.bookkeeper.policy
    assert isinstance(units, Units)
    units.reload()
    await settle()


@virtual
async def test_a_unit_that_is_named_has_its_slice_while_it_is_active(tmp_path: Path, manager: FakeManager) -> None:
    """The slice is made where systemd has the unit, at each start of the unit, and goes with it."""
    (tmp_path / "a.conf").write_text("[batch-gpu.slice]\nGMemHigh=8M\n[trainer.service]\nGMemLow=1M\n")
    manager.unit("/batch.slice/batch-gpu.slice")
    manager.unit("/batch.slice/batch-gpu.slice/trainer.service", active=False)
    manager.unit("/batch.slice/plain.service")
    async with policy(tmp_path, manager) as h:
        assert await h.listdir("slice") == ["batch.slice"]
        assert books(h, "/batch.slice/batch-gpu.slice").high == 8 * MIB
        assert sorted(await h.listdir("slice/batch.slice")) == ["0", "batch-gpu.slice"], "the others have nothing"
        manager.start("trainer.service")
        await settle()
        assert books(h, "/batch.slice/batch-gpu.slice/trainer.service").low == MIB
        manager.stop("trainer.service")
        manager.stop("batch-gpu.slice")
        await settle()
        assert await h.listdir("slice") == []


@virtual
async def test_a_unit_file_wins_key_by_key(tmp_path: Path, manager: FakeManager) -> None:
    (tmp_path / "a.conf").write_text("[x.service]\nGMemHigh=8M\nGMemLow=1M\n")
    manager.unit("/system.slice/x.service", "GMemHigh=16M")
    async with policy(tmp_path, manager) as h:
        found = books(h, "/system.slice/x.service")
        assert (found.high, found.low) == (16 * MIB, MIB)


@virtual
async def test_a_hangup_makes_and_takes_away(tmp_path: Path, manager: FakeManager) -> None:
    """A new name is looked up among active units; a removed one is let go. An empty value is the default."""
    manager.unit("/system.slice/x.service")
    manager.unit("/system.slice/y.service", "GMemLow=2M")
    async with policy(tmp_path, manager) as h:
        assert await h.listdir("slice/system.slice") == ["0", "y.service"]
        (tmp_path / "a.conf").write_text("[?.service]\nGMemHigh=8M\n")
        await hang_up(h)
        assert [books(h, f"/system.slice/{name}.service").high for name in "xy"] == [8 * MIB, 8 * MIB]
        (tmp_path / "b.conf").write_text("[y.service]\nGMemHigh=\n")
        await hang_up(h)
        assert [books(h, f"/system.slice/{name}.service").high for name in "xy"] == [8 * MIB, MAX]
        (tmp_path / "a.conf").unlink()
        await hang_up(h)
        assert await h.listdir("slice/system.slice") == ["0", "y.service"], "its unit file keeps it"


@virtual
async def test_a_hangup_without_a_manager(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """A name then stands for the cgroups in which systemd would have the unit, once a process comes there."""
    (tmp_path / "a.conf").write_text("[trainer.service]\nGMemHigh=8M\n[batch-gpu.slice]\nGMemLow=1M\n")
    manager.refuses = True
    async with policy(tmp_path, manager) as h:
        await h.arrive(spawn().pid, "/batch.slice/batch-gpu.slice/trainer.service/inner")
        assert books(h, "/batch.slice/batch-gpu.slice/trainer.service").high == 8 * MIB
        assert books(h, "/batch.slice/batch-gpu.slice").low == MIB
        (tmp_path / "a.conf").write_text("[trainer.service]\nGMemHigh=4M\n")
        await hang_up(h)
        assert books(h, "/batch.slice/batch-gpu.slice/trainer.service").high == 4 * MIB
        assert books(h, "/batch.slice/batch-gpu.slice").low == 0, "what no file names any more is the default"
        await h.arrive(spawn().pid, "/batch-gpu.slice")
        await h.arrive(spawn().pid, "/pod/trainer.service")
        assert (books(h, "/batch-gpu.slice").low, books(h, "/pod/trainer.service").high) == (0, MAX)


@pytest.mark.logs(r"/a\.conf:2: GMemHigh=: /elsewhere/x\.service is not where units are$")
@virtual
async def test_a_unit_where_no_units_are(tmp_path: Path, manager: FakeManager) -> None:
    """It is reported with the line of the section."""
    (tmp_path / "a.conf").write_text("[x.service]\nGMemHigh=8M\n")
    manager.unit("/elsewhere/x.service")
    async with policy(tmp_path, manager) as h:
        assert await h.listdir("slice") == []


@pytest.mark.logs(
    r"/a\.conf:2: \[/batch-gpu\.slice\] is likely to match nothing: .*: \[/batch\.slice/batch-gpu\.slice\]\?$",
    r"/a\.conf:4: GMemHigh=: \[nightly\.timer\] is likely to match nothing: .*: \[nightly\.service\]\?$",
)
@virtual
async def test_what_can_match_nothing_is_told(tmp_path: Path, manager: FakeManager) -> None:
    """With the line, and with the name that was probably meant."""
    (tmp_path / "a.conf").write_text("[/batch-gpu.slice]\nGMemHigh=8M\n[nightly.timer]\nGMemHigh=8M\n")
    manager.unit("/batch.slice/batch-gpu.slice")
    async with policy(tmp_path, manager) as h:
        assert await h.listdir("slice") == []
