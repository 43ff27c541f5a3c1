"""compute.sm.max on a real GPU: what kernels get of the SMs, when a change acts, and that results are the same."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from ggroupfs.client import Member
from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import ROOT, Worker, built, wait_for
from tests.t7_nvidia.placing import SMS, WHOLE, change, limit, sms_of, together
from tests.t7_nvidia.programs import Program, group_of, member, program, run_in, write
from tests.t7_nvidia.spaces import go_on, placed_in, several, spatial
from tests.t7_nvidia.strangers import Strangers
from tests.t7_nvidia.trained import STEPS, outcome, torch

Start = Callable[..., Worker]

PERCENTS = (25, 50, 75)
"""Parts of the SMs that programs are given."""
FILL, QUICK = ("50", str(WHOLE)), ("50", "264")
"""Words of placed.cu: kernels of 0.8 ms on an H200 that take whole rounds, and of 0.1 ms."""
WINDOW_S, SETTLED_S = 1.0, 0.1
"""Seconds over which a rate is measured, and those before that in which a change acts."""
WITHIN = 0.05
"""Part by which a rate may differ from the share of the SMs."""
APART = "45%"
"""Part of the SMs that two programs can have with none in common. On an H200 groups of 8 SMs have 120 of the 132, an
odd number of groups: programs with halves, of 8 groups each, have one in common."""
TILED = 64, 16
"""SMs on which the blocks of a product make whole rounds: the 512 tiles of matmul.py. On 96 and 32 SMs they make 6 and
16, and the rate was 0.370 of the other, not a third."""
CHANGES, ACTS_S = 60, 0.005
"""Number of changes, and seconds in which each is to act."""
DISTURBED = 0.25
"""Fraction of the changes (at least one) that may take longer if strangers were there (strangers.py)."""
PAUSE_S = 0.05
"""Longest pause between two changes, seconds."""


@pytest.fixture(scope="session")
def placed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "placed")


@contextlib.contextmanager
def running(mount: Mounted, binary: str, *words: str) -> Iterator[tuple[Program, Member]]:
    """Run placed.cu with the library, and yield it with its control files."""
    with placed_in(mount, binary, None, *words) as run:
        yield run, Member(run.pid, 0, mount.group(run.pid))


def launches(group: Member) -> tuple[int, int]:
    """Return the launches that ran on the SMs of a limit alone, and on all in spite of it."""
    stat = group.flat("gcgroup.stat")
    return stat.get("capped_launches", 0), stat.get("uncapped_launches", 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["own", "legacy", "thread"])
def test_a_rate_is_the_share_of_the_sms(gpu_mount: Mounted, placed: str, kind: str) -> None:
    """In a stream of the program, the NULL stream and that of a thread."""
    with running(gpu_mount, placed, *FILL, kind) as (run, group):
        total = run.u32(SMS)
        assert group.read("compute.sm.max") == "max"
        time.sleep(SETTLED_S)
        (full,) = together([run], WINDOW_S)
        assert len(sms_of(run)) == total
        for percent in PERCENTS:
            sms = limit(run, group, f"{percent}%")
            assert 0 <= total * percent / 100 - sms < total * 0.1
            time.sleep(SETTLED_S)
            (rate,) = together([run], WINDOW_S)
            print(
                f"{kind}, {percent} %: {sms} SMs of {total}, {rate / full:.4f} of the rate, {sms / total:.4f} of them"
            )
            assert len(sms_of(run)) == sms
            assert rate / full == pytest.approx(sms / total, rel=WITHIN)
        capped, uncapped = launches(group)
        assert capped > 0
        assert uncapped == 0
        write(group, "compute.sm.max", "max")
        time.sleep(SETTLED_S)
        (again,) = together([run], WINDOW_S)
        assert len(sms_of(run)) == total
        assert again == pytest.approx(full, rel=WITHIN)
        run.finish()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("streams", [1, 64])
def test_a_change_acts_within_milliseconds(gpu_mount: Mounted, placed: str, streams: int) -> None:
    """From the write until a kernel is done that ran on the SMs of the new limit; none is lost, or out of order."""
    rng, took, first, disturbed, known = random.Random(streams), list[float](), list[float](), list[float](), {100}
    with Strangers() as strangers, running(gpu_mount, placed, *QUICK, "own", "4", str(streams)) as (run, group):
        before, percent = run.u32(SMS), 100
        for _ in range(CHANGES):
            time.sleep(rng.uniform(PAUSE_S / 5, PAUSE_S))
            percent = rng.choice([one for one in (*PERCENTS, 100) if one != percent])
            found = change(run, group, percent, before)
            before = found.after
            is_strange = found.seconds > ACTS_S and strangers.during(found.start, found.start + found.seconds)
            (disturbed if is_strange else took if percent in known else first).append(found.seconds)
            if found.seconds > ACTS_S / 2 or percent not in known:
                which = "again" if percent in known else "first"
                print(f"{percent} %, {which}: {1e3 * found.seconds:.2f} ms; written in {1e3 * found.written_s:.2f}")
            known.add(percent)
        run.finish()
        print(run.log.read_text()[-4000:])
    took.sort()
    print(f"{streams} streams: {len(took)} changes, {1e3 * statistics.median(took):.2f} ms, longest", end=" ")
    print(f"{1e3 * took[-1]:.2f}, the first to each part {[round(1e3 * one, 2) for one in first]};", end=" ")
    print(f"{len(disturbed)} longer ones beside strangers", flush=True)
    assert len(disturbed) <= max(1, CHANGES * DISTURBED)
    assert took[-1] <= ACTS_S
    assert max(first, default=0.0) <= ACTS_S


@pytest.mark.timeout(120)
def test_programs_share_no_sm(gpu_mount: Mounted, placed: str) -> None:
    """Two in a space with part of the SMs each have different ones: both have their share at the same time, which they
    had not if they shared a group. What a kernel reads as the number of its SM is of its context: two on different
    groups both have a 0.
    """
    with spatial(gpu_mount, "halves") as (name, _), placed_in(gpu_mount, placed, name, *FILL) as first:
        time.sleep(SETTLED_S)
        (full,) = together([first], WINDOW_S)
        with placed_in(gpu_mount, placed, name, *FILL) as second:
            runs, total = [first, second], first.u32(SMS)
            groups = [Member(run.pid, 0, gpu_mount.group(run.pid)) for run in runs]
            parts = [limit(run, group, APART) for run, group in zip(runs, groups, strict=True)]
            time.sleep(SETTLED_S)
            each = together(runs, WINDOW_S)
            print(f"{parts} SMs of {total}: {each[0] / full:.4f} and {each[1] / full:.4f} of the rate alone;", end=" ")
            print(f"numbers in common: {len(sms_of(first) & sms_of(second))}")
            for rate, sms in zip(each, parts, strict=True):
                assert rate / full == pytest.approx(sms / total, rel=WITHIN)
            second.finish()
        first.finish()


@pytest.mark.timeout(120)
def test_the_smallest_of_a_slice_holds(gpu_mount: Mounted, placed: str) -> None:
    with spatial(gpu_mount, "smallest") as (name, slice_), several(gpu_mount, placed, name, 2, *FILL) as runs:
        groups = [Member(run.pid, 0, gpu_mount.group(run.pid)) for run in runs]
        own = limit(runs[0], groups[0], "25%")
        shared = limit(runs[0], slice_, "50%")
        time.sleep(SETTLED_S)
        go_on(runs, 1)
        assert [len(sms_of(run)) for run in runs] == [own, shared]
        assert groups[1].read("compute.sm.max") == "max", "of each level it is told what was asked there"
        write(slice_, "compute.sm.max", "max")
        time.sleep(SETTLED_S)
        go_on(runs, 1)
        assert len(sms_of(runs[0])) == own
        for run in runs:
            run.finish()


@pytest.mark.timeout(120)
def test_graphs_run_on_all_sms_and_are_counted(gpu_mount: Mounted, placed: str) -> None:
    with running(gpu_mount, placed, *FILL, "graph") as (run, group):
        time.sleep(SETTLED_S)
        (full,) = together([run], WINDOW_S)
        limit(run, group, "25%")
        time.sleep(SETTLED_S)
        before, count = launches(group)[1], run.passes
        (rate,) = together([run], WINDOW_S)
        grew, made = launches(group)[1] - before, run.passes - count
        print(f"{rate / full:.4f} of the rate; {grew} launches counted of {made}")
        assert len(sms_of(run)) == run.u32(SMS)
        assert rate == pytest.approx(full, rel=WITHIN)
        assert grew >= 0.5 * made
        run.finish()


@pytest.mark.timeout(120)
def test_products_have_their_share(gpu_mount: Mounted) -> None:
    """cuBLAS launches kernels that know how many SMs the GPU has, not how many there are for them."""
    pytest.importorskip("torch")
    words = [sys.executable, os.fspath(ROOT / "tests" / "t7_nvidia" / "matmul.py"), "zeros"]
    with program(*run_in(gpu_mount), *words) as run:
        assert run.process.stdin is not None
        assert run.process.stdout is not None

        def tell(line: str) -> None:
            print(line, file=run.process.stdin, flush=True)

        def requests_s() -> float:
            """Return the median seconds of a request from now on."""
            tell("take")
            assert run.process.stdout is not None
            run.process.stdout.readline()
            time.sleep(2 * WINDOW_S)
            tell("take")
            found: list[tuple[float, float]] = json.loads(run.process.stdout.readline())
            return statistics.median(seconds for _, seconds in found)

        assert run.process.stdout.readline() == "loaded\n"
        tell("begin")
        assert run.process.stdout.readline() == "ready\n"
        group = Member(run.pid, 0, gpu_mount.group(run.pid))
        wait_for(group.path.exists, "it is in the tree")
        time.sleep(SETTLED_S)
        begun = time.monotonic()
        more = limit(run, group, TILED[0])
        first_s = time.monotonic() - begun
        time.sleep(SETTLED_S)
        before, faster = launches(group), requests_s()
        begun = time.monotonic()
        less = limit(run, group, TILED[1])
        print(f"written in {first_s:.3f} s, and in {time.monotonic() - begun:.3f} s", flush=True)
        time.sleep(SETTLED_S)
        slower = requests_s()
        capped, uncapped = (b - a for a, b in zip(before, launches(group), strict=True))
        print(f"on {less} SMs {faster / slower:.4f} of the rate on {more}; {capped} launches there, {uncapped} on all")
        assert faster / slower == pytest.approx(less / more, rel=WITHIN)
        assert capped > 0
        assert uncapped == 0


@pytest.mark.timeout(300)
def test_training_is_the_same_to_the_bit(gpu_mount: Mounted) -> None:
    """While compute.sm.max is rewritten at random, again and again: losses are those of a plain run."""
    with torch(None, "train") as run:
        expected, _ = outcome(run)
    assert len(expected) == 8 * STEPS
    rng, written, capped, refused = random.Random(50), 0, 0, Counter[str]()
    with torch(gpu_mount, "train") as run:
        group = member(gpu_mount, run)
        while run.process.poll() is None and run.passes < STEPS - 5:
            try:
                write(group, "compute.sm.max", rng.choice(("max", "6%", "25%", "50%", "75%", "100%")))
                written += 1
            except OSError as error:
                refused[errno.errorcode.get(error.errno or 0, str(error))] += 1
            time.sleep(rng.uniform(0.0, PAUSE_S))
        with contextlib.suppress(OSError):  # the program may just have ended
            capped, _ = launches(group)
            write(group, "compute.sm.max", "max")
        losses, median = outcome(run)
    print(f"written {written} times, refused {dict(refused)}; {capped} launches capped; step {median:.0f} us")
    assert losses == expected
    assert written >= 50
    assert not refused
    assert capped > 1000


@pytest.mark.timeout(120)
def test_one_without_the_library_is_refused(gpu_mount: Mounted, worker: Start) -> None:
    bare = worker()
    group = Member(bare.pid, 0, group_of(gpu_mount, bare))
    with pytest.raises(OSError, match="not supported") as caught:
        write(group, "compute.sm.max", "50%")
    assert caught.value.errno == errno.EOPNOTSUPP
    assert group.read("compute.sm.max") == "max"
    bare.drained()
