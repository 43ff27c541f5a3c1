"""The DRA driver on a node of doubles: placing, limits that hold, refusals, restarts; the driver, tree and programs are
real."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggroupfs.text.names import slice_directory
from tests.support.kubernetes.cluster import NODE, Cluster, cluster
from tests.support.kubernetes.runtime import Container
from tests.support.mounted import Mounted, eventually, mounted, mountpoint

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def tree(faults: Path) -> Iterator[Mounted]:
    with mountpoint() as path, mounted(path, "soft.gpus=2", "soft.gmem=4G", f"soft.faults={faults}") as mount:
        yield mount


@pytest.fixture
def node(tree: Mounted) -> Iterator[Cluster]:
    with cluster(tree) as one:
        yield one


def program(node: Cluster, *options: str) -> list[str]:
    """Words of a program of the software GPU."""
    return [sys.executable, "-m", "ggroupfs", "tenant", "--mount", os.fspath(node.tree), "--seconds", "600", *options]


def control(node: Cluster, path: str, name: str, gpu: int = 0) -> int:
    """A number in a control file of a slice."""
    return int((node.tree / slice_directory(path) / str(gpu) / name).read_text())


def started(node: Cluster, name: str, *options: str, pod: str | None = None) -> Container:
    """A container with all of a claim that is prepared, which runs a program."""
    claim = node.told(name)
    (prepared,) = node.kubelet.prepare(claim)
    assert not prepared.error
    ids = [one for found in prepared.ids.values() for one in found]
    uid = pod or claim["status"]["reservedFor"][0]["uid"]
    return node.runtime.start(node.runtime.pod(uid), ids, *program(node, *options))


def test_three_claims_on_one_gpu_and_the_fourth_waits(node: Cluster) -> None:
    node.start()
    (published,) = node.slices()
    assert published["spec"]["nodeName"] == NODE
    assert [one["capacity"]["memory"]["value"] for one in published["spec"]["devices"]] == ["4Gi", "4Gi"]
    assert published["metadata"]["ownerReferences"][0]["kind"] == "Node"
    first = node.scheduled("one", {"memory": "1Gi", "share": "10"})
    gpu = first["status"]["allocation"]["devices"]["results"][0]["device"]
    node.scheduled("two", {"memory": "2047Mi", "share": "30"}, parameters={"priority": 12, "low": "1Gi"})
    node.scheduled("three", {"memory": "900Mi", "share": "60"})
    for name in ("two", "three"):
        assert node.told(name)["status"]["allocation"]["devices"]["results"][0]["device"] == gpu
    node.scheduled("elsewhere", {"memory": "4Gi", "share": "100"})  # all of the other GPU
    node.claim("four", {"memory": "256Mi"})
    assert not node.scheduler.schedule("default", "four", "pod")
    containers = {name: started(node, name, "--gmem", "1536M") for name in ("one", "two", "three")}
    try:
        index = next(
            int(path.name)
            for path in (node.tree / "gpus").iterdir()
            if path.name.isdigit() and (path / "uuid").read_text().strip().lower() == gpu
        )
        asked = {"one": GIB, "two": 2048 * MIB, "three": 900 * MIB}  # rounded up to the step of 2 MiB
        weights = {"one": 1000, "two": 3000, "three": 6000}
        for name, container in containers.items():
            for path in (container.path, os.path.dirname(container.path)):
                assert control(node, path, "gmem.limit.high", index) == asked[name]
                assert control(node, path, "compute.weight", index) == weights[name]
            eventually(lambda c=container: control(node, c.path, "gmem.current", index) > 512 * MIB, "its memory", 60)
            # Over a limit of this kind a program is for a page at most, while it is taken from.
            assert control(node, container.path, "gmem.current", index) <= asked[name] + 2 * MIB
        two = containers["two"].path
        assert control(node, two, "compute.priority", index) == 12
        assert control(node, two, "gmem.limit.low", index) == GIB
        # Weights count among siblings, and protection holds on every level: the slices above have the sums.
        for path in (os.path.dirname(os.path.dirname(two)), os.path.dirname(os.path.dirname(os.path.dirname(two)))):
            assert control(node, path, "compute.weight", index) == 10_000
            assert control(node, path, "gmem.limit.low", index) == GIB
    finally:
        for container in containers.values():
            container.end()
    assert node.kubelet.unprepare(*map(node.told, containers)) == ["", "", ""]
    assert node.left() == []
    for path in (os.path.dirname(os.path.dirname(two)), os.path.dirname(os.path.dirname(os.path.dirname(two)))):
        assert control(node, path, "compute.weight", index) == 100
        assert control(node, path, "gmem.limit.low", index) == 0
