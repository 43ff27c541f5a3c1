"""The servers of spaces: started for the first program of a user in a spatial slice, kept, and ended with the slice.

In real time, with a double of MPS's control daemon.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from backend.process import procfs
from backend.process.identity import Process, Slice
from backend.space import control, spaces
from backend.space.control import Control
from backend.space.space import read_records
from backend.space.spaces import Running
from tests.support.harness import Harness, StubGpu, World, running
from tests.support.mps import MpsDouble
from tests.support.restarted import SurvivingLedger

Spawn = Callable[..., subprocess.Popen[bytes]]
LOST = pytest.mark.logs("server ended|control daemon ended")
UID = os.geteuid()


@attrs.define
class Rig:
    h: Harness
    double: MpsDouble
    directory: Path
    spawn: Spawn

    async def start(self, cgroup: str = "/jobs", given: int = 0) -> tuple[Process, int]:
        """A program starts there; return it, and the number of the space that it was told."""
        popen = self.spawn()
        self.h.world.cgroups[popen.pid] = Slice(cgroup)
        process = Process(popen.pid, procfs.stat(popen.pid).start)
        return process, await self.h.controller.bookkeeper.enter(process, UID, given)

    def space(self) -> Running:
        """The only space."""
        (found,) = self.h.controller.spaces._running.values()
        return found

    async def server(self) -> int:
        """Return the pid of its server, once that is there."""
        await until(lambda: self.space().servers, "a server")
        (pid,) = self.space().servers
        return pid

    async def lost(self, place: str = "slice/jobs/0") -> int:
        text = await self.h.read(f"{place}/compute.events")
        return dict((line.split()[0], int(line.split()[1])) for line in text.splitlines())["server_lost"]


async def until(condition: Callable[[], object], what: str, seconds: float = 60) -> float:
    """Wait for something that other processes do; return the seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, f"never: {what}"
        await trio.sleep(0.01)
    return time.monotonic() - began


@pytest.fixture
def run(tmp_path: Path, spawn: Spawn) -> Iterator[Callable[..., None]]:
    """Runs a test with a tree of one GPU. The slice /jobs is spatial: it is `made`, or as the test before left it, and
    the books go on. No process is left.
    """
    directories = []
    gpu = StubGpu()
    ledger = SurvivingLedger(gpu)

    @contextlib.asynccontextmanager
    async def rig(double: MpsDouble, made: bool) -> AsyncIterator[Rig]:
        directory = tmp_path / "ggroup.mps"
        async with running(gpu, world=World(), ledger=ledger, servers=(double.program, directory)) as h:
            one = Rig(h, double, directory, spawn)
            if made:
                await h.operations.mkdir(await h.inode("slice"), b"jobs", 0o755, h.ctx)
                await h.write("slice/jobs/0/compute.spatial", 1)
            yield one
            for space in h.controller.spaces._running.values():  # no command is on its way, with descriptors
                if space.error is None and not space.retired:
                    await until(lambda space=space: space.servers, "a server")  # type: ignore[misc]

    def go(test: Callable[[Rig], Awaitable[None]], made: bool = True, **double: str) -> None:
        async def main() -> None:
            mps = MpsDouble(tmp_path / "bin", **double)
            directories.append(mps.directory)
            async with rig(mps, made) as one:
                await test(one)

        trio.run(main)

    tmp_path.chmod(0o755)
    yield go
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                words = procfs.command_line(int(name))
                if any(str(directory) in words for directory in directories):
                    os.kill(int(name), signal.SIGKILL)
    while control._LEFT:
        control._LEFT.pop().wait()


