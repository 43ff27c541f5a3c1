"""Devices of the Container Device Interface (CDI), which give a container the library and the socket.

podman, containerd, CRI-O and Docker read the files in /etc/cdi and /run/cdi; ``ggroup.io/gpu=0`` on their command lines
names a device in one. The edits of a device do for a container what `ggroupfs run` does for a program, with the paths
inside the container.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ggroupfs.containers.hook import DEVICE

VERSION = "0.5.0"
"""Oldest CDI version with device names that begin with a digit (SPEC.md, "Released versions"). Debian 12's podman knows
no later one."""

KIND = "ggroup.io/gpu"
"""Vendor and class of the devices."""

ALL = "all"
"""Name of the device that stands for all GPUs."""

LIBRARY = "/opt/ggroup/libggroup-cuda.so"
"""Path of the library in a container."""

HOOK_S = 60
"""Seconds that the hook may take before the runtime kills it, and the container with it."""

OF_OTHERS = frozenset(map(Path, ("/", "/run", "/tmp", "/var", "/var/run", "/var/tmp", "/etc", "/home", "/root")))
"""Directories that are not mounted into a container, even if the socket is in them."""

NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Directory in which NVIDIA's driver describes its GPUs."""

COMMON = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
"""Names in /dev of the device nodes that every NVIDIA GPU needs."""

UUID = re.compile(r"^GPU UUID:\s*(\S+)$", re.MULTILINE)
MINOR = re.compile(r"^Device Minor:\s*(\d+)$", re.MULTILINE)


@attrs.frozen
class Gpu:
    """One GPU of a tree."""

    index: int
    """Index in the tree, and name of its device."""
    nodes: Sequence[str] = ()
    """Device nodes that a program needs for the GPU; none for a software GPU."""


@attrs.frozen
class Host:
    """The parts of this machine that go into a container."""

    socket: Path
    """Socket of the tree. Its directory goes in, as a later daemon creates the socket anew."""
    library: Path
    """Path of the library."""
    hook: Path
    """Program that the runtime calls."""
    mount: Path
    """Mountpoint of the tree."""
    gpus: Sequence[Gpu]
    """GPUs of the tree."""


def spec(host: Host) -> Mapping[str, Any]:
    """Return the content of the file. ValueError if the directory of the socket serves other purposes as well."""
    directory = host.socket.parent
    if directory in OF_OTHERS:
        raise ValueError(
            f"socket {host.socket}: a container would have all of {directory}: mount with socket= elsewhere"
        )
    hook = {
        "hookName": "createRuntime",
        "path": str(host.hook),
        "args": [host.hook.name, DEVICE, str(host.mount)],
        "timeout": HOOK_S,
    }
    edits = {
        "env": [f"LD_PRELOAD={LIBRARY}", f"GGROUP_SOCKET={host.socket}"],
        "mounts": [
            # A socket in a read-only directory can be connected to.
            _bound(directory, str(directory), "noexec"),
            _bound(host.library, LIBRARY),
        ],
    }
    devices = [{"name": name, "containerEdits": {**edits, **_nodes(gpus)}} for name, gpus in _named(host.gpus)]
    # The hook belongs to the file as a whole and runs once, however many of its devices a container has.
    return {"cdiVersion": VERSION, "kind": KIND, "devices": devices, "containerEdits": {"hooks": [hook]}}


def _named(gpus: Sequence[Gpu]) -> Iterator[tuple[str, Sequence[Gpu]]]:
    """Yield the devices: one for each GPU, and one for all."""
    for gpu in gpus:
        yield str(gpu.index), [gpu]
    yield ALL, gpus


def _nodes(gpus: Sequence[Gpu]) -> Mapping[str, Any]:
    paths = sorted({node for gpu in gpus for node in gpu.nodes})
    return {"deviceNodes": [{"path": path} for path in paths]} if paths else {}


def _bound(host: Path, inside: str, *options: str) -> Mapping[str, Any]:
    return {
        "hostPath": str(host),
        "containerPath": inside,
        "options": ["bind", "ro", "nosuid", "nodev", *options],
    }


def nodes_of(uuid: str, told: Path = NVIDIA, devices: Path = Path("/dev")) -> Sequence[str]:
    """Return the device nodes of the NVIDIA GPU with a UUID. LookupError if the driver has no such GPU; OSError."""
    for place in sorted(told.iterdir()):
        said = (place / "information").read_text()
        found, minor = UUID.search(said), MINOR.search(said)
        if found is not None and minor is not None and found[1] == uuid:
            own = devices / f"nvidia{minor[1]}"
            return [str(own), *(str(devices / name) for name in COMMON if (devices / name).exists())]
    raise LookupError(f"{uuid}: no GPU of NVIDIA's driver")
