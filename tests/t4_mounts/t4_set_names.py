"""`ggroupfs set` of groups that do not exist yet, and of systemd's units by name."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from ggroupfs.text.names import slice_directory
from tests.support.cgroups import cgroup2
from tests.support.command import complaint, ggroupfs, ok
from tests.support.fake_systemd import Unit, bus, open_systemd
from tests.support.mounted import Mounted, eventually

GIB = 1 << 30
OURS = f"settest{os.getpid()}"
"""Prefix of cgroup names at the top: several test processes run at once."""


@contextlib.contextmanager
def cgroups(*paths: str) -> Iterator[None]:
    """Make cgroups at those paths, and those above them, without a process."""
    made: list[Path] = []
    try:
        for path in paths:
            place = cgroup2()
            for part in path.strip("/").split("/"):
                place /= part
                if not place.exists():
                    place.mkdir()
                    made.append(place)
        yield
    finally:
        for place in reversed(made):
            place.rmdir()


@pytest.fixture(autouse=True)
def clean(mount: Mounted) -> Iterator[None]:
    """Remove all slices of the tree that a test made. A slice whose cgroup existed goes by itself meanwhile."""
    yield
    for place, _, _ in os.walk(mount / "slice", topdown=False):
        name = os.path.basename(place)
        if name != "slice" and not (name.isdigit() and name.isascii()):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(place)


def high(mount: Mounted, path: str, gpu: int = 0) -> str:
    return (mount / f"slice{path}/{gpu}/gmem.limit.high").read_text().rstrip("\n")


def slices(mount: Mounted) -> list[str]:
    """Return the slices at the top."""
    return sorted(os.listdir(mount / "slice"))


# Groups that do not exist yet


def test_a_slice_for_a_cgroup_that_is_there_is_made(mount: Mounted) -> None:
    """With the slices above it, and without output."""
    path = f"/{OURS}.slice/job/step"
    with cgroups(path):
        assert ok("set", "--mount", mount.path, path, "GMemHigh=1G") == ""
        assert high(mount, path) == str(GIB)
        assert high(mount, f"/{OURS}.slice") == "max"
    eventually(lambda: slices(mount) == [], "they go with their cgroups")


@pytest.mark.parametrize(
    "word",
    [f"{OURS}.slice", f"/{OURS}.slice", f"MOUNT/slice/{OURS}.slice", f"MOUNT/slice/{OURS}.slice/0"],
    ids=["name", "cgroup", "directory", "GPU"],  # without our pid: workers must collect the same ids
)
def test_a_slice_for_a_cgroup_that_is_to_come_is_made_and_told(mount: Mounted, word: str) -> None:
    """The name may be misspelt. The second time there is nothing to report."""
    words = ("set", "--mount", mount.path, word.replace("MOUNT", str(mount.path)), "GMemHigh=1G")
    result = ggroupfs(*words)
    told = f"ggroupfs: set: /{OURS}.slice: made ahead: there is no such cgroup yet\n"
    assert (result.returncode, result.stdout, result.stderr) == (0, "", told)
    assert high(mount, f"/{OURS}.slice") == str(GIB)
    assert ok(*words) == ""


def test_a_slice_whose_name_is_that_of_a_gpu_is_made(mount: Mounted) -> None:
    assert ggroupfs("set", "--mount", mount.path, f"/{OURS}/0/1", "GMemHigh=1G").returncode == 0
    assert high(mount, f"/{OURS}/_0/_1") == str(GIB)


def test_a_process_that_is_on_no_gpu_yet(mount: Mounted) -> None:
    """Its directory is made as by `mkdir`, and stays until the process ends."""
    pid = os.getpid()
    ok("set", "--mount", mount.path, pid, "GMemHigh=1G")
    assert (mount.group(pid) / "gmem.limit.high").read_text() == f"{GIB}\n"
    (mount / pid).rmdir()


@pytest.mark.parametrize(
    ("setting", "code", "line"),
    [
        ("GMemHigh=much", 2, "set: GMemHigh=much: not a size"),
        ("GMemMiddle=1G", 2, "set: GMemMiddle: there is no such control"),
        ("compute.weight=0", 1, f"set: slice/{OURS}.slice/job on GPU 0: compute.weight=0: "),
    ],
    ids=["value", "key", "refused"],
)
def test_what_was_made_for_nothing_goes_again(mount: Mounted, setting: str, code: int, line: str) -> None:
    """If no setting could be written, everything that was made is removed."""
    said = complaint("set", "--mount", mount.path, f"/{OURS}.slice/job", setting, code=code)
    assert said.startswith(line)
    assert slices(mount) == []


def test_what_was_written_before_a_refusal_stays(mount: Mounted) -> None:
    complaint("set", "--mount", mount.path, f"/{OURS}.slice", "GMemHigh=1G", "compute.weight=0", code=1)
    assert high(mount, f"/{OURS}.slice") == str(GIB)


def test_without_the_right_to_make_it(mount: Mounted) -> None:
    line = complaint("set", "--mount", mount.path, f"{OURS}.slice", "GMemHigh=1G", code=1, user=65534)
    assert line == f"set: {OURS}.slice: Permission denied (EACCES): no right to make it"
    assert slices(mount) == []


def test_a_delegate_makes_what_is_below_its_own_and_is_told_of_bounds(mount: Mounted) -> None:
    """At most 32 levels; levels that were made on the way are removed again."""
    own = mount / f"slice/{OURS}"
    own.mkdir()
    os.chown(own, 65534, 65534)
    result = ggroupfs("set", "--mount", mount.path, f"/{OURS}/job", "GMemHigh=1G", user=65534)
    assert result.returncode == 0, result
    assert high(mount, f"/{OURS}/job") == str(GIB)
    line = complaint("set", "--mount", mount.path, f"/{OURS}" + 40 * "/d", "GMemHigh=1G", code=1, user=65534)
    assert line.endswith("(EAGAIN): one slice too many of this user, or too deep")
    assert sorted(os.listdir(own)) == ["0", "job"]


# Units by name


def test_a_slice_of_systemd_is_where_its_name_says(mount: Mounted) -> None:
    result = ggroupfs("set", "--mount", mount.path, f"{OURS}-gpu-big.slice", "GMemHigh=1G")
    path = f"/{OURS}.slice/{OURS}-gpu.slice/{OURS}-gpu-big.slice"
    assert result.stderr == f"ggroupfs: set: {path}: made ahead: there is no such cgroup yet\n"
    assert high(mount, path) == str(GIB)


def test_a_cgroup_at_the_top_that_is_called_like_a_slice_below(mount: Mounted) -> None:
    """Another program than systemd may use such a name: it is meant while it exists and systemd's does not."""
    with cgroups(f"/{OURS}-gpu.slice"):
        ok("set", "--mount", mount.path, f"{OURS}-gpu.slice", "GMemHigh=1G")
        ok("set", "--mount", mount.path, f"/{OURS}-gpu.slice", "GMemLow=1G")
        assert high(mount, f"/{OURS}-gpu.slice") == str(GIB)
        assert slices(mount) == [f"{OURS}-gpu.slice"]
        with cgroups(f"/{OURS}.slice/{OURS}-gpu.slice"):
            ok("set", "--mount", mount.path, f"{OURS}-gpu.slice", "GMemHigh=2G")
            assert high(mount, f"/{OURS}-gpu.slice") == str(GIB)
            assert high(mount, f"/{OURS}.slice/{OURS}-gpu.slice") == str(2 * GIB)
    eventually(lambda: slices(mount) == [], "they go with their cgroups")


