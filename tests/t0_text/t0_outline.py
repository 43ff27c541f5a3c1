"""Snapshots as outlines, the changes between two of them, and their output."""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from typing import Any

import attrs
import pytest

from backend.core.records import MAX
from ggroupfs.text.names import slice_directory
from ggroupfs.text.refusals import MEANINGS, OF_MKDIR, meaning
from ggroupfs.view import columns
from ggroupfs.view.figures import Figures
from ggroupfs.view.frame import FIELDS, Frame, as_json, gauges, plain, summary
from ggroupfs.view.outline import HISTORY_MOST, ORDERS, Node, build, histories, lines
from ggroupfs.view.rates import COUNTERS, UNKNOWN, Rates, between, total
from ggroupfs.view.snapshot import GpuUse, ProcessUse, SliceUse, Snapshot

GIB = 1 << 30


def gpu(index: int = 0) -> GpuUse:
    return GpuUse(index, f"GPU-{index}", "a GPU", 16 * GIB, 4 * GIB)


def process(pid: int, slice_: str = "/", gpu: int = 0, start: int = 1, **figures: Any) -> ProcessUse:
    return ProcessUse(pid, start, f"name{pid}", slice_, gpu, Figures(**figures))


def snapshot(*processes: ProcessUse, slices: Collection[SliceUse] = (), gpus: int = 1, at: float = 0.0) -> Snapshot:
    every = tuple(attrs.evolve(one, at=at) for one in processes)
    return Snapshot(at, 0.1, tuple(gpu(index) for index in range(gpus)), tuple(slices), every)


def slices(*paths: str, gpus: int = 1, **figures: Any) -> list[SliceUse]:
    return [SliceUse(path, index, Figures(**figures)) for path in paths for index in range(gpus)]


def drawn(nodes: tuple[Node, ...], *words: Any, **more: Any) -> list[str]:
    return [line.prefix + line.node.label + (" +" if line.folded else "") for line in lines(nodes, *words, **more)]


def test_names_of_cgroups_in_the_tree() -> None:
    assert slice_directory("/") == "slice"
    assert slice_directory("/a.slice/0/_7") == "slice/a.slice/_0/__7"
    assert slice_directory("a.slice/") == "slice/a.slice"


# Rates


def test_rates_are_over_the_time_between_two_passes() -> None:
    was = {"finished": 10, "gpu_usec": 1_000_000, "swapin_bytes": 0, "swapout_bytes": 500, "throttled_usec": 0}
    now = {"finished": 30, "gpu_usec": 2_000_000, "swapin_bytes": 8, "swapout_bytes": 500, "throttled_usec": 2_800_000}
    before, after = snapshot(process(1, **was), at=1.0), snapshot(process(1, **now), at=5.0)
    assert between(before, after) == {"1/0": Rates(5.0, 0.25, 2.0, 0.0, 0.7)}


@pytest.mark.parametrize(
    "before",
    [
        None,
        snapshot(process(2, finished=1), at=1.0),
        snapshot(process(1, start=2, finished=1), at=1.0),
        snapshot(process(1, gpu=1, finished=1), at=1.0),
        snapshot(process(1, finished=1), at=2.0),
    ],
    ids=["first pass", "another pid", "the pid of one that is gone", "another GPU", "no time between"],
)
def test_no_rates_for_who_was_not_there(before: Snapshot | None) -> None:
    assert between(before, snapshot(process(1, finished=2), at=2.0)) == {}


def test_what_is_not_told_has_no_rate_and_neither_has_a_counter_that_went_back() -> None:
    before, after = snapshot(process(1, finished=5), at=0.0), snapshot(process(1, finished=4), at=1.0)
    assert between(before, after) == {"1/0": UNKNOWN}


def test_the_rates_of_several_are_the_sum_of_what_is_known() -> None:
    assert total([]) == UNKNOWN
    assert total([UNKNOWN, UNKNOWN]) == UNKNOWN
    assert total([Rates(1.0, 0.5), UNKNOWN, Rates(2.0, None, 3.0)]) == Rates(3.0, 0.5, 3.0, None)
    assert set(COUNTERS) <= FIELDS


# Outlines


