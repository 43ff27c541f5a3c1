"""Level 0: unit files and slices.d: their syntax, and the settings that result from several files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.records import GpuInfo
from backend.process.identity import Slice
from ggroupfs.units import files
from ggroupfs.units.manager import unit_of
from ggroupfs.units.settings import merge
from ggroupfs.units.unitfile import BLANKS, Assignment, Place, assignments

FILE = Path("/etc/systemd/system/x.service")
GPUS = [GpuInfo(index, f"GPU-{index}a", "stub", "none", 1 << 30, 2000) for index in (0, 1)]


def parsed(text: str) -> list[tuple[str, str, str | None, int]]:
    return [(one.section, one.key, one.value, one.place.line) for one in assignments(text, FILE)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("[A]\n", []),
        ("[A]\nk=v", [("A", "k", "v", 2)]),
        ("[A]\nk=v\n[B]\nk=w\n[A]\nk=x\n", [("A", "k", "v", 2), ("B", "k", "w", 4), ("A", "k", "x", 6)]),
        ("  [A]  \n\t k \t= v = w \n", [("A", "k", "v = w", 2)]),
        ("[A]\n# k=v\n ; k=v\nk=#v;\n", [("A", "k", "#v;", 4)]),
        ("[A]\nk=\n", [("A", "k", "", 2)]),
        ("[A]\nk=a\\\nb\n", [("A", "k", "a b", 2)]),
        ("[A]\nk=a \\\n\t b\\\n  c\nl=d", [("A", "k", "a  b c", 2), ("A", "l", "d", 5)]),
        ("[A]\nk=a\\\n# no\n; no\n  b\n", [("A", "k", "a b", 2)]),
        ("[A]\nk=a\\\n\nl=b\n", [("A", "k", "a", 2), ("A", "l", "b", 4)]),
        ("[A]\nk=a\\\\\nl=b\n", [("A", "k", "a\\\\", 2), ("A", "l", "b", 3)]),
        ("[A]\nk=a\\", [("A", "k", "a", 2)]),
        ("[A]\r\nk=v\r\nl=w\r", [("A", "k", "v", 2), ("A", "l", "w", 3)]),
        ("\ufeff[A]\nk=v", [("A", "k", "v", 2)]),
        ("k=v", [("", "k", "v", 1)]),
        ("[A\nk=v", [("[A", "k", "v", 2)]),
        ("[A]\nnonsense\nk=v", [("A", "nonsense", None, 2), ("A", "k", "v", 3)]),
        ("[A]\n=v", [("A", "", "v", 2)]),
        ("[A]\n\\\n", []),
    ],
)
def test_syntax(text: str, found: list[tuple[str, str, str | None, int]]) -> None:
    assert parsed(text) == found


words = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0=[]#;\\"), min_size=1).map(
    lambda word: word.strip(BLANKS)
)
keys = words.filter(lambda word: bool(word) and word[0] not in "\ufeff")


@given(st.lists(st.tuples(words.filter(bool), st.lists(st.tuples(keys, words)))))
def test_what_is_written_is_read(sections: list[tuple[str, list[tuple[str, str]]]]) -> None:
    """Comments and continuation lines in between change nothing."""
    text, wanted = "# first\n", []
    for name, pairs in sections:
        text += f"[{name}]\n"
        for key, value in pairs:
            text += f"; before\n{key} = \\\n# within\n {value}\n\n"
            wanted.append((name, key, value))
    assert [(one.section, one.key, one.value) for one in assignments(text, FILE)] == wanted


@given(st.text())
def test_every_text_has_an_answer(text: str) -> None:
    lines = len(text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\n").split("\n"))
    for one in assignments(text, FILE):
        assert 0 < one.place.line <= lines


def section(*pairs: tuple[str, str]) -> list[Assignment]:
    return [Assignment("X-GGroup", key, value, Place(FILE, line)) for line, (key, value) in enumerate(pairs, 2)]


def test_the_last_one_counts_and_order_is_that_of_application() -> None:
    settings, mistakes = merge(section(("ComputeFreeze", "yes"), ("GMemHigh", "1G"), ("GMemHigh", "2G")))
    assert not mistakes
    assert [(one.name, one.value, one.place.line) for one in settings.values.values()] == [
        ("GMemHigh", "2G", 4),
        ("ComputeFreeze", "yes", 2),
    ]


def test_an_empty_one_is_the_default() -> None:
    settings, mistakes = merge(section(("GMemHigh", "1G"), ("GMemHigh", ""), ("GPUs", "0"), ("GPUs", "")))
    assert not mistakes
    assert settings.values["GMemHigh"].value == ""
    assert settings.on(GPUS[1])


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("MemoryHigh", "1G", "there is no such property"),
        ("gmem.limit.high", "1G", "there is no such property"),
        ("GMemHigh", "much", "not a size: bytes, or with K, M, G or T, a percentage, or infinity"),
        ("GMemHigh", "101%", "more than 100 %"),
        ("ComputeTimeSlice", "0", "no time at all"),
        ("ComputePriority", "16", "not a number from 0 to 15"),
        ("ComputeFreeze", "perhaps", "not yes or no"),
        ("GPUs", "one", "one: not the index or UUID of a GPU"),
        ("GPUs", "all 1", "all, or some GPUs, not both"),
    ],
)
def test_a_mistake_has_its_place_and_the_rest_applies(key: str, value: str, reason: str) -> None:
    settings, mistakes = merge(section(("GMemHigh", "1G"), (key, value), ("GMemLow", "1M")))
    assert [str(one) for one in mistakes] == [f"{FILE}:3: {key}=: {reason}"]
    assert {name: one.value for name, one in settings.values.items()} == {"GMemHigh": "1G", "GMemLow": "1M"}
    assert settings.on(GPUS[0])
    assert settings.on(GPUS[1])


@pytest.mark.parametrize(
    ("value", "on", "unknown"),
    [
        ("all", [0, 1], []),
        ("", [0, 1], []),
        ("0", [0], []),
        ("0,1", [0, 1], []),
        (" 01  GPU-0a ", [0, 1], []),
        ("GPU-1a", [1], []),
        ("1 7", [1], ["there is no GPU 7"]),
        ("GPU-none", [], ["there is no GPU GPU-none"]),
    ],
)
def test_gpus(value: str, on: list[int], unknown: list[str]) -> None:
    settings, mistakes = merge(section(("GMemHigh", "1G"), ("GPUs", value)))
    assert not mistakes
    assert [gpu.index for gpu in GPUS if settings.on(gpu)] == on
    assert [one.reason for one in settings.unknown(GPUS)] == unknown


def test_the_files_of_a_unit(tmp_path: Path) -> None:
    """The sections of systemd are ignored, including the mistakes in them."""
    fragment, drop_in, gone = tmp_path / "x.service", tmp_path / "50.conf", tmp_path / "gone.conf"
    fragment.write_text("[Service]\nnonsense\nGMemHigh=1\n[X-GGroup]\nGMemHigh=1G\nGMemLow=1M\n[X-GGroup]\nnonsense\n")
    drop_in.write_text("[X-GGroup]\nGMemHigh=2G\nGMemLow=lots\n")
    settings, mistakes = files.of_unit([fragment, drop_in, gone])
    assert {name: (one.value, one.place.file) for name, one in settings.values.items()} == {
        "GMemHigh": ("2G", drop_in),
        "GMemLow": ("1M", fragment),
    }
    assert [str(one) for one in mistakes] == [
        f"{gone}: No such file or directory",
        f"{fragment}:8: nonsense=: not KEY=VALUE",
        f"{drop_in}:3: GMemLow=: not a size: bytes, or with K, M, G or T, a percentage, or infinity",
    ]


def test_slices_d(tmp_path: Path) -> None:
    """Files are read in the order of their names, and a star stands for one component of a path."""
    (tmp_path / "20.conf").write_text("[/batch/gpu/]\nGMemHigh=2G\n")
    (tmp_path / "10.conf").write_text(
        "GMemLow=1\n[batch]\nGMemLow=1\n[/]\nGMemLow=1\n[/../x]\nGMemLow=1\n"
        "[/batch/*]\nGMemHigh=1G\nGMemLow=1M\n[/batch/[ab]?]\nGMemHigh=3G\nGMemHiho=1\n"
    )
    (tmp_path / "30.conf~").write_text("[/batch/gpu]\nGMemHigh=9G\n")
    table = files.of_directory(tmp_path)

    def high(path: str) -> str | None:
        setting = table.of(Slice(path)).values.get("GMemHigh")
        return setting.value if setting is not None else None

    paths = ("/batch/gpu", "/batch/x", "/batch/a1", "/batch/ab1", "/batch", "/batch/x/y", "/")
    assert [high(path) for path in paths] == ["2G", "1G", "3G", "1G", None, None, None]
    where = tmp_path / "10.conf"
    assert [str(one) for one in table.mistakes] == [
        f"{where}:1: GMemLow=: before the first section",
        f"{where}:3: GMemLow=: [batch] is not the path of a cgroup: [/batch]?",
        f"{where}:5: GMemLow=: [/] is not the path of a cgroup",
        f"{where}:7: GMemLow=: [/../x] is not the path of a cgroup",
        f"{where}:13: GMemHiho=: there is no such property",
    ]
    assert files.of_directory(tmp_path / "none") == files.Table([], [])


def test_what_is_no_regular_file_is_a_mistake_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    """None of them is opened: a FIFO would block until it has a writer, and a terminal until its user types."""
    os.mkfifo(tmp_path / "10.conf")
    (tmp_path / "20.conf").mkdir()
    (tmp_path / "30.conf").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tmp_path / "40.conf"))
    (tmp_path / "50.conf").symlink_to(tmp_path / "one")
    (tmp_path / "one").write_text("[/x]\nGMemHigh=1G\n")
    table = files.of_directory(tmp_path)
    assert [one.value for one in table.of(Slice("/x")).values.values()] == ["1G"]
    assert [str(one) for one in table.mistakes] == [
        f"{tmp_path}/10.conf: it is no regular file",
        f"{tmp_path}/20.conf: it is no regular file",
        f"{tmp_path}/30.conf: it is no regular file",
        f"{tmp_path}/40.conf: No such device or address",
    ]
    settings, (mistake,) = files.of_unit([tmp_path / "10.conf", tmp_path / "one"])
    assert (settings.values, mistake.reason) == ({}, "it is no regular file")


@pytest.mark.parametrize(
    ("section", "meant"),
    [
        ("/batch-gpu.slice", "systemd has batch-gpu.slice in batch.slice: [/batch.slice/batch-gpu.slice]?"),
        (
            "/a.slice/a-b-c.slice/x.service",
            "systemd has a-b-c.slice in a-b.slice: [/a.slice/a-b.slice/a-b-c.slice/x.service]?",
        ),
        (
            "/user.slice/*/user@*.service/app-x.slice",
            "systemd has app-x.slice in app.slice: [/user.slice/*/user@*.service/app.slice/app-x.slice]?",
        ),
        ("/sys/fs/cgroup/batch.slice", "a path of a cgroup begins at the root of the hierarchy: [/batch.slice]?"),
        ("/sys/fs/cgroup/unified/a/b", "a path of a cgroup begins at the root of the hierarchy: [/a/b]?"),
        ("/sys/fs/cgroup", "a path of a cgroup begins at the root of the hierarchy"),
        ("/trainer.service", "systemd has a service in a slice: [trainer.service]?"),
        ("/system.slice/nightly.timer", "systemd makes no cgroup for a timer: [nightly.service]?"),
        ("/multi-user.target", "systemd makes no cgroup for a target"),
        ("/init.scope", ""),
        ("/system.slice/trainer.service", ""),
        ("/job/nightly.timer", ""),
        ("/*.service", ""),
        ("/batch.slice/batch-gpu.slice", ""),
        ("/*/batch-gpu.slice", ""),
        ("/batch-*.slice", ""),
        ("/batch-.slice", ""),
        ("/batch-gpu", ""),
        ("/batch.slice/a-b.service", ""),
        ("/user.slice/user-1000.slice", ""),
    ],
)
def test_a_section_that_matches_no_cgroup_of_systemd(tmp_path: Path, section: str, meant: str) -> None:
    """The mistake is reported once, with the likely intention. The section counts, as a user may make such a cgroup."""
    (tmp_path / "10.conf").write_text(f"[{section}]\nGMemHigh=1G\nGMemLow=1M\n")
    table = files.of_directory(tmp_path)
    told = [f"{tmp_path / '10.conf'}:2: [{section}] is likely to match nothing: {meant}"] if meant else []
    assert [str(one) for one in table.mistakes] == told
    assert len(table.assignments) == 2


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/system.slice", "system.slice"),
        ("/system.slice/a.service", "a.service"),
        ("/a.slice/a-b.slice/c.scope", "c.scope"),
        ("/init.scope", "init.scope"),
        ("/system.slice/_cpu.service", "cpu.service"),
        ("/system.slice/a.service/sub.slice", None),
        ("/user.slice/user-1.slice/user@1.service/app.slice/x.service", None),
        ("/batch/a.service", None),
        ("/batch", None),
        ("/system.slice/a.mount", None),
    ],
)
def test_which_cgroups_are_units(path: str, unit: str | None) -> None:
    assert unit_of(Slice(path)) == unit
