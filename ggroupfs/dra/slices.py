"""The slices of pods: determines which shares hold on which level of cgroups, and writes them into the tree.

Claims affect three kinds of levels. A container has the sum of its own shares. Its pod has the sum of the shares of its
containers, each share once. The slices above, up to the kubelet's, have the sums of weights and protection, which count
among siblings. So no pod has more than the scheduler gave it, whichever of its containers has which claim.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from backend.core.settings import BY_FIELD, PERIOD, QUOTA, SETTINGS, Kind, Setting
from backend.process.cgroups import ids
from backend.process.identity import Slice
from ggroupfs.client.slices import make_ahead
from ggroupfs.dra.parameters import ABOVE, together
from ggroupfs.dra.store import Claim, Grants, Share, Store, reference
from ggroupfs.text.names import is_number, slice_directory
from ggroupfs.text.refusals import OF_MKDIR, meaning
from ggroupfs.text.values import show_default, show_quota, show_size

POD = re.compile(
    r"(?:.*-)?pod(?P<uid>[0-9a-f]{8}[_-]?[0-9a-f]{4}[_-]?[0-9a-f]{4}[_-]?[0-9a-f]{4}[_-]?[0-9a-f]{12})(?:\.slice)?"
)
"""Name of a pod's cgroup, with either driver of the kubelet."""
KUBELET = re.compile(r".*kubepods.*")
"""Names of the kubelet's own cgroups above pods."""
AHEAD_MS = 10_000
"""Milliseconds that a slice stays if its cgroup is already gone when it is made."""
CONTENT_MOST = 64
"""Bytes read of a control file, more than the longest value."""


class Failed(Exception):
    """Raised for a share that cannot be held, with the reason."""

    def __init__(self, reason: str, path: str | None = None) -> None:
        super().__init__(reason)
        self.path = path
        """Slice that does not accept the share; None if no slice is the reason."""


@attrs.frozen
class Place:
    """The cgroups of a container."""

    key: str
    """Key of its pod."""
    pod: str
    """Path of the pod's cgroup."""
    container: str
    """Path of the container's cgroup in the pod; everything that the runtime makes below belongs to the container."""


def place(cgroup: str) -> Place:
    """Return the place of a container from the cgroup of its program.

    A container outside of pods counts as its own pod.
    """
    parts = [part for part in cgroup.split("/") if part]
    for depth in range(len(parts) - 1, -1, -1):
        match = POD.fullmatch(parts[depth])
        if match:
            pod = "/" + "/".join(parts[: depth + 1])
            return Place(match["uid"].replace("_", "-"), pod, "/" + "/".join(parts[: depth + 2]))
    key = re.sub(r"[^A-Za-z0-9.-]", "_", "_".join(parts))[-100:].lstrip("_.-") or "root"
    return Place(key, "/" + "/".join(parts), "/" + "/".join(parts))


def above(pod: str) -> Sequence[str]:
    """Return the kubelet's slices above a pod, nearest first."""
    found = []
    path = os.path.dirname(pod)
    while path != "/" and KUBELET.fullmatch(os.path.basename(path)):
        found.append(path)
        path = os.path.dirname(path)
    return found


Wanted = Mapping[tuple[str, str], Mapping[str, int]]
"""Settings by field, for each slice (path of its cgroup) and GPU (UUID)."""


def wanted(claims: Mapping[str, Claim], grants: Iterable[Grants]) -> Wanted:
    """Return the settings that have to hold, outer levels first."""
    shares = {
        reference(claim.uid, number): share for claim in claims.values() for number, share in enumerate(claim.shares)
    }
    levels: dict[tuple[str, str], list[Share]] = {}
    outer: dict[tuple[str, str], list[Mapping[str, int]]] = {}
    for one in grants:
        pod: dict[str, Share] = {}
        for container, names in one.containers.items():
            for name in names:
                share = shares.get(name)
                if share is not None:
                    pod[name] = share
                    if container != one.pod:
                        levels.setdefault((container, share.uuid), []).append(share)
        for share in pod.values():
            levels.setdefault((one.pod, share.uuid), []).append(share)
            outside = {field: value for field, value in share.settings.items() if field in ABOVE}
            for path in above(one.pod):
                outer.setdefault((path, share.uuid), []).append(outside)
    found = {key: together(parts) for key, parts in outer.items()}
    found |= {key: together([share.settings for share in parts]) for key, parts in levels.items()}
    return dict(sorted(found.items()))


