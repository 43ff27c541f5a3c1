"""Hard limits of slices as limits of the kernel (dmem), on a double of the files of cgroups."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
import trio

from backend.common.errors import fail
from backend.core.walls import LOOK_MOST, LOOK_S
from backend.ledgers.soft import SoftLedger
from backend.process.dmem import Files, limits, parsed, region_of
from backend.process.identity import Slice
from tests.support.harness import MIB, Harness, Spawn, StubGpu, answers, running, virtual

REGION = "nvidia/0000:1b:00/vidmem"
OTHER = "nvidia/0000:1c:00/vidmem"


@attrs.define
class Kernel:
    """The files of cgroups, as kernel/cgroup/dmem.c has them."""

    known: dict[str, int] = attrs.field(factory=lambda: {REGION: 80 << 30, "drm/0000:03:00.0/vram0": 1 << 30})
    """Regions, and their bytes."""
    cgroups: dict[str, dict[str, int | None]] = attrs.field(factory=dict)
    """Cgroups that have the controller: the limits in each."""
    written: list[tuple[str, str, int | None]] = attrs.field(factory=list)
    """What was written, in turn."""
    refuses: int = 0
    """An errno that writes are refused with."""

    def make(self, *paths: str) -> None:
        """Cgroups that have it, as they are when they are new."""
        for path in paths:
            self.cgroups[path] = dict.fromkeys(self.known)

    def regions(self) -> Mapping[str, int]:
        return self.known

    def limit(self, slice_: Slice, region: str) -> int | None:
        if slice_.path not in self.cgroups:
            raise fail(errno.ENOENT)
        return self.cgroups[slice_.path][region]

    def set_limit(self, slice_: Slice, region: str, nbytes: int | None) -> None:
        if slice_.path not in self.cgroups:
            raise fail(errno.ENOENT)
        if self.refuses:
            raise fail(self.refuses)
        self.cgroups[slice_.path][region] = nbytes
        self.written.append((slice_.path, region, nbytes))


def gpu(index: int = 0, pci: str = "0000:1b:00.0") -> StubGpu:
    stub = StubGpu(index)
    stub.info = attrs.evolve(stub.info, pci=pci)
    return stub


async def made(h: Harness, path: str, kernel: Kernel | None = None) -> str:
    """A slice, with its cgroup; its directory in the tree."""
    if kernel is not None:
        kernel.make(path)
    above, _, name = f"slice{path}".rpartition("/")
    await h.operations.mkdir(await h.inode(above), name.encode(), 0o755, h.ctx)
    return f"slice{path}"


def test_names_of_regions() -> None:
    """As NVIDIA's driver and those of drm spell them."""
    text = f"{REGION} 85899345920\ndrm/0000:03:00.0/vram0 17095983104\nnone\n"
    known = parsed(text)
    assert known == {REGION: 80 << 30, "drm/0000:03:00.0/vram0": 17095983104}
    assert region_of("0000:1b:00.0", known) == REGION
    assert region_of("0000:1B:00.0", {"nvidia/00000000:1b:00.0/vidmem": 1}) == "nvidia/00000000:1b:00.0/vidmem"
    assert region_of("0000:03:00.0", known) is None, "of another driver"
    assert region_of("0000:1c:00.0", known) is None
    assert region_of("none", known) is None
    assert region_of("0000:1b:00.0", {REGION: 1, "nvidia/0000:1b:00/other": 1}) is None, "either could be meant"
    assert limits(f"{REGION} max\n{OTHER} 1048576\n") == {REGION: None, OTHER: MIB}


def test_a_kernel_without_the_controller_has_no_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And one with it has what its root's file says; a limit is a line of the file of the cgroup."""
    from backend.process import procfs

    tree = procfs.Mount("0:1", "/", str(tmp_path), "cgroup2", [])
    monkeypatch.setattr(procfs.trees, "of", lambda _: tree)
    files = Files()
    assert files.regions() == {}
    (tmp_path / "dmem.capacity").write_text(f"{REGION} 1024\n")
    assert files.regions() == {REGION: 1024}
    (tmp_path / "job").mkdir()
    with pytest.raises(FileNotFoundError):
        files.limit(Slice("/job"), REGION)
    file = tmp_path / "job" / "dmem.max"
    file.write_text(f"{REGION} max\n")
    assert files.limit(Slice("/job"), REGION) is None
    file.write_text("")
    files.set_limit(Slice("/job"), REGION, 4096)
    assert file.read_text() == f"{REGION} 4096\n"
    file.write_text("")
    files.set_limit(Slice("/job"), REGION, None)
    assert file.read_text() == f"{REGION} max\n"
    monkeypatch.setattr(procfs.trees, "of", lambda _: attrs.evolve(tree, root="/pod"))
    assert files.regions() == {}, "of a container"


@virtual
async def test_a_hard_limit_is_the_kernels_too() -> None:
    """At once, at each level for itself; the limit of a process, and a high, are ours alone."""
    kernel = Kernel()
    async with running(gpu(), walls=kernel) as h:
        slice_ = await made(h, "/job", kernel)
        inner = await made(h, "/job/part", kernel)
        await h.write(f"{slice_}/0/gmem.limit.max", "64M")
        await h.write(f"{inner}/0/gmem.limit.high", "16M")
        assert kernel.written == [("/job", REGION, 64 * MIB)]
        await h.write(f"{inner}/0/gmem.limit.max", "32M")
        await h.write(f"{slice_}/0/gmem.limit.max", "128M")
        assert [(path, nbytes) for path, _, nbytes in kernel.written[1:]] == [
            ("/job/part", 32 * MIB),
            ("/job", 128 * MIB),
        ]
        await h.write(f"{slice_}/0/gmem.limit.max", "max")
        assert kernel.cgroups["/job"] == {REGION: None, "drm/0000:03:00.0/vram0": None}
        await trio.sleep(2 * LOOK_S)  # what it holds is said at a look
        facts = await h.read("ggroup.backend")
        assert f"dmem {REGION}\n" in facts
        assert "dmem.limits 1\n" in facts
        assert "dmem.missing 0\n" in facts
    assert kernel.cgroups["/job/part"][REGION] is None, "given back at the end"


