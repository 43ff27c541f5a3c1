"""What fails, at which point, and with which message. No node goes down because of it (`Cluster.check`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.t8_slurm.cluster import LINE, Cluster


@contextlib.contextmanager
def no_daemon(cluster: Cluster) -> Iterator[None]:
    """Stop the daemon for a while, so that the tree is not mounted."""
    cluster.guest.ok("systemctl stop ggroupfs")
    try:
        yield
    finally:
        cluster.guest.ok("systemctl start ggroupfs")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--gpu-mem=lots", "--gpu-mem=lots: not a size: bytes, or with K, M, G, T or P, a percentage, or infinity"),
        ("--gpu-mem=101%", "--gpu-mem=101%: more than 100 %"),
        ("--gpu-mem-low=-1", "--gpu-mem-low=-1: not a size"),
        ("--gpu-weight=0", "--gpu-weight=0: not a number from 1 to 10000"),
        ("--gpu-priority=16", "--gpu-priority=16: not a number from 0 to 15"),
        ("--gpu-quota=50", "--gpu-quota=50: not a percentage, or one and a time span, or infinity"),
        ("--gpu-quota='50% 2s'", "--gpu-quota=50% 2s: a period that is not from 10 to 1000 ms"),
        ("--gpu-mem-max=8X", "--gpu-mem-max=8X: not a size"),
    ],
)
def test_a_bad_value_is_refused_where_it_is_submitted(cluster: Cluster, option: str, reason: str) -> None:
    jobs = cluster.guest.ok("squeue --noheader --states=all --format %i")
    for command in (f"sbatch {option} --wrap true", f"srun {option} true", f"salloc {option} true"):
        done = cluster.as_user(command)
        assert done.code != 0, command
        assert reason in done.err, command
    assert cluster.guest.ok("squeue --noheader --states=all --format %i") == jobs


def test_a_bound_is_refused_where_it_is_submitted(cluster: Cluster) -> None:
    cluster.configure(f"{LINE} gpu-weight<=400")
    done = cluster.try_submit("--gpu-weight=401", "true")
    assert done.code != 0
    assert "--gpu-weight: this cluster allows gpu-weight<=400" in done.err
    assert cluster.run("--gpu-weight=400", "true")[0] == "COMPLETED"


def test_what_only_the_node_knows_fails_the_job(cluster: Cluster) -> None:
    """A bound for one partition, and a bound in percent, are known only on the node."""
    cluster.configure(f"{LINE} small:gpu-mem<=25%")
    state, said = cluster.run("-p small --gpu-mem=512M", "echo it ran")
    assert state == "FAILED"
    assert "ggroup: --gpu-mem: this cluster allows small:gpu-mem<=25%" in said
    assert "it ran" not in said
    assert cluster.run("-p small --gpu-mem=256M", "true")[0] == "COMPLETED"


@pytest.mark.parametrize("words", ["--gpu-mem=1M", "--gres=shard:1"])
def test_without_the_daemon_a_job_fails(cluster: Cluster, words: str) -> None:
    with no_daemon(cluster):
        state, said = cluster.run(words, "echo it ran")
        assert state == "FAILED"
        assert "ggroup: no limit holds: /run/ggroup: nothing is mounted there" in said
        assert "it ran" not in said
        assert cluster.run("", "echo it ran") == ("COMPLETED", "it ran\n"), "a job that asks for nothing runs"
        done = cluster.as_user(f"srun --chdir=/tmp {words} echo it ran")
        assert done.code != 0
        assert "no limit holds" in done.err
    assert cluster.run(words, "true")[0] == "COMPLETED"


def test_without_the_daemon_a_job_runs_where_the_line_says_so(cluster: Cluster) -> None:
    cluster.configure(f"{LINE} without=run")
    with no_daemon(cluster):
        assert cluster.run("--gpu-mem=1M", "echo it ran") == ("COMPLETED", "it ran\n")


def test_a_line_that_cannot_be_understood_fails_jobs_and_drains_nothing(cluster: Cluster) -> None:
    cluster.configure(f"{LINE} gpu-mem=lots")
    done = cluster.try_submit("--gpu-mem=1M", "true")
    assert done.code != 0
    assert "plugstack.conf: gpu-mem=lots: not a size" in done.err
    job = cluster.submit("--gres=shard:1", "echo it ran")
    assert cluster.until_ended(job) == "FAILED"
    assert "plugstack.conf: gpu-mem=lots: not a size" in cluster.output(job)
    cluster.configure(LINE)
    assert cluster.run("--gres=shard:1", "true")[0] == "COMPLETED"
