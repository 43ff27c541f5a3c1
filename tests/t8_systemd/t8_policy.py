"""A policy as a service: ready when it is at work, able to do what it is for, and no more."""

from __future__ import annotations

import re

from tests.vm.guest import Guest

EXPOSURE = 1.5
"""What `systemd-analyze security` may say of it, of 10."""
JOB = """
from ggroupfs.client import Job
with Job(persistent=1, ephemeral=1, duration=1, name="one") as job:
    for _ in range(3):
        with job.iteration():
            print(open(f"/run/ggroup/self/0/compute.freeze").read())
"""


def test_lanes_as_a_service(guest: Guest) -> None:
    """It listens, takes a job in, freezes and thaws it; at the end its socket is gone."""
    guest.ok("mkdir -p /etc/ggroupfs/policies && echo 'order = \"srtf\"' >/etc/ggroupfs/policies/lanes.toml")
    guest.ok("systemctl start ggroupfs-policy@lanes")
    assert guest.ok("systemctl is-active ggroupfs-policy@lanes") == "active\n"
    guest.ok(f"cat >/tmp/job.py <<'EOF'\n{JOB}\nEOF")
    assert guest.ok("PYTHONPATH=/usr/lib/ggroupfs python3 /tmp/job.py").split() == ["0", "0", "0"]
    guest.until(
        "journalctl -q --no-pager -u ggroupfs-policy@lanes | grep -q 'finish.*\"iterations\": 3'", "it has seen the end"
    )
    guest.ok("systemctl stop ggroupfs-policy@lanes")
    assert guest.ok("systemctl show -P Result ggroupfs-policy@lanes") == "success\n"
    assert guest.run("test -e /run/ggroupfs/lanes.sock").code == 1


def test_a_policy_ends_and_begins_with_the_tree(guest: Guest) -> None:
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
