"""Checks of an API server: the OpenAPI schemas of objects, and the validation of their values.

The schemas are the published ones of Kubernetes (the package kubernetes-validate); the rules after them are those of
pkg/apis/resource/validation of 1.36, as far as a DRA driver can break them.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import referencing

from ggroupfs.dra import quantities

VERSIONS = ("1.34.0", "1.36.0")
"""Versions of Kubernetes whose schemas are used: the first with consumable capacity, and the one that was studied."""

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
TAINT_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
DEVICES_MOST, DEVICES_WITH_TAINTS_MOST, NAMES_MOST, TEXT_MOST = 128, 64, 32, 64


class Invalid(Exception):
    """An object that is refused with 422, and why."""


@functools.cache
def _validator(version: str, kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    folder = importlib.resources.files("kubernetes_validate") / f"kubernetes-json-schema/v{version}-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = json.loads((folder / f"{kind.lower()}-{group}.json").read_text())
    resources = [referencing.Resource.from_contents(one) for one in (schema, _definitions(version))]
    return jsonschema.Draft202012Validator(schema, registry=resources @ referencing.Registry())


@functools.cache
def _definitions(version: str) -> Any:
    folder = importlib.resources.files("kubernetes_validate") / f"kubernetes-json-schema/v{version}-local-strict"
    return json.loads((folder / "_definitions.json").read_text())


def check(thing: Mapping[str, Any], versions: tuple[str, ...] = VERSIONS) -> None:
    """Raise Invalid for an object that does not match the schema of its kind, or has unknown fields."""
    for version in versions:
        try:
            validator = _validator(version, thing["kind"], thing["apiVersion"])
        except (KeyError, FileNotFoundError) as error:
            raise Invalid(f"no such kind: {error}") from None
        for error in validator.iter_errors(thing):
            raise Invalid(f"{version}: {error.json_path}: {error.message[:300]}")


def _require(condition: object, why: str) -> None:
    if not condition:
        raise Invalid(why)


def check_slice(thing: Mapping[str, Any]) -> None:
    """Raise Invalid for a ResourceSlice that fails validation."""
    spec = thing["spec"]
    driver, pool, devices = spec["driver"], spec["pool"], spec.get("devices", [])
    _require(len(driver) <= 63 and SUBDOMAIN.fullmatch(driver), f"spec.driver: {driver}")
    _require(len(pool["name"]) <= 253 and all(map(SUBDOMAIN.fullmatch, pool["name"].split("/"))), "spec.pool.name")
    _require(pool["resourceSliceCount"] > 0 and pool["generation"] >= 0, "spec.pool")
    places = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
    _require(sum(1 for place in places if spec.get(place)) == 1, f"exactly one of {places} is required")
    most = DEVICES_WITH_TAINTS_MOST if any(device.get("taints") for device in devices) else DEVICES_MOST
    _require(len(devices) <= most, "spec.devices: too many")
    names = [device["name"] for device in devices]
    _require(len(set(names)) == len(names), "spec.devices: duplicate")
    for device in devices:
        _check_device(device)


def _check_device(device: Mapping[str, Any]) -> None:
    where = f"device {device['name']}"
    _require(LABEL.fullmatch(device["name"]), f"{where}: not a label")
    attributes, capacity = device.get("attributes", {}), device.get("capacity", {})
    _require(len(attributes) + len(capacity) <= NAMES_MOST, f"{where}: too many attributes and capacities")
    for name in (*attributes, *capacity):
        *domain, identifier = name.split("/")
        _require(IDENTIFIER.fullmatch(identifier) and all(map(SUBDOMAIN.fullmatch, domain)), f"{where}: {name}")
    for name, value in attributes.items():
        _require(len(value) == 1 and set(value) <= {"string", "int", "bool", "version"}, f"{where}: {name}: one value")
        _require(len(str(next(iter(value.values())))) <= TEXT_MOST, f"{where}: {name}: too long")
    for name, entry in capacity.items():
        policy = entry.get("requestPolicy")
        if policy is not None:
            _require(
                device.get("allowMultipleAllocations"), f"{where}: {name}: a policy needs allowMultipleAllocations"
            )
            _check_policy(f"{where}: {name}", quantities.whole(entry["value"]), policy)
    for taint in device.get("taints", ()):
        _require(TAINT_KEY.fullmatch(taint["key"]), f"{where}: taint {taint['key']}")
        _require(taint["effect"] in ("NoSchedule", "NoExecute", "None"), f"{where}: effect {taint['effect']}")


def _check_policy(where: str, capacity: int, policy: Mapping[str, Any]) -> None:
    _require(not ("validRange" in policy and "validValues" in policy), f"{where}: one of both")
    if "validRange" not in policy:
        return
    _require("default" in policy and "min" in policy["validRange"], f"{where}: default and min are required")
    default = quantities.whole(policy["default"])
    least, most, step = (
        quantities.whole(policy["validRange"][key]) if key in policy["validRange"] else None
        for key in ("min", "max", "step")
    )
    assert least is not None
    _require(least <= capacity, f"{where}: min is larger than capacity value")
    _require(default >= least, f"{where}: default is less than min")
    if most is not None:
        _require(least <= most <= capacity, f"{where}: max")
        _require(default <= most, f"{where}: default is more than max")
    if step is not None:
        _require(least + step <= capacity, f"{where}: one step is larger than capacity value")
        for value in filter(None, (default, most)):
            _require((value - least) % step == 0, f"{where}: not a multiple of a given step: {value}")


def _shared(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(key) for key in ("driver", "pool", "device", "shareID"))


def check_claim(claim: Mapping[str, Any]) -> None:
    """Raise Invalid for a ResourceClaim whose status fails validation."""
    status = claim.get("status", {})
    results = (status.get("allocation") or {}).get("devices", {}).get("results", ())
    allocated = {_shared(result) for result in results}
    for device in status.get("devices", ()):
        _require(_shared(device) in allocated, "status.devices: must be an allocated device in the claim")
        _require(device.get("shareID") is None or UUID.fullmatch(device["shareID"]), "status.devices: shareID")
        conditions = device.get("conditions", ())
        _require(len(conditions) <= 8, "status.devices: too many conditions")
        for one in conditions:
            _require(one["status"] in ("True", "False", "Unknown"), "condition: status")
            _require(REASON.fullmatch(one["reason"]) and len(one["reason"]) <= 1024, "condition: reason")
            _require(len(one["message"]) <= 32768, "condition: message")
            _require(re.fullmatch(r"\d{4}(-\d\d){2}T\d\d(:\d\d){2}Z", one["lastTransitionTime"]), "condition: time")


def entries(claim: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Yield the entries of ``status.devices``, a list with the keys driver, pool, device and shareID."""
    for device in claim.get("status", {}).get("devices", ()):
        yield _shared(device), device
