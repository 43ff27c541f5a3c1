"""What a measurement is of: a digest of the product's code, so that cells are merged only where it is the same.

Prose, tests and benchmarks may change between two sessions; what is measured may not. Of what measures a scenario there
is a digest of its own, and a merge refuses two of that within a scenario as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

PRODUCT = ("ggroupfs", "backend", "kmod", "systemd", "pyproject.toml")
COMMON = (
    *("tests/bench/papers/lab.py", "tests/bench/papers/requests.py", "tests/bench/papers/sharing.py"),
    *("tests/bench/gpu/lab.py", "tests/bench/gpu/systems.py", "tests/bench/core/arrivals.py"),
)
_PROGRAMS = "tests/bench/papers/programs/"
_TORCH = (f"{_PROGRAMS}page.py", f"{_PROGRAMS}zoo.py")
MEASURING: Mapping[str, Sequence[str]] = {
    "pairs": (
        "tests/bench/papers/pairs.py",
        *(
            f"{_PROGRAMS}{name}"
            for name in ("page.py", "llm.py", "diffusion.py", "finetune.py", "giver.py", "ballast.cu")
        ),
    ),
    "salus": ("tests/bench/papers/salus.py", *_TORCH, f"{_PROGRAMS}nursery.py"),
    "flyt": (
        *("tests/bench/papers/flyt.py", "tests/bench/papers/actions.py", "tests/bench/papers/apps.py"),
        *(*_TORCH, f"{_PROGRAMS}calls.cu", "tests/bench/gpu/programs"),
    ),
    "scale": (
        *("tests/bench/papers/scale.py", "tests/bench/papers/site.py", "tests/bench/papers/gangs.py"),
        *("tests/bench/papers/bands.py", f"{_PROGRAMS}page.py", f"{_PROGRAMS}gang.py"),
        "tests/bench/gpu/programs/products.cu",
    ),
}
"""What measures, besides COMMON, by how the name of a scenario begins: a mend of one leaves the others as they are."""
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


def measuring(root: Path, scenario: str) -> str:
    """The digest of what measures a scenario. KeyError for one that is not known."""
    return digest(root, (*COMMON, *MEASURING[scenario.partition("-")[0]]))
