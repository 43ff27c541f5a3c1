"""The command: its subcommands, its options as mount(8) and fstab(5) spell them, its one-line errors and exit codes."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.door import tenants
from backend.ledgers.journal.file import default_path
from backend.process import procfs
from backend.process.identity import cgroup_of
from ggroupfs.commands.umount import unmount
from ggroupfs.daemon.mount import SOCKETS
from ggroupfs.fs.controls import LEVERS
from ggroupfs.mounts import mount_of
from tests.support.command import MIB, complaint, ggroupfs, ok
from tests.support.mounted import SECONDS, Mounted, Tenant, alive, eventually, mounted


def daemon_of(mount: Path) -> int:
    """Return the pid of the daemon that serves a tree."""
    return int(dict(line.split(" ", 1) for line in (mount / "ggroup.backend").read_text().splitlines())["pid"])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A mountpoint that is free again after the test, whatever was mounted there and whichever daemon died."""
    yield tmp_path
    while mount_of(os.fspath(tmp_path)) is not None:
        unmount(tmp_path)
    for left in (default_path, tenants.default_path):
        left(SOCKETS, os.fspath(tmp_path)).unlink(missing_ok=True)


# mount and umount


def test_mount_returns_when_the_tree_answers_and_umount_when_it_is_gone(place: Path) -> None:
    """The daemon runs in the background, without a terminal; after umount every tenant is let go and it has ended."""
    assert ok("mount", "--gpu", "soft", place) == ""
    daemon = daemon_of(place)
    assert os.getsid(daemon) != os.getsid(0)
    assert {os.readlink(f"/proc/{daemon}/fd/{stream}") for stream in (0, 1, 2)} == {"/dev/null"}
    assert os.readlink(f"/proc/{daemon}/cwd") == "/"
    assert mount_of(os.fspath(place)) == (
        f"{os.major(place.stat().st_dev)}:{os.minor(place.stat().st_dev)}",
        "fuse.ggroupfs",
    )
    mount = Mounted(place, None, [])  # type: ignore[arg-type] - its standard error is not read
    with Tenant(mount, "--gmem", "16M", "--report", "0.05") as tenant:
        tenant.write("compute.freeze", 1)
        assert ok("umount", place) == ""
        assert mount_of(os.fspath(place)) is None
        assert not alive(daemon)
    assert os.listdir(place) == []


def test_mount_by_a_relative_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.parent)
    ok("mount", "--gpu", "soft", place.name)
    assert (place / "ggroup.backend").exists()
    ok("umount", place.name)
    assert mount_of(os.fspath(place)) is None


def test_mount_on_a_path_with_blanks_and_umlauts(place: Path) -> None:
    odd = place / "a b\tü\\"
    odd.mkdir()
    ok("mount", "--gpu", "soft", odd)
    try:
        assert mount_of(os.fspath(odd)) is not None
        assert "already" in complaint("mount", "--gpu", "soft", odd, code=1)
    finally:
        ok("umount", odd)


def test_umount_of_a_dead_daemons_mount(place: Path) -> None:
    ok("mount", "--gpu", "soft", place)
    daemon = daemon_of(place)
    os.kill(daemon, 9)
    eventually(lambda: not alive(daemon), "it is dead")
    ok("umount", place)
    assert mount_of(os.fspath(place)) is None


def test_mount_after_a_dead_daemon(place: Path) -> None:
    """The kernel's cache still answers stat(2) for the dead tree: the new mount takes its place."""
    ok("mount", "--gpu", "soft", place)
    daemon = daemon_of(place)
    place.stat()
    os.kill(daemon, 9)
    eventually(lambda: not alive(daemon), "it is dead")
    result = ggroupfs("mount", "--gpu", "soft", place)
    assert result.returncode == 0, result
    assert "Traceback" not in result.stderr
    assert daemon_of(place) != daemon
    ok("umount", place)
    assert mount_of(os.fspath(place)) is None


FSTAB = (
    "rw,nosuid,dev,relatime,nofail,noauto,x-systemd.automount,x-systemd.idle-timeout=60,_netdev,soft.gmem=64M,gpu=soft"
)


def test_the_invocation_of_mount_8(place: Path) -> None:
    """`PROGRAM SOURCE MOUNTPOINT -o LIST`, which is how mount.fuse3 calls its helper."""
    ok("none", place, "-o", "rw,nosuid,dev,relatime,gpu=soft")
    ok("umount", place)
    ok("none", place, "-o", FSTAB)
    assert (place / "gpus/0/gmem.capacity").read_text() == f"{64 * MIB}\n"


