"""Executor of docs/semantics.md: every promise is followed by an example, whose output must match a real shell's.

The notation is explained at the top of that page. Here are its parser, the shell that runs one promise's example, and a
small server that starts tenants fast: it has Python and ggroupfs loaded and only forks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from backend.process import procfs
from ggroupfs import cli
from tests.support.mounted import SLOW, Mounted, eventually

SECONDS = 120.0 * SLOW
"""Seconds that one example may take."""

TENANT = ("--gmem", "64M", "--kernel", "2ms", "--depth", "512", "--report", "3600")
"""Options of the tenant of every example; those given to `tenant` come after them and so win.

A second of work is queued, so that a busy machine does not leave the GPU without work.
"""

MARK = "\x1e"
"""Character that follows the output of each command, with its exit status."""

PRELUDE = r"""
tenant() { echo "$*" >&"$TENANT_ASK"; read -r OTHER <&"$TENANT_TELL"; [ "$OTHER" -gt 0 ]; }
nobody() { setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; }
within() {
  local limit=$1 start=${EPOCHREALTIME/./} tried=0; shift
  local most=$(( ${limit%ms} * 1000 * GGROUP_SLOW ))
  until "$@" >/dev/null 2>&1; do
    if (( ${EPOCHREALTIME/./} - start > most && tried * 10000 > most )); then echo "not within $limit: $*"; return 1; fi
    tried=$(( tried + 1 ))
    sleep 0.01
  done
}
"""
"""Shell functions that the page explains."""


class DocumentError(Exception):
    """A page that does not follow its own notation."""


@attrs.frozen
class Command:
    """One command of an example, and its output."""

    text: str
    """The command as bash gets it, continuation lines included."""
    output: tuple[str, ...]
    """Expected lines, in the page's notation."""


@attrs.frozen
class Statement:
    """One promise and its example."""

    section: str
    """Heading above the promise."""
    text: str
    """The promise."""
    line: int
    """First line in the page."""
    commands: tuple[Command, ...] = ()
    """The example; without one, the test of this statement fails."""

    @property
    def name(self) -> str:
        """Section and first words, for the id of the test."""
        words = re.sub(r"[^a-z0-9. ]", "", self.text.lower()).split()
        return f"{self.section.replace(' ', '-')}/{'-'.join(words[:7])}"


@attrs.frozen
class Document:
    """The page."""

    sections: tuple[str, ...]
    """Headings in order."""
    statements: tuple[Statement, ...]
    """Promises in order."""
    errors: tuple[str, ...]
    """First column of the table of errors."""


def parse(text: str) -> Document:
    """Parse the page: below the first `##`, every paragraph is a promise and is followed by its example.

    Quotes with `>` and tables are no promises; the first column of tables is kept.
    """
    sections: list[str] = []
    statements: list[Statement] = []
    errors: list[str] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("## "):
            sections.append(line[3:].strip().strip("`"))
        elif line.startswith("#") or not line.strip() or line.startswith(">") or not sections:
            continue
        elif line.startswith("|"):
            cell = line.split("|")[1].strip().strip("`")
            if re.fullmatch(r"E[A-Z0-9]+", cell):
                errors.append(cell)
        elif line.startswith("```"):
            end = next((n for n in range(number, len(lines)) if lines[n].startswith("```")), None)
            if line != "```console" or end is None:
                raise DocumentError(f"line {number}: a block that is not a console example, or has no end")
            if not statements or statements[-1].commands or statements[-1].section != sections[-1]:
                raise DocumentError(f"line {number}: an example of nothing")
            statements[-1] = attrs.evolve(statements[-1], commands=_commands(lines[number:end], number))
            number = end + 1
        else:
            first = number
            while number < len(lines) and lines[number].strip() and not lines[number].startswith(("```", "#", "|")):
                number += 1
            statements.append(Statement(sections[-1], " ".join(lines[first - 1 : number]), first))
    return Document(tuple(sections), tuple(statements), tuple(errors))


