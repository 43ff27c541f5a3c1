"""Jobs with options, shards and defaults: their limits while they run, and the figures in their records afterwards."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from shlex import quote

import pytest

from tests.t8_slurm.cluster import CAPACITY, LINE, MIB, NODE, OURS, SCOPE, SHARDS, SLICES, Cluster

SETTINGS = "gmem.limit.high gmem.limit.low compute.priority compute.weight"
SHOW = f"cd {OURS} && cat {SETTINGS}"
PLAIN = ["max", "0", "8", "100"]
"""The settings of a slice for which nothing was asked."""
LIBRARY = "/usr/lib/ggroupfs/backend/cuda/libggroup-cuda.so"
FIGURES = rf"ggroup/{NODE}: gpu_seconds=(?P<seconds>\d+\.\d{{3}}) gpu_mem_peak=(?P<peak>\d+)"


def test_a_job_has_what_it_asks_for_and_its_figures_afterwards(cluster: Cluster) -> None:
    """The example at the beginning of the plugin's README."""
    tenant = "ggroupfs tenant --gmem 64M --kernel 2ms --seconds 1"
    job = cluster.submit("--gpu-mem=2G --gpu-weight=400", f"{SHOW} && {tenant}")
    assert cluster.until_ended(job) == "COMPLETED", cluster.output(job)
    assert cluster.output(job).splitlines()[:4] == [str(2 << 30), "0", "8", "400"]
    found = re.fullmatch(FIGURES, cluster.comment(job))
    assert found is not None, cluster.comment(job)
    assert float(found["seconds"]) > 0.1
    assert int(found["peak"]) == 64 * MIB


