"""The check of books of `make test-hostile`: sums that become right pass, and sums that do not are a failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.process.identity import cgroup_of
from tests.hostile.books import Books

STAT = "swapin 0\nswapout 0\n"
NAMES = ("gmem.current", "gmem.swap.current")


def group(directory: Path, current: int, swap: int = 0) -> None:
    """Write the files of a group."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in zip(NAMES, (current, swap), strict=True):
        (directory / name).write_text(f"{value}\n")
    for name in ("gmem.stat", "gmem.events"):
        (directory / name).write_text(STAT)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with this process in a slice, and with figures of the slice that are not its."""
    monkeypatch.setattr("tests.hostile.books.cgroup_of", lambda pid: cgroup_of(pid).__class__("/a"))
    monkeypatch.setattr("tests.hostile.books.PAUSE_S", 0)
    (tmp_path / "ggroup.backend").write_text("")
    group(tmp_path / "gpus/0", 5)
    (tmp_path / "gpus/0/gmem.capacity").write_text("64\n")
    group(tmp_path / str(os.getpid()) / "0", 5)
    group(tmp_path / "slice/a/0", 4)
    return tmp_path


def checked(tree: Path, *looks: Callable[[], None]) -> int:
    """Run the check with an act at each look at all processes; return the number of acts that were done."""
    left = list(looks)
    Books(tree, processes=1).check("a round", lambda: left.pop(0)() if left else None)
    return len(looks) - len(left)


def test_sums_that_come_right_late(tree: Path) -> None:
    """However long that takes: at a first look at all processes, or at another one after a change."""
    assert checked(tree, lambda: group(tree / "slice/a/0", 5)) == 1
    group(tree / "slice/a/0", 4)
    assert checked(tree, lambda: group(tree / "slice/a/0", 3), lambda: group(tree / "slice/a/0", 5)) == 2
    assert checked(tree, lambda: None) == 0, "they are right"


@pytest.mark.parametrize("where", ["slice/a/0", "gpus/0"])
@pytest.mark.parametrize(("current", "swap"), [(4, 0), (6, 0), (5, 1)])
def test_sums_that_stay_wrong(tree: Path, where: str, current: int, swap: int) -> None:
    group(tree / "slice/a/0", 5)
    group(tree / where, current, swap)
    if (where, swap) == ("gpus/0", 1):
        assert checked(tree) == 0, "a GPU has no such file"
        return
    with pytest.raises(AssertionError, match=r"a round: .* is not the sum of"):
        checked(tree)


def test_figures_that_cannot_be_are_none_at_any_time(tree: Path) -> None:
    group(tree / "slice/a/0", -1)
    with pytest.raises(AssertionError, match=r"gmem\.current -1"):
        checked(tree)
