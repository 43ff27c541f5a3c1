"""Level 3: the findings of `ggroupfs doctor` on hosts and trees, from mounts and files as other hosts have them."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio

from backend.cuda.about import MAGIC, MARK
from backend.door.wire import CUDA_ALL, VERSION
from backend.process import fanotify, procfs
from backend.process.cgroups import WITNESS
from backend.process.dmem import Files
from backend.process.identity import Slice, identify
from backend.process.procfs import Mount
from backend.space import control
from backend.space.space import Record, Space
from ggroupfs.commands import doctor, host, mounted
from ggroupfs.commands.mounted import Place, places
from tests.support.mounted import eventually

UNIFIED = Mount("0:26", "/", "/sys/fs/cgroup", "cgroup2", ("rw",))
BESIDE = Mount("0:27", "/", "/sys/fs/cgroup/unified", "cgroup2", ("rw",))
SYSTEMD = Mount("0:28", "/", "/sys/fs/cgroup/systemd", "cgroup", ("rw", "name=systemd"))
MEMORY = Mount("0:29", "/", "/sys/fs/cgroup/memory", "cgroup", ("rw", "memory"))


@pytest.mark.parametrize(
    ("mounts", "verdict", "words"),
    [
        ([UNIFIED], "ok", "slices follow /proc/<pid>/cgroup; this process is in /"),
        ([UNIFIED, MEMORY], "ok", "; v1 hierarchies beside it are not followed: 1"),
        ([MEMORY, SYSTEMD, BESIDE], "advisory", "hybrid: slices follow cgroup2 at /sys/fs/cgroup/unified and, for"),
        ([MEMORY, SYSTEMD], "advisory", "no cgroup2: slices follow systemd's own v1 hierarchy at /sys/fs/cgroup/sys"),
        ([MEMORY], "advisory", "no cgroup2: slices stay empty"),
    ],
    ids=["unified", "v1 besides", "hybrid", "v1", "nothing"],
)
def test_cgroups(mounts: list[Mount], verdict: str, words: str) -> None:
    found = host.cgroups(mounts)
    assert (found.subject, found.verdict) == ("cgroups", verdict)
    assert words in found.why


def test_whether_an_opening_can_be_had_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanotify, "check", lambda: None)
    assert host.openings().verdict == "ok"

    def refused() -> None:
        raise OSError(errno.EOPNOTSUPP, "this kernel was made without it")

    monkeypatch.setattr(fanotify, "check", refused)
    found = host.openings()
    assert (found.subject, found.verdict) == ("usher", "unsupported")
    assert found.why.endswith("this kernel was made without it")


class Regions(Files):
    """The regions that the kernel names, or an error."""

    def __init__(self, regions: Mapping[str, int] | None) -> None:
        self.known = regions

    def regions(self) -> Mapping[str, int]:
        if self.known is None:
            raise OSError(errno.EACCES, "Permission denied")
        return self.known


@pytest.mark.parametrize(
    ("regions", "verdict", "words"),
    [
        ({}, "ok", "limits are kept by ggroupfs alone"),
        ({"drm/0000:03:00.0/vram0": 1}, "ok", "limits are kept by ggroupfs alone"),
        ({"nvidia/0000:1b:00/vidmem": 1}, "ok", "nvidia/0000:1b:00/vidmem: gmem.limit.max of a slice is dmem.max"),
        (None, "advisory", "dmem.capacity: Permission denied"),
    ],
)
def test_whether_the_kernel_keeps_limits(regions: Mapping[str, int] | None, verdict: str, words: str) -> None:
    found = host.dmem(Regions(regions))
    assert (found.subject, found.verdict) == ("dmem", verdict)
    assert words in found.why


def test_which_limits_the_kernel_keeps() -> None:
    """The words about a tree, by the facts of its daemon."""
    assert mounted.walls({}) == ""
    facts = {"dmem": "nvidia/0000:1b:00/vidmem", "dmem.limits": "3", "dmem.missing": "0"}
    assert mounted.walls(facts) == "; hard limits of slices that the kernel keeps, too: 3"
    assert "does not keep, too: 2, as their cgroups have no dmem.max" in mounted.walls({**facts, "dmem.missing": "2"})


def test_mps(tmp_path: Path) -> None:
    """A program that has the name of the control daemon."""
    double = tmp_path / "nvidia-cuda-mps-control"
    shutil.copy(shutil.which("sleep") or "", double)
    assert host.mps().verdict == "ok"
    with subprocess.Popen([double, "600"]) as process:
        try:
            eventually(lambda: host.mps().verdict == "advisory", "it has the name, which comes late in execve(2)")
            found = host.mps()
            assert f"process {process.pid} of user 0:" in found.why
        finally:
            process.kill()
    assert host.mps().verdict == "ok"


def test_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control daemon of a space is not taken for one of the machine's own; and where it is gone, that is said."""
    double = tmp_path / "nvidia-cuda-mps-control"
    shutil.copy(shutil.which("sleep") or "", double)
    directory = tmp_path / "ggroup.mps"
    directory.mkdir()
    monkeypatch.setattr(control.find, "__defaults__", ([str(tmp_path)],))
    space = Space(Slice("/gpu jobs"), 1000, 0xAB)
    with subprocess.Popen([double, "600"]) as process:
        try:
            eventually(lambda: host.mps(tmp_path).verdict == "advisory", "it has the name")
            Record(space, identify(process.pid)).write(directory)
            assert host.mps(tmp_path).verdict == "ok"
            there, found = host.servers(tmp_path)
            assert (there.verdict, found.verdict) == ("ok", "ok")
            assert f"user 1000 in /gpu jobs: control daemon {process.pid}, no server" in found.why
        finally:
            process.kill()
    _, found = host.servers(tmp_path)
    assert (found.subject, found.verdict) == ("space 000000ab", "advisory")
    monkeypatch.setattr(control.find, "__defaults__", ([],))
    assert next(iter(host.servers(tmp_path))).verdict == "unsupported"


