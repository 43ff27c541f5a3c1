"""What a measurement is of: a digest of the product's code, so that cells are merged only where it is the same.

Prose, tests and benchmarks may change between two sessions; what is measured may not. Of the measuring side there is a
digest of its own, of the programs: a record says it, and a merge refuses two of it as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

PRODUCT = ("ggroupfs", "backend", "kmod", "systemd", "pyproject.toml")
PROGRAMS = ("tests/bench/papers", "tests/bench/gpu", "tests/bench/core/arrivals.py")
KINDS = frozenset(
    {".py", ".mk", ".def", ".c", ".h", ".cu", ".cuh", ".toml", ".service", ".S", ".map", ".proto", ".pyi", ""}
)
"""Suffixes of files that are code, or say how it is built."""
LENGTH = 16
"""Hexadecimal digits that are told."""
BUILT = frozenset({"__pycache__", "build"})


def files(root: Path, names: Iterable[str]) -> Iterator[Path]:
    """The files of code below some folders, in the order of their paths. Without what is built: the same tree has the
    same ones before and after."""
    for name in names:
        top = root / name
        found = [top] if top.is_file() else sorted(top.rglob("*"))
        for path in found:
            inside = path.relative_to(root).parts
            hidden = any(part in BUILT or part.startswith(".") or part.endswith(".egg-info") for part in inside)
            if path.is_file() and path.suffix in KINDS and not hidden and not _program(path):
                yield path


def _program(path: Path) -> bool:
    """Whether a file without a suffix is what a compiler made."""
    if path.suffix:
        return path.name.endswith(".mod.c")
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def digest(root: Path, names: Iterable[str] = PRODUCT) -> str:
    """The first digits of a SHA-256 over names and contents. FileNotFoundError where there is no such code."""
    made, count = hashlib.sha256(), 0
    for path in files(root, names):
        count += 1
        name = path.relative_to(root).as_posix().encode()
        made.update(len(name).to_bytes(4, "little") + name + hashlib.sha256(path.read_bytes()).digest())
    if not count:
        raise FileNotFoundError(f"{root}: there is no code of the product")
    return made.hexdigest()[:LENGTH]
