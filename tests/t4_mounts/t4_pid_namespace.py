"""Commands in another pid namespace than the daemon's, as in a container: no pid is taken for another process's."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from backend.door.client import pid_namespace
from ggroupfs.client import Tree, has_our_pids
from ggroupfs.text.names import is_number
from tests.support.cgroups import cgroup, enter
from tests.support.command import MIB
from tests.support.mounted import SECONDS, SLOW, Mounted, Tenant, eventually, mounted

G = f"{sys.executable} -m ggroupfs"
ELSEWHERE = "this is another pid namespace than that of the tree's daemon, and pids are other processes' there"


def inside(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a shell as process 1 of a pid namespace, with a /proc of its own."""
    words = ["unshare", "--pid", "--fork", "--kill-child", *(options or ["--mount-proc"]), "sh", "-c", script]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=6 * SECONDS * SLOW)


def bearing(pid: int, command: str) -> str:
    """Return a script that runs a command while a `sleep` there has that pid."""
    take = f"echo {pid - 1} >/proc/sys/kernel/ns_last_pid; sleep 600 & [ $! = {pid} ] && break; kill $!"
    return f"while :; do {take}; done\n{command}"


def test_run_limits_itself_and_no_process_of_that_number(mount: Mounted) -> None:
    program = f"read high <{mount.path}/self/0/gmem.limit.high; echo $$ $high; ls {mount.path}"
    done = inside(f"{G} run --mount {mount.path} -p gmem.limit.high=16M -- sh -c '{program}'")
    (line, *names) = done.stdout.splitlines()
    pid, high = line.split()
    assert high == str(16 * MIB), done
    (known,) = [name for name in names if is_number(name)]
    assert known != pid, "that is another process"


def test_tables_name_no_process_that_they_do_not_know(mount: Mounted) -> None:
    """Another process has that number there; the figures are those of the tree."""
    with Tenant(mount, "--gmem", "16M") as tenant:
        shown = inside(bearing(tenant.pid, f"{G} show --mount {mount.path} --json"))
        assert shown.stderr == f"ggroupfs: {ELSEWHERE}: names and slices of processes are not known\n"
        (row,) = json.loads(shown.stdout)
        assert (row["pid"], row["command"], row["slice"], row["current"]) == (tenant.pid, "?", "?", 16 * MIB)
        frame = inside(bearing(tenant.pid, f"{G} top --mount {mount.path} --json -d 0.1"))
        (row,) = json.loads(frame.stdout)["processes"]
        assert (row["pid"], row["command"], row["slice"]) == (tenant.pid, "?", "?")


def test_with_the_proc_of_the_host_names_are_known(mount: Mounted) -> None:
    """A container may have been given that /proc."""
    with cgroup("ggrouppidns.slice") as place, Tenant(mount, "--gmem", "16M") as tenant:
        enter(tenant.pid, place)
        shown = inside(f"{G} show --mount {mount.path} --json", "--mount")
        assert shown.stderr == ""
        (row,) = json.loads(shown.stdout)
        assert row["pid"] == tenant.pid
        assert row["command"].startswith("python")
        assert row["slice"].endswith("ggrouppidns.slice")
        metrics = inside(f"{G} metrics --mount {mount.path}", "--mount").stdout
        assert 'ggrouppidns.slice",' in metrics


def test_a_pid_on_the_command_line_is_refused_and_a_directory_is_not(mount: Mounted) -> None:
    with Tenant(mount) as tenant:
        setting = f"gmem.limit.high=32M --mount {mount.path}"
        refused = inside(bearing(tenant.pid, f"{G} set {tenant.pid} {setting}; echo $?"))
        assert (refused.stdout, refused.stderr) == (
            "1\n",
            f"ggroupfs: set: {tenant.pid}: name the directory in {mount.path}: {ELSEWHERE}\n",
        )
        assert (tenant.group / "gmem.limit.high").read_text() == "max\n"
        assert inside(f"{G} set {mount.path}/{tenant.pid} {setting}").returncode == 0
        assert tenant.number("gmem.limit.high") == 32 * MIB
        told = inside(bearing(tenant.pid, f"{G} doctor {tenant.pid} --mount {mount.path}; echo $?"))
        assert (told.stdout, told.stderr) == ("1\n", f"ggroupfs: doctor: {ELSEWHERE}\n")


def test_policies_do_not_begin_there(mount: Mounted, tmp_path: Path) -> None:
    """They find the processes of slices by pid."""
    (tmp_path / "empty").touch()
    done = inside(f"{G} policy dynamic --config {tmp_path}/empty --mount {mount.path}")
    assert (done.returncode, done.stderr) == (1, f"ggroupfs: policy: {ELSEWHERE}\n")


def test_which_numbers_are_ours(tmp_path: Path) -> None:
    """Numbers of a namespace in which this process has the pid of our /proc, by the kernel's name of the namespace."""
    ours, link, facts = str(os.getpid()), tmp_path / "self", tmp_path / "ggroup.backend"
    facts.write_text("ledger soft\n")
    assert not has_our_pids(tmp_path), "the daemon does not see us"
    link.symlink_to("1")
    assert not has_our_pids(tmp_path)
    link.unlink()
    link.symlink_to(ours)
    assert has_our_pids(tmp_path), "a daemon that does not say more"
    facts.write_text(f"ledger soft\npidns {pid_namespace()}\n")
    assert has_our_pids(tmp_path)
    facts.write_text(f"ledger soft\npidns {pid_namespace() + 1}\n")
    assert not has_our_pids(tmp_path), "the same number by chance"

    async def pids() -> None:
        (tmp_path / "slice/x/0").mkdir(parents=True)
        await Tree(tmp_path).slice("/x").pids()

    with pytest.raises(OSError, match="another pid namespace") as caught:
        trio.run(pids)
    assert caught.value.errno == errno.EOPNOTSUPP


def test_a_daemon_with_the_proc_of_another_namespace_does_not_begin(tmp_path: Path) -> None:
    """It would take the kernel's pids for other processes'."""
    done = inside(f"{G} mount -f --gpu soft {tmp_path}; echo $?", "--mount")
    assert (done.stdout, done.stderr) == (
        "1\n",
        "ggroupfs: mount: /proc is of another pid namespace: its numbers are other processes' here\n",
    )
    with mounted(tmp_path):
        pass


def test_in_a_container_with_the_tree_read_only(mount: Mounted) -> None:
    """A plain user there limits a program and its children by the environment, for which the socket is enough."""
    child = f"{G} tenant --mount {mount.path} --gmem 64M --report 3600"
    program = f"{child} & p=$!; {child} & q=$!; read line; kill $p $q; wait"
    script = f"""
mount --bind {mount.path} {mount.path} && mount -o remount,bind,ro {mount.path} || exit 9
GGROUP_GMEM_HIGH=48M setpriv --reuid=65534 --clear-groups {G} run --mount {mount.path} -- sh -c '{program}'
"""
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True) as process:
        try:
            (here,) = eventually(lambda: list((mount / "slice").rglob("family-65534-*")), "it is in a family")
            eventually(
                lambda: (here / "0/gmem.swap.current").read_text() == f"{80 * MIB}\n", "128 MiB are held together"
            )
            assert (here / "0/gmem.current").read_text() == f"{48 * MIB}\n"
            process.communicate("\n", timeout=SECONDS)
        finally:
            process.kill()
    eventually(lambda: not here.exists(), "it goes with the last of them")
