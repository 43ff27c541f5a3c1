"""docs/rights.md, executed: every cell is tried as its user, and compared with the kernel's own cgroups."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import rights
from tests.support.cgroups import enter
from tests.support.mounted import SECONDS, Mounted, eventually
from tests.support.proc import child_of
from tests.support.rights import ACTORS, DELEGATE, FILES, KERNEL, OTHER, PROGRAM, STAND_IN, TRIED, Stage, user
from tests.support.rights_actor import FILE

PAGE = Path(__file__).parents[2] / "docs" / "rights.md"
ROWS = rights.parse(PAGE.read_text())

DIFFERENCES = {
    "setxattr": "no xattrs: a handler would cost a request at each open to write",
    "unlink": "the control files of a slice are in a directory for each GPU, which is not the delegate's",
    "rename": "as unlink",
}
"""Operations with answers that differ from the kernel's, and why."""
REFUSED = {("write", "compute.migrate"): "ENOTSUP"}
"""Answers to a user that may do the operation: there is no other GPU to move to."""


@pytest.fixture
def stage(module_mount: Mounted) -> Iterator[Stage]:
    with rights.stage(module_mount) as stage:
        yield stage


@pytest.mark.parametrize("who", ACTORS)
def test_every_cell(stage: Stage, mount: Mounted, who: str) -> None:
    found = stage.ask(who, TRIED)
    wrong = [
        f"{PAGE.name}:{row.line}: {operation} {place}: not {row.answers[who]}, but {found[operation, place]}"
        for row in ROWS
        for place in row.places
        for operation in row.operations
        if found[operation, place] != row.answers[who]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("who", ACTORS)
def test_every_file_answers_as_the_one_that_stands_for_it(stage: Stage, mount: Mounted, who: str) -> None:
    said = {(o, p): row.answers[who] for row in ROWS for p in row.places for o in row.operations}
    files = {place: other for place, other in stage.like().items() if place not in FILES}
    several = [name for mode, name in STAND_IN.items() if mode != 0o400]  # which stands for itself alone
    stand = {f"{place}/{name}" for place in ("$P", "$S/0", "$S/part/0") for name in several}
    assert set(files.values()) == stand | {"$M/ggroup.backend"}
    found = stage.ask(who, [(operation, place) for place in files for operation in FILE])
    wrong = []
    for (operation, place), answer in found.items():
        expected = said[operation, files[place]]
        if expected == "yes":
            expected = REFUSED.get((operation, os.path.basename(place)), "yes")
        if answer != expected:
            wrong.append(f"{operation} {place}: not {expected}, as {files[place]}, but {answer}")
    assert not wrong, "\n".join(wrong)


def test_the_page_has_an_answer_to_everything_once() -> None:
    assert Counter((o, p) for row in ROWS for p in row.places for o in row.operations) == Counter(TRIED)


@pytest.mark.parametrize("who", ACTORS)
def test_the_kernel_answers_the_same(stage: Stage, mount: Mounted, who: str) -> None:
    asked = [(operation, place) for operation, place in TRIED if place in KERNEL]
    ours, kernels = stage.ask(who, asked), stage.ask(who, [(operation, KERNEL[place]) for operation, place in asked])
    wrong = [
        f"{operation} {place}: the kernel says {kernels[operation, KERNEL[place]]}, we {ours[operation, place]}"
        for operation, place in asked
        if ours[operation, place] != kernels[operation, KERNEL[place]] and operation not in DIFFERENCES
    ]
    assert not wrong, "\n".join(wrong)


def test_the_differences_are_there(stage: Stage, mount: Mounted) -> None:
    """A difference that no longer exists must leave the list."""
    asked = [(operation, place) for operation, place in TRIED if place in KERNEL and operation in DIFFERENCES]
    found = set()
    for who in ("root", "delegate"):
        ours, kernels = (
            stage.ask(who, asked),
            stage.ask(who, [(operation, KERNEL[place]) for operation, place in asked]),
        )
        found |= {
            operation for operation, place in asked if ours[operation, place] != kernels[operation, KERNEL[place]]
        }
    assert found == set(DIFFERENCES)


def test_a_private_mapping_is_what_the_file_said(mount: Mounted) -> None:
    """The kernel's own files have no such mapping; a shared one has a row on the page."""
    for name in ("ggroup.backend", "gpus/0/gmem.current"):
        with open(mount / name, "rb") as file:
            said = file.read()
            with mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapped:
                assert mapped[: len(said)] == said
                assert not any(mapped[len(said) :])


# Rights that end with the delegation


def can(who: Sequence[str], file: Path) -> bool:
    """Return whether a user may write a file."""
    return subprocess.run([*who, "sh", "-c", f": >> {file}"], stderr=subprocess.DEVNULL, check=False).returncode == 0


def as_delegate(*words: str | Path) -> None:
    subprocess.run([*user(DELEGATE), *words], check=True)


def test_a_delegate_leaves_no_door_open_to_a_process_that_has_left(stage: Stage, mount: Mounted) -> None:
    stage.prepare()
    files = mount.group(stage.process.pid)
    freeze, limit = files / "compute.freeze", files / "gmem.limit.high"
    as_delegate("chmod", "0666", freeze)
    os.chmod(limit, 0o666)
    assert can(user(OTHER), freeze)
    enter(stage.process.pid, stage.cgroup.parent)
    try:
        eventually(lambda: freeze.stat().st_uid == 0, "it is no longer his")
        assert oct(freeze.stat().st_mode & 0o777) == "0o644"
        assert not can(user(OTHER), freeze)
        assert not can(user(DELEGATE), freeze)
        assert can(user(OTHER), limit), "what root set stays"
    finally:
        enter(stage.process.pid, stage.cgroup)
    eventually(lambda: freeze.stat().st_uid == DELEGATE, "it is his again")
    os.chmod(limit, 0o644)


def test_a_delegate_leaves_no_door_open_to_what_is_taken_back(stage: Stage, mount: Mounted) -> None:
    stage.prepare()
    part = stage.slice / "part"
    file = part / "0" / "gmem.limit.high"
    as_delegate("chown", str(DELEGATE), part)  # it already is, so nothing changes
    as_delegate("chown", str(DELEGATE), file)
    as_delegate("chmod", "0666", file)
    as_delegate("chmod", "0777", part)
    assert can(user(OTHER), file)
    os.chown(stage.slice, 0, 0)
    try:
        eventually(lambda: part.stat().st_uid == file.stat().st_uid == 0, "it is no longer his")
        assert (oct(part.stat().st_mode & 0o777), oct(file.stat().st_mode & 0o777)) == ("0o755", "0o644")
        assert not can(user(OTHER), file)
        assert not can(user(DELEGATE), file)
    finally:
        os.chown(stage.slice, DELEGATE, DELEGATE)


def test_what_the_owner_of_a_file_gives_to_its_group(stage: Stage, mount: Mounted) -> None:
    stage.prepare()
    file = mount.group(stage.process.pid) / "compute.weight"
    os.chown(file, -1, PROGRAM)
    os.chmod(file, 0o664)
    try:
        assert can(user(OTHER, str(PROGRAM)), file)
        assert not can(user(OTHER), file)
        assert can(user(DELEGATE), file)
    finally:
        os.chown(file, -1, 0)
        os.chmod(file, 0o644)


# Pids


LOOK = """
import json, os, sys
me = os.readlink(f"{sys.argv[1]}/self")
told = open(f"{sys.argv[1]}/ggroup.backend").read()
print(json.dumps([me, os.getpid(), os.listdir(sys.argv[1]), told]), flush=True)
os.mkdir(f"{sys.argv[1]}/{me}")
print(json.dumps(os.listdir(f"{sys.argv[1]}/self/0")), flush=True)
sys.stdin.read()
"""


def test_names_are_the_daemons_pids_in_every_namespace(stage: Stage, mount: Mounted, tmp_path: Path) -> None:
    program = tmp_path / "look.py"
    program.write_text(LOOK)
    words = [*stage.become("rw", program, mount.path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdout is not None
        me, inside, names, told = json.loads(container.stdout.readline())
        ours = child_of(container.pid)
        assert (int(me), inside) == (ours, 1), "self is what the daemon calls it"
        assert str(stage.process.pid) in names, "it sees whom it does not see in its /proc"
        assert f"\npid {mount.daemon.pid}\n" in told
        assert "gmem.limit.high" in json.loads(container.stdout.readline())
        assert (mount / ours / "0").is_dir()
        container.communicate("")
    eventually(lambda: not (mount / ours).exists(), "it is gone")


def test_for_who_is_outside_of_the_daemons_pid_namespace_self_leads_nowhere(tmp_path: Path) -> None:
    namespaces = ("unshare", "--pid", "--fork", "--mount", "--mount-proc", "--propagation", "private")
    words = [*namespaces, sys.executable, "-m", "ggroupfs", "mount", "-f", "--gpu", "soft", os.fspath(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        try:
            assert outer.stdout.readline() == "ready\n"
        finally:
            daemon = child_of(outer.pid)
            tree = Path(f"/proc/{daemon}/root{tmp_path}")
            try:
                told = (tree / "ggroup.backend").read_text()
                with pytest.raises(FileNotFoundError):
                    os.readlink(tree / "self")
            finally:
                os.kill(daemon, signal.SIGTERM)
                _, errors = outer.communicate(timeout=SECONDS)
    assert "\npid 1\n" in told
    assert (outer.returncode, errors) == (0, "")


# The page: its test must be able to fail


def test_rows_are_read() -> None:
    head = "| | " + " | ".join(ACTORS) + " |\n" + "|---" * (len(ACTORS) + 1) + "|\n"
    (row,) = rights.parse(f"{head}| `$M` `$S`: list, chmod | {' | '.join(['yes'] * 8)} | EROFS |\n\n| x | y |\n")
    assert (row.places, row.operations, row.line) == (["$M", "$S"], ["list", "chmod"], 3)
    assert row.answers == dict.fromkeys(ACTORS, "yes") | {"rw": "EROFS"}
    with pytest.raises(AssertionError, match="line 3: cells"):
        rights.parse(f"{head}| `$M`: list | yes |\n")
