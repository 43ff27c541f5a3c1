"""The grammar of writes to control files, against a model of it that was written from docs/semantics.md.

The model goes over the bytes by hand. It shares no code, and no regular expression, with ggroupfs.text.values.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import strategies as st

from backend.process.identity import ROOT, Group, SliceOn
from ggroupfs.fs.controls import CONTROLS
from ggroupfs.fs.files import Events, OpenFile
from tests.support.fuzzed import Target

BLANKS = b" \t\n\v\f\r\xa0"
"""Bytes for which the kernel's isspace() is true."""
MAX = 2**63 - 1


class Refused(Exception):
    """A write that is refused with the errno of this name."""


def written(raw: bytes) -> bytes:
    """Return the value in a write."""
    value = raw[: raw.index(0)] if 0 in raw else raw
    while value and value[0] in BLANKS:
        value = value[1:]
    while value and value[-1] in BLANKS:
        value = value[:-1]
    return value


def digits(word: bytes, alphabet: bytes) -> int:
    """Return the number of bytes at the start of a word that are in an alphabet."""
    count = 0
    while count < len(word) and word[count] in alphabet:
        count += 1
    return count


def number(word: bytes) -> tuple[int, bytes]:
    """Return a whole number as the kernel reads it, and the rest."""
    negative = word[:1] == b"-"
    if word[:1] in (b"-", b"+"):
        word = word[1:]
    base, alphabet = 10, b"0123456789"
    if word[:1] == b"0":
        base, alphabet = 8, b"01234567"
        if word[1:2] in (b"x", b"X") and digits(word[2:], b"0123456789abcdefABCDEF"):
            base, alphabet, word = 16, b"0123456789abcdefABCDEF", word[2:]
    count = digits(word, alphabet)
    if not count:
        raise Refused("EINVAL")
    found = 0
    for digit in word[:count].decode().lower():
        found = found * base + "0123456789abcdef".index(digit)
    if found >= 2**64:  # kstrtoull() checks this before it looks at the rest
        raise Refused("ERANGE")
    return -found if negative else found, word[count:]


def size(word: bytes) -> int:
    if word == b"max":
        return MAX
    nbytes, suffix = number(word)
    factor = {b"": 1, b"k": 2**10, b"m": 2**20, b"g": 2**30, b"t": 2**40}.get(suffix.lower())
    if factor is None:
        raise Refused("EINVAL")
    if not 0 <= nbytes * factor < 2**64:
        raise Refused("ERANGE")
    return min(nbytes * factor, MAX)


def amount(word: bytes) -> int:
    if word == b"max":
        raise Refused("EINVAL")
    return size(word)


def whole(low: int, high: int) -> Callable[[bytes], int]:
    def model(word: bytes) -> int:
        found, rest = number(word)
        if rest:
            raise Refused("EINVAL")
        if not low <= found <= high:
            raise Refused("ERANGE")
        return found

    return model


def time(word: bytes) -> int:
    """Return a time in microseconds."""
    if word == b"default":
        return 0
    count = digits(word, b"0123456789")
    before, word = word[:count], word[count:]
    after = b""
    if word[:1] == b".":
        count = digits(word[1:], b"0123456789")
        after, word = word[1 : 1 + count], word[1 + count :]
    word = written(word)
    if not before + after or word not in (b"", b"ms", b"us"):
        raise Refused("EINVAL")
    exact = Fraction(int(before + after), 10 ** len(after)) * (1 if word == b"us" else 1000)
    us = int(exact) + (exact - int(exact) > Fraction(1, 2))
    if exact - int(exact) == Fraction(1, 2):  # as printf() rounds
        us = int(exact) + int(exact) % 2
    if not 0 < us < 2**64:
        raise Refused("ERANGE")
    return us


def quota(word: bytes) -> tuple[int, int | None]:
    """Return two decimal numbers with blanks between; the first may be `max`, and the second may be missing."""
    words = [b""]
    for byte in word:
        if byte not in BLANKS:
            words[-1] += bytes([byte])
        elif words[-1]:
            words.append(b"")
    if len(words) > 2 or not all(one == b"max" or one.isdigit() for one in words) or words[1:] == [b"max"]:
        raise Refused("EINVAL")
    us = MAX if words[0] == b"max" else int(words[0])
    period = int(words[1]) if words[1:] else None
    if any(len(one) > 19 for one in words) or not 1000 <= us <= MAX or not 10_000 <= (period or 10_000) <= 1_000_000:
        raise Refused("EINVAL")
    if period == 0:
        raise Refused("EINVAL")
    return us, period


def sms(word: bytes) -> int | Fraction:
    """Return a number of SMs, 0 for `max`, or a part of them for a percentage."""
    if word == b"max":
        return 0
    if word[-1:] != b"%":
        return whole(1, MAX)(word)
    before, dot, after = word[:-1].partition(b".")
    if not (0 < len(before) < 4 and before.isdigit() and (not dot or (0 < len(after) < 4 and after.isdigit()))):
        raise Refused("EINVAL")
    part = Fraction(int(before + after), 100 * 10 ** len(after))
    if not 0 < part <= 1:
        raise Refused("ERANGE")
    return part


