"""Derives the origin of a cgroup from its path: its job, pod, container, unit and user. Pure.

Users choose the names below directories of their own freely. So jobs and pods are recognized only where Slurm and the
kubelet make their cgroups, counted from the root, where only root makes any. Of nested containers and units the
outermost counts. Every value consists of the letters that its creator uses, and has a bounded length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

WORDS = ("job", "step", "pod", "container", "unit", "user")
"""Words for parts of the origin, in the order in which they are reported."""

UNIT_MOST = 128
"""Longest reported name of a unit, characters; systemd allows 255."""
CUT = "..."
"""Mark for the rest of a shortened name."""

_SLURM = re.compile(
    r"/[^/]+\.slice/(?:[^/]+_)?slurmstepd\.scope/job_(?P<job>[0-9]{1,20})(?:/step_(?P<step>[0-9a-z+]{1,32}))?(?:/|\Z)"
)
"""A job of Slurm, and a step of it (cgroup/v2 of slurm.conf(5), with one slurmd or several on the machine)."""

_POD = re.compile(
    r"(?:/kubelet\.slice/kubelet-kubepods\.slice|/kubepods\.slice)"
    r"(?:/[a-z-]*kubepods-(?:burstable|besteffort)\.slice)?"
    r"/[a-z-]*kubepods-(?:burstable-|besteffort-)?pod(?P<systemd>[0-9a-f_]{32,36})\.slice(?:/|\Z)"
    r"|(?:/kubelet)?/kubepods(?:/burstable|/besteffort)?/pod(?P<cgroupfs>[0-9a-f-]{32,36})(?:/|\Z)"
)
"""A pod, by its UID: with either cgroup driver of the kubelet, below the root or below that of kind. A static pod has a
UID without dashes."""

_CONTAINER = re.compile(r"(?:(?:docker|libpod|cri-containerd|crio|nerdctl)-)?(?P<id>[0-9a-f]{64})(?:\.scope)?")
"""The cgroup of a container: a scope of systemd, or a directory of the runtime's own."""

_RUNTIMES = frozenset(("docker.service", "containerd.service", "crio.service"))
"""Services of root that make the cgroups of containers below their own."""

_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]+\.(?:slice|service|scope|socket|mount|swap)")
"""A unit of systemd that has a cgroup (systemd.unit(5))."""
_MANAGER = re.compile(r"user@[0-9]+\.service")
"""The service that is a user's own systemd, whose units are below it."""
_USER = re.compile(r"/user\.slice/user-(?P<user>[0-9]{1,10})\.slice(?:/|\Z)")
"""A user's slice (user@.service(5)), by uid."""


def origin(path: str) -> Mapping[str, str]:
    """Return the origin that the path of a cgroup shows, as a mapping with some of WORDS."""
    found: dict[str, str] = {}
    parts = [part for part in path.split("/") if part]
    if job := _SLURM.match(path):
        found |= {word: value for word, value in job.groupdict().items() if value is not None}
    if pod := _POD.match(path):
        found["pod"] = pod["cgroupfs"] or pod["systemd"].replace("_", "-")
    unit, container = _unit(parts), _container(parts)
    # A unit's delegate chooses the names below it, and might use the ID of another user's container.
    by_root = unit is None or unit.endswith(".slice") or unit in _RUNTIMES or _CONTAINER.fullmatch(unit) is not None
    if container is not None and ("pod" in found or by_root):
        found["container"] = container
    if unit is not None and "pod" not in found and not _CONTAINER.fullmatch(unit):
        found["unit"] = unit if len(unit) <= UNIT_MOST else unit[: UNIT_MOST - len(CUT)] + CUT
    if user := _USER.match(path):
        found["user"] = user["user"]
    return found


def _container(parts: Sequence[str]) -> str | None:
    """Return the ID of the outermost container."""
    return next((match["id"] for part in parts if (match := _CONTAINER.fullmatch(part))), None)


def _unit(parts: Sequence[str]) -> str | None:
    """Return the unit that a cgroup belongs to: the innermost that systemd made.

    Slices contain units, and so does the service that is a user's systemd.
    """
    found = None
    for part in parts:
        name = part.removeprefix("_")  # systemd's prefix for a name that is also that of a kernel file
        if not _UNIT.fullmatch(name):
            break
        found = name
        if not (name.endswith(".slice") or _MANAGER.fullmatch(name)):
            break
    return found
