"""A cluster of one node in the container: slurmctld, slurmd and munge, ggroupfs with a software GPU, and the plugin."""

from __future__ import annotations

import re
import shlex

import attrs

from tests.container.guest import Completed, Guest

MIB = 1 << 20
CAPACITY = 1 << 30
"""Bytes of memory that the GPU has."""
SHARDS = 64
"""Shards of the GPU."""
NODE = "guest"
PLUGSTACK = "/etc/slurm/plugstack.conf"
SCOPE = f"/system.slice/{NODE}_slurmstepd.scope"
"""Cgroup of all jobs, as Debian's slurmd calls it."""
SLICES = f"/run/ggroup/slice{SCOPE}"
OURS = "/run/ggroup/slice$(sed -n 's,^0::,,p' /proc/self/cgroup | sed 's,/step_.*,,')/0"
"""Control files of the job's slice, as a script of it finds them."""

SLURM_CONF = f"""\
ClusterName=test
SlurmctldHost={NODE}(127.0.0.1)
SlurmUser=slurm
AuthType=auth/munge
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu,shard
ReturnToService=2
NodeName={NODE} NodeAddr=127.0.0.1 CPUs=128 RealMemory=1000 Gres=gpu:1,shard:{SHARDS}
PartitionName=main Nodes={NODE} Default=YES MaxTime=INFINITE State=UP
PartitionName=small Nodes={NODE} MaxTime=INFINITE State=UP
"""
"""Processors are made up, so that fifty jobs run at the same time."""

GRES_CONF = f"Name=gpu File=/dev/full\nName=shard Count={SHARDS}\n"
"""A GPU needs a device file; the software GPU has none."""
CGROUP_CONF = "CgroupPlugin=cgroup/v2\n"
START_S = 120.0
"""Seconds that the cluster may take to start, and what has ended to be gone."""
LINE = "required ggroup.so"
"""All that an administrator adds to plugstack.conf."""


@attrs.frozen
class Cluster:
    """What the tests do with it."""

    guest: Guest
    """The container."""

    def submit(self, words: str, script: str, user: str = "alice") -> str:
        """The number of a job, which sbatch takes."""
        done = self.try_submit(words, script, user)
        assert done.code == 0, done
        return done.out.strip()

    def try_submit(self, words: str, script: str, user: str = "alice") -> Completed:
        """What sbatch says of a job."""
        options = f"--parsable --chdir=/tmp --output=/tmp/%j.out {words}"
        return self.as_user(f"sbatch {options} --wrap {shlex.quote(script)}", user)

    def as_user(self, command: str, user: str = "alice") -> Completed:
        """A command of a user."""
        return self.guest.run(f"runuser -u {user} -- {command}")

    def until_ended(self, job: str) -> str:
        """The state in which a job has ended."""
        states = "COMPLETED|FAILED|CANCELLED"
        shown = f"scontrol -o show job {job} | grep -oE 'JobState=({states})'"
        return self.guest.until(shown, f"job {job} has ended").strip().removeprefix("JobState=")

    def run(self, words: str, script: str, user: str = "alice") -> tuple[str, str]:
        """The state of a job in the end, and what it wrote."""
        job = self.submit(words, script, user)
        return self.until_ended(job), self.output(job)

    def output(self, job: str) -> str:
        """What a job wrote."""
        return self.guest.ok(f"cat /tmp/{job}.out")

    def comment(self, job: str) -> str:
        """The AdminComment of a job, which may have blanks."""
        found = re.search(r"^ *AdminComment=(.*)$", self.guest.ok(f"scontrol show job {job}"), re.MULTILINE)
        return found[1].strip() if found else ""

    def configure(self, line: str) -> None:
        """Another line in plugstack.conf, which is read with each submission and each step."""
        self.guest.write(PLUGSTACK, f"{line}\n")

    def check(self) -> None:
        """What holds whatever happens: the node is up, and once no job runs nothing of any is left."""
        assert self.guest.ok("sinfo --noheader --partition main --format %T").strip() in ("idle", "mixed", "allocated")
        self.guest.until('test -z "$(squeue --noheader)"', "no job is left")
        left = f'test -z "$(ls {SLICES} 2>/dev/null | grep ^job_)" && ! grep -q /job_ /run/ggroup/ggroup.slices'
        self.guest.until(left, "no slice of a job is left", START_S)
        assert self.guest.run(f"ls -d /sys/fs/cgroup{SCOPE}/job_*").out == ""


def install(guest: Guest) -> None:
    """The steps of docs/slurm.md, besides those of any cluster."""
    guest.ok("dpkg -i /mnt/ggroupfs.deb")
    guest.ok("sed -i 's/^OPTIONS=.*/OPTIONS=soft.gmem=1G/' /etc/default/ggroupfs && systemctl restart ggroupfs")
    guest.ok("useradd --create-home alice && useradd --create-home bob")
    guest.ok("grep -q guest /etc/hosts || echo 127.0.0.1 localhost guest >>/etc/hosts")
    for name, text in (("slurm.conf", SLURM_CONF), ("gres.conf", GRES_CONF), ("cgroup.conf", CGROUP_CONF)):
        guest.write(f"/etc/slurm/{name}", text)
    guest.ok("install -d -o slurm /var/lib/slurm/slurmctld /var/lib/slurm/slurmd /var/log/slurm")
    guest.ok("dpkg -i /mnt/ggroupfs-slurm.deb")
    guest.write(PLUGSTACK, f"{LINE}\n")
    guest.ok("systemctl start munge slurmctld slurmd")
    guest.until("sinfo --noheader --partition main --format %T | grep -qx idle", "the node is idle", START_S)