def device(word: bytes) -> str:
    return word.decode("latin-1") if word[:4] == b"GPU-" else str(whole(0, MAX)(word))


MODEL: dict[str, Callable[[bytes], Any]] = {
    "gmem.limit.high": size,
    "gmem.limit.low": size,
    "gmem.limit.max": size,
    "gmem.swap.max": size,
    "gmem.oom.group": lambda word: bool(whole(0, 1)(word)),
    "gmem.peak": lambda word: None,
    "gmem.swap.peak": lambda word: None,
    "gmem.reclaim": amount,
    "compute.timeslice": time,
    "compute.freeze": lambda word: bool(whole(0, 1)(word)),
    "compute.priority": whole(0, 15),
    "compute.weight": whole(1, 10000),
    "compute.max": quota,
    "compute.wait.max": time,
    "compute.spatial": lambda word: bool(whole(0, 1)(word)),
    "compute.sm.max": sms,
    "compute.migrate": device,
}
"""Models of values by control; other controls cannot be written."""


def model(name: str, raw: bytes) -> tuple[int | str, list[Any]]:
    """Return the result of a write, or the name of its errno; and the value that it sets, if any."""
    try:
        if len(raw) > 4095:
            raise Refused("E2BIG")
        if name not in MODEL:
            raise Refused("EINVAL")
        return len(raw), [MODEL[name](written(raw))]
    except Refused as refused:
        return str(refused), []


def check(raw: bytes) -> None:
    """Write all bytes but the first to the file that the first selects: the answer is the model's."""
    control = CONTROLS[raw[0] % len(CONTROLS)] if raw else CONTROLS[0]
    raw, asked = raw[1:], []

    async def record(controller: Any, group: Group, value: Any) -> None:
        asked.append(value)

    if control.apply is not None:
        control = attrs.evolve(control, apply=record)
    file = OpenFile(None, Events(), control, SliceOn(ROOT, 0))  # type: ignore[arg-type]
    assert (answer(file, raw), asked) == model(control.name, raw), (control.name, raw)


def answer(file: OpenFile, raw: bytes) -> int | str:
    """Return the result of write(2), or the name of its errno."""
    try:
        file.write(raw).send(None)
    except StopIteration as stop:
        return stop.value
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    raise AssertionError("it waits")


edges = st.sampled_from(
    [0, 1, 2, 8, 15, 16, 100, 10000, 10001, *(2**n + d for n in (31, 32, 53, 63, 64) for d in (-1, 0, 1))]
)
spelled = st.one_of(edges, st.integers(0, 2**66)).flatmap(
    lambda n: st.sampled_from(
        [str(n), hex(n), f"0X{n:X}", f"0{n:o}", f"00{n}", f"{n}.", f".{n}", f"{n}.{n}", f"{n / 1000}"]
    )
)
marks = st.sampled_from(["", "", "", "-", "+", "--", "+-", "0x", "0", " ", "\xa0", "\u0660"])
units = st.sampled_from(
    [
        "",
        "",
        *"KMGTPkmgtpBbEe",
        "KB",
        "KiB",
        "ms",
        " ms",
        "us",
        "\tus",
        "\x1cms",
        "\x85us",
        "\x85",
        "s",
        "%",
        "\0",
        "\0K",
        ".",
    ]
)
words = st.one_of(
    st.sampled_from(
        ["max", "Max", "default", "", "GPU-", "GPU-50f79900-0000-4000-8000-000000000001", "yes", "nan", "inf"]
    ),
    st.text(max_size=8),
    st.text("0123456789.xKMGTmsu+- \t\n\0", max_size=12),
    st.tuples(marks, spelled, units).map("".join),
)
blanks = st.text(" \t\n\v\f\r\xa0\0\x1c\x85", max_size=3)
TEXTS = st.tuples(blanks, words, blanks, st.sampled_from(["", "\n", "\0junk", "\n\n"])).map("".join)
LONG_ONES = st.tuples(st.sampled_from("019 .\0"), st.integers(4090, 4100)).map(lambda pair: pair[0] * pair[1])


@st.composite
def shaped(draw: st.DrawFn) -> bytes:
    text = draw(st.one_of(*[TEXTS] * 9, LONG_ONES))
    encoding = draw(st.sampled_from(["utf-8", "latin-1"]))
    return bytes([draw(st.integers(0, len(CONTROLS) - 1))]) + text.encode(encoding, "replace")


VALUES = Target("values", check, shaped(), examples=2000)


@pytest.mark.parametrize("file", VALUES.kept())
def test_kept(file: Path) -> None:
    VALUES.replay(file)


def test_fresh() -> None:
    VALUES.fuzz()


def test_the_model_knows_every_file_that_can_be_written() -> None:
    assert set(MODEL) == {control.name for control in CONTROLS if control.parse is not None}
