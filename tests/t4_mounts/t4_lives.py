"""Slices that were made go with their cgroups: on a real mount, with real cgroups, across a kill and an upgrade."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from backend.ledgers.journal.file import GROWN
from ggroupfs.commands import doctor
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import complaint, ok
from tests.support.mounted import Mounted, Tenant, daemons, eventually, kill, mounted

MIB = 1 << 20

SPAN = "not a time span: seconds, or as 10min, 1h 30min, 2d, infinity"

CONTAINERS = 1000
"""Number of cgroups that come and go."""
AT_ONCE = 50
"""Number of them that exist at a time."""


@pytest.fixture
def pods() -> Iterator[Path]:
    """A cgroup like that of all pods."""
    with cgroup(f"livestest{os.getpid()}.slice") as path:
        yield path


def tree(mount: Mounted, path: Path) -> Path:
    """Return the slice of a cgroup."""
    return mount / "slice" / slice_path(path)


def made(mount: Mounted) -> dict[str, str]:
    """Return the state of each slice that was made, by the last part of its path."""
    lines = (mount / "ggroup.slices").read_text().splitlines()
    return {line.rpartition("/")[2]: line.split()[0] for line in lines}


def test_a_slice_goes_with_its_cgroup_and_not_before(mount: Mounted, pods: Path) -> None:
    pod, here = pods / "pod", tree(mount, pods / "pod")
    ok("set", "--mount", mount.path, "--timeout", "1h", here, "GMemHigh=48M")
    assert made(mount) == {"pod": "awaited"}
    pod.mkdir()
    with Tenant(mount, "--gmem", "64M") as tenant:
        enter(tenant.pid, pod)
        eventually(lambda: (here / "0/gmem.current").read_text() == f"{48 * MIB}\n", "its limit holds")
    eventually(lambda: "populated 0" in (here / "0/compute.events").read_text(), "it is empty")
    assert made(mount) == {"pod": "there"}
    watch = mount.watch()
    pod.rmdir()
    eventually(lambda: not tree(mount, pods).exists(), "the slice went, and that above it, which came for it", 2, watch)
    assert made(mount) == {}


def test_a_thousand_cgroups_leave_nothing(mount: Mounted, pods: Path) -> None:
    """Each had a slice that was made ahead, with a limit, as a hook of a container runtime makes it."""
    journal = Path((mount / "ggroup.backend").read_text().split("journal ")[1].split()[0])
    descriptors = Path(f"/proc/{mount.daemon.pid}/fd")
    before = len(os.listdir(descriptors))
    sizes = []
    for number in range(0, CONTAINERS, AT_ONCE):
        places = [pods / f"pod{one}" for one in range(number, number + AT_ONCE)]
        for place in places:
            (mount / "ggroup.slices").write_text(f"1h /{slice_path(place)}\n")
            (tree(mount, place) / "0/gmem.limit.high").write_text("1G")
        for place in places:
            place.mkdir()
        eventually(lambda: set(made(mount).values()) == {"there"}, "they were seen")
        for place in places:
            place.rmdir()
        eventually(lambda: made(mount) == {}, "all are gone")
        sizes.append(resident(mount.daemon.pid))
    assert not tree(mount, pods).exists()
    assert journal.stat().st_size < GROWN + MIB
    assert len(os.listdir(descriptors)) <= before
    assert sizes[-1] < sizes[len(sizes) // 2] + 4 * MIB, "memory is bounded"


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    match = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


@pytest.mark.parametrize("how", ["kill", "upgrade"])
def test_the_next_daemon_knows(tmp_path: Path, pods: Path, how: str) -> None:
    """Removed slices stay removed, slices made ahead are kept, and slices whose cgroup went meanwhile go."""
    names = ("awaited", "there", "went", "goes")
    with daemons(tmp_path) as start:
        mount = start()
        for name in names:
            ok("set", "--mount", mount.path, "--timeout", "1h", tree(mount, pods / name), "GMemHigh=48M")
            if name != "awaited":
                (pods / name).mkdir()
        eventually(lambda: sorted(made(mount).values()) == ["awaited", *["there"] * 3], "they were seen")
        (pods / "went").rmdir()
        eventually(lambda: "went" not in made(mount), "it has gone")
        if how == "kill":
            kill(mount)
            (pods / "goes").rmdir()
            mount = start()
        else:
            (pods / "goes").rmdir()
            ok("upgrade", mount.path)
        eventually(lambda: made(mount) == {"awaited": "awaited", "there": "there"}, "two are left")
        for name in ("awaited", "there"):
            assert (tree(mount, pods / name) / "0/gmem.limit.high").read_text() == f"{48 * MIB}\n"
        (pods / "awaited").mkdir()
        eventually(lambda: made(mount)["awaited"] == "there", "it has come")


def test_one_that_never_comes_is_shown_and_ages_out(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    slices_d = tmp_path / "slices.d"
    slices_d.mkdir()
    (slices_d / "a.conf").write_text("[/never*]\nTimeoutStartSec=2\n")
    with mounted(tmp_path / "mount", f"slices.d={slices_d}") as mount:
        (mount / "slice/stray").mkdir()
        ok("set", "--mount", mount.path, "--timeout", "1d", "late", "GMemHigh=1G")
        (mount / "slice/never").mkdir()
        shown = ok("show", "--tree", "--mount", mount.path)
        assert re.search(r"─stray \(no cgroup yet, made \ds ago\) ", shown), shown
        assert re.search(r"─late \(no cgroup yet, made \ds ago, 23h 59min left\) ", shown), shown
        (finding,) = trio.run(doctor.strays, [str(mount.path), str(tmp_path / "gone")])
        assert finding.verdict == "advisory"
        assert finding.why.startswith("3 slices made for cgroups that never came, 2 of which go in time: ")
        assert "/stray (" in finding.why
        eventually(lambda: not (mount / "slice/never").exists(), "it was too late")
        assert made(mount) == {"late": "awaited", "stray": "awaited"}
        os.rmdir(mount / "slice/late")
        os.rmdir(mount / "slice/stray")
        assert trio.run(doctor.strays, [str(mount.path)]) == []


def test_what_set_refuses(mount: Mounted) -> None:
    for words, line in (
        (["--timeout", "soon", "x"], f"set: --timeout soon: {SPAN}"),
        (["--timeout", "1h", str(mount / "slice")], f"set: --timeout: {mount / 'slice'} is no slice"),
    ):
        assert complaint("set", "--mount", mount.path, *words, "GMemHigh=1G", code=2) == line
    assert not (mount / "slice/x").exists()


def test_only_root_makes_them_by_the_file(mount: Mounted) -> None:
    line = complaint("set", "--mount", mount.path, "--timeout", "1h", "x", "GMemHigh=1G", code=1, user=65534)
    assert line.startswith("set: x: Permission denied (EACCES)")
