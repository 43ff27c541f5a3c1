"""`ggroupfs set` and `ggroupfs show --tree`: words of the command line, and their effect on the tree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import complaint, ok
from tests.support.mounted import Mounted, Tenant, eventually, mounted

MIB = 1 << 20


@pytest.fixture
def tenant(mount: Mounted) -> Iterator[Tenant]:
    """A tenant with 64 MiB."""
    with Tenant(mount, "--gmem", "64M", "--report", "0.1") as tenant:
        yield tenant


@pytest.fixture
def made(mount: Mounted) -> Iterator[Path]:
    """A slice that was made."""
    path = mount / "slice/settest.slice"
    path.mkdir()
    yield path
    path.rmdir()


def read(path: Path) -> str:
    return path.read_text().rstrip("\n")


@pytest.mark.parametrize(
    ("setting", "control", "content"),
    [
        ("gmem.limit.high=48M", "gmem.limit.high", str(48 * MIB)),
        ("GMemHigh=50%", "gmem.limit.high", str(8 << 30)),
        ("GMemHigh=", "gmem.limit.high", "max"),
        ("gmem.limit.low=max", "gmem.limit.low", "max"),
        ("GMemLow=1G", "gmem.limit.low", str(1 << 30)),
        ("ComputeTimeSlice=500us", "compute.timeslice", "0.5"),
        ("compute.timeslice=4", "compute.timeslice", "4"),
        ("ComputeFreeze=yes", "compute.freeze", "1"),
        ("ComputePriority=1", "compute.priority", "1"),
        ("compute.weight=50", "compute.weight", "50"),
        ("ComputeQuota=30%", "compute.max", "30000 100000"),
        ("compute.max=max 50000", "compute.max", "max 50000"),
    ],
)
def test_a_control_by_its_name_or_as_a_property(
    mount: Mounted, tenant: Tenant, setting: str, control: str, content: str
) -> None:
    assert ok("set", "--mount", mount.path, tenant.pid, setting) == ""
    assert read(tenant.group / control) == content


def test_several_at_once_in_their_order(mount: Mounted, tenant: Tenant) -> None:
    """In the other order the limit would not hold: EBUSY."""
    ok("set", "--mount", mount.path, tenant.pid, "gmem.limit.high=16M", "gmem.swap.max=48M")
    assert (tenant.number("gmem.current"), tenant.number("gmem.swap.max")) == (16 * MIB, 48 * MIB)


@pytest.mark.parametrize("word", ["settest.slice", "/settest.slice", "MOUNT/slice/settest.slice"])
def test_a_slice_by_any_of_its_names(mount: Mounted, made: Path, word: str) -> None:
    ok("set", "--mount", mount.path, word.replace("MOUNT", str(mount.path)), "GMemHigh=1G")
    assert read(made / "0/gmem.limit.high") == str(1 << 30)


def test_a_slice_whose_name_is_that_of_a_gpu(mount: Mounted, made: Path) -> None:
    (made / "_0").mkdir()
    ok("set", "--mount", mount.path, "/settest.slice/0", "GMemHigh=1G")
    assert read(made / "_0/0/gmem.limit.high") == str(1 << 30)
    assert read(made / "0/gmem.limit.high") == "max"
    (made / "_0").rmdir()


def test_a_slice_whose_name_is_a_digit_of_another_script(mount: Mounted, made: Path) -> None:
    """Neither such a path, nor a directory above a GPU's, is taken for a GPU."""
    (made / "²").mkdir()
    ok("set", "--mount", mount.path, "settest.slice", "GMemHigh=1G")
    ok("set", "--mount", mount.path, made / "²", "GMemHigh=512M")
    assert [read(place / "0/gmem.limit.high") for place in (made, made / "²")] == [str(1 << 30), str(1 << 29)]
    (made / "²").rmdir()


