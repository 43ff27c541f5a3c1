"""The parameters of a claim: requests of a DeviceClass or ResourceClaim besides capacity, checked against the settings.

They are in an opaque configuration, as an object of this driver::

    {"apiVersion": "gpu.ggroup.io/v1alpha1", "kind": "GroupParameters", "priority": 12, "low": "4Gi"}

Names and ranges come from :mod:`backend.core.settings`. The parameters are the quota and every setting that a program
may request for itself, except for gmem.limit.high: that is the capacity which the scheduler has counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs

from backend.core.settings import (
    HIGH,
    LIMIT_MAX,
    LOW,
    MAX,
    PERIOD,
    PRIORITY,
    QUOTA,
    SETTINGS,
    SM_MAX,
    SWAP_MAX,
    WEIGHT,
    Kind,
    Setting,
)
from ggroupfs.dra import quantities
from ggroupfs.text import properties, values

API_VERSION = "gpu.ggroup.io/v1alpha1"
KIND = "GroupParameters"

PERCENT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,2})?%")
"""A part of the memory that the claim has."""


class Refused(ValueError):
    """Raised for a claim that cannot be prepared as it is, with the reason; trying again is useless."""


def _name(setting: Setting) -> str:
    first, *others = setting.field.removeprefix("limit_").removesuffix("_us").split("_")
    return first + "".join(word.capitalize() for word in others)


ASKED: Mapping[str, Setting] = {
    _name(one): one for one in SETTINGS if one is QUOTA or (one.environment is not None and one not in (HIGH, SM_MAX))
}
"""Settings that a claim may have, by the name of the parameter."""
CEILINGS = (SWAP_MAX, LIMIT_MAX, QUOTA)
"""Settings that the DeviceClass limits for a claim, if it sets them."""
UNLIMITED = ("max", "infinity")
"""Values that mean no limit."""

Values = Mapping[str, int]
"""Numbers of a setting by field; a quota has two, one of which is its period."""


def _size(setting: Setting, value: str, memory: int) -> Values:
    if value in UNLIMITED:
        return {setting.field: MAX}
    if PERCENT.fullmatch(value):
        return {setting.field: int(properties.BY_NAME["GMemLow"].text(value, memory))}
    return {setting.field: quantities.whole(value)}


def _number(setting: Setting, value: str, _: int) -> Values:
    if not (value.isascii() and value.isdigit()):
        raise ValueError("not a whole number")
    return {setting.field: int(value)}


def _quota(setting: Setting, value: str, memory: int) -> Values:
    text = properties.BY_NAME["ComputeQuota"].text("infinity" if value in UNLIMITED else value, memory)
    us, period_us = values.quota(text)
    return {setting.field: us, PERIOD.field: PERIOD.default if period_us is None else period_us}


READERS: Mapping[Kind, Callable[[Setting, str, int], Values]] = {
    Kind.SIZE: _size,
    Kind.NUMBER: _number,
    Kind.QUOTA: _quota,
}
"""Parsers of a parameter's text, given the memory of the claim in bytes. ValueError with the reason."""


@attrs.frozen
class Asked:
    """The parameters of one configuration."""

    values: Values
    """Numbers of all settings in it."""
    by_class: bool
    """Whether it comes from the DeviceClass, which an administrator writes, and not from the claim."""


def read(parameters: Any, memory: int, by_class: bool) -> Asked:
    """Parse one opaque object for a share with `memory` bytes. Refused."""
    if not isinstance(parameters, dict):
        raise Refused(f"parameters: not an object but {json.dumps(parameters)[:80]}")
    kind = (parameters.get("apiVersion"), parameters.get("kind"))
    if kind != (API_VERSION, KIND):
        raise Refused(f"parameters: apiVersion and kind are {kind[0]}, {kind[1]}: not {API_VERSION}, {KIND}")
    found: dict[str, int] = {}
    for name, value in parameters.items():
        if name in ("apiVersion", "kind"):
            continue
        setting = ASKED.get(name)
        if setting is None:
            raise Refused(f"parameters.{name}: there is no such parameter: {', '.join(ASKED)}")
        found |= _values(name, setting, value, memory)
    return Asked(found, by_class)