def test_an_outline_has_processes_in_their_slices() -> None:
    taken = snapshot(
        process(3, "/b"), process(2, "/a/x"), process(1), process(10, "/a"), slices=slices("/a", "/a/x", "/b")
    )
    assert drawn(build(taken, {}), "pid") == [
        "GPU 0 a GPU",
        "├─a",
        "│ ├─x",
        "│ │ └─2 name2",
        "│ └─10 name10",
        "├─b",
        "│ └─3 name3",
        "└─1 name1",
    ]


def test_what_a_family_has_in_the_host_is_counted_once() -> None:
    """Its slice has no cgroup of its own, so that its members are beside it."""
    family = "/family-0-00000000000000aa"
    taken = snapshot(process(1, swap=4), process(2, swap=8), slices=slices(family, swap=4))
    assert build(taken, {})[0].figures.swap == 12
    taken = snapshot(process(1, family, swap=4), process(2, swap=8), slices=slices(family, swap=4))
    assert build(taken, {})[0].figures.swap == 12, "a cgroup may have that name, too"


def test_a_slice_is_on_the_gpus_where_it_matters() -> None:
    taken = snapshot(
        process(1, "/used", gpu=1),
        slices=[
            *slices("/used", "/made", gpus=2),
            SliceUse("/limited", 0, Figures(high=GIB)),
            SliceUse("/limited", 1, Figures(high=MAX)),
        ],
        gpus=2,
    )
    first, second = build(taken, {})
    assert drawn((first,), "pid") == ["GPU 0 a GPU", "├─limited", "└─made"]
    assert drawn((second,), "pid") == ["GPU 1 a GPU", "├─limited", "├─made", "└─used", "  └─1 name1"]
    elsewhere = snapshot(process(1, "/used", gpu=1), slices=slices("/used", gpus=2), gpus=2)
    assert drawn(build(elsewhere, {})[:1], "pid") == ["GPU 0 a GPU"]


def test_a_process_is_on_the_gpus_that_it_uses() -> None:
    """A process with a directory on each GPU appears where it has a context or memory; one that uses no GPU, on all."""
    every = (
        process(1, populated=False, current=0, swap=0),
        process(1, gpu=1, populated=True, current=0),
        process(1, gpu=2, populated=False, current=0, swap=5),
        process(2, populated=False),
        process(2, gpu=1, populated=False),
        process(3),
        process(3, gpu=1),
    )
    taken = snapshot(*every, gpus=3)

    def shown(*, unused: bool) -> list[list[str]]:
        return [drawn((node,), "pid")[1:] for node in build(taken, {}, unused=unused)]

    assert shown(unused=False) == [
        ["├─2 name2", "└─3 name3"],
        ["├─1 name1", "├─2 name2", "└─3 name3"],
        ["└─1 name1"],
    ]
    assert shown(unused=True)[0] == ["├─1 name1", "├─2 name2", "└─3 name3"]


def test_histories_go_on_from_the_pass_before() -> None:
    """They are the last shares of processes and the sums of slices; a process that reuses a pid has its own."""
    past: Mapping[Any, Any] = {}
    for number in range(HISTORY_MOST + 2):
        start = 1 if number < HISTORY_MOST else 2
        taken = snapshot(process(1, "/a"), process(2, "/a", start=start), slices=slices("/a"))
        nodes = build(taken, {"1/0": Rates(share=number / 100), "2/0": Rates(share=0.5)}, past=past)
        past = histories(nodes)
    found = {line.node.key: line.node.history for line in lines(nodes, "pid")}
    last = range(2, HISTORY_MOST + 2)
    assert found["1/0"] == tuple(number / 100 for number in last)
    assert found["2/0"] == (0.5, 0.5)
    assert found["gpus/0"] == found["slice/a/0"] == pytest.approx([0.5 + number / 100 for number in last])
    assert build(snapshot(process(9)), {}, past=past)[0].children[0].history == (None,)


def test_a_process_whose_slice_was_not_seen_yet_is_in_the_one_above() -> None:
    taken = snapshot(process(1, "/a/new/er"), process(2, "/gone"), slices=slices("/a"))
    assert drawn(build(taken, {}), "pid") == ["GPU 0 a GPU", "├─a", "│ └─1 name1", "└─2 name2"]


def test_rates_add_up_on_the_way_to_the_gpu() -> None:
    taken = snapshot(process(1, "/a"), process(2, "/a"), process(3), slices=slices("/a"))
    (node,) = build(taken, {"1/0": Rates(share=0.25), "2/0": Rates(share=0.5), "3/0": Rates(share=0.125)})
    assert {line.node.key: line.node.rates.share for line in lines((node,), "pid")} == {
        "gpus/0": 0.875,
        "slice/a/0": 0.75,
        "1/0": 0.25,
        "2/0": 0.5,
        "3/0": 0.125,
    }


