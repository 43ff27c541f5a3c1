"""A Slurm cluster of one node in the container: slurmctld, slurmd, munge, the plugin, and ggroupfs with one GPU."""

from __future__ import annotations

import re
import shlex

import attrs

from tests.container.guest import Completed, Guest

MIB = 1 << 20
CAPACITY = 1 << 30
"""The size of the GPU's memory, in bytes."""
SHARDS = 64
"""The number of the GPU's shards."""
NODE = "guest"
ADDRESS = "10.99.0.1"
"""The node's address. Slurm resolves no name on a host that only has loopback addresses (AI_ADDRCONFIG of
getaddrinfo(3))."""
PLUGSTACK = "/etc/slurm/plugstack.conf"
SCOPE = f"/system.slice/{NODE}_slurmstepd.scope"
"""The cgroup of all jobs, as Debian's slurmd names it."""
SLICES = f"/run/ggroup/slice{SCOPE}"
OURS = "/run/ggroup/slice$(sed -n 's,^0::,,p' /proc/self/cgroup | sed 's,/step_.*,,')/0"
"""The directory of the job's control files, for use in a job's script."""

SLURM_CONF = f"""\
ClusterName=test
SlurmctldHost={NODE}({ADDRESS})
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
NodeName={NODE} NodeAddr={ADDRESS} CPUs=128 RealMemory=1000 Gres=gpu:1,shard:{SHARDS}
PartitionName=main Nodes={NODE} Default=YES MaxTime=INFINITE State=UP
PartitionName=small Nodes={NODE} MaxTime=INFINITE State=UP
"""
"""The CPUs are made up, so that fifty jobs can run at the same time."""

GRES_CONF = f"Name=gpu File=/dev/full\nName=shard Count={SHARDS}\n"
"""Slurm needs a device file for a GPU, and the software GPU has none."""
CGROUP_CONF = "CgroupPlugin=cgroup/v2\n"
START_S = 120.0
"""Seconds that the cluster may take to start, and slices to vanish after their jobs."""
ADDRESS_SET = f"""
import fcntl, socket, struct
request = struct.pack("16sH2x4s8x", b"lo:0", socket.AF_INET, socket.inet_aton("{ADDRESS}"))
fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8916, request)
"""
"""Gives an alias of the loopback device an address: SIOCSIFADDR of netdevice(7)."""
V2_ONLY = "[Service]\nEnvironment=LD_PRELOAD=/mnt/v2only.so\n"
"""Makes slurmd start on a hybrid host, too."""
LINE = "required ggroup.so"
"""The line that an administrator adds to plugstack.conf."""


@attrs.frozen
class Cluster:
    """The cluster, as the tests use it."""

    guest: Guest
    """The container."""

    def submit(self, words: str, script: str, user: str = "alice") -> str:
        """Submit a job, which sbatch has to accept, and return its number."""
        done = self.try_submit(words, script, user)
        assert done.code == 0, done
        return done.out.strip()

    def try_submit(self, words: str, script: str, user: str = "alice") -> Completed:
        """Submit a job, and return sbatch's answer."""
        options = f"--parsable --chdir=/tmp --output=/tmp/%j.out {words}"
        return self.as_user(f"sbatch {options} --wrap {shlex.quote(script)}", user)

    def as_user(self, command: str, user: str = "alice") -> Completed:
        """Run a command as a user."""
        return self.guest.run(f"runuser -u {user} -- {command}")

    def until_ended(self, job: str) -> str:
        """Wait until a job has ended, and return its state."""
        states = "COMPLETED|FAILED|CANCELLED"
        shown = f"scontrol -o show job {job} | grep -oE 'JobState=({states})'"
        return self.guest.until(shown, f"job {job} has ended").strip().removeprefix("JobState=")

    def run(self, words: str, script: str, user: str = "alice") -> tuple[str, str]:
        """Run a job to its end, and return its state and its output."""
        job = self.submit(words, script, user)
        return self.until_ended(job), self.output(job)

    def output(self, job: str) -> str:
        """The output of a job."""
        return self.guest.ok(f"cat /tmp/{job}.out")

    def comment(self, job: str) -> str:
        """The AdminComment of a job, which may contain blanks."""
        found = re.search(r"^ *AdminComment=(.*)$", self.guest.ok(f"scontrol show job {job}"), re.MULTILINE)
        return found[1].strip() if found else ""

    def configure(self, line: str) -> None:
        """Replace the line in plugstack.conf, which Slurm reads for each submission and each step."""
        self.guest.write(PLUGSTACK, f"{line}\n")

    def check(self) -> None:
        """Check what must hold after every test: the node is up, and once no job runs, nothing of a job is left."""
        assert self.guest.ok("sinfo --noheader --partition main --format %T").strip() in ("idle", "mixed", "allocated")
        self.guest.until('test -z "$(squeue --noheader)"', "no job is left")
        left = f'test -z "$(ls {SLICES} 2>/dev/null | grep ^job_)" && ! grep -q /job_ /run/ggroup/ggroup.slices'
        self.guest.until(left, "no slice of a job is left", START_S)
        assert self.guest.run(f"ls -d /sys/fs/cgroup{SCOPE}/job_*").out == ""


def install(guest: Guest) -> None:
    """Follow the steps of docs/slurm.md, after those that any cluster needs."""
    guest.ok("dpkg -i /mnt/ggroupfs.deb")
    guest.ok("sed -i 's/^OPTIONS=.*/OPTIONS=-o soft.gmem=1G/' /etc/default/ggroupfs && systemctl restart ggroupfs")
    guest.ok("useradd --create-home alice && useradd --create-home bob")
    guest.ok(f"python3 -c {shlex.quote(ADDRESS_SET)}")
    guest.ok(f"grep -q {NODE} /etc/hosts || echo {ADDRESS} {NODE} >>/etc/hosts")
    for name, text in (("slurm.conf", SLURM_CONF), ("gres.conf", GRES_CONF), ("cgroup.conf", CGROUP_CONF)):
        guest.write(f"/etc/slurm/{name}", text)
    guest.ok("install -d -o slurm /var/lib/slurm/slurmctld /var/lib/slurm/slurmd /var/log/slurm")
    guest.ok("dpkg -i /mnt/ggroupfs-slurm.deb")
    guest.write(PLUGSTACK, f"{LINE}\n")
    guest.write("/etc/systemd/system/slurmd.service.d/v2only.conf", V2_ONLY)
    guest.ok("systemctl daemon-reload && systemctl start munge slurmctld slurmd")
    guest.until("sinfo --noheader --partition main --format %T | grep -qx idle", "the node is idle", START_S)
