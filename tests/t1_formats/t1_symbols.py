"""Level 1: the symbols that the library needs from other libraries, which in an old image are old ones."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build" / "cuda" / "libggroup-cuda.so"
MOST = (2, 17)
"""The newest version of glibc whose symbols the library may need: that of RHEL 7, from 2012."""
NEEDED = {"libc.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}
"""The libraries that the library names as needed: before glibc 2.34 threads and dlopen(3) were not in libc. The loader
tells which objects are loaded (_r_debug)."""
SYMBOL = re.compile(r"\bUND\s+(?P<name>\w+)(?:@+(?P<version>\w+(?:\.\d+)*))?")
VERSION = re.compile(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?")


def asked(library: Path) -> Mapping[str, str]:
    """The symbols that a library takes from others, with their versions (an empty string for a symbol without one)."""
    words = ["readelf", "--dyn-syms", "--wide", library]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return {found["name"]: found["version"] or "" for line in lines if (found := SYMBOL.search(line))}


def too_new(symbols: Mapping[str, str]) -> Mapping[str, str]:
    """The symbols among these that an old glibc does not have."""
    return {
        name: version
        for name, version in symbols.items()
        if version and not ((found := VERSION.fullmatch(version)) and (int(found[1]), int(found[2])) <= MOST)
    }


@pytest.fixture(scope="module")
def library() -> Path:
    """The library, as `make cuda` built it."""
    assert LIBRARY.is_file(), f"there is no {LIBRARY}: make cuda"
    return LIBRARY


def test_the_library_asks_for_nothing_that_an_old_glibc_lacks(library: Path) -> None:
    symbols = asked(library)
    assert {"pthread_create", "_r_debug", "clock_gettime", "memcpy"} <= symbols.keys()
    assert too_new(symbols) == {}


def test_the_library_names_where_an_old_glibc_has_them(library: Path) -> None:
    words = ["readelf", "--dynamic", "--wide", library]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"\(NEEDED\).*\[(.+)\]", said)) == NEEDED


@pytest.mark.parametrize("name", ["pthread_create", "pthread_cond_clockwait", "getrandom"])
def test_a_symbol_that_is_too_new_is_found(name: str, tmp_path: Path) -> None:
    """Without the measures that the library takes, the same compiler makes a library that needs a newer glibc."""
    made = tmp_path / "new.so"
    source = f"extern int {name}(void); int ask(void); int ask(void) {{ return {name}(); }}"
    words = ["gcc", "-x", "c", "-fno-builtin", "-shared", "-fPIC", "-o", made, "-"]
    subprocess.run(words, input=source, text=True, check=True)
    assert too_new(asked(made)).keys() == {name}
