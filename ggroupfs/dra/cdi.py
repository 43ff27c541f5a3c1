"""CDI specifications of prepared claims: what a container runtime does for a container that has a share.

A claim is one file with a device for each share (https://github.com/cncf-tags/container-device-interface). What any of
them needs is once at the top: the library and the socket. Each device has the hook, which sets limits before the
program of the container begins.
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
"""The least version that has all of what is used here, so that old runtimes take it."""
KIND = f"{NAME}/share"
DIRECTORY = Path("/var/run/cdi")
"""Where runtimes look for specifications that go with the boot."""
HOOK_S = 30
"""Seconds after which the runtime ends a hook: a limit holds once it is written, which may take the daemon 5."""


@attrs.frozen
class Injected:
    """What every container with a share gets, as the host has it."""

    hook: Sequence[str]
    """Command of the hook; the shares follow."""
    tree: str
    """Mountpoint of the tree on the host."""
    socket: str | None
    """Socket of the tree's daemon; None where it has none."""
    library: str | None
    """The library for CUDA programs; None where containers get none."""
    beside: str | None
    """CDI device of the GPU itself, which another generator specifies: ``nvidia.com/gpu={uuid}``."""


def device_name(uid: str, number: int) -> str:
    """Return the name of a share's device."""
    return f"{uid}-{number}"


def ids(claim: Claim, number: int, injected: Injected) -> Sequence[str]:
    """Return the CDI devices that a container with a share of the claim gets."""
    own = f"{KIND}={device_name(claim.uid, number)}"
    if injected.beside is None:
        return [own]
    return [injected.beside.format(uuid=claim.shares[number].uuid), own]


def specification(claim: Claim, injected: Injected, state: Path) -> dict[str, Any]:
    """Return the content of the file of a claim."""
    environment, mounts = [], []
    if injected.library is not None:
        environment.append(f"LD_PRELOAD={injected.library}")
        mounts.append(_bind(injected.library))
    if injected.socket is not None:
        # The directory, and not the socket, so that programs reach the daemon that comes after this one.
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
        """Make it, and remove what a killed driver was writing. OSError."""
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
        """Return the claims that have a file. OSError."""
        return {path.stem.removeprefix(self._prefix()) for path in self.path.glob(f"{self._prefix()}*.json")}

    def _of(self, uid: str) -> Path:
        return self.path / f"{self._prefix()}{uid}.json"

    def _prefix(self) -> str:
        return KIND.replace("/", "-") + "_"
