"""The parts that programs of a space have of its time on the engine."""

from __future__ import annotations

import attrs
import pytest

from backend.nvidia.parts import Parts, Shared
from backend.process.identity import Process, Slice
from backend.space.space import Space

SPACE, OTHER = (Space(Slice(path), 0, number) for number, path in enumerate(("/jobs", "/other"), 1))
ONE, TWO = Process(11, 1), Process(12, 1)
SERVER = 10


@attrs.define
class Looks:
    """A GPU that is looked at, with a trace that is `age` looks late."""

    age: int = 0
    used: dict[int, int] = attrs.field(factory=dict)
    """Microseconds that the trace has, by name."""
    parts: Parts = attrs.field(default=attrs.Factory(lambda self: Parts(self.age), takes_self=True))

    def look(self, pending: dict[Process, bool], space: Space = SPACE) -> set[int]:
        names = {SERVER, *(one.pid for one in pending)}
        shared = [Shared(space, names, pending)] if pending else []
        return set(self.parts.look(shared, lambda pid: self.used.get(pid, 0)))

    def had(self) -> tuple[int | None, int | None]:
        return self.parts.usec(ONE), self.parts.usec(TWO)


@pytest.mark.parametrize("name", [SERVER, ONE.pid, TWO.pid])
def test_programs_with_kernels_have_what_the_space_had(name: int) -> None:
    """Whatever name the trace has it under."""
    looks = Looks(used={name: 5_000})
    looks.look({ONE: True, TWO: True})
    assert looks.had() == (0, 0), "what was before is not theirs"
    looks.used[name] += 1_000
    looks.look({ONE: True, TWO: True})
    assert looks.had() == (500, 500)
    looks.used[name] += 1_000
    looks.look({ONE: False, TWO: True})
    assert looks.had() == (500, 1_500)
    looks.used[name] += 1_000
    looks.look({ONE: False, TWO: False})  # something of it stood on the engine all the same
    assert looks.had() == (1_000, 2_000)


def test_time_is_that_of_those_that_had_kernels_then() -> None:
    looks = Looks(age=2)
    for pending in ({ONE: True, TWO: False}, {ONE: False, TWO: True}):
        looks.look(pending)
    looks.used[SERVER] = 600
    looks.look({ONE: False, TWO: True})
    assert looks.had() == (600, 0)
    looks.used[SERVER] = 1_000
    looks.look({ONE: True, TWO: False})
    assert looks.had() == (600, 400)


def test_the_name_of_one_that_ended_stays_with_its_space() -> None:
    looks = Looks()
    looks.look({ONE: True, TWO: True})
    looks.used[ONE.pid] = 1_000
    assert looks.look({ONE: True, TWO: True}) == set()
    looks.parts.forget(ONE)
    looks.used[ONE.pid] = 1_800
    assert looks.look({TWO: True}) == set()
    assert looks.had() == (None, 1_300)
    assert looks.look({}) == {SERVER, ONE.pid, TWO.pid}, "nobody asks for them any more"
    assert looks.had() == (None, None)


def test_another_space_begins_at_nothing() -> None:
    looks = Looks(used={SERVER: 1_000})
    looks.look({ONE: True})
    looks.used[SERVER] = 2_000
    looks.look({ONE: True}, OTHER)
    assert looks.had() == (0, None)