ANY_FILESYSTEM = (
    "lazytime,nolazytime,dirsync,silent,loud,diratime,nodiratime,strictatime,nostrictatime,norelatime,"
    "iversion,noiversion",
    "mand,nomand,user=somebody,nouser,users,owner,group,_rnetdev,comment=of the admin,X-mount.mkdir=0755",
)
"""Options that mount(8) has for every filesystem, and in some versions passes on."""

HELPER = "import sys; from ggroupfs.cli import main; sys.argv[0] = '/sbin/mount.fuse.ggroupfs'; sys.exit(main())"


def test_the_invocation_of_mount_8_of_our_own_helper(place: Path) -> None:
    """`mount.fuse.ggroupfs SOURCE MOUNTPOINT [-sfnv] -o LIST [-t TYPE.SUBTYPE]`; with ``-f`` nothing is mounted."""

    def helper(*words: str) -> tuple[int, str]:
        list_ = ",".join((FSTAB, *ANY_FILESYSTEM))
        command = [sys.executable, "-c", HELPER, "none", os.fspath(place), *words, "-o", list_, "-t", "fuse.ggroupfs"]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stderr

    assert helper("-f", "-v") == (0, "")
    assert mount_of(os.fspath(place)) is None
    assert helper("-f", "-o", "nonsense") == (2, "ggroupfs: unknown option nonsense\n")
    assert helper("-s", "-n", "-v") == (0, "")
    assert (place / "gpus/0/gmem.capacity").read_text() == f"{64 * MIB}\n"
    ok("umount", place)


MOUNT = """
set -e
mount -t tmpfs none /usr/local/sbin
cp "$1" /usr/local/sbin/ggroupfs
mount -v -t fuse.ggroupfs none "$2" -o "$3" >/dev/null
grep " $2 " /proc/mounts | cut -d " " -f 3
cat "$2/gpus/0/gmem.capacity"
sed -n "s/^pid //p" "$2/ggroup.backend"
umount "$2"
! grep " $2 " /proc/mounts
"""
"""Script for a mount namespace of its own, since mount(8) looks for helpers only in the system's directories."""


@pytest.mark.parametrize("options", ["soft.gmem=64M,gpu=soft", ",".join((FSTAB, *ANY_FILESYSTEM))])
def test_mount_8(place: Path, tmp_path_factory: pytest.TempPathFactory, options: str) -> None:
    """mount(8) finds `ggroupfs`, /proc/mounts says fuse.ggroupfs, and umount(8) ends the daemon."""
    wrapper = tmp_path_factory.mktemp("bin") / "ggroupfs"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ggroupfs "$@"\n')
    wrapper.chmod(0o755)
    words = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", wrapper, place, options]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    kind, capacity, daemon = result.stdout.split()
    assert (kind, int(capacity)) == ("fuse.ggroupfs", 64 * MIB)
    eventually(lambda: not alive(int(daemon)), "the daemon ends")


def test_nopoll(place: Path) -> None:
    """Every file is always ready, as without poll support; everything else works."""
    with mounted(place, "nopoll") as mount, open(mount / "gpus/0/gmem.current") as file:
        poller = select.poll()
        poller.register(file, select.POLLIN | select.POLLPRI)
        assert poller.poll(1000) == [(file.fileno(), select.POLLIN)]
        assert file.read() == "0\n"


def test_read_only(place: Path) -> None:
    """With `ro` the tree shows everything and changes nothing; the errno is the kernel's EROFS."""
    with mounted(place, "ro") as mount, Tenant(mount, "--gmem", "16M", "--report", "0.05") as tenant:
        assert tenant.number("gmem.current") == 16 * MIB
        for name in ("gmem.limit.high", "compute.freeze"):
            with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
                tenant.write(name, 0)
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            (mount / "slice/job").mkdir()
        tenant.stop()


def test_several_gpus(place: Path) -> None:
    with mounted(place, "soft.gpus=3", "soft.gmem=1G,soft.switch=0") as mount:
        assert {name for name in os.listdir(mount / "gpus") if name.isdigit()} == {"0", "1", "2"}
        with Tenant(mount, "--gmem", "16M", "--gpu", "2", "--report", "0.05") as tenant:
            assert os.listdir(mount / tenant.pid) == ["2"]


# What is wrong with the command line


