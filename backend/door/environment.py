"""The environment of a program that limits itself: the settings that it asks for, and the messages that send them.

`GGROUP_GMEM_HIGH=8G` and the like (:data:`backend.core.settings.BY_ENVIRONMENT`) are a family's values;
`GGROUP_FAMILY` tells the children of the process which family that is. The library in CUDA programs does the same in
C (backend/cuda/library/daemon/family.c); tests/corpus/environment has the inputs that both accept.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import attrs

from backend.core.families import FAMILIES_MOST, ID_MOST
from backend.core.settings import BY_ENVIRONMENT, BY_FIELD, MAX, SETTINGS, Kind, Setting
from backend.door.wire import Op

FAMILY = "GGROUP_FAMILY"
"""Variable with the families of a process, the outermost first, separated by commas:
``0123456789abcdef:high=8589934592:weight=10``.
"""

LENIENT = "GGROUP_LENIENT"
"""Variable that, if it is 1, lets a program go on although a value in its environment is refused."""

SIZE = re.compile(r"(?P<number>[0-9]{1,19})(?P<suffix>[KMGT]?)")
NUMBER = re.compile(r"[0-9]{1,19}")
ONE = re.compile(r"(?P<id>[0-9a-f]{16})(?P<values>(?::[a-z_]+=[0-9]{1,19})*)")


class Refused(RuntimeError):
    """An invalid value in the environment; the text is the program's message about it."""


@attrs.frozen
class Level:
    """One family, as the environment describes it."""

    id: int
    """Number of the family."""
    values: Mapping[str, int]
    """Values that were asked for, by the field of the setting."""

    def __str__(self) -> str:
        return ":".join((f"{self.id:016x}", *(f"{name}={value}" for name, value in self.values.items())))


def value_of(setting: Setting, text: str) -> int:
    """Return the value that a variable asks for. Raises Refused."""
    name, allowed = setting.environment, setting.allowed
    if setting.kind is Kind.SIZE:
        if text in ("max", "infinity"):
            return MAX
        size = SIZE.fullmatch(text)
        if size is None:
            raise Refused(f"{name}={text}: not a size: bytes, or with K, M, G or T, or max")
        return min(MAX, int(size["number"]) << (10 * " KMGT".index(size["suffix"] or " ")))
    if not NUMBER.fullmatch(text) or int(text) not in allowed:
        raise Refused(f"{name}={text}: not a number from {setting.least} to {setting.most}")
    return int(text)


def asked(environment: Mapping[str, str]) -> Iterator[tuple[Setting, str]]:
    """Yield the settings that an environment asks for, with their text. An empty variable asks for nothing."""
    for name, setting in BY_ENVIRONMENT.items():
        if text := environment.get(name):
            yield setting, text


def levels_in(text: str) -> Sequence[Level]:
    """Return the families in the text of `GGROUP_FAMILY`. Raises Refused for malformed text."""
    found: list[Level] = []
    for word in text.split(",") if text else ():
        match = ONE.fullmatch(word)
        if match is None or not int(match["id"], 16) or len(found) == FAMILIES_MOST:
            raise Refused(f"{FAMILY}={text}: not what ggroupfs puts there: unset it")
        pairs = [pair.split("=") for pair in match["values"].split(":")[1:]]
        found.append(Level(int(match["id"], 16), {name: int(value) for name, value in pairs}))
    return found


def families(environment: MutableMapping[str, str]) -> tuple[Sequence[Level], Sequence[str]]:
    """Return the families of the process that has this environment, and complaints about values that are
    ignored because of `GGROUP_LENIENT`. A new family that it asks for is noted in the environment, for its
    children. Raises Refused.
    """
    lenient, complaints = is_lenient(environment), []
    try:
        levels = list(levels_in(environment.get(FAMILY, "")))
    except Refused as error:
        if not lenient:
            raise
        levels = []
        complaints.append(str(error))
    values = {}
    for setting, text in asked(environment):
        try:
            values[setting.field] = value_of(setting, text)
        except Refused as error:
            if not lenient:
                raise
            complaints.append(str(error))
    if values and not (levels and levels[-1].values == values):
        if len(levels) >= FAMILIES_MOST:
            complaint = f"{FAMILY}: {FAMILIES_MOST} families in one another are the most"
            if not lenient:
                raise Refused(complaint)
            return levels, [*complaints, complaint]
        levels.append(Level(secrets.randbelow(ID_MOST) + 1, values))
        environment[FAMILY] = ",".join(map(str, levels))
    return levels, complaints


def is_lenient(environment: Mapping[str, str]) -> bool:
    """Return whether a program goes on although a value is refused."""
    return environment.get(LENIENT) == "1"


def messages(levels: Sequence[Level], *, everywhere: bool = False) -> Iterator[tuple[Op, tuple[int, int]]]:
    """Yield the requests that name a program's families; the last one puts it into the tree `everywhere`."""
    for level in levels:
        for name, value in level.values.items():
            if name in BY_FIELD:  # otherwise a setting of a later version
                yield Op.WANT, (SETTINGS.index(BY_FIELD[name]), value)
        yield Op.FAMILY, (level.id, int(everywhere and level is levels[-1]))


def refusal(levels: Sequence[Level], error: OSError) -> str:
    """Return the message of a program whose families are refused by a daemon."""
    words = " ".join(
        f"{BY_FIELD[name].environment}={value}" for name, value in levels[-1].values.items() if name in BY_FIELD
    )
    return f"{words or FAMILY}: {os.strerror(error.errno) if error.errno else error}"
