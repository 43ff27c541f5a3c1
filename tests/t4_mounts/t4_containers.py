"""The hook of container runtimes and the devices of engines, on a real mount: a bundle gets its limits, or ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from ggroupfs.commands.cdi import host_of
from ggroupfs.containers.cdi import Gpu, Host, nodes_of, spec
from ggroupfs.containers.hook import KEYS, PREFIX
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import MIB, complaint, ok
from tests.support.mounted import SECONDS, Mounted, Tenant, eventually

HOOK = "import sys; from ggroupfs.containers.hook import run; run(sys.argv[1:])"
"""The hook as packaging/oci-hook.in has it, run from this tree."""
GLIBC, MUSL = "lib64/ld-linux-x86-64.so.2", "lib/ld-musl-x86_64.so.1"
"""Paths of loaders in an image."""
UUID = "GPU-6e1a2b3c-0000-1111-2222-333344445555"


@attrs.frozen
class Container:
    """A container that waits for its hooks: a bundle, and a process in a cgroup of its own."""

    mount: Mounted
    bundle: Path
    cgroup: Path
    process: subprocess.Popen[bytes]

    @property
    def slice(self) -> Path:
        """Its slice."""
        return self.mount / "slice" / slice_path(self.cgroup)

    def loader(self, path: str) -> None:
        """Add a loader to its image."""
        place = self.bundle / "rootfs" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"")

    def asks(self, annotations: Mapping[str, str], environment: Mapping[str, str] | None = None) -> None:
        """Set annotations and environment in its configuration."""
        words = [f"{name}={value}" for name, value in (environment or {}).items()]
        config = {"root": {"path": "rootfs"}, "process": {"env": words}, "annotations": annotations}
        (self.bundle / "config.json").write_text(json.dumps(config))

    def hook(self, kind: str = "annotations", **state: Any) -> subprocess.CompletedProcess[str]:
        """Call the hook as the runtime does."""
        told = {"ociVersion": "1.0.2", "id": "c", "status": "creating", "pid": self.process.pid}
        return subprocess.run(
            [sys.executable, "-c", HOOK, kind, os.fspath(self.mount.path)],
            input=json.dumps({**told, "bundle": os.fspath(self.bundle), **state}),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def refused(self, kind: str = "annotations") -> str:
        """Return why the hook ends the container."""
        done = self.hook(kind)
        assert (done.returncode, done.stdout) == (1, ""), done
        assert done.stderr.startswith("ggroupfs: ")
        assert done.stderr.count("\n") == 1
        return done.stderr.removeprefix("ggroupfs: ").rstrip()


@contextlib.contextmanager
def made(mount: Mounted, place: Path) -> Iterator[Container]:
    """Yield a container, which goes with its cgroup."""
    (place / "rootfs").mkdir(parents=True)
    with cgroup(f"containertest{os.getpid()}.slice") as path, subprocess.Popen(["sleep", "inf"]) as process:
        try:
            inside = path / "libpod-1.scope"
            inside.mkdir()
            enter(process.pid, inside)
            yield Container(mount, place, inside, process)
        finally:
            process.kill()


@pytest.fixture
def container(mount: Mounted, tmp_path: Path) -> Iterator[Container]:
    with made(mount, tmp_path / "bundle") as it:
        yield it


def test_each_setting_has_annotations_and_they_hold(container: Container) -> None:
    values = {
        "GMemHigh": ("25%", "gmem.limit.high", None),
        "gmem.limit.low": ("8M", "gmem.limit.low", f"{8 * MIB}"),
        "GMemSwapMax": ("infinity", "gmem.swap.max", "max"),
        "ComputeTimeSlice": ("3ms", "compute.timeslice", "3"),
        "compute.priority": ("3", "compute.priority", "3"),
        "compute.weight": ("300", "compute.weight", "300"),
        "ComputeQuota": ("30% 1s", "compute.max", "300000 1000000"),
        "GMemOOMGroup": ("yes", "gmem.oom.group", "1"),
        "GMemMax": ("infinity", "gmem.limit.max", "max"),
        "ComputeFreeze": ("no", "compute.freeze", "0"),
        "ComputeWaitMax": ("2s", "compute.wait.max", "2000"),
        "compute.spatial": ("1", "compute.spatial", "1"),
        "ComputeSMMax": ("infinity", "compute.sm.max", "max"),
    }
    assert {KEYS[key].field for key in values} == {one.field for one in KEYS.values()}
    container.asks({f"{PREFIX}{key}": value for key, (value, _, _) in values.items()} | {"org.other": "x"})
    assert container.hook().stderr == ""
    for gpu in (name for name in os.listdir(container.slice) if name.isdigit()):
        capacity = int((container.mount / "gpus" / gpu / "gmem.capacity").read_text())
        for _, file, expected in values.values():
            text = (container.slice / gpu / file).read_text().rstrip("\n")
            assert text == (expected or str(capacity // 4)), file


def test_a_program_of_the_container_is_limited_and_the_slice_goes_with_its_cgroup(container: Container) -> None:
    container.asks({"ggroup.gmem.limit.high": "32M"})
    assert container.hook().returncode == 0
    with Tenant(container.mount, "--gmem", "64M") as tenant:
        enter(tenant.pid, container.cgroup)
        eventually(lambda: (container.slice / "0/gmem.current").read_text() == f"{32 * MIB}\n", "its limit holds")
    container.process.kill()
    container.process.wait()
    container.cgroup.rmdir()
    eventually(lambda: not container.slice.exists(), "the slice went with its cgroup")
    assert (container.mount / "ggroup.slices").read_text() == ""


@pytest.mark.parametrize(
    ("annotations", "reason"),
    [
        (
            {"gmem.limit.high": "12Q"},
            "ggroup.gmem.limit.high=12Q: GPU 0: Invalid argument (EINVAL): no value of this file",
        ),
        (
            {"GMemHigh": "12Q"},
            "ggroup.GMemHigh=12Q: not a size: bytes, or with K, M, G or T, a percentage, or infinity",
        ),
        ({"gmem.limit.high": ""}, "ggroup.gmem.limit.high=: GPU 0: Invalid argument (EINVAL): no value of this file"),
        ({"compute.weight": "0"}, "ggroup.compute.weight=0: GPU 0: Numerical result out of range (ERANGE)"),
        ({"gmem.limit.hihg": "8G"}, "ggroup.gmem.limit.hihg: no such setting: ComputeFreeze, "),
        ({"gmem.reclaim": "8G"}, "ggroup.gmem.reclaim: no such setting: "),
        ({"": "8G"}, "ggroup.: no such setting: "),
        ({"GMemHigh": "8G", "gmem.limit.high": "9G"}, "ggroup.gmem.limit.high: ggroup.GMemHigh is the same setting"),
    ],
)
def test_what_is_no_value_ends_the_container(container: Container, annotations: Mapping[str, str], reason: str) -> None:
    container.asks({f"{PREFIX}{key}": value for key, value in annotations.items()})
    assert container.refused().startswith(f"annotation {reason}")


def test_what_is_no_container_of_its_own_is_refused(container: Container, tmp_path: Path) -> None:
    container.asks({"ggroup.gmem.limit.high": "32M"})
    done = container.hook(pid=os.getpid())
    assert "the container has no cgroup of its own: it is in /" in done.stderr
    assert done.returncode == 1
    assert (container.mount / "ggroup.slices").read_text() == ""
    for state in ({"pid": 0}, {"pid": None}, {"pid": 1 << 22}, {"bundle": os.fspath(tmp_path)}, {"bundle": None}):
        done = container.hook(**state)
        assert done.returncode == 1, state
    container.asks({})
    assert "the runtime found an annotation ggroup.*, and there is none" in container.refused()
    for words in ([], ["other"], ["device", "/", "more"]):
        done = subprocess.run(
            [sys.executable, "-c", HOOK, *words], input="{}", capture_output=True, text=True, check=False
        )
        assert (done.returncode, "not annotations or device" in done.stderr) == (1, True)


def test_without_a_tree_nothing_runs(container: Container, tmp_path: Path) -> None:
    container.asks({"ggroup.gmem.limit.high": "32M"})
    elsewhere = attrs.evolve(container, mount=attrs.evolve(container.mount, path=tmp_path))
    assert elsewhere.refused() == f"{tmp_path}: no ggroup tree is mounted there"


def test_the_state_says_annotations_too(container: Container) -> None:
    """Some runtimes have them only in the state."""
    container.asks({})
    assert container.hook(annotations={"ggroup.compute.weight": "7"}).returncode == 0
    assert (container.slice / "0/compute.weight").read_text() == "7\n"


def test_the_device_looks_at_the_image_and_at_the_environment(container: Container) -> None:
    container.asks({})
    assert container.hook("device").returncode == 0  # neither loader, and no limit: a static program runs
    container.asks({}, {"GGROUP_GMEM_HIGH": "8G"})
    assert (
        container.refused("device") == "GGROUP_GMEM_HIGH=8G: the image has no glibc, so nothing in it would obey that"
    )
    container.loader(MUSL)
    container.asks({})
    musl = "the image has musl (/lib/ld-musl-x86_64.so.1) and no glibc, for which libggroup-cuda.so is"
    assert container.refused("device") == musl
    container.loader(GLIBC)
    container.asks({}, {"GGROUP_GMEM_HIGH": "8G", "GGROUP_WEIGHT": "50"})
    assert container.hook("device").returncode == 0
    assert not container.slice.exists()
    container.asks({}, {"GGROUP_GMEM_HIGH": "12Q"})
    assert container.refused("device").startswith("GGROUP_GMEM_HIGH=12Q: not a size")
    container.asks({}, {"GGROUP_GMEM_HIGH": "12Q", "GGROUP_LENIENT": "1"})
    assert container.hook("device").returncode == 0
    container.asks({"ggroup.compute.weight": "8"})
    assert container.hook("device").returncode == 0
    assert (container.slice / "0/compute.weight").read_text() == "8\n"


def test_links_of_an_image_lead_nowhere_else(container: Container) -> None:
    """A link to the machine's own loader is no loader in the image."""
    container.loader(MUSL)
    (container.bundle / "rootfs/lib64").symlink_to("/usr/lib64")
    container.asks({})
    assert "has musl" in container.refused("device")
    (container.bundle / "rootfs/usr/lib64").mkdir(parents=True)
    (container.bundle / "rootfs/usr/lib64/ld-linux-x86-64.so.2").write_bytes(b"")
    assert container.hook("device").returncode == 0