def test_programs_of_a_slice_share_a_server(run: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        first, number = await rig.start()
        other, same = await rig.start("/jobs/below")
        _, none = await rig.start("/elsewhere")
        assert number == same != 0
        assert none == 0
        assert rig.double.starts == 1
        assert rig.space().space.slice == Slice("/jobs")
        assert (rig.directory / f"{number:08x}" / "pipe" / "control").exists()
        assert [*rig.h.controller.spaces.members(rig.space().space)] == [first, other]
        (record,) = read_records(rig.directory)
        assert record.control == rig.space().control.process
        server = await rig.server()
        bookkeeper = rig.h.controller.bookkeeper
        assert bookkeeper.is_server(server, 100 << 20)
        assert not bookkeeper.is_server(server, spaces.SERVER_MOST + 1), "nobody hides that much"
        assert not bookkeeper.is_server(first.pid, 0)

    run(test)


def test_it_ends_once_the_slice_is_not_to_have_it_and_its_programs_have_ended(
    run: Callable[..., None], spawn: Spawn
) -> None:
    async def test(rig: Rig) -> None:
        popen = spawn()
        rig.h.world.cgroups[popen.pid] = Slice("/jobs")
        process = Process(popen.pid, procfs.stat(popen.pid).start)
        rig.double.hold()
        number = await rig.h.controller.bookkeeper.enter(process, UID)
        ends = rig.space()
        await rig.h.write("slice/jobs/0/compute.spatial", 0)
        await until(lambda: "quit" in rig.double.commands, "it is told to quit")
        assert ends.control is not None
        assert not ends.control.has_ended(), "its program runs"
        assert (await rig.start())[1] == 0
        await rig.h.write("slice/jobs/0/compute.spatial", 1)
        _, next_number = await rig.start()
        assert next_number not in (0, number), "what comes now has another one"
        rig.double.release()
        await until(lambda: ends.space not in rig.h.controller.spaces._running, "it has ended")
        assert not (rig.directory / f"{number:08x}").exists()
        assert [record.space.number for record in read_records(rig.directory)] == [next_number]
        assert popen.poll() is None, "no program is ended for it"

    run(test)


def test_it_goes_with_its_slice(run: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        process, _ = await rig.start()
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not rig.h.controller.spaces.any(), "the program has ended")
        await rig.h.operations.rmdir(await rig.h.inode("slice"), b"jobs", rig.h.ctx)
        await until(lambda: not rig.h.controller.spaces._running, "it has ended")
        assert not read_records(rig.directory)

    run(test)


@LOST
@pytest.mark.parametrize("what", ["server", "control"])
def test_a_server_that_dies_is_replaced_and_members_are_told(run: Callable[..., None], what: str) -> None:
    """Within 2 s; as a fault of a program takes the server down, with all programs that it has."""

    async def test(rig: Rig) -> None:
        process, number = await rig.start()
        await rig.h.controller.bookkeeper.arrive(process, 0)
        before = await rig.server()
        assert await rig.lost() == 0
        running = rig.space()
        assert running.control is not None
        assert running.control.process is not None
        os.kill(before if what == "server" else running.control.process.pid, signal.SIGKILL)
        took = await until(lambda: set(running.servers) - {before}, "another server")
        assert took < 2.0
        assert (await rig.lost(), await rig.lost(f"{process.pid}/0")) == (1, 1)
        assert (await rig.start())[1] == number, "what is started anew comes there"
        with contextlib.suppress(ProcessLookupError):
            os.kill(before, signal.SIGKILL)
        await trio.sleep(2 * spaces.LOOK_S)
        assert await rig.lost() == 1, "that of a control daemon which ended is told with it"

    run(test)


@LOST
def test_no_program_is_told_of_one_that_does_not_run(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the next one, which comes soon; or runs by itself, where there is to be none any more."""
    monkeypatch.setattr(spaces, "AGAIN_S", 1.0)

    async def test(rig: Rig) -> None:
        _, number = await rig.start()
        await rig.server()
        found = rig.space().control
        assert found is not None
        told = []

        async def start() -> None:
            told.append((await rig.start())[1])

        for answer in (number, 0):
            assert found.process is not None
            os.kill(found.process.pid, signal.SIGKILL)
            await until(lambda: not rig.space().ready.is_set(), "that is seen")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(start)
                if not answer:
                    await trio.sleep(0.1)
                    await rig.h.write("slice/jobs/0/compute.spatial", 0)
                with trio.fail_after(60):
                    await until(lambda: told, "it is told")
            assert told.pop() == answer
            assert found.has_ended() == (not answer)

    run(test)


@LOST
def test_where_it_ends_again_and_again_programs_run_by_themselves(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spaces, "AGAIN_S", spaces.WAITED_S + 1)

    async def test(rig: Rig) -> None:
        await rig.start()
        await rig.server()
        running = rig.space()
        assert running.control is not None
        assert running.control.process is not None
        os.kill(running.control.process.pid, signal.SIGKILL)
        await until(lambda: running.error is not None, "that is seen")
        assert (await rig.start())[1] == 0

    run(test)


@LOST
def test_a_server_that_dies_again_and_again_is_started_ever_later(run: Callable[..., None]) -> None:
    """Its user may end it as often as it likes."""

    async def test(rig: Rig) -> None:
        await rig.start()
        for count in range(1, 4):
            os.kill(await rig.server(), signal.SIGKILL)
            await until(lambda count=count: rig.space().lost == count, "that is seen")  # type: ignore[misc]
        assert rig.space().again_s == 2 * spaces.AGAIN_S
        await rig.server()
        await trio.sleep(2 * spaces.LOOK_S)
        assert await rig.lost() == 3, "each counts once"

    run(test)


@pytest.mark.logs("no server: it ended: no GPU")
def test_without_a_server_programs_run_by_themselves(run: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.start())[1] == 0
        assert not rig.h.controller.spaces.any()

    run(test, first="echo no GPU; exit 1")


def test_the_next_daemon_goes_on_with_it(run: Callable[..., None]) -> None:
    """After an upgrade: the program says where it is, and comes there again; none of another user by that number."""
    kept: dict[str, object] = {}

    async def before(rig: Rig) -> None:
        _, kept["number"] = await rig.start()
        await rig.server()
        control_ = rig.space().control
        assert control_ is not None
        kept["control"] = control_.process
        rig.h.controller.hand_over()

    async def after(rig: Rig) -> None:
        await until(
            lambda: [one for one in rig.h.controller.spaces._running.values() if one.ready.is_set()], "it is found"
        )
        assert rig.double.starts == 1
        control_ = rig.space().control
        assert control_ is not None
        assert control_.process == kept["control"]
        number = kept["number"]
        assert isinstance(number, int)
        assert (await rig.start(given=number))[1] == number
        assert (await rig.start(given=number + 1))[1] == 0
        stranger = rig.spawn()
        process = Process(stranger.pid, procfs.stat(stranger.pid).start)
        assert await rig.h.controller.bookkeeper.enter(process, UID + 1, number) == 0

    run(before)
    run(after, made=False)


def test_one_that_was_told_to_quit_takes_no_program_of_the_next_daemon(run: Callable[..., None]) -> None:
    """It waits for its last program, and would keep one that comes waiting, or refuse it."""
    kept = []

    async def before(rig: Rig) -> None:
        _, number = await rig.start()
        kept.append(number)
        await rig.server()
        rig.double.hold()

    async def after(rig: Rig) -> None:
        await until(lambda: rig.h.controller.spaces._running, "it is found")
        _, given = await rig.start(given=kept[0])
        assert given == kept[0], "one that has it goes on"
        _, number = await rig.start()
        assert number not in (0, kept[0])
        assert rig.double.starts == 2
        rig.double.release()
        await until(lambda: len(rig.h.controller.spaces._running) == 1, "the former one has ended")

    run(before)
    run(after, made=False)


def test_a_program_that_comes_before_records_are_read_waits(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    async def before(rig: Rig) -> None:
        await rig.h.operations.mkdir(await rig.h.inode("slice"), b"more", 0o755, rig.h.ctx)
        await rig.h.write("slice/more/0/compute.spatial", 1)
        kept.extend([(await rig.start(cgroup))[1] for cgroup in ("/jobs", "/more")])
        for space in rig.h.controller.spaces._running.values():
            await until(lambda space=space: space.servers, "a server")  # type: ignore[misc]
        rig.h.controller.hand_over()

    async def after(rig: Rig) -> None:
        last = max(kept)  # they are read in this order
        assert (await rig.start(given=last))[1] == last

    adopt = Control.adopt

    async def slow(self: Control, process: Process) -> bool:
        await trio.sleep(0.5)
        return await adopt(self, process)

    run(before)
    monkeypatch.setattr(Control, "adopt", slow)
    run(after, made=False)


@pytest.mark.logs("was not removed")
def test_what_a_user_keeps_from_being_removed_keeps_no_space(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(rig: Rig) -> None:
        process, _ = await rig.start()
        await rig.server()

        def remove(self: Control) -> None:
            raise OSError(errno.ENOTEMPTY, "a user writes there")

        monkeypatch.setattr(Control, "remove", remove)
        os.kill(process.pid, signal.SIGKILL)
        await rig.h.write("slice/jobs/0/compute.spatial", 0)
        await until(lambda: not rig.h.controller.spaces._running, "it has ended")
        assert not read_records(rig.directory)

    run(test)


def test_a_program_that_shares_no_memory_with_the_server_runs_by_itself(run: Callable[..., None]) -> None:
    """As one in a container, which has an ipc namespace of its own."""

    async def test(rig: Rig) -> None:
        popen = rig.spawn("unshare", "--ipc", "sleep", "600")
        await until(lambda: procfs.command(popen.pid) == "sleep", "it is in its namespace")
        rig.h.world.cgroups[popen.pid] = Slice("/jobs")
        process = Process(popen.pid, procfs.stat(popen.pid).start)
        assert await rig.h.controller.bookkeeper.enter(process, UID) == 0
        assert rig.double.starts == 0

    run(test)


def test_so_many_children_of_a_control_daemon_are_watched(run: Callable[..., None]) -> None:
    """Its user can have any number started, and each that is watched takes a descriptor of the daemon."""

    async def test(rig: Rig) -> None:
        number = (await rig.start())[1]
        server, space = await rig.server(), rig.space()
        assert space.control is not None
        children = space.control.servers
        pipe = rig.directory / f"{number:08x}" / "pipe" / "control"
        for count in range(1, spaces.SERVERS_MOST + 8):
            await until(lambda count=count: len(children()) == count, "a child")  # type: ignore[misc]
            with pipe.open("w") as command:
                command.write("start_server\n")
        await until(lambda: len(space.servers) == spaces.SERVERS_MOST, "those that are watched")
        await trio.sleep(2 * spaces.LOOK_S)
        assert len(space.servers) == spaces.SERVERS_MOST
        assert server in space.servers

    run(test)


def test_what_is_unmounted_ends_it(run: Callable[..., None]) -> None:
    doubles = []

    async def test(rig: Rig) -> None:
        await rig.start()
        doubles.append(rig.double)

    run(test)
    trio.run(partial(until, lambda: all(child.poll() is not None for child in control._LEFT), "it has quit"))
    assert doubles[0].commands[-1] == "quit"


@pytest.mark.logs("no server: there are 0")
def test_there_are_so_many_of_a_user(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "SPACES_EACH", 0)

    async def test(rig: Rig) -> None:
        assert (await rig.start())[1] == 0

    run(test)
