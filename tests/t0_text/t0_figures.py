"""Level 0: which control files the figures are read from, and what each file's text becomes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from backend.core.records import MAX, Footprint
from ggroupfs.fs.controls import CONTROLS
from ggroupfs.view import collector
from ggroupfs.view.figures import EVERYTHING, SOURCES, Figures, figures_of, files_for
from ggroupfs.view.frame import FIELDS


def test_the_sources_are_what_the_table_of_controls_can_show_to_all_users() -> None:
    for_all = [control for control in CONTROLS if control.mode & 0o004]
    assert {*SOURCES} == {control.name for control in for_all if control.show is not None}


@pytest.mark.parametrize(
    ("fields", "files"),
    [
        ((), ()),
        (("current",), ("gmem.current",)),
        (("current", "swap"), ("gmem.stat",)),
        (("swap", "swapin_bytes", "current"), ("gmem.stat",)),
        (("high", "current"), ("gmem.current", "gmem.limit.high")),
        (("finished", "gpu_usec", "frozen"), ("gcgroup.stat", "compute.events")),
    ],
)
def test_no_more_files_than_needed(fields: tuple[str, ...], files: tuple[str, ...]) -> None:
    assert files_for(fields) == files


def test_every_figure_is_in_a_file() -> None:
    assert set(files_for(EVERYTHING)) <= SOURCES.keys()
    assert frozenset[str]().union(*(source.fields for source in SOURCES.values())) == EVERYTHING
    with pytest.raises(KeyError, match="no control file tells colour"):
        files_for({"colour", "current"})


def test_what_an_entry_costs() -> None:
    """A frame of `ggroupfs top` opens 8 files for each slice, a scrape of the metrics 15."""
    assert len(files_for(FIELDS)) == 8
    assert len(collector.FILES) == 15


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("gmem.limit.high", "max", {"high": MAX}),
        ("gmem.limit.low", "0", {"low": 0}),
        ("gmem.events", "low 0\nhigh 2", {"events": {"low": 0, "high": 2}}),
        ("gmem.events", "max 3\nover 1", {"events": {"max": 3}, "over": True}),
        ("gmem.limit.max", "max", {"limit_max": MAX}),
        ("gmem.oom.group", "1", {"oom_group": True}),
        ("gmem.stat", "resident 5\nswapped 7\nof_tomorrow 1", {"current": 5, "swap": 7}),
        ("compute.timeslice", "default", {"timeslice": 0.0}),
        ("compute.timeslice", "2.048", {"timeslice": 2.048}),
        ("compute.freeze", "1", {"freeze": True}),
        ("compute.events", "populated 1\nfrozen 0", {"populated": True, "frozen": False}),
        ("compute.sm.max", "max\n", {"sm_max": 0}),
        ("compute.sm.max", "64", {"sm_max": 64}),
        ("compute.wait.max", "default\n", {"wait_max": 0.0}),
        ("compute.wait.max", "250\n", {"wait_max": 250.0}),
        ("compute.spatial", "1\n", {"spatial": True}),
        ("compute.max", "max 100000\n", {"quota": MAX, "period": 100_000}),
        ("compute.max", "30000 50000", {"quota": 30_000, "period": 50_000}),
        ("gcgroup.stat", "tsgs 2\nmanaged 0", {"tsgs": 2, "managed": False}),
        ("gcgroup.stat", "off_freeze 0\noff_turn 2\noff_gr 1", {"off": {"freeze": 0, "turn": 2, "gr": 1}}),
        ("gcgroup.stat", "", {}),
    ],
)
def test_what_a_file_says(tmp_path: Path, name: str, text: str, told: dict[str, Any]) -> None:
    """A figure that the file leaves out is unknown; a key that no figure stands for is ignored."""
    (tmp_path / name).write_text(f"{text}\n" if text else "")
    for directory in (tmp_path, os.fspath(tmp_path)):
        assert figures_of(directory, (name,)) == Figures(**told)


def test_a_group_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        figures_of(tmp_path, ("gmem.peak",))


def test_what_programs_say_of_themselves_adds_up_to_a_number() -> None:
    """The sum stops at the largest number of 64 bits, since that is what readers of a slice's files read."""
    said = Footprint(implicit=0, unmovable=0, disputed=0, exchanged=MAX)
    assert (said + said + said).exchanged == MAX
    assert (said + Footprint()).exchanged is None


@pytest.mark.parametrize("name", ["compute.max", "gmem.limit.max", "gmem.oom.group"])
def test_a_daemon_of_an_earlier_version_lacks_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "compute.weight").write_text("100\n")
    assert figures_of(tmp_path, ["compute.weight", name]) == Figures(weight=100)
    with pytest.raises(FileNotFoundError):
        figures_of(tmp_path / "gone", [name])
