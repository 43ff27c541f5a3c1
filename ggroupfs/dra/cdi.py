"""CDI specifications of prepared claims: what a container runtime does for a container that has a share.

Each claim has one file, with a device for each share (https://github.com/cncf-tags/container-device-interface). What
all of its devices need is at the top once: the library and the socket. Each device has the hook, which sets limits
before the program of the container begins.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from ggroupfs.dra import NAME
from ggroupfs.dra.store import Claim, replace

VERSION = "0.3.0"
"""Lowest CDI version that has everything used here, so that old runtimes accept it."""
KIND = f"{NAME}/share"
DIRECTORY = Path("/var/run/cdi")
"""Directory in which runtimes look for specifications that last until the next boot."""
HOOK_S = 30
"""Seconds after which the runtime kills a hook. A write returns once the limit holds, which may take the daemon 5."""


@attrs.frozen
class Injected:
    """The parts that every container with a share gets, by their paths on the host."""

    hook: Sequence[str]
    """Command of the hook, without the share."""
    tree: str
    """Mountpoint of the tree on the host."""
    socket: str | None
    """Socket of the tree's daemon; None if there is none."""
    library: str | None
    """Library for CUDA programs; None if containers get none."""
    beside: str | None
    """CDI device of the GPU itself, which another generator specifies: ``nvidia.com/gpu={uuid}``."""


def device_name(uid: str, number: int) -> str:
    """Return the name of a share's device."""
    return f"{uid}-{number}"


def ids(claim: Claim, number: int, injected: Injected) -> Sequence[str]:
    """Return the CDI devices of a container with a share of the claim."""
    own = f"{KIND}={device_name(claim.uid, number)}"
    if injected.beside is None:
        return [own]
    return [injected.beside.format(uuid=claim.shares[number].uuid), own]


def specification(claim: Claim, injected: Injected, state: Path) -> dict[str, Any]:
    """Return the content of a claim's file."""
    environment, mounts = [], []
    if injected.library is not None:
        environment.append(f"LD_PRELOAD={injected.library}")
        mounts.append(_bind(injected.library))
    if injected.socket is not None:
        # Mount the directory rather than the socket, so that programs reach the next daemon as well.
        environment.append(f"GGROUP_SOCKET={injected.socket}")
        mounts.append(_bind(os.path.dirname(injected.socket)))
    words = [*injected.hook, "--state", os.fspath(state), "--tree", injected.tree]
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "containerEdits": {"env": environment, "mounts": mounts},
        "devices": [
            {
                "name": device_name(claim.uid, number),
                "containerEdits": {
                    "hooks": [
                        {
                            "hookName": "createRuntime",
                            "path": injected.hook[0],
                            "args": [*words, claim.uid, str(number)],
                            "timeout": HOOK_S,
                        }
                    ]
                },
            }
            for number in range(len(claim.shares))
        ],
    }


def _bind(path: str) -> dict[str, Any]:
    return {"hostPath": path, "containerPath": path, "options": ["rbind", "ro", "nosuid", "nodev"]}


class Directory:
    """A directory of specifications."""

    def __init__(self, path: Path = DIRECTORY) -> None:
        self.path = path

    def make(self) -> None:
        """Make the directory, and remove unfinished files of a killed driver. OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        for unfinished in self.path.glob(f".{self._prefix()}*.new"):
            unfinished.unlink(missing_ok=True)

    def write(self, claim: Claim, injected: Injected, state: Path) -> None:
        """Write the file of a claim. OSError."""
        replace(self._of(claim.uid), specification(claim, injected, state))

    def remove(self, uid: str) -> None:
        """Remove the file of a claim. OSError."""
        self._of(uid).unlink(missing_ok=True)

    def uids(self) -> set[str]:
        """Return the UIDs of claims that have a file. OSError."""
        return {path.stem.removeprefix(self._prefix()) for path in self.path.glob(f"{self._prefix()}*.json")}

    def _of(self, uid: str) -> Path:
        return self.path / f"{self._prefix()}{uid}.json"

    def _prefix(self) -> str:
        return KIND.replace("/", "-") + "_"
