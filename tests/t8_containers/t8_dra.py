"""Claims of the DRA driver, with podman as the runtime: its CDI files and its hook, with crun and runc, in slices named
as the kubelet names them. The API server is replaced by a claim in the form in which it would return it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping

import pytest

from tests.container.guest import Guest
from tests.t8_containers.engine import GONE_S, NO_SLICE

MIB = 1 << 20
NODE = "node"
RUN = "podman run --privileged --network none"
"""Runs a container of podman without any right that root in the test's container does not have."""
TREE = "-v /run/ggroup-shared:/run/ggroup-shared:ro,rslave"
HOLDS = "ggroupfs tenant --mount /run/ggroup-shared/tree --gmem 32M --report 1"
"""A program of the software GPU that wants twice as much memory as the claims allow."""
RAN = "/run/ran"
NODE_SIDE = "/root/claims.py"
SCRIPT = """
import json, sys
sys.path.insert(0, "/usr/lib/ggroupfs")
from pathlib import Path
from ggroupfs.dra import cdi, devices, preparing, store

class Told:
    def __init__(self, claim): self.claim = claim
    def get(self, path): return self.claim
    def apply(self, path, manager, body): print(body["status"]["devices"][0]["conditions"][0]["message"])

TREE = Path("/run/ggroup")
word, claim = sys.argv[1], json.loads(sys.argv[2])
injected = cdi.Injected(("/usr/bin/ggroupfs-dra", "hook"), str(TREE), "/run/ggroupfs/ggroup.sock", None, None)
place, files = store.Store(), cdi.Directory()
place.make(), files.make()
preparer = preparing.Preparer(
    Told(claim), "node", TREE, place, files, lambda: devices.found(TREE), lambda: injected
)
metadata = claim["metadata"]
if word == "prepare":
    one = preparer.prepare(metadata["namespace"], metadata["name"], metadata["uid"])
    print(*(name for number in range(len(one.shares)) for name in preparer.cdi_ids(one, number)))
elif word == "unprepare":
    preparer.unprepare(metadata["uid"])
else:
    preparer.settle()
"""
"""The driver's part of preparing and unpreparing a claim, called without a kubelet."""


