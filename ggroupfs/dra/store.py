"""The records of prepared claims, which the driver and its hooks share in files until the machine restarts.

The directory contains ``claims/UID.json``, the shares of each prepared claim; ``grants/POD.json``, the shares that the
containers of a pod have at present; and ``levels.json``, the slices above pods that were set. Each file is replaced
atomically, so a killed driver leaves either the old or the new one. A lock serializes hooks and driver.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

STATE = Path("/run/ggroupfs-dra")
"""Default directory; on a tmpfs, since its contents are meaningless after a restart."""

KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""UID of a claim or a pod, as part of a file name."""


@attrs.frozen
class Share:
    """One request of a claim on one GPU."""

    request: str
    """Name of the request in the claim."""
    pool: str
    """Pool of the device: the node."""
    device: str
    """Name of the device."""
    uuid: str
    """UUID of the GPU."""
    share_id: str | None
    """Scheduler's ID of this share of the device."""
    settings: Mapping[str, int]
    """Settings of the slice, by field."""


@attrs.frozen
class Claim:
    """A prepared claim."""

    uid: str
    """UID of the ResourceClaim."""
    namespace: str
    """Namespace of the ResourceClaim."""
    name: str
    """Name of the ResourceClaim."""
    shares: Sequence[Share]
    """Shares, in the order of the allocation."""


@attrs.define
class Grants:
    """The shares that the containers of a pod have."""

    pod: str
    """Path of the pod's cgroup."""
    containers: dict[str, list[str]]
    """Shares of each container, by the path of its cgroup: ``UID/NUMBER``."""


def reference(uid: str, number: int) -> str:
    """Return the name of a share in grants, made of the claim's UID and the number of the share."""
    return f"{uid}/{number}"


class Store:
    """The directory of records."""

    def __init__(self, path: Path = STATE) -> None:
        self.path = path

    def make(self) -> None:
        """Make the directory, for root alone, and remove unfinished files of a killed driver. OSError."""
        for place in (self.path, self.path / "claims", self.path / "grants"):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            for unfinished in place.glob(".*.new"):
                unfinished.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other processes and threads. OSError."""
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    # Claims

    def claim(self, uid: str) -> Claim | None:
        """Return a prepared claim; None if it is not prepared. OSError, ValueError."""
        told = _read(self._of("claims", uid))
        return None if told is None else _claim(told)

    def claims(self) -> Mapping[str, Claim]:
        """Return the prepared claims by UID. OSError, ValueError."""
        found = (self.claim(path.stem) for path in self._files("claims"))
        return {claim.uid: claim for claim in found if claim is not None}

    def keep(self, claim: Claim) -> None:
        """Write a prepared claim. OSError."""
        replace(self._of("claims", claim.uid), attrs.asdict(claim))

    def forget(self, uid: str) -> None:
        """Remove a claim. OSError."""
        self._of("claims", uid).unlink(missing_ok=True)

    # Grants

    def grants(self) -> dict[str, Grants]:
        """Return the grants of each pod, by its key. OSError, ValueError."""
        told = {path.stem: _read(path) for path in self._files("grants")}
        return {key: Grants(one["pod"], one["containers"]) for key, one in told.items() if one is not None}

    def grant(self, key: str, grants: Grants) -> None:
        """Write the grants of a pod; without containers, remove them. OSError."""
        if grants.containers:
            replace(self._of("grants", key), attrs.asdict(grants))
        else:
            self._of("grants", key).unlink(missing_ok=True)

    # Levels above pods

    def levels(self) -> list[str]:
        """Return the paths of the slices above pods that were set. OSError, ValueError."""
        return list(_read(self.path / "levels.json") or ())

    def keep_levels(self, paths: Sequence[str]) -> None:
        """Write the paths of slices above pods that are set. OSError."""
        if sorted(paths) != self.levels():
            replace(self.path / "levels.json", sorted(paths))

    def _of(self, folder: str, key: str) -> Path:
        if not KEY.fullmatch(key):
            raise ValueError(f"{key}: not a UID")
        return self.path / folder / f"{key}.json"

    def _files(self, folder: str) -> list[Path]:
        return sorted(path for path in (self.path / folder).glob("*.json") if not path.name.startswith("."))


def replace(path: Path, content: Any) -> None:
    """Replace a file by JSON content atomically. OSError."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(content), encoding="utf-8")
    os.rename(new, path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _claim(told: Mapping[str, Any]) -> Claim:
    return Claim(told["uid"], told["namespace"], told["name"], [Share(**share) for share in told["shares"]])
