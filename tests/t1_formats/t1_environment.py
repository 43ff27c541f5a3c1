"""The settings that a program asks for by its environment, and what its children find there."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.core.settings import BY_ENVIRONMENT, HIGH, SETTINGS, WEIGHT
from backend.door.environment import FAMILY, Level, Refused, families, levels_in, messages, refusal, value_of
from backend.door.wire import Op

VALUES = Path(__file__).parents[1] / "support" / "environment.values"


def cases() -> Iterator[tuple[str, str, str]]:
    """Each variable with a value and what that means."""
    for line in VALUES.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            words, _, meaning = line.partition(" = ")
            name, _, value = words.partition(" ")
            yield name, value, meaning


@pytest.mark.parametrize(("name", "value", "meaning"), list(cases()))
def test_what_a_value_means(name: str, value: str, meaning: str) -> None:
    setting = BY_ENVIRONMENT[name]
    if meaning == "refused":
        with pytest.raises(Refused, match=f"^{name}="):
            value_of(setting, value)
    else:
        assert f"{setting.field} {value_of(setting, value)}" == meaning


def test_every_variable_has_a_line_of_each_kind() -> None:
    assert {name for name, _, _ in cases()} == set(BY_ENVIRONMENT)


def test_nothing_is_asked_for_without_a_variable() -> None:
    environment = {"PATH": "/bin", "GGROUP_GMEM_HIGH": "", "GGROUP_SOCKET": "/run/x"}
    assert families(environment) == ([], [])
    assert FAMILY not in environment


def test_children_are_in_the_family_of_the_first() -> None:
    environment = {"GGROUP_GMEM_HIGH": "8G", "GGROUP_WEIGHT": "10"}
    first, _ = families(environment)
    assert [level.values for level in first] == [{"high": 8 << 30, "weight": 10}]
    again, _ = families(environment)
    assert again == first == levels_in(environment[FAMILY])
    other, _ = families({"GGROUP_GMEM_HIGH": "8G"})
    assert other[0].id != first[0].id, "what another asks for is another family"
    del environment["GGROUP_GMEM_HIGH"], environment["GGROUP_WEIGHT"]
    assert families(environment)[0] == first, "what is unset stays asked for"


def test_a_child_that_asks_for_something_else_is_in_a_family_of_its_own_below() -> None:
    environment = {"GGROUP_GMEM_HIGH": "8G"}
    (outer,), _ = families(environment)
    environment["GGROUP_GMEM_HIGH"] = "1G"
    nested, _ = families(environment)
    assert [nested[0], nested[1].values] == [outer, {"high": 1 << 30}]
    assert families(environment)[0] == nested
    for size in range(2, 8):
        environment["GGROUP_GMEM_HIGH"] = f"{size}M"
        families(environment)
    environment["GGROUP_GMEM_HIGH"] = "9M"
    before = dict(environment)
    with pytest.raises(Refused, match="8 families"):
        families(environment)
    lenient = environment | {"GGROUP_LENIENT": "1"}
    levels, complaints = families(lenient)
    assert (len(levels), complaints) == (8, ["GGROUP_FAMILY: 8 families in one another are the most"])
    assert lenient[FAMILY] == before[FAMILY] == environment[FAMILY], "it goes on in those that it is in"


def test_what_cannot_be_is_refused_or_left_out() -> None:
    environment = {"GGROUP_GMEM_HIGH": "lots", "GGROUP_WEIGHT": "7"}
    with pytest.raises(Refused, match="GGROUP_GMEM_HIGH=lots: not a size"):
        families(environment)
    assert FAMILY not in environment
    levels, complaints = families(environment | {"GGROUP_LENIENT": "1"})
    assert [level.values for level in levels] == [{"weight": 7}]
    assert complaints == ["GGROUP_GMEM_HIGH=lots: not a size: bytes, or with K, M, G or T, or max"]


@pytest.mark.parametrize(
    "text",
    [
        *("x", "0123456789abcdef:", "0123456789ABCDEF", "0" * 16, "0123456789abcdef:high=-1"),
        ",".join(["0123456789abcdef"] * 9),
    ],
)
def test_a_family_that_nothing_of_ours_wrote(text: str) -> None:
    with pytest.raises(Refused, match="unset it"):
        families({FAMILY: text})
    assert families({FAMILY: text, "GGROUP_LENIENT": "1"})[0] == []


def test_what_is_said_of_families() -> None:
    levels = [Level(7, {"high": 4096}), Level(8, {"weight": 5, "of_a_later_version": 3})]
    high, weight = SETTINGS.index(HIGH), SETTINGS.index(WEIGHT)
    outer = [(Op.WANT, (high, 4096)), (Op.FAMILY, (7, 0))]
    assert list(messages(levels)) == [*outer, (Op.WANT, (weight, 5)), (Op.FAMILY, (8, 0))]
    assert list(messages(levels, everywhere=True))[-1] == (Op.FAMILY, (8, 1))
    assert levels_in(",".join(map(str, levels))) == levels
    assert refusal(levels, OSError(errno.EAGAIN, "")) == "GGROUP_WEIGHT=5: Resource temporarily unavailable"
    assert refusal(levels, TimeoutError("timed out")) == "GGROUP_WEIGHT=5: timed out", "an error without a number"
