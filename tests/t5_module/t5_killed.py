"""A daemon killed at calls of the kernel module: the books that the next one finds there, and a driver that went on.

The life is the same as in :mod:`tests.t3_program.t3_killed`, with KernelLedger and ProviderGpu in place of a journal's
books.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
import trio

from backend.ledgers import abi
from tests.support.harness import Harness
from tests.support.killed import Killed, Life, Machine, a_machine
from tests.support.killed_life import again, is_released, live, one_death, pid_of, run, sleepers, whole_life
from tests.t5_module.harness import File, errno_of

STEP = 4
"""Stride through the points at which the kernel is asked for a change."""


def forget() -> None:
    with File() as admin:
        assert errno_of(admin.forget, "GPU-0") in (0, errno.ENODEV), "somebody still provides the GPU"


@pytest.fixture(autouse=True)
def nothing_was_there() -> Iterator[None]:
    forget()
    yield
    forget()


def test_killed_at_calls_of_the_kernel() -> None:
    """Before and after such calls, alternately."""
    points = whole_life(kernel=True).asked
    assert len(points) > 40
    for number, at in enumerate(points[::STEP]):
        forget()
        one_death(at + number % 2, kernel=True)


def levers(machine: Machine) -> dict[str, int]:
    """Return what holds, or may hold, for each program, according to the kernel."""
    found = {}
    with File() as admin:
        gpu = admin.register("GPU-0", 1 << 40)
        for name, program in machine.programs.items():
            books = admin.books(admin.find_process(gpu.root, program.pid, program.start))
            found[name] = books.flags & (abi.BOOKS_DETACHED | abi.BOOKS_DOUBTFUL) or books.lever_timeslice_us
        admin.unregister()
    return found


def test_everybody_runs_as_before_any_daemon_came_and_the_kernel_knows() -> None:
    """`ggroupfs doctor --thaw-all` after a daemon with the kernel's books was killed while a program was frozen. The
    settings are kept for the next daemon."""
    life = Life()

    async def story(machine: Machine, h: Harness) -> None:
        for name in "bc":
            machine.start(name)
        await trio.sleep(0.25)
        await machine.write(h, f"{pid_of(machine, 'b')}/compute.freeze", "1")
        await machine.write(h, f"{pid_of(machine, 'c')}/compute.timeslice", "4")
        life.dead = True
        raise Killed

    with sleepers() as spawn, a_machine(spawn, kernel=True) as machine:
        live(machine, life, story)
        assert levers(machine) == {"b": abi.BOOKS_DETACHED, "c": 4000}
        assert {one.verdict for one in run(machine)} == {"thawed"}
        is_released(machine)
        assert levers(machine) == {"b": 0, "c": 0}
        again(machine, further=True)


def test_who_is_served_is_not_freed_behind_the_back_of_his_daemon() -> None:
    """The daemon has the books, wherever it is mounted."""
    with sleepers() as spawn, a_machine(spawn, kernel=True) as machine, File() as admin:
        machine.start("a")
        admin.register("GPU-0", 1 << 40)
        with pytest.raises(RuntimeError, match="served by another mount"):
            run(machine, [])
        admin.unregister(abi.UNREGISTER_FORGET)
        assert {one.verdict for one in run(machine, [])} == {"ok"}
        assert errno_of(admin.forget, "GPU-0") == errno.ENODEV, "books that were not there before are not there after"
