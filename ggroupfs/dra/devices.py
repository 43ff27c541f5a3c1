"""GPUs of a tree as devices of DRA: capacity that claims consume, and attributes that selectors of claims check."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from backend.core.settings import HIGH, LIMIT_MAX, QUOTA, WEIGHT, Setting
from ggroupfs.client import content, numbers, require_tree
from ggroupfs.client.reading import flat
from ggroupfs.dra import quantities

MIB = 1 << 20

MEMORY_MIN_BYTES = 64 * MIB
"""Smallest memory of a share, bytes: a context of CUDA alone takes more than half of that."""
MEMORY_STEP_BYTES = 2 * MIB
"""Unit to which requests of memory are rounded up, bytes: the driver's large pages."""
MEMORY_DEFAULT_BYTES = 1 << 30
"""Memory of a request that names none, bytes."""
SHARES = 100
"""Shares of a GPU's time. Each is a percent of it while all of them are given away and at work."""
WEIGHT_OF_SHARE = WEIGHT.most // SHARES
"""Weight of one share; that of the smallest share is the default of a group."""

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Valid name of a device: a DNS label (RFC 1123)."""
TEXT_MOST = 64
"""Largest length of an attribute, characters (resource.k8s.io/v1, DeviceAttributeMaxValueLength)."""


@attrs.frozen
class Device:
    """One GPU."""

    name: str
    """Name in the ResourceSlice. It is made from the UUID, so it survives a restart of the machine."""
    uuid: str
    """UUID, which is also a link in ``gpus/`` of the tree."""
    index: int
    """Index in the tree, until the machine restarts."""
    product: str
    """Name of the model."""
    memory: int
    """Memory, bytes."""
    present: bool
    """Whether the GPU is present, by ``gpu.events``."""
    controls: Mapping[str, str]
    """Capability of the machine for each control: words of ``ggroup.capabilities``."""

    def acts(self, setting: Setting) -> bool:
        """Whether a setting has any effect here."""
        return self.controls.get(setting.control or "") in ("enforced", "advisory")

    @property
    def has_memory(self) -> bool:
        """Whether limits of memory take effect, so that memory can be given away in parts."""
        return self.acts(HIGH)

    @property
    def has_shares(self) -> bool:
        """Whether weights take effect."""
        return self.acts(WEIGHT)


def found(tree: Path) -> Sequence[Device]:
    """Return the GPUs of a mounted tree, by index. OSError; FileNotFoundError if no tree is mounted."""
    require_tree(tree)
    controls = dict(line.split() for line in content(tree / "ggroup.capabilities").splitlines())
    return [_device(tree, index, controls) for index in numbers(tree / "gpus")]


def _device(tree: Path, index: int, controls: Mapping[str, str]) -> Device:
    place = tree / "gpus" / str(index)
    uuid = content(place / "uuid")
    name = uuid.lower()
    return Device(
        name if LABEL.fullmatch(name) else f"gpu-{index}",
        uuid,
        index,
        content(place / "name"),
        int(content(place / "gmem.capacity")),
        flat(content(place / "gpu.events"))["present"] == 1,
        controls,
    )


def aligned(number: int) -> int:
    """Return the largest valid request of at most `number` bytes."""
    return MEMORY_MIN_BYTES + (number - MEMORY_MIN_BYTES) // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES


def published(device: Device) -> Mapping[str, Any]:
    """Return a GPU as an entry of ``spec.devices`` of a ResourceSlice (resource.k8s.io/v1).

    A request above the maximum, or for a capacity that does not exist, stays pending without an explanation. So the
    bounds are published as attributes, too.
    """
    capacity: dict[str, Any] = {}
    attributes: dict[str, Any] = {
        "uuid": {"string": device.uuid[:TEXT_MOST]},
        "index": {"int": device.index},
        "productName": {"string": device.product[:TEXT_MOST]},
        "memoryLimits": {"bool": device.has_memory},
        "shares": {"bool": device.has_shares},
        "hardLimits": {"bool": device.acts(LIMIT_MAX)},
        "quotas": {"bool": device.acts(QUOTA)},
    }
    if device.has_memory and device.memory >= MEMORY_MIN_BYTES + MEMORY_STEP_BYTES:
        most, default = aligned(device.memory), aligned(min(MEMORY_DEFAULT_BYTES, device.memory))
        span = {
            "min": quantities.text(MEMORY_MIN_BYTES),
            "max": quantities.text(most),
            "step": quantities.text(MEMORY_STEP_BYTES),
        }
        policy: dict[str, Any] = {"default": quantities.text(default), "validRange": span}
        capacity["memory"] = {"value": quantities.text(device.memory), "requestPolicy": policy}
        attributes |= {f"memory{key.capitalize()}": {"string": value} for key, value in span.items()}
        attributes["memoryDefault"] = {"string": policy["default"]}
    if device.has_shares:
        policy = {"default": "1", "validRange": {"min": "1", "max": str(SHARES), "step": "1"}}
        capacity["share"] = {"value": str(SHARES), "requestPolicy": policy}
        attributes["shareMax"] = {"int": SHARES}
    entry = {
        "name": device.name,
        "allowMultipleAllocations": True,
        "attributes": attributes,
        "capacity": capacity,
    }
    if not device.present:
        entry["taints"] = [{"key": "gpu.ggroup.io/lost", "effect": "NoSchedule"}]
    return entry
