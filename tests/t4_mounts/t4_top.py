"""`ggroupfs top` on a real pseudo-terminal: the screen of a terminal emulator is compared.

No test waits for a fixed time: each waits until the screen has the expected content.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from backend.process.identity import cgroup_of
from ggroupfs.view import columns
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import complaint, ggroupfs, ok
from tests.support.mounted import Mounted, Tenant, eventually, mounted
from tests.support.terminal import DOWN, END, ENTER, ESCAPE, HOME, LEFT, RIGHT, Terminal, terminal

MIB = 1 << 20


def top(mount: Path, *options: str, **size: int) -> AbstractContextManager[Terminal]:
    """Start the command on a terminal, with ten frames a second, since a test waits for several."""
    words = [sys.executable, "-m", "ggroupfs", "top", "-d", "0.1", "--mount", os.fspath(mount), *options]
    return terminal(words, **size)


@pytest.fixture
def tenants(mount: Mounted) -> Iterator[tuple[Tenant, Tenant]]:
    """Start two tenants, with 64 MiB and 128 MiB, the only ones in the tree."""
    with (
        Tenant(mount, "--gmem", "64M", "--report", "0.1") as small,
        Tenant(mount, "--gmem", "128M", "--report", "0.1") as large,
    ):
        yield small, large


@pytest.fixture
def screen(mount: Mounted, tenants: tuple[Tenant, Tenant]) -> Iterator[Terminal]:
    """Yield a screen that shows both of them, with rates."""
    with top(mount.path) as screen:
        for tenant in tenants:
            screen.until(lambda tenant=tenant: re.search(r"\d+% ", screen.line(f"{tenant.pid} ")), "it has rates")
        yield screen


def normal(screen: Terminal, mount: Mounted, *tenants: Tenant) -> list[str]:
    """Return the screen without what differs each time, blank lines, and the slices that the tests themselves run
    in.
    """
    own = cgroup_of(os.getpid()).path.split("/")
    text = screen.text.replace(os.fspath(mount.path), "MOUNT")
    for name, tenant in zip(("ONE", "TWO"), tenants, strict=True):
        text = text.replace(f"{tenant.pid} python", f"{name} python")
    text = re.sub(r"\d+%( +)\d+", r"SHARE\1RATE", text)
    text = re.sub(r"busy [█▏▎▍▌▋▊▉░]+ +\d+%", "busy BAR SHARE", text)
    text = re.sub(r", read in \d+\.\d s", "", text)  # on a busy machine
    lines = [re.sub("^[│├└─ ]+", "", re.sub(" +", " ", line)) for line in text.splitlines()]
    return [line for line in lines if line and line.split()[0] not in own]


def below(screen: Terminal, first: Tenant, second: Tenant) -> Callable[[], bool]:
    """Return a condition: the second tenant is on a line below the first."""

    def ordered() -> bool:
        text = screen.text
        return 0 <= text.find(f"{first.pid} ") < text.find(f"{second.pid} ")

    return ordered


def choose(screen: Terminal, tenant: Tenant) -> None:
    """Move to the line of a tenant, which is then reversed."""
    screen.press(HOME)
    screen.until(lambda: chosen(screen) == "GPU 0", "the first line is chosen")
    while chosen(screen) != str(tenant.pid):
        before = chosen(screen)
        screen.press(DOWN)
        screen.until(lambda before=before: chosen(screen) not in ("", before), "another line is chosen")


def chosen(screen: Terminal) -> str:
    """Return the start of the line that is reversed, without figures, which change."""
    found = [
        screen.screen.display[row].lstrip("│├└─ ").split()
        for row in range(screen.screen.lines)
        if screen.screen.buffer[row][0].reverse and screen.screen.buffer[row][10].reverse
    ]
    if len(found) != 1 or not found[0]:
        return ""
    return " ".join(found[0][: 2 if found[0][0] == "GPU" else 1])


# Looking


def test_the_screen(screen: Terminal, mount: Mounted, tenants: tuple[Tenant, Tenant]) -> None:
    """It is shown whole, on 80 columns and 24 lines, with the most memory first."""
    assert normal(screen, mount, *tenants) == [
        "ggroupfs top: 2 processes, by memory, on MOUNT",
        "GPU 0 mem ▎░░░░░░░░░░░░░░░░░░░ 192.0M/16.0G busy BAR SHARE",
        "CURRENT HIGH SWAP SHARE KERN/S TIMESLICE FROZEN",
        "GPU 0 ggroupfs software… 192.0M - 0 SHARE RATE - -",
        "TWO python 128.0M max 0 SHARE RATE 2.048 ms -",
        "ONE python 64.0M max 0 SHARE RATE 2.048 ms -",
        "f freeze l limit t timeslice x kill c command / filter ? help q quit",
    ]
    heading = screen.line("CURRENT")
    row = screen.line(f"{tenants[1].pid} ")
    assert re.search(f"[├└]─{tenants[1].pid} python", row)
    assert heading.index("CURRENT") + len("CURRENT") == row.index("128.0M") + len("128.0M")
    assert heading.index("HIGH") + len("HIGH") == row.index("max") + len("max")


def test_who_comes_and_goes(screen: Terminal, mount: Mounted, tenants: tuple[Tenant, Tenant]) -> None:
    with Tenant(mount, "--gmem", "32M") as third:
        screen.shows(f"{third.pid} python")
        screen.shows("3 processes")
    screen.until(lambda: f"{third.pid} python" not in screen.text, "it is gone")
    screen.shows("2 processes")


def test_another_size_has_other_columns(screen: Terminal) -> None:
    assert "OUT MB/S" not in screen.text
    screen.resize(150, 20)
    screen.shows("OUT MB/S")
    screen.resize(60, 15)
    screen.until(lambda: "CURRENT" in screen.text and "TIMESLICE" not in screen.text, "fewer columns")


def test_memory_that_moves_is_seen_moving(mount: Mounted, tenants: tuple[Tenant, Tenant]) -> None:
    with top(mount.path, columns=150) as screen:
        screen.until(lambda: "0.0" in screen.line(f"{tenants[1].pid} "), "it has rates")
        tenants[1].write("gmem.limit.high", "32M")
        screen.until(lambda: any(float(word) > 0 for word in screen.line(f"{tenants[1].pid} ").split()[-1:]), "MB/s")
        assert screen.line(f"{tenants[1].pid} ").split()[2:5] == ["32.0M", "32.0M", "96.0M"]


def test_sorting(screen: Terminal, tenants: tuple[Tenant, Tenant]) -> None:
    small, large = tenants
    first, second = sorted(tenants, key=lambda tenant: tenant.pid)
    screen.press("p")
    screen.until(below(screen, first, second), "by pid")
    screen.shows("by pid")
    screen.press("m")
    screen.until(below(screen, large, small), "by memory")
    screen.press("w")
    small.write("gmem.limit.high", "16M")
    screen.until(below(screen, small, large), "by swap")
    large.write("compute.freeze", 1)
    screen.press("s")
    screen.until(below(screen, small, large), "by share")
    large.write("compute.freeze", 0)
    small.write("compute.freeze", 1)
    screen.until(below(screen, large, small), "by share")
    screen.press("k")
    screen.until(below(screen, large, small), "by kernels")
    screen.shows("by kernels")


def test_what_it_is_sorted_by_is_seen(screen: Terminal, tenants: tuple[Tenant, Tenant]) -> None:
    """Weights are ordered from the greatest and priorities from the best, also if there is no room for all columns."""
    small, large = tenants
    assert "WEIGHT" not in screen.text
    large.write("compute.weight", 50)
    screen.press("W")
    screen.until(below(screen, small, large), "by weight")
    screen.shows("WEIGHT")
    screen.until(lambda: screen.line(f"{large.pid} ").split()[-1] == "50", "its weight")
    large.write("compute.priority", 3)
    screen.press("P")
    screen.until(below(screen, large, small), "by priority")
    screen.until(lambda: screen.line(f"{large.pid} ").split()[-1] == "3", "its priority")
    assert "WEIGHT" not in screen.text
    screen.press("U")
    screen.until(lambda: screen.line(f"{large.pid} ").endswith(" root"), "its user")
    screen.shows("by user")


def test_full_command_lines(screen: Terminal, tenants: tuple[Tenant, Tenant]) -> None:
    screen.press("c")
    screen.until(lambda: f"{tenants[0].pid} {sys.executable} -m" in screen.line(f"{tenants[0].pid} "), "its words")
    screen.press("c")
    screen.until(lambda: f"{tenants[0].pid} python " in screen.line(f"{tenants[0].pid} "), "its name")


def test_a_history_of_shares(mount: Mounted, tenants: tuple[Tenant, Tenant]) -> None:
    with top(mount.path, columns=120) as screen:
        screen.until(lambda: re.search("[▂▃▄▅▆▇█]{6}", screen.line(f"{tenants[0].pid} ")), "its shares of late")
        tenants[0].write("compute.freeze", 1)
        screen.until(lambda: "▁▁▁▁▁▁▁▁" in screen.line(f"{tenants[0].pid} "), "it has none any more")


def test_filter(screen: Terminal, tenants: tuple[Tenant, Tenant]) -> None:
    """It acts while it is typed, remains after enter, and is removed by escape."""
    small, large = tenants
    screen.press(f"/{small.pid}")
    screen.until(lambda: f"{large.pid} python" not in screen.text, "the other one is not shown")
    screen.shows(f"{small.pid} python")
    screen.press(ENTER + "p")  # p is a command again, and not a letter of the filter
    screen.shows("by pid")
    assert f"{large.pid} python" not in screen.text
    screen.press(ESCAPE)
    screen.shows(f"{large.pid} python")


def test_slices_fold(mount: Mounted) -> None:
    with (
        cgroup("fold.slice") as path,
        Tenant(mount, "--gmem", "64M") as tenant,
        top(mount.path, columns=160) as screen,
    ):
        enter(tenant.pid, path)
        here = mount / "slice" / slice_path(path) / "0"
        eventually(lambda: (here / "gmem.current").read_text() == f"{64 * MIB}\n", "it is in its slice")
        screen.until(lambda: "64.0M" in screen.line("─fold.slice"), "the slice")
        screen.shows(f"└─{tenant.pid} python")
        assert screen.text.index("fold.slice") < screen.text.index(f"└─{tenant.pid} python")
        screen.press(END)
        screen.until(lambda: chosen(screen) == str(tenant.pid), "the last line is chosen")
        screen.press("\x1b[A")
        screen.until(lambda: chosen(screen) == "fold.slice", "the slice is chosen")
        screen.press(LEFT)
        screen.shows("fold.slice [+1]")
        screen.until(lambda: f"{tenant.pid} python" not in screen.text, "it is folded")
        screen.press("f")
        screen.shows(f"/{slice_path(path)} is frozen")
        assert (here / "compute.freeze").read_text() == "1\n"
        screen.press(RIGHT)
        screen.until(lambda: "frozen" in screen.line(f"{tenant.pid} python"), "who is in it is frozen")
        screen.press(END + "f")
        screen.shows(f"{tenant.pid} is frozen")
        screen.press("f")
        screen.shows(f"{tenant.pid} is thawed, but a slice above it is frozen")
        screen.press("v")
        screen.until(lambda: "fold.slice" not in screen.text, "no slices")
        screen.shows(f"{tenant.pid} python")
    eventually(lambda: not here.parent.exists(), "it goes with its cgroup")


def test_help(screen: Terminal) -> None:
    assert "choose a line" not in screen.text
    screen.press("?")
    screen.shows("choose a line")
    screen.shows("esc closes this")
    screen.press(ESCAPE)
    screen.until(lambda: "choose a line" not in screen.text and "CURRENT" in screen.text, "the help is gone")


# Actions


def test_freeze_and_thaw(screen: Terminal, tenants: tuple[Tenant, Tenant]) -> None:
    small, large = tenants
    choose(screen, small)
    screen.press("f")
    screen.shows(f"{small.pid} is frozen")
    assert (small.group / "compute.freeze").read_text() == "1\n"
    assert (large.group / "compute.freeze").read_text() == "0\n"
    screen.until(lambda: screen.line(f"{small.pid} python").endswith("frozen"), "its line says so")
    screen.shows("2 processes, 1 frozen")
    screen.press("f")
    screen.shows(f"{small.pid} is thawed")
    assert (small.group / "compute.freeze").read_text() == "0\n"
    screen.until(lambda: screen.line(f"{small.pid} python").endswith(" -"), "its line says so")


@pytest.mark.parametrize(
    ("typed", "limit", "shown"),
    [("32M", 32 * MIB, "32.0M"), ("50%", 8 << 30, "8.0G"), ("max", None, "max"), ("0.5G", 512 * MIB, "512.0M")],
)
def test_a_limit(screen: Terminal, tenants: tuple[Tenant, Tenant], typed: str, limit: int | None, shown: str) -> None:
    _, large = tenants
    large.write("gmem.limit.high", "96M")
    choose(screen, large)
    screen.press("l")
    screen.shows(f"{large.pid}/0: gmem.limit.high: 8G, 50%, max >")
    screen.press(typed + ENTER)
    screen.shows(f"{large.pid}: gmem.limit.high is {shown}")
    assert (large.group / "gmem.limit.high").read_text() == ("max\n" if limit is None else f"{limit}\n")
    screen.until(lambda: screen.line(f"{large.pid} python").split()[3:4] == [shown], "its line says so")


def test_a_timeslice_typed_faster_than_the_screen_follows(screen: Terminal, tenants: tuple[Tenant, Tenant]) -> None:
    small, _ = tenants
    choose(screen, small)
    screen.press(f"t500us{ENTER}")
    screen.shows(f"{small.pid}: compute.timeslice is 0.5 ms")
    assert (small.group / "compute.timeslice").read_text() == "0.5\n"
    screen.press(f"tdefault{ENTER}")
    screen.shows(f"{small.pid}: compute.timeslice is 2.048 ms")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("l50x", "! GMemHigh=50x: not a size"),
        ("l101%", "! GMemHigh=101%: more than 100 %"),
        ("t0", "! ComputeTimeSlice=0: no time at all"),
        ("t5s", "(ERANGE): a number that this file"),
        ("l1M", "(EBUSY): gmem.swap.max"),
    ],
)
def test_what_is_refused_is_said(screen: Terminal, tenants: tuple[Tenant, Tenant], keys: str, words: str) -> None:
    small, _ = tenants
    small.write("gmem.swap.max", 0)
    choose(screen, small)
    screen.press(keys + ENTER)
    screen.until(lambda: words in " ".join(screen.text.split()), words)
    assert (small.group / "gmem.limit.high").read_text() == "max\n"
    assert (small.group / "compute.timeslice").read_text() == "2.048\n"


def test_escape_sets_nothing(screen: Terminal, tenants: tuple[Tenant, Tenant]) -> None:
    small, _ = tenants
    choose(screen, small)
    screen.press("l32M")
    screen.until(lambda: "32M" in screen.text, "it is typed")
    screen.press(ESCAPE)
    screen.until(lambda: "32M" not in screen.text, "it is gone")
    screen.press("p")
    screen.shows("by pid")
    assert (small.group / "gmem.limit.high").read_text() == "max\n"


def test_a_gpu_has_nothing_to_set(screen: Terminal) -> None:
    screen.press(HOME + "f")
    screen.shows("! a GPU has no control files: choose a process or a slice")


# Killing


def ended_by(tenant: Tenant) -> int:
    """Return the signal that ended a tenant."""
    ended = os.waitid(os.P_PID, tenant.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    assert ended.si_code == os.CLD_KILLED
    return ended.si_status


def test_a_process_is_killed_after_a_question(screen: Terminal, tenants: tuple[Tenant, Tenant]) -> None:
    """The key alone sends nothing, nor do escape, an empty line or another word; yes sends TERM, and KILL its
    signal.
    """
    small, large = tenants
    question = f"{small.pid} python of root: end it? yes (TERM), or a signal: KILL, INT >"
    choose(screen, small)
    for answer, words in (
        (ESCAPE, ""),
        (ENTER, ""),
        (f"no{ENTER}", "! no: neither yes nor a signal: nothing was sent"),
        (f"CONT{ENTER}", f"{small.pid} python of root: SIGCONT was sent"),
    ):
        screen.press("x")
        screen.shows(question)
        screen.press(answer)
        screen.until(lambda: question not in screen.text, "it is answered")
        screen.shows(words)
    assert os.waitid(os.P_PID, small.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    screen.press(f"xkill{ENTER}")
    screen.shows("SIGKILL was sent")
    assert ended_by(small) == signal.SIGKILL
    screen.until(lambda: f"─{small.pid} python" not in screen.text, "its line is gone")
    choose(screen, large)
    screen.press(f"xyes{ENTER}")
    screen.shows("SIGTERM was sent")
    assert ended_by(large) == signal.SIGTERM


def test_what_cannot_be_killed(screen: Terminal) -> None:
    screen.press(HOME + "x")
    screen.shows("! only a process can be killed: choose one")


# Ends


@pytest.mark.parametrize("how", ["q", "\x03", signal.SIGTERM, signal.SIGHUP], ids=["q", "ctrl-c", "TERM", "HUP"])
def test_the_terminal_is_left_as_it_was(mount: Mounted, how: str | int) -> None:
    """This covers its modes, the cursor, and the former content of the screen."""
    with top(mount.path) as screen:
        before = screen.settings
        screen.shows("0 processes")
        assert screen.screen.alternate
        assert screen.settings != before
        if isinstance(how, str):
            screen.press(how)
        else:
            screen.process.send_signal(how)
        screen.take_rest()
        assert screen.process.returncode == 0
        assert screen.settings == before
        assert not screen.screen.alternate
        assert not screen.screen.cursor.hidden


def test_a_tree_that_does_not_answer_holds_up_no_key(mount: Mounted, screen: Terminal) -> None:
    mount.daemon.send_signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            screen.press("p")
            screen.shows("by pid")
            screen.press("m")
            screen.shows("by memory")
        screen.press("f")  # it waits for an answer too
        screen.press("?")
        screen.shows("choose a line")
        screen.press(ESCAPE)  # not together with the next key: that would be alt and the key
        screen.until(lambda: "choose a line" not in screen.text, "the help is gone")
        screen.press("q")
        screen.take_rest()
        assert screen.process.returncode == 0
    finally:
        mount.daemon.send_signal(signal.SIGCONT)


def test_a_tree_that_goes_is_said_to_and_one_that_comes_is_shown(tmp_path: Path) -> None:
    with mounted(tmp_path):
        screen_of = top(tmp_path)
        screen = screen_of.__enter__()
        screen.shows("0 processes")
    try:
        screen.shows("no ggroup tree is mounted there")
        with mounted(tmp_path) as mount, Tenant(mount, "--gmem", "16M") as tenant:
            screen.shows(f"{tenant.pid} python")
            screen.until(lambda: "no ggroup tree" not in screen.text, "the message is gone")
    finally:
        screen_of.__exit__(None, None, None)


# One frame


def test_once(mount: Mounted, tenants: tuple[Tenant, Tenant]) -> None:
    """Output is plain text, also without the option if there is no terminal."""
    small, large = tenants
    small.write("compute.freeze", 1)
    for words in (("top", "--once"), ("top",)):
        text = ok(*words, "-d", "0.3", "--mount", mount.path)
        assert "\x1b" not in text
        lines = text.splitlines()
        assert lines[0] == "2 processes, 1 frozen"
        assert lines[3].split() == [
            *("CURRENT", "HIGH", "SWAP", "SHARE", "KERN/S", "TIMESLICE", "FROZEN", "USER", "WEIGHT", "PRIO"),
            *("OFF", "IN", "MB/S", "OUT", "MB/S", "THROT", "ORIGIN", "TURN", "SET", "RESID"),
        ]
        row = next(line for line in lines if f"{small.pid} " in line)
        assert re.split(" {2,}", row.strip(" │")) == [
            *(f"└─{small.pid} python", "64.0M", "max", "0", "0%", "0", "2.048 ms", "frozen"),
            *("root", "100", "8", "freeze", "0.0", "0.0", "0%"),
            columns.origin_words(cgroup_of(small.pid).path) or columns.NOT_TOLD,
            *("-", "-", "-"),
        ]
        assert re.search(r"\b\d+%", next(line for line in lines if f"{large.pid} " in line))
    once = ("top", "--once", "-d", "0.3", "--mount", mount.path)
    eventually(lambda: re.search(rf"─{large.pid} .* [1-9]\d*% ", ok(*once)), "the one that is not frozen has its share")


def test_once_with_full_command_lines(mount: Mounted, tenants: tuple[Tenant, Tenant]) -> None:
    text = ok("top", "--once", "-c", "-d", "0.1", "--mount", mount.path)
    words = Path(f"/proc/{tenants[0].pid}/cmdline").read_bytes().decode().rstrip("\0").replace("\0", " ")
    assert f"─{tenants[0].pid} {words} " in text


def test_a_program_of_one_gpu_is_on_that_one(tmp_path: Path) -> None:
    """This holds although it has a directory for each GPU, as made by `ggroupfs run -p`."""
    with mounted(tmp_path, "soft.gpus=3") as mount:
        run = [sys.executable, "-m", "ggroupfs", "run", "--mount", os.fspath(mount.path), "-p", "compute.weight=50"]
        tenant = [sys.executable, "-m", "ggroupfs", "tenant", "--mount", os.fspath(mount.path), "--gpu", "1"]
        words = [*run, "--", *tenant, "--gmem", "16M", "--report", "0.1"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline()
                assert sorted(os.listdir(mount / str(process.pid))) == ["0", "1", "2"]
                once = ("top", "--json", "-d", "0.1", "--mount", mount.path)
                assert [one["gpu"] for one in json.loads(ok(*once))["processes"]] == [1]
                assert [one["gpu"] for one in json.loads(ok(*once, "--all"))["processes"]] == [0, 1, 2]
            finally:
                process.kill()


def test_once_without_unicode(mount: Mounted, tenants: tuple[Tenant, Tenant]) -> None:
    result = ggroupfs("top", "--once", "-d", "0.1", "--mount", mount.path, PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"`-{tenants[0].pid} python" in result.stdout


HIDDEN = """\
import json, os, sys
from ggroupfs import cli
from ggroupfs.commands import show, top
from ggroupfs.view import collector
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for words in json.loads(sys.argv[1]):
    print("$", *words)
    assert cli.main([*words, "--mount", sys.argv[2]]) == 0
