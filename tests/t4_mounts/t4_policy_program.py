"""Policies as programs over a real mount: ggroupfs.client with trio, and `ggroupfs policy`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from ggroupfs import client
from ggroupfs.client import Branch, Group, Member, Tree, Watch
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import complaint, ggroupfs
from tests.support.mounted import SECONDS, SLOW, Mounted, Tenant, eventually
from tests.support.page import POLICIES, section
from tests.support.policy_program import PolicyProgram

MIB = 1 << 20

POLICY = """
import trio


async def run(tree, config):
    group = tree.process(config.whole("pid"))
    limit = config.size("limit")
    config.finish()
    await tree.present(group)
    before = await group.read("gmem.limit.high")
    try:
        await group.write("gmem.limit.high", limit)
        await tree.ready()
        await trio.sleep_forever()
    finally:
        with trio.move_on_after(5, shield=True):
            await group.write("gmem.limit.high", before)


async def fails(tree, config):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tree.process(1).read, "gmem.current")
        await trio.sleep_forever()


async def wrong(tree, config):
    {}[1]


async def short(tree, config):
    await tree.ready()


nothing = 5
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A file with policies in it."""
    file = tmp_path / "mine.py"
    file.write_text(POLICY)
    return file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """An empty configuration."""
    file = tmp_path / "mine.toml"
    file.touch()
    return file


# The command


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_policy_sets_and_takes_back(mount: Mounted, module: Path, config: Path, number: int) -> None:
    with Tenant(mount, "--gmem", "64M", "--report", "0.1") as tenant:
        tenant.write("gmem.limit.high", "1G")
        config.write_text(f'pid = {tenant.pid}\nlimit = "32M"\n')
        with PolicyProgram(mount.path, f"{module}:run", config) as policy:
            assert tenant.number("gmem.limit.high") == 32 * MIB
            assert policy.end(number) == []
        assert tenant.number("gmem.limit.high") == 1 << 30


def test_a_policy_of_a_module_and_what_systemd_hears(
    mount: Mounted, module: Path, config: Path, tmp_path: Path
) -> None:
    """It waits for the process to come, and is ready once it is at work."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, Tenant(mount, "--gmem", "64M") as tenant:
        systemd.bind(os.fspath(tmp_path / "notify"))
        systemd.settimeout(SECONDS * SLOW)
        config.write_text(f"pid = {tenant.pid}\nlimit = {1 << 30}\n")
        environment = {"NOTIFY_SOCKET": systemd.getsockname(), "PYTHONPATH": f"{module.parent}:{os.getcwd()}"}
        with PolicyProgram(mount.path, "mine:run", config, **environment):
            assert systemd.recv(100) == b"READY=1"
            assert tenant.number("gmem.limit.high") == 1 << 30
        assert systemd.recv(100) == b"STOPPING=1"


def test_a_policy_that_ends_by_itself(mount: Mounted, module: Path, config: Path) -> None:
    result = ggroupfs("policy", f"{module}:short", "--config", config, "--mount", mount.path)
    assert (result.returncode, result.stdout, result.stderr) == (0, '{"event": "ready"}\n', "")


def test_what_is_complained_of(mount: Mounted, module: Path, config: Path, tmp_path: Path) -> None:
    def told(name: str, code: int, file: Path = config, tree: Path = mount.path) -> str:
        return complaint("policy", name, "--config", file, "--mount", tree, code=code)

    assert told("nonsense", 2).startswith("policy: there is no policy 'nonsense'; there are ")
    assert told("no_such_module:run", 2) == "policy: no_such_module:run: No module named 'no_such_module'"
    assert told(f"{module}:gone", 2) == f"policy: {module}:gone: module 'mine' has no attribute 'gone'"
    assert told(f"{module}:nothing", 2) == f"policy: {module}:nothing is no async function"
    assert told(f"{tmp_path}/no.py:run", 2).endswith(f"No such file or directory: '{tmp_path}/no.py'")
    assert told(f"{module}:run", 2) == f"policy: {config}: pid: is missing"
    config.write_text('pid = 1\nlimit = "32M"\nlimits = 3\n')
    assert told(f"{module}:run", 2) == f"policy: {config}: limits: there is no such key"
    config.write_text("pid = \n")
    assert told(f"{module}:run", 2).startswith(f"policy: {config}: Invalid value")
    config.write_text("")
    assert told(f"{module}:run", 1, tmp_path / "gone.toml") == f"{tmp_path}/gone.toml: No such file or directory"
    assert told(f"{module}:run", 1, tree=tmp_path) == f"{tmp_path}: no ggroup tree is mounted there"
    assert told(f"{module}:fails", 1) == f"{mount.path}/1/0/gmem.current: No such file or directory"
    result = ggroupfs("policy", f"{module}:wrong", "--config", config, "--mount", mount.path)
    assert result.returncode == 1
    assert "{}[1]" in result.stderr, "a mistake of the policy is seen whole"


def test_the_program_in_the_documentation(mount: Mounted, config: Path, tmp_path: Path) -> None:
    """The program is the page's, with another process and slice."""
    code = section("Policies as programs", POLICIES / "writing.md").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "documented.py").write_text(code)
    batch = mount / "slice" / "documented.slice"
    batch.mkdir()
    with Tenant(mount, "--gmem", "64M") as tenant:
        config.write_text(f'pid = {tenant.pid}\nslice = "/documented.slice"\nspare = "1G"\ninterval = "10ms"\n')
        limit, capacity = batch / "0" / "gmem.limit.high", int((mount / "gpus/0/gmem.capacity").read_text())
        with PolicyProgram(mount.path, f"{tmp_path}/documented.py:run", config):
            left = f"{capacity - 64 * MIB - (1 << 30)}\n"
            eventually(lambda: limit.read_text() == left, "it has what is left")
        assert limit.read_text() == "max\n"
    batch.rmdir()


