"""Level 0: the version is written down in few places, and they all say the same."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ggroupfs.cli import main

ROOT = Path(__file__).parents[2]

PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "ggroupfs/__init__.py": r'^VERSION = "(.+)"$',
    "kmod/dkms.conf": r'^PACKAGE_VERSION="(.+)"$',
    "kmod/main.c": r'^MODULE_VERSION\("(.+)"\);$',
}
"""The files that state the version, each with the pattern of the line."""


def stated(place: str) -> str:
    """The version that a file states, on exactly one line."""
    (found,) = re.findall(PLACES[place], (ROOT / place).read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def test_all_places_say_the_same() -> None:
    assert {stated(place) for place in PLACES} == {version("ggroupfs")}


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out == f"ggroupfs {stated('pyproject.toml')}\n"


def test_no_other_command_line_looks_it_up() -> None:
    """Reading the metadata of packages would take as long as everything else that a short command does."""
    words = [sys.executable, "-X", "importtime", "-m", "ggroupfs", "show", "--help"]
    done = subprocess.run(words, text=True, capture_output=True, check=True)
    assert "ggroupfs.cli" in done.stderr
    assert "importlib.metadata" not in done.stderr