def test_groups_over_a_limit(tmp_path: Path) -> None:
    for name, over in (("slice/a/0", 1), ("slice/a/b/1", 0), ("slice/c d/1", 1), ("4242/0", 1), ("gpus/0", 1)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "gmem.events").write_text(f"low 0\nover {over}\n")
    assert sorted(map(str, doctor.over(tmp_path))) == ["4242/0", "slice/a/0", "slice/c d/1"]
    (finding,) = trio.run(doctor.overs, [str(tmp_path)])
    assert (finding.subject, finding.verdict) == (str(tmp_path), "advisory")
    assert finding.why.startswith("over a limit, which reclaim does not change: slice/")
    (tmp_path / "slice/a/0/gmem.events").write_text("low 0\n")  # from a daemon without that event
    assert len(doctor.over(tmp_path)) == 2
    assert list(trio.run(doctor.overs, [str(tmp_path / "slice/a/b")])) == []


def versions(monkeypatch: pytest.MonkeyPatch, folder: Path, **loaded: str) -> dict[str, tuple[str, str]]:
    """Return verdict and words by subject, where the kernel has modules of those versions."""
    for name, version in loaded.items():
        (folder / name).mkdir()
        (folder / name / "version").write_text(f"{version}\n")
    monkeypatch.setattr(host, "MODULES", folder)
    return {one.subject: (one.verdict, one.why) for one in host.versions()}


@pytest.mark.parametrize(
    ("driver", "verdict", "words"),
    [
        ("580.95.05", "ok", "version 580.95.05"),
        ("595.10", "ok", "version 595.10"),
        ("570.1.2", "advisory", "version 570.1.2: 580 and 595 are known"),
        ("5800.1", "advisory", "version 5800.1: "),
    ],
)
def test_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str, verdict: str, words: str) -> None:
    found = versions(monkeypatch, tmp_path, nvidia=driver)["NVIDIA driver"]
    assert found[0] == verdict
    assert found[1].startswith(words)


def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert versions(monkeypatch, tmp_path)["NVIDIA driver"] == ("unsupported", "not loaded")


