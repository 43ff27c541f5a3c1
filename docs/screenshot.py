"""Makes docs/top.svg: `ggroupfs top` on two software GPUs, with programs on them that really run. Only root may.

It is in namespaces of its own, where the mountpoint and the pids are the same each time. What is measured is not: the
picture is as it was on the day.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, os.fspath(HERE.parent))

from ggroupfs.commands.screen import Top  # noqa: E402
from ggroupfs.mounts import DEFAULT_MOUNTPOINT  # noqa: E402
from ggroupfs.view.listing import Listing  # noqa: E402
from ggroupfs.view.outline import Node  # noqa: E402
from tests.support.cgroups import cgroup, enter  # noqa: E402
from tests.support.mounted import mounted  # noqa: E402

NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--mount-proc")
SIZE = (112, 19)
SECONDS = 30.0
"""How long it may take until the screen is as it should be."""

NAME, BUSY = "ggroupfs software GPU", 0.8

PROGRAM = """
import ctypes, sys
from ggroupfs.cli import main
ctypes.CDLL(None).prctl(15, sys.argv[1].encode())  # PR_SET_NAME
main(sys.argv[2:])
"""
"""A tenant that has a name of its own."""


@contextlib.contextmanager
def tenant(pid: int, name: str, place: Path, *options: str) -> Iterator[None]:
    """A program with that pid, in a cgroup, that has its memory."""
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    words = [sys.executable, "-c", PROGRAM, name, "tenant", "--report", "0.2", *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    if process.pid != pid:
        raise RuntimeError(f"the pid is {process.pid}, not {pid}")
    try:
        enter(pid, place)
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


async def picture() -> str:
    """The screen, once it has everything on it."""
    app = Top(DEFAULT_MOUNTPOINT, 1.0)

    async with app.run_test(size=SIZE) as pilot, asyncio.timeout(SECONDS):
        listing = app.query_one(Listing)

        async def until(condition: Callable[[dict[str, Node]], object]) -> None:
            while not condition({line.node.label: line.node for line in listing.lines}):
                await pilot.pause(0.05)

        await until(lambda nodes: "4243 evaluate" in nodes)
        while listing.chosen is None or listing.chosen.node.label != "4243 evaluate":
            await pilot.press("down")
        await pilot.press("f")
        # Frozen, and the GPU busy with the others for all of the time that the rates are over.
        await until(
            lambda nodes: nodes["4243 evaluate"].rates.share == 0 and (nodes["GPU 0 " + NAME].rates.share or 0) > BUSY
        )
        await pilot.pause()
        return app.export_screenshot(title="ggroupfs top")


def main() -> None:
    """Mounts, starts, looks, and leaves nothing behind."""
    if os.getpid() != 1:
        os.execvp(NAMESPACES[0], [*NAMESPACES, sys.executable, __file__])
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    DEFAULT_MOUNTPOINT.mkdir()
    with contextlib.ExitStack() as stack:
        tree = stack.enter_context(mounted(DEFAULT_MOUNTPOINT, "soft.gpus=2"))
        batch = stack.enter_context(cgroup("batch.slice"))
        web = stack.enter_context(cgroup("web.slice"))
        lab = stack.enter_context(cgroup("lab.slice"))
        stack.enter_context(tenant(4242, "train", batch, "--gmem", "9G", "--kernel", "4ms"))
        stack.enter_context(tenant(4243, "evaluate", batch, "--gmem", "3G"))
        stack.enter_context(tenant(4310, "serve", web, "--gmem", "1536M", "--kernel", "1ms"))
        stack.enter_context(tenant(4377, "notebook", lab, "--gmem", "700M", "--gpu", "1", "--depth", "1"))
        (tree / "4242/0/gmem.limit.high").write_text("8G\n")
        (tree / "4310/0/compute.timeslice").write_text("4\n")
        (tree / "4310/0/compute.weight").write_text("300\n")
        svg = asyncio.run(picture())
    svg = re.sub("terminal-[0-9]+", "terminal", svg)
    # A reader of it is not to load a font from somewhere: any that is monospaced will do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (HERE / "top.svg").write_text(svg)


if __name__ == "__main__":
    main()
