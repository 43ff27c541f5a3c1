"""`ggroupfs set --reset`: settings of a slice or a process go back to their defaults, all of them or those named."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.core.settings import APPLIED, BY_CONTROL
from ggroupfs.commands.set import reset
from ggroupfs.errors import UsageError
from ggroupfs.text.values import show_default
from tests.support.command import complaint, ok
from tests.support.mounted import Mounted, Tenant

NAME = "resettest.slice"


CHANGED = {
    "gmem.limit.high": "1G",
    "gmem.limit.low": "1M",
    "gmem.swap.max": "1G",
    "compute.timeslice": "4",
    "compute.freeze": "1",
    "compute.priority": "1",
    "compute.weight": "7",
    "compute.max": "30000 50000",
    "gmem.limit.max": "2G",
    "gmem.oom.group": "1",
    "compute.wait.max": "300",
    "compute.spatial": "1",
    "compute.sm.max": "64",
}


def changed(group: Path) -> dict[str, str]:
    """Return the settings of a slice that differ from the default, by control file."""
    return {
        name: text
        for name, row in BY_CONTROL.items()
        if (text := (group / name).read_text().rstrip("\n")) != show_default(row)
    }


@pytest.fixture
def group(mount: Mounted) -> Iterator[Path]:
    """Yield a slice with every setting set."""
    (mount / f"slice/{NAME}").mkdir()
    assert set(CHANGED) == {one.control for one in APPLIED}, "a new setting has to be here"
    words = (f"{key}={value}" for key, value in CHANGED.items())
    ok("set", "--mount", mount.path, NAME, *words)
    found = mount / f"slice/{NAME}/0"
    assert set(changed(found)) == set(CHANGED)
    yield found
    found.parent.rmdir()


@pytest.mark.parametrize("words", ["--reset NAME", "NAME --reset", "NAME --gpu 0 --reset"])
def test_all_settings_go_to_their_defaults(mount: Mounted, group: Path, words: str) -> None:
    assert ok("set", "--mount", mount.path, *words.replace("NAME", NAME).split()) == ""
    assert changed(group) == {}
    assert group.exists(), "the slice stays"


@pytest.mark.parametrize("words", ["NAME --reset GMemHigh compute.weight", "--reset NAME GMemHigh ComputeWeight"])
def test_some_settings_go_to_their_defaults(mount: Mounted, group: Path, words: str) -> None:
    """They are named by control file or by property; all others keep their values."""
    ok("set", "--mount", mount.path, *words.replace("NAME", NAME).split())
    assert set(changed(group)) == set(CHANGED) - {"gmem.limit.high", "compute.weight"}


def test_a_process_is_reset(mount: Mounted) -> None:
    """Without its limit it can hold more, and shows the GPU's timeslice again."""
    with Tenant(mount, "--gmem", "64M", "--report", "0.1") as tenant:
        own = (tenant.group / "compute.timeslice").read_text()
        ok("set", "--mount", mount.path, tenant.pid, "GMemHigh=16M", "ComputeTimeSlice=7ms", "ComputeFreeze=yes")
        ok("set", "--mount", mount.path, tenant.pid, "--reset")
        assert (tenant.group / "gmem.limit.high").read_text() == "max\n"
        assert (tenant.group / "compute.timeslice").read_text() == own
        assert (tenant.group / "compute.freeze").read_text() == "0\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--reset NAME GMemHigh=1G", "set: GMemHigh=1G: --reset takes the KEY alone"),
        ("--reset NAME GMemHigh GMemMiddle", "set: GMemMiddle: no setting that has a default"),
        ("--reset NAME gmem.reclaim", "set: gmem.reclaim: no setting that has a default"),
        ("--reset NAME GMemHigh gmem.current", "set: gmem.current: no setting that has a default"),
        ("NAME", "set: KEY=VALUE is missing"),
        ("NAME GMemHigh", "set: GMemHigh: not KEY=VALUE"),
    ],
)
def test_a_bad_reset_is_one_line_and_changes_nothing(mount: Mounted, group: Path, words: str, line: str) -> None:
    words = words.replace("NAME", NAME)
    assert complaint("set", "--mount", mount.path, *words.split(), code=2) == line
    assert set(changed(group)) == set(CHANGED)


def test_what_is_not_there_is_not_made(mount: Mounted) -> None:
    for word in ("4194304", "never.slice", "/never/here"):
        line = complaint("set", "--mount", mount.path, "--reset", word, code=1)
        assert line == f"set: {word}: No such file or directory (ENOENT): no such process, slice or control file"
    assert not (mount / "slice/never.slice").exists()


def test_what_a_machine_or_an_older_daemon_lacks_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This applies to a reset of all settings; a setting that is named is refused like any write."""
    group = tmp_path / "slice" / NAME / "0"
    group.mkdir(parents=True)
    for name, text in CHANGED.items():
        if name != "compute.weight":
            (group / name).write_text(f"{text}\n")
    real = Path.write_text

    def refusing(path: Path, text: str) -> int:
        if path.name == "compute.timeslice":
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, text)

    monkeypatch.setattr(Path, "write_text", refusing)
    reset(tmp_path, NAME, None, [])
    (group / "compute.weight").write_text("100\n")
    assert set(changed(group)) == {"compute.timeslice"}
    (group / "compute.weight").unlink()
    with pytest.raises(RuntimeError, match=r"compute\.timeslice=default: .*EOPNOTSUPP"):
        reset(tmp_path, NAME, None, ["ComputeTimeSlice"])
    with pytest.raises(UsageError, match=r"^compute\.weight: there is no such control$"):
        reset(tmp_path, NAME, None, ["compute.weight"])


def test_help_says_both_forms() -> None:
    text = ok("set", "--help")
    assert "ggroupfs set [-h] [--gpu N] [--timeout SPAN] [--mount MOUNT] PATH KEY=VALUE ..." in text
    assert "ggroupfs set [-h] [--gpu N] [--mount MOUNT] --reset PATH [KEY ...]" in text