def test_every_option(cluster: Cluster) -> None:
    words = "--gpu-mem=50% --gpu-mem-low=16M --gpu-priority=3 --gpu-weight=7 --gpu-quota='30% 1s' --gpu-mem-max=75%"
    state, said = cluster.run(words, f"{SHOW} compute.max gmem.limit.max")
    assert state == "COMPLETED"
    assert said.splitlines() == [str(CAPACITY // 2), str(16 * MIB), "3", "7", "300000 1000000", str(CAPACITY * 3 // 4)]


def test_a_quota_holds(cluster: Cluster) -> None:
    """Compares the job's GPU time with the time that its program took, allowing one unfinished period."""
    job = cluster.submit("--gpu-quota=30%", "ggroupfs tenant --gmem 16M --kernel 2ms --seconds 2 --report 10")
    assert cluster.until_ended(job) == "COMPLETED", cluster.output(job)
    took = json.loads(cluster.output(job).splitlines()[-1])["seconds"]
    found = re.fullmatch(FIGURES, cluster.comment(job))
    assert found is not None, cluster.comment(job)
    assert 0 < float(found["seconds"]) <= 0.3 * took + 0.1


def test_options_in_the_script(cluster: Cluster) -> None:
    cluster.guest.write("/tmp/script", f"#!/bin/sh\n#SBATCH --gpu-mem=96M --chdir=/tmp --output=/tmp/%j.out\n{SHOW}\n")
    done = cluster.as_user("sbatch --parsable /tmp/script")
    assert done.code == 0, done
    assert cluster.until_ended(done.out.strip()) == "COMPLETED"
    assert cluster.output(done.out.strip()).split()[0] == str(96 * MIB)


def test_without_options_nothing_is_limited(cluster: Cluster) -> None:
    job = cluster.submit("", SHOW)
    assert cluster.until_ended(job) == "COMPLETED"
    assert cluster.output(job).split() == PLAIN
    assert cluster.comment(job) == "", "it used no GPU"


def test_shards_are_memory_and_share(cluster: Cluster) -> None:
    state, said = cluster.run("--gres=shard:1", SHOW)
    assert (state, said.split()) == ("COMPLETED", [str(CAPACITY // SHARDS), "0", "8", "100"])
    state, said = cluster.run("--gres=shard:3", SHOW)
    assert (state, said.split()) == ("COMPLETED", [str(CAPACITY * 3 // SHARDS), "0", "8", "300"])


def test_options_of_a_job_with_shards_ask_for_no_more_memory(cluster: Cluster) -> None:
    state, said = cluster.run("--gres=shard:2 --gpu-mem=1M --gpu-weight=5", SHOW)
    assert (state, said.split()) == ("COMPLETED", [str(MIB), "0", "8", "5"])
    state, said = cluster.run("--gres=shard:2 --gpu-mem=100% --gpu-mem-low=max", SHOW)
    both = str(CAPACITY * 2 // SHARDS)
    assert (state, said.split()) == ("COMPLETED", [both, both, "8", "200"])


def test_what_the_environment_says_of_shards_and_partitions_is_not_believed(cluster: Cluster) -> None:
    cluster.configure(f"{LINE} small:gpu-weight=9")
    forged = "env SLURM_SHARDS_ON_NODE=64 SLURM_JOB_PARTITION=main SLURM_JOB_GPUS="
    done = cluster.as_user(f"{forged} srun --chdir=/tmp -p small --gres=shard:1 sh -c {quote(SHOW)}")
    assert done.code == 0, done
    assert done.out.split() == [str(CAPACITY // SHARDS), "0", "8", "9"]


def test_defaults_of_a_partition(cluster: Cluster) -> None:
    """Such defaults are for jobs with a GPU, or with shards of one."""
    cluster.configure(f"{LINE} gpu-mem=50% small:gpu-mem=25% small:gpu-priority=12")
    quarter = str(CAPACITY // 4)
    assert cluster.run("-p small --gres=gpu:1", SHOW)[1].split() == [quarter, "0", "12", "100"]
    assert cluster.run("-p small --gres=gpu:1 --gpu-mem=1M", SHOW)[1].split() == [str(MIB), "0", "12", "100"]
    assert cluster.run("--gres=gpu:1", SHOW)[1].split() == [str(CAPACITY // 2), "0", "8", "100"]
    assert cluster.run("-p small", SHOW)[1].split() == PLAIN


def test_steps_are_limited_together_and_each(cluster: Cluster) -> None:
    """A step that the script starts has a slice of its own and may ask for less than the job."""
    mine = OURS.replace("sed 's,/step_.*,,'", r"sed 's,\(/step_[^/]*\).*,\1,'")
    shown = quote(f"cat {mine}/gmem.limit.high {OURS}/gmem.limit.high")
    script = f"srun --gpu-mem=32M sh -c {shown}"
    state, said = cluster.run("--gpu-mem=96M", script)
    assert (state, said.split()) == ("COMPLETED", [str(32 * MIB), str(96 * MIB)])


def test_a_job_of_srun_alone(cluster: Cluster) -> None:
    done = cluster.as_user(f"srun --chdir=/tmp --gpu-mem=48M --ntasks=2 sh -c {quote(SHOW)}")
    # The lines of the two tasks come in any order.
    assert (done.code, sorted(done.out.split())) == (0, sorted(2 * [str(48 * MIB), "0", "8", "100"])), done


def test_an_allocation_passes_its_options_to_its_steps(cluster: Cluster) -> None:
    done = cluster.as_user(f"salloc -q --chdir=/tmp --gpu-mem=48M srun sh -c {quote(SHOW)}")
    assert (done.code, done.out.split()) == (0, [str(48 * MIB), "0", "8", "100"]), done


def test_where_a_job_is(cluster: Cluster) -> None:
    """A job is in the cgroups that docs/slurm.md names, and its programs know the daemon's socket."""
    state, said = cluster.run("--gpu-mem=1M", "sed -n s,^0::,,p /proc/self/cgroup; echo $GGROUP_SOCKET")
    path, socket = said.split()
    assert state == "COMPLETED"
    assert re.fullmatch(rf"{SCOPE}/job_\d+/step_batch/user/task_(0|special)", path), path
    assert socket.startswith("/run/ggroupfs/")


@contextlib.contextmanager
def nvidia_said(cluster: Cluster) -> Iterator[None]:
    """Make the tree say that its GPUs are NVIDIA's, where memory limits need the library."""
    file = "/run/ggroup/ggroup.backend"
    cluster.guest.ok(f"sed 's/^gpu .*/gpu nvidia/' {file} >/tmp/backend && grep -qx 'gpu nvidia' /tmp/backend")
    cluster.guest.ok(f"mount --bind /tmp/backend {file}")
    try:
        yield
    finally:
        cluster.guest.ok(f"umount {file}")


@pytest.mark.parametrize("words", ["--gpu-mem=64M", "--gpu-mem-max=64M", "--gpu-mem-low=1M", "--gres=shard:1"])
def test_tasks_with_a_limit_of_memory_have_the_library(cluster: Cluster, words: str) -> None:
    """The library comes before what the user preloads, also in the job's steps, which ask for nothing themselves."""
    shown = "echo $LD_PRELOAD"
    with nvidia_said(cluster):
        state, said = cluster.run(f"{words} --export=ALL,LD_PRELOAD=libm.so.6", f"{shown}; srun sh -c {quote(shown)}")
    assert (state, said.splitlines()) == ("COMPLETED", 2 * [f"{LIBRARY}:libm.so.6"])


@pytest.mark.parametrize("words", ["", "--gpu-weight=30 --gpu-quota=50%"])
def test_other_tasks_have_no_library(cluster: Cluster, words: str) -> None:
    with nvidia_said(cluster):
        assert cluster.run(words, "echo ${LD_PRELOAD-none}") == ("COMPLETED", "none\n")


def test_fifty_jobs_of_two_users_on_one_gpu(cluster: Cluster) -> None:
    """Each has a shard of 16 MiB and a program that wants twice as much. `Cluster.check` finds nothing left over."""
    jobs = []
    for number in range(50):
        user = ("alice", "bob")[number % 2]
        jobs.append(cluster.submit("--gres=shard:1", f"exec /mnt/holder {32 * MIB}", user))
    held = f'test "$(cat {SLICES}/job_*/0/gmem.current | grep -cx {16 * MIB})" = 50'
    cluster.guest.until(held, "all of them hold what they may", 120)
    high = cluster.guest.ok(f"cat {SLICES}/job_*/0/gmem.limit.high").split()
    assert high == 50 * [str(16 * MIB)]
    assert cluster.guest.ok("squeue --noheader --states=RUNNING --format %u | sort | uniq -c").split() == [
        "25",
        "alice",
        "25",
        "bob",
    ]
    assert int(cluster.guest.ok("cat /run/ggroup/gpus/0/gmem.current")) <= 50 * 16 * MIB
    cluster.guest.ok("scancel --user alice; scancel --user bob")
    for job in jobs:
        assert cluster.until_ended(job) == "CANCELLED"


@pytest.mark.parametrize("words", ["record=no", "record=comment"])
def test_a_comment_by_hand_stays(cluster: Cluster, words: str) -> None:
    cluster.configure(f"{LINE} {words}")
    job = cluster.submit("--hold --gpu-mem=64M", "ggroupfs tenant --gmem 16M --kernel 2ms --seconds 0.5")
    cluster.guest.ok(f"scontrol update job {job} AdminComment='by hand' && scontrol release {job}")
    assert cluster.until_ended(job) == "COMPLETED", cluster.output(job)
    expected = "by hand" if words == "record=no" else rf"by hand; {FIGURES}"
    assert re.fullmatch(expected, cluster.comment(job)), cluster.comment(job)
