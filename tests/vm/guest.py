"""A virtual machine with a system of its own on a disk, which runs one command after another.

What it writes is gone when it ends. Commands and what comes of them travel over a serial port; a directory of the host
is there for what it is to be given.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from tests.vm import initramfs
from tests.vm.kernel_log import excerpt, reports
from tests.vm.machine import LINE, computer

AGENT = Path(__file__).with_name("agent.py")
"""What the guest runs at the other end; whoever makes the disk puts it there."""
BOOT_S = 1200.0
COMMAND_S = 900.0
"""What a command, or what is waited for, may take: one that reaches it hangs. Where others want the processor, too, the
emulated one is a hundred times slower than that."""
PATIENCE_S = 300.0
"""How much longer than a command the answer may take."""
SHARED = "/mnt"
"""Where the directory of the host is in the guest, read-only."""


@attrs.frozen
class Completed:
    """A command that has ended."""

    code: int
    """Its exit status; 124 if it took too long."""
    out: str
    """Its standard output."""
    err: str
    """Its standard error."""


class Guest:
    """A machine that is running."""

    def __init__(self, process: subprocess.Popen[bytes], agent: socket.socket, console: Path) -> None:
        self._process = process
        self._agent = agent
        self._stream = agent.makefile("r", encoding="utf-8")
        self._console = console

    def run(self, command: str, seconds: float = COMMAND_S) -> Completed:
        """Runs it by a shell, as root. AssertionError where the machine itself does not answer."""
        self._agent.settimeout(seconds + PATIENCE_S)
        try:
            self._agent.sendall(json.dumps({"command": command, "seconds": seconds}).encode() + b"\n")
            line = self._stream.readline()
        except OSError as error:
            raise AssertionError(f"{command}: {error}; {self._end()}") from None
        if not line:
            raise AssertionError(f"{command}: the machine has ended; {self._end()}")
        return Completed(**json.loads(line))

    def ok(self, command: str, seconds: float = COMMAND_S) -> str:
        """Runs it, which has to succeed; what it printed."""
        done = self.run(command, seconds)
        assert done.code == 0, f"{command}: {done}"
        return done.out

    def until(self, command: str, what: str, seconds: float = COMMAND_S) -> str:
        """Runs it again and again until it succeeds; what it printed then. The one place that waits."""
        deadline = time.monotonic() + seconds
        while (done := self.run(command)).code:
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds:g} s: {what}: {done}")
            time.sleep(0.2)
        return done.out

    def write(self, path: str, text: str) -> None:
        """A file there, and the directories on the way to it."""
        self.ok(f"mkdir -p '{os.path.dirname(path)}' && cat >'{path}' <<'END-OF-FILE'\n{text}END-OF-FILE\n")

    def complaints(self) -> list[str]:
        """What the kernel may not have said."""
        return reports(self._console.read_text(errors="replace"))

    def hello(self) -> None:
        """Returns when the agent has started."""
        self._agent.settimeout(BOOT_S)
        try:
            line = self._stream.readline()
        except OSError as error:
            raise AssertionError(f"no agent: {error}; {self._end()}") from None
        assert json.loads(line) == "hello"

    def _end(self) -> str:
        rows = excerpt(self._console.read_text(errors="replace"), 40) if self._console.exists() else []
        return "\n".join([f"qemu: {self._process.poll()}", *rows])


@contextlib.contextmanager
def booted(kernel: Path, modules: Path, disk: Path, shared: Path) -> Iterator[Guest]:
    """Boots it, until systemd has nothing left to do."""
    with tempfile.TemporaryDirectory(prefix="ggroup-vm-") as name:
        directory = Path(name)
        initramfs.write(directory / "initramfs", modules, initramfs.DISK)
        words = _qemu(kernel, disk, shared, directory)
        # With QEMU's parent goes QEMU, however that ends.
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *words], stdin=subprocess.DEVNULL)
        try:
            with _connected(directory / "agent", process) as agent:
                guest = Guest(process, agent, directory / "console")
                guest.hello()
                # Degraded is for the tests to find.
                guest.run("systemctl is-system-running --wait", BOOT_S)
                yield guest
        finally:
            process.kill()
            process.wait()


def _connected(path: Path, process: subprocess.Popen[bytes]) -> socket.socket:
    """QEMU listens soon after it starts."""
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            agent.connect(os.fspath(path))
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                agent.close()
                raise
            time.sleep(0.05)
        else:
            return agent


def _qemu(kernel: Path, disk: Path, shared: Path, directory: Path) -> list[str]:
    line = [*LINE, "systemd.show_status=0", "DISK=/dev/vda", "--", "/sbin/init"]
    words = computer(1, "2G")
    words += ["-drive", f"file={disk},format=raw,if=virtio,snapshot=on,cache=unsafe"]
    words += ["-fsdev", f"local,id=shared,path={shared},security_model=none,readonly=on"]
    words += ["-device", "virtio-9p-pci,fsdev=shared,mount_tag=shared"]
    words += ["-chardev", f"file,id=console,path={directory}/console", "-serial", "chardev:console"]
    words += ["-device", "virtio-serial-pci"]
    words += ["-chardev", f"socket,id=agent,path={directory}/agent,server=on,wait=off"]
    words += ["-device", "virtserialport,nr=1,chardev=agent,name=agent"]
    return [*words, "-kernel", f"{kernel}", "-initrd", f"{directory}/initramfs", "-append", " ".join(line)]