class Writer:
    """Writes settings to the slices of a tree."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def write(self, wanted: Wanted) -> Sequence[Failed]:
        """Apply settings, and return the failures once everything else holds."""
        failures = []
        for (path, uuid), settings in wanted.items():
            try:
                directory = self._directory(path, uuid)
                for setting in SETTINGS:
                    if setting.field in settings and setting.control is not None:
                        _set(directory, path, setting, _text(setting, settings))
            except Failed as failed:
                failures.append(failed)
        return failures

    def reset(self, paths: Iterable[str]) -> None:
        """Write the defaults to slices above pods.

        A slice whose cgroup is gone goes by itself, and a write would keep it for good. A setting that is not supported
        here was never set.
        """
        for path in filter(exists, paths):
            directory = self.tree / slice_directory(path)
            for gpu in filter(is_number, _names(directory)):
                for setting in (BY_FIELD[field] for field in ABOVE):
                    with contextlib.suppress(Failed):
                        _set(directory / gpu, path, setting, show_default(setting))

    def _directory(self, path: str, uuid: str) -> Path:
        try:
            gpu = os.readlink(self.tree / "gpus" / uuid)
        except OSError as error:
            raise Failed(f"GPU {uuid}: {meaning(error)}: is the tree mounted on {self.tree}?", path) from None
        slice_ = self.tree / slice_directory(path)
        if not slice_.is_dir():
            try:
                make_ahead(self.tree, path, AHEAD_MS)
            except OSError as error:
                raise Failed(f"{path}: {meaning(error, OF_MKDIR)}", path) from None
        return slice_ / gpu


def _text(setting: Setting, settings: Mapping[str, int]) -> str:
    value = settings[setting.field]
    if setting is QUOTA:
        return show_quota(value, settings[PERIOD.field])
    return show_size(value) if setting.kind is Kind.SIZE else str(value)


def _set(directory: Path, path: str, setting: Setting, text: str) -> None:
    """Write a control file, in one write(2), if its value differs."""
    assert setting.control is not None
    try:
        file = os.open(directory / setting.control, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(file, CONTENT_MOST, 0).decode().strip() != text:
                os.pwrite(file, text.encode(), 0)
        finally:
            os.close(file)
    except OSError as error:
        where = f"{path} on GPU {directory.name}"
        raise Failed(f"{where}: {setting.control}={text}: {meaning(error)}", path) from None


def exists(path: str) -> bool:
    """Whether a cgroup exists, or may exist if that cannot be determined."""
    return ids(Slice(path)) != ()


def hold(store: Store, tree: Path) -> Sequence[Failed]:
    """Make all granted shares hold, forget containers that are gone, and return the failures.

    The caller holds the lock. OSError, ValueError.
    """
    grants = store.grants()
    for key, one in grants.items():
        gone = [container for container in one.containers if not exists(container)]
        if gone:
            for container in gone:
                del one.containers[container]
            store.grant(key, one)
    return settle(store, tree, [one for one in grants.values() if one.containers])


def settle(store: Store, tree: Path, grants: Sequence[Grants], only: Sequence[str] | None = None) -> Sequence[Failed]:
    """Write the settings that follow from grants, for all slices or those in `only`, and return the failures.

    Slices above pods that need nothing any more are reset. OSError, ValueError.
    """
    uids = {name.partition("/")[0] for one in grants for names in one.containers.values() for name in names}
    claims = {uid: claim for uid in uids if (claim := store.claim(uid)) is not None}
    found = wanted(claims, grants)
    outer = {path for one in grants for path in above(one.pod)} & {path for path, _ in found}
    before = set(store.levels())
    writer = Writer(tree)
    # Recorded from before they are set until they are reset, so a killed driver leaves none behind.
    store.keep_levels(sorted(before | outer))
    failures = writer.write({key: value for key, value in found.items() if only is None or key[0] in only})
    writer.reset(before - outer)
    store.keep_levels(sorted(outer))
    return failures


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENOTCONN):
            return []
        raise
