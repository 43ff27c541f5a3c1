"""``ggroupfs doctor``: says what this machine can enforce, and why, or what the daemon knows of a process."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from backend.door.client import facts_of
from backend.door.wire import CUDA, SOFT, names
from backend.ledgers.journal.file import stale_since
from ggroupfs.client import content, flat
from ggroupfs.client.slices import AWAITED, Made, made
from ggroupfs.commands import host, records
from ggroupfs.commands.finding import BAD, Finding
from ggroupfs.commands.mounted import mounted
from ggroupfs.errors import UsageError
from ggroupfs.mounts import DEFAULT_MOUNTPOINT, trees
from ggroupfs.text import spans
from ggroupfs.view.columns import readable

NAMED = 3
"""Slices named in a finding, oldest first."""

SUBJECT_MOST = 40
"""Largest width of the column of subjects, characters: the path of a pod's slice is longer than a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("pid", type=int, nargs="?", metavar="PID", help="what the daemon knows of a process, instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--thaw-all", action="store_true", help="where no daemon is: have every program run again")
    parser.add_argument("--journal", type=Path, metavar="PATH", help="of a mount with that option, for --thaw-all")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT, help="the tree that PID is in")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Exit code 1 if a tree could not be mounted here, or if a program could not be thawed."""
    if arguments.pid is not None:
        if arguments.thaw_all:
            raise UsageError("doctor: either a pid, or --thaw-all")
        found = records.records(arguments.mount, arguments.pid)
        print(json.dumps(records.as_json(found), indent=2) if arguments.json else records.as_text(found))
        return 0
    if arguments.thaw_all:
        from ggroupfs.commands.thaw import thaw_all

        findings = thaw_all([arguments.journal] if arguments.journal else [])
    else:
        findings = [
            *_machine(),
            *trio.run(mounted),
            *trio.run(strays),
            *trio.run(overs),
            *journals(),
            *trio.run(versions),
            *trio.run(_gpus),
        ]
    if arguments.json:
        print(json.dumps([attrs.asdict(finding) for finding in findings], indent=2))
    else:
        width = min(max(len(finding.subject) for finding in findings), SUBJECT_MOST)
        for finding in findings:
            print(f"{finding.subject:<{width}}  {finding.verdict:<11}  {finding.why}")
    return int(any(finding.verdict in BAD for finding in findings))


def _machine() -> Iterator[Finding]:
    """Check what every mount needs, and what it works together with."""
    root = os.geteuid() == 0
    yield Finding(
        "root", "ok" if root else "missing", "the levers act on other users' processes" if root else "run as root"
    )
    fuse = os.path.exists("/dev/fuse")
    yield Finding("/dev/fuse", "ok" if fuse else "missing", f"Linux {platform.release()}" if fuse else "modprobe fuse")
    yield host.cgroups()
    yield host.openings()
    yield host.dmem()
    yield host.mps()
    yield from host.servers()
    yield from host.versions()


def journals(folder: Path | None = None) -> Iterator[Finding]:
    """Report the journals that are out of date."""
    from ggroupfs.commands.thaw import stale
    from ggroupfs.daemon.mount import SOCKETS  # imports all that a mount needs

    for path in sorted((folder or SOCKETS).glob("*.journal")):
        with contextlib.suppress(OSError):  # gone since
            since = stale_since(path.stat(follow_symlinks=False))
            if since is not None:
                yield stale(path, since)


async def versions(places: Iterable[str] | None = None) -> list[Finding]:
    """Report what daemons and programs from an earlier ggroupfs lack, in each tree that root mounted."""
    from ggroupfs.commands.thaw import ANSWER_S, roots

    findings = []
    for place in roots(trees()) if places is None else places:
        with trio.move_on_after(ANSWER_S):  # a tree that hangs is not a matter of its version
            try:
                facts = await trio.to_thread.run_sync(facts_of, place, abandon_on_cancel=True)
            except OSError:  # ENOTCONN: its daemon is dead
                continue
            if why := _older(place, facts):
                findings.append(Finding(place, "advisory", why))
    return findings


def _older(place: str, facts: Mapping[str, str]) -> str:
    known = names(SOFT if facts.get("gpu") == "soft" else CUDA)
    if "protocol" not in facts:
        return f"its daemon is of ggroupfs 0.1: `ggroupfs upgrade {place}` has it be what is installed"
    if lacks := set(known.split(",")) - set(facts.get("features", "").split(",")):
        return f"its daemon is of another version and lacks {','.join(sorted(lacks))}"
    if facts.get("programs.older", "0") != "0":
        older, lack = facts["programs.older"], facts.get("programs.lack")
        return f"programs there with an older library: {older}, which lack {lack} until they start anew"
    return ""


async def strays(places: Iterable[str] | None = None) -> Sequence[Finding]:
    """Report slices whose cgroups never came, in each tree that root mounted."""
    from ggroupfs.commands.thaw import ANSWER_S, roots

    findings = []
    for place in roots(trees()) if places is None else places:
        found: Sequence[Made] = ()
        with trio.move_on_after(ANSWER_S), contextlib.suppress(OSError):  # its daemon is dead, or hangs
            found = await trio.to_thread.run_sync(made, Path(place), abandon_on_cancel=True)
        if waiting := [one for one in found if one.state == AWAITED]:
            findings.append(Finding(place, "advisory", _stray(waiting)))
    return findings


async def overs(places: Iterable[str] | None = None) -> Sequence[Finding]:
    """Report groups that exceed a limit, or that hold much past their library, in each tree that root mounted."""
    from ggroupfs.commands.thaw import ANSWER_S, roots

    findings = []
    for place in roots(trees()) if places is None else places:
        found: Mapping[str, Sequence[Path]] = {}
        with trio.move_on_after(ANSWER_S), contextlib.suppress(OSError):  # its daemon is dead, or hangs
            found = await trio.to_thread.run_sync(flagged, Path(place), abandon_on_cancel=True)
        for key, (what, where) in FLAGS.items():
            if paths := found.get(key):
                names = ", ".join(readable(str(path)) for path in paths[:NAMED])
                more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
                findings.append(Finding(place, "advisory", f"{what}: {names}{more}: {where}"))
    return findings


FLAGS: Mapping[str, tuple[str, str]] = {
    "over": ("over a limit, which reclaim does not change", "the daemon's log says what stands in the way"),
    "past": (
        "more than 2 GiB that a program's library did not see, and that no limit moves",
        "the daemon's log says which process",
    ),
}
"""States of gmem.events, each with the message for groups that are in it, and where to find more."""


def over(mount: Path) -> Sequence[Path]:
    """Return the directories of groups that exceed a limit, relative to the tree: slices before processes."""
    return flagged(mount).get("over", [])


def flagged(mount: Path) -> Mapping[str, Sequence[Path]]:
    """Return the directories of groups in a state of :data:`FLAGS`, by state, relative to the tree: slices before
    processes."""
    found: dict[str, list[Path]] = {}
    for top in (mount / "slice", *sorted(mount.glob("[0-9]*"))):
        for folder, _, files in os.walk(top):
            if "gmem.events" not in files:
                continue
            with contextlib.suppress(OSError):  # gone since
                events = flat(content(Path(folder, "gmem.events")))
                for key in FLAGS:
                    if events.get(key):
                        found.setdefault(key, []).append(Path(folder).relative_to(mount))
    return found


def _stray(waiting: Sequence[Made]) -> str:
    ages = sorted(waiting, key=lambda one: -one.age_s)
    names = ", ".join(f"{readable(one.path)} ({spans.shown(one.age_s)})" for one in ages[:NAMED])
    more = f" and {len(ages) - NAMED} more" if len(ages) > NAMED else ""
    ending = sum(one.left_s is not None for one in ages)
    advice = "rmdir removes one, and TimeoutStartSec= in slices.d has them go by themselves"
    count = f"{len(ages)} slice" + ("" if len(ages) == 1 else "s")
    return f"{count} made for cgroups that never came, {ending} of which go in time: {names}{more}: {advice}"


async def _gpus() -> list[Finding]:
    """Report what each control does on each GPU, proven by a test run."""
    try:
        from backend.nvidia.opening import open_gpus

        found = await open_gpus()
    except OSError as error:
        return [
            Finding(
                "NVIDIA GPU",
                "unsupported",
                f"none here ({error.strerror}): `ggroupfs mount` serves the software GPU, which enforces everything"
                " but compute.migrate",
            )
        ]
    findings = []
    for gpu in found:
        findings.append(Finding(f"GPU {gpu.info.index}", "ok", f"{gpu.info.name}, {gpu.info.uuid}, {gpu.info.pci}"))
        findings += [
            Finding(f"GPU {gpu.info.index} {verdict.control}", verdict.capability.value, verdict.evidence)
            for verdict in gpu.verdicts
        ]
    return findings
