"""A double of the scheduler's allocator, for claims on devices with consumable capacity (KEP 5075)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ggroupfs.dra import NAME, quantities
from tests.support.kubernetes.server import RESOURCE, ApiServer


def consumed(device: Mapping[str, Any], asked: Mapping[str, str]) -> dict[str, int] | None:
    """Return what a request consumes of a device; None where the device cannot serve it. The reason is not reported."""
    if not set(asked) <= set(device["capacity"]):
        return None
    found = {}
    for name, entry in device["capacity"].items():
        policy = entry.get("requestPolicy") or {}
        if name in asked:
            number = quantities.whole(asked[name])
        else:
            number = quantities.whole(policy.get("default", entry["value"]))
        span = policy.get("validRange")
        if span:
            least, step = quantities.whole(span["min"]), quantities.whole(span.get("step", "1"))
            number = max(number, least)
            number = least + -(-(number - least) // step) * step
            if "max" in span and number > quantities.whole(span["max"]):
                return None
        found[name] = number
    return found


class Scheduler:
    """The part of each device that is given away, computed from the claims that exist."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    def schedule(self, namespace: str, name: str, pod: str) -> bool:
        """Allocate a claim for a pod; return False where it stays pending."""
        path = f"{RESOURCE}/namespaces/{namespace}/resourceclaims/{name}"
        with self._server.lock:
            claim = self._server.get(path)
            assert claim is not None
            allocation = self._allocate(claim)
            if allocation is None:
                return False
            reserved = [{"resource": "pods", "name": f"pod-{name}", "uid": pod}]
            claim["status"] = {"allocation": allocation, "reservedFor": reserved}
            self._server.put(path, claim)
            return True

    def _allocate(self, claim: Mapping[str, Any]) -> dict[str, Any] | None:
        results: list[dict[str, Any]] = []
        configurations: list[dict[str, Any]] = []
        for request in claim["spec"]["devices"]["requests"]:
            exactly = request["exactly"]
            kind = self._server.get(f"{RESOURCE}/deviceclasses/{exactly['deviceClassName']}")
            assert kind is not None, "no such DeviceClass"
            result = self._place(request, results)
            if result is None:
                return None
            results.append(result)
            for one in kind["spec"].get("config", ()):
                configurations.append({"source": "FromClass", "requests": [request["name"]], **one})
        configurations += [{"source": "FromClaim", **one} for one in claim["spec"]["devices"].get("config", ())]
        return {"devices": {"results": results, **({"config": configurations} if configurations else {})}}

    def _place(self, request: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        asked = request["exactly"].get("capacity", {}).get("requests", {})
        for one in self._server.under(f"{RESOURCE}/resourceslices/").values():
            spec = one["spec"]
            for device in spec["devices"]:
                if spec["driver"] != NAME or any(t["effect"] != "None" for t in device.get("taints", ())):
                    continue
                amount = consumed(device, asked)
                key = (spec["driver"], spec["pool"]["name"], device["name"])
                if amount is None or not self._fits(device, key, amount, before):
                    continue
                return {
                    "request": request["name"],
                    **dict(zip(("driver", "pool", "device"), key, strict=True)),
                    "shareID": str(uuid.uuid4()),
                    "consumedCapacity": {name: quantities.text(number) for name, number in amount.items()},
                }
        return None

    def _fits(
        self,
        device: Mapping[str, Any],
        key: tuple[str, str, str],
        amount: Mapping[str, int],
        before: Sequence[Mapping[str, Any]],
    ) -> bool:
        given = dict.fromkeys(amount, 0)
        claims = [
            one for path, one in self._server.under(f"{RESOURCE}/namespaces/").items() if "/resourceclaims/" in path
        ]
        allocated = [
            result
            for claim in claims
            for result in (claim.get("status", {}).get("allocation") or {}).get("devices", {}).get("results", ())
        ]
        for result in (*allocated, *before):
            if (result["driver"], result["pool"], result["device"]) == key:
                for name, number in result["consumedCapacity"].items():
                    given[name] += quantities.whole(number)
        return all(
            given[name] + number <= quantities.whole(device["capacity"][name]["value"])
            for name, number in amount.items()
        )