def test_a_service_is_found_in_the_cgroup_hierarchy(mount: Mounted) -> None:
    """Only below slices: cgroups below a service are not the system manager's."""
    place = f"/{OURS}.slice/{OURS}-a.slice/{OURS}.service"
    with cgroups(place, f"/{OURS}.slice/{OURS}-b.slice/x.service/{OURS}.service", f"/{OURS}/{OURS}.service"):
        ok("set", "--mount", mount.path, f"{OURS}.service", "GMemHigh=1G")
        assert high(mount, place) == str(GIB)
        with cgroups(f"/{OURS}.slice/{OURS}.service"):
            line = complaint("set", "--mount", mount.path, f"{OURS}.service", "GMemHigh=1G", code=2)
            both = " and ".join(sorted((place, f"/{OURS}.slice/{OURS}.service")))
            assert line == f"set: {OURS}.service is {both}: name one of them"
    eventually(lambda: not (mount / slice_directory(place)).exists(), "it goes with its cgroup")


def test_a_service_that_is_not_known(mount: Mounted) -> None:
    for words in (("GMemHigh=1G",), ("--reset",)):
        line = complaint("set", "--mount", mount.path, f"{OURS}.service", *words, code=1)
        path = f"system.slice/{OURS}.service"
        assert line == f"set: {OURS}.service is not known here: name the path of its cgroup, such as {path}"
    assert slices(mount) == []


