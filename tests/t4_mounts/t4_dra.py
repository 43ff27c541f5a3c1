"""The DRA driver on a node of doubles, with a real driver, tree and programs: placement, limits, refusals, restarts."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggroupfs.text.names import slice_directory
from tests.support.kubernetes.cluster import NODE, Cluster, cluster
from tests.support.kubernetes.runtime import Container, NotStarted
from tests.support.mounted import Mounted, eventually, mounted, mountpoint

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def tree(faults: Path) -> Iterator[Mounted]:
    options = ("soft.gpus=2", "soft.gmem=4G", f"soft.faults={faults}")
    with mountpoint() as path, mounted(path, *options, expect_errors=("is lost", "is back")) as mount:
        yield mount


@pytest.fixture
def node(tree: Mounted) -> Iterator[Cluster]:
    with cluster(tree) as one:
        yield one


def program(node: Cluster, *options: str) -> list[str]:
    """Return the words of a program of the software GPU."""
    return [sys.executable, "-m", "ggroupfs", "tenant", "--mount", os.fspath(node.tree), "--seconds", "600", *options]


def control(node: Cluster, path: str, name: str, gpu: int = 0) -> int:
    """Return the number in a control file of a slice."""
    return int((node.tree / slice_directory(path) / str(gpu) / name).read_text())


def started(node: Cluster, name: str, *options: str, pod: str | None = None) -> Container:
    """Start a container that runs a program with all of a prepared claim."""
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
            # A program may exceed such a limit by a page while memory is taken from it.
            assert control(node, container.path, "gmem.current", index) <= asked[name] + 2 * MIB
        two = containers["two"].path
        assert control(node, two, "compute.priority", index) == 12
        assert control(node, two, "gmem.limit.low", index) == GIB
        # Weights count among siblings, and protection holds at every level, so the slices above have the sums.
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


BAD = (
    ({"priority": 99}, "parameters.priority: 99: not a number from 0 to 15"),
    ({"priority": 0}, "only a DeviceClass gives one below 8"),
    ({"weight": 5000}, "parameters.weight: 5000: the claim has a share of 100 at most"),
    ({"low": "2Gi"}, "parameters.low: 2147483648 bytes: the claim has 67108864"),
    ({"low": "much"}, "not a quantity of Kubernetes"),
    ({"quota": "0.1%"}, "parameters.quota: 0.1%: less than 1 ms in a period of 100 ms"),
    ({"max": "lots"}, "parameters.max: lots: not a quantity of Kubernetes"),
    ({"colour": 1}, "parameters.colour: there is no such parameter: low, swapMax, priority, weight, quota, max"),
    ({"kind": "Other"}, "not gpu.ggroup.io/v1alpha1, GroupParameters"),
    ({"weight": True}, "neither a number nor a string"),
)
"""Invalid parameters, with the reason."""


def test_a_bad_parameter_is_refused_with_the_reason_in_the_status(node: Cluster) -> None:
    node.start()
    for number, (parameters, words) in enumerate(BAD):
        name = f"bad-{number}"
        claim = node.scheduled(name, {"memory": "64Mi"}, parameters=parameters)
        (prepared,) = node.kubelet.prepare(claim)
        assert words in prepared.error
        (device,) = node.told(name)["status"]["devices"]
        (condition,) = device["conditions"]
        assert (condition["type"], condition["status"], condition["reason"]) == ("Ready", "False", "InvalidParameters")
        assert words in condition["message"]
        assert node.left() == []
        assert node.kubelet.unprepare(claim) == [""]


def test_an_administrator_gives_what_a_claim_may_not_ask_for(node: Cluster) -> None:
    node.start()
    node.scheduled("served", {"memory": "1Gi"}, kind="serving.gpu.ggroup.io")
    container = started(node, "served")
    try:
        assert control(node, container.path, "compute.priority") == 0
    finally:
        container.end()


def test_a_quota_and_a_hard_limit_hold_on_container_and_pod(node: Cluster) -> None:
    node.start()
    node.scheduled("metered", {"memory": "1Gi"}, parameters={"quota": "25% 20ms", "max": "1536Mi"})
    container = started(node, "metered")
    try:
        for path in (container.path, os.path.dirname(container.path)):
            files = node.tree / slice_directory(path) / "0"
            assert (files / "compute.max").read_text() == "5000 20000\n"
            assert control(node, path, "gmem.limit.max") == 1536 * MIB
            assert control(node, path, "gmem.limit.high") == GIB
    finally:
        container.end()


def test_two_requests_of_one_claim_are_two_shares(node: Cluster) -> None:
    node.start()
    claim = node.scheduled("pair", {"memory": "1Gi", "share": "20"}, {"memory": "512Mi", "share": "5"})
    (prepared,) = node.kubelet.prepare(claim)
    pod = node.runtime.pod(claim["status"]["reservedFor"][0]["uid"])
    containers = [node.runtime.start(pod, prepared.ids[request], *program(node)) for request in ("gpu-0", "gpu-1")]
    try:
        highs = [control(node, one.path, "gmem.limit.high") for one in containers]
        assert highs == [GIB, 512 * MIB]
        assert control(node, os.path.dirname(containers[0].path), "gmem.limit.high") == GIB + 512 * MIB
        assert control(node, os.path.dirname(containers[0].path), "compute.weight") == 2500
        # A restarted container has its own share, and the pod has no more than before.
        containers[1].end()
        containers[1] = node.runtime.start(pod, prepared.ids["gpu-1"], *program(node))
        assert control(node, os.path.dirname(containers[0].path), "gmem.limit.high") == GIB + 512 * MIB
    finally:
        for one in containers:
            one.end()


def test_a_second_pod_with_a_claim_that_is_in_use_does_not_start(node: Cluster) -> None:
    node.start()
    node.scheduled("shared", {"memory": "1Gi"})
    container = started(node, "shared")
    other = "11111111-2222-3333-4444-555555555555"
    with pytest.raises(NotStarted, match="default/shared is held by another pod"):
        started(node, "shared", pod=other)
    container.end()
    os.rmdir(container.cgroup.parent)  # the first pod has ended, so the second one may begin
    started(node, "shared", pod=other).end()


def test_what_is_over_the_maximum_or_unknown_stays_pending(node: Cluster) -> None:
    node.start()
    for number, capacity in enumerate(({"memory": "5Gi"}, {"bandwidth": "1"}, {"share": "101"})):
        node.claim(f"never-{number}", capacity)
        assert not node.scheduler.schedule("default", f"never-{number}", "pod")
    attributes = node.slices()[0]["spec"]["devices"][0]["attributes"]
    assert attributes["memoryMax"] == {"string": "4Gi"}
    assert attributes["memoryMin"] == {"string": "64Mi"}
    assert attributes["shareMax"] == {"int": 100}
    result = node.scheduled("least", {"memory": "1"})["status"]["allocation"]["devices"]["results"][0]
    assert result["consumedCapacity"] == {"memory": "64Mi", "share": "1"}


def test_a_slice_is_published_once_the_plugin_is_registered_and_again_when_it_is_gone(node: Cluster) -> None:
    node.start(register=False)
    eventually(node.kubelet.socket.exists, "the socket", 60)
    assert node.slices() == []  # although it has looked once, which it does before it listens
    node.kubelet.register()
    (first,) = node.slices()
    node.kubelet.wipe()
    eventually(node.slices, "the slice again", 60)
    assert node.slices()[0]["spec"] == first["spec"]
    node.kill()
    node.start()
    assert node.slices()[0]["spec"]["pool"]["generation"] == 1


def test_a_kubelet_that_speaks_none_of_its_versions_is_told_of_in_the_log(node: Cluster) -> None:
    node.kubelet.speaks = ("v9.DRAPlugin",)
    node.start(register=False)
    eventually(node.kubelet.socket.exists, "the socket", 60)
    eventually(lambda: not node.kubelet.try_look() and "does not take this plugin" in node.logged(), "the refusal", 60)
    assert "v1.DRAPlugin" in node.logged()
    assert node.slices() == []


def test_a_socket_that_is_removed_comes_again(node: Cluster) -> None:
    node.start()
    node.kubelet.socket.unlink()
    node.kubelet.look()
    node.kubelet.register()
    claim = node.scheduled("after", {})
    assert not node.kubelet.prepare(claim)[0].error


def test_a_gpu_that_is_lost_is_unhealthy_and_gets_no_more_claims(node: Cluster, faults: Path) -> None:
    node.start()
    names = [device["name"] for device in node.slices()[0]["spec"]["devices"]]
    ended = threading.Event()
    told: list[dict] = []

    def watch() -> None:
        for health in node.kubelet.health(ended):
            told.append(dict(health))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        eventually(lambda: told and {one[0] for one in told[-1].values()} == {"HEALTHY"}, "all healthy", 60)
        (faults / "1").touch()
        eventually(lambda: told[-1][names[1]][0] == "UNHEALTHY", "the second one lost", 60)
        assert told[-1][names[0]][0] == "HEALTHY"
        eventually(lambda: node.slices()[0]["spec"]["devices"][1].get("taints"), "the taint", 60)
        assert node.slices()[0]["spec"]["pool"]["generation"] == 2
        node.scheduled("first", {"memory": "4Gi"})
        node.claim("second", {"memory": "1Gi"})
        assert not node.scheduler.schedule("default", "second", "pod")
        (faults / "1").unlink()
        eventually(lambda: told[-1][names[1]][0] == "HEALTHY", "the second one again", 60)
        eventually(lambda: not node.slices()[0]["spec"]["devices"][1].get("taints"), "no taint", 60)
        assert node.scheduler.schedule("default", "second", "pod")
    finally:
        ended.set()
        (faults / "0").touch()  # so that there is news, and the watch ends
        thread.join(60)
        (faults / "0").unlink()


def test_a_driver_that_is_killed_leaves_programs_as_they_are_and_takes_them_up(node: Cluster) -> None:
    node.start()
    node.scheduled("kept", {"memory": "1Gi", "share": "20"})
    container = started(node, "kept")
    node.kill()
    assert control(node, container.path, "gmem.limit.high") == GIB
    # A write made meanwhile is put right again; so is a tree whose daemon has forgotten the settings.
    (node.tree / slice_directory(container.path) / "0" / "gmem.limit.high").write_text("max")
    node.start()
    eventually(lambda: control(node, container.path, "gmem.limit.high") == GIB, "the limit again", 60)
    container.end()
    assert node.kubelet.unprepare(node.told("kept")) == [""]
    assert node.left() == []


def test_a_claim_that_is_there_no_more_is_forgotten_at_the_next_start(node: Cluster) -> None:
    node.start()
    claim = node.scheduled("gone", {"memory": "1Gi"})
    assert not node.kubelet.prepare(claim)[0].error
    assert len(node.left()) == 2
    node.kill()
    node.server.delete(node.path("gone"))
    node.start()
    assert node.left() == []


def test_a_node_that_starts_anew_has_its_claims_prepared_anew(node: Cluster) -> None:
    """Prepared claims are recorded on a tmpfs, and vanish with the tree and the cgroups that they are about."""
    node.start()
    claim = node.scheduled("again", {"memory": "1Gi"})
    started(node, "again").end()
    node.kill()
    for place in (node.cdi, node.state):
        shutil.rmtree(place)
    node.kubelet.wipe()
    node.start()
    assert node.left() == []
    container = started(node, "again")
    assert control(node, container.path, "gmem.limit.high") == GIB
    container.end()
    assert node.kubelet.unprepare(claim) == [""]
    assert node.left() == []


def test_without_a_tree_a_claim_is_refused_for_now(node: Cluster) -> None:
    node.start()
    claim = node.scheduled("later", {"memory": "1Gi"})
    node.stop()
    node.tree = node.place / "nothing"
    node.tree.mkdir()
    node.start(register=False)
    eventually(node.kubelet.try_look, "the plugin", 60)
    assert "is ggroupfs mounted there" in node.kubelet.prepare(claim)[0].error
    assert "devices" not in node.told("later")["status"]


def test_a_driver_that_is_ended_takes_its_socket_along(node: Cluster) -> None:
    node.start()
    assert node.stop() == 0
    assert not node.kubelet.socket.exists()
