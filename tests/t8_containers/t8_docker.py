"""Docker of Debian, set up by hand, and by device and annotation where it supports them (Debian 13)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.container.guest import Guest
from tests.t8_containers.engine import GONE_S, NO_SLICE

CONFIGURED = {
    "bridge": "none",
    "features": {"cdi": True},
    "ip-forward": False,
    "iptables": False,
    "storage-driver": "vfs",
}
"""The daemon's configuration: devices, and settings that work in the test's container, whose /proc/sys is read-only."""
KNOWS_DEVICES = 25
"""The first version with `features.cdi` and `docker run --annotation`."""
RUN = "docker run --network none"
LIBRARY = "/opt/ggroup/libggroup-cuda.so"
BY_HAND = (
    "-v /run/ggroupfs:/run/ggroupfs:ro"
    f" -v /usr/lib/ggroupfs/backend/cuda/libggroup-cuda.so:{LIBRARY}:ro"
    f" -e LD_PRELOAD={LIBRARY} -e GGROUP_SOCKET=/run/ggroupfs/ggroup.sock"
    " --cgroup-parent batch.slice"
)
"""The options that docs/containers.md gives."""
CALLS = "-v /mnt:/mnt:ro new python3 /mnt/calls.py /mnt"
HIGH = 16 << 20


@pytest.fixture(scope="module")
def version(engine: Guest) -> Iterator[int]:
    """The major version of the daemon, which runs and has an image."""
    engine.write("/etc/docker/daemon.json", json.dumps(CONFIGURED) + "\n")
    engine.ok("systemctl start containerd docker && docker import /mnt/new.tar new")
    yield int(engine.ok("docker version -f '{{.Server.Version}}'").partition(".")[0])
    engine.ok("systemctl stop docker.socket docker containerd")


@pytest.fixture
def docker(guest: Guest, version: int) -> Iterator[Guest]:
    """The guest with Docker running. After the test no container and no slice is left."""
    assert version > 0
    yield guest
    guest.ok("docker ps -aq | xargs --no-run-if-empty docker rm -f")
    guest.run("rmdir /sys/fs/cgroup/batch.slice")
    guest.until(NO_SLICE, "no slice is left", GONE_S)


def slice_of(guest: Guest, name: str) -> str:
    pid = guest.ok(f"docker inspect -f '{{{{.State.Pid}}}}' {name}").strip()
    return guest.ok(f"sed -n s/^0:://p /proc/{pid}/cgroup").strip()


def test_by_hand(docker: Guest) -> None:
    said = docker.ok(f"{RUN} --rm {BY_HAND} -e GGROUP_GMEM_HIGH=8G {CALLS}")
    assert said.startswith("glibc 2."), "its calls are caught by the library"
    said = docker.ok(f"{RUN} --rm {BY_HAND} -e GGROUP_GMEM_HIGH=8G new env")
    assert f":high={8 << 30}\n" in said, "the environment is read"


def test_a_bad_value_by_hand_ends_the_program(docker: Guest) -> None:
    done = docker.run(f"{RUN} --rm {BY_HAND} -e GGROUP_GMEM_HIGH=12Q {CALLS}")
    assert done.code != 0
    assert "GGROUP_GMEM_HIGH=12Q: " in done.err
    assert done.out == ""


def test_a_slice_of_containers_is_limited_from_outside(docker: Guest) -> None:
    docker.ok(f"{RUN} -d --name one {BY_HAND} new sleep 1000")
    path = slice_of(docker, "one")
    assert path.startswith("/batch.slice/docker-")
    docker.ok(f"ggroupfs set {path} GMemHigh=16M && ggroupfs set /batch.slice ComputeWeight=30")
    shown = f"cat /run/ggroup/slice{path}/0/gmem.limit.high /run/ggroup/slice/batch.slice/0/compute.weight"
    assert docker.ok(shown) == f"{HIGH}\n30\n"


def test_devices_and_annotations_where_docker_knows_them(docker: Guest, version: int) -> None:
    """An older Docker says that it does not know them, and runs no container without the limits that were asked for."""
    options = "--device ggroup.io/gpu=0 --annotation ggroup.gmem.limit.high"
    done = docker.run(f"{RUN} -d --name one {options}=16M new sleep 1000")
    if version < KNOWS_DEVICES:
        assert (done.code, "unknown flag: --annotation" in done.err) == (125, True), done
        done = docker.run(f"{RUN} --rm --device ggroup.io/gpu=0 new true")
        assert (done.code, "not an absolute path" in done.err) == (125, True), done
        return
    assert done.code == 0, done
    assert docker.ok(f"cat /run/ggroup/slice{slice_of(docker, 'one')}/0/gmem.limit.high") == f"{HIGH}\n"
    done = docker.run(f"{RUN} --rm {options}=12Q new true")
    assert (done.code != 0, "no value of this file" in done.err) == (True, True), done
    assert docker.ok(f"{RUN} --rm --device ggroup.io/gpu=0 {CALLS}").startswith("glibc 2.")
