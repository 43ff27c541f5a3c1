"""A container in which systemd is process 1 and which runs one command after another.

It has a Debian of its own on the kernel of this machine. Nothing is emulated, so it is as quick as the machine, and
systemd boots within seconds. The files that it writes are in memory and vanish when it ends.

It has no kernel of its own: no module can be loaded, no clock set, and /proc/sys is read-only. Kernel messages about it
are mixed with the others in this machine's log, so a kernel warning makes no test fail here. The tests whose subject is
a kernel run in the machines of tests/vm.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import attrs

KEEPER = "tests.container.keeper"
BOOT_S = 300.0
COMMAND_S = 300.0
"""The limit for a command or a condition to wait for. One that reaches it hangs, however busy the machine is."""
PATIENCE_S = 180.0
"""The time that an answer may take beyond its command's limit, and that a container may take to end."""
POLL_S = 0.1
TAKES = "it takes root with CAP_SYS_ADMIN and a cgroup2 that can be written to: inside a container, a privileged one"


@attrs.frozen
class Completed:
    """A command that has ended."""

    code: int
    """The exit status; 124 if the command took too long."""
    out: str
    """The text on standard output."""
    err: str
    """The text on standard error."""


class Guest:
    """A running container."""

    def __init__(self, agent: socket.socket, console: IO[bytes]) -> None:
        self._agent = agent
        self._stream = agent.makefile("r", encoding="utf-8")
        self._console = console

    def run(self, command: str, seconds: float = COMMAND_S) -> Completed:
        """Run a command with a shell, as root. AssertionError if the container itself does not answer."""
        try:
            self._agent.settimeout(seconds + PATIENCE_S)
            self._agent.sendall(json.dumps({"command": command, "seconds": seconds}).encode() + b"\n")
            line = self._stream.readline()
        except OSError as error:
            raise AssertionError(f"{command}: {error}; {said(self._console)}") from None
        if not line:
            raise AssertionError(f"{command}: the container has ended; {said(self._console)}")
        return Completed(**json.loads(line))

    def ok(self, command: str, seconds: float = COMMAND_S) -> str:
        """Run a command that has to succeed, and return its output."""
        done = self.run(command, seconds)
        assert done.code == 0, f"{command}: {done}"
        return done.out

    def until(self, command: str, what: str, seconds: float = COMMAND_S) -> str:
        """Repeat a command until it succeeds, and return its output. All waiting in these tests is done here."""
        deadline = time.monotonic() + seconds
        while (done := self.run(command)).code:
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds:g} s: {what}: {done}")
            time.sleep(POLL_S)
        return done.out

    def write(self, path: str, text: str) -> None:
        """Write a file in the container, making the directories above it."""
        self.ok(f"mkdir -p '{os.path.dirname(path)}' && cat >'{path}' <<'END-OF-FILE'\n{text}END-OF-FILE\n")

    def close(self) -> None:
        """Close the connection; no more commands can be run."""
        self._stream.close()

    def hello(self) -> None:
        """Return when the agent has started."""
        line = self._stream.readline()
        assert line == '"hello"\n', f"no agent: {line!r}; {said(self._console)}"


@contextlib.contextmanager
def booted(archive: Path, shared: Path) -> Iterator[Guest]:
    """Boot the system in the archive, until systemd has nothing left to do. `shared` is there as /mnt, read-only.

    AssertionError if that is impossible, and at the end if anything of the container is left.
    """
    # The keeper removes the directory as well, and outlives this process if it is killed.
    with tempfile.TemporaryDirectory(prefix="ggroup-container-", ignore_cleanup_errors=True) as name:
        os.mkdir(f"{name}/socket")
        with (
            open(f"{name}/console", "a+b") as console,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening,
            kept([os.fspath(archive), os.fspath(shared), name], console) as keeper,
        ):
            listening.bind(f"{name}/socket/agent")
            listening.listen()
            with (
                accepted(listening, keeper, console) as agent,
                contextlib.closing(Guest(agent, console)) as guest,
            ):
                guest.hello()
                # A degraded system counts as booted: finding out why is for the tests.
                guest.run("systemctl is-system-running --wait", BOOT_S)
                yield guest


@contextlib.contextmanager
def kept(words: Sequence[str], console: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A keeper, which is told at the end to end its container."""
    command = [sys.executable, "-m", KEEPER, *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=console, start_new_session=True
    ) as keeper:
        try:
            yield keeper
        finally:
            assert keeper.stdin is not None
            keeper.stdin.close()
            try:
                keeper.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                keeper.kill()
    assert keeper.returncode == 0, f"the container has not ended well: {keeper.returncode}; {said(console)}"


def accepted(listening: socket.socket, keeper: subprocess.Popen[bytes], console: IO[bytes]) -> socket.socket:
    """The agent's connection, made once it has started. AssertionError if the container ends before that."""
    assert keeper.stdout is not None
    ready, _, _ = select.select([listening.fileno(), keeper.stdout.fileno()], [], [], BOOT_S)
    assert listening.fileno() in ready, f"no container has booted, and {TAKES}; {said(console)}"
    agent, _ = listening.accept()
    agent.settimeout(BOOT_S)
    return agent


def said(console: IO[bytes], lines: int = 40) -> str:
    """The last lines that the container, or the programs that made it, wrote to the console."""
    console.seek(0)
    return "\n".join(["console:", *console.read().decode(errors="replace").splitlines()[-lines:]])