@pytest.mark.parametrize(
    "option",
    [
        *("nonsense", "nonsense=1", "gpu", "poll=1", "soft.gmem", "soft.gmem=", "soft.gmem=big", "soft.gmem=-1"),
        *("soft.gmem=max", "soft.gmem=1.5G", "soft.gmem=0", "soft.gpus=0", "soft.gpus=17", "soft.gpus=one"),
        *("soft.switch=-1", "soft.switch=fast", "deadline=", "deadline=soon", "deadline=-1", "deadline=0"),
        *("deadline=nan", "deadline=inf", "gpu=amd", "gpu=", "ledger=paper", "socket="),
        *("scheduler", "scheduler=yes", "units=maybe", "units", "slices.d=", "bus="),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(place: Path, option: str) -> None:
    line = complaint("mount", "--gpu", "soft", "-o", option, place, code=2)
    assert option.partition("=")[0] in line
    assert mount_of(os.fspath(place)) is None


@pytest.mark.parametrize(
    "words",
    ["", "nonsense", "mount --nonsense", "mount --gpu amd", "tenant --gmem big", "show -x"],
)
def test_a_bad_command_line_has_exit_code_2(words: str) -> None:
    result = ggroupfs(*words.split())
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "ggroupfs" in result.stderr


def test_three_places_are_too_many(place: Path) -> None:
    assert complaint("mount", "a", "b", place, code=2)


def test_a_place_that_is_not_there(place: Path) -> None:
    assert "does not exist" in complaint("mount", "--gpu", "soft", place / "nowhere", code=1)
    (place / "file").touch()
    assert "not a directory" in complaint("mount", "--gpu", "soft", place / "file", code=1)


def test_a_place_that_is_taken(place: Path) -> None:
    """A second mount changes nothing for the daemon that is there first."""
    with mounted(place) as mount:
        assert "mounted already" in complaint("mount", "--gpu", "soft", place, code=1)
        assert "mounted already" in complaint("mount", "-f", "--gpu", "soft", place, code=1)
        assert mount.daemon.poll() is None
        assert (mount / "ggroup.backend").exists()


def test_only_root_may(place: Path) -> None:
    place.chmod(0o777)
    assert "root" in complaint("mount", "--gpu", "soft", place, code=1, user=65534)
    assert "root" in complaint("mount", "-f", "--gpu", "soft", place, code=1, user=65534)


def test_no_nvidia_gpu(place: Path) -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is one here")
    assert "GPU" in complaint("mount", "--gpu", "nvidia", place, code=1)
    assert "GPU" in complaint("mount", "-o", "gpu=nvidia", place, code=1)
    assert mount_of(os.fspath(place)) is None


@pytest.mark.parametrize("command", ["umount", "show --mount", "tenant --mount"])
def test_no_tree_there(place: Path, command: str) -> None:
    complaint(*command.split(), place, code=1)
    complaint(*command.split(), place / "nowhere", code=1)


# Looking


def test_show(mount: Mounted) -> None:
    """A table for people and a list of objects for programs have the same facts."""
    with Tenant(mount, "--gmem", "64M", "--report", "0.05") as tenant:
        tenant.write("gmem.limit.high", "32M")
        tenant.write("compute.timeslice", "4.5")
        tenant.write("compute.freeze", 1)
        lines = ok("show", "--mount", mount.path).splitlines()
        assert lines[0].split() == [
            *("PID", "GPU", "COMMAND", "SLICE", "CURRENT", "HIGH", "SWAP", "TIMESLICE", "FROZEN", "OFF", "FINISHED")
        ]
        (row,) = [line.split() for line in lines[1:] if line.split()[0] == str(tenant.pid)]
        assert row[4:] == ["32.0M", "32.0M", "32.0M", "4.5", "ms", "frozen", "freeze", row[-1]]
        (found,) = [one for one in json.loads(ok("show", "--json", "--mount", mount.path)) if one["pid"] == tenant.pid]
        assert found == {
            "pid": tenant.pid,
            "gpu": 0,
            "command": Path(f"/proc/{tenant.pid}/comm").read_text().strip(),
            "slice": cgroup_of(tenant.pid).path,
            "current": 32 * MIB,
            "high": 32 * MIB,
            "swap": 32 * MIB,
            "timeslice": 4.5,
            "frozen": True,
            "off": {"freeze": 1, "turn": 0, "quota": 0, "busy": 0, "gang": 0, "migration": 0, "gr": 0},
            "finished": int(row[-1]),
        }
        tenant.write("compute.freeze", 0)
        tenant.write("gmem.limit.high", "max")
        (found,) = [one for one in json.loads(ok("show", "--json", "--mount", mount.path)) if one["pid"] == tenant.pid]
        assert (found["high"], found["frozen"]) == (None, False)


def test_show_of_nobody(place: Path) -> None:
    with mounted(place):
        assert ok("show", "--mount", place).splitlines()[1:] == []
        assert json.loads(ok("show", "--json", "--mount", place)) == []


def test_show_into_a_pipe_that_nobody_reads(mount: Mounted) -> None:
    words = [sys.executable, "-m", "ggroupfs", "show", "--mount", mount.path]
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_the_kernels_books_need_the_kernel_module(place: Path) -> None:
    if os.path.exists("/dev/ggroup"):
        ok("mount", "--gpu", "soft", "--ledger", "kmod", place)
        assert "ledger kernel\n" in (place / "ggroup.backend").read_text()
        ok("umount", place)
    else:
        text = "mount: there is no /dev/ggroup: load the kernel module ggroup"
        assert text in complaint("mount", "--gpu", "soft", "--ledger", "kmod", place, code=1)


def test_software_gpus_have_the_name_of_their_mount(place: Path) -> None:
    """Other mounts have other names, the same mountpoint has the same again: so its books are found."""
    found = []
    for options in ("soft.gpus=2", "soft.gpus=3"):
        ok("mount", "--gpu", "soft", "-o", options, place)
        found.append([(place / f"gpus/{index}/uuid").read_text() for index in (0, 1)])
        ok("umount", place)
    assert found[0] == found[1]
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\n", uuid) for uuid in found[0])
    assert len(set(found[0])) == 2


def test_doctor() -> None:
    """What this machine can enforce, the same in text and JSON; exit code 0 where a tree can be mounted."""
    lines = [line for line in ok("doctor").splitlines() if not line.startswith("/tmp/")]
    findings = json.loads(ok("doctor", "--json"))
    findings = [one for one in findings if not one["subject"].startswith("/tmp/")]  # other tests' trees come and go
    assert {frozenset(finding) for finding in findings} == {frozenset(("subject", "verdict", "why"))}
    assert [line.split()[0] for line in lines] == [finding["subject"].split()[0] for finding in findings]
    verdicts = {"ok", "missing", "enforced", "advisory", "unsupported"}
    assert {finding["verdict"] for finding in findings} <= verdicts
    subjects = {finding["subject"]: finding["verdict"] for finding in findings}
    assert (subjects["root"], subjects["/dev/fuse"]) == ("ok", "ok")
    assert all(finding["why"] for finding in findings)


def test_doctor_of_a_process(mount: Mounted) -> None:
    """What the daemon knows of the process on each GPU, as text and as JSON, as in its file."""
    with Tenant(mount, "--gmem", "64M") as tenant:
        tenant.write("gmem.limit.high", "32M")
        tenant.write("compute.freeze", 1)
        os.kill(tenant.pid, signal.SIGSTOP)
        file = (tenant.group / "gcgroup.record").read_text().splitlines()
        (found,) = json.loads(ok("doctor", "--json", tenant.pid, "--mount", mount.path))
        found = {name: value for name, value in found.items() if not name.startswith("taken.")}  # saved every 5 s
        assert [f"{name} {value}" for name, value in found.items()] == [one for one in file if one[:6] != "taken."]
        assert found["process"] == str(tenant.pid)
        assert (found["asked.gmem.limit.high"], found["current"]) == (str(32 * MIB), str(32 * MIB))
        assert found["off"] == found["compute.wanted.off"] == found["compute.applied.off"] == "freeze"
        text = ok("doctor", tenant.pid, "--mount", mount.path).splitlines()
        told = [line.split(maxsplit=1) for line in text if not line.startswith("taken.")]
        assert told == [[*pair] for pair in found.items()]
        assert len({len(re.findall(r"^\S+ +", line)[0]) for line in text}) == 1, "aligned"
        refused = ggroupfs("doctor", tenant.pid, "--mount", mount.path, user=65534)
        assert (refused.returncode, "Permission denied" in refused.stderr) == (1, True)
        complaint("doctor", "--thaw-all", tenant.pid, code=2)
        os.kill(tenant.pid, signal.SIGCONT)
    complaint("doctor", tenant.pid, "--mount", mount.path, code=1)
    complaint("doctor", os.getpid(), "--mount", "/nowhere", code=1)


def test_doctor_without_rights() -> None:
    """It needs none to report what is missing, also by its exit code."""
    result = ggroupfs("doctor", "--json", user=65534)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert {f["subject"]: f["verdict"] for f in json.loads(result.stdout)}["root"] == "missing"


def test_capabilities_are_those_of_the_levers(mount: Mounted) -> None:
    pairs = [line.split() for line in (mount / "ggroup.capabilities").read_text().splitlines()]
    assert [name for name, _ in pairs] == list(LEVERS)


# Tenants


def test_tenant(mount: Mounted) -> None:
    """One JSON line a report, the last one after everything was checked; exit code 0, and in time."""
    options = ("--gmem", "16M", "--kernel", "1ms", "--depth", "512", "--seconds", "2", "--report", "0.1")
    words = [sys.executable, "-m", "ggroupfs", "tenant", "--mount", os.fspath(mount.path), *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tenant:
        watch, ended = mount.watch(tenant.pid), os.WEXITED | os.WNOHANG | os.WNOWAIT
        eventually(lambda: os.waitid(os.P_PID, tenant.pid, ended), "it is done in its time", 10, watch)
        assert tenant.stdout is not None
        reports = [json.loads(line) for line in tenant.stdout]
    assert tenant.returncode == 0
    assert len(reports) >= 2
    for report in reports:
        assert list(report) == ["pid", "seconds", "launched", "finished", "pages", "checked", "corrupt"]
        assert (report["pages"], report["corrupt"]) == (8, 0)
    times = [report["seconds"] for report in reports]
    assert all(after - before >= 0.099 for before, after in itertools.pairwise([0, *times[:-2]])), "none comes early"
    assert times == sorted(times)
    assert reports[-1]["seconds"] >= 2
    assert reports[-1]["finished"] > 100
    assert reports[-1]["checked"] >= 8 * len(reports)
    eventually(lambda: not (mount / reports[0]["pid"]).exists(), "it leaves no directory")


def test_tenant_that_asks_for_too_much(place: Path) -> None:
    with mounted(place, "soft.gmem=64M"):
        assert "memory" in complaint("tenant", "--mount", place, "--gmem", "2G", code=1)
        assert "No such device" in complaint("tenant", "--mount", place, "--gpu", "7", code=1)


def test_tenants_whose_daemon_ends(place: Path) -> None:
    """Whatever they are doing, each reports it in one line and ends with exit code 1."""
    words = [sys.executable, "-m", "ggroupfs", "tenant", "--mount", place, "--gmem", "16M", "--report", "0"]
    tenants = []
    with mounted(place):
        for _ in range(6):
            tenant = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            tenants.append(tenant)
            assert tenant.stdout is not None
            assert tenant.stdout.readline()
    for tenant in tenants:
        _, errors = tenant.communicate(timeout=SECONDS)
        assert tenant.returncode == 1
        assert errors.startswith("ggroupfs: ")
        assert errors.count("\n") == 1, errors


def test_a_demo_leaves_other_programs_as_they_are(place: Path) -> None:
    """A tenant that was there first keeps its settings, and nothing of it is written, while the tour runs beside it."""
    with mounted(place) as mount, Tenant(mount, "--gmem", "16M", "--report", "0.05") as before:
        path = mount.group(before.pid)
        kept = {"gmem.limit.high": "32M", "compute.timeslice": "3"}
        for name, value in kept.items():
            (path / name).write_text(value)
        settings = {name: (path / name).read_text() for name in (*kept, "compute.freeze", "compute.weight")}
        text = ok("demo", "--mount", place)
        assert "the first one frozen" in text
        assert not [line for line in text.split("\n") if line.startswith("$ echo") and f"/{before.pid}/" in line]
        assert {name: (path / name).read_text() for name in settings} == settings


def test_a_demo_whose_tenant_ends_says_so(place: Path) -> None:
    """Its first tenant needs more memory than the GPU has, and says that itself, too."""
    with mounted(place, "soft.gmem=64M"):
        result = ggroupfs("demo", "--mount", place)
    assert result.returncode == 1
    assert "ggroupfs: demo: a tenant ended with exit code 1 before its first kernel\n" in result.stderr


def test_demo(place: Path) -> None:
    """Without a terminal it ends after the tour with exit code 0, and leaves no mount and no process."""
    text = ok("demo", "--gpu", "soft", "--mount", place)
    for words in ("gmem.limit.high", "echo 1 >", "1 ms against 4 ms", "the first one frozen", "kernels/s", "unmounted"):
        assert words in text
    assert mount_of(os.fspath(place)) is None
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # a process that has ended since
            if procfs.command(int(name)).startswith(("python", "ggroupfs")):
                assert os.fsencode(place) not in procfs.of_process(int(name), "cmdline")
