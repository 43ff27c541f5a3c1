"""Publishes the ResourceSlice of a node: the GPUs that the scheduler may give away, and how much of each.

It is published once the kubelet has registered the plugin, since the kubelet removes slices of unknown drivers, and
again whenever it is gone or differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ggroupfs.dra import NAME
from ggroupfs.dra.api import RESOURCE, Api, ApiError
from ggroupfs.dra.devices import Device, published

ANNOTATION = f"{NAME}/devices"
"""Annotation with a digest of the devices as written. A comparison of the fields would not do: a server without some
feature drops its fields."""
SLICES = f"{RESOURCE}/resourceslices"


class Publisher:
    """The ResourceSlice of one node, the only one in the pool of the node's name."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._node = node
        self.name = f"{node}-{NAME}"
        """Name of the ResourceSlice."""

    def publish(self, devices: Sequence[Device]) -> bool:
        """Update the ResourceSlice to these devices; return whether anything was written. ApiError."""
        entries = [published(device) for device in devices]
        digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:32]
        try:
            there = self._api.get(f"{SLICES}/{self.name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return self._make(entries, digest)
        if (there["metadata"].get("annotations") or {}).get(ANNOTATION) == digest:
            return False
        body = self._slice(entries, digest, there["spec"]["pool"]["generation"] + 1)
        body["metadata"] |= {"resourceVersion": there["metadata"]["resourceVersion"]}
        body["metadata"]["ownerReferences"] = there["metadata"].get("ownerReferences", [])
        self._api.put(f"{SLICES}/{self.name}", body)
        return True

    def _make(self, entries: Sequence[Any], digest: str) -> bool:
        body = self._slice(entries, digest, 1)
        # With the node as its owner, it is removed together with the node.
        node = self._api.get(f"/api/v1/nodes/{self._node}")
        owner = {
            "apiVersion": "v1",
            "kind": "Node",
            "name": self._node,
            "uid": node["metadata"]["uid"],
            "controller": True,
        }
        body["metadata"]["ownerReferences"] = [owner]
        try:
            self._api.post(SLICES, body)
        except ApiError as error:
            if error.status != 409:  # another driver of this node was quicker: the next look compares
                raise
            return False
        return True

    def _slice(self, entries: Sequence[Any], digest: str, generation: int) -> dict[str, Any]:
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": self.name, "annotations": {ANNOTATION: digest}},
            "spec": {
                "driver": NAME,
                "nodeName": self._node,
                "pool": {"name": self._node, "generation": generation, "resourceSliceCount": 1},
                "devices": entries,
            },
        }
