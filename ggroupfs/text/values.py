"""Text to number and back, as the kernel does it for cgroup files. Pure; OSError carries the errno.

The parsers take what ``kstrtoint()`` and ``memparse()`` (lib/kstrtox.c, lib/cmdline.c) take: blanks around the
value, a sign, ``0x`` and leading-zero octal, and for sizes one suffix. EINVAL is for syntax, ERANGE for a number
that is none of those allowed.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from backend.common.errors import fail
from backend.core.settings import MAX, PERIOD, QUOTA, Kind, Setting

BLANKS = " \t\n\v\f\r\xa0"
"""What the kernel's isspace() calls blank (lib/ctype.c: Latin-1)."""

NUMBER = re.compile(r"(?P<sign>[+-]?)(?:0[xX](?P<hex>[0-9a-fA-F]+)|(?P<oct>0[0-7]*)|(?P<dec>[1-9][0-9]*))")

SUFFIXES = {"K": 10, "M": 20, "G": 30, "T": 40}

TIME = re.compile(rf"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[{BLANKS}]*(?P<unit>ms|us)?")

PAIR = re.compile(rf"(?P<quota>max|[0-9]{{1,19}})(?:[{BLANKS}]+(?P<period>[0-9]{{1,19}}))?")
"""What compute.max takes: decimal numbers alone, as sscanf() reads them for cpu.max."""

U64 = 1 << 64


def text(raw: bytes) -> str:
    """The text of one write(2): up to a NUL, without the blanks around it."""
    return raw.partition(b"\0")[0].decode("latin-1").strip(BLANKS)


def integer(word: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`, as kstrtoint() with base 0 reads it."""
    number, rest = _number(word)
    if rest:
        raise fail(errno.EINVAL)
    if not low <= number <= high:
        raise fail(errno.ERANGE)
    return number


def size(word: str) -> int:
    """Bytes, with K, M, G or T for powers of 1024, or ``max``."""
    if word == "max":
        return MAX
    nbytes, rest = _number(word)
    if rest:
        if rest.upper() not in SUFFIXES:
            raise fail(errno.EINVAL)
        nbytes <<= SUFFIXES[rest.upper()]
    if not 0 <= nbytes < U64:
        raise fail(errno.ERANGE)
    return min(nbytes, MAX)


def amount(word: str) -> int:
    """Bytes as :func:`size`, where ``max`` would make no sense."""
    if word == "max":
        raise fail(errno.EINVAL)
    return size(word)


def switch(word: str) -> bool:
    """0 or 1."""
    return bool(integer(word, 0, 1))


def span(word: str) -> int:
    """Milliseconds, or with a suffix ms or us, as microseconds; ``default`` is 0. Rounded to whole microseconds."""
    if word == "default":
        return 0
    match = TIME.fullmatch(word)
    if match is None:
        raise fail(errno.EINVAL)
    us = round(Fraction(match["number"]) * (1 if match["unit"] == "us" else 1000))
    if not 0 < us < U64:
        raise fail(errno.ERANGE)
    return us


def quota(word: str) -> tuple[int, int | None]:
    """``QUOTA PERIOD`` in microseconds, as two numbers; None for a period that is not there, and stays what it was. A
    quota is ``max``, which is MAX, or a number. EINVAL for all else, as cpu.max has it (cpu_period_quota_parse() and
    tg_set_bandwidth() of kernel/sched/core.c)."""
    match = PAIR.fullmatch(word)
    if match is None:
        raise fail(errno.EINVAL)
    us = MAX if match["quota"] == "max" else int(match["quota"])
    period = None if match["period"] is None else int(match["period"])
    if us not in QUOTA.allowed or (period is not None and period not in PERIOD.allowed):
        raise fail(errno.EINVAL)
    return us, period


def parser(setting: Setting) -> Callable[[str], Any]:
    """What reads a value of a setting, as its control file takes it."""
    by_kind: dict[Kind, Callable[[str], Any]] = {
        Kind.SIZE: size,
        Kind.SPAN: span,
        Kind.SWITCH: switch,
        Kind.QUOTA: quota,
    }
    return by_kind.get(setting.kind) or (lambda word: integer(word, setting.least, setting.most))


def show_default(setting: Setting) -> str:
    """The default of a setting, as its control file takes it."""
    if setting.kind is Kind.QUOTA:
        return show_quota(setting.default, PERIOD.default)
    if setting.kind is Kind.SPAN:
        return show_span(setting.default)
    return show_size(setting.default)


def anything(word: str) -> None:
    """What is written does not matter, that it is written does."""


def _number(word: str) -> tuple[int, str]:
    """The number at the start of a word, and what follows it. EINVAL without one, ERANGE for 2^64 and more."""
    if word.isdecimal() and word[0] != "0":  # as nearly always
        sign, number, end = "", int(word), len(word)
    else:
        match = NUMBER.match(word)
        if match is None:
            raise fail(errno.EINVAL)
        sign, hexadecimal, octal, decimal = match.groups()
        number = int(hexadecimal, 16) if hexadecimal else int(octal, 8) if octal else int(decimal)
        end = match.end()
    if number >= U64:
        raise fail(errno.ERANGE)  # before what follows it is looked at, as kstrtoull() does
    return (-number if sign == "-" else number), word[end:]


def show_size(nbytes: int) -> str:
    """Canonical bytes, or ``max``."""
    return "max" if nbytes >= MAX else str(nbytes)


def show_quota(us: int, period_us: int) -> str:
    """Canonical ``QUOTA PERIOD``, in microseconds."""
    return f"{show_size(us)} {period_us}"


def show_ms(us: int) -> str:
    """Microseconds as milliseconds, without needless zeros: ``2.048``, ``0.5``, ``10``."""
    return f"{us / 1000:.3f}".rstrip("0").rstrip(".")


def show_span(us: int) -> str:
    """Microseconds as :func:`span` takes them."""
    return show_ms(us) if us else "default"


def flat_keyed(pairs: dict[str, int | str | None]) -> str:
    """``KEY VALUE`` lines (cgroup-v2.rst, "Format"); what this machine cannot tell is left out, not made up."""
    return "".join(f"{key} {value}\n" for key, value in pairs.items() if value is not None)
