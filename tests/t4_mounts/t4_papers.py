"""The ways of tests/bench/papers over a real mount with the software GPU: what they write, and policies, is accepted.

A GPU is had for minutes, so that a word that no daemon takes is to be found here. Programs are tenants.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pytest

from ggroupfs.client import Latencies
from tests.bench.papers import apps, pairs, sharing
from tests.bench.papers.site import GpuTree
from tests.support.mounted import Tenant, eventually, mounted
from tests.t7_nvidia.programs import Program, program

GIB = 1 << 30
HIGH_BYTES, LOW_BYTES = 3 * GIB, 4 * GIB


@attrs.define
class TenantLab:
    """The software GPU's programs in the place of a server and another program."""

    mount: Path | None = None
    commands: list[Sequence[str]] = attrs.field(factory=list)

    def _tenant(self, stack: contextlib.ExitStack, words: Sequence[str], nbytes: int) -> Program:
        assert self.mount is not None
        command = [*words, sys.executable, "-m", "ggroupfs", "tenant", "--mount", os.fspath(self.mount)]
        return stack.enter_context(program(*command, "--gmem", str(nbytes), "--report", "0.2"))

    @contextlib.contextmanager
    def loops(self, commands: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Iterator[list[Program]]:
        with contextlib.ExitStack() as stack:
            self.commands += [command for _, command in commands]
            yield [self._tenant(stack, words, LOW_BYTES) for words, _ in commands]

    @contextlib.contextmanager
    def both(
        self, high: Sequence[str], low: Sequence[str], command: Sequence[str]
    ) -> Iterator[tuple[Program, Program]]:
        with contextlib.ExitStack() as stack:
            self.commands.append(command)
            server, loop = self._tenant(stack, high, HIGH_BYTES), self._tenant(stack, low, LOW_BYTES)
            for run, nbytes in ((server, HIGH_BYTES), (loop, LOW_BYTES)):
                file = self.mount / str(run.pid) / "0" / "gmem.current"  # type: ignore[operator]
                eventually(
                    lambda file=file, nbytes=nbytes: int(file.read_text()) >= nbytes,  # type: ignore[misc]
                    "it holds all",
                )
            yield server, loop


def soft(way: sharing.Sharing) -> sharing.Ggroup:
    """One of our ways, on the software GPU."""
    assert isinstance(way, sharing.Ggroup)
    return attrs.evolve(way, gpu="soft")


OURS = [soft(way) for way in (*pairs.roomy(), *pairs.pressed()) if isinstance(way, sharing.Ggroup)]
CAPPED = soft(pairs.curve()[0][2])


@pytest.mark.parametrize("way", [*OURS, CAPPED], ids=lambda way: f"{way.name} {way.duty}")
def test_a_way_holds(way: sharing.Ggroup) -> None:
    """The server comes first, both are in a slice, and that is within its part of the memory."""
    percent = 100 if way.name == "ggroupfs" else pairs.PRESSED
    lab = TenantLab()
    with way.enter(percent) as hold:
        lab.mount = hold.room.mount.path
        with hold.both(lab, ["diffusion"]) as (server, loop):  # type: ignore[arg-type]
            high, low = (hold.room.mount.group(one.pid) for one in (server, loop))
            assert (high / "compute.priority").read_text() == "0\n"
            part = hold.room.mount / "slice" / hold.room.within / "0"
            if percent < 100:
                most = (HIGH_BYTES + LOW_BYTES) * percent // 100 + 64 * (1 << 20)
                eventually(lambda: int((part / "gmem.current").read_text()) <= most, "it is within its part")
                assert int((part / "gmem.limit.high").read_text()) <= most
            else:
                assert (part / "gmem.limit.high").read_text() == "max\n"
            quota = f"{way.duty * sharing.PERIOD_US // 100} {sharing.PERIOD_US}\n" if way.duty < 100 else "max 100000\n"
            assert (low / "compute.max").read_text() == quota
            limited = percent < 100 and way.how != "turns"
            eventually(lambda: ((low / "gmem.limit.high").read_text() == "max\n") is not limited, f"{limited}")
    assert hold.said == []
    assert lab.commands == [["diffusion", *(["--cooperate", str(lab.mount)] if way.how == "cooperative" else [])]]


def test_a_program_alone_has_a_part_of_its_memory() -> None:
    lab = TenantLab()
    with sharing.GgroupAlone("soft").enter() as hold:
        lab.mount = hold.room.mount.path
        with hold.one(lab, ["diffusion"], 40) as loop:  # type: ignore[arg-type]
            group = hold.room.mount.group(loop.pid)
            assert int((group / "gmem.limit.high").read_text()) <= LOW_BYTES * 0.41
    assert hold.said == []


def test_the_policy_of_applications_acts_on_what_they_report(tmp_path: Path) -> None:
    """Its configuration is accepted, a latency above the bound has an application given more, and each is told."""
    said = list[str]()
    with contextlib.ExitStack() as stack:
        (tmp_path / "tree").mkdir()
        mount = stack.enter_context(mounted(tmp_path / "tree"))
        first, second, filler = (stack.enter_context(Tenant(mount, "--gmem", "1G")) for _ in range(3))
        socket, file = tmp_path / "slo.sock", tmp_path / "slo.toml"
        file.write_text(apps.config(socket, [first.pid, second.pid], [0.006, 0.008], [filler.pid]))
        policy = stack.enter_context(sharing.policy(mount.path, "slo", file, said))
        reports = [Latencies(f"app-{number}", os.fspath(socket)) for number in range(2)]
        for one in reports:
            stack.callback(one.close)
        until, grown = time.monotonic() + 60, False
        while time.monotonic() < until and not grown:
            reports[0].report(0.006 * apps.UPPER * 2)
            reports[1].report(0.008 * apps.UPPER / 2)
            grown = any(event["event"] == "share" and event["was"] > 0 for _, event in policy.during(0.05))
        shares = [event for event in policy.events if event["event"] == "share"]
        assert {event["group"] for event in shares} == {"app-0", "app-1"}
        assert (shares[-1]["group"], shares[-1]["was"]) == ("app-0", apps.SHARE)
        assert shares[-1]["share"] == pytest.approx(apps.SHARE + 2 * apps.STEP), "twice what it may take: two steps"
    assert said == []


def test_a_tree_of_many_slices_and_the_policy_that_spreads(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with (
        mounted(tmp_path / "tree", "soft.gpus=2") as mount,
        contextlib.ExitStack() as stack,
        Tenant(mount, "--gmem", "1G") as tenant,
    ):
        tree = GpuTree(mount, stack, [tenant.pid])
        tree.slices(25)
        names = [path.name for path in (mount / "slice").iterdir()]
        assert sum(name.startswith("gpu.bench-") for name in names) == 25
        took = tree.write_us(40)
        assert len(took) == 40
        assert min(took) > 0
        assert (tenant.group / "compute.weight").read_text() == "101\n"
        assert tree.cpu_s() > 0
        with tree.balance() as moves:
            assert moves() == []
    assert tree.said == []
