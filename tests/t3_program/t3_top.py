"""Level 3: the screen of `top` in this process, with frames made by hand; and one pass over a tree of plain files."""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from backend.core.records import MAX
from backend.process import procfs
from backend.process.identity import cgroup_of
from ggroupfs import client
from ggroupfs.commands import screen
from ggroupfs.commands.screen import Top
from ggroupfs.view import columns, commandlines, figures, snapshot
from ggroupfs.view.columns import label
from ggroupfs.view.commandlines import CommandLines
from ggroupfs.view.figures import Figures
from ggroupfs.view.frame import Frame
from ggroupfs.view.listing import Listing
from ggroupfs.view.outline import build
from ggroupfs.view.snapshot import GpuUse, ProcessUse, Snapshot, take

SECONDS = 20.0


def frame(count: int) -> Frame:
    """Return a frame of a GPU with `count` processes."""
    processes = (ProcessUse(pid, 1, "busy", "/", 0, Figures(current=pid)) for pid in range(1, count + 1))
    taken = Snapshot(0.0, 0.1, (GpuUse(0, "GPU-0", "a GPU", 1 << 30, 1 << 20),), (), tuple(processes))
    return Frame(taken, None, build(taken, {}))


async def until(pilot: Pilot[int], condition: Callable[[], object]) -> None:
    """Let the app work until a condition holds."""
    async with asyncio.timeout(SECONDS):
        while not condition():
            await pilot.pause()


def test_ten_thousand_processes_cost_what_is_seen_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to the end and back, in steps: never more labels are made than the screen has lines."""
    made: list[str] = []

    def counting(line: object) -> str:
        made.append(label(line))  # type: ignore[arg-type]
        return made[-1]

    told = frame(10_000)
    monkeypatch.setattr(screen, "look", lambda *_: told)
    monkeypatch.setattr(columns, "label", counting)

    async def scenario() -> None:
        app = Top(Path("/nowhere"), 3600.0)
        async with app.run_test(size=(80, 24)) as pilot:
            listing = app.query_one(Listing)
            await until(pilot, lambda: len(listing.lines) == 10_001)
            await until(pilot, lambda: any("10000 busy" in text for text in made))
            for key in ("end", "pageup", "home", "pagedown"):
                made.clear()
                await pilot.press(key)
                await until(pilot, lambda: made)
                assert len(made) <= 3 * 24, f"{len(made)} of 10001 lines were made"
            await pilot.press("end")
            await until(pilot, lambda: any(text.endswith("└─1 busy") for text in made))

    asyncio.run(scenario())


def test_what_is_chosen_stays_chosen_wherever_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "look", lambda *_: frame(30))

    async def scenario() -> None:
        app = Top(Path("/nowhere"), 3600.0)
        async with app.run_test(size=(80, 24)) as pilot:
            listing = app.query_one(Listing)
            await until(pilot, lambda: len(listing.lines) == 31)
            await pilot.press("down")
            assert listing.chosen is not None
            assert (listing.at, listing.chosen.node.key) == (1, "30/0")
            await pilot.press("p")
            assert (listing.at, listing.chosen.node.key) == (30, "30/0")
            assert listing.scroll_offset.y + listing.size.height > 30, "it is still seen"

    asyncio.run(scenario())


def test_a_look_that_hangs_holds_up_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()

    def hang(*_: object) -> Frame:
        forever.wait(SECONDS)
        raise OSError("at last")

    monkeypatch.setattr(screen, "look", hang)

    async def scenario() -> None:
        app = Top(Path("/nowhere"), 0.1)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("question_mark")
            await until(pilot, lambda: isinstance(app.screen, screen.Help))
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(app.screen, screen.Help))
            await pilot.press("q")
        assert app.return_value == 0

    asyncio.run(scenario())
    forever.set()


# Reading

FILES = {
    "gmem.stat": "resident 5\nswapped 7\nswapin 1\nswapin_bytes 2\nswapout 3\nswapout_bytes 4\nmove_usec 9\n",
    "gmem.current": "5\n",
    "gmem.swap.current": "7\n",
    "gmem.peak": "6\n",
    "gmem.swap.peak": "9\n",
    "gmem.limit.high": "max\n",
    "gmem.limit.max": "max\n",
    "gmem.oom.group": "0\n",
    "gmem.limit.low": "0\n",
    "gmem.swap.max": "8\n",
    "gmem.events": "low 0\nhigh 2\nover 1\n",
    "compute.timeslice": "2.048\n",
    "compute.freeze": "0\n",
    "compute.events": "populated 1\nfrozen 1\n",
    "compute.priority": "8\n",
    "compute.weight": "100\n",
    "compute.max": "max 100000\n",
    "gcgroup.stat": "tsgs 1\nchannels 8\nattached 1\nmanaged 1\n",
}
"""Files of a process on a machine that reports nothing of what it runs."""


def plant(path: Path, files: dict[str, str]) -> None:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of plain files, in which this very process uses a GPU."""
    plant(
        tmp_path / "gpus/0",
        {
            "uuid": "GPU-0\n",
            "name": "a GPU\n",
            "gmem.capacity": "64\n",
            "gmem.current": "5\n",
            "gpu.events": "present 1\n",
        },
    )
    (tmp_path / "gpus/GPU-0").symlink_to("0")
    (tmp_path / "ggroup.backend").write_text("gpu soft\n")
    (tmp_path / "self").symlink_to(str(os.getpid()))
    plant(tmp_path / str(os.getpid()) / "0", FILES)
    plant(tmp_path / "slice/a.slice/0", FILES | {"compute.timeslice": "default\n"})
    plant(tmp_path / "slice/a.slice/_0/0", FILES)
    plant(tmp_path / "slice/²/0", FILES)
    return tmp_path