def test_a_process_by_its_directory_wherever_one_is(mount: Mounted, tenant: Tenant) -> None:
    for place, word in ((Path("/"), tenant.group), (mount.path, f"{tenant.pid}/0"), (tenant.group, ".")):
        tenant.write("gmem.limit.low", 0)
        words = [sys.executable, "-m", "ggroupfs", "set", "--mount", mount.path, word, "gmem.limit.low=1M"]
        subprocess.run(words, cwd=place, check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
        assert tenant.number("gmem.limit.low") == MIB


def test_one_gpu_or_all(tmp_path: Path) -> None:
    """A percentage is of each GPU's own memory."""
    with mounted(tmp_path, "soft.gpus=2", "soft.gmem=1G") as mount:
        made = mount / "slice/settest.slice"
        made.mkdir()
        ok("set", "--mount", mount.path, "settest.slice", "GMemHigh=25%")
        assert [read(made / gpu / "gmem.limit.high") for gpu in "01"] == [str(256 * MIB)] * 2
        ok("set", "--mount", mount.path, "--gpu", "1", "settest.slice", "GMemHigh=50%")
        assert [read(made / gpu / "gmem.limit.high") for gpu in "01"] == [str(256 * MIB), str(512 * MIB)]
        ok("set", "--mount", mount.path, made / "0", "GMemHigh=infinity")
        assert [read(made / gpu / "gmem.limit.high") for gpu in "01"] == ["max", str(512 * MIB)]
        line = complaint("set", "--mount", mount.path, "--gpu", "1", made / "0", "GMemHigh=1G", code=2)
        assert line == f"set: {made}/0 is on GPU 0, not on 1"
        assert "is not on a GPU 7" in complaint(
            "set", "--mount", mount.path, "--gpu", "7", "settest.slice", "GMemHigh=1G", code=1
        )


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("compute.migrate=0", "(EOPNOTSUPP): this machine cannot enforce it, or not on this program"),
        ("compute.weight=0", "(ERANGE): a number that this file, or this GPU, does not take"),
        ("gmem.limit.high=16M", "(EBUSY): gmem.swap.max, or memory that cannot be moved, keeps it from holding"),
        ("gmem.reclaim=1G", "(EAGAIN): less was moved than asked for"),
        ("gmem.limit.high=2X", "(EINVAL): no value of this file"),
        ("gmem.current=1", "(EINVAL): no value of this file"),
        ("compute.timeslice=5000", "(ERANGE): a number that this file, or this GPU, does not take"),
    ],
)
def test_what_the_tree_refuses_is_one_line_and_exit_code_1(
    mount: Mounted, tenant: Tenant, setting: str, line: str
) -> None:
    tenant.write("gmem.swap.max", 0)
    said = complaint("set", "--mount", mount.path, tenant.pid, setting, code=1)
    assert said.startswith(f"set: {tenant.pid} on GPU 0: ")
    assert said.endswith(line)
    assert tenant.number("gmem.current") == 64 * MIB


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("PID GMemHigh", "set: GMemHigh: not KEY=VALUE"),
        ("PID =1", "set: =1: not KEY=VALUE"),
        ("PID ../0/gmem.limit.high=1", "set: ../0/gmem.limit.high=1: not KEY=VALUE"),
        ("PID GMemHigh=8X", "set: GMemHigh=8X: not a size: bytes, or with K, M, G or T, a percentage, or infinity"),
        ("PID GMemMiddle=8G", "set: GMemMiddle: there is no such control"),
        ("a/../b GMemHigh=8G", "set: 'a/../b' is no pid, no cgroup and no directory of MOUNT"),
        ("MOUNT/gpus/0 GMemHigh=8G", "set: MOUNT/gpus/0 is no process and no slice"),
        # Valid settings are not written either while another one is invalid.
        ("PID gmem.limit.high=16M GMemLow=much", "set: GMemLow=much: not a size"),
    ],
)
def test_a_bad_command_line_is_one_line_and_exit_code_2(mount: Mounted, tenant: Tenant, words: str, line: str) -> None:
    words, line = (text.replace("PID", str(tenant.pid)).replace("MOUNT", str(mount.path)) for text in (words, line))
    assert complaint("set", "--mount", mount.path, *words.split(), code=2).startswith(line)
    assert read(tenant.group / "gmem.limit.high") == "max"


def test_what_is_not_there(mount: Mounted, tmp_path: Path) -> None:
    line = complaint("set", "--mount", mount.path, "4194304", "GMemHigh=1G", code=1)
    assert line == "set: 4194304: No such file or directory (ENOENT): no such process"
    assert "no ggroup tree" in complaint("set", "--mount", tmp_path, "1", "GMemHigh=1G", code=1)


def test_without_the_right(mount: Mounted, tenant: Tenant) -> None:
    line = complaint("set", "--mount", mount.path, tenant.pid, "GMemHigh=32M", code=1, user=65534)
    assert line.endswith("Permission denied (EACCES): no right to write it")


def test_show_tree(mount: Mounted) -> None:
    """Each process stands in its slice, with use and limits."""
    with cgroup("treetest.slice") as path:
        with Tenant(mount, "--gmem", "64M") as inside, Tenant(mount, "--gmem", "32M") as outside:
            enter(inside.pid, path)
            here = mount / "slice" / slice_path(path)
            eventually(lambda: (here / "0/gmem.current").read_text() == f"{64 * MIB}\n", "it is in its slice")
            (here / "part").mkdir()
            ok("set", "--mount", mount.path, here, "GMemHigh=48M", "compute.timeslice=3", "compute.freeze=1")
            lines = ok("show", "--tree", "--mount", mount.path).splitlines()
        eventually(lambda: remove(here / "part", here), "nobody is in it")
    cells = [line.split() for line in lines]
    assert cells[0] == ["CURRENT", "HIGH", "SWAP", "TIMESLICE", "FROZEN", "OFF", "FINISHED"]
    assert cells[1] == ["GPU", "0", "ggroupfs", "software", "GPU,", "16.0G", "80.0M", "-", "16.0M", "-", "-", "-", "-"]

    def place(label: str) -> int:
        (found,) = [number for number, line in enumerate(lines) if f"─{label} " in line]
        return found

    slice_, part, first, second = (
        place(label) for label in ("treetest.slice", "part", f"{inside.pid} python", f"{outside.pid} python")
    )
    assert cells[slice_][-8:-1] == ["48.0M", "48.0M", "16.0M", "3", "ms", "frozen", "freeze"]
    assert cells[first][-8:-5] == ["48.0M", "max", "16.0M"]
    assert cells[first][-3:-1] == ["frozen", "freeze"]
    assert cells[second][-8:-1] == ["32.0M", "max", "0", "2.048", "ms", "-", "-"]
    assert slice_ < part < first
    depth = [lines[number].index("─") for number in (slice_, part, first)]
    assert depth == [depth[0], depth[0] + 2, depth[0] + 2], "what is in the slice is to the right of it"
    assert lines[0].index("SWAP") + 4 == lines[first].index("16.0M") + 5, "numbers stand below their heading"


def remove(*directories: Path) -> bool:
    """Remove directories, in this order; OSError while a process is in one."""
    for directory in directories:
        if directory.exists():
            directory.rmdir()
    return True


def test_show_tree_of_nobody(tmp_path: Path) -> None:
    with mounted(tmp_path, "soft.gpus=2"):
        lines = ok("show", "--tree", "--mount", tmp_path).splitlines()
        assert [line.split()[:2] for line in lines[1:]] == [["GPU", "0"], ["GPU", "1"]]
