"""The status of a claim: the reason why it cannot be prepared, as a condition of its devices.

The driver owns the entries of its devices in ``status.devices`` by server-side apply, and touches no others. A success
writes nothing, unless it replaces an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ggroupfs.dra import NAME
from ggroupfs.dra.api import Api, claim_path

READY = "Ready"
"""Type of the condition."""
MESSAGE_MOST = 1024
"""Characters of a reason that are kept; a condition may have 32768."""


def refuse(api: Api, claim: Mapping[str, Any], pool: str, why: str) -> None:
    """Write why a claim cannot be prepared. ApiError."""
    _apply(api, claim, _conditions(claim, pool, "False", "InvalidParameters", why[:MESSAGE_MOST]))


def clear(api: Api, claim: Mapping[str, Any], pool: str) -> None:
    """Write that a claim is prepared, if its status says that it is not. ApiError."""
    if any(not _is_ready(one) for one in _own(claim, pool)):
        _apply(api, claim, _conditions(claim, pool, "True", "Prepared", "limits hold before its programs begin"))


def _own(claim: Mapping[str, Any], pool: str) -> Sequence[Mapping[str, Any]]:
    devices = claim.get("status", {}).get("devices") or ()
    return [one for one in devices if one["driver"] == NAME and one["pool"] == pool]


def _is_ready(device: Mapping[str, Any]) -> bool:
    return all(one["status"] == "True" for one in device.get("conditions") or () if one["type"] == READY)


def _conditions(
    claim: Mapping[str, Any], pool: str, status: str, reason: str, message: str
) -> Sequence[Mapping[str, Any]]:
    """Return the entries of the claim's devices on this node, each with the condition."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": READY,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": now,
        "observedGeneration": claim["metadata"].get("generation", 0),
    }
    allocation = claim.get("status", {}).get("allocation") or {}
    entries = []
    for result in allocation.get("devices", {}).get("results") or ():
        if result["driver"] == NAME and result["pool"] == pool:
            entry = {key: result[key] for key in ("driver", "pool", "device", "shareID") if key in result}
            entries.append({**entry, "conditions": [condition]})
    return entries


def _apply(api: Api, claim: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> None:
    metadata = claim["metadata"]
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        # The UID makes the request a conflict if the claim of that name is another one.
        "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
        "status": {"devices": devices},
    }
    api.apply(f"{claim_path(metadata['namespace'], metadata['name'])}/status", NAME, body)
