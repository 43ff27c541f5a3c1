"""Runs old against new code: ``python -m tests.versions.run [--old REVISION]`` (`make test-versions`).

It checks out a revision beside this tree, and runs each part of one revision with each part of the other: the library
with the daemon's door, programs of the software GPU with its daemon, journals, and a tree that is upgraded, downgraded
and upgraded again while it is used. It needs root, git, gcc and cuda.h, but no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from backend.door.client import facts_of
from tests.versions.ends import CUDA_INCLUDE, Door, End, compile_library, library

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SECONDS = 120.0
"""The limit for each wait: beyond it something hangs, however busy the machine is."""
MIB = 1 << 20


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)


def same(found: object, wanted: object, what: str) -> None:
    """Raise AssertionError with both values in it, unless they are equal."""
    assert found == wanted, f"{what}: {found!r}, not {wanted!r}"


@contextlib.contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """Check out the tree of a revision, for the `with` block."""
    git = ["git", "-C", os.fspath(ROOT)]
    subprocess.run([*git, "worktree", "add", "-q", "--detach", folder, revision], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", folder], check=True)


# The library of CUDA programs, and the door


def meet(binary: Path, one: Path, other: Path, folder: Path) -> str:
    """Run a program that has the library with one daemon, then with another, as over an upgrade; return what was seen.

    Its memory is limited, moved and counted each time.
    """
    socket = folder / "daemon"
    daemon = Door(one, socket)
    try:
        with library(binary, socket) as program:
            group = f"{program.popen.pid}/0/"
            same(program.ask("use 0"), "0", "it is managed")
            same(program.ask("charge 1024"), "0", "a charge is granted")
            program.ask("kernels 17")
            for round_ in range(2):
                _limited(program, daemon, group)
                daemon.end()
                daemon = Door(other if not round_ else one, socket)
                until(lambda: program.ask("status").split()[2] == "0", "it speaks again")
            # It speaks before it is in the tree.
            until(lambda: _managed(daemon, group), "the next daemon has it in the tree")
            current = int(daemon.read(group + "gmem.current")) // MIB
            same(current, 1024, "what it has is known to the next daemon")
    finally:
        daemon.end()
    return "charged, limited, moved out and in, counted; reconnects with 1024 MiB, and the same there"


def _managed(daemon: Door, group: str) -> bool:
    return "managed 1\n" in daemon.read(group + "gcgroup.stat")


def _limited(program: End, daemon: Door, group: str) -> None:
    until(lambda: _managed(daemon, group), "it is managed")
    until(lambda: "submitted 17\n" in daemon.read(group + "gcgroup.stat"), "its kernels are counted")
    daemon.write(group + "gmem.limit.high", "512M")
    same(program.ask("limits").split()[:2], ["1", "512"], "it sees the limit")
    same(int(daemon.read(group + "gmem.current")) // MIB, 512, "memory has left the GPU")
    same(program.ask("status"), "512 512 0", "the program moved it")
    daemon.write(group + "gmem.limit.high", "max")
    until(lambda: program.ask("status") == "1024 0 0", "it is back")
    program.ask("report 100 30")
    until(lambda: f"unmovable {100 * MIB}\n" in daemon.read(group + "gmem.stat"), "what it reports is known")


# A tree, and programs of the software GPU


class Mount:
    """A mounted tree. The link `current` leads to the revision that is started next."""

    def __init__(self, folder: Path) -> None:
        self.path, self.current, self.folder = folder / "tree", folder / "current", folder
        self.path.mkdir()
        self.daemon: subprocess.Popen[str] | None = None

    def install(self, tree: Path) -> None:
        """Make this revision the one that is started from now on."""
        new = self.folder / "next"
        new.symlink_to(tree)
        new.rename(self.current)

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.fspath(self.current)}

    def start(self) -> None:
        options = f"journal={self.folder}/one.journal,socket={self.folder}/socket"
        words = [sys.executable, "-m", "ggroupfs", "mount", "-f", "--gpu", "soft", "--ledger", "soft"]
        self.daemon = subprocess.Popen(
            [*words, "-o", options, os.fspath(self.path)],
            env=self.environment(),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.daemon.stdout is not None
        same(self.daemon.stdout.readline(), "ready\n", "it answers")

    def become_next(self) -> None:
        """Make the daemon execute the installed revision."""
        assert self.daemon is not None
        assert self.daemon.stdout is not None
        self.daemon.send_signal(signal.SIGUSR2)
        same(self.daemon.stdout.readline(), "ready\n", "the next one answers")

    def kill(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()
        subprocess.run(["fusermount3", "-u", "-z", self.path], check=True)

    def end(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.terminate()
            self.daemon.wait(SECONDS)

    def is_new(self) -> bool:
        return "protocol" in facts_of(self.path)

    def write(self, file: str, text: str) -> None:
        (self.path / file).write_text(text)

    def asked(self) -> dict[str, str]:
        """All settings of the slices, and the owners of their files."""
        found = {}
        for name in ("a.slice", "a.slice/b.slice"):
            for file in ("gmem.limit.high", "gmem.limit.low", "gmem.swap.max", "compute.timeslice", "compute.freeze"):
                found[f"{name} {file}"] = (self.path / "slice" / name / "0" / file).read_text()
            for file in ("compute.priority", "compute.weight"):
                found[f"{name} {file}"] = (self.path / "slice" / name / "0" / file).read_text()
            status = (self.path / "slice" / name).stat()
            found[f"{name} owner"] = f"{status.st_uid}:{status.st_gid}"
        found["mode"] = oct((self.path / "slice/a.slice/0/gmem.limit.high").stat().st_mode)
        return found


def has_memory(mount: Mount, tree: Path) -> None:
    """Run a program of one revision with the daemon of another: it gets memory, runs kernels, is limited and frozen."""
    words = [sys.executable, "-m", "ggroupfs", "tenant", "--mount", os.fspath(mount.path), "--gmem", "64M"]
    words += ["--kernel", "1ms", "--report", "1"]
    environment = {**os.environ, "PYTHONPATH": os.fspath(tree)}
    with subprocess.Popen(words, env=environment, cwd=mount.folder, stdout=subprocess.DEVNULL) as program:
        try:
            place = mount.path / str(program.pid) / "0"
            until(place.exists, "it is in the tree")
            until(lambda: int((place / "gmem.current").read_text()) == 64 * MIB, "it has memory")
            (place / "gmem.limit.high").write_text("32M")
            same(int((place / "gmem.current").read_text()), 32 * MIB, "memory has left the GPU")
            stat = place / "gcgroup.stat"
            before = stat.read_text()
            until(lambda: stat.read_text() != before, "its kernels run")
            (place / "compute.freeze").write_text("1")
        finally:
            program.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(5)
            program.kill()


def upgraded(old: Path, folder: Path, killed: bool) -> str:
    """Upgrade a tree from old to new, downgrade it, and upgrade it again; the settings must survive each step."""
    mount = Mount(folder)
    mount.install(old)
    mount.start()
    try:
        for name in ("a.slice", "a.slice/b.slice"):
            (mount.path / "slice" / name).mkdir()
        mount.write("slice/a.slice/0/gmem.limit.high", "512M")
        mount.write("slice/a.slice/0/gmem.limit.low", "8M")
        mount.write("slice/a.slice/b.slice/0/gmem.swap.max", "64M")
        mount.write("slice/a.slice/0/compute.timeslice", "1")
        mount.write("slice/a.slice/b.slice/0/compute.freeze", "1")
        mount.write("slice/a.slice/b.slice/0/compute.weight", "250")
        mount.write("slice/a.slice/0/compute.priority", "3")
        os.chown(mount.path / "slice/a.slice", 1000, 1001)
        (mount.path / "slice/a.slice/0/gmem.limit.high").chmod(0o600)
        same(mount.is_new(), False, "the old one is old")
        asked = mount.asked()
        for step, tree in enumerate((ROOT, old, ROOT)):
            mount.install(tree)
            if killed:
                mount.kill()
                mount.start()
            else:
                mount.become_next()
            same(mount.is_new(), tree is ROOT, "which one serves")
            same(mount.asked(), asked, f"what was asked, after step {step + 1}")
            for program in (old, ROOT):
                has_memory(mount, program)
            mount.write("slice/a.slice/b.slice/0/gmem.limit.high", f"{100 + step}M")
            asked = mount.asked()
    finally:
        mount.end()
    return f"{len(asked)} settings and owners the same each time; programs of both run with each"


# Journals


def journal(verb: str, tree: Path, path: Path, *words: str) -> list[str]:
    """What one revision reads from a journal, sorted, because the revisions' orders differ."""
    done = subprocess.run(
        [sys.executable, HERE / "journal.py", verb, path, *words],
        env={**os.environ, "PYTHONPATH": os.fspath(tree)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode in (0, -signal.SIGKILL), f"journal.py {verb}: {done.returncode}"
    return sorted(json.dumps(one, sort_keys=True) for one in json.loads(done.stdout)) if done.stdout else []


def journals(writer: Path, readers: list[Path], folder: Path) -> str:
    """Let `writer` write a journal, from which each of the readers goes on, as a daemon that is then killed."""
    path = folder / "one.journal"
    with subprocess.Popen(["sleep", "600"]) as process:  # a live process
        try:
            journal("write", writer, path, str(process.pid))
            wanted = journal("read", writer, path)
            for reader in readers:
                same(journal("keep", reader, path), wanted, "what it says")
        finally:
            process.kill()
    assert not list(folder.glob("*.refused"))
    return f"{len(wanted)} entries, the same {len(readers)} times"


def carried(old: Path, folder: Path) -> str:
    """A journal of a later version, with a setting that neither revision knows: everything else in it must be read."""
    from backend.ledgers.journal import format, state
    from backend.ledgers.journal.state import State
    from tests.versions.journal import BOOT, GPUS

    path = folder / "one.journal"
    data, checksum = format.begin(BOOT, State())
    later = [
        state.gpu(GPUS[0]),
        ["put", GPUS[0], "/", {"peak": 7, "compute.max": "50 100"}],
        ["reasons", GPUS[0], {"turn": ["GR"]}],
    ]
    path.write_bytes(data + format.line(later, checksum)[0])
    path.chmod(0o600)
    root = f'["put", "{GPUS[0]}", "/", '
    known = [json.dumps(["gpu", GPUS[0]]), root + '{"peak": 7}]']
    kept = [known[0], root + '{"compute.max": "50 100", "peak": 7}]']
    same(journal("keep", ROOT, path), kept, "this one keeps what it does not know of a group")
    same(journal("keep", old, path), known, "the old one reads what it knows")
    assert not list(folder.glob("*.refused"))
    return "what is known is read by each, and kept by this one for a later one"


def main() -> int:
    """Return 0 if everything works, which is the exit status."""
    parser = argparse.ArgumentParser(prog="tests.versions.run", description=__doc__)
    parser.add_argument("--old", default="249ae3a", help="a revision of git")
    parser.add_argument("--only", default="", help="a part of the name of what is run")
    arguments = parser.parse_args()
    revision = arguments.old
    failed = 0
    with tempfile.TemporaryDirectory(prefix="ggroup-versions-", dir="/run") as name:
        folder = Path(name)
        with checked_out(revision, folder / "old") as old:
            binaries = {tree: compile_library(tree, folder / f"library-{tree.name}") for tree in (old, ROOT)}
            runs: list[tuple[str, Callable[[Path], str]]] = [
                ("old library, new daemon, old daemon", lambda place: meet(binaries[old], ROOT, old, place)),
                ("old library, old daemon, new daemon", lambda place: meet(binaries[old], old, ROOT, place)),
                ("new library, old daemon, new daemon", lambda place: meet(binaries[ROOT], old, ROOT, place)),
                ("new library, new daemon, old daemon", lambda place: meet(binaries[ROOT], ROOT, old, place)),
                ("tree: old, upgrade, downgrade, upgrade", lambda place: upgraded(old, place, killed=False)),
                ("tree: the same, each daemon killed", lambda place: upgraded(old, place, killed=True)),
                ("old journal, new, old, new", lambda place: journals(old, [ROOT, old, ROOT], place)),
                ("new journal, old, new, old", lambda place: journals(ROOT, [old, ROOT, old], place)),
                ("journal of a later version, new, old", lambda place: carried(old, place)),
            ]
            print(f"old: {revision}, new: this tree; cuda.h of {CUDA_INCLUDE}")
            for number, (what, run) in enumerate(runs):
                if arguments.only not in what:
                    continue
                place = folder / str(number)
                place.mkdir()
                began = time.monotonic()
                try:
                    found, verdict = run(place), "ok"
                except (AssertionError, OSError, EOFError, subprocess.SubprocessError) as error:
                    found, verdict, failed = f"{type(error).__name__}: {error}", "FAILED", failed + 1
                print(f"{verdict:<6}  {what:<40}  {found}  ({time.monotonic() - began:.1f} s)", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