def _commands(lines: Sequence[str], number: int) -> tuple[Command, ...]:
    commands: list[Command] = []
    for line in lines:
        number += 1
        if line.startswith("$ "):
            commands.append(Command(line[2:], ()))
        elif not commands:
            raise DocumentError(f"line {number}: output before the first command")
        elif line.startswith("> ") and not commands[-1].output:
            commands[-1] = attrs.evolve(commands[-1], text=f"{commands[-1].text}\n{line[2:]}")
        else:
            commands[-1] = attrs.evolve(commands[-1], output=(*commands[-1].output, line))
    if not commands:
        raise DocumentError(f"line {number}: an example without a command")
    return tuple(commands)


def pattern(expected: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of a whole output: `<N>` is a number, `<W>` a word, `...` any lines."""
    parts = []
    for line in expected:
        if line == "...":
            parts.append("(?:.*\n)*?")
        else:
            parts.append(re.escape(line).replace("<N>", "[0-9]+").replace("<W>", r"\S+") + "\n")
    return re.compile("".join(parts))


def differences(statement: Statement, answers: Sequence[tuple[str, int]]) -> str:
    """Compare the answers of the shell with the page; return the differences, empty if there are none."""
    found = []
    for command, (output, status) in zip(statement.commands, answers, strict=False):
        if output and not output.endswith("\n"):
            output += "\n"
        if not pattern(command.output).fullmatch(output):
            found.append(f"$ {command.text}\n--- the page\n{chr(10).join(command.output)}\n--- the shell\n{output}")
        elif not command.output and status:
            found.append(f"$ {command.text}\n--- fails silently, status {status}")
    if len(answers) < len(statement.commands):
        found.append(f"$ {statement.commands[len(answers)].text}\n--- was not reached")
    return "\n".join(found)


# Running


@attrs.define
class Tenants:
    """The server that forks tenants for one mount."""

    process: subprocess.Popen[str]
    """Process of the server."""

    def start(self, *options: str) -> int:
        """Start a tenant, and return its pid once its first work is done."""
        pid = int(self._ask(" ".join(options) or "--gpu 0"))
        assert pid, "the tenant did not start"
        return pid

    def stop(self) -> list[int]:
        """End all tenants; return their pids."""
        return [int(word) for word in self._ask("stop").split()]

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


@contextlib.contextmanager
def tenants(mount: Mounted) -> Iterator[Tenants]:
    """Yield the server; it is ended afterwards."""
    words = [sys.executable, "-m", __name__, os.fspath(mount.path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        yield Tenants(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(SECONDS) == 0


@attrs.define
class Stage:
    """The environment in which examples run."""

    mount: Mounted
    """The mounted tree."""
    tenants: Tenants
    """Server that starts tenants."""
    bin: Path
    """Directory with a `ggroupfs` and a `python3` that run the code under test."""
    cgroups: Path | None
    """Path of the cgroup2 tree; None where it is unusable."""
    count: int = 0
    """Number of examples run."""

    def run(self, statement: Statement) -> str:
        """Run an example with a fresh tenant and a fresh cgroup; return :func:`differences`."""
        self.count += 1
        name = f"ggroupfs-{os.getpid()}-{self.count}"
        pid = self.tenants.start()
        cgroup = self.cgroups / name if self.cgroups is not None else None
        if cgroup is not None:
            cgroup.mkdir()
        try:
            return differences(statement, self._shell(statement, pid, name))
        finally:
            gone = self.tenants.stop()
            eventually(lambda: not any((self.mount / pid).exists() for pid in gone), "the tenants' directories go")
            _sweep(self.mount / "slice" / name)
            if cgroup is not None:
                eventually(lambda: _sweep(cgroup), "the cgroup is empty")

    def _shell(self, statement: Statement, pid: int, name: str) -> list[tuple[str, int]]:
        script = PRELUDE + "".join(f"{c.text}\nprintf '{MARK}%d{MARK}' $?\n" for c in statement.commands)
        ask, tell = self.tenants.process.stdin, self.tenants.process.stdout
        assert ask is not None
        assert tell is not None
        environment = {
            "PATH": f"{self.bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C",
            "GGROUP_SLOW": str(SLOW),
            "M": os.fspath(self.mount.path),
            "PID": str(pid),
            "CG": os.fspath(self.cgroups / name) if self.cgroups is not None else "",
            "S": os.fspath(self.mount / "slice" / name),
            "FAULTS": os.fspath(self.bin.parent / "faults"),
            "SHELL_TMP": os.fspath(self.bin.parent),
            "TENANT_ASK": str(ask.fileno()),
            "TENANT_TELL": str(tell.fileno()),
        }
        # A file instead of a pipe, which background processes of an example would keep open.
        with (
            tempfile.TemporaryFile() as output,
            subprocess.Popen(
                ["bash", "--norc", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.mount.group(pid),
                env=environment,
                pass_fds=(ask.fileno(), tell.fileno()),
                start_new_session=True,
            ) as shell,
        ):
            try:
                shell.wait(SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)  # background processes of the example
            output.seek(0)
            text = output.read().decode("utf-8", "backslashreplace").replace(os.fspath(self.mount.path), "$M")
        words = text.split(MARK)
        return [
            (re.sub(r"(?m)^bash: line [0-9]+: ", "", said), int(status))
            for said, status in zip(words[::2], words[1::2], strict=False)
        ]


def _sweep(top: Path) -> bool:
    """Remove a directory of cgroups or slices, deepest first; return whether it is gone."""
    for where, _, _ in list(os.walk(top, topdown=False)):
        with contextlib.suppress(OSError):
            os.rmdir(where)
    return not top.exists()


@contextlib.contextmanager
def stage(mount: Mounted, directory: Path) -> Iterator[Stage]:
    """Yield a stage on a mount; `directory` is an empty one for its programs."""
    programs = directory / "bin"
    programs.mkdir()
    for name, words in (("ggroupfs", "-m ggroupfs"), ("python3", "")):
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        path.chmod(0o755)
    with tenants(mount) as server:
        yield Stage(mount, server, programs, cgroup2())


def cgroup2() -> Path | None:
    """Return the mountpoint of a cgroup2 tree in which groups can be made; None if there is none."""
    mount = procfs.cgroup2()
    return Path(mount.point) if mount is not None and os.access(mount.point, os.W_OK) else None


# The server of tenants, in a process of its own


def _serve(mount: Path) -> None:
    """Answer each line of options with the pid of a tenant that works, or ``0`` if it does not; `stop` ends all."""
    children: list[int] = []
    for line in sys.stdin:
        if line == "stop\n":
            for pid in children:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid cannot have been reused
                os.waitpid(pid, 0)
            print(*children, flush=True)
            children.clear()
            continue
        words = [*TENANT, *line.split()]
        pid = os.fork()
        if pid == 0:
            _become_tenant(mount, words)
        children.append(pid)
        gpu = words[len(words) - 1 - words[::-1].index("--gpu") + 1] if "--gpu" in words else "0"
        print(pid if _works(mount / str(pid) / gpu / "gcgroup.stat", pid) else 0, flush=True)


def _become_tenant(mount: Path, words: Sequence[str]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    code = 1
    try:
        code = cli.main(["tenant", "--mount", os.fspath(mount), *words])
    finally:
        os._exit(code)


def _works(stat: Path, pid: int) -> bool:
    """Wait for a tenant's first kernel; return False if the tenant ended instead."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        with contextlib.suppress(OSError):
            if re.search(r"^finished [1-9]", stat.read_text(), re.MULTILINE):
                return True
        time.sleep(0.001)
    return False


if __name__ == "__main__":
    assert shutil.which("bash")
    _serve(Path(sys.argv[1]))
