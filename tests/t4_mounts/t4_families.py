"""Programs that limit themselves by their environment, on a real mount: any user, their children, the next daemon."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from backend.core.families import NAME
from backend.core.settings import HIGH, KEPT, SETTINGS, WEIGHT
from backend.door.wire import SOFT, VERSION, Op
from backend.soft.client import socket_of
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import MIB, ggroupfs
from tests.support.mounted import SECONDS, Mounted, daemons, eventually, kill, mounted, mountpoint
from tests.support.tenant_socket import Raw

NOBODY = 65534
HOLDS = """
import os, signal, subprocess, sys
from backend.soft.client import Device
path, children = sys.argv[1:]
with Device(path) as device:
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, path]) for _ in range(int(children))]
    device.join()
    device.alloc(64 << 20)
    print("holds", flush=True)
    sys.stdin.read()
for worker in workers:
    worker.kill()
    worker.wait()
"""
WORKER = """
import signal, sys
from backend.soft.client import Device
with Device(sys.argv[1]) as device:
    device.join()
    device.alloc(64 << 20)
    signal.pause()
"""


@contextlib.contextmanager
def program(
    mount: Mounted, children: int = 0, *, user: int = 0, at: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a program that holds 64 MiB, with some children that hold as much each."""
    script = f"WORKER = {WORKER!r}\n{HOLDS}"
    with subprocess.Popen(
        [sys.executable, "-c", script, os.fspath(mount.path), str(children)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        user=user,
        env=os.environ | environment,
        preexec_fn=(lambda: enter(os.getpid(), at)) if at is not None else None,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == "holds\n"
            yield process
            process.stdin.close()
            process.wait(SECONDS)
        finally:
            process.kill()


def found(mount: Mounted) -> list[Path]:
    """Return the directories of families on GPU 0."""
    return [path / "0" for path in (mount / "slice").rglob("family-*") if NAME.fullmatch(path.name)]


def family(mount: Mounted) -> Path:
    """Return the directory of the only family, once it is there."""
    (path,) = eventually(lambda: found(mount), "a family is there")
    return Path(path)


def number(path: Path) -> int:
    """Return the number in a file."""
    return int(path.read_text())


def test_a_plain_user_limits_its_program_and_its_children_together(mount: Mounted) -> None:
    with program(mount, 2, user=NOBODY, GGROUP_GMEM_HIGH="96M", GGROUP_WEIGHT="10") as process:
        eventually(lambda: number(family(mount) / "gmem.swap.current") == 96 * MIB, "192 MiB are held together")
        here = family(mount)
        assert here.parent.name.startswith(f"family-{NOBODY}-")
        assert number(here / "gmem.current") == number(here / "gmem.limit.high") == 96 * MIB
        assert number(here / "compute.weight") == 10
        assert (mount.group(process.pid) / "gmem.limit.high").read_text() == "max\n", "it is the family's"
        assert os.stat(here / "gmem.limit.high").st_uid == 0
        raised = f"echo max >{here}/gmem.limit.high"
        assert subprocess.run(["sh", "-c", raised], user=NOBODY, stderr=subprocess.DEVNULL).returncode != 0
    eventually(lambda: not found(mount), "it goes with the last of them")


def test_what_cannot_be_ends_the_program_with_one_line(mount: Mounted) -> None:
    words = ("tenant", "--mount", mount.path, "--gmem", "0", "--seconds", "0.1", "--report", "0.1")
    refused = ggroupfs(*words, GGROUP_GMEM_HIGH="lots")
    assert (refused.returncode, refused.stdout) == (1, "")
    line = "ggroupfs: GGROUP_GMEM_HIGH=lots: not a size: bytes, or with K, M, G or T, or max"
    assert refused.stderr == f"{line}\n"
    lenient = ggroupfs(*words, GGROUP_GMEM_HIGH="lots", GGROUP_LENIENT="1")
    assert (lenient.returncode, lenient.stderr) == (0, f"{line}: ignored\n")
    of_run = ggroupfs("run", "--mount", mount.path, "--", "true", GGROUP_PRIORITY="16")
    assert (of_run.returncode, of_run.stderr) == (1, "ggroupfs: GGROUP_PRIORITY=16: not a number from 0 to 15\n")
    lenient = ggroupfs("run", "--mount", mount.path, "--", "true", GGROUP_PRIORITY="16", GGROUP_LENIENT="1")
    assert (lenient.returncode, lenient.stderr) == (
        0,
        "ggroupfs: run: GGROUP_PRIORITY=16: not a number from 0 to 15: ignored\n",
    )


def test_run_limits_programs_that_know_nothing_of_it(mount: Mounted) -> None:
    """They may be any user's, without rights in the tree, and include children that have lost the environment."""
    child = f"env -i {sys.executable} -c '{WORKER}' {mount.path}"
    words = [sys.executable, "-m", "ggroupfs", "run", "--mount", os.fspath(mount.path), "--", "sh", "-c"]
    environment = os.environ | {"GGROUP_GMEM_HIGH": "48M"}
    script = f"{child} & {child} & wait"
    with subprocess.Popen([*words, script], env=environment, user=NOBODY, start_new_session=True) as process:
        try:
            eventually(lambda: number(family(mount) / "gmem.swap.current") == 80 * MIB, "128 MiB are held together")
            assert number(family(mount) / "gmem.current") == 48 * MIB
            assert mount.group(process.pid).is_dir(), "it is in the tree, without a context"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    eventually(lambda: not found(mount), "it goes with the last of them")


def test_run_takes_the_socket_where_there_is_no_tree(mount: Mounted, tmp_path: Path) -> None:
    """A container may have been given nothing but the socket."""
    words = ("run", "--mount", tmp_path, "--", "cat", f"{mount.path}/self/0/gmem.current")
    there = {"GGROUP_SOCKET": os.fspath(socket_of(mount.path)), "GGROUP_CUDA_LIBRARY": "/nowhere/lib.so"}
    limited = ggroupfs(*words, GGROUP_GMEM_HIGH="32M", **there)
    assert (limited.returncode, limited.stdout, limited.stderr) == (0, "0\n", ""), "it is in the tree of that socket"
    without = ggroupfs(*words, GGROUP_GMEM_HIGH="32M")
    assert (without.returncode, without.stderr) == (
        1,
        f"ggroupfs: {tmp_path}: no ggroup tree is mounted there\n",
    )
    assert ggroupfs(*words[:3], "-p", "GMemHigh=1G", *words[3:], **there).returncode == 1, "-p needs the tree"


def test_what_run_is_told_holds_against_others(mount: Mounted) -> None:
    """Weight and priority are set on the process's family, which stands between the process and others."""
    words = ["run", "--mount", mount.path, "-p", "ComputeWeight=1", "-p", "ComputePriority=12", "-p", "GMemHigh=1G"]
    script = f"cd {mount.path}/slice/family-*/0 && cat compute.weight compute.priority gmem.limit.high"
    result = ggroupfs(*words, "--", "sh", "-c", script, GGROUP_GMEM_HIGH="48M", GGROUP_WEIGHT="50")
    assert (result.stdout, result.stderr) == (f"1\n12\n{48 * MIB}\n", "")


def test_run_says_so_where_no_daemon_listens(tmp_path: Path) -> None:
    """A program with the library runs without a daemon; `run` was asked for a limit, which it could not set."""
    words, socket = ("run", "--mount", tmp_path, "--", "echo", "runs"), os.fspath(tmp_path / "none.sock")
    there = {"GGROUP_SOCKET": socket, "GGROUP_CUDA_LIBRARY": "/nowhere/lib.so"}
    refused = ggroupfs(*words, GGROUP_GMEM_HIGH="32M", **there)
    line = f"GGROUP_GMEM_HIGH={32 * MIB}: No such file or directory"
    assert (refused.returncode, refused.stdout, refused.stderr) == (1, "", f"ggroupfs: run: {line}\n")
    lenient = ggroupfs(*words, GGROUP_GMEM_HIGH="32M", GGROUP_LENIENT="1", **there)
    assert (lenient.returncode, lenient.stdout, lenient.stderr) == (0, "runs\n", f"ggroupfs: run: {line}: ignored\n")
    assert ggroupfs(*words, **there).stdout == "runs\n", "nothing is asked for"


def test_a_child_with_a_limit_of_its_own_is_below_the_other(mount: Mounted) -> None:
    words = ["run", "--mount", mount.path, "--", "env", "GGROUP_GMEM_HIGH=32M"]
    script = f"cd {mount.path}/slice && find . -path '*family-*/0/gmem.limit.high' | sort | xargs cat"
    result = ggroupfs(*words, sys.executable, "-m", "ggroupfs", *words[:4], "sh", "-c", script, GGROUP_GMEM_HIGH="48M")
    assert (result.stdout, result.stderr) == (f"{48 * MIB}\n{32 * MIB}\n", "")


def test_it_is_below_the_slice_of_its_cgroup_and_follows_to_another(mount: Mounted) -> None:
    with cgroup("ggroup-family") as top:
        for name in ("a", "b"):
            (top / name).mkdir()
        with program(mount, at=top / "a", GGROUP_GMEM_HIGH="32M") as process:
            here = mount / "slice" / slice_path(top)
            assert family(mount).parent.parent == here / "a"
            enter(process.pid, top / "b")
            eventually(lambda: family(mount).parent.parent == here / "b", "it is in the other one")
            assert number(family(mount) / "gmem.limit.high") == number(here / "b/0/gmem.current") == 32 * MIB
        eventually(lambda: not here.exists(), "all of that goes with it")


def test_one_that_was_killed_and_the_next_daemon() -> None:
    """A software GPU ends with its daemon, and so do its programs; `run` keeps a program that needs no GPU."""
    with mountpoint() as place, daemons(place) as start:
        mount = start()
        words = [sys.executable, "-m", "ggroupfs", "run", "--mount", os.fspath(place), "--", "sleep", "600"]
        environment = os.environ | {"GGROUP_GMEM_HIGH": "32M", "GGROUP_PRIORITY": "12"}
        with subprocess.Popen(words, env=environment, user=NOBODY) as process:
            try:
                before = family(mount)
                (before / "gmem.limit.high").write_text("40M")
                kill(mount)
                mount = start()
                assert family(mount) == before
                assert number(before / "gmem.limit.high") == 40 * MIB
                assert number(before / "compute.priority") == 12
            finally:
                process.kill()
        eventually(lambda: not found(mount), "it goes with its process all the same")


def test_what_is_refused_at_the_socket() -> None:
    """On a mount of its own, since children of this process would be in its families."""
    with mountpoint() as place, mounted(place) as mount:
        refused_at_the_socket(mount)


def refused_at_the_socket(mount: Mounted) -> None:
    """Body of the test above."""
    high, weight = SETTINGS.index(HIGH), SETTINGS.index(WEIGHT)
    with Raw(mount) as raw:
        assert raw.ask(Op.WANT, high, 1) == errno.EPROTO, "before the greeting"
        assert raw.ask(Op.HELLO, VERSION) == (VERSION, 2 * MIB, 2048, SOFT, 0)
        assert raw.ask(Op.WANT, high, 1) == raw.ask(Op.FAMILY, 1) == errno.ENOSYS, "it has not said that it can"
    with Raw(mount) as raw:
        assert raw.ask(Op.HELLO, VERSION, SOFT) == (VERSION, 2 * MIB, 2048, SOFT, 0)
        for setting in (len(SETTINGS), 1 << 63, SETTINGS.index(KEPT)):
            assert raw.ask(Op.WANT, setting, 1) == errno.EINVAL
        assert raw.ask(Op.WANT, high, 1 << 63) == errno.ERANGE
        assert raw.ask(Op.WANT, weight, 0) == raw.ask(Op.WANT, weight, 10_001) == errno.ERANGE
        assert raw.ask(Op.FAMILY, 0) == raw.ask(Op.FAMILY, 1, 2) == errno.EINVAL
        answers = [raw.ask(Op.FAMILY, number) for number in range(1, 10)]
        assert answers == [(0, 0, 0, 0, 0)] * 8 + [errno.E2BIG]
    assert not found(mount), "this process has not come to a GPU"