class Claims:
    """The claims of the node."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        guest.write(NODE_SIDE, SCRIPT)
        self._device = guest.ok("cat /run/ggroup/gpus/0/uuid").strip().lower()
        self._made: list[dict] = []

    def claim(self, parameters: Mapping[str, object] | None = None, memory: str = "16Mi", share: str = "30") -> dict:
        """A claim that has been allocated a device, with these parameters."""
        result = {"request": "gpu", "driver": "gpu.ggroup.io", "pool": NODE, "device": self._device}
        result |= {"shareID": str(uuid.uuid4()), "consumedCapacity": {"memory": memory, "share": share}}
        whole = {"apiVersion": "gpu.ggroup.io/v1alpha1", "kind": "GroupParameters", **(parameters or {})}
        opaque = {"source": "FromClaim", "opaque": {"driver": "gpu.ggroup.io", "parameters": whole}}
        allocation = {"devices": {"results": [result], "config": [opaque]}}
        metadata = {"namespace": "default", "name": "claim", "uid": str(uuid.uuid4())}
        self._made.append({"metadata": metadata, "status": {"allocation": allocation}})
        return self._made[-1]

    def node(self, word: str, claim: dict) -> str:
        """Do one thing with a claim; return what was printed."""
        return self._guest.ok(f"/usr/bin/python3 -I {NODE_SIDE} {word} '{json.dumps(claim)}'").strip()

    def end(self) -> None:
        """Unprepare all claims; none is left then."""
        for claim in self._made:
            self.node("unprepare", claim)
        left = "ls /run/cdi /run/ggroupfs-dra/claims /run/ggroupfs-dra/grants | grep json"
        assert self._guest.run(f"{left} | grep -v ^ggroupfs.json").out == ""


@pytest.fixture
def claims(guest: Guest) -> Iterator[Claims]:
    one = Claims(guest)
    yield one
    guest.ok("podman rm -f -t 0 -a; systemctl stop kubepods.slice")
    one.end()


def pod() -> str:
    """The slice of a new pod, named as a kubelet with the systemd driver names it."""
    return f"kubepods-burstable-pod{str(uuid.uuid4()).replace('-', '_')}.slice"


def end(guest: Guest, parent: str) -> None:
    """End a pod: remove its container, and its slice, which podman leaves and a kubelet would remove."""
    guest.ok(f"podman rm -f -t 0 one && systemctl stop {parent}")


def slice_of(guest: Guest, name: str) -> str:
    """The slice of a running container, in the tree."""
    pid = guest.ok(f"podman inspect -f '{{{{.State.Pid}}}}' {name}").strip()
    return "/run/ggroup/slice" + guest.ok(f"sed -n s/^0:://p /proc/{pid}/cgroup").strip()


@pytest.mark.parametrize("runtime", ["crun", "runc"])
def test_a_share_holds_when_the_program_begins(guest: Guest, claims: Claims, runtime: str) -> None:
    claim = claims.claim({"quota": "25% 20ms", "priority": 12, "max": "24Mi"})
    device, parent = claims.node("prepare", claim), pod()
    run = RUN.replace("podman", f"podman --runtime {runtime}", 1)
    guest.ok(f"{run} -d --name one --cgroup-parent {parent} --device {device} {TREE} --rootfs /srv/own {HOLDS}")
    below = slice_of(guest, "one")
    above = below[: below.index(parent) + len(parent)]
    # With crun the program's cgroup is one below the container's.
    place = f"{above}/{below.removeprefix(above).split('/')[1]}"
    for slice_ in (place, above):
        files = "gmem.limit.high gmem.limit.max compute.weight compute.priority compute.max"
        told = guest.ok("cat " + " ".join(f"{slice_}/0/{name}" for name in files.split()))
        assert told.splitlines() == [f"{16 * MIB}", f"{24 * MIB}", "3000", "12", "5000 20000"]
    assert guest.ok(f"cat {above.rpartition('/')[0]}/0/compute.weight") == "3000\n"
    guest.until(f"test $(cat {place}/0/gmem.current) = {16 * MIB}", "the container is at its limit")
    end(guest, parent)
    claims.node("unprepare", claim)
    guest.ok("systemctl stop kubepods.slice")
    guest.until(NO_SLICE, "no slice is left", GONE_S)


@pytest.mark.parametrize("runtime", ["crun", "runc"])
def test_a_second_pod_with_the_claim_does_not_start(guest: Guest, claims: Claims, runtime: str) -> None:
    """The reason is in the system log. runc also passes it on, as containerd does with its errors."""
    run = RUN.replace("podman", f"podman --runtime {runtime}", 1)
    device = claims.node("prepare", claims.claim())
    first = pod()
    guest.ok(f"{RUN} -d --name one --cgroup-parent {first} --device {device} new sleep 1000")
    guest.ok(f"rm -rf {RAN} && mkdir {RAN}")
    words = f"--rm -v {RAN}:{RAN} --cgroup-parent {pod()} --device {device} new touch {RAN}/it"
    done = guest.run(f"{run} {words}")
    assert done.code != 0
    assert guest.ok(f"ls {RAN}") == ""
    reason = "default/claim is held by another pod"
    assert reason in guest.ok("journalctl -q -t ggroupfs-dra -n 1 -o cat")
    assert (reason in done.err) == (runtime == "runc"), done
    end(guest, first)
    guest.ok(f"{run} {words}")
    assert guest.ok(f"ls {RAN}") == "it\n"


def test_a_claim_that_is_unprepared_is_no_container(guest: Guest, claims: Claims) -> None:
    claim = claims.claim()
    device = claims.node("prepare", claim)
    claims.node("unprepare", claim)
    done = guest.run(f"{RUN} --rm --cgroup-parent {pod()} --device {device} new true")
    assert done.code != 0
    assert device in done.err


def test_a_limit_that_does_not_hold_is_no_container(guest: Guest, claims: Claims) -> None:
    """The hook refuses the container: the claim's file exists, but the tree is not mounted."""
    device = claims.node("prepare", claims.claim())
    guest.ok(f"rm -rf {RAN} && mkdir {RAN}")
    guest.ok("systemctl stop ggroupfs")
    done = guest.run(f"{RUN} --rm -v {RAN}:{RAN} --cgroup-parent {pod()} --device {device} new touch {RAN}/it")
    guest.ok("systemctl start ggroupfs")
    assert done.code != 0
    assert guest.ok(f"ls {RAN}") == ""
