"""The doctor's checks of mounted trees: where they are, which process serves each, and which slices are strays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from backend.core.families import NAME as FAMILY
from backend.door.client import facts_of
from backend.process import procfs
from backend.process.cgroups import ids
from backend.process.identity import ROOT_PATH, Slice
from ggroupfs.client import branches
from ggroupfs.commands.finding import Finding
from ggroupfs.mounts import mount_of
from ggroupfs.serving import TYPE, Unknown, daemon_of, is_trusted, mounted_by
from ggroupfs.text.names import slice_directory
from ggroupfs.view.columns import readable

ANSWER_S = 2.0
"""Seconds that a tree has to answer before it is reported as silent."""
STRAYS_MOST = 16
"""Largest number of stray slices of a tree that are named; the rest are counted."""
STRAY = "a slice without a cgroup, made ahead of it, or not empty yet; rmdir takes it and its settings away"
"""Finding for a stray slice."""

WALK_S = 10.0
"""Seconds in which the slices of a tree are checked."""


@attrs.frozen
class Place:
    """A mounted tree."""

    point: str
    """First mountpoint."""
    device: str
    """Device number, in the format of mountinfo."""
    also: Sequence[str] = ()
    """Further mountpoints, from ``-o also=`` or bind mounts."""


def places(mounts: Iterable[procfs.Mount] | None = None) -> Sequence[Place]:
    """Return the complete trees in this mount namespace, one per daemon.

    A container may have a part of one in addition.
    """
    found: dict[str, list[str]] = {}
    for mount in procfs.mounts() if mounts is None else mounts:
        if mount.type == TYPE and mount.root == "/":
            found.setdefault(mount.device, []).append(mount.point)
    return [Place(first, device, others) for device, (first, *others) in found.items()]


async def mounted() -> list[Finding]:
    """Report on every tree. A tree that hangs is given ANSWER_S."""
    found = places()
    if not found:
        return [Finding("tree", "ok", "none is mounted in this mount namespace: `ggroupfs mount`")]
    findings: list[Finding] = []
    for place in found:
        looked_into = False
        with trio.move_on_after(ANSWER_S) as scope:
            finding, looked_into = await trio.to_thread.run_sync(_of_tree, place, abandon_on_cancel=True)
            findings.append(finding)
        if scope.cancelled_caught:
            why = f"does not answer within {ANSWER_S:g} s: `ggroupfs umount -f {place.point}` aborts its connection"
            findings.append(_finding(place, "advisory", why))
        if looked_into:
            findings += await _strays_in_time(place)
    return findings


async def _strays_in_time(place: Place) -> Sequence[Finding]:
    """Report the stray slices of a tree that answers. With thousands of slices, not all may be checked in time."""
    with trio.move_on_after(WALK_S):
        try:
            return await trio.to_thread.run_sync(lambda: list(strays(Path(place.point))), abandon_on_cancel=True)
        except OSError as error:  # it is ending
            return [_finding(place, "advisory", f"its slices cannot be read: {error.strerror}")]
    why = f"whether each of its slices has a cgroup could not be looked at within {WALK_S:g} s"
    return [_finding(place, "advisory", why)]


def _finding(place: Place, verdict: str, words: str) -> Finding:
    also = f", also at {', '.join(place.also)}" if place.also else ""
    return Finding(readable(place.point), verdict, readable(words + also))


def _of_tree(place: Place) -> tuple[Finding, bool]:
    """Report what serves a tree, and whether its slices belong to the cgroup namespace of this process."""
    now = mount_of(place.point)
    if now is None or now[0] != place.device:
        return _finding(place, "advisory", "a tree under another mount, which no program reaches there"), False
    if not is_trusted(place.device):
        why = f"user {mounted_by(place.device)} mounted it, and may have it say anything"
        return _finding(place, "advisory", why), False
    try:
        with daemon_of(place.point, place.device) as daemon:
            if daemon is None:
                why = f"its daemon is dead: `ggroupfs mount {place.point}` goes on from the journal"
                return _finding(place, "advisory", why), False
            facts = facts_of(place.point)
            verdict = "ok"
            words = f"{facts.get('gpu')} GPUs, books of {facts.get('ledger')}, served by process {daemon.pid}"
            words += f" at socket {facts.get('socket')}"
            if facts.get("usher") == "yes":
                words += f"; programs of frozen slices that wait to use a GPU: {facts.get('usher.waiting')}"
            elif facts.get("usher") == "off":
                verdict = "advisory"
                words += "; its usher is off, as it did not answer twice: what starts in a frozen slice runs until it"
                words += f" is found; `ggroupfs upgrade {place.point}` begins with another one"
            elif "usher" in facts:
                words += "; its usher is not there just now: what starts in a frozen slice runs until it is found"
            words += walls(facts)
            verdict = "advisory" if facts.get("dmem.missing", "0") != "0" else verdict
            here = _our_cgroups(daemon.pid) and not daemon.has_ended
        if not here:
            words += "; whether its slices have a cgroup is not known: they are of another cgroup namespace"
        return _finding(place, verdict, words), here
    except Unknown as error:
        return _finding(place, "advisory", f"which process serves it is not known: {error}"), False
    except OSError as error:  # gone since, or ending
        return _finding(place, "advisory", f"cannot be read: {error.strerror}"), False


def walls(facts: Mapping[str, str]) -> str:
    """Return the words about hard limits that the kernel keeps, too; none where no driver has it do so."""
    if facts.get("dmem.missing", "0") != "0":
        return (
            f"; hard limits of slices that the kernel does not keep, too: {facts['dmem.missing']}, as their cgroups"
            " have no dmem.max (write +dmem to cgroup.subtree_control of those above, from the top)"
        )
    return f"; hard limits of slices that the kernel keeps, too: {facts.get('dmem.limits')}" if "dmem" in facts else ""


def _our_cgroups(pid: int) -> bool:
    """Whether a cgroup path means the same to a process as here (cgroup_namespaces(7)).

    Only root and the user of the process can find out.
    """
    try:
        return os.stat(f"/proc/{pid}/ns/cgroup").st_ino == os.stat("/proc/self/ns/cgroup").st_ino
    except OSError:
        return False


def strays(mount: Path) -> Iterator[Finding]:
    """Yield the slices without a cgroup: made ahead, or still with a program in them. OSError.

    The slices of families have no cgroup by design, and are left out.
    """
    paths = dict.fromkeys(branch.slice for branch in branches(mount) if branch.slice != ROOT_PATH)
    found = [path for path in paths if not (FAMILY.fullmatch(path.rpartition("/")[2]) or ids(Slice(path)) != ())]
    for path in found[:STRAYS_MOST]:
        place = mount / slice_directory(path)
        yield Finding(readable(os.fspath(place)), "advisory", STRAY)
    if len(found) > STRAYS_MOST:
        yield Finding(f"{mount}/slice", "advisory", f"slices without a cgroup besides: {len(found) - STRAYS_MOST}")
