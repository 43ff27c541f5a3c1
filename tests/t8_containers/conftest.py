"""One machine for all tests of containers: podman and crun of Debian, both packages, and images of other suites."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.guest import Guest, booted
from tests.t8_containers.engine import CONFIGURED, GONE_S, IMAGES, NO_SLICE


@pytest.fixture(scope="session")
def machine() -> Iterator[Guest]:
    """The machine has booted, and one command has installed all that there is to install."""
    place = Path(os.environ["GGROUP_CONTAINERS"])
    with booted(place / "root.tar", place / "share") as guest:
        # A test starts it, as it can run here.
        guest.ok("systemctl disable --now docker.socket docker containerd && systemctl reset-failed")
        guest.ok("dpkg -i /mnt/ggroupfs.deb /mnt/ggroupfs-container.deb")
        yield guest


@pytest.fixture(scope="session")
def engine(machine: Guest) -> Guest:
    """Podman has the images, and one that is the machine's own root, in which the command is."""
    machine.write("/etc/containers/containers.conf", CONFIGURED)
    for image in IMAGES:
        machine.ok(f"podman import -q /mnt/{image}.tar {image}")
    machine.ok("mkdir /srv/own && mount --bind / /srv/own")
    return machine


@pytest.fixture
def guest(engine: Guest) -> Iterator[Guest]:
    """The service has mounted the tree, and its devices are there. After the test nothing of a container is left."""
    engine.ok("systemctl start ggroupfs ggroupfs-cdi")
    yield engine
    engine.ok("podman rm -f -t 0 -a")
    engine.until(NO_SLICE, "no slice is left", GONE_S)
