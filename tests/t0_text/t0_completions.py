"""Completion in bash and zsh: it offers all that the command line accepts and nothing else, and a Tab completes a
line.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggroupfs.cli import COMMANDS
from ggroupfs.fs.controls import CONTROLS
from ggroupfs.text.origins import WORDS
from ggroupfs.text.properties import PROPERTIES
from ggroupfs.view.accounts import ORDERS
from tests.support.mounted import SECONDS, SLOW
from tests.support.spoken import flags, mount_options, subcommands

HERE = Path(__file__).resolve().parents[2] / "completions"
BASH, ZSH = HERE / "ggroupfs.bash", HERE / "_ggroupfs"

KNOWN = {*COMMANDS, "top", "set"}
SETTINGS = {control.name for control in CONTROLS if control.mode & 0o200} | {one.name for one in PROPERTIES}


def offered(line: str, mounts: Path = Path("/proc/self/mounts")) -> set[str]:
    """Return what bash offers at the end of `line`: words, or what follows the last = of it."""
    script = (
        'source "$1"; _ggroupfs_mounts=$3 COMP_LINE=$2 COMP_POINT=${#2}; _ggroupfs; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    words = ["bash", "--norc", "--noprofile", "-c", script, "bash", BASH, line, mounts]
    result = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert result.stderr == "", result.stderr
    return {word for word in result.stdout.splitlines() if word}


def section(command: str) -> str:
    """Return the part of the zsh file for a subcommand."""
    match = re.search(rf"^ +\({command}\)\n(.*?)^ +;;", ZSH.read_text(), re.DOTALL | re.MULTILINE)
    assert match is not None, f"_ggroupfs does not know {command}"
    return match[1]


def flags_in(text: str) -> set[str]:
    """Return the options in specifications of zsh's _arguments."""
    found = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)[=+]?(?=\[)", text))
    for group in re.findall(r"\{(-[^}]*)\}", text):
        found |= {flag.rstrip("=+") for flag in group.split(",")}
    if "$help" in text:
        found |= {"-h", "--help"}
    if "$mount" in text:
        found |= {"--mount"}
    return found


def test_every_subcommand() -> None:
    assert offered("ggroupfs ") - {"-v", "--verbose", "--version", "-h", "--help"} == KNOWN
    assert set(re.findall(r"^        '([a-z]+):", ZSH.read_text().partition("commands=(")[2], re.MULTILINE)) == KNOWN


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_option(command: str) -> None:
    """The options that are offered are exactly those that argparse accepts."""
    expected = flags(subcommands()[command])
    assert "--help" in expected
    assert offered(f"ggroupfs {command} -") - {"--"} == expected
    assert flags_in(section(command)) == expected


def test_every_mount_option_and_setting() -> None:
    found = {word.partition("=")[0] for word in offered("ggroupfs mount -o ")}
    assert found == mount_options()
    in_zsh = ZSH.read_text().partition("_ggroupfs_options_of_mount()")[2].partition("\n}")[0]
    assert set(re.findall(r"^ +'(?:\(\w+\))?([a-z_.]+)\[", in_zsh, re.MULTILINE)) == mount_options()
    assert {word.partition("=")[0] for word in offered("ggroupfs run -p ")} == SETTINGS
    in_zsh = ZSH.read_text().partition("keys=(")[2].partition("\n    )")[0]
    assert set(re.findall(r"^ +'([\w.]+):", in_zsh, re.MULTILINE)) == SETTINGS


INFINITE = ("=", "=infinity")
"""What may follow the name of a size."""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ggroupfs m", {"mount", "metrics"}),
        ("ggroupfs -v dem", {"demo"}),
        ("ggroupfs mount --led", {"--ledger"}),
        ("ggroupfs mount --ledger ", {"auto", "soft", "kmod"}),
        ("ggroupfs mount -o no", {"nojournal", "nopoll", "noselftest"}),
        ("ggroupfs mount -o ro,no", {"ro,nojournal", "ro,nopoll", "ro,noselftest"}),
        ("ggroupfs mount -o gpu=", {"auto", "soft", "nvidia"}),
        ("ggroupfs mount -o ro,gpu=s", {"soft"}),
        ("ggroupfs mount -o scheduler=o", {"on", "off"}),
        (
            "ggroupfs run -p GMem",
            {
                *(f"{key}{word}" for key in ("GMemHigh", "GMemLow", "GMemMax", "GMemSwapMax") for word in INFINITE),
                *(f"GMemOOMGroup={word}" for word in ("", "yes", "no")),
            },
        ),
        ("ggroupfs run -p compute.freeze=", {"0", "1"}),
        ("ggroupfs run -p compute.freeze=1 -- mkfif", {"mkfifo"}),
        (
            "ggroupfs policy ",
            {"balance", "cooperative", "dynamic", "lanes", "slo", "--config", "--mount", "-h", "--help"},
        ),
        ("ggroupfs tenant --gmem ", set()),
        ("ggroupfs account --format ", {"text", "csv", "json"}),
        ("ggroupfs account --sort ", {*ORDERS}),
        ("ggroupfs metrics --labels ", {*WORDS, "none"}),
        ("ggroupfs nonsense -", {"-h", "--help"}),
    ],
)
def test_what_bash_offers(line: str, words: set[str]) -> None:
    assert offered(line) == words


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return directories as a tree has them."""
    for path in ("42/0", "4711/0", "gpus/0", "gpus/1", "slice/batch.slice/0", "slice/batch.slice/a.service/0"):
        (tmp_path / path).mkdir(parents=True)
    return tmp_path


def test_pids_slices_and_gpus_of_the_tree(tree: Path) -> None:
    start = f"ggroupfs set --mount {tree} "
    assert offered(start + "4") == {"42", "4711"}
    assert offered(start + "bat") == {"batch.slice", "batch.slice/"}
    assert offered(f"ggroupfs account --mount {tree} ") == {"batch.slice", "batch.slice/"}
    assert offered(start + "batch.slice/") == {"batch.slice/a.service"}
    assert offered(start + "--gpu ") == {"0", "1"}
    assert offered(f"ggroupfs set --mount={tree} 47") == {"4711"}
    assert offered("ggroupfs set --mount /nowhere 4") == set()
    assert offered(f"ggroupfs doctor --mount {tree} ") == {"42", "4711"}


def test_cgroups_that_have_no_slice_yet(tree: Path) -> None:
    """They are found at any depth, each once, and none of another hierarchy."""
    top, other, mounts = tree / "cgroup", tree / "cpu", tree / "mounts"
    for path in ("batch.slice/b.service", "batch.slice/batch-gpu.slice/c.service", "user.slice", "7"):
        (top / path).mkdir(parents=True)
    (other / "v1.slice").mkdir(parents=True)
    mounts.write_text(f"cgroup {other} cgroup rw,cpu 0 0\ncgroup2 {top} cgroup2 rw 0 0\n")
    start = f"ggroupfs set --mount {tree} "
    assert offered(start + "bat", mounts) == {"batch.slice", "batch.slice/"}
    assert offered(start + "/bat", mounts) == {"/batch.slice", "/batch.slice/"}
    names = {"batch.slice/a.service", "batch.slice/b.service", "batch.slice/batch-gpu.slice"}
    assert offered(start + "batch.slice/", mounts) == {*names, "batch.slice/batch-gpu.slice/"}
    assert offered(start + "u", mounts) == {"user.slice"}
    assert offered(start + "v", mounts) == set()
    assert offered(start + "7", mounts) == set()


def test_what_can_be_reset() -> None:
    """Settings are offered by both of their names, without a value; actions and peaks are not offered."""
    found = offered("ggroupfs set --mount /nowhere --reset 42 ", Path(os.devnull))
    assert found == {*(one.name for one in PROPERTIES), *(one.control for one in PROPERTIES)}


# Tabs, typed


class Shell:
    """An interactive shell on a terminal, in which `ggroupfs` prints its arguments."""

    def __init__(self, words: list[str], ready: str) -> None:
        pid, self._terminal = pty.fork()
        if not pid:
            os.execvpe(words[0], words, os.environ | {"TERM": "dumb", "PS1": "", "HISTFILE": "/dev/null"})
        self._pid = pid
        self.answer(f"{ready}\nggroupfs() {{ printf '@'; printf '<%s>' \"$@\"; printf '%s\\n' @; }}; ggroupfs ready\n")

    def close(self) -> None:
        """End the shell."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)

    def answer(self, keys: str) -> list[str]:
        """Type keys; return the arguments that were printed."""
        os.write(self._terminal, keys.encode())
        seen, deadline = b"", time.monotonic() + 20 * SLOW
        while (match := re.search(rb"@((?:<[^<>]*>)+)@", seen)) is None:
            readable, _, _ = select.select([self._terminal], [], [], deadline - time.monotonic())
            assert readable, f"no answer to {keys!r}: {seen!r}"
            seen += os.read(self._terminal, 4096)
        return re.findall("<([^<>]*)>", match[1].decode())


