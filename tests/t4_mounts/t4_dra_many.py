"""Many claims on one node: how long each takes to prepare, and that a thousand of them leave nothing behind."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes.cluster import Cluster, cluster
from tests.support.mounted import Mounted, eventually, mounted, mountpoint

CLAIMS = 100
PREPARED_S = 0.050
"""Seconds within which 99 of 100 claims are prepared."""


@pytest.fixture(scope="module")
def tree() -> Iterator[Mounted]:
    with mountpoint() as path, mounted(path, "soft.gmem=128G") as mount:
        yield mount


@pytest.fixture
def node(tree: Mounted) -> Iterator[Cluster]:
    with cluster(tree) as one:
        yield one


def descriptors(pid: int) -> int:
    """Return the number of descriptors that a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def prepared(node: Cluster, claim: Mapping[str, Any]) -> float:
    """Prepare a claim; return the seconds from the kubelet's call to the answer."""
    before = time.monotonic()
    (answer,) = node.kubelet.prepare(claim)
    took = time.monotonic() - before
    assert not answer.error
    return took


def test_a_claim_is_prepared_in_no_time(node: Cluster) -> None:
    node.start()
    claims = [node.scheduled(f"claim-{number}", {"memory": "64Mi"}) for number in range(CLAIMS)]
    assert not node.kubelet.prepare(claims[0])[0].error  # the first call loads modules
    # On a busy machine a single round measures the other users of the machine, too.
    rounds: list[float] = []
    end = time.monotonic() + 240
    while not rounds or (min(rounds) >= PREPARED_S and time.monotonic() < end):
        assert node.kubelet.unprepare(*claims) == [""] * CLAIMS
        took = [prepared(node, claim) for claim in claims]
        rounds.append(statistics.quantiles(took, n=100)[98])
        print(f"prepare: median {statistics.median(took) * 1e3:.1f} ms, p99 {rounds[-1] * 1e3:.1f} ms")
    assert min(rounds) < PREPARED_S, rounds
    assert len(list(node.cdi.iterdir())) == CLAIMS
    assert node.kubelet.unprepare(*claims) == [""] * CLAIMS
    assert node.left() == []


def test_a_thousand_claims_leave_nothing(node: Cluster) -> None:
    node.start()
    assert node.driver is not None
    claim = node.scheduled("first")
    assert not node.kubelet.prepare(claim)[0].error
    assert node.kubelet.unprepare(claim) == [""]
    node.server.delete(node.path("first"))
    files = descriptors(node.driver.pid)
    for round_ in range(10):
        claims = [node.scheduled(f"claim-{round_}-{number}", {"memory": "64Mi"}) for number in range(CLAIMS)]
        answers = node.kubelet.prepare(*claims)
        assert not any(one.error for one in answers)
        if round_ % 5 == 0:  # some of the claims with a container
            pod = node.runtime.pod(claims[0]["status"]["reservedFor"][0]["uid"])
            container = node.runtime.start(pod, answers[0].ids["gpu-0"], "sleep", "600")
            assert list((node.tree / "slice").rglob("*kubepods*"))
            container.end()
            for place in (pod, pod.parent, pod.parent.parent):
                os.rmdir(place)
        assert node.kubelet.unprepare(*claims) == [""] * CLAIMS
        for claim in claims:
            node.server.delete(node.path(claim["metadata"]["name"]))
    assert node.left() == []
    assert descriptors(node.driver.pid) <= files + 2  # threads that wait for calls open one once
    # The slice of the cgroup above stays, as that cgroup does.
    eventually(lambda: not list((node.tree / "slice").rglob("*kubepods*")), "no slices of pods", 60)
    assert len(node.slices()) == 1
    assert not list(Path(node.cdi).iterdir())
