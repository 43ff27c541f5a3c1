"""Parameters of a claim: what a DeviceClass or a ResourceClaim asks for besides capacity, checked against the settings.

They stand in an opaque configuration, as an object of ours::

    {"apiVersion": "gpu.ggroup.io/v1alpha1", "kind": "GroupParameters", "priority": 12, "low": "4Gi"}

Names and ranges come from :mod:`backend.core.settings`: every setting that a program may ask for itself is one, but for
the limit of memory, which is the capacity that the scheduler has counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from backend.core.settings import HIGH, LOW, MAX, PRIORITY, SETTINGS, WEIGHT, Kind, Setting
from ggroupfs.dra import quantities
from ggroupfs.text import properties

API_VERSION = "gpu.ggroup.io/v1alpha1"
KIND = "GroupParameters"

PERCENT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,2})?%")
"""A part of the memory that the claim has."""


class Refused(ValueError):
    """A claim that cannot be prepared as it is, with the reason in words: trying again changes nothing."""


def _name(setting: Setting) -> str:
    first, *others = setting.field.removesuffix("_us").split("_")
    return first + "".join(word.capitalize() for word in others)


ASKED: Mapping[str, Setting] = {_name(one): one for one in SETTINGS if one.environment is not None and one is not HIGH}
"""Settings that a claim may have, by the name of the parameter."""


def _size(value: str, memory: int) -> int:
    if value in ("max", "infinity"):
        return MAX
    if PERCENT.fullmatch(value):
        return int(properties.BY_NAME["GMemLow"].text(value, memory))
    return quantities.whole(value)


def _number(value: str, _: int) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError("not a whole number")
    return int(value)


def _span(value: str, _: int) -> int:
    return properties.microseconds(value)


READERS: Mapping[Kind, Callable[[str, int], int]] = {Kind.SIZE: _size, Kind.NUMBER: _number, Kind.SPAN: _span}
"""What reads the text of a parameter, given the bytes of memory that the claim has. ValueError with the reason."""


@attrs.frozen
class Asked:
    """The parameters of one configuration."""

    values: Mapping[str, int]
    """By field of the setting."""
    by_class: bool
    """Whether the DeviceClass says it, which an administrator writes, and not the claim."""


def read(parameters: Any, memory: int, by_class: bool) -> Asked:
    """Check one opaque object for a share of so many bytes. Refused."""
    if not isinstance(parameters, dict):
        raise Refused(f"parameters: not an object but {json.dumps(parameters)[:80]}")
    kind = (parameters.get("apiVersion"), parameters.get("kind"))
    if kind != (API_VERSION, KIND):
        raise Refused(f"parameters: apiVersion and kind are {kind[0]}, {kind[1]}: not {API_VERSION}, {KIND}")
    values = {}
    for name, value in parameters.items():
        if name in ("apiVersion", "kind"):
            continue
        setting = ASKED.get(name)
        if setting is None:
            raise Refused(f"parameters.{name}: there is no such parameter: {', '.join(ASKED)}")
        values[setting.field] = _value(name, setting, value, memory)
    return Asked(values, by_class)


def _value(name: str, setting: Setting, value: Any, memory: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Refused(f"parameters.{name}: neither a number nor a string")
    try:
        number = READERS[setting.kind](str(value).strip(), memory)
    except ValueError as error:
        raise Refused(f"parameters.{name}: {value}: {error}") from None
    if number not in setting.allowed:
        raise Refused(f"parameters.{name}: {value}: not a number from {setting.least} to {setting.most}")
    return number


def settled(memory: int | None, weight: int | None, configurations: Sequence[Asked]) -> Mapping[str, int]:
    """Return the settings of a share, by field: memory and weight are those of its capacity, the last that is said of
    a setting counts. Refused for what the claim asks for beyond what it was given: a DeviceClass may give more."""
    values: dict[str, int] = {}
    if memory is not None:
        values[HIGH.field] = memory
    if weight is not None:
        values[WEIGHT.field] = weight
    given = weight if weight is not None else WEIGHT.default
    best = PRIORITY.default
    for one in configurations:
        if one.by_class:
            given, best = one.values.get(WEIGHT.field, given), one.values.get(PRIORITY.field, best)
        elif one.values.get(WEIGHT.field, given) > given:
            raise Refused(f"parameters.weight: {one.values[WEIGHT.field]}: the claim has a share of {given} at most")
        elif one.values.get(PRIORITY.field, best) < best:
            raise Refused(
                f"parameters.priority: {one.values[PRIORITY.field]}: only a DeviceClass gives one below {best}"
            )
        values |= one.values
    low = values.get(LOW.field, 0)
    if low == MAX:
        values[LOW.field] = low = memory or 0
    if low > (memory or 0):
        raise Refused(f"parameters.low: {low} bytes: the claim has {memory or 0}")
    return values


COMBINED: Mapping[str, Callable[[int, int], int]] = {PRIORITY.field: min}
"""What holds of two shares of one slice; of other settings it is their sum."""
ABOVE = (WEIGHT.field, LOW.field)
"""Settings that count among siblings, or have to hold on every level above: the slices of QoS classes have the sums."""


def together(shares: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the settings of a slice that has several shares of one GPU. A setting that one of them leaves open counts
    with its default."""
    combined: dict[str, int] = {}
    by_field = {setting.field: setting for setting in (HIGH, *ASKED.values())}
    for field in {field for share in shares for field in share}:
        setting = by_field[field]
        values = [share.get(field, setting.default) for share in shares]
        number = values[0]
        for value in values[1:]:
            number = COMBINED[field](number, value) if field in COMBINED else number + value
        combined[field] = min(number, setting.most)
    return combined