def test_a_pass_reads_everything_there_is(tree: Path) -> None:
    taken = take(tree)
    assert taken.gpus == (GpuUse(0, "GPU-0", "a GPU", 64, 5),)
    told = Figures(
        current=5,
        swap=7,
        peak=6,
        swap_peak=9,
        high=MAX,
        limit_max=MAX,
        oom_group=False,
        low=0,
        swap_max=8,
        swapin=1,
        swapin_bytes=2,
        swapout=3,
        swapout_bytes=4,
        move_usec=9,
        timeslice=2.048,
        freeze=False,
        frozen=True,
        populated=True,
        priority=8,
        weight=100,
        quota=MAX,
        period=100_000,
        tsgs=1,
        channels=8,
        attached=1,
        managed=True,
        events={"low": 0, "high": 2},
        over=True,
    )
    pid = os.getpid()
    command = Path("/proc/self/comm").read_text().strip()
    (alone,) = taken.processes
    inode = (tree / str(pid)).stat().st_ino
    assert alone == ProcessUse(pid, inode, command, cgroup_of(pid).path, 0, told, alone.at)
    assert taken.at - taken.took < alone.at < taken.at + taken.took
    assert [(one.path, one.directory) for one in taken.slices] == [
        ("/a.slice", "slice/a.slice/0"),
        ("/a.slice/0", "slice/a.slice/_0/0"),
        ("/²", "slice/²/0"),
    ]
    assert [one.figures.timeslice for one in taken.slices] == [0.0, 2.048, 2.048]


def test_a_pass_opens_only_what_is_asked_for(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    content = client.content
    for module in (snapshot, figures):
        monkeypatch.setattr(module, "content", lambda path: opened.append(os.path.basename(path)) or content(path))
    (alone,) = take(tree, ("current", "swap", "high"), slices=False).processes
    assert (alone.figures.current, alone.figures.swap, alone.figures.high) == (5, 7, MAX)
    assert (alone.figures.low, alone.figures.frozen) == (None, None)
    assert sorted(opened) == [
        "gmem.capacity",
        "gmem.current",
        "gmem.limit.high",
        "gmem.stat",
        "gpu.events",
        "name",
        "uuid",
    ]


def test_users_and_full_command_lines_are_read_where_asked_for(tree: Path) -> None:
    (alone,) = take(tree, users=True, commands=CommandLines()).processes
    assert alone.user == pwd.getpwuid(os.geteuid()).pw_name
    assert alone.command == " ".join(sys.orig_argv)[: procfs.COMMAND_LINE_MOST]


def test_a_process_that_has_its_readers_wait_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other processes are read all the same, and it is never tried again; a new one with its pid is unknown."""
    forever, asked = threading.Event(), []

    def read(pid: int) -> str:
        asked.append(pid)
        if pid in (2, 4):
            forever.wait(SECONDS)
        if pid == 3:
            raise ProcessLookupError
        return f"program {pid}"

    monkeypatch.setattr(procfs, "command_line", read)
    monkeypatch.setattr(commandlines, "PATIENCE_S", 0.2)
    lines = CommandLines()
    told = {(1, 1): "program 1", (5, 5): "program 5"}
    assert lines.read([(pid, pid) for pid in range(1, 6)]) == told
    assert asked == [1, 2, 3, 4, 5]
    assert lines.read([(pid, pid) for pid in range(1, 6)]) == told
    assert asked == [1, 2, 3, 4, 5, 1, 3, 5]
    monkeypatch.setattr(commandlines, "STUCK_MOST", 2)
    assert lines.read([(1, 1)]) == {}, "two threads wait already"
    forever.set()


def test_who_exits_meanwhile_is_left_out(tree: Path) -> None:
    for pid in (4194304, 4194305):  # above the largest pid
        plant(tree / str(pid) / "0", FILES)
    (tree / "4194305/0/gmem.stat").unlink()
    assert [one.pid for one in take(tree).processes] == [os.getpid()]


def test_no_tree(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no ggroup tree is mounted there"):
        take(tmp_path)
