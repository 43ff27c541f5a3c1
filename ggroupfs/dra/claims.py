"""Reads the allocation of a ResourceClaim into the shares of GPUs that it gives on this node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ggroupfs.dra import NAME, quantities
from ggroupfs.dra.devices import WEIGHT_OF_SHARE, Device
from ggroupfs.dra.parameters import ASKED, Asked, Refused, read, settled
from ggroupfs.dra.store import Claim, Share


def granted(claim: Mapping[str, Any], uid: str, pool: str, devices: Sequence[Device]) -> Claim:
    """Return the shares that a ResourceClaim (resource.k8s.io/v1) gives on this node. Refused, with the reason.

    `devices` are the GPUs of this node, in the pool `pool`.
    """
    metadata = claim["metadata"]
    if metadata["uid"] != uid:
        raise Refused(f"the claim of that name is another: its UID is {metadata['uid']}")
    allocation = claim.get("status", {}).get("allocation")
    if allocation is None:
        raise Refused("the claim is not allocated")
    asked = allocation.get("devices", {})
    by_name = {device.name: device for device in devices}
    shares = [
        _share(result, asked.get("config", ()), by_name)
        for result in asked.get("results", ())
        if result["driver"] == NAME and result["pool"] == pool
    ]
    if not shares:
        raise Refused(f"nothing of the claim is on this node: no device of {NAME} in the pool {pool}")
    return Claim(uid, metadata["namespace"], metadata["name"], shares)


def _share(
    result: Mapping[str, Any], configurations: Sequence[Mapping[str, Any]], devices: Mapping[str, Device]
) -> Share:
    name, request = result["device"], result["request"]
    device = devices.get(name)
    if device is None:
        raise Refused(f"request {request}: this node has no GPU {name} any more")
    if not device.present:
        raise Refused(f"request {request}: GPU {name} is lost")
    consumed = {key: _amount(request, key, str(value)) for key, value in result.get("consumedCapacity", {}).items()}
    # An administrator's claim with adminAccess consumes nothing, and has the GPU next to the others.
    memory, share = consumed.get("memory"), consumed.get("share")
    configured = [_asked(one, memory or device.memory) for one in configurations if _is_for(one, request)]
    for parameter, setting in ASKED.items():
        if not device.acts(setting) and any(setting.field in one.values for one in configured):
            raise Refused(f"parameters.{parameter}: {setting.control} does not act on this node")
    settings = settled(
        memory if device.has_memory else None,
        None if share is None or not device.has_shares else share * WEIGHT_OF_SHARE,
        configured,
    )
    return Share(request, result["pool"], name, device.uuid, result.get("shareID"), settings)


def _amount(request: str, capacity: str, amount: str) -> int:
    try:
        return quantities.whole(amount)
    except ValueError as error:
        raise Refused(f"request {request}: consumedCapacity.{capacity}: {amount}: {error}") from None


def _is_for(configuration: Mapping[str, Any], request: str) -> bool:
    """Whether a configuration is for this driver and a request; ``parent/sub`` is one of several alternatives."""
    if configuration.get("opaque", {}).get("driver") != NAME:
        return False
    requests = configuration.get("requests") or ()
    return not requests or request in requests or request.partition("/")[0] in requests


def _asked(configuration: Mapping[str, Any], memory: int) -> Asked:
    return read(configuration["opaque"].get("parameters"), memory, configuration.get("source") == "FromClass")