@virtual
async def test_a_limit_that_is_refused_changes_nothing(spawn: Spawn) -> None:
    kernel, stub = Kernel(), gpu()
    async with running(stub, walls=kernel) as h:
        slice_ = await made(h, "/job", kernel)
        process = await h.arrive(spawn().pid, "/job")
        stub.unmanaged.add(process)
        h.controller.bookkeeper.observe(process, 0, 64 * MIB)
        assert await answers(h.write(f"{slice_}/0/gmem.limit.max", "32M")) == errno.EBUSY
        assert kernel.written == []


@virtual
async def test_what_others_write_is_set_again_and_where_there_is_no_limit_left_alone() -> None:
    kernel = Kernel()
    async with running(gpu(), walls=kernel) as h:
        slice_ = await made(h, "/job", kernel)
        await made(h, "/free", kernel)
        await h.write(f"{slice_}/0/gmem.limit.max", "64M")
        kernel.cgroups["/job"][REGION] = 1
        kernel.cgroups["/free"][REGION] = 2
        await trio.sleep(3 * LOOK_S)
        assert kernel.cgroups["/job"][REGION] == 64 * MIB
        assert kernel.cgroups["/free"][REGION] == 2, "another's"
        kernel.make("/job")  # a cgroup of that name is made anew
        await trio.sleep(3 * LOOK_S)
        assert kernel.cgroups["/job"][REGION] == 64 * MIB
        await h.operations.rmdir(await h.inode("slice"), b"job", h.ctx)
        await trio.sleep(3 * LOOK_S)
        assert kernel.cgroups["/job"][REGION] is None, "it is asked for no more"


@virtual
async def test_a_cgroup_without_the_controller_is_counted_and_found_later() -> None:
    kernel = Kernel()
    async with running(gpu(), walls=kernel) as h:
        await made(h, "/job")
        await h.write("slice/job/0/gmem.limit.max", "64M")
        await trio.sleep(3 * LOOK_S)
        assert "dmem.missing 1\n" in await h.read("ggroup.backend")
        kernel.make("/job")
        await trio.sleep(3 * LOOK_S)
        assert kernel.written == [("/job", REGION, 64 * MIB)]
        assert "dmem.missing 0\n" in await h.read("ggroup.backend")


@pytest.mark.logs("limits of memory are not the kernel's, too")
@virtual
async def test_a_kernel_that_refuses_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Kernel(refuses=errno.EACCES)
    async with running(gpu(), walls=kernel) as h:
        slice_ = await made(h, "/job", kernel)
        await h.write(f"{slice_}/0/gmem.limit.max", "64M")
        assert await h.read(f"{slice_}/0/gmem.limit.max") == f"{64 * MIB}\n", "ours holds"
        await trio.sleep(10 * LOOK_S)
    assert len(caplog.records) == 1


@virtual
async def test_each_gpu_by_its_own_region_and_none_without() -> None:
    kernel = Kernel(known={REGION: 80 << 30, OTHER: 80 << 30})
    async with running(gpu(0), gpu(1, "0000:1c:00.0"), gpu(2, "0000:1d:00.0"), walls=kernel) as h:
        slice_ = await made(h, "/job", kernel)
        for index in range(3):
            await h.write(f"{slice_}/{index}/gmem.limit.max", f"{index + 1}M")
        assert kernel.written == [("/job", REGION, MIB), ("/job", OTHER, 2 * MIB)]


@virtual
async def test_without_a_region_nothing_is_looked_at() -> None:
    kernel = Kernel(known={})
    async with running(gpu(), walls=kernel) as h:
        slice_ = await made(h, "/job", kernel)
        await h.write(f"{slice_}/0/gmem.limit.max", "64M")
        await trio.sleep(3 * LOOK_S)
        assert "dmem" not in await h.read("ggroup.backend")
    assert kernel.written == []


@virtual
async def test_the_next_daemon_goes_on_and_one_that_hands_over_leaves_all() -> None:
    kernel, ledger = Kernel(), SoftLedger()
    async with running(gpu(), walls=kernel, ledger=ledger) as h:
        slice_ = await made(h, "/job", kernel)
        await h.write(f"{slice_}/0/gmem.limit.max", "64M")
        h.controller.hand_over()
    assert kernel.cgroups["/job"][REGION] == 64 * MIB
    kernel.make("/job")
    h.controller.walls._set.clear()
    h.controller.walls.begin()
    assert kernel.cgroups["/job"][REGION] == 64 * MIB


@virtual
async def test_thousands_of_slices_are_looked_at_in_turns() -> None:
    kernel = Kernel()
    async with running(gpu(), walls=kernel) as h:
        count = 3 * LOOK_MOST
        for number in range(count):
            slice_ = await made(h, f"/job{number}", kernel)
            await h.write(f"{slice_}/0/gmem.limit.max", "64M")
        kernel.written.clear()
        for limits_there in kernel.cgroups.values():
            limits_there[REGION] = None
        await trio.sleep(1.5 * LOOK_S)
        assert 0 < len(kernel.written) <= LOOK_MOST
        await trio.sleep(5 * LOOK_S)
        assert len(kernel.written) == count