"""
"""Script that runs the command as another user, which need not have the right to read it."""


@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_proc_that_hides_others(mount: Mounted, tenants: tuple[Tenant, Tenant], hidepid: int) -> None:
    """As on hosts for many users, the output says how many processes are missing."""
    proc = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", proc, "sh"]
    top = ["top", "-d", "0.1"]
    commands = [["show"], ["show", "--tree"], ["show", "--json"], [*top, "--once"], [*top, "--json"], ["metrics"]]
    words = [*private, sys.executable, "-c", HIDDEN, json.dumps(commands), os.fspath(mount.path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    said = "ggroupfs: show: 2 processes are missing: /proc is mounted with hidepid"
    assert [line.startswith(said) for line in done.stderr.splitlines()] == [True, True, True]
    _, *shown, once, live, metrics = done.stdout.split("$ ")
    assert not any(str(tenant.pid) in text for tenant in tenants for text in shown)
    assert once.splitlines()[1] == "0 processes, 2 more hidden by /proc"
    assert json.loads(live.partition("\n")[2])["hidden"] == 2
    for tenant in tenants:
        assert f'comm="",gpu="0",pid="{tenant.pid}",slice=""' in metrics
    assert "ggroup_scrape_errors 0.0" in metrics.splitlines()


def test_json(mount: Mounted, tenants: tuple[Tenant, Tenant]) -> None:
    small, large = tenants
    large.write("compute.freeze", 1)
    small.write("gmem.limit.high", "32M")
    told: dict[str, Any] = json.loads(ok("top", "--json", "-d", "0.5", "--mount", mount.path))
    assert list(told) == ["seconds", "gpus", "slices", "processes", "hidden"]
    assert told["hidden"] == 0
    assert 0.5 <= told["seconds"] < 5
    (gpu,) = told["gpus"]
    assert (gpu["gpu"], gpu["capacity"], gpu["current"]) == (0, 16 << 30, 160 * MIB)
    assert gpu["uuid"] == (mount / "gpus/0/uuid").read_text().strip()
    first, second = (next(one for one in told["processes"] if one["pid"] == tenant.pid) for tenant in tenants)
    assert first.keys() == second.keys()
    assert (first["current"], first["high"], first["swap"]) == (32 * MIB, 32 * MIB, 32 * MIB)
    assert (first["slice"], first["command"], first["frozen"]) == (cgroup_of(small.pid).path, "python", False)
    assert (first["user"], first["weight"], first["priority"]) == ("root", 100, 8)
    assert first["share"] > 0.5
    assert first["kernels"] > 10
    assert (second["high"], second["share"], second["kernels"], second["frozen"]) == (None, 0, 0, True)
    assert gpu["share"] == pytest.approx(first["share"] + second["share"])


def test_one_that_stands_by_its_quota(mount: Mounted, tenants: tuple[Tenant, Tenant]) -> None:
    """The screen shows for what fraction of the time, and why."""
    small, large = tenants
    large.write("compute.max", "10000 100000")

    def shown(pid: int) -> dict[str, Any]:
        told = json.loads(ok("top", "--json", "-d", "0.5", "--mount", mount.path))
        found: dict[str, Any] = next(one for one in told["processes"] if one["pid"] == pid)
        return found

    eventually(lambda: 0.7 < shown(large.pid)["throttled"] < 1, "it stands most of the time")
    eventually(lambda: shown(large.pid)["off"]["quota"] == 1, "why it does")
    assert shown(small.pid)["throttled"] == 0
    words = ("top", "--once", "-d", "0.5", "--mount", mount.path)
    eventually(lambda: re.search(rf"─{large.pid} .* quota .* [789]\d%  ", ok(*words)), "as text")


def test_what_it_does_not_take(tmp_path: Path) -> None:
    assert "no ggroup tree is mounted there" in complaint("top", "--once", "--mount", tmp_path, code=1)
    for words in ("-d 0", "-d -1", "-d inf", "-d nan", "-d soon", "--once --json"):
        result = ggroupfs("top", *words.split())
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