@pytest.mark.parametrize(
    ("content", "verdict", "words"),
    [
        (MARK.pack(MAGIC, VERSION, CUDA_ALL), "ok", "protocol 1, features memory,counters,report,depart"),
        (MARK.pack(MAGIC, VERSION, 1), "advisory", "features memory; it lacks counters,report,depart"),
        (b"\x7fELF", "advisory", "it does not say what it speaks"),
        (None, "advisory", "there is no "),
    ],
    ids=["of this version", "older", "older than that", "none"],
)
def test_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, verdict: str, words: str
) -> None:
    place = tmp_path / "libggroup-cuda.so"
    if content is not None:
        place.write_bytes(content)
    monkeypatch.setenv("GGROUP_CUDA_LIBRARY", str(place))
    found = versions(monkeypatch, tmp_path)["library"]
    assert found[0] == verdict
    assert words in found[1]
    assert str(place) in found[1]


@pytest.mark.parametrize(("loaded", "verdict"), [("0.0.9", "advisory"), (None, "ok")])
def test_a_module_of_another_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loaded: str | None, verdict: str
) -> None:
    """Two modules: the one loaded before an upgrade, and the one installed."""
    from importlib.metadata import version

    monkeypatch.setattr(host.kernel, "features", lambda: None)
    monkeypatch.setattr(host.kernel, "lacking", lambda _: {})
    monkeypatch.setattr(host.kernel, "check", lambda: "version 1, features all")
    found = versions(monkeypatch, tmp_path, ggroup=loaded or version("ggroupfs"))[host.kernel.DEVICE]
    assert found[0] == verdict
    assert ("it is of ggroupfs 0.0.9: load it anew" in found[1]) == (loaded is not None)


def test_one_place_a_daemon() -> None:
    """Bind mounts share a device; a part of a tree, as a container may have, is not a place of its own."""
    found = places(
        [
            UNIFIED,
            Mount("0:40", "/", "/run/ggroup", "fuse.ggroupfs", ()),
            Mount("0:41", "/", "/mnt/other", "fuse.ggroupfs", ()),
            Mount("0:40", "/slice/a", "/mnt/part", "fuse.ggroupfs", ()),
            Mount("0:40", "/", "/srv/ggroup", "fuse.ggroupfs", ()),
        ]
    )
    assert found == [Place("/run/ggroup", "0:40", ["/srv/ggroup"]), Place("/mnt/other", "0:41", [])]


@pytest.fixture
def cgroup2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory in place of the cgroup2 tree, which is the only hierarchy."""
    trees = procfs.Trees()
    here = {"cgroup2": Mount("0:26", "/", str(tmp_path / "cgroup"), "cgroup2", ())}
    monkeypatch.setattr(trees, "of", here.get)
    monkeypatch.setattr(procfs, "trees", trees)
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "cgroup" / WITNESS).touch()
    return tmp_path / "cgroup"


def test_strays(cgroup2: Path, tmp_path: Path) -> None:
    """Slices without a cgroup, and no others; of many, some are named."""
    tree = tmp_path / "tree"
    (cgroup2 / "batch.slice" / "7").mkdir(parents=True)
    for path in ("0", "batch.slice/0", "batch.slice/_7/0", "batch.slice/_8/0", "gone.scope/0"):
        (tree / "slice" / path).mkdir(parents=True)
    found = list(mounted.strays(tree))
    assert [one.subject for one in found] == [f"{tree}/slice/batch.slice/_8", f"{tree}/slice/gone.scope"]
    assert {one.verdict for one in found} == {"advisory"}
    for number in range(100):
        (tree / "slice" / f"pod{number}.scope" / "0").mkdir(parents=True)
    *named, last = mounted.strays(tree)
    assert len(named) == mounted.STRAYS_MOST
    assert last.why == f"slices without a cgroup besides: {102 - mounted.STRAYS_MOST}"


def test_a_part_of_the_hierarchy_that_is_not_mounted_has_no_strays(
    cgroup2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container that has only its own part of the tree, nothing is known of the rest."""
    part = {"cgroup2": Mount("0:26", "/kubepods", str(cgroup2), "cgroup2", ())}
    monkeypatch.setattr(procfs.trees, "of", part.get)
    for path in ("batch.slice/0", "kubepods/0", "kubepods/pod/0"):
        (tmp_path / "tree" / "slice" / path).mkdir(parents=True)
    assert [one.subject for one in mounted.strays(tmp_path / "tree")] == [f"{tmp_path}/tree/slice/kubepods/pod"]
