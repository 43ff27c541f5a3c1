"""Devices of the Container Device Interface (CDI): with one a container has the library and the socket.

What stands in a file of /etc/cdi or /run/cdi is known to podman, containerd, CRI-O and Docker; ``ggroup.io/gpu=0`` on
their command lines is one device of it. The edits are those that `ggroupfs run` makes, and paths into the container.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ggroupfs.containers.hook import DEVICE

VERSION = "0.5.0"
"""Oldest version of the CDI that has what is used here: names of devices that begin with a digit (SPEC.md, "Released
versions"). Debian 12's podman knows no later one."""

KIND = "ggroup.io/gpu"
"""Vendor and class of the devices."""

ALL = "all"
"""Name of the device that is every GPU."""

LIBRARY = "/opt/ggroup/libggroup-cuda.so"
"""Where the library is in a container."""

HOOK_S = 60
"""Seconds that the hook may take: a runtime ends it after that, and the container with it."""

OF_OTHERS = frozenset(map(Path, ("/", "/run", "/tmp", "/var", "/var/run", "/var/tmp", "/etc", "/home", "/root")))
"""Directories that no container is given for a socket in them."""

NVIDIA = Path("/proc/driver/nvidia/gpus")
"""What NVIDIA's driver says of each of its GPUs."""

COMMON = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
"""Device nodes that a program needs for any of NVIDIA's GPUs, by their names in /dev."""

UUID = re.compile(r"^GPU UUID:\s*(\S+)$", re.MULTILINE)
MINOR = re.compile(r"^Device Minor:\s*(\d+)$", re.MULTILINE)


@attrs.frozen
class Gpu:
    """One GPU of a tree."""

    index: int
    """Its number in the tree, and the name of its device."""
    nodes: Sequence[str] = ()
    """Device nodes that a program needs for it; none for a software GPU."""


@attrs.frozen
class Host:
    """What of this machine goes into a container."""

    socket: Path
    """Socket of the tree, whose directory goes in: a daemon that comes after this one makes it anew."""
    library: Path
    """The library."""
    hook: Path
    """Program that the runtime calls."""
    mount: Path
    """Mountpoint of the tree."""
    gpus: Sequence[Gpu]
    """Its GPUs."""


def spec(host: Host) -> Mapping[str, Any]:
    """What stands in the file. ValueError where the directory of the socket is for others, too."""
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
            # A socket of a directory that is read-only can be connected to.
            _bound(directory, str(directory), "noexec"),
            _bound(host.library, LIBRARY),
        ],
    }
    devices = [{"name": name, "containerEdits": {**edits, **_nodes(gpus)}} for name, gpus in _named(host.gpus)]
    # Of the file as a whole what counts once, however many of its devices a container has.
    return {"cdiVersion": VERSION, "kind": KIND, "devices": devices, "containerEdits": {"hooks": [hook]}}


def _named(gpus: Sequence[Gpu]) -> Iterator[tuple[str, Sequence[Gpu]]]:
    """The devices: one for each GPU, and one for all."""
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
    """The device nodes of NVIDIA's GPU of a UUID. LookupError where the driver has no such GPU; OSError."""
    for place in sorted(told.iterdir()):
        said = (place / "information").read_text()
        found, minor = UUID.search(said), MINOR.search(said)
        if found is not None and minor is not None and found[1] == uuid:
            own = devices / f"nvidia{minor[1]}"
            return [str(own), *(str(devices / name) for name in COMMON if (devices / name).exists())]
    raise LookupError(f"{uuid}: no GPU of NVIDIA's driver")