@pytest.mark.parametrize(
    ("order", "pids"),
    [("pid", [1, 2, 3, 4]), ("memory", [3, 1, 4, 2]), ("share", [4, 1, 2, 3]), ("swap", [2, 1, 3, 4])],
)
def test_orders(order: str, pids: list[int]) -> None:
    """The largest comes first, unknown values last, and equal ones in the order of pids."""
    taken = snapshot(
        process(4, current=5),
        process(2, swap=1),
        process(3, current=9),
        process(1, current=5),
    )
    found = build(taken, {"4/0": Rates(share=0.5), "1/0": Rates(share=0.25)})
    assert [line.node.use.pid for line in lines(found, order)[1:]] == pids  # type: ignore[union-attr]
    assert [line.node.use.pid for line in lines(found, order, flat=True)] == pids  # type: ignore[union-attr]


def test_orders_of_what_is_set() -> None:
    """The greatest weight comes first, and the best priority; users are ordered by name."""
    one, other, third = process(1, weight=50, priority=0), process(2, weight=200, priority=8), process(3)
    one, other = attrs.evolve(one, user="zoe"), attrs.evolve(other, user="ann")
    found = build(snapshot(one, other, third), {})
    for order, pids in (("weight", [2, 1, 3]), ("priority", [1, 2, 3]), ("user", [2, 1, 3])):
        assert [line.node.use.pid for line in lines(found, order)[1:]] == pids  # type: ignore[union-attr]


CONTAINER = "0f6ad2a1c5c4d2f9" * 4
POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod6d1f0c7e_98f4_4a3c_8c43_0a3a0b9c1d2e.slice"


@pytest.mark.parametrize(
    ("path", "words", "name"),
    [
        ("/", None, None),
        ("/batch.slice", "batch.slice", None),
        ("/system.slice/trainer.service", "trainer.service", None),
        (f"/machine.slice/libpod-{CONTAINER}.scope", "container 0f6ad2a1c5c4", "container 0f6ad2a1c5c4"),
        (f"/docker/{CONTAINER}", "container 0f6ad2a1c5c4", "container 0f6ad2a1c5c4"),
        (f"/machine.slice/libpod-{CONTAINER}.scope/init", "container 0f6ad2a1c5c4", None),
        (POD, "pod 6d1f0c7e", "pod 6d1f0c7e"),
        (f"{POD}/cri-containerd-{CONTAINER}.scope", "pod 6d1f0c7e/0f6ad2a1c5c4", "container 0f6ad2a1c5c4"),
        ("/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", "job 123.0", None),
        ("/home/whatever", None, None),
    ],
)
def test_containers_pods_and_jobs(path: str, words: str | None, name: str | None) -> None:
    """The origin comes from the path of the cgroup; the slice of a container or pod has its name instead of the
    cgroup's.
    """
    assert columns.origin_words(path) == words
    taken = snapshot(process(7, path), slices=slices(path) if path != "/" else ())
    for line in lines(build(taken, {}), "pid")[1:]:
        assert line.node.use.gpu == 0  # type: ignore[union-attr]
        assert columns.ORIGIN.cell(line.node) == (words or columns.NOT_TOLD)
        if isinstance(line.node.use, SliceUse):
            assert columns.label(line) == line.prefix + (name or path.rpartition("/")[2])


def test_what_is_folded_is_not_shown() -> None:
    found = build(snapshot(process(1, "/a"), process(2), slices=slices("/a")), {})
    assert drawn(found, "pid", {"slice/a/0"}) == ["GPU 0 a GPU", "├─a +", "└─2 name2"]
    assert drawn(found, "pid", {"gpus/0"}) == ["GPU 0 a GPU +"]
    assert drawn(found, "pid", {"2/0", "slice/gone/0"})[-1] == "└─2 name2", "it has nothing to fold"


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("NAME12", ["GPU 0 a GPU", "└─b.slice", "  └─12 name12"]),
        ("b.sl", ["GPU 0 a GPU", "└─b.slice", "  ├─12 name12", "  └─13 name13"]),
        ("GPU", ["GPU 0 a GPU"]),
    ],
)
def test_a_filter_keeps_what_matches_with_what_is_above_and_below(pattern: str, left: list[str]) -> None:
    found = build(snapshot(process(12, "/b.slice"), process(13, "/b.slice"), process(1), slices=slices("/b.slice")), {})
    assert drawn(found, "pid", (), pattern) == left


