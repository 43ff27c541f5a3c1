"""A container in which systemd is process 1, which runs one command after another.

It is a Debian of its own on the kernel of this machine: nothing is emulated, so it is as quick as the machine, and
systemd has booted within seconds. What it writes is in memory, and gone when it ends.

It has no kernel of its own: no module can be loaded, no clock set, and /proc/sys is read-only. What the kernel says of
it is in the log of this machine, among what it says of others, so no test fails by a warning of the kernel. Tests for
which a kernel is the subject run in the machines of tests/vm.
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
"""What a command, or what is waited for, may take: one that reaches it hangs, however busy the machine is."""
PATIENCE_S = 180.0
"""How much longer than a command the answer may take, and what a container may take to end."""
POLL_S = 0.1
TAKES = "it takes root with CAP_SYS_ADMIN and a cgroup2 that can be written to: inside a container, a privileged one"


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
    """A container that is running."""

    def __init__(self, agent: socket.socket, console: IO[bytes]) -> None:
        self._agent = agent
        self._stream = agent.makefile("r", encoding="utf-8")
        self._console = console

    def run(self, command: str, seconds: float = COMMAND_S) -> Completed:
        """Runs it by a shell, as root. AssertionError where the container itself does not answer."""
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
            time.sleep(POLL_S)
        return done.out

    def write(self, path: str, text: str) -> None:
        """A file there, and the directories on the way to it."""
        self.ok(f"mkdir -p '{os.path.dirname(path)}' && cat >'{path}' <<'END-OF-FILE'\n{text}END-OF-FILE\n")

    def close(self) -> None:
        """Nothing can be run any more."""
        self._stream.close()

    def hello(self) -> None:
        """Returns when the agent has started."""
        line = self._stream.readline()
        assert line == '"hello"\n', f"no agent: {line!r}; {said(self._console)}"


@contextlib.contextmanager
def booted(archive: Path, shared: Path) -> Iterator[Guest]:
    """Boots what is in the archive, until systemd has nothing left to do. A directory of this machine is there as /mnt,
    read-only. AssertionError where that cannot be; and in the end, where anything of it is left."""
    # The keeper removes it as well, and outlives this process where that is killed.
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
                # Degraded is for the tests to find.
                guest.run("systemctl is-system-running --wait", BOOT_S)
                yield guest


@contextlib.contextmanager
def kept(words: Sequence[str], console: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A keeper, which in the end is told that it is the end."""
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
    """The agent, which connects once it has started; AssertionError where the container ends before that."""
    assert keeper.stdout is not None
    ready, _, _ = select.select([listening.fileno(), keeper.stdout.fileno()], [], [], BOOT_S)
    assert listening.fileno() in ready, f"no container has booted, and {TAKES}; {said(console)}"
    agent, _ = listening.accept()
    agent.settimeout(BOOT_S)
    return agent


def said(console: IO[bytes], lines: int = 40) -> str:
    """The end of what the container, and what made it, has written."""
    console.seek(0)
    return "\n".join(["console:", *console.read().decode(errors="replace").splitlines()[-lines:]])
