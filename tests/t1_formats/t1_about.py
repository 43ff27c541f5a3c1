"""Level 1: what the library says of itself in its file."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

from backend.cuda.about import MAGIC, MARK, About, about
from backend.door.wire import CUDA, CUDA_ALL, VERSION, Feature, names

SOURCE = Path(__file__).parents[2] / "backend" / "cuda" / "library" / "daemon" / "about.c"


def test_the_library_of_this_tree_fits(tmp_path: Path) -> None:
    """The mark of the C source is what Python reads, and says what the daemon of the same tree speaks."""
    made = tmp_path / "about.o"
    subprocess.run(["gcc", "-std=gnu11", "-O2", "-Wall", "-Werror", "-c", SOURCE, "-o", made], check=True)
    found = about(made)
    assert found == About(VERSION, CUDA_ALL)
    assert found.misfit == ""


@pytest.mark.parametrize(
    ("version", "features", "misfit"),
    [
        (VERSION, CUDA_ALL | 1 << 40, ""),
        (VERSION, CUDA_ALL & ~Feature.DEPART, "lacks depart"),
        (VERSION, CUDA, "lacks sets"),
        (VERSION, 0, f"lacks {names(CUDA_ALL)}"),
        (VERSION + 1, CUDA, f"speaks version {VERSION + 1}, and this program {VERSION}"),
    ],
)
def test_which_library_fits(tmp_path: Path, version: int, features: int, misfit: str) -> None:
    path = tmp_path / "library"
    path.write_bytes(b"\x7fELF" + bytes(99) + MARK.pack(MAGIC, version, features) + b"more")
    assert about(path).misfit == misfit


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + bytes(200), bytes(9) + MAGIC + bytes(15)])
def test_a_library_that_says_nothing(tmp_path: Path, content: bytes) -> None:
    """As that of 0.1 does, and one that is cut off."""
    path = tmp_path / "library"
    path.write_bytes(content)
    with pytest.raises(OSError, match="does not say what it speaks") as raised:
        about(path)
    assert raised.value.errno == errno.ENOEXEC
