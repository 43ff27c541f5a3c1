"""Processes that may be killed for GPU memory, those that are spared, and the right to kill; with real processes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from backend.process import looks, procfs, victims
from backend.process.identity import identify
from tests.support.mounted import eventually

Spawn = Callable[..., subprocess.Popen[bytes]]

ROOT = Path(__file__).parents[2]
OTHER = 65534
"""A user that is not root."""
AS_OTHER = ("setpriv", "--reuid", str(OTHER), "--regid", str(OTHER), "--clear-groups")
"""Command prefix that runs a command as that user."""

KILL = """
import sys, trio
from backend.process.exits import ExitWatch
from backend.process.identity import identify

async def main():
    watch, process = ExitWatch(lambda process: None), identify(int(sys.argv[1]))
    await watch.watch(process)
    watch.signal(process, 9)

trio.run(main)
"""
"""Program that kills a process as the daemon does."""

CHECK = """
from pathlib import Path
from ggroupfs.daemon import mount
from ggroupfs.daemon.options import MountOptions

mount._check(MountOptions(Path("/tree")))
"""
"""Program that checks its own rights as a daemon does at its start."""


# The right to kill


def test_the_capabilities_of_the_service_let_it_kill_a_process_of_another_user(spawn: Spawn) -> None:
    """The packaged unit's capabilities are enough, not only root's full set."""
    lines = [
        line.partition("=")[2]
        for line in (ROOT / "systemd" / "ggroupfs.service").read_text(encoding="utf-8").splitlines()
        if line.startswith("CapabilityBoundingSet=")
    ]
    granted = [f"+{word.removeprefix('CAP_').lower()}" for line in lines for word in line.split()]
    victim = spawn(*AS_OTHER, "sleep", "600")
    eventually(lambda: procfs.command(victim.pid) == "sleep", "it runs as the other user")
    words = ["setpriv", "--bounding-set", ",".join(["-all", *granted]), sys.executable, "-c", KILL, str(victim.pid)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert victim.wait(60) == -9


@pytest.mark.parametrize(("change", "told"), [("-kill", 1), ("+kill", 0)])
def test_a_daemon_that_may_not_kill_says_so(change: str, told: int) -> None:
    """After an upgrade at run time, the unit may grant only what the previous version needed."""
    words = ["setpriv", "--bounding-set", change, sys.executable, "-c", CHECK]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.count("no CAP_KILL: gmem.limit.max ends no process of another user") == told, done.stderr


# Spared processes


@pytest.fixture
def programs(public: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the programs of MPS: a shell as the control daemon, and a waiting program as the server. They
    have names of their own, since other tests look for the real names on this machine."""
    for name in ("CONTROL", "SERVER"):
        monkeypatch.setattr(victims, name, getattr(victims, name).replace("nvidia", "double"))
    for name, program in ((victims.CONTROL, "dash"), (victims.SERVER, "sleep")):
        shutil.copy(shutil.which(program) or "", public / name)
    return public


def why(pid: int) -> str | None:
    """Return why the daemon spares a process."""
    return trio.run(victims.spared, identify(pid))


def running(process: subprocess.Popen[bytes], program: Path) -> int:
    """Return the pid of a process once it runs a program."""
    eventually(lambda: os.readlink(f"/proc/{process.pid}/exe") == os.fspath(program), "it has begun")
    return process.pid


def child_of(pid: int, program: Path) -> int:
    """Return the pid of the only child of a process, once it runs a program."""

    def found() -> int:
        for child in procfs.content(f"/proc/{pid}/task/{pid}/children").split():
            if os.readlink(f"/proc/{int(child)}/exe") == os.fspath(program):
                return int(child)
        return 0

    eventually(lambda: found() > 0, "the child has begun")
    return found()


def test_a_server_that_roots_control_daemon_runs_for_a_user_is_spared(programs: Path, spawn: Spawn) -> None:
    """As with MPS: one server for each user, run by that user. The control daemon and root's servers are spared,
    too."""
    server, control = programs / victims.SERVER, programs / victims.CONTROL
    daemon = running(spawn(os.fspath(control), "-c", f"{' '.join(AS_OTHER)} {server} 600 & wait"), control)
    child = child_of(daemon, server)
    eventually(lambda: procfs.descent(child).uid == OTHER, "it is the user's")
    assert why(child) == "it is of MPS"
    assert why(daemon) == "it is of MPS"
    assert why(running(spawn(os.fspath(server), "600"), server)) == "it is of MPS"
    os.kill(child, 9)


def test_one_is_spared_whose_package_is_upgraded(programs: Path, spawn: Spawn) -> None:
    server = programs / victims.SERVER
    pid = running(spawn(os.fspath(server), "600"), server)
    server.unlink()
    assert why(pid) == "it is of MPS"


def test_none_is_spared_for_its_name(programs: Path, spawn: Spawn) -> None:
    """A user may run what NVIDIA has installed with a library of its own in it, and be its own control daemon."""
    server, control = programs / victims.SERVER, programs / victims.CONTROL
    alone = spawn(*AS_OTHER, os.fspath(server), "600")
    assert why(running(alone, server)) is None
    own = spawn(*AS_OTHER, os.fspath(control), "-c", f"{server} 600 & wait")
    daemon = running(own, control)
    assert why(daemon) is None
    child = child_of(daemon, server)
    assert why(child) is None
    os.kill(child, 9)


def test_root_of_a_container_is_not_spared_for_a_name(programs: Path, spawn: Spawn) -> None:
    """Without a user namespace it is user 0 here, too; its programs are in another mount namespace."""
    server = programs / victims.SERVER
    inside = spawn("unshare", "--mount", "--propagation", "private", os.fspath(server), "600")
    assert why(running(inside, server)) is None


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EAGAIN])
def test_one_of_root_that_cannot_be_looked_at_is_spared_for_now(
    code: int, programs: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a server; one of another user may not."""
    server = programs / victims.SERVER
    roots = running(spawn(os.fspath(server), "600"), server)
    users = running(spawn(*AS_OTHER, "sleep", "600"), Path(shutil.which("sleep") or "").resolve())

    async def fails(pid: int, function: Callable[[], bool]) -> bool:
        await trio.lowlevel.checkpoint()
        if pid == roots:
            raise OSError(code, os.strerror(code))
        return await looks.look(pid, function)

    monkeypatch.setattr(victims, "look", fails)
    assert why(roots) == "it may be of MPS"
    assert why(users) is None


def test_the_first_process_and_the_daemon_are_spared() -> None:
    assert why(1) == "it is process 1"
    assert why(os.getpid()) == "it is this daemon"
