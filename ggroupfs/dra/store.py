"""What the driver and its hooks know of prepared claims, in files that live as long as the machine is up.

In the directory are ``claims/UID.json``, what each prepared claim gives; ``grants/POD.json``, which shares the
containers of a pod have by now; ``levels.json``, the slices above pods that were set. Each file is replaced whole, so a
driver that is killed leaves the old one or the new one. Hook and driver take turns by a lock.
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
"""Where it is: on a tmpfs, as what it speaks of is gone with the boot."""

KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""UID of a claim or a pod, as part of the name of a file."""


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
    """What the scheduler calls this share of the device."""
    settings: Mapping[str, int]
    """Settings of the slice, by their field."""


@attrs.frozen
class Claim:
    """A claim that is prepared."""

    uid: str
    """UID of the ResourceClaim."""
    namespace: str
    """Its namespace."""
    name: str
    """Its name."""
    shares: Sequence[Share]
    """What it gives, in the order of the allocation."""


@attrs.define
class Grants:
    """The shares that the containers of a pod have."""

    pod: str
    """Path of the pod's cgroup."""
    containers: dict[str, list[str]]
    """For each container, by the path of its cgroup, its shares: ``UID/NUMBER``."""


def reference(uid: str, number: int) -> str:
    """Return how a share is called in grants: the claim, and which of its shares."""
    return f"{uid}/{number}"


class Store:
    """The directory."""

    def __init__(self, path: Path = STATE) -> None:
        self.path = path

    def make(self) -> None:
        """Make it, for root alone, and remove what a killed driver was writing. OSError."""
        for place in (self.path, self.path / "claims", self.path / "grants"):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            for unfinished in place.glob(".*.new"):
                unfinished.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes and threads out. OSError."""
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
        """Write the grants of a pod; those without a container are removed. OSError."""
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
    """Write a file as JSON, which others see whole or not at all. OSError."""
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