@pytest.mark.skipif(shutil.which("dbus-daemon") is None, reason="there is no dbus-daemon")
def test_a_service_is_where_systemd_says(mount: Mounted, tmp_path: Path) -> None:
    """A running unit, by an alias; one that is to start, which systemd loads; and none that systemd lacks."""

    async def asked() -> None:
        systemd = await open_systemd(address)
        systemd.units = {"run.service": Unit([], f"/{OURS}.slice/run.service")}
        systemd.installed = {"later.service": Unit([], "", "inactive", slice=f"{OURS}-gpu.slice")}
        systemd.aliases = {"other.service": "run.service"}
        async with systemd.connection, trio.open_nursery() as nursery:
            nursery.start_soon(systemd.serve)
            for name in ("other.service", "later.service", "never.service"):
                words = ("set", "--mount", mount.path, name, "GMemHigh=1G")
                call = lambda words=words: ggroupfs(*words, DBUS_SYSTEM_BUS_ADDRESS=address)  # noqa: E731
                codes.append((await trio.to_thread.run_sync(call)).returncode)
            nursery.cancel_scope.cancel()

    codes: list[int] = []
    with bus(tmp_path) as address:
        trio.run(asked)
    assert codes == [0, 0, 1]
    assert high(mount, f"/{OURS}.slice/run.service") == str(GIB)
    assert high(mount, f"/{OURS}.slice/{OURS}-gpu.slice/later.service") == str(GIB)


def test_a_bus_without_systemd_is_as_none(mount: Mounted, tmp_path: Path) -> None:
    result = ggroupfs(
        *("set", "--mount", mount.path, f"{OURS}.service", "GMemHigh=1G"),
        DBUS_SYSTEM_BUS_ADDRESS=f"unix:path={tmp_path}/none",
    )
    assert result.returncode == 1
    assert "is not known here" in result.stderr


# Names that can match nothing


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("/batch-gpu.slice", "systemd has batch-gpu.slice in batch.slice: /batch.slice/batch-gpu.slice?"),
        ("MOUNT/slice/batch-gpu.slice", "systemd has batch-gpu.slice in batch.slice: /batch.slice/batch-gpu.slice?"),
        ("MOUNT/slice/batch-gpu.slice/0", "systemd has batch-gpu.slice in batch.slice: /batch.slice/batch-gpu.slice?"),
        ("x.slice/a-b.slice/y.service", "systemd has a-b.slice in a.slice: /a.slice/a-b.slice/y.service?"),
        ("/trainer.service", "systemd has a service in a slice: trainer.service?"),
        ("/sys/fs/cgroup/batch.slice", "a path of a cgroup begins at the root of the hierarchy: /batch.slice?"),
        ("nightly.timer", "systemd makes no cgroup for a timer: nightly.service?"),
        ("trainer@.service", "a template has no cgroup, and its instances have: trainer@*.service?"),
        ("batch-.slice", "no slice of systemd has such a name"),
    ],
)
def test_what_can_match_nothing_is_refused(mount: Mounted, word: str, line: str) -> None:
    """The refusal suggests what was probably meant; nothing is made."""
    word = word.replace("MOUNT", str(mount.path))
    for words in (("GMemHigh=1G",), ("--reset",)):
        said = complaint("set", "--mount", mount.path, word, *words, code=2)
        assert said.endswith(f" is likely to match nothing: {line}")
        assert said.startswith("set: ")
    assert slices(mount) == []


def test_the_root_is_refused(mount: Mounted) -> None:
    line = complaint("set", "--mount", mount.path, "--", "-.slice", "GMemHigh=1G", code=2)
    assert line == "set: -.slice is likely to match nothing: the root has no limits"
    line = complaint("set", "--mount", mount.path, mount / "slice", "GMemHigh=1G", code=1)
    assert line == f"set: {mount.path}/slice has no control files"


def test_what_is_there_all_the_same_is_taken(mount: Mounted) -> None:
    """A slice that was made by hand, or a cgroup."""
    (mount / f"slice/{OURS}-gpu.slice").mkdir()
    ok("set", "--mount", mount.path, f"/{OURS}-gpu.slice", "GMemHigh=1G")
    assert high(mount, f"/{OURS}-gpu.slice") == str(GIB)
    with cgroups(f"/{OURS}.service"):
        ok("set", "--mount", mount.path, f"/{OURS}.service", "GMemHigh=1G")
        assert high(mount, f"/{OURS}.service") == str(GIB)
