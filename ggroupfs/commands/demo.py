"""``ggroupfs demo``: a short live tour of cat and echo on a mounted tree, with two tenants if the GPU is soft."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from backend.common import interpreter
from ggroupfs.client import Member, members
from ggroupfs.commands import mount as mounting
from ggroupfs.commands import show
from ggroupfs.commands.umount import unmount
from ggroupfs.mounts import DEFAULT_MOUNTPOINT, mount_of
from ggroupfs.view import snapshot

SETTLE_S = 1.0
"""Seconds for which the effect of a change is watched."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)
    parser.add_argument("--gpu", choices=("auto", "soft", "nvidia"), default="auto")
    parser.set_defaults(places=[], ledger="auto", options=[], foreground=False, background=False, fake=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the tour. On a terminal the tree stays until Ctrl-C; otherwise the command ends after the tour."""
    mount: Path = arguments.mount
    with contextlib.ExitStack() as stack:
        if mount_of(os.path.abspath(mount)) is None:
            mount.mkdir(exist_ok=True)
            arguments.places = [os.fspath(mount)]
            code = mounting.run(arguments)
            if code:
                return code
            stack.callback(_unmount, mount)
        print(f"ggroupfs is mounted on {mount}\n")
        soft = "gpu soft" in (mount / "ggroup.backend").read_text()
        own = []
        if soft:
            own = [stack.enter_context(_tenant(mount, gmem, kernel)) for gmem, kernel in (("2G", "2ms"), ("1G", "2ms"))]
        _cat(mount / "ggroup.backend")
        _cat(mount / "ggroup.capabilities")
        _tour(mount, own)
        if sys.stdin.isatty():
            print(f"\nThe tree stays on {mount}; look around in another terminal. Ctrl-C ends it.")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)
    return 0


def _unmount(mount: Path) -> None:
    if mount_of(os.path.abspath(mount)) is not None:
        unmount(mount)
        print(f"\n{mount} is unmounted")


@contextlib.contextmanager
def _tenant(mount: Path, gmem: str, kernel: str) -> Iterator[int]:
    """Run a tenant for the duration of the context, which begins once it has finished a kernel.

    Yields its pid. RuntimeError if the tenant ends before that.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "ggroupfs", "tenant", "--mount", mount, "--gmem", gmem, "--kernel", kernel],
        stdout=subprocess.DEVNULL,
        env=interpreter.environment(),
    )
    try:
        while process.poll() is None and not _works(mount, process.pid):
            time.sleep(0.02)
        if process.returncode is not None:
            raise RuntimeError(f"demo: a tenant ended with exit code {process.returncode} before its first kernel")
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def _works(mount: Path, pid: int) -> bool:
    return any(member.pid == pid and member.flat("gcgroup.stat").get("finished") for member in members(mount))


def _tour(mount: Path, own: Sequence[int]) -> None:
    """Show what the files do with two processes of the demo's own.

    `own` has their pids, and is empty on a GPU that is not soft. Programs that were there before are only listed: a
    limit or a freeze would act on the work of others.
    """
    there = {member.pid: member for member in members(mount)}
    print(_table(mount) + "\n")
    if not own:
        print("The tour writes only to programs of its own, which need a software GPU: --gpu soft, on another --mount.")
        return
    first, second = (there[pid] for pid in own)
    print("$ ls " + str(first.path) + "\n" + "  ".join(sorted(os.listdir(first.path))) + "\n")
    _echo(first, "gmem.limit.high", "512M")
    for name in ("gmem.current", "gmem.swap.current", "gmem.events"):
        _cat(first.path / name)
    _progress("both as they are", first, second)
    _echo(first, "compute.timeslice", "1")
    _echo(second, "compute.timeslice", "4")
    _progress("1 ms against 4 ms", first, second)
    _echo(first, "compute.freeze", "1")
    _progress("the first one frozen", first, second)
    _echo(first, "compute.freeze", "0")
    for member in (first, second):
        _echo(member, "compute.timeslice", "default")
    _echo(first, "gmem.limit.high", "max")
    print(_table(mount))


def _table(mount: Path) -> str:
    return show.table(snapshot.take(mount))


def _cat(path: Path) -> None:
    print(f"$ cat {path}\n{path.read_text()}")


def _echo(member: Member, name: str, value: str) -> None:
    print(f"$ echo {value} > {member.path / name}")
    began = time.perf_counter()
    (member.path / name).write_text(value + "\n")
    print(f"  (held after {(time.perf_counter() - began) * 1e3:.1f} ms)")


def _progress(label: str, *watched: Member) -> None:
    """Print the progress of each process over a while, in kernels, if the machine can tell."""
    before = [member.flat("gcgroup.stat").get("finished") for member in watched]
    time.sleep(SETTLE_S)
    after = [member.flat("gcgroup.stat").get("finished") for member in watched]
    rates = ", ".join(
        f"pid {member.pid}: {(b - a) / SETTLE_S:.0f} kernels/s"
        for member, a, b in zip(watched, before, after, strict=True)
        if a is not None and b is not None
    )
    if rates:
        print(f"  {label}: {rates}\n")
