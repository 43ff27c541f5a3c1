"""``ggroupfs doctor``: what this machine can and cannot enforce, and why, in words."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import attrs
import trio

from backend import kmod, procfs
from backend.identity import cgroup_of
from backend.journal.file import stale_since
from ggroupfs.finding import BAD, Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it is told."""
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--thaw-all", action="store_true", help="where no daemon is: have every program run again")
    parser.add_argument("--journal", type=Path, metavar="PATH", help="of a mount with that option, for --thaw-all")


def run(arguments: argparse.Namespace) -> int:
    """The subcommand. Exit code 1 if a tree could not be mounted here, or if somebody could not be thawed."""
    if arguments.thaw_all:
        from ggroupfs.thaw import thaw_all

        findings = thaw_all([arguments.journal] if arguments.journal else [])
    else:
        findings = [*_machine(), *journals(), *trio.run(_gpus)]
    if arguments.json:
        print(json.dumps([attrs.asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            print(f"{finding.subject:<{width}}  {finding.verdict:<11}  {finding.why}")
    return int(any(finding.verdict in BAD for finding in findings))


def _machine() -> Iterator[Finding]:
    """What every mount needs."""
    root = os.geteuid() == 0
    yield Finding(
        "root", "ok" if root else "missing", "the levers act on other users' processes" if root else "run as root"
    )
    fuse = os.path.exists("/dev/fuse")
    yield Finding("/dev/fuse", "ok" if fuse else "missing", f"Linux {platform.release()}" if fuse else "modprobe fuse")
    own = cgroup_of(os.getpid()).path
    unified = procfs.cgroup2() is not None
    yield Finding(
        "cgroups",
        "ok" if unified else "advisory",
        f"slices follow /proc/<pid>/cgroup; this process is in {own}" if unified else "no cgroup2: slices stay empty",
    )
    try:
        yield Finding(kmod.DEVICE, "ok", f"the kernel module ggroup keeps the books: {kmod.check()}")
    except OSError as error:
        yield Finding(kmod.DEVICE, "advisory", f"{error.strerror}; the daemon keeps the books, and a journal of them")


def journals(folder: Path | None = None) -> Iterator[Finding]:
    """Those that are out of date."""
    from ggroupfs.mount import SOCKETS  # with all that a mount needs
    from ggroupfs.thaw import stale

    for path in sorted((folder or SOCKETS).glob("*.journal")):
        with contextlib.suppress(OSError):  # gone since
            since = stale_since(path.stat(follow_symlinks=False))
            if since is not None:
                yield stale(path, since)


async def _gpus() -> list[Finding]:
    """What each control does on each GPU, proven by running it."""
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
