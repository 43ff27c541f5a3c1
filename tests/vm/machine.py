"""A virtual machine that runs one command, on the host's own filesystem, and is gone.

QEMU emulates the processor, so no KVM is needed, and everything takes about 15 times as long. The guest sees the host's
root read-only (9p) under a tmpfs; its output comes through two ports and the serial console.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from tests.vm import initramfs
from tests.vm.kernel_log import excerpt, reports

GUEST = Path(__file__).with_name("guest.sh")
PATIENCE = 30.0
"""Seconds that a guest gets to report where it hangs."""
LINE = (
    "console=ttyS0 loglevel=6 printk.devkmsg=on",
    # On a busy host the timer's interrupts come too late for the kernel to believe in them.
    "no_timer_check",
    # Faster by a tenth, and not under test.
    "mitigations=off init_on_alloc=0",
    # The kernel measures the frequency of the TSC as it boots, on a processor that the host may preempt meanwhile: then
    # its clock runs several times too fast. The HPET's frequency is given.
    "tsc=unstable clocksource=hpet",
    # Ends at the first fatal report: QEMU exits where a machine would restart.
    "panic=-1 oops=panic sysctl.kernel.hung_task_panic=1 sysctl.kernel.hung_task_timeout_secs=60",
)
"""Command line of every kernel."""


@attrs.frozen
class Machine:
    """A machine and its command."""

    command: Sequence[str]
    """Command that the guest executes, in the directory of the caller."""
    kernel: Path
    """Path of a bzImage."""
    modules: Path | None = None
    """/lib/modules/VERSION of that kernel; None if it has everything built in."""
    module: Path | None = None
    """Module that is loaded before the command and must unload after it."""
    cpus: int = 1
    """Number of processors. One is twice as fast as two: emulated processors that share memory wait for each other."""
    memory: str = "2G"
    seconds: float = 300.0
    """Seconds that it may take."""
    counted: bool = False
    """Whether its clock counts the instructions of its one processor, a nanosecond each: then the cost of one call
    relative to another is the same in each run, wherever the kernel lies and however busy the host is."""
    environment: dict[str, str] = attrs.Factory(dict)


@attrs.frozen
class Outcome:
    """The end of a run."""

    status: dict[str, int]
    """Exit statuses of the guest's steps: "command", "rmmod", and "done" if it came to its end."""
    log: str
    """Log of the kernel."""
    timed_out: bool

    def complaints(self) -> list[str]:
        """Return everything that is wrong, in words; empty if all is well."""
        found = reports(self.log)
        wrong = [f"guest: {what} exited with status {code}" for what, code in self.status.items() if code]
        if self.timed_out:
            wrong.append("guest: did not end in time")
        elif "done" not in self.status:
            wrong.append("guest: died")
        wrong += [f"kernel: {line}" for line in found]
        # The rest of the log matters where the kernel, and no test, reports what is wrong.
        return [*excerpt(self.log), *wrong] if found or self.status.get("done") is None else wrong

    def code(self) -> int:
        """The exit status of the whole."""
        return self.status.get("command") or (1 if self.complaints() else 0)


def run(machine: Machine, output: Callable[[bytes], object]) -> Outcome:
    """Boot, run the command, and pass on its output as it comes."""
    with tempfile.TemporaryDirectory(prefix="ggroup-vm-") as name:
        directory = Path(name)
        initramfs.write(directory / "initramfs", machine.modules)
        (directory / "session").write_text(_session(machine))
        reader, writer = os.pipe()
        # QEMU dies with its parent, however that ends.
        words = ["setpriv", "--pdeathsig", "KILL", *_qemu(machine, directory, writer)]
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[writer])
        finally:
            os.close(writer)
        timed_out = threading.Event()

        def end() -> None:
            timed_out.set()
            process.send_signal(signal.SIGKILL)

        timer = threading.Timer(machine.seconds + PATIENCE, end)
        timer.start()
        try:
            with open(reader, "rb", buffering=0) as stream:
                while data := stream.read(65536):
                    output(data)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        log = (directory / "console").read_text(errors="replace") if (directory / "console").exists() else ""
        status = _status(directory / "status")
        if code and not timed_out.is_set():
            status["qemu"] = code
        return Outcome(status, log, timed_out.is_set())


def _status(path: Path) -> dict[str, int]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {what: int(code) for what, _, code in (line.partition(" ") for line in lines)}


def _session(machine: Machine) -> str:
    """Return the session file that guest.sh reads."""
    environment = [f"{name}={value}" for name, value in machine.environment.items()]
    if machine.module:
        environment.append(f"GGROUP_MODULE={os.path.abspath(machine.module)}")
    fields = {
        "directory": os.getcwd(),
        "module": os.path.abspath(machine.module) if machine.module else "none",
        "seconds": f"{machine.seconds:.0f}",
        "command": "exec " + shlex.join(["env", *environment, *machine.command]),
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in fields.items())


def computer(cpus: int, memory: str) -> list[str]:
    """Return QEMU's words for an emulated computer without any device."""
    thread = "single" if cpus == 1 else "multi"
    words = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
    words += ["-machine", "q35", "-cpu", "max,la57=off", "-accel", f"tcg,thread={thread},tb-size=512"]
    return [*words, "-smp", f"{cpus}", "-m", memory]


def _qemu(machine: Machine, directory: Path, output: int) -> list[str]:
    line = [*LINE, "--", "/bin/bash", os.fspath(GUEST), os.fspath(directory / "session")]
    words = computer(machine.cpus, machine.memory)
    words += ["-icount", "shift=0"] if machine.counted else []
    words += ["-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"]
    # The transport has one name for all of its mounts, which the kernel calls the type.
    words += ["-device", "virtio-9p-pci,fsdev=root,mount_tag=9p"]
    words += ["-chardev", f"file,id=console,path={directory}/console", "-serial", "chardev:console"]
    words += ["-device", "virtio-serial-pci"]
    words += ["-chardev", f"file,id=output,path=/proc/self/fd/{output}"]
    words += ["-device", "virtserialport,nr=1,chardev=output,name=output"]
    words += ["-chardev", f"file,id=status,path={directory}/status"]
    words += ["-device", "virtserialport,nr=2,chardev=status,name=status"]
    words += ["-kernel", os.fspath(machine.kernel), "-initrd", f"{directory}/initramfs", "-append", " ".join(line)]
    return words
