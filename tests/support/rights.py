"""What each user may do: the tables of docs/rights.md, and the users and namespaces that they are about."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from tests.support.cgroups import cgroup, cgroup2, enter, slice_path
from tests.support.mounted import SECONDS, SLOW, Mounted, eventually
from tests.support.rights_actor import DIRECTORY, FILE, LINK

ACTOR = Path(__file__).parent / "rights_actor.py"
PYTHON = ("/usr/bin/python3", "-I")
"""Debian's Python, which all users can run and which is the same in the container."""

PROGRAM, DELEGATE, OTHER = 1000, 1001, 65534

CONTAINER = r"""
set -e
root=$1 mode=$2 program=$3 trees=$4; shift 4
mount -t tmpfs none "$root"
mkdir "$root/usr" "$root/old" "$root/proc"
for name in bin sbin lib lib64; do
    [ ! -L "/$name" ] || cp -P "/$name" "$root/$name"
    [ -L "/$name" ] || [ ! -d "/$name" ] || { mkdir "$root/$name"; mount --rbind "/$name" "$root/$name"; }
done
mount --rbind /usr "$root/usr"
cp "$program" "$root/program.py"
for tree in $trees; do
    mkdir -p "$root$tree"
    mount --bind "$tree" "$root$tree"
    mount -o "remount,bind,$mode" "$root$tree"
done
cd "$root"
pivot_root . old
mount -t proc proc /proc
umount -l /old
exec /usr/bin/python3 -I /program.py "$@"
"""
"""A container without a runtime: a root of its own, with the trees bind-mounted into it, and a pid namespace."""


def user(uid: int, groups: str = "") -> Sequence[str]:
    """Return the words that run the rest of a command line as a user."""
    who = ("--groups", groups) if groups else ("--clear-groups",)
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", *who)


ACTORS: Mapping[str, Sequence[str]] = {
    "root": (),
    "delegate": user(DELEGATE),
    "program": user(PROGRAM),
    "other": user(OTHER),
    "groups": user(OTHER, f"0,{PROGRAM},{DELEGATE}"),
    "rootless": (*user(DELEGATE), "unshare", "--user", "--map-root-user"),
    "userns": (*user(OTHER), "unshare", "--user", "--map-root-user"),
    "ro": ("container", "ro"),
    "rw": ("container", "rw"),
}
"""Users, in the order of the columns, each with the words that run a program as that user."""


@attrs.frozen
class Row:
    """A row of a table."""

    line: int
    """Line of the page, from 1."""
    places: Sequence[str]
    """Files or directories."""
    operations: Sequence[str]
    """Operations on those places; all have the same answers."""
    answers: Mapping[str, str]
    """Answers by actor."""


def parse(page: str) -> list[Row]:
    """Return the rows of the page's tables whose columns are ACTORS: ``| `place`: operation, ... | yes | ...``, or
    with several places. With the head "in `directory`" the places of a table are below that directory."""
    rows, columns, above = [], None, ""
    for number, line in enumerate(page.splitlines(), 1):
        cells = [cell.strip() for cell in line.split("|")[1:-1]] if line.startswith("|") else None
        if cells is None:
            columns = None
        elif columns is None:
            columns = cells[1:] if re.fullmatch("(in `[^`]+`)?", cells[0]) and set(cells[1:]) == set(ACTORS) else []
            above = "".join(f"{place}/" for place in re.findall("`([^`]+)`", cells[0]))
        elif columns and not set(cells[0]) <= {"-"}:
            places, _, operations = cells[0].partition(": ")
            assert len(cells) == len(columns) + 1, f"line {number}: cells that are in no column"
            answers = dict(zip(columns, cells[1:], strict=True))
            named = [above + place for place in re.findall("`([^`]+)`", places)]
            rows.append(Row(number, named, operations.split(", "), answers))
    return rows


