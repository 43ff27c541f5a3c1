"""One container with one cluster for all tests of this level, booted once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.guest import Guest, booted
from tests.t8_slurm.cluster import LINE, Cluster, install


@pytest.fixture(scope="session")
def installed() -> Iterator[Guest]:
    """The container, in which the cluster runs."""
    place = Path(os.environ["GGROUP_SLURM"])
    with booted(place / "root.tar", place / "share") as guest:
        install(guest)
        yield guest


@pytest.fixture
def cluster(installed: Guest) -> Iterator[Cluster]:
    """The cluster with a running daemon and no options. After the test the node is up and no job has left anything."""
    installed.ok("systemctl start ggroupfs")
    cluster = Cluster(installed)
    cluster.configure(LINE)
    yield cluster
    cluster.configure(LINE)
    installed.run("scancel --user alice; scancel --user bob")
    cluster.check()