# The client


async def _for_ever(watch: Watch) -> None:
    while True:
        await watch.changed()


async def _freeze_and_thaw(group: Group) -> None:
    """Freeze and thaw repeatedly, since an observer may miss the first change."""
    while True:
        for value in (0, 1):
            await group.write("compute.freeze", value)


def test_reading_needs_no_trio() -> None:
    """A user's program with the client need not have it."""
    code = "import sys, ggroupfs.client as c; c.members; assert 'trio' not in sys.modules; c.Tree; assert trio_is_in()"
    code = "def trio_is_in(): return 'trio' in sys.modules\n" + code
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_of_the_client_is_on_the_page() -> None:
    """Every name, and every field and method of those with a table of their own."""
    tables = section("ggroupfs.client", POLICIES / "writing.md").split("\n\n")
    text = "\n".join(tables)
    for name in client.__all__:
        assert re.search(rf"`{name}\b", text), name
    for class_ in (Branch, Group, Member, Tree, Watch):
        (table,) = (one for one in tables if one.startswith(f"| `{class_.__name__}` | |"))
        for name in vars(class_):
            assert name.startswith("_") or re.search(rf"\b{name}\b", table), f"{class_.__name__}.{name}"


def test_files_of_a_process(mount: Mounted) -> None:
    async def check(tenant: Tenant) -> None:
        tree = Tree(mount.path)
        group = tree.process(tenant.pid)
        await tree.present(group)
        assert await tree.capacity() == int((mount / "gpus/0/gmem.capacity").read_text())
        assert (await group.read("gmem.current"), await group.number("gmem.current")) == (str(64 * MIB), 64 * MIB)
        assert await group.number("gmem.limit.high") is None
        assert (await group.flat("gmem.stat"))["resident"] == 64 * MIB
        await group.write("gmem.limit.high", "32M")
        assert await group.number("gmem.swap.current") == 32 * MIB
        assert await group.pids() == [tenant.pid]
        with pytest.raises(OSError, match="out of range"):
            await group.write("compute.freeze", 7)
        with pytest.raises(FileNotFoundError):
            await tree.capacity(7)
        with pytest.raises(FileNotFoundError):
            await tree.process(1).read("gmem.current")
        assert await tree.process(1).pids() == []

    with Tenant(mount, "--gmem", "64M") as tenant:
        trio.run(check, tenant)


def test_events_one_after_the_other(mount: Mounted) -> None:
    """None is missed between two waits, none is reported twice, and the end of the group is an event."""

    async def check(tenant: Tenant) -> None:
        group = Tree(mount.path).process(tenant.pid)
        async with group.watch("compute.events") as watch:
            assert (await watch.read())["frozen"] == 0
            for value in (1, 0, 1):
                await group.write("compute.freeze", value)
                with trio.fail_after(SECONDS * SLOW):
                    assert (await watch.changed())["frozen"] == value
            with trio.move_on_after(0.05) as scope:
                await watch.changed()
            assert scope.cancelled_caught
            async with trio.open_nursery() as nursery:
                nursery.start_soon(group.write, "compute.freeze", 0)
                with trio.fail_after(SECONDS * SLOW):
                    assert (await watch.changed())["frozen"] == 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, tenant.kill)
                with trio.fail_after(SECONDS * SLOW), pytest.raises(OSError, match="No such device"):
                    await _for_ever(watch)

    with Tenant(mount, "--gmem", "64M") as tenant:
        trio.run(check, tenant)


def test_the_next_event_of_a_group(mount: Mounted) -> None:
    """Events before the call do not count; the wait can be cancelled, and leaves no descriptor behind."""

    async def check(tenant: Tenant) -> None:
        group = Tree(mount.path).process(tenant.pid)
        await group.write("compute.freeze", 1)
        descriptors = len(os.listdir("/proc/self/fd"))
        with trio.move_on_after(0.05) as scope:
            await group.changed("compute.events")
        assert scope.cancelled_caught
        eventually(lambda: len(os.listdir("/proc/self/fd")) == descriptors, "all is closed")
        with trio.fail_after(SECONDS * SLOW):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_freeze_and_thaw, group)
                await group.changed("compute.events")
                nursery.cancel_scope.cancel()
        await group.write("compute.freeze", 0)

    with Tenant(mount, "--gmem", "64M") as tenant:
        trio.run(check, tenant)


def test_processes_of_a_slice(mount: Mounted) -> None:
    async def check(tenant: Tenant, path: Path) -> None:
        tree = Tree(mount.path)
        inner = tree.slice(slice_path(path / "_7"))
        with trio.fail_after(SECONDS * SLOW):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tree.present, inner)
                enter(tenant.pid, path / "_7")
        assert await inner.pids() == [tenant.pid]
        assert await tree.slice(slice_path(path)).pids() == [tenant.pid]
        assert await tree.slice(slice_path(path), gpu=3).pids() == []
        assert await tree.slice("/elsewhere.slice").pids() == []

    with cgroup() as path, Tenant(mount, "--gmem", "64M") as tenant:
        (path / "_7").mkdir()
        trio.run(check, tenant, path)
        enter(tenant.pid, path)
        eventually(lambda: (mount / "slice" / slice_path(path) / "0").is_dir(), "it moved")