# The devices


def test_the_devices_of_a_tree(mount: Mounted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, hook, file = tmp_path / "library.so", tmp_path / "oci-hook", tmp_path / "cdi" / "ggroupfs.json"
    library.write_bytes(b"")
    hook.touch(0o755)
    monkeypatch.setenv("GGROUP_CUDA_LIBRARY", os.fspath(library))
    words = ["cdi", "generate", "--mount", mount.path, "--hook", hook]
    printed = ok(*words)
    assert ok(*words, "--output", file) == ""
    assert file.read_text() == printed
    assert file.stat().st_mode & 0o777 == 0o644
    assert os.listdir(file.parent) == [file.name]
    told = json.loads(printed)
    gpus = sorted(name for name in os.listdir(mount / "gpus") if name.isdigit())
    assert (told["cdiVersion"], told["kind"]) == ("0.5.0", "ggroup.io/gpu")
    assert [device["name"] for device in told["devices"]] == [*gpus, "all"]
    assert told["containerEdits"]["hooks"][0]["args"] == ["oci-hook", "device", os.fspath(mount.path)]
    socket = (mount / "ggroup.backend").read_text().split("socket ")[1].split()[0]
    for device in told["devices"]:
        edits = device["containerEdits"]
        assert edits["env"] == ["LD_PRELOAD=/opt/ggroup/libggroup-cuda.so", f"GGROUP_SOCKET={socket}"]
        assert {one["hostPath"]: one["containerPath"] for one in edits["mounts"]} == {
            os.path.dirname(socket): os.path.dirname(socket),
            os.fspath(library): "/opt/ggroup/libggroup-cuda.so",
        }
        assert all("ro" in one["options"] for one in edits["mounts"])
        assert "deviceNodes" not in edits


def test_what_cannot_be_a_device_is_said(mount: Mounted, tmp_path: Path) -> None:
    said = complaint("cdi", "generate", "--mount", mount.path, "--hook", tmp_path / "none", code=1)
    assert said == f"cdi: {tmp_path}/none: no such program: install ggroupfs-container, or name it by --hook"
    with pytest.raises(ValueError, match="would have all of /run"):
        spec(Host(Path("/run/ggroup.sock"), tmp_path, tmp_path, mount.path, [Gpu(0)]))
    with pytest.raises(LookupError):
        host_of(mount.path, tmp_path / "none")


def test_the_nodes_of_nvidia(tmp_path: Path) -> None:
    for place, uuid, minor in (("0000:3b:00.0", "GPU-other", 0), ("0000:af:00.0", UUID, 3)):
        (tmp_path / "gpus" / place).mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        (tmp_path / "gpus" / place / "information").write_text(text)
    for name in ("nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    nodes = nodes_of(UUID, tmp_path / "gpus", tmp_path)
    assert nodes == [f"{tmp_path}/nvidia3", f"{tmp_path}/nvidiactl", f"{tmp_path}/nvidia-uvm"]
    with pytest.raises(LookupError, match="GPU-none"):
        nodes_of("GPU-none", tmp_path / "gpus", tmp_path)
    gpus = [Gpu(0, ["/dev/nvidia0", "/dev/nvidiactl"]), Gpu(1, ["/dev/nvidia1", "/dev/nvidiactl"])]
    told = spec(Host(Path("/run/ggroupfs/a.sock"), tmp_path, tmp_path, tmp_path, gpus))
    paths = [[node["path"] for node in one["containerEdits"]["deviceNodes"]] for one in told["devices"]]
    assert paths == [
        ["/dev/nvidia0", "/dev/nvidiactl"],
        ["/dev/nvidia1", "/dev/nvidiactl"],
        ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"],
    ]
