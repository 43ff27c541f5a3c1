"""Level 7: a limit holds, or is shown not to, however memory is allocated, with and without the library."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from ggroupfs.client import Member
from tests.support.cgroups import cgroup, slice_path
from tests.support.mounted import Mounted, mounted
from tests.t7_nvidia.conftest import built, wait_for
from tests.t7_nvidia.programs import ERROR, GIB, MIB, STOP, Program, member, nvml_used, program, run_in, write

WAYS = ("plain", "pitch", "async", "pool", "create", "managed", "array", "ipc", "graph")
"""Ways in which ways.cu allocates."""
WANTED, LIMIT = 8, 4
"""GiB that a program allocates, and GiB that it may hold."""
DONE = 32
"""Offset in the page of ways.cu."""
UNCHARGED = ("graph",)
"""Ways whose memory only the driver places and counts: a hard limit does not refuse it, but kills the program."""
FIXED = ("array", "ipc")
"""Ways whose memory is charged before, and cannot move: going over a hard limit is refused. Movable memory makes
room."""
OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation, and CUDA_ERROR_OUT_OF_MEMORY."""
SETTLES_S = 3.0
"""Seconds after which the driver's figures have been seen, and memory has been moved."""
YOUNG_S = 11.0
"""Seconds in which a new daemon kills nothing, since programs with the library may still connect."""


STANDS = re.compile(
    r"ggroupfs: GPU 0: (?P<level>Process|Slice)\((?P<node>[^)]*)\) holds \d+, over its (?P<limit>gmem\.limit\.\w+):"
    r" process (?P<pid>\d+) holds \d+ that (?P<why>.*)\n"
)
"""Log line about a level that is over a limit."""
KILLED = re.compile(
    r"ggroupfs: GPU 0: (?P<level>Process|Slice)\((?P<node>[^)]*)\) is over its gmem\.limit\.max of \d+:"
    r" process (?P<pid>\d+) holds \d+ that cannot be moved: killed\n"
)
"""Log line about a member that is killed for a limit."""
FIXED_WHY, PAST_WHY, WITHOUT_WHY = "its library cannot move", "past the library in it", "library is not in it"
"""Reasons in the first line, by the way in which the program has allocated."""


@pytest.fixture(scope="module")
def gpu_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mounted tree whose log may have lines of STANDS and KILLED; each test checks its own."""
    with mounted(
        tmp_path_factory.mktemp("ggroup"),
        gpu="nvidia",
        expect_errors=(
            *(", over its gmem.limit.high: process ", ", over its gmem.limit.max: process ", ": killed\n"),
            " past its library, which limits do not move: ",
        ),
    ) as mount:
        yield mount


def lines_of(mount: Mounted, pattern: re.Pattern[str], pid: int) -> list[dict[str, str]]:
    """Return what the log lines that name a process say."""
    found = [match.groupdict() for line in list(mount.errors) if (match := pattern.fullmatch(line))]
    return [one for one in found if one["pid"] == str(pid)]


@pytest.fixture(scope="session")
def ways(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "ways")


def ends(run: Program) -> None:
    run.set(STOP, 1)
    assert run.process.wait(60) == 0


@pytest.mark.parametrize("name", ["gmem.limit.high", "gmem.limit.max"])
@pytest.mark.parametrize("way", WAYS)
def test_a_limit_holds_or_says_that_it_does_not(gpu_mount: Mounted, ways: str, way: str, name: str) -> None:
    """By NVML the program has no more than its limit, or an allocation has failed, or `over` shows it."""
    with program(*run_in(gpu_mount, f"{name}={LIMIT}G"), ways, "PAGE", way, str(WANTED)) as run:
        wait_for(lambda: run.u32(DONE) == 1 or run.process.poll() is not None, "it has allocated", seconds=60)
        time.sleep(SETTLES_S)
        if name == "gmem.limit.max" and way in UNCHARGED and run.process.poll() is not None:
            print(f"{way}, {name}: killed with {run.passes * 64} MiB")
            assert run.process.returncode == -signal.SIGKILL
            (line,), (killed,) = (lines_of(gpu_mount, which, run.pid) for which in (STANDS, KILLED))
            assert (line["level"], line["limit"], killed["level"]) == ("Process", name, "Process")
            assert PAST_WHY in line["why"]
            return
        group = Member(run.pid, 0, gpu_mount.group(run.pid))
        wait_for(group.path.exists, "it is in the tree")
        used, failed, over = nvml_used(run.pid), run.u32(ERROR), group.flat("gmem.events")["over"]
        print(f"{way}, {name}: {run.passes * 64} MiB allocated, error {failed}, NVML {used >> 20} MiB, over {over}")
        assert failed in (0, OUT_OF_MEMORY)
        assert used <= LIMIT * GIB + 64 * MIB or over == 1
        assert run.passes * 64 == WANTED << 10 or failed
        if name == "gmem.limit.max" and way not in UNCHARGED:
            assert bool(failed) == (way in FIXED)
            assert over == 0
        said = lines_of(gpu_mount, STANDS, run.pid)
        assert len(said) == over, said
        if over:
            assert (said[0]["level"], said[0]["limit"]) == ("Process", name)
            assert (PAST_WHY if way in UNCHARGED else FIXED_WHY) in said[0]["why"]
        ends(run)
        time.sleep(SETTLES_S)
        assert lines_of(gpu_mount, STANDS, run.pid) == said, "its end is nothing to say"
        assert not lines_of(gpu_mount, KILLED, run.pid)


def test_a_program_without_the_library_is_dead_in_time(gpu_mount: Mounted, ways: str, elastic: str) -> None:
    """Of two in a slice, the one that grows over the slice's hard limit ends within 2 s, and the other lives."""
    time.sleep(YOUNG_S)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(cgroup(f"ggroup-t7-hard-{os.getpid()}"))
        group = Member(0, 0, gpu_mount / "slice" / slice_path(place) / "0")
        within = ("sh", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', os.fspath(place))
        neighbour = stack.enter_context(program(*run_in(gpu_mount), elastic, "PAGE", "1024"))
        member(gpu_mount, neighbour)
        small = stack.enter_context(program(*within, ways, "PAGE", "plain", "2"))
        wait_for(lambda: small.u32(DONE) == 1 and group.path.exists(), "it is in its slice", seconds=60)
        write(group, "gmem.limit.max", f"{LIMIT}G")
        large = stack.enter_context(program(*within, ways, "PAGE", "plain", str(LIMIT)))
        wait_for(lambda: nvml_used(small.pid) + nvml_used(large.pid) > LIMIT * GIB, "it is over", seconds=60)
        took = wait_for(lambda: large.process.poll() is not None, "it is dead", seconds=2)
        print(f"killed after {took:.2f} s over the limit")
        assert large.process.returncode == -signal.SIGKILL
        events = group.flat("gmem.events")
        assert events["oom_kill"] == 1
        assert events["max"] >= 1
        wait_for(lambda: group.flat("gmem.events")["over"] == 0, "it says that it holds")
        assert nvml_used(small.pid) <= LIMIT * GIB
        (line,), (killed,) = (lines_of(gpu_mount, which, large.pid) for which in (STANDS, KILLED))
        assert (line["level"], line["limit"]) == ("Slice", "gmem.limit.max")
        assert WITHOUT_WHY in line["why"]
        assert line["node"] == killed["node"] == f"path='/{slice_path(place)}'"
        assert not lines_of(gpu_mount, STANDS, small.pid)
        ends(small)
        neighbour.finish()
