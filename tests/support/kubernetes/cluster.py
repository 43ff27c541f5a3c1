"""A node of a cluster, made of doubles; only the driver, the tree and the programs are real."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ggroupfs.dra import NAME
from ggroupfs.dra.parameters import API_VERSION, KIND
from tests.support.kubernetes import runtime
from tests.support.kubernetes.kubelet import Kubelet
from tests.support.kubernetes.runtime import Runtime
from tests.support.kubernetes.scheduler import Scheduler
from tests.support.kubernetes.server import RESOURCE, ApiServer, listening
from tests.support.mounted import Mounted

ROOT = Path(__file__).resolve().parent.parent.parent.parent
MANIFESTS = ROOT / "packaging" / "kubernetes" / "manifests.yaml"
NODE = "node-1"
AS_IN_ITS_POD = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
"""Command prefix that leaves the driver what the DaemonSet's securityContext does: root without a capability."""


def manifests(path: Path = MANIFESTS) -> list[dict[str, Any]]:
    """Return the objects of a file."""
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


class Cluster:
    """An API server, a scheduler and one node."""

    def __init__(self, place: Path, server: ApiServer, token: Path, tree: Path, top: Path) -> None:
        self.place = place
        self.server = server
        self.scheduler = Scheduler(server)
        self.kubelet = Kubelet(place / "kubelet", server)
        self.cdi = place / "cdi"
        self.state = place / "state"
        self.runtime = Runtime(self.cdi, top)
        self.tree = tree
        self._token = token
        self.driver: subprocess.Popen[str] | None = None
        self.log = place / "driver.log"
        self.hook = place / "ggroupfs-dra"
        self.hook.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m ggroupfs.dra "$@"\n')
        self.hook.chmod(self.hook.stat().st_mode | stat.S_IXUSR)
        server.put(f"/api/v1/nodes/{NODE}", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        for one in manifests():
            if one["kind"] == "DeviceClass":
                server.put(f"{RESOURCE}/deviceclasses/{one['metadata']['name']}", one)

    # The driver

    def start(self, *before: str, register: bool = True) -> None:
        """Start the driver; `before` are options of Python's that come before the driver's."""
        words = [
            *AS_IN_ITS_POD,
            sys.executable,
            *(before or ("-m", "ggroupfs.dra")),
            "--verbose",
            "--node",
            NODE,
            "--tree",
            os.fspath(self.tree),
        ]
        words += ["--kubelet", os.fspath(self.place / "kubelet"), "--cdi", os.fspath(self.cdi)]
        words += ["--state", os.fspath(self.state), "--hook", os.fspath(self.hook)]
        words += ["--api-server", self.server.url, "--token", os.fspath(self._token)]
        with self.log.open("a") as log:
            self.driver = subprocess.Popen(words, stderr=log, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        if register:
            self.kubelet.register()

    def kill(self) -> None:
        """SIGKILL the driver."""
        assert self.driver is not None
        self.driver.send_signal(signal.SIGKILL)
        self.driver.wait()

    def stop(self) -> int:
        """End the driver as the end of its pod does; return its exit code."""
        assert self.driver is not None
        self.driver.terminate()
        return self.driver.wait(60)

    def logged(self) -> str:
        """Return what the driver has logged."""
        return self.log.read_text()

    # Objects

    def claim(
        self,
        name: str,
        *requests: Mapping[str, str],
        parameters: Mapping[str, Any] | None = None,
        kind: str = NAME,
    ) -> dict[str, Any]:
        """Make a claim with one request for each mapping of capacities; return it."""
        asked: list[dict[str, Any]] = []
        for number, capacity in enumerate(requests or ({},)):
            exactly: dict[str, Any] = {"deviceClassName": kind}
            if capacity:
                exactly["capacity"] = {"requests": dict(capacity)}
            asked.append({"name": f"gpu-{number}", "exactly": exactly})
        devices: dict[str, Any] = {"requests": asked}
        if parameters is not None:
            whole = {"apiVersion": API_VERSION, "kind": KIND, **parameters}
            devices["config"] = [{"opaque": {"driver": NAME, "parameters": whole}}]
        return self.server.put(
            self.path(name),
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"devices": devices},
            },
        )

    @staticmethod
    def path(name: str) -> str:
        """Return the API path of a claim."""
        return f"{RESOURCE}/namespaces/default/resourceclaims/{name}"

    def scheduled(self, name: str, *requests: Mapping[str, str], **options: Any) -> dict[str, Any]:
        """Make a claim, which must be allocated; return it with its allocation."""
        self.claim(name, *requests, **options)
        assert self.scheduler.schedule("default", name, str(uuid.uuid4()))
        return self.told(name)

    def told(self, name: str) -> dict[str, Any]:
        """Return a claim as it is now."""
        claim = self.server.get(self.path(name))
        assert claim is not None
        return claim

    def slices(self) -> list[dict[str, Any]]:
        """Return the ResourceSlices."""
        return list(self.server.under(f"{RESOURCE}/resourceslices/").values())

    def left(self) -> Sequence[str]:
        """Return the files that any claim has left."""
        return sorted(
            str(path.relative_to(self.place))
            for folder in (self.cdi, self.state)
            for path in folder.rglob("*")
            if path.is_file() and path.name not in ("lock", "levels.json")
        )


@contextlib.contextmanager
def cluster(mount: Mounted) -> Iterator[Cluster]:
    """Yield a node whose tree is `mount`; at the end nothing of its claims may be left."""
    roles = [one for one in manifests() if one["kind"] == "ClusterRole"]
    server = ApiServer([rule for role in roles for rule in role["rules"]], NODE)
    place = Path(tempfile.mkdtemp(prefix="ggroup-dra-"))
    try:
        with runtime.top(f"ggroupdra{os.getpid()}") as top, listening(server, place) as token:
            one = Cluster(place, server, token, mount.path, top)
            try:
                yield one
            finally:
                if one.driver is not None and one.driver.poll() is None:
                    one.stop()
    finally:
        shutil.rmtree(place)
