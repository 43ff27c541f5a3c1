"""The capacity of a node: what an engine that places jobs on many nodes needs of this one, in the forms they take.

Engines keep the books of what they have given out themselves; they need what there is to give (memory and share), what
is free now, and whether it can be had: a GPU that is lost has no capacity, and features say what is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from ggroupfs.client import content, flat, numbers, require_tree

GIB = 1 << 30
"""Bytes of what engines count in, as some take whole numbers alone."""
SHARE = 100
"""Share of one GPU: percent."""


@attrs.frozen
class Capacity:
    """What a node has."""

    gpus: int
    """GPUs that are there."""
    lost: Sequence[int]
    """Indices of those that are lost."""
    models: Sequence[str]
    """Product names of those that are there, each once."""
    memory_bytes: int
    """Memory of those that are there."""
    free_bytes: int
    """What of it no program holds."""
    free_most_bytes: int
    """The most that is free on one of them."""
    enforced: Sequence[str]
    """Controls that act here (`ggroup.capabilities`)."""

    @property
    def share(self) -> int:
        """Share that there is to give, percent of a GPU."""
        return self.gpus * SHARE

    @property
    def healthy(self) -> bool:
        """Whether a GPU is there, and none is lost."""
        return self.gpus > 0 and not self.lost


def capacity(mount: Path) -> Capacity:
    """Return that of the node on which a tree is mounted. FileNotFoundError where there is none."""
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
    """Return all of it, as an object."""
    return json.dumps({**attrs.asdict(node), "share": node.share, "healthy": node.healthy}, indent=2)


def as_ray(node: Capacity) -> str:
    """Return what `ray start --resources=` takes: an object of numbers."""
    return json.dumps({"ggroup_gib": node.memory_bytes // GIB, "ggroup_share": node.share})


def as_dask(node: Capacity) -> str:
    """Return what `dask worker --resources` takes: names and numbers."""
    return f"GGROUP_GIB={node.memory_bytes // GIB} GGROUP_SHARE={node.share}"


def as_condor(node: Capacity) -> str:
    """Return what a hook of STARTD_CRON prints: attributes of the machine's ClassAd, a line each, and a dash."""
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
"""Forms by name."""
