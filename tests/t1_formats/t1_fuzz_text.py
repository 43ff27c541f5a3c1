"""Fuzzes text that people and programs write: unit files, slices.d, the policies' TOML, traces, reports, jobs' lines.

Any text gives a result or a complaint that says where the fault is, and gives the same one each time.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from backend.core.records import GpuInfo
from backend.process.identity import slice_at
from ggroupfs.client import Tree
from ggroupfs.client.protocol import LINE_MOST, NAME_MOST, Announcement, Lines
from ggroupfs.errors import UsageError
from ggroupfs.fs.controls import CONTROLS
from ggroupfs.policies import cooperative, dynamic
from ggroupfs.policies.balance.settings import Settings as BalanceSettings
from ggroupfs.policies.config import Table
from ggroupfs.policies.dynamic.settings import read as read_dynamic
from ggroupfs.policies.lanes.program import Settings as LanesSettings
from ggroupfs.policies.slo import reports
from ggroupfs.policies.slo.settings import Settings as SloSettings
from ggroupfs.replay import trace
from ggroupfs.text.properties import PROPERTIES, text_of
from ggroupfs.units import files
from ggroupfs.units.settings import Mistake, Settings, merge
from ggroupfs.units.unitfile import Assignment, assignments
from tests.support.fuzzed import Target, outcome

CONTROL = {control.name: control for control in CONTROLS}
GPUS = [GpuInfo(index, f"GPU-{index}a", "stub", "none", capacity, 2000) for index, capacity in enumerate((1, 80 << 30))]
CUT = b"\x1e"
"""Separates the files of a unit, or of a directory, in the input."""


# Unit files and slices.d


def check_unit(raw: bytes) -> None:
    """Read the input as files of a unit, and as files of a slices.d: later files win over earlier ones."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, f"{number:02}.conf") for number in range(raw.count(CUT) + 1)]
        for path, content in zip(paths, raw.split(CUT), strict=True):
            path.write_bytes(content)
        settings, mistakes = files.of_unit(paths)
        assert (settings, mistakes) == files.of_unit(paths)
        check_settings(settings, mistakes, paths)
        apart = [[one for one in read(path) if one.section == files.SECTION] for path in paths]
        check_merge(apart, settings, mistakes)
        table = files.of_directory(Path(directory))
        assert table == files.of_directory(Path(directory))
        for path in ("/", "/a", "/system.slice/x.service", *(one.section for each in map(read, paths) for one in each)):
            slice_ = slice_at(path)
            if slice_ is not None:
                check_settings(table.of(slice_), table.mistakes, paths)


def read(path: Path) -> list[Assignment]:
    return list(assignments(path.read_text("utf-8", "backslashreplace"), path))


def check_settings(settings: Settings, mistakes: Sequence[Mistake], paths: Sequence[Path]) -> None:
    """Each setting found is one that the control files accept, and each mistake has a place in one of the files."""
    for mistake in mistakes:
        assert mistake.reason
        assert mistake.place.file in paths
        lines = len(re.split(rb"\r\n|[\n\r\0]", mistake.place.file.read_bytes()))
        assert 0 < mistake.place.line <= lines
        assert str(mistake).startswith(f"{mistake.place.file}:{mistake.place.line}: ")
    for gpu in GPUS:
        for name, setting in settings.on(gpu).items():
            control, text = text_of(name, setting.value, gpu.capacity)
            parse = CONTROL[control].parse
            assert parse is not None
            parse(text)
    assert all(mistake.place.file in paths for mistake in settings.unknown(GPUS))
    assert list(settings.values) == [one.name for one in PROPERTIES if one.name in settings.values]


def check_merge(apart: Sequence[Sequence[Assignment]], settings: Settings, mistakes: Sequence[Mistake]) -> None:
    """Merging all parts at once gives the first part, with each of the next parts laid over it."""
    values: dict[str, Any] = {}
    gpus, chosen, found = frozenset[str](), None, []
    for part in apart:
        merged, wrong = merge(part)
        values |= merged.values
        found += wrong
        if merged.chosen is not None:
            gpus, chosen = merged.gpus, merged.chosen
    assert (dict(settings.values), settings.gpus, settings.chosen) == (values, gpus, chosen)
    assert list(mistakes) == found


