"""Files that configure slices, on a real mount with real cgroups; and `ggroupfs run` with a double of systemd."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.fake_systemd import FakeSystemd, Unit, bus, open_systemd
from tests.support.mounted import SECONDS, Mounted, Tenant, eventually, mounted, mountpoint

MIB = 1 << 20


@pytest.fixture
def slices_d(tmp_path: Path) -> Path:
    path = tmp_path / "slices.d"
    path.mkdir()
    return path


@pytest.fixture
def place() -> Iterator[Path]:
    with mountpoint() as path:
        yield path


def tenant_in(mount: Mounted, path: Path) -> subprocess.Popen[str]:
    """Start a program that is in a cgroup from the start, and takes 64 MiB."""
    words = [sys.executable, "-m", "ggroupfs", "tenant", "--mount", os.fspath(mount.path), "--gmem", "64M"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: enter(os.getpid(), path))


def numbers(path: Path, *names: str) -> list[int]:
    return [int((path / name).read_text()) for name in names]


def facts(mount: Mounted) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in (mount / "ggroup.backend").read_text().splitlines())


def test_a_tenant_is_limited_before_its_first_allocation_is_done(place: Path, slices_d: Path) -> None:
    with cgroup() as path:
        (path / "job").mkdir()
        (slices_d / "a.conf").write_text(
            f"[/{slice_path(path)}]\nGMemHigh=32M\n[/{slice_path(path)}/*]\nGMemHigh=16M\nComputeTimeSlice=500us\n"
        )
        with mounted(place, f"slices.d={slices_d}") as mount:
            assert facts(mount)["units"] == "slices.d"
            with tenant_in(mount, path / "job") as tenant:
                try:
                    assert tenant.stdout is not None
                    assert '"corrupt": 0' in tenant.stdout.readline()
                    here = mount / "slice" / slice_path(path / "job") / "0"
                    assert numbers(here, "gmem.limit.high", "gmem.current") == [16 * MIB, 16 * MIB]
                    assert (here / "compute.timeslice").read_text() == "0.5\n"
                    (peak,) = numbers(here, "gmem.peak")
                    assert peak <= 18 * MIB, "one page over it at most, from the first byte on"
                    assert numbers(here.parent.parent / "0", "gmem.limit.high") == [32 * MIB]
                    assert facts(mount)["units.configured"] == "2"
                finally:
                    tenant.kill()
            eventually(lambda: not (mount / "slice" / slice_path(path)).exists(), "files keep no slice")
            mount.check()


def test_a_tenant_that_is_moved_is_limited_soon(place: Path, slices_d: Path) -> None:
    with cgroup() as path:
        (slices_d / "a.conf").write_text(f"[/{slice_path(path)}]\nGMemHigh=16M\n")
        with mounted(place, f"slices.d={slices_d}", "units=auto") as mount, Tenant(mount, "--gmem", "64M") as tenant:
            assert tenant.number("gmem.current") == 64 * MIB
            enter(tenant.pid, path)
            eventually(lambda: tenant.number("gmem.current") == 16 * MIB, "it is limited")


def test_hangup_has_the_files_read_again(place: Path, slices_d: Path) -> None:
    with cgroup() as path:
        section = f"[/{slice_path(path)}]\n"
        (slices_d / "a.conf").write_text(f"{section}GMemHigh=32M\n")
        with mounted(place, f"slices.d={slices_d}", "units=auto") as mount, Tenant(mount, "--gmem", "64M") as tenant:
            enter(tenant.pid, path)
            eventually(lambda: tenant.number("gmem.current") == 32 * MIB, "it is limited")
            here = mount / "slice" / slice_path(path) / "0"
            (here / "gmem.limit.high").write_text("8M\n")
            (slices_d / "a.conf").write_text(f"{section}GMemHigh=16M\nGMemLow=4M\n")
            mount.daemon.send_signal(signal.SIGHUP)
            eventually(lambda: numbers(here, "gmem.limit.high", "gmem.limit.low") == [16 * MIB, 4 * MIB], "they count")
            assert tenant.number("gmem.current") <= 16 * MIB


def test_a_hangup_without_files(place: Path) -> None:
    """It does nothing, and ends nothing."""
    with mounted(place, "units=no") as mount:
        mount.daemon.send_signal(signal.SIGHUP)
        assert facts(mount)["units"] == "no"


def test_without_jeepney_or_a_bus(place: Path, slices_d: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no systemd, without a message."""
    with mounted(place, f"bus=unix:path={tmp_path}/none", f"slices.d={slices_d}") as mount:
        assert facts(mount)["units"] == "slices.d"
    (tmp_path / "jeepney.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    with mounted(place, f"bus=unix:path={tmp_path}/none", f"slices.d={slices_d}") as mount:
        assert facts(mount)["units"] == "slices.d"


def test_none(place: Path, slices_d: Path) -> None:
    (slices_d / "a.conf").write_text("nonsense\n")
    with mounted(place, f"slices.d={slices_d}", "units=no") as mount:
        assert facts(mount)["units"] == "no"


def test_mistakes_are_in_the_log(place: Path, slices_d: Path) -> None:
    (slices_d / "a.conf").write_text("[/x]\nGMemHigh=much\n")
    with mounted(place, f"slices.d={slices_d}", expect_errors=["a.conf:2: GMemHigh=: not a size"]) as mount:
        eventually(lambda: mount.errors, "it is told")


# With a systemd that has units and no processes


class SystemdThread:
    """A :class:`FakeSystemd` that lives in a thread."""

    def __init__(self, address: str, units: dict[str, Unit]) -> None:
        self.systemd: FakeSystemd
        self._address = address
        self._units = units
        self._ready = threading.Event()
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(target=trio.run, args=(self._run,))

    async def _run(self) -> None:
        self.systemd = await open_systemd(self._address)
        self.systemd.units = self._units
        self._token = trio.lowlevel.current_trio_token()
        self._ready.set()
        with self._scope:
            async with self.systemd.connection:
                await self.systemd.serve()

    def __enter__(self) -> SystemdThread:
        self._thread.start()
        assert self._ready.wait(SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(SECONDS)

    def do(self, call: Any, *arguments: object) -> None:
        """Call a method of it in its thread."""
        trio.from_thread.run(call, *arguments, trio_token=self._token)


def test_units_of_systemd(place: Path, slices_d: Path, tmp_path: Path) -> None:
    """An active service is in the tree from the first moment on, a started one too, and both go with their units."""
    path = tmp_path / "x.service"
    path.write_text("[Service]\n[X-GGroup]\nGMemHigh=512M\nComputeTimeSlice=1ms\n")
    units = {"x.service": Unit([path], "/system.slice/x.service")}
    with (
        bus(tmp_path) as address,
        SystemdThread(address, units) as systemd,
        mounted(place, f"bus={address}", f"slices.d={slices_d}") as mount,
    ):
        assert facts(mount)["units"] == "systemd"
        here = mount / "slice/system.slice/x.service/0"
        assert numbers(here, "gmem.limit.high") == [512 * MIB]
        (here / "gmem.limit.high").write_text("1M")
        path.write_text("[X-GGroup]\nGMemHigh=256M\n")
        systemd.do(systemd.systemd.reload)
        eventually(lambda: numbers(here, "gmem.limit.high") == [256 * MIB], "it is read again")
        assert (here / "compute.timeslice").read_text() == "default\n"
        systemd.do(systemd.systemd.become, "x.service", "inactive")
        eventually(lambda: not (mount / "slice/system.slice").exists(), "it is gone")


@contextlib.contextmanager
def command(mount: Mounted, address: str, *words: str, under: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run `ggroupfs run` on a machine that systemd runs."""
    script = (
        "import sys, pathlib, ggroupfs.mounts; ggroupfs.mounts.SYSTEMD = pathlib.Path('/')\n"
        "from ggroupfs.cli import main; sys.exit(main())"
    )
    python = [sys.executable, "-c", script, "run", "--mount", os.fspath(mount.path)]
    with subprocess.Popen(
        [*under, *python, *words],
        env={**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def test_run_in_a_slice_is_a_scope_of_systemd(place: Path, tmp_path: Path) -> None:
    """The process is in the scope before it goes on, as with systemd-run."""
    with bus(tmp_path) as address, SystemdThread(address, {}) as systemd, cgroup("batch.slice") as path:
        asked: dict[str, Any] = {}

        def start(name: str, properties: dict[str, Any]) -> str:
            asked.update(properties, name=name)
            (path / name).mkdir()
            for pid in properties["PIDs"][1]:
                enter(pid, path / name)
            return "done"

        systemd.systemd.start = start
        with mounted(place, "units=no") as mount:
            words = ("--slice=batch.slice", "-p", "GMemHigh=8M", "--", "sh", "-c")
            script = f"grep ^0:: /proc/self/cgroup; cat {mount.path}/$$/0/gmem.limit.high"
            with command(mount, address, *words, script) as process:
                out, err = process.communicate(timeout=SECONDS)
            assert (err, process.returncode) == ("", 0)
            scope, high = out.split()
            assert scope == f"0::/{slice_path(path)}/{asked['name']}"
            assert high == str(8 * MIB)
            assert asked["PIDs"] == ("au", [process.pid])
            assert asked["Slice"] == ("s", "batch.slice")
            look = ("--slice=batch.slice", "--", "grep", "^0::", "/proc/self/cgroup")
            with command(mount, address, *look, under=["unshare", "--pid", "--fork", "--mount-proc"]) as process:
                out, err = process.communicate(timeout=SECONDS)
            assert (out, err) == (f"0::/{slice_path(path)}/{asked['name']}\n", ""), "by the pid that systemd knows"
            assert asked["PIDs"][1] != [1]
            systemd.systemd.start = lambda name, properties: "failed"
            with command(mount, address, "--slice=batch.slice", "--", "true") as process:
                _, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 1
            assert err.startswith("ggroupfs: run: --slice batch.slice: ggroupfs-run-")
            assert err.endswith(".scope: failed\n")
            systemd.systemd.start = lambda name, properties: "done"
            with command(mount, address, "--slice=batch.slice", "--", "true") as process:
                _, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 1
            assert err.endswith(".scope: this process is not in it\n")
            with command(mount, f"unix:path={tmp_path}/none", "--slice=batch.slice", "--", "true") as process:
                _, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 1
            assert "No such file or directory" in err
            assert err.count("\n") == 1