def _values(name: str, setting: Setting, value: Any, memory: int) -> Values:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Refused(f"parameters.{name}: neither a number nor a string")
    try:
        found = READERS[setting.kind](setting, str(value).strip(), memory)
    except ValueError as error:
        raise Refused(f"parameters.{name}: {value}: {error}") from None
    if found[setting.field] not in setting.allowed:
        raise Refused(f"parameters.{name}: {value}: not a number from {setting.least} to {setting.most}")
    return found


def settled(memory: int | None, weight: int | None, configurations: Sequence[Asked]) -> Values:
    """Return the settings of a share: memory and weight from its capacity, then the last configuration of each setting.

    Refused if the claim asks for more than it was given; a DeviceClass may give more, or less.
    """
    found: dict[str, int] = {}
    if memory is not None:
        found[HIGH.field] = memory
    if weight is not None:
        found[WEIGHT.field] = weight
    by_class: dict[str, int] = {}
    for one in configurations:
        if one.by_class:
            by_class |= one.values
        else:
            _check(one.values, by_class, WEIGHT.default if weight is None else weight)
        found |= one.values
    low = found.get(LOW.field, 0)
    if low == MAX:
        found[LOW.field] = low = memory or 0
    if low > (memory or 0):
        raise Refused(f"parameters.low: {low} bytes: the claim has {memory or 0}")
    return found


def _check(asked: Values, by_class: Values, weight: int) -> None:
    """Raise Refused if a claim asks for more than it was given."""
    given, best = by_class.get(WEIGHT.field, weight), by_class.get(PRIORITY.field, PRIORITY.default)
    if asked.get(WEIGHT.field, given) > given:
        raise Refused(f"parameters.weight: {asked[WEIGHT.field]}: the claim has a share of {given} at most")
    if asked.get(PRIORITY.field, best) < best:
        raise Refused(f"parameters.priority: {asked[PRIORITY.field]}: only a DeviceClass gives one below {best}")
    for setting in CEILINGS:
        if setting.field in asked and setting.field in by_class and _part(setting, asked) > _part(setting, by_class):
            raise Refused(f"parameters.{_name(setting)}: more than the {_shown(setting, by_class)} of the DeviceClass")


def _part(setting: Setting, said: Values) -> Fraction:
    """Return the amount of a limit: bytes, or for a quota the fraction of the time."""
    return Fraction(said[setting.field], said[PERIOD.field] if setting is QUOTA else 1)


def _shown(setting: Setting, said: Values) -> str:
    number = said[setting.field]
    return values.show_quota(number, said[PERIOD.field]) if setting is QUOTA else quantities.text(number)


def _quotas(shares: Sequence[Values]) -> Values:
    """Return the quota of several shares, in the longest of their periods: the sum of their fractions of the time."""
    if any(share.get(QUOTA.field, QUOTA.default) == QUOTA.default for share in shares):
        return {QUOTA.field: QUOTA.default, PERIOD.field: PERIOD.default}
    period_us = max(share[PERIOD.field] for share in shares)
    us = sum(_part(QUOTA, share) for share in shares) * period_us
    return {QUOTA.field: min(math.ceil(us), QUOTA.most), PERIOD.field: period_us}


COMBINED: Mapping[str, Callable[[Sequence[int]], int]] = {PRIORITY.field: min}
"""Functions that combine the values of several shares in one slice; other settings are added."""
ABOVE = (WEIGHT.field, LOW.field)
"""Settings that count among siblings, or must hold on every level above; the slices of QoS classes have their sums."""


def together(shares: Sequence[Values]) -> Values:
    """Return the settings of a slice with several shares of one GPU. An unset setting counts with its default."""
    combined: dict[str, int] = {}
    by_field = {setting.field: setting for setting in (HIGH, *ASKED.values())}
    for field in by_field.keys() & {field for share in shares for field in share}:
        setting = by_field[field]
        if setting is QUOTA:
            combined |= _quotas(shares)
            continue
        numbers = [share.get(field, setting.default) for share in shares]
        combined[field] = COMBINED[field](numbers) if field in COMBINED else min(sum(numbers), setting.most)
    return combined
