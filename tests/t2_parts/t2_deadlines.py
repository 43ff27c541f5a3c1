"""Deadlines of writers: a writer that waits for memory that moves as a whole gets longer, once that is known."""

from __future__ import annotations

import errno

import pytest
import trio

from backend.core.deadlines import WHOLE_BYTES, Deadlines
from backend.process.identity import Group, Member, Process
from tests.support.harness import virtual

SECONDS = 4.0
SMALL, LARGE = (Member(Process(pid, 1), 0) for pid in (1, 2))


async def wait(deadlines: Deadlines, group: Group, ended: dict[Group, float]) -> None:
    with pytest.raises(TimeoutError), deadlines.deadline(group):
        await trio.sleep_forever()
    ended[group] = trio.current_time()


@virtual
async def test_each_has_as_long_as_there_is_of_it() -> None:
    whole: dict[Group, int] = {}
    deadlines = Deadlines(SECONDS, lambda group: whole.get(group, 0))
    ended: dict[Group, float] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deadlines.run)
        for delay in (0.0, 1.0):  # at any point of its turn
            await trio.sleep(delay)
            began = trio.current_time()
            whole.clear()
            for group in (SMALL, LARGE):
                nursery.start_soon(wait, deadlines, group, ended)
            await trio.sleep(SECONDS / 2 - 0.1)
            whole[LARGE] = WHOLE_BYTES
            await trio.sleep(SECONDS / 2)
            whole[LARGE] = 3 * WHOLE_BYTES
            await trio.sleep(SECONDS / 2)
            whole[LARGE] = 0  # nearly done, which takes no time away
            await trio.sleep(5 * SECONDS)
            assert ended == {SMALL: pytest.approx(began + SECONDS), LARGE: pytest.approx(began + 4 * SECONDS)}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENODEV, "gone"), pytest.param(KeyError(), id="bug", marks=pytest.mark.logs("how much of .* moves"))],
)
@virtual
async def test_where_it_is_not_known_nobody_has_longer(error: Exception) -> None:
    """And all other writers go on."""

    def whole(group: Group) -> int:
        if group == SMALL:
            raise error
        return WHOLE_BYTES

    deadlines = Deadlines(SECONDS, whole)
    ended: dict[Group, float] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deadlines.run)
        for group in (SMALL, LARGE):
            nursery.start_soon(wait, deadlines, group, ended)
        await trio.sleep(3 * SECONDS)
        nursery.cancel_scope.cancel()
    assert ended == {SMALL: pytest.approx(SECONDS), LARGE: pytest.approx(2 * SECONDS)}


@virtual
async def test_an_error_of_the_body_is_its_own() -> None:
    deadlines = Deadlines(SECONDS, lambda _: 0)
    with pytest.raises(OSError, match="busy"), deadlines.deadline(SMALL):
        raise OSError("busy")
    assert not deadlines._waiting
    with deadlines.deadline(SMALL):
        await trio.sleep(SECONDS - 0.1)