LINE = st.one_of(
    st.sampled_from(
        ["", "#", ";", "\\", "[", "]", "=", "[X-GGroup]", "[Service]", "[/a]", "[/*/x.service]", "[/a/../b]"]
    ),
    st.sampled_from(["[/[z-a]]", "[/[]", "[/" + "*a" * 20 + "b]", "[//]", "[/a\\b]", "[X-GGroup"]),
    st.tuples(
        st.sampled_from([*(one.name for one in PROPERTIES), "GPUs", "GMemHig", "", "MemoryMax", "\u0130"]),
        st.sampled_from(["=", " = ", "", "==", "=\\\n"]),
        st.one_of(
            st.sampled_from(
                ["", "8G", "50%", "100.01%", "infinity", "1.5M", "0", "0.0001us", "5ms 3us", "yes", "on", "16"]
            ),
            st.sampled_from(
                ["all", "0,1", "GPU-0a 1", "all 0", "\u0663G", "9" * 31, "1" * 5000, "1e9", "0x10", "-1", "1P"]
            ),
            st.text(max_size=6),
            st.integers(0, 2**70).map(str),
            st.tuples(st.integers(0, 2**70), st.sampled_from([*"KMGTPB%", "us", "ms", " s", "\xb5s"])).map(
                lambda pair: f"{pair[0]}{pair[1]}"
            ),
        ),
    ).map("".join),
    st.text(max_size=12),
)
UNIT = st.lists(st.one_of(LINE, LINE, LINE, st.just("\x1e")), max_size=14).map(
    lambda lines: "\n".join(["[X-GGroup]", *lines]).encode("utf-8", "surrogatepass")
)
UNITS = Target("units", check_unit, UNIT, examples=400)


# The policies' files

POLICIES: Sequence[Callable[[Table], object]] = (
    SloSettings.read,
    BalanceSettings.read,
    LanesSettings.of,
    lambda config: read_dynamic(Tree(Path("/nowhere")), config, dynamic.MANNER),
    lambda config: read_dynamic(Tree(Path("/nowhere")), config, cooperative.MANNER),
)


def check_policy(raw: bytes) -> None:
    """The first byte chooses the policy; the other bytes are its file."""
    settings = POLICIES[raw[0] % len(POLICIES) if raw else 0]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "policy.toml")
        file.write_bytes(raw[1:])

        first, why = outcome(lambda: settings(Table.load(file)), UsageError)
        assert not why or why.startswith(f"{file}: "), "it says which file"
        second = outcome(lambda: settings(Table.load(file)), UsageError)
        # Some values (NaN, for one) compare equal only to themselves.
        assert re.sub("at 0x[0-9a-f]+", "", repr((first, why))) == re.sub("at 0x[0-9a-f]+", "", repr(second))


KEYS = st.sampled_from(
    [
        *("socket", "interval", "span", "deadline", "window", "silence", "rest", "cooldown", "overload", "room"),
        *("processes", "reserve", "priority", "migrate", "gpu", "order", "lanes", "capacity", "report", "high", "low"),
        *("within", "budget", "headroom", "headroom_most", "lead", "hold", "idle", "expect", "floor", "step", "name"),
        *("slice", "pid", "upper", "lower", "statistic", "share", "least", "most", "scale_up", "rank", "move"),
    ]
)
VALUE = st.one_of(
    st.sampled_from(
        ["true", "false", '"50ms"', '"1s 5us"', '"0us"', '"/a.slice"', '"/"', '"/a/../b"', '"4242"', '"p99"']
    ),
    st.sampled_from(
        ['"mean"', '"p100"', '"8G"', '"max"', '""', '"fifo"', "1e400", "nan", "-inf", "0x" + "f" * 300, "-0.0"]
    ),
    st.sampled_from(
        ["[]", "{}", "[" * 3000 + "]" * 3000, "1979-05-27", '"' + "9" * 400 + ' s"', '"\\u0000"', "'''", "0.5"]
    ),
    st.integers(-(2**70), 2**70).map(str),
    st.floats(allow_nan=False).map(repr),
    st.text(max_size=5).map(lambda text: f'"{text}"'),
)
TOML = st.lists(
    st.one_of(
        *[st.tuples(KEYS, VALUE).map(" = ".join)] * 4,
        st.sampled_from(["[[group]]", "[[best_effort]]", "[group]", "group = 1", "# x", "[[group.a]]", "group = [1]"]),
    ),
    max_size=10,
).map("\n".join)
POLICY = Target(
    "policies",
    check_policy,
    st.tuples(st.integers(0, 4), TOML).map(lambda pair: bytes([pair[0]]) + pair[1].encode("utf-8", "surrogatepass")),
    examples=400,
)


# Traces