def test_ten_thousand() -> None:
    every = [process(pid, f"/s{pid % 100}", current=pid) for pid in range(1, 10_001)]
    found = build(snapshot(*every, slices=slices(*(f"/s{number}" for number in range(100)))), {})
    for order in ORDERS:
        assert len(lines(found, order)) == 1 + 100 + 10_000


# Output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (columns.human(0), "0"),
        (columns.human(1023), "1023"),
        (columns.human(512 << 20), "512.0M"),
        (columns.human(5 << 50), "5120.0T"),
        (columns.limit(MAX), "max"),
        (columns.limit(1536), "1.5K"),
        (columns.percent(0.004), "0%"),
        (columns.percent(1.0), "100%"),
        (columns.percent(1.04), "100%"),
        (columns.parts(2.504), "250%"),
        (columns.speed(1_550_000), "1.6"),
        (columns.speed(123_400_000), "123"),
        (columns.timeslice(0), "default"),
        (columns.timeslice(2.048), "2.048 ms"),
        (columns.off({"freeze": 0, "turn": 0, "gr": 0}), "-"),
        (columns.off({"freeze": 1, "turn": 1, "gr": 0}), "freeze,turn"),
        (columns.off({"freeze": 0, "turn": 1, "gr": 1}), "turn/gr"),
        (columns.off({"freeze": 3, "turn": 1, "gr": 1}), "3 freeze,1 turn/1 gr"),
        (columns.off({"of_tomorrow": 1}), "of_tomorrow"),
        (columns.sparkline([]), ""),
        (columns.sparkline([None, 0, 0.5, 1, 1.04]), " ▁▅██"),
        (columns.cut("abcdef", 6), "abcdef"),
        (columns.cut("abcdefg", 6), "abcde…"),
        (columns.bar(0, 4), "░░░░"),
        (columns.bar(1 / 32, 4), "▏░░░"),
        (columns.bar(0.5, 4), "██░░"),
        (columns.bar(7, 4), "████"),
        (columns.readable("a\x1b[2Jü"), "a?[2Jü"),
        (columns.printable("└─█▌░ü", "utf-8"), "└─█▌░ü"),
        (columns.printable("└─█▌░ü", "ascii"), "`-##.?"),
        (columns.printable("├│", None), "||"),
    ],
)
def test_text(text: str, told: str) -> None:
    assert text == told


def test_what_is_not_told_is_a_dash_and_null_never_a_number() -> None:
    (node,) = build(snapshot(process(1)), {})
    (alone,) = node.children
    assert {column.cell(alone) for column in columns.WATCHED} == {columns.NOT_TOLD}
    assert set(columns.as_json(alone, columns.WATCHED).values()) == {None}


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({"memory_runs": 1, "memory_waits": 0}, "has"),
        ({"memory_runs": 0, "memory_waits": 1}, "waits"),
        ({"memory_runs": 0, "memory_waits": 0, "memory_turns": 7}, columns.NOT_TOLD),
        ({}, columns.NOT_TOLD),
    ],
)
def test_a_process_has_its_turn_of_memory_or_waits(figures: Mapping[str, int], told: str) -> None:
    (gpu,) = build(snapshot(process(1, **figures)), {})
    (node,) = gpu.children
    assert columns.TURN.cell(node) == told


def test_of_a_slice_it_is_told_how_many_have_their_turn() -> None:
    figures = {"memory_runs": 1, "memory_waits": 3, "working_set": 4 * GIB, "working_set_resident": GIB}
    (gpu,) = build(snapshot(process(1, "/a.slice"), slices=slices("/a.slice", **figures)), {})
    (node,) = gpu.children
    cells = [column.cell(node) for column in (columns.TURN, columns.SET, columns.RESIDENT)]
    assert cells == ["1 of 4", "4.0G", "25%"]


