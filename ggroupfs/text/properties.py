"""The properties of unit files and command lines, with names and syntax like systemd's own properties.

``GMemHigh=8G`` is to gmem.limit.high what systemd's ``MemoryHigh=8G`` is to memory.high (systemd.resource-control(5)).
Values are systemd's: sizes with K, M, G, T, P, ``infinity`` and percentages (of the GPU's memory), time spans, booleans
(systemd.syntax(7), systemd.time(7)); an empty value is the default. The result is the text for the control file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import attrs

from backend.core.settings import APPLIED, PERIOD, QUOTA, Kind, Setting
from ggroupfs.text import values

Text = Callable[[str, int], str]
"""(value, memory of the GPU in bytes) -> text to write. ValueError with the reason, in words."""

NUMBER = r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?)"
"""Longer than any meaningful number, but bounded, and so are the computations with it."""
SIZE = re.compile(rf"{NUMBER}\s*(?P<suffix>[KMGTP]?)B?")
PERCENT = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,2})?)%")
SPAN = re.compile(rf"{NUMBER}\s*(?P<unit>usec|us|µs|msec|ms|sec|s)?")
US = {"us": 1, "usec": 1, "µs": 1, "ms": 1000, "msec": 1000, None: 1000, "s": 1_000_000, "sec": 1_000_000}
SWITCH = {
    **dict.fromkeys(("1", "yes", "y", "true", "t", "on"), "1"),
    **dict.fromkeys(("0", "no", "n", "false", "f", "off"), "0"),
}
"""Booleans of systemd (parse_boolean())."""


@attrs.frozen
class Property:
    """One property, the same in every file and command."""

    name: str
    """Name in unit files."""
    control: str
    """Name of its control file."""
    text: Text
    """Converts from the syntax of systemd to that of the control file."""
    default: str
    """Text that is written for an empty value."""


def _size(value: str, capacity: int) -> str:
    if value == "infinity":
        return "max"
    if match := PERCENT.fullmatch(value):
        percent = Decimal(match["number"])
        if percent > 100:
            raise ValueError("more than 100 %")
        return str(int(capacity * percent / 100))
    match = SIZE.fullmatch(value)
    if match is None:
        raise ValueError("not a size: bytes, or with K, M, G or T, a percentage, or infinity")
    nbytes = int(Decimal(match["number"]) * 1024 ** " KMGTP".index(match["suffix"] or " "))
    if nbytes >= 1 << 64:
        raise ValueError("too large")
    return str(nbytes)


def microseconds(value: str) -> int:
    """Return a time span in microseconds; without a unit it is in milliseconds. ValueError with the reason."""
    us, rest = Decimal(0), value.strip()
    while rest:
        match = SPAN.match(rest)
        if match is None:
            raise ValueError("not a time span: milliseconds, or with us or ms")
        us += Decimal(match["number"]) * US[match["unit"]]
        rest = rest[match.end() :].strip()
    if us < 1:
        raise ValueError("no time at all")
    if us >= 1 << 64:
        raise ValueError("too long")
    return int(us)


def _span(value: str, _: int) -> str:
    return f"{microseconds(value)}us"


def _switch(value: str, _: int) -> str:
    if value.lower() not in SWITCH:
        raise ValueError("not yes or no")
    return SWITCH[value.lower()]


def _sms(value: str, _: int) -> str:
    if value == "infinity":
        return "max"
    if not (PERCENT.fullmatch(value) or (value.isascii() and value.isdigit())):
        raise ValueError("not a number of SMs, or a percentage, or infinity")
    try:
        values.sms(value)
    except OSError:
        raise ValueError("not from one SM to all of them") from None
    return value


def _quota(value: str, _: int) -> str:
    """Return a quota from a percentage, optionally followed by a time span for the period.

    This combines CPUQuota= and CPUQuotaPeriodSec=, since they are one control file here.
    """
    if value == "infinity":
        return values.show_default(QUOTA)
    percent, _blank, period = value.partition(" ")
    match = PERCENT.fullmatch(percent)
    if match is None:
        raise ValueError("not a percentage, or one and a time span, or infinity")
    period_us = microseconds(period) if period.strip() else PERIOD.default
    if period_us not in PERIOD.allowed:
        raise ValueError(f"a period that is not from {PERIOD.least // 1000} to {PERIOD.most // 1000} ms")
    us = int(period_us * Decimal(match["number"]) / 100)
    if us not in QUOTA.allowed:
        raise ValueError(f"less than {QUOTA.least // 1000} ms in a period of {values.show_ms(period_us)} ms")
    return f"{us} {period_us}"


def _within(allowed: range) -> Text:
    def text(value: str, _: int) -> str:
        if not (value.isascii() and value.isdigit()) or int(value) not in allowed:
            raise ValueError(f"not a number from {allowed[0]} to {allowed[-1]}")
        return value

    return text


def _property(name: str, setting: Setting) -> Property:
    texts = {
        Kind.SIZE: _size,
        Kind.SPAN: _span,
        Kind.SWITCH: _switch,
        Kind.NUMBER: _within(setting.allowed),
        Kind.QUOTA: _quota,
        Kind.SMS: _sms,
    }
    assert setting.control is not None
    return Property(name, setting.control, texts[setting.kind], values.show_default(setting))


PROPERTIES = tuple(_property(one.unit_key, one) for one in APPLIED if one.unit_key is not None)
"""All properties, in the order in which they are applied."""

BY_NAME = {one.name: one for one in PROPERTIES}


def text_of(name: str, value: str, capacity: int) -> tuple[str, str]:
    """Return the control file of a property, and the text to write there, on a GPU with `capacity` bytes of memory.

    Any other name is that of a control file, with its value unchanged. ValueError with the reason.
    """
    one = BY_NAME.get(name)
    if one is None:
        return name, value
    value = value.strip()
    return one.control, one.text(value, capacity) if value else one.default
