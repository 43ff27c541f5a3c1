"""The manual pages describe every control file, key and mount option, and mandoc finds no fault with them."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest

from ggroupfs.fs import controls, facts
from ggroupfs.fs.controls import CONTROLS
from tests.support.spoken import flags, mount_options, subcommands

MAN = Path(__file__).resolve().parents[2] / "docs" / "man"
PAGES = sorted(MAN.glob("*.[1-9]"))


def items(page: str, macro: str) -> set[str]:
    """The words that a page's lists describe in items with this `macro` (mdoc(7): Pa a path, Cm a word, Fl a flag)."""
    found: set[str] = set()
    for line in re.findall(rf"^\.It {macro} (.*)$", (MAN / page).read_text(), re.MULTILINE):
        found |= {word for word in re.split(r" Ns .*|[ ,|]+", line) if word} if macro != "Cm" else {*line.split()}
    return found


def keys() -> set[str]:
    """The keys of all control files whose lines are KEY VALUE, read from the source of controls.py."""
    calls = (node for node in ast.walk(ast.parse(inspect.getsource(controls))) if isinstance(node, ast.Call))
    tables = [c.args[0] for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "flat_keyed"]
    found = {
        key.value  # type: ignore[attr-defined]
        for table in tables
        if isinstance(table, ast.Dict)
        for key in table.keys
        if key is not None
    }
    assert {"resident", "frozen", "tsgs"} <= found, "controls.py is written another way: this has to be, too"
    return found


def test_every_control_file() -> None:
    """The page describes every control file, and calls nothing else one."""
    names = {control.name for control in CONTROLS}
    told = items("ggroupfs.5", "Pa")
    assert names <= told
    others = {control.name for control in (*facts.ROOT_FACTS, *facts.GPU_FACTS)}
    assert others <= told
    assert {name for name in told if "." in name} == {name for name in names | others if "." in name}


def test_every_key() -> None:
    assert keys() <= items("ggroupfs.5", "Cm")


def test_every_mount_option() -> None:
    """Both the page of mount(8) and that of the command describe each option."""
    for page in ("mount.fuse.ggroupfs.8", "ggroupfs.8"):
        assert mount_options() <= {word.strip(",") for word in items(page, "Cm")}, page


@pytest.mark.parametrize(
    ("command", "behind"),
    [
        ("cdi", ".It Cm account"),
        ("account", ".It Cm metrics"),
        ("metrics", ".It Cm node"),
        ("node", ".It Cm tenant"),
        ("policy", ".It Cm balance"),
        ("balance", ".It Cm replay"),
        ("replay", ".Sh MOUNT OPTIONS"),
        ("set", ".It Cm doctor"),
    ],
    ids=["cdi", "account", "metrics", "node", "policy", "balance", "replay", "set"],
)
def test_every_option(command: str, behind: str) -> None:
    text = (MAN / "ggroupfs.8").read_text().replace("\\-", "-")
    part = text.partition(f".It Cm {command}\n")[2].partition(behind)[0]
    found = {f"-{flag}" for flag in re.findall(r"^\.It Fl (\S+)", part, re.MULTILINE)}
    assert found == flags(subcommands()[command]) - {"-h", "--help", "--mount"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_mandoc_has_nothing_to_say(page: Path) -> None:
    result = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", page], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "")
