"""Converts text to numbers and back, as the kernel does for cgroup files. Pure; OSError carries the errno.

The parsers accept what ``kstrtoint()`` and ``memparse()`` (lib/kstrtox.c, lib/cmdline.c) accept: blanks around the
value, a sign, ``0x`` and leading-zero octal, and for sizes one suffix. EINVAL is for a syntax error, ERANGE for a
number outside the allowed range.
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
"""Blanks of the kernel's isspace() (lib/ctype.c: Latin-1)."""

NUMBER = re.compile(r"(?P<sign>[+-]?)(?:0[xX](?P<hex>[0-9a-fA-F]+)|(?P<oct>0[0-7]*)|(?P<dec>[1-9][0-9]*))")

SUFFIXES = {"K": 10, "M": 20, "G": 30, "T": 40}

TIME = re.compile(rf"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[{BLANKS}]*(?P<unit>ms|us)?")

PAIR = re.compile(rf"(?P<quota>max|[0-9]{{1,19}})(?:[{BLANKS}]+(?P<period>[0-9]{{1,19}}))?")
"""Syntax of compute.max: decimal numbers only, as sscanf() reads them for cpu.max."""

PERCENT = re.compile(r"(?P<percent>[0-9]{1,3}(?:\.[0-9]{1,3})?)%")
"""Syntax of a part of a GPU's SMs."""

U64 = 1 << 64


def text(raw: bytes) -> str:
    """Return the text of one write(2): up to a NUL, without surrounding blanks."""
    return raw.partition(b"\0")[0].decode("latin-1").strip(BLANKS)


def integer(word: str, low: int, high: int) -> int:
    """Parse a whole number from `low` to `high`, as kstrtoint() with base 0 does."""
    number, rest = _number(word)
    if rest:
        raise fail(errno.EINVAL)
    if not low <= number <= high:
        raise fail(errno.ERANGE)
    return number


def size(word: str) -> int:
    """Parse a size in bytes, with K, M, G or T for powers of 1024, or ``max``."""
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
    """Parse bytes like :func:`size`, but reject ``max``."""
    if word == "max":
        raise fail(errno.EINVAL)
    return size(word)


def switch(word: str) -> bool:
    """Parse 0 or 1."""
    return bool(integer(word, 0, 1))


def span(word: str) -> int:
    """Parse milliseconds, or a number with suffix ms or us, to whole microseconds (rounded); ``default`` is 0."""
    if word == "default":
        return 0
    match = TIME.fullmatch(word)
    if match is None:
        raise fail(errno.EINVAL)
    us = round(Fraction(match["number"]) * (1 if match["unit"] == "us" else 1000))
    if not 0 < us < U64:
        raise fail(errno.ERANGE)
    return us


def sms(word: str) -> int | Fraction:
    """Parse SMs: a number of them, a percentage of those of the GPU as a fraction, or ``max``, which is 0."""
    if word == "max":
        return 0
    if match := PERCENT.fullmatch(word):
        part = Fraction(match["percent"]) / 100
        if not 0 < part <= 1:
            raise fail(errno.ERANGE)
        return part
    return integer(word, 1, MAX)


def quota(word: str) -> tuple[int, int | None]:
    """Parse ``QUOTA PERIOD`` in microseconds to two numbers; a missing period is None, and stays as it was.

    A quota is a number, or ``max``, which is MAX. EINVAL for anything else, as for cpu.max (cpu_period_quota_parse()
    and tg_set_bandwidth() of kernel/sched/core.c).
    """
    match = PAIR.fullmatch(word)
    if match is None:
        raise fail(errno.EINVAL)
    us = MAX if match["quota"] == "max" else int(match["quota"])
    period = None if match["period"] is None else int(match["period"])
    if us not in QUOTA.allowed or (period is not None and period not in PERIOD.allowed):
        raise fail(errno.EINVAL)
    return us, period


def parser(setting: Setting) -> Callable[[str], Any]:
    """Return the parser for values in a setting's control file."""
    by_kind: dict[Kind, Callable[[str], Any]] = {
        Kind.SIZE: size,
        Kind.SPAN: span,
        Kind.SWITCH: switch,
        Kind.QUOTA: quota,
        Kind.SMS: sms,
    }
    return by_kind.get(setting.kind) or (lambda word: integer(word, setting.least, setting.most))


def show_default(setting: Setting) -> str:
    """Return the default of a setting, in the format of its control file."""
    if setting.kind is Kind.QUOTA:
        return show_quota(setting.default, PERIOD.default)
    if setting.kind is Kind.SPAN:
        return show_span(setting.default)
    if setting.kind is Kind.SMS:
        return show_sms(setting.default)
    return show_size(setting.default)


def anything(word: str) -> None:
    """Accept anything: only the write itself matters, not its value."""


def _number(word: str) -> tuple[int, str]:
    """Return the number at the start of a word, and the rest. EINVAL without a number, ERANGE for 2^64 and more."""
    if word.isdecimal() and word[0] != "0":  # the usual case
        sign, number, end = "", int(word), len(word)
    else:
        match = NUMBER.match(word)
        if match is None:
            raise fail(errno.EINVAL)
        sign, hexadecimal, octal, decimal = match.groups()
        number = int(hexadecimal, 16) if hexadecimal else int(octal, 8) if octal else int(decimal)
        end = match.end()
    if number >= U64:
        raise fail(errno.ERANGE)  # before the rest is checked, as in kstrtoull()
    return (-number if sign == "-" else number), word[end:]


def show_size(nbytes: int) -> str:
    """Format bytes canonically, or as ``max``."""
    return "max" if nbytes >= MAX else str(nbytes)


def show_quota(us: int, period_us: int) -> str:
    """Format ``QUOTA PERIOD`` canonically, in microseconds."""
    return f"{show_size(us)} {period_us}"


def show_ms(us: int) -> str:
    """Format microseconds as milliseconds, without trailing zeros: ``2.048``, ``0.5``, ``10``."""
    return f"{us / 1000:.3f}".rstrip("0").rstrip(".")


def show_span(us: int) -> str:
    """Format microseconds in the syntax of :func:`span`."""
    return show_ms(us) if us else "default"


def show_sms(count: int) -> str:
    """Format a number of SMs, or ``max`` for 0."""
    return str(count) if count else "max"


def flat_keyed(pairs: dict[str, int | str | None]) -> str:
    """Format ``KEY VALUE`` lines (cgroup-v2.rst, "Format"). A value that this machine cannot tell is left out."""
    return "".join(f"{key} {value}\n" for key, value in pairs.items() if value is not None)
