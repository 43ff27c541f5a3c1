"""Parts of generated histories: small numbers that meet limits, and writes as text with their meaning.

A strategy never names a thing of the system under test: it draws a :data:`pick`, and the machine maps this index to a
thing in a list of its own. So every generated step is meaningful.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TypeVar

import attrs
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from backend.core.nextuse import NEXT_USE_MOST
from backend.core.records import MAX
from backend.core.settings import REASONS

T = TypeVar("T")

pick = st.integers(0, 1 << 16)
"""Index into any list of the machine; see :func:`chosen`."""


def chosen(things: Sequence[T], index: int) -> T:
    """Return the thing that a :data:`pick` stands for."""
    return things[index % len(things)]


def history(examples: int, steps: int = 40, *, shrink: bool = True) -> settings:
    """Return the settings of a state machine: `examples` histories of `steps` steps, and a blob to replay a failure
    with.

    Without `shrink` a failure is shown as found: shrinking on a live mount takes longer than a test may.
    """
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(
        phases=(*phases, Phase.shrink) if shrink else phases,
        report_multiple_bugs=False,
        max_examples=examples,
        stateful_step_count=steps,
        print_blob=True,
        # A step on a live mount may wait for a process to exit; the strategies are not slow.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# The ledger: sizes near the limits, so that limits are met, and invalid sizes

small = st.integers(0, 40)
limits = st.one_of(small, st.integers(0, 120), st.just(MAX))
swap_limits = st.one_of(st.integers(0, 10), st.integers(0, 40), st.just(MAX))
odd = st.sampled_from((-1, MAX + 1))
"""Sizes that are invalid."""
huge = st.sampled_from((*(7 * (-1, MAX + 1)), MAX - 20, MAX))
"""The same and, rarely, almost all that a figure can hold, so that no limit is met before the overflow."""
sizes = st.one_of(small, small, small, st.integers(0, 160), huge)

reasons = st.one_of(st.sampled_from((0, 1, 2, 3)), st.integers(0, REASONS), st.sampled_from((-1, REASONS + 1, 1 << 40)))
"""Masks of reasons why a process is off the runlist: few, so that two meet; any; and some invalid ones."""

next_uses = st.lists(st.tuples(pick, st.integers(0, NEXT_USE_MOST)), min_size=1, max_size=4)
"""Classes of next use for some processes."""


@attrs.frozen
class Part:
    """A part of a quantity: mostly less than all of it, now and then more."""

    eighths: int
    """Eighths of the quantity."""
    extra: int
    """Bytes that are added."""

    def of(self, nbytes: int) -> int:
        """Return the part of `nbytes`; negative now and then."""
        return nbytes * self.eighths // 8 + self.extra


parts = st.builds(Part, st.integers(0, 8), st.sampled_from((0, 0, 0, 0, 1, -1)))
moments = st.integers(0, 1000)
"""Duration of a move, in microseconds."""

users = st.one_of(st.integers(0, 70_000), st.just((1 << 32) - 2))

policies = st.one_of(
    st.fixed_dictionaries({"high": limits}),
    st.fixed_dictionaries({"low": limits}),
    st.fixed_dictionaries({"swap_max": swap_limits}),
    st.fixed_dictionaries({"high": small, "swap_max": swap_limits}),
    st.fixed_dictionaries({"limit_max": limits}, optional={"high": limits, "swap_max": swap_limits}),
    st.fixed_dictionaries({"high": limits, "low": limits, "swap_max": swap_limits}),
    st.fixed_dictionaries(
        {
            "timeslice_us": st.integers(0, 10_000),
            "frozen": st.booleans(),
            "priority": st.integers(0, 15),
            "weight": st.integers(1, 10_000),
            "quota_us": st.one_of(st.integers(1_000, 2_000_000), st.just(MAX)),
            "period_us": st.integers(10_000, 1_000_000),
        },
        optional={"kept": st.booleans(), "uid": users, "gid": users, "oom_group": st.booleans()},
    ),
    st.just({"current": 0}),  # a figure that cannot be set
)


# Writes: the text and its meaning are generated together, so that no parser is checked by a parser


@attrs.frozen
class Written:
    """One write(2) to a control file."""

    raw: bytes
    """Bytes of the write."""
    value: int
    """Value that they mean; 0 where they are invalid."""
    refused: int = 0
    """Errno for the text alone, or 0."""


def _dressed(text: str, before: str, after: str) -> bytes:
    return (before + text + after).encode("latin-1")


blanks = st.text(" \t\n\v\f\r", max_size=3)
endings = st.one_of(st.just("\n"), st.just(""), blanks, st.just("\n\0junk"))


@st.composite
def _spelled(draw: st.DrawFn, values: st.SearchStrategy[int], units: bool) -> Written:
    value = draw(values)
    spellings = [str(value), f"+{value}", hex(value), f"0X{value:X}", f"0{value:o}" if value else "0"]
    if units:
        spellings += [f"{value >> bits}{unit}" for bits, unit in ((10, "K"), (20, "m"), (30, "G")) if not value % 1024]
        spellings = [text for text in spellings if text[:-1] != "0" or not text[-1].isalpha() or value == 0]
    text = draw(st.sampled_from(spellings))
    if units and text[-1] in "KmG":
        value = int(text[:-1]) << {"K": 10, "m": 20, "G": 30}[text[-1]]
    return Written(_dressed(text, draw(blanks), draw(endings)), value)


malformed = st.one_of(
    st.sampled_from(
        (
            *("\n", " ", "\0", "1 2", "1\n2\n", "08", "0x", "0xg", "1e3", "1.5.2", "--1", "-+1", "+-1", "+ 1", "- 1"),
            *(
                "Max",
                "maxx",
                "max max",
                "m ax",
                "\u0661",
                "1_000",
                "0b1",
                "0o7",
                "'1'",
                "nan",
                "inf",
                "K",
                "1KB",
                "1KK",
            ),
        )
    ).map(str.encode),
    st.binary(min_size=1, max_size=6).filter(lambda raw: not set(raw) & set(b"0123456789max\xa0")),
).map(lambda raw: Written(raw, 0, errno.EINVAL))
"""Writes that every control file refuses."""

too_long = st.integers(4097, 9000).map(lambda length: Written(b"1".ljust(length), 0, errno.E2BIG))

out_of_range = st.sampled_from(["-1", "18446744073709551616", "0x10000000000000000", f"{1 << 70}", "-5K"]).map(
    lambda text: Written(text.encode(), 0, errno.ERANGE)
)


def size_writes(values: st.SearchStrategy[int], *, unlimited: bool = True) -> st.SearchStrategy[Written]:
    """Return writes to a file that takes bytes, and ``max`` where `unlimited`."""
    word = Written(b"max\n", MAX) if unlimited else Written(b"max\n", 0, errno.EINVAL)
    good = _spelled(values, units=True)
    return st.one_of(good, good, good, st.just(word), malformed, out_of_range, too_long)


switch_writes = st.one_of(
    _spelled(st.integers(0, 1), units=False),
    _spelled(st.integers(0, 1), units=False),
    st.sampled_from(["2", "-1", "4294967296", "0x2"]).map(lambda text: Written(text.encode(), 0, errno.ERANGE)),
    malformed,
    too_long,
    st.just(Written(b"max\n", 0, errno.EINVAL)),
)
"""Writes to a file that takes 0 or 1."""


def _timeslices(us: int) -> st.SearchStrategy[Written]:
    spellings = [f"{us}us", f"{us} us\n", f"{us / 1000:.3f}", f"{us / 1000:.3f}ms\n", f" {us / 1000:.4f} ms"]
    return st.sampled_from(spellings).map(lambda text: Written(text.encode(), us))


timeslice_writes = st.one_of(
    st.integers(10, 1_000_000).flatmap(_timeslices),
    st.just(Written(b"default\n", 0)),
    st.sampled_from(["0", "0us", "0.0001", "9us", "1000.001", "1000001us", "99999999999"]).map(
        lambda text: Written(text.encode(), 0, errno.ERANGE)
    ),
    malformed.filter(lambda written: written.raw.strip() not in (b"08", b"1.5")),  # time is decimal
    too_long,
    st.just(Written(b"max\n", 0, errno.EINVAL)),
)
"""Writes to compute.timeslice of a GPU that takes 10 us to 1 s."""

sm_writes = st.one_of(
    st.integers(1, 200).map(lambda count: Written(b"%d\n" % count, count)),
    st.just(Written(b"max\n", 0)),
    st.sampled_from(["-1", "0", "0%", "101%"]).map(lambda text: Written(text.encode(), 0, errno.ERANGE)),
    st.sampled_from(["half", "50 %", "1 2"]).map(lambda text: Written(text.encode(), 0, errno.EINVAL)),
)
"""Writes to compute.sm.max."""
