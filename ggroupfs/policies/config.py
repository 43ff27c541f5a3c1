"""The configuration of a policy: a TOML file, read strictly. A mistake is a UsageError with the file and the key."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from backend.common.regular import read_regular
from ggroupfs.errors import UsageError
from ggroupfs.text.properties import microseconds
from ggroupfs.text.values import amount

T = TypeVar("T")


class Table:
    """A table of the file. Each key is read by a method for its type; a key without a default is required."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """`where` begins every complaint: the file, and the table in it."""
        self._values = values
        self._where = where
        self._asked: set[str] = set()
        self._tables: list[Table] = []

    @classmethod
    def load(cls, file: Path) -> Table:
        """Read a file as a table. UsageError if it is not TOML; OSError if it cannot be read."""
        try:
            return cls(tomllib.loads(read_regular(file).decode()), str(file))
        except ValueError as error:  # TOMLDecodeError is a ValueError, and so is a UnicodeDecodeError
            raise UsageError(f"{file}: {error}") from None
        except RecursionError:
            raise UsageError(f"{file}: arrays and tables in each other, too many") from None

    def __contains__(self, key: str) -> bool:
        """Whether the key is there. This does not count as reading it."""
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return self._get(key, default, _text)

    def choice(self, key: str, words: Sequence[str], default: str | None = None) -> str:
        """One of `words`."""

        def choose(value: object) -> str:
            if value not in words:
                raise ValueError("not one of " + ", ".join(words))
            return str(value)

        return self._get(key, default, choose)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean: true or false."""
        return self._get(key, default, _flag)

    def number(
        self, key: str, default: float | None = None, *, low: float = -math.inf, high: float = math.inf
    ) -> float:
        """A number from `low` to `high`."""
        return self._get(key, default, lambda value: _between(_number(value), low, high))

    def whole(self, key: str, default: int | None = None, *, low: float = 0, high: float = math.inf) -> int:
        """A whole number from `low` to `high`."""
        return self._get(key, default, lambda value: _between(_whole(value), low, high))

    def size(self, key: str, default: int | None = None) -> int:
        """A size in bytes: a whole number, or a string as in the control files, ``"8G"``."""
        return self._get(key, default, _size)

    def seconds(self, key: str, default: float | None = None) -> float:
        """A time span in seconds, written as in unit files and always with a unit: ``"50ms"``, ``"1s 500ms"``."""
        return self._get(key, default, _seconds)

    def tables(self, key: str) -> list[Table]:
        """The tables of an array ``[[key]]``; none if the key is missing."""
        self._asked.add(key)
        value = self._values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.wrong(key, f"not tables: each begins with [[{key}]]")
        found = [Table(one, f"{self._where}: {key} {number}") for number, one in enumerate(value, 1)]
        self._tables += found
        return found

    def finish(self) -> None:
        """Check that every key was read, in this table and in those read from it. UsageError if one was not."""
        for key in self._values:
            if key not in self._asked:
                raise self.wrong(key, "there is no such key")
        for table in self._tables:
            table.finish()

    def wrong(self, key: str, why: str) -> UsageError:
        """Return a complaint for the caller to raise."""
        return UsageError(f"{self._where}: {key}: {why}")

    def _get(self, key: str, default: T | None, parse: Callable[[object], T]) -> T:
        self._asked.add(key)
        if key not in self._values:
            if default is None:
                raise self.wrong(key, "is missing")
            return default
        try:
            return parse(self._values[key])
        except ValueError as error:
            raise self.wrong(key, str(error)) from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a string")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("too large") from None
    if not math.isfinite(number):
        raise ValueError("not a number")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("not a whole number")
    return value


N = TypeVar("N", int, float)


def _between(number: N, low: float, high: float) -> N:
    if number < low:
        raise ValueError(f"less than {low:g}")
    if number > high:
        raise ValueError(f"more than {high:g}")
    return number


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not a size: bytes, or a string with K, M, G or T")
    try:
        return amount(str(value))
    except OSError:
        raise ValueError(f"{value!r} is no size: bytes, or a string with K, M, G or T") from None


def _seconds(value: object) -> float:
    if not isinstance(value, str) or value.strip()[-1:].isdigit():
        raise ValueError('a time span has a unit: "50ms", "2s"')
    return microseconds(value) / 1e6
