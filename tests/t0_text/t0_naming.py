"""Sections of slices.d that name a unit of systemd: which cgroups each one is for, and which names are for none."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.process.identity import Slice
from ggroupfs.units import files
from ggroupfs.units.naming import ByName, doubt_of_name, escaped, is_unit, place_of, section


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("batch.slice", "/batch.slice"),
        ("batch-gpu.slice", "/batch.slice/batch-gpu.slice"),
        ("a-b-c.slice", "/a.slice/a-b.slice/a-b-c.slice"),
        ("user-1000.slice", "/user.slice/user-1000.slice"),
        ("cpu-fast.slice", "/_cpu.slice/cpu-fast.slice"),
        (r"x-y\x2dz.slice", r"/x.slice/x-y\x2dz.slice"),
        ("-.slice", "/"),
    ],
)
def test_where_systemd_has_a_slice(name: str, path: str) -> None:
    assert place_of(name) == path


@pytest.mark.parametrize(
    "name",
    ["-a.slice", "a-.slice", "a--b.slice", ".slice", "a@b.slice", "a b.slice", "a.service", "x" * 250 + ".slice"],
)
def test_what_no_slice_of_systemd_is_called(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a slice"):
        place_of(name)


@pytest.mark.parametrize(
    ("unit", "cgroup"),
    [
        ("trainer.service", "trainer.service"),
        ("cpu.service", "_cpu.service"),
        ("cgroup.service", "_cgroup.service"),
        ("cpus.service", "cpus.service"),
        ("_x.service", "__x.service"),
        ("bpf-firewall.slice", "_bpf-firewall.slice"),
        ("tasks", "_tasks"),
    ],
)
def test_the_name_of_a_cgroup(unit: str, cgroup: str) -> None:
    assert escaped(unit) == cgroup


@pytest.mark.parametrize(
    ("word", "unit"),
    [
        ("trainer.service", True),
        ("user@1000.service", True),
        ("run-u7.scope", True),
        ("batch-.slice", True),
        (".slice", False),
        ("a/b.slice", False),
        ("größe.service", False),
        ("nightly.timer", False),
        ("batch", False),
        ("x.service\n", False),
    ],
)
def test_what_is_spelt_as_a_unit(word: str, unit: bool) -> None:
    assert is_unit(word) is unit


@pytest.mark.parametrize(
    ("header", "paths", "others"),
    [
        (
            "batch-gpu.slice",
            ["/batch.slice/batch-gpu.slice"],
            ["/batch-gpu.slice", "/x.slice/batch-gpu.slice", "/batch.slice", "/a/batch.slice/batch-gpu.slice"],
        ),
        (
            "trainer.service",
            ["/trainer.service", "/system.slice/trainer.service", "/a.slice/a-b.slice/trainer.service"],
            ["/batch/trainer.service", "/system.slice/trainer.service/x", "/system.slice/trainer.scope"],
        ),
        (
            "user@*.service",
            ["/user.slice/user-1000.slice/user@1000.service"],
            ["/user.slice/user-1000.slice/user@1000.service/app.slice/user@.service"],
        ),
        ("b-*.slice", ["/b.slice/b-a.slice", "/b.slice/b-a.slice/b-a-b.slice"], ["/b-a.slice"]),
        ("cpu.service", ["/system.slice/_cpu.service"], ["/system.slice/cpus.service"]),
    ],
)
def test_the_cgroups_of_a_section_that_is_a_name(header: str, paths: list[str], others: list[str]) -> None:
    cgroups = section(header)
    assert isinstance(cgroups, ByName)
    assert [path for path in (*paths, *others) if cgroups.matches(Slice(path))] == paths


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("-.slice", "[-.slice] is likely to match nothing: the root has no limits"),
        ("batch-.slice", "[batch-.slice] is likely to match nothing: no slice of systemd has such a name"),
        (
            "nightly.timer",
            "[nightly.timer] is likely to match nothing: systemd makes no cgroup for a timer: [nightly.service]?",
        ),
        ("gpu.target", "[gpu.target] is likely to match nothing: systemd makes no cgroup for a target"),
        (
            "trainer@.service",
            "[trainer@.service] is likely to match nothing:"
            " a template has no cgroup, and its instances have: [trainer@*.service]?",
        ),
        ("batch/gpu", "[batch/gpu] is not the path of a cgroup: [/batch/gpu]?"),
        ("trainer", "[trainer] is not the path of a cgroup: [/trainer]?"),
        ("a/../b", "[a/../b] is not the path of a cgroup"),
        ("[/batch", "[[/batch] is not the path of a cgroup"),
    ],
)
def test_a_section_that_is_for_no_cgroup(tmp_path: Path, header: str, told: str) -> None:
    """Such a section is reported with its line and the likely intention, and its assignments do not count."""
    with pytest.raises(ValueError, match=r"^\[") as raised:
        section(header)
    assert str(raised.value) == told
    (tmp_path / "a.conf").write_text(f"[{header}]\nGMemHigh=1G\n")
    table = files.of_directory(tmp_path)
    if not header.startswith("["):
        assert [str(one) for one in table.mistakes] == [f"{tmp_path / 'a.conf'}:2: GMemHigh=: {told}"]
    assert not table.assignments


def test_names_and_paths_are_one_section_in_their_order(tmp_path: Path) -> None:
    """A section named after a unit is for that unit anywhere. The last assignment counts; an empty one is the
    default."""
    (tmp_path / "a.conf").write_text(
        "[/system.slice/*]\nGMemHigh=1G\nGMemLow=1M\n[trainer.service]\nGMemHigh=2G\n[/*/trainer.service]\nGMemLow=\n"
    )
    table = files.of_directory(tmp_path)
    assert not table.mistakes
    found = table.of(Slice("/system.slice/trainer.service")).values
    assert {name: one.value for name, one in found.items()} == {"GMemHigh": "2G", "GMemLow": ""}
    assert {name: one.value for name, one in table.of_name("trainer.service").values.items()} == {"GMemHigh": "2G"}
    assert not table.of_name("other.service")
    assert doubt_of_name("trainer.service") is None
