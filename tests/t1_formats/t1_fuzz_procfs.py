"""Fuzzes the parsers of /proc with any bytes in names: each name comes out as it went in, and no others do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import strategies as st

from backend.process import procfs
from backend.process.procfs import Membership, Mount
from tests.support.fuzzed import Target

MANGLED = {byte: f"\\{byte:03o}".encode() for byte in b" \t\n\\"}
"""How seq_path(9) escapes these bytes in the names of mounts."""


def mangled(name: bytes) -> bytes:
    return b"".join(MANGLED.get(byte, bytes((byte,))) for byte in name)


def check(raw: bytes) -> None:
    """Uses the bytes as a mountpoint, a cgroup, the name of a program, and a value."""
    name = raw.replace(b"\0", b"")
    check_mount(b"/" + name)
    check_cgroup(b"/" + name.replace(b"\n", b""))
    check_command(name)
    check_words(raw)


def check_mount(point: bytes) -> None:
    line = b"41 31 0:38 %s %s rw,relatime shared:7 - %s %s rw,freezer\n"
    root, tree = (b"23 1 8:1 / / rw - ext4 /dev/vda rw\n", b"50 23 0:44 / /run/ggroup rw - fuse.ggroupfs  rw\n")
    found = procfs.parse_mounts(root + line % (mangled(point), mangled(point), b"cgroup", mangled(point[1:])) + tree)
    assert found == [
        Mount("8:1", "/", "/", "ext4", ["rw"]),
        Mount("0:38", os.fsdecode(point), os.fsdecode(point), "cgroup", ["rw", "freezer"]),
        Mount("0:44", "/", "/run/ggroup", "fuse.ggroupfs", ["rw"]),
    ]
    assert os.fsencode(found[1].point) == point


def check_cgroup(path: bytes) -> None:
    assert procfs.parse_cgroups(b"3:cpu,cpuacct:/\n1:name=systemd:%s\n0::%s\n" % (path, path)) == [
        Membership(3, b"cpu,cpuacct", "/"),
        Membership(1, b"name=systemd", os.fsdecode(path)),
        Membership(0, b"", os.fsdecode(path)),
    ]


def check_command(name: bytes) -> None:
    fields = b" ".join(b"%d" % number for number in range(4, 53))
    stat = procfs.parse_stat(b"4242 (%s) S %s\n" % (name, fields))
    assert (stat.state, stat.threads, stat.start) == (b"S", 20, 22)
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")  # as the kernel does
    lines = b"Name:\t%s\nUmask:\t0022\nState:\tT (stopped)\nTgid:\t7\nPid:\t8\n%sThreads:\t20\n"
    status = procfs.parse_status(lines % (escaped, b"VmPeak:\t9 kB\nVmSize:\t9 kB\n"))
    assert status == procfs.Status(b"T", 7, 20, has_memory=True)
    assert procfs.parse_status(lines % (escaped, b"")).is_exiting


def check_words(raw: bytes) -> None:
    """No byte of a text is lost but newlines, blanks and tabs."""
    words = [word for line in procfs.lines(raw) for word in procfs.words(line)]
    assert b"".join(words) == raw.translate(None, b"\n \t")
    assert set(procfs.keyed(raw)) <= {word.removesuffix(b":") for word in [*words, b""]}


PIECES = (b"\v", b"\f", b"\r", b"\x1c", b"\x1d", b"\x1e", b"\x85", b"\xc2\x85", b"\xe2\x80\xa8", b"\xc2\xa0", b"\\040")
"""Bytes that end lines, separate words or are escapes in Python's text, and are ordinary bytes to the kernel."""
MEANT = (
    *(b" ", b"\t", b"\n", b"\\", b":", b"/"),
    b"0::/",
    b") R ",
    b" - ",
    b" (deleted)",
    "テスト".encode(),
    b"\xff",
    b"a",
)
pieces = st.one_of(st.sampled_from(PIECES), st.sampled_from(MEANT), st.binary(max_size=3))

NAMES = Target("names", check, st.lists(pieces, max_size=8).map(b"".join), examples=500)


@pytest.mark.parametrize("file", NAMES.kept())
def test_kept(file: Path) -> None:
    NAMES.replay(file)


def test_fresh() -> None:
    NAMES.fuzz()
