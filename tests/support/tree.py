"""The files of the tree, for what is to hold of all of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ggroupfs", "backend", "kmod", "tests", "systemd", "docs", "packaging", "completions", "benchmarks")


def files() -> list[Path]:
    """The files that git has; those of an archive where there is no repository."""
    if (ROOT / ".git").exists():
        words = ["git", "-C", str(ROOT), "ls-files", "-z"]
        listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        names = [ROOT / name for name in listed.split("\0") if name]
    else:
        names = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in names if path.is_file())
