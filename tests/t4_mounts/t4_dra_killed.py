"""The DRA driver, killed at each step of preparing and unpreparing a claim: nothing is lost, and nothing is left."""

from __future__ import annotations

import os
from collections.abc import Iterator

import grpc
import pytest

from ggroupfs.text.names import slice_directory
from tests.support.kubernetes.cluster import Cluster, cluster
from tests.support.kubernetes.runtime import Container
from tests.support.mounted import Mounted, mounted, mountpoint

KILLED = ("-m", "tests.support.kubernetes.killed")
STEPS_OF_PREPARING = 4
"""Number of calls that change a file: a record and a CDI file, each written and then named."""
STEPS_OF_UNPREPARING = 5
"""Number of such calls: grants written and named or removed, the CDI file and the record removed, the levels above
written and named."""


@pytest.fixture(scope="module")
def tree() -> Iterator[Mounted]:
    with mountpoint() as path, mounted(path, "soft.gmem=4G") as mount:
        yield mount


@pytest.fixture
def node(tree: Mounted) -> Iterator[Cluster]:
    with cluster(tree) as one:
        yield one


def sleeper(node: Cluster, name: str) -> Container:
    """Start a container with a claim; its program uses no GPU yet."""
    claim = node.told(name)
    (prepared,) = node.kubelet.prepare(claim)
    assert not prepared.error
    pod = node.runtime.pod(claim["status"]["reservedFor"][0]["uid"])
    return node.runtime.start(pod, [one for ids in prepared.ids.values() for one in ids], "sleep", "600")


@pytest.mark.parametrize("step", range(1, STEPS_OF_PREPARING + 1))
def test_killed_while_it_prepares(node: Cluster, step: int) -> None:
    node.start(*KILLED, str(step))
    claim = node.scheduled("one", {"memory": "1Gi"})
    with pytest.raises(grpc.RpcError):
        node.kubelet.prepare(claim)
    assert node.driver is not None
    assert node.driver.wait(60) == -9
    node.start()
    assert not [name for name in node.left() if name.endswith(".new")]
    container = sleeper(node, "one")
    high = node.tree / slice_directory(container.path) / "0" / "gmem.limit.high"
    assert int(high.read_text()) == 1 << 30
    container.end()
    assert node.kubelet.unprepare(claim) == [""]
    assert node.left() == []


def test_all_steps_of_preparing_are_tried(node: Cluster) -> None:
    node.start(*KILLED, str(STEPS_OF_PREPARING + 1))
    claim = node.scheduled("one", {"memory": "1Gi"})
    assert not node.kubelet.prepare(claim)[0].error


@pytest.mark.parametrize("step", range(1, STEPS_OF_UNPREPARING + 1))
def test_killed_while_it_undoes_that(node: Cluster, step: int) -> None:
    node.start()
    claim = node.scheduled("one", {"memory": "1Gi", "share": "20"})
    container = sleeper(node, "one")
    above = os.path.dirname(os.path.dirname(os.path.dirname(container.path)))
    weight = node.tree / slice_directory(above) / "0" / "compute.weight"
    assert weight.read_text() == "2000\n"
    node.stop()
    node.start(*KILLED, str(step))
    with pytest.raises(grpc.RpcError):
        node.kubelet.unprepare(claim)
    assert node.driver is not None
    assert node.driver.wait(60) == -9
    node.start()
    # The kubelet asks again until it has an answer.
    assert node.kubelet.unprepare(claim) == [""]
    assert node.kubelet.unprepare(claim) == [""]
    assert node.left() == []
    assert weight.read_text() == "100\n"
    container.end()


def test_killed_while_nothing_is_done(node: Cluster) -> None:
    node.start()
    for _ in range(3):
        node.kill()
        node.start()
    assert len(node.slices()) == 1
    assert not node.kubelet.prepare(node.scheduled("one"))[0].error
