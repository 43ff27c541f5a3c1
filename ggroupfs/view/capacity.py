"""The capacity of a node, in the formats of engines that place jobs on many nodes.

Such engines keep account of what they have given out themselves. They need to know what there is to give (memory and
share), what is free now, and whether it is usable: a lost GPU has no capacity, and the list of enforced controls says
which limits take effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from ggroupfs.client import content, flat, numbers, require_tree

GIB = 1 << 30
"""Bytes per unit of memory in the formats of engines, some of which accept whole numbers only."""
SHARE = 100
"""Share of one GPU, percent."""


@attrs.frozen
class Capacity:
    """The capacity of a node."""

    gpus: int
    """Number of GPUs that are present."""
    lost: Sequence[int]
    """Indices of the lost GPUs."""
    models: Sequence[str]
    """Product names of the present GPUs, without duplicates."""
    memory_bytes: int
    """Memory of the present GPUs, bytes."""
    free_bytes: int
    """Part of that memory which no program holds, bytes."""
    free_most_bytes: int
    """Largest free memory on a single GPU, bytes."""
    enforced: Sequence[str]
    """Controls that are enforced here (`ggroup.capabilities`)."""

    @property
    def share(self) -> int:
        """Total share that can be given out, percent of a GPU."""
        return self.gpus * SHARE

    @property
    def healthy(self) -> bool:
        """Whether a GPU is present and none is lost."""
        return self.gpus > 0 and not self.lost


def capacity(mount: Path) -> Capacity:
    """Return the capacity of the node on which a tree is mounted. FileNotFoundError if there is no tree."""
    require_tree(mount)
    there, lost, models, memory, free = 0, [], set(), 0, [0]
    for index in numbers(mount / "gpus"):
        gpu = mount / "gpus" / str(index)
        if not flat(content(gpu / "gpu.events"))["present"]:
            lost.append(index)
            continue
        total = int(content(gpu / "gmem.capacity"))
        there += 1
        models.add(content(gpu / "name"))
        memory += total
        free.append(max(0, total - int(content(gpu / "gmem.current"))))
    verdicts = (line.split() for line in content(mount / "ggroup.capabilities").splitlines())
    enforced = sorted(control for control, verdict in verdicts if verdict == "enforced")
    return Capacity(there, lost, sorted(models), memory, sum(free), max(free), enforced)


def as_json(node: Capacity) -> str:
    """Return the whole record as a JSON object."""
    return json.dumps({**attrs.asdict(node), "share": node.share, "healthy": node.healthy}, indent=2)


def as_ray(node: Capacity) -> str:
    """Return the argument of `ray start --resources=`: a JSON object of numbers."""
    return json.dumps({"ggroup_gib": node.memory_bytes // GIB, "ggroup_share": node.share})


def as_dask(node: Capacity) -> str:
    """Return the argument of `dask worker --resources`: names and numbers."""
    return f"GGROUP_GIB={node.memory_bytes // GIB} GGROUP_SHARE={node.share}"


def as_condor(node: Capacity) -> str:
    """Return the output of a STARTD_CRON hook: one ClassAd attribute of the machine per line, and a dash at the end."""
    found = {
        "GGroupGpus": node.gpus,
        "GGroupHealthy": node.healthy,
        "GGroupMemoryGiB": node.memory_bytes // GIB,
        "GGroupFreeGiB": node.free_bytes // GIB,
        "GGroupFreeMostGiB": node.free_most_bytes // GIB,
        "GGroupShare": node.share,
        "GGroupModels": ",".join(node.models),
        "GGroupEnforced": ",".join(node.enforced),
    }
    return "\n".join([*(f"{name} = {json.dumps(value)}" for name, value in found.items()), "-"])


FORMS: Mapping[str, Callable[[Capacity], str]] = {
    "json": as_json,
    "ray": as_ray,
    "dask": as_dask,
    "condor": as_condor,
}
"""Output formats by name."""