def test_a_table_is_aligned() -> None:
    off = {"freeze": 1, "turn": 0, "gr": 0}
    every = (
        process(1, current=5, high=MAX),
        process(22_222, "/a.slice", current=3 * GIB, high=4 * GIB, frozen=True, off=off),
    )
    nodes = [line.node for line in lines(build(snapshot(*every), {}), "pid", flat=True)]
    assert columns.table(nodes).splitlines() == [
        "  PID  GPU  COMMAND    SLICE     CURRENT  HIGH  SWAP  TIMESLICE  FROZEN  OFF     FINISHED",
        "    1    0  name1      /               5   max     -          -  -       -              -",
        "22222    0  name22222  /a.slice     3.0G  4.0G     -          -  frozen  freeze         -",
    ]


@pytest.mark.parametrize("width", range(10, 200, 7))
@pytest.mark.parametrize("wanted", [columns.CURRENT, columns.PRIORITY, columns.USER], ids=lambda column: column.name)
def test_the_column_that_is_sorted_by_is_there(width: int, wanted: columns.Column) -> None:
    """It replaces the last ones if there is no room, and otherwise keeps its place."""
    found = columns.fitting(width, columns.LIVE, wanted)
    assert sum(column.width + 1 for column in found) + columns.LABEL_LEAST <= max(width, columns.LABEL_LEAST)
    assert (wanted in found) == (columns.LABEL_LEAST + wanted.width + 1 <= width)
    assert len(set(found)) == len(found)
    plain = columns.fitting(width, columns.LIVE)
    if wanted in plain:
        assert list(found) == list(plain)
    others = [column for column in found if column is not wanted]
    assert others == [column for column in columns.LIVE if column is not wanted][: len(others)]


@pytest.mark.parametrize("width", range(10, 200, 7))
def test_only_columns_that_fit(width: int) -> None:
    found = columns.fitting(width)
    assert list(found) == list(columns.WATCHED[: len(found)])
    assert not found or sum(column.width + 1 for column in found) + columns.LABEL_LEAST <= width
    if len(found) < len(columns.WATCHED):
        more = columns.WATCHED[: len(found) + 1]
        assert sum(column.width + 1 for column in more) + columns.LABEL_LEAST > width


def test_a_terminal_of_80_characters_has_what_matters() -> None:
    assert columns.FROZEN in columns.fitting(79)


def test_a_frame() -> None:
    taken = snapshot(process(1, current=4 * GIB, frozen=True), process(1, gpu=1, current=0), gpus=2)
    frame = Frame(taken, None, build(taken, {"1/0": Rates(share=0.5)}))
    assert summary(frame) == "1 process, 1 frozen"
    one, other = taken.processes
    fights = attrs.evolve(one, figures=attrs.evolve(one.figures, undone=3))
    fought = attrs.evolve(frame, snapshot=attrs.evolve(taken, processes=(fights, other)))
    assert summary(fought) == "1 process, 1 frozen, 1 undid what was set"
    assert gauges(frame.gpus[0], 60) == "GPU 0   mem ██▌░░░░░░░ 4.0G/16.0G      busy █████░░░░░  50%"
    assert gauges(frame.gpus[1], 60) == "GPU 1   mem ██▌░░░░░░░ 4.0G/16.0G      busy               -"
    assert plain(frame).splitlines()[4].split()[:3] == ["CURRENT", "HIGH", "SWAP"]
    told: Mapping[str, Any] = as_json(frame)
    assert (told["seconds"], told["slices"]) == (None, [])
    assert [one["share"] for one in told["processes"]] == [0.5, None]
    assert "high" not in told["gpus"][0], "a GPU has no limit"


# Refusals


def test_every_errno_of_a_write_has_its_meaning() -> None:
    """The errnos are those that docs/semantics.md lists for writes."""
    for number in ("EINVAL", "ERANGE", "E2BIG", "EACCES", "EBUSY", "EAGAIN", "ENODEV", "EOPNOTSUPP", "ETIMEDOUT"):
        assert getattr(errno, number) in MEANINGS
        error = OSError(getattr(errno, number), "so it is called")
        assert meaning(error) == f"so it is called ({number}): {MEANINGS[error.errno]}"
    assert meaning(OSError(errno.EIO, "Input/output error")) == "Input/output error (EIO)"


def test_an_errno_of_mkdir_has_a_meaning_of_its_own() -> None:
    """Other errnos have that of a write."""
    assert meaning(OSError(errno.EAGAIN, "later"), OF_MKDIR) == f"later (EAGAIN): {OF_MKDIR[errno.EAGAIN]}"
    assert meaning(OSError(errno.EROFS, "no"), OF_MKDIR) == f"no (EROFS): {MEANINGS[errno.EROFS]}"