def check_trace(raw: bytes) -> None:
    """A trace as `ggroupfs replay` reads it: either jobs, which survive being written and read again, or a complaint
    with the number of a line."""
    lines = raw.decode("utf-8", "replace").splitlines(keepends=True)
    jobs, why = outcome(lambda: trace.parse(lines), UsageError)
    if jobs is None:
        match = re.match(r"line (\d+) of the trace: .|the trace has no jobs$", why, re.DOTALL)
        assert match is not None, why
        assert not match[1] or 0 < int(match[1]) <= len(lines)
    else:
        assert trace.parse(trace.dump(jobs).split("\n")) == jobs
        assert all(job.described().duration >= 0 for job in jobs)


NUMBERS = st.one_of(
    st.integers(-2, 2**64), st.sampled_from(["1e3", "1.0", "true", "null", "NaN", '"1"', "[1]", "9" * 5000])
)
FIELD = st.tuples(
    st.sampled_from(["arrival_us", "persistent", "ephemeral", "iterations", "gpu_us", "idle_us", "x"]), NUMBERS
)


@st.composite
def traces(draw: st.DrawFn) -> bytes:
    lines = []
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.one_of(st.sampled_from(["a", "b", "", "\\ud800", "\\n", '\\"']), st.text(max_size=3)))
        fields = {"arrival_us": 0, "persistent": 1, "ephemeral": 2, "iterations": 3, "gpu_us": 4}
        fields |= dict(draw(st.lists(FIELD, max_size=2)))
        words = [f'"job": "{name}"', *(f'"{key}": {value}' for key, value in fields.items())]
        lines.append("{" + ", ".join(words) + "}" + draw(st.sampled_from(["", "", "}", ",", "\x0b", "\u2028", "# x"])))
        lines.append(draw(st.sampled_from(["", "# x", " ", "[" * 5000, "{}", "null"])) if draw(st.booleans()) else "")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


TRACES = Target("traces", check_trace, traces(), examples=300)


# What jobs tell the lanes policy, and programs the slo policy


def check_lines(raw: bytes) -> None:
    """What a job sends, in pieces of the size that the first byte says: the lines are the same as in one piece, and
    each of them is a correct announcement or none."""
    size, raw = (raw[0] or 1, raw[1:]) if raw else (1, raw)

    def heard(pieces: Sequence[bytes]) -> list[str] | None:
        maker = Lines()
        return outcome(lambda: [line for piece in pieces for line in maker.feed(piece)], ValueError)[0]

    whole = heard([raw])
    assert whole == heard([raw[at : at + size] for at in range(0, len(raw), size)])
    for line in whole or ():
        assert len(line) < LINE_MOST
        said, _ = outcome(lambda line=line: Announcement.parse(line), ValueError)
        if said is not None:
            assert said.name.isascii()
            assert len(said.name) <= NAME_MOST
            assert all(type(number) is int and 0 <= number < 2**63 for number in said[1:])
            assert Announcement.parse(said.line().decode().rstrip("\n")) == said


ANNOUNCED = st.tuples(
    st.one_of(st.text(max_size=5).map(lambda text: f'"{text}"'), st.sampled_from(["1", "null", '"' + "x" * 65 + '"'])),
    *[NUMBERS] * 3,
).map(lambda of: 'job {{"name": {}, "persistent": {}, "ephemeral": {}, "duration": {}}}'.format(*of))
SAID = st.lists(
    st.one_of(ANNOUNCED, st.sampled_from(["end", "go", "job ", "job {}", "job " + "[" * 1000, "x" * 1023, "x" * 1024]))
).map(lambda lines: "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))
JOBS = Target("jobs", check_lines, st.tuples(st.binary(min_size=1, max_size=1), SAID).map(b"".join), examples=300)


def check_report(raw: bytes) -> None:
    """A datagram for the slo policy: either latencies of at most a day, or a refusal."""
    report, _ = outcome(lambda: reports.parse(raw), ValueError)
    if report is None:
        return
    assert all(type(one) is float and 0 <= one <= 86_400 for one in report.latencies)
    assert report.group is None or type(report.group) is str


LATENCY = st.one_of(NUMBERS, st.floats().map(repr), st.lists(st.floats().map(repr), max_size=3).map("[{}]".format))
REPORTS = Target(
    "reports",
    check_report,
    st.tuples(LATENCY, st.sampled_from(["", ', "group": "a"', ', "group": 1', ', "x": 1', ', "group": null'])).map(
        lambda pair: f'{{"latency_ms": {pair[0]}{pair[1]}}}'.encode()
    ),
    examples=300,
)

TARGETS = (UNITS, POLICY, TRACES, JOBS, REPORTS)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_fresh(target: Target) -> None:
    target.fuzz()


@pytest.mark.parametrize(("target", "file"), [(target, *one.values) for target in TARGETS for one in target.kept()])
def test_kept(target: Target, file: Path) -> None:
    target.replay(file)
