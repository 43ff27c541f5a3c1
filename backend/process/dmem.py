"""The kernel's controller of device memory, dmem: regions that drivers have registered, and limits of cgroups there.

Linux 6.14 and later (kernel/cgroup/dmem.c). ``dmem.capacity`` of the root has a line for each region, ``NAME BYTES``;
each cgroup below one that has the controller in its ``cgroup.subtree_control`` has ``dmem.max``, to which ``NAME
BYTES`` or ``NAME max`` is written. docs/notes/dmem.md says what holds of such a limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Protocol

from backend.process import procfs
from backend.process.identity import Slice

CAPACITY, LIMIT = "dmem.capacity", "dmem.max"
"""Files of the root, and of all other cgroups that have the controller."""

MAX = "max"
"""What stands for no limit."""

DRIVER = "nvidia"
"""First component of the names of NVIDIA's regions: ``nvidia/0000:01:00/vidmem`` (driver 615 and later)."""

ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.IGNORECASE)
"""A PCI address in such a name, with or without the function."""


class Walls(Protocol):
    """The limits of cgroups, as the kernel has them. OSError where a file cannot be read, or takes no such value."""

    def regions(self) -> Mapping[str, int]:
        """The regions that drivers have registered, and the bytes of each; none where there is no such controller."""

    def limit(self, slice_: Slice, region: str) -> int | None:
        """The limit of the cgroup of a slice, bytes; None for none. FileNotFoundError where it has no such file."""

    def set_limit(self, slice_: Slice, region: str, nbytes: int | None) -> None:
        """Sets it."""


class Files:
    """See :class:`Walls`: those of the cgroup2 tree that is mounted."""

    def regions(self) -> Mapping[str, int]:
        tree = procfs.trees.of("cgroup2")
        if tree is None or tree.root != "/":  # the root of a container's part of it has no such file
            return {}
        try:
            return parsed(procfs.content(f"{tree.point}/{CAPACITY}").decode())
        except FileNotFoundError:
            return {}

    def limit(self, slice_: Slice, region: str) -> int | None:
        return limits(procfs.content(_file(slice_)).decode())[region]

    def set_limit(self, slice_: Slice, region: str, nbytes: int | None) -> None:
        # O_NONBLOCK: a driver that would have memory leave at a lower limit is not waited for (Linux 7.3 and later).
        descriptor = os.open(_file(slice_), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(descriptor, f"{region} {MAX if nbytes is None else nbytes}\n".encode())
        finally:
            os.close(descriptor)


def _file(slice_: Slice) -> str:
    """The file of a slice's limits. FileNotFoundError where its cgroup is not to be seen."""
    tree = procfs.trees.of("cgroup2")
    place = next(procfs.levels(tree, slice_.path), None) if tree is not None else None
    if place is None:
        raise FileNotFoundError(slice_.path)
    return f"{place}/{LIMIT}"


def parsed(text: str) -> Mapping[str, int]:
    """Return the regions of ``dmem.capacity``, and their bytes. A line that is none counts for nothing."""
    found = {}
    for line in text.splitlines():
        name, _, figure = line.rpartition(" ")
        if name and figure.isdecimal():
            found[name] = int(figure)
    return found


def limits(text: str) -> Mapping[str, int | None]:
    """Return the limits of ``dmem.max`` by region, bytes; None for none."""
    found: dict[str, int | None] = {}
    for line in text.splitlines():
        name, _, figure = line.rpartition(" ")
        if name and (figure == MAX or figure.isdecimal()):
            found[name] = None if figure == MAX else int(figure)
    return found


def region_of(pci: str, regions: Mapping[str, int]) -> str | None:
    """Return the region of NVIDIA's driver for the GPU at a PCI address, as sysfs spells it; None where it has
    registered none, or several that could be meant."""
    wanted = _address(pci)
    found = [
        name
        for name in regions
        if name.split("/", 1)[0] == DRIVER and any(_address(part) == wanted for part in name.split("/"))
    ]
    return found[0] if wanted is not None and len(found) == 1 else None


def _address(text: str) -> tuple[int, int, int, int] | None:
    found = ADDRESS.fullmatch(text)
    if found is None:
        return None
    domain, bus, device, function = found.groups(default="0")
    return int(domain, 16), int(bus, 16), int(device, 16), int(function, 16)
