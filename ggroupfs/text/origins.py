"""What the path of a cgroup says of its origin: the job, pod, container, unit and user that it is of. Pure.

A user names what is below a directory of its own as it likes. So jobs and pods are known where Slurm and the kubelet
make their cgroups, reckoned from the root, where only root makes any; of containers and units in each other the
outermost counts; and every value has the letters that its maker uses, and is of a bounded length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

WORDS = ("job", "step", "pod", "container", "unit", "user")
"""What there is to tell, in the order in which it is told."""

UNIT_MOST = 128
"""Characters of a unit's name that are told; systemd takes 255."""
CUT = "..."
"""What stands in the place of the rest of a name."""

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
"""A pod, by its UID: with either cgroup driver of the kubelet, below the root or below that of kind. A static one has a
UID without dashes."""

_CONTAINER = re.compile(r"(?:(?:docker|libpod|cri-containerd|crio|nerdctl)-)?(?P<id>[0-9a-f]{64})(?:\.scope)?")
"""The cgroup of a container: a scope of systemd, or a directory of the runtime's own."""

_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]+\.(?:slice|service|scope|socket|mount|swap)")
"""A unit of systemd that has a cgroup (systemd.unit(5))."""
_MANAGER = re.compile(r"user@[0-9]+\.service")
"""The service that is a user's own systemd, whose units are below it."""
_USER = re.compile(r"/user\.slice/user-(?P<user>[0-9]{1,10})\.slice(?:/|\Z)")
"""What is a user's (user@.service(5)), by the number of the user."""


def origin(path: str) -> Mapping[str, str]:
    """Return what the path of a cgroup tells, by some of WORDS."""
    found: dict[str, str] = {}
    parts = [part for part in path.split("/") if part]
    if job := _SLURM.match(path):
        found |= {word: value for word, value in job.groupdict().items() if value is not None}
    if pod := _POD.match(path):
        found["pod"] = pod["cgroupfs"] or pod["systemd"].replace("_", "-")
    container = _container(parts)
    if container is not None:
        found["container"] = container
    unit = _unit(parts)
    if unit is not None and "pod" not in found and not _CONTAINER.fullmatch(unit):
        found["unit"] = unit if len(unit) <= UNIT_MOST else unit[: UNIT_MOST - len(CUT)] + CUT
    if user := _USER.match(path):
        found["user"] = user["user"]
    return found


def _container(parts: Sequence[str]) -> str | None:
    """Return the ID of the outermost container."""
    return next((match["id"] for part in parts if (match := _CONTAINER.fullmatch(part))), None)


def _unit(parts: Sequence[str]) -> str | None:
    """Return the unit that a cgroup belongs to: the innermost of those that systemd made, as slices have units in them,
    and so has the service that is a user's systemd."""
    found = None
    for part in parts:
        name = part.removeprefix("_")  # which systemd puts before a name that the kernel has a file of
        if not _UNIT.fullmatch(name):
            break
        found = name
        if not (name.endswith(".slice") or _MANAGER.fullmatch(name)):
            break
    return found
