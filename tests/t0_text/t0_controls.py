"""The one table of control files is complete: every name, mode and direction, and what it may promise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from backend.core import settings
from backend.core.records import Capability
from backend.core.settings import MAX, Kind, Setting
from backend.process.identity import ROOT, SliceOn
from backend.soft.gpu import SoftGpu
from ggroupfs.fs.controls import CONTROLS, LEVERS, shown
from ggroupfs.fs.inodes import FIRST_FILE_SLOT, SLOT_BITS
from ggroupfs.text import values

DESIGN = {
    "gmem.limit.high": 0o644,
    "gmem.limit.max": 0o644,
    "gmem.limit.low": 0o644,
    "gmem.oom.group": 0o644,
    "gmem.current": 0o444,
    "gmem.peak": 0o644,
    "gmem.swap.peak": 0o644,
    "gmem.swap.current": 0o444,
    "gmem.swap.max": 0o644,
    "gmem.reclaim": 0o200,
    "gmem.events": 0o444,
    "gmem.stat": 0o444,
    "usermemfd": 0o444,
    "compute.timeslice": 0o644,
    "compute.freeze": 0o644,
    "compute.priority": 0o644,
    "compute.weight": 0o644,
    "compute.max": 0o644,
    "compute.wait.max": 0o644,
    "compute.spatial": 0o644,
    "compute.sm.max": 0o644,
    "compute.migrate": 0o200,
    "compute.events": 0o444,
    "gcgroup.stat": 0o444,
    "gcgroup.record": 0o400,
}


def test_the_table_is_the_design() -> None:
    assert {control.name: control.mode for control in CONTROLS} == DESIGN


def test_modes_say_what_the_functions_can() -> None:
    for control in CONTROLS:
        assert (control.show is not None or control.name == "usermemfd") == bool(control.mode & 0o444), control.name
        assert (control.apply is not None) == (control.parse is not None) == bool(control.mode & 0o200), control.name


@pytest.mark.parametrize("kind", [Kind.SIZE, Kind.SPAN, Kind.SWITCH, Kind.NUMBER])
def test_a_setting_shows_what_was_written_to_it(kind: Kind) -> None:
    """For a new setting of each kind, the file shows its value as its parser accepts it."""
    setting = Setting("fresh", kind, most=1 if kind is Kind.SWITCH else 5000, control="compute.fresh")
    for value in (0, 1, *(range(999, 3000, 500) if setting.most > 1 else ())):
        books = SimpleNamespace(fresh=value, timeslice_us=77)
        controller = SimpleNamespace(ledger=SimpleNamespace(books=lambda group, books=books: books))
        text = shown(setting)(controller, SliceOn(ROOT, 0))  # type: ignore[arg-type]
        assert values.parser(setting)(text.rstrip("\n")) == value


def test_a_file_with_two_numbers_shows_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("fresh", Kind.QUOTA, least=1000, most=MAX, control="compute.fresh")
    monkeypatch.setitem(settings.SECOND, "fresh", Setting("fresh_period", Kind.NUMBER, most=10**6, in_file_of="fresh"))
    books = SimpleNamespace(fresh=30_000, fresh_period=200_000, quota_us=77_000, period_us=78_000)
    controller = SimpleNamespace(ledger=SimpleNamespace(books=lambda group: books))
    text = shown(setting)(controller, SliceOn(ROOT, 0))  # type: ignore[arg-type]
    assert values.parser(setting)(text.rstrip("\n")) == (30_000, 200_000)


def test_every_channel_has_its_file() -> None:
    assert {control.channel.value: control.name for control in CONTROLS if control.channel is not None} == {
        name: name for name in ("gmem.events", "compute.events", "usermemfd")
    }


def test_the_software_gpu_says_what_each_lever_does() -> None:
    table = SoftGpu().capabilities()
    assert set(table) == set(LEVERS)
    assert {name for name, what in table.items() if what is Capability.UNSUPPORTED} == {"compute.migrate"}


def test_inode_numbers_have_room_for_the_table() -> None:
    assert len(CONTROLS) + FIRST_FILE_SLOT < 1 << SLOT_BITS