@pytest.fixture(scope="module", params=["bash", "zsh"])
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    """Start each of the two shells."""
    if request.param == "bash":
        made = Shell(["bash", "--norc", "--noprofile", "-i"], f"source '{BASH}'")
    else:
        if shutil.which("zsh") is None:
            pytest.skip("zsh is not installed")
        made = Shell(["zsh", "-f", "-i"], f"fpath=('{HERE}' $fpath); autoload -Uz compinit; compinit -D -u")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("metr\t", "metrics"),
        ("mount -o noself\t", "mount -o noselftest"),
        ("mount -o ro,nopo\t", "mount -o ro,nopoll"),
        ("mount -o gpu=nv\t", "mount -o gpu=nvidia"),
        ("mount --led\tkm\t", "mount --ledger kmod"),
        ("metrics --no-p\t --te\tx", "metrics --no-processes --textfile x"),
        ("run -p compute.fr\t1", "run -p compute.freeze=1"),
        ("run -p ComputeWe\t9 -p gmem.limit.l\t8G", "run -p ComputeWeight=9 -p gmem.limit.low=8G"),
        ("set --mount TREE 47\tgmem.rec\t1M", "set --mount TREE 4711 gmem.reclaim=1M"),
        ("doctor --mount TREE 47\t", "doctor --mount TREE 4711"),
        ("set --mount TREE batch.slice/a\tGMemH\t1G", "set --mount TREE batch.slice/a.service GMemHigh=1G"),
        ("set --mount TREE --res\t47\tGMemH\t gmem.swap.m\t", "set --mount TREE --reset 4711 GMemHigh gmem.swap.max"),
    ],
)
def test_a_tab(shell: Shell, tree: Path, keys: str, words: str) -> None:
    """The rest of the word is typed, with the space that a shell puts after a complete word."""
    found = shell.answer("ggroupfs " + keys.replace("TREE", str(tree)) + "\n")
    # Where bash puts a space between a long option and its value, zsh puts a =.
    found = [part for word in found for part in (word.split("=", 1) if word.startswith("--") else [word])]
    assert found == words.replace("TREE", str(tree)).split()


def test_zsh_reads_it() -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    result = subprocess.run(["zsh", "-f", "-n", ZSH], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