@attrs.define
class Stage:
    """A delegated slice with a process and a slice in it."""

    mount: Mounted
    cgroup: Path
    """The slice's cgroup."""
    container: Path
    """Directory in which containers have their root."""
    process: subprocess.Popen[bytes]
    """A process of the user PROGRAM in the slice."""

    @property
    def slice(self) -> Path:
        """The slice's directory in the tree."""
        return self.mount / "slice" / slice_path(self.cgroup)

    def prepare(self) -> None:
        """Make again what was removed."""
        if not (self.mount / self.process.pid).exists():
            (self.mount / self.process.pid).mkdir()
        for made in (self.slice / "part", self.cgroup / "part"):
            if not made.exists():
                subprocess.run([*user(DELEGATE), "mkdir", made], check=True)

    def place(self, name: str, pid: int) -> str:
        """Return the path of a place of the page, for a user whose process is `pid`."""
        words = {"$M": self.mount.path, "$PID": pid, "$P": self.mount.group(pid), "$S": self.slice, "$CG": self.cgroup}
        words["$GPU"] = (self.mount / "gpus/0/uuid").read_text().strip()
        return re.sub(r"\$[A-Z]+", lambda match: str(words[match[0]]), name)

    def like(self) -> Mapping[str, str]:
        """Return every file of the tree, with the file that stands for those of its mode there."""
        self.prepare()
        found = {}
        names = {self.mount.group(self.process.pid): "$P", self.slice: "$S", self.mount.path: "$M"}
        for folder, _, files in os.walk(self.mount.path):
            for path in (Path(folder, file) for file in files):
                above = next(above for above in names if above in path.parents)
                place = f"{names[above]}/{path.relative_to(above)}"
                if not path.is_symlink():
                    found[place] = self._stand_in(place, path.stat().st_mode & 0o777)
        return found

    def _stand_in(self, place: str, mode: int) -> str:
        if place.startswith("$M/slice/"):  # slices around the stage's are root's, as $S/0 is here
            place = "$S/0/"
        if place.startswith("$M/") and place != "$M/ggroup.slices":
            assert mode == 0o444, place
            return "$M/ggroup.backend"
        return f"{os.path.dirname(place)}/{STAND_IN[mode]}"

    def ask(self, who: str, tried: Sequence[tuple[str, str]]) -> Mapping[tuple[str, str], str]:
        """Return the answer to each operation on a place, tried by a user. A program has a directory of its own."""
        # Removals come last; the process's directory after the slice, which is busy while it holds a process.
        tried = sorted(
            tried, key=lambda one: (one[0] == "rmdir", one[1][:2] != "$S", -self.place(one[1], 0).count("/"))
        )
        self.prepare()
        with subprocess.Popen(self.become(who), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as actor:
            try:
                pid = self.process.pid
                if who == "program":
                    pid = actor.pid
                    enter(pid, self.cgroup)
                    (self.mount / pid).mkdir()
                    files = self.mount.group(pid)
                    # The daemon may have looked at the process before it was moved into the slice.
                    eventually(lambda: (files / "gmem.limit.high").stat().st_uid == DELEGATE, "it is in the slice")
                asked = [(operation, self.place(name, pid)) for operation, name in tried]
                said, _ = actor.communicate(json.dumps(asked) + "\n", SECONDS * SLOW)
            finally:
                actor.kill()
        return dict(zip(tried, json.loads(said), strict=True))

    def become(self, who: str, program: Path = ACTOR, *arguments: str | Path) -> Sequence[str]:
        """Return the words that start a Python program as a user."""
        words = ACTORS[who]
        if words[:1] != ("container",):
            return (*words, *PYTHON, os.fspath(program), *map(os.fspath, arguments))
        namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
        trees = f"{self.mount.path} {cgroup2()}"
        container = ("sh", "-c", CONTAINER, "sh", os.fspath(self.container), words[1], os.fspath(program), trees)
        return (*namespaces, *container, *map(os.fspath, arguments))


@contextlib.contextmanager
def stage(mount: Mounted) -> Iterator[Stage]:
    """Yield a stage on a mount."""
    with (
        cgroup(f"ggrouprights-{os.getpid()}") as group,
        tempfile.TemporaryDirectory() as container,
        subprocess.Popen([*user(PROGRAM), "sleep", "600"]) as process,
    ):
        try:
            enter(process.pid, group)
            (mount / process.pid).mkdir()
            here = Stage(mount, group, Path(container), process)
            eventually(here.slice.is_dir, "its slice appears")
            for delegated in (here.slice, group):
                os.chown(delegated, DELEGATE, DELEGATE)
            here.prepare()
            yield here
        finally:
            process.kill()
            process.wait()
            eventually(lambda: not (mount / process.pid).exists(), "it is gone")
            for made in (group / "part", here.slice / "part", here.slice):
                with contextlib.suppress(FileNotFoundError):
                    made.rmdir()


STAND_IN = {0o644: "gmem.limit.high", 0o444: "gmem.current", 0o400: "gcgroup.record", 0o200: "gmem.reclaim"}
"""Control file that stands for all files of its mode, by mode."""
FILES = (
    *(f"{place}/{name}" for place in ("$P", "$S/0", "$S/part/0") for name in (*STAND_IN.values(), "usermemfd")),
    *("$M/ggroup.backend", "$M/ggroup.slices", "$M/gpus/0/gmem.current"),
)
DIRECTORIES = ("$M", "$M/gpus", "$M/gpus/0", "$M/$PID", "$P", "$M/slice", "$S", "$S/0", "$S/part", "$S/part/0")
LINKS = ("$M/self", "$M/gpus/$GPU")
TRIED = [
    *((operation, place) for place in FILES for operation in FILE),
    *((operation, place) for place in DIRECTORIES for operation in DIRECTORY),
    *((operation, place) for place in LINKS for operation in LINK),
]
"""Pairs that the page must answer: every operation on every kind of place."""
for about_above in ("rename", "rmdir"):  # these are up to the directory above the mountpoint
    TRIED.remove((about_above, "$M"))

KERNEL = {
    "$S/0/gmem.limit.high": "$CG/cgroup.max.depth",
    "$S/0/gmem.current": "$CG/cgroup.stat",
    "$S/part/0/gmem.limit.high": "$CG/part/cgroup.max.depth",
    "$S/part/0/gmem.current": "$CG/part/cgroup.stat",
    "$S": "$CG",
    "$S/part": "$CG/part",
}
"""Counterparts of the tree's files in the kernel's own cgroups."""
