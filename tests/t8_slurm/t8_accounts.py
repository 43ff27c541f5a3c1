"""A job's figures with slurmdbd, as sacct shows them: `make test-slurm-accounts`."""

from __future__ import annotations

import re

import pytest

from tests.t8_slurm.cluster import MIB, NODE, Cluster

SLURMDBD_CONF = f"""\
AuthType=auth/munge
DbdHost={NODE}
SlurmUser=slurm
StorageType=accounting_storage/mysql
StorageUser=slurm
StoragePass=test
StorageLoc=slurm_acct_db
LogFile=/var/log/slurm/slurmdbd.log
"""
ACCOUNTED = f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={NODE}
"""
"""Lines that are added to slurm.conf."""
STARTED_S = 120.0
"""Seconds that a service may take to answer."""


@pytest.fixture
def accounted(cluster: Cluster) -> Cluster:
    """The cluster with a database."""
    guest = cluster.guest
    guest.ok("systemctl start mariadb")
    for words in (
        "CREATE DATABASE slurm_acct_db",
        "GRANT ALL ON slurm_acct_db.* TO slurm@localhost IDENTIFIED BY 'test'",
    ):
        guest.ok(f'mariadb -e "{words}"')
    guest.write("/etc/slurm/slurmdbd.conf", SLURMDBD_CONF)
    guest.ok("chown slurm /etc/slurm/slurmdbd.conf && chmod 600 /etc/slurm/slurmdbd.conf")
    guest.write("/tmp/accounted", ACCOUNTED)
    guest.ok("cat /tmp/accounted >>/etc/slurm/slurm.conf && systemctl start slurmdbd")
    guest.until("sacctmgr -n show cluster", "slurmdbd answers", STARTED_S)
    guest.ok("systemctl restart slurmctld slurmd")
    guest.until("sacctmgr -nP show cluster format=cluster | grep -qx test", "the cluster is known", STARTED_S)
    guest.until("sinfo --noheader --partition main --format %T | grep -qx idle", "the node is idle", STARTED_S)
    return cluster


def test_sacct_has_the_figures(accounted: Cluster) -> None:
    tenant = "ggroupfs tenant --gmem 64M --kernel 2ms --seconds 1"
    job = accounted.submit("--gpu-mem=2G --gpu-weight=400", tenant)
    assert accounted.until_ended(job) == "COMPLETED", accounted.output(job)
    shown = f"sacct -nPX -j {job} -o State,AdminComment"
    said = accounted.guest.until(f"{shown} | grep ggroup/", "the figures are in the database", STARTED_S)
    print(said)
    found = re.fullmatch(rf"COMPLETED\|ggroup/{NODE}: gpu_seconds=(\d+\.\d{{3}}) gpu_mem_peak=(\d+)\n", said)
    assert found is not None, said
    assert float(found[1]) > 0.1
    assert int(found[2]) == 64 * MIB
