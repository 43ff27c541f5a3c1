"""Policies as services: ready once they work, able to do their task, and confined to it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from tests.container.guest import Guest
from tests.t8_systemd.units import MIB, SLICES, holding, until_holds

EXPOSURE = 1.5
"""The highest exposure that `systemd-analyze security` may report for a policy's unit."""
JOB = """
from ggroupfs.client import Job
with Job(persistent=1, ephemeral=1, duration=1, name="one") as job:
    for _ in range(3):
        with job.iteration():
            print(open(f"/run/ggroup/self/0/compute.freeze").read())
"""
SLO = """
interval = "500ms"
window = 2
cooldown = "1s"
[[group]]
name = "chat"
slice = "/serving.slice"
upper = "50ms"
lower = "20ms"
share = 0.5
[[best_effort]]
slice = "/batch.slice"
"""
REPORTS = """
import time
from ggroupfs.client import Latencies
latencies = Latencies()
while True:
    latencies.report(0.1)
    time.sleep(0.1)
"""
CHAT, BATCH = f"{SLICES}/gpu.slice/gpu-chat.slice/0", f"{SLICES}/gpu.slice/gpu-batch.slice/0"
MEMORY = """
high = "/gpu.slice/gpu-chat.slice"
low = "/gpu.slice/gpu-batch.slice"
within = "/gpu.slice"
headroom = "64M"
interval = "600s"
"""
"""With this interval the policy looks once, and later only when an event wakes it."""


@contextlib.contextmanager
def policy(guest: Guest, name: str, config: str) -> Iterator[None]:
    """Run a policy's unit. At the end the unit is stopped, with no restart and no failure."""
    unit = f"ggroupfs-policy@{name}"
    guest.write(f"/etc/ggroupfs/policies/{name}.toml", config)
    guest.ok(f"systemctl start {unit}")
    try:
        yield
        assert guest.ok(f"systemctl show -P NRestarts {unit}") == "0\n"
    finally:
        guest.ok(f"systemctl stop {unit}; rm /etc/ggroupfs/policies/{name}.toml")
    assert guest.ok(f"systemctl show -P Result {unit}") == "success\n"


def content(guest: Guest, *files: str) -> list[str]:
    """The words in these files."""
    return guest.ok(f"cat {' '.join(files)}").split()


def test_lanes_as_a_service(guest: Guest) -> None:
    """The policy accepts a job, freezes and thaws it; after the end its socket is gone."""
    guest.ok("mkdir -p /etc/ggroupfs/policies && echo 'order = \"srtf\"' >/etc/ggroupfs/policies/lanes.toml")
    guest.ok("systemctl start ggroupfs-policy@lanes")
    assert guest.ok("systemctl is-active ggroupfs-policy@lanes") == "active\n"
    guest.ok(f"cat >/tmp/job.py <<'EOF'\n{JOB}\nEOF")
    assert guest.ok("PYTHONPATH=/usr/lib/ggroupfs python3 /tmp/job.py").split() == ["0", "0", "0"]
    guest.until(
        "journalctl -q --no-pager -u ggroupfs-policy@lanes | grep -q 'finish.*\"iterations\": 3'", "it has seen the end"
    )
    guest.ok("systemctl stop ggroupfs-policy@lanes; rm /etc/ggroupfs/policies/lanes.toml")
    assert guest.ok("systemctl show -P Result ggroupfs-policy@lanes") == "success\n"
    assert guest.run("test -e /run/ggroupfs/lanes.sock").code == 1


def test_slo_as_a_service(guest: Guest) -> None:
    """The reports come from a process of another user, known to the policy by its cgroup: that slice's share rises."""
    guest.write("/tmp/reports.py", REPORTS)
    places = [f"{SLICES}/{name}.slice/0" for name in ("serving", "batch")]
    weights = [f"{place}/compute.weight" for place in places]
    with (
        holding(guest, "chat", 16 * MIB, slice_="serving.slice"),
        holding(guest, "train", 16 * MIB, slice_="batch.slice"),
    ):
        for place in places:
            until_holds(guest, place, 16 * MIB)
        with policy(guest, "slo", SLO):
            assert content(guest, *weights) == ["5000", "5000"]
            guest.ok(
                "systemd-run -q --unit=reports --slice=serving.slice -p User=nobody -E PYTHONPATH=/usr/lib/ggroupfs"
                " python3 /tmp/reports.py"
            )
            guest.until(f"test $(cat {weights[0]}) -ge 7000", "it has more")
            guest.until(f"test $(cat {weights[1]}) -le 3000", "the other has what is left")
            guest.ok("systemctl stop reports")
            said = guest.ok("journalctl -q --no-pager -u ggroupfs-policy@slo")
            assert '"latency_ms": 100.0' in said
            assert "dropped" not in said
        assert content(guest, *weights) == ["100", "100"]
    assert guest.run("test -e /run/ggroupfs/slo.sock").code == 1


@pytest.mark.parametrize("name", ["dynamic", "cooperative"])
def test_memory_policies_as_services(guest: Guest, name: str) -> None:
    """The policy sets a limit, adapts it after an event of the slice above, and takes everything back at the end."""
    with (
        holding(guest, "chat", 64 * MIB, slice_="gpu-chat.slice"),
        holding(guest, "train", 256 * MIB, slice_="gpu-batch.slice"),
    ):
        until_holds(guest, CHAT, 64 * MIB)
        until_holds(guest, BATCH, 256 * MIB)
        guest.ok(f"echo 512M >{SLICES}/gpu.slice/0/gmem.limit.high")
        files = f"{BATCH}/gmem.limit.high", f"{CHAT}/gmem.limit.low"
        with policy(guest, name, MEMORY):
            until_holds(guest, BATCH, 384 * MIB, "gmem.limit.high")
            assert content(guest, *files) == [f"{384 * MIB}", "max"]
            with holding(guest, "more", 256 * MIB, slice_="gpu-chat.slice"):
                guest.until(f"test $(cat {files[0]}) -le {192 * MIB}", "it was woken")
                guest.until(f"test $(cat {BATCH}/gmem.current) -le {192 * MIB}", "the other gave")
        assert content(guest, *files) == ["max", "0"]
        guest.ok(f"echo max >{SLICES}/gpu.slice/0/gmem.limit.high")


def test_a_policy_ends_and_begins_with_the_tree(guest: Guest) -> None:
    guest.ok("mkdir -p /etc/ggroupfs/policies && echo 'order = \"srtf\"' >/etc/ggroupfs/policies/lanes.toml")
    guest.ok("systemctl start ggroupfs-policy@lanes")
    before = guest.ok("systemctl show -P MainPID ggroupfs-policy@lanes")
    guest.ok("systemctl restart ggroupfs")
    guest.until("systemctl is-active ggroupfs-policy@lanes", "it is there again")
    assert guest.ok("systemctl show -P MainPID ggroupfs-policy@lanes") != before
    guest.ok("systemctl stop ggroupfs-policy@lanes; rm /etc/ggroupfs/policies/lanes.toml")


def test_how_exposed_it_is(guest: Guest) -> None:
    words = guest.ok("systemd-analyze security --no-pager ggroupfs-policy@lanes.service").splitlines()[-1]
    found = re.search(r"Overall exposure level for ggroupfs-policy@lanes.service: (\d+\.\d)", words)
    assert found is not None, words
    assert float(found[1]) <= EXPOSURE
