"""Two programs that launch all the time on the double of the driver, and the daemon that they speak to."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import attrs
import trio

from backend.core.turns import HOLD_US
from backend.process.identity import identify
from tests.t6_cuda.daemon import Daemon, serving
from tests.t6_cuda.harness import SECONDS, Program, running

FAKE_UUID = b"FAKEFAKEFAKEFAK\0"
"""UUID of the first GPU of the double (fake/context.c)."""


@attrs.frozen
class Pair:
    """Two programs that launch all the time (turns.c), and the daemon that they speak to."""

    daemon: Daemon
    first: Program
    second: Program

    async def launched(self, program: Program) -> int:
        """Return the kernels that a program launches in 50 ms from now on."""
        return await trio.to_thread.run_sync(self._launched, program)

    @staticmethod
    def _launched(program: Program) -> int:
        assert program.process.stdin
        program.process.stdin.write("\n")
        program.process.stdin.flush()
        return program.hears("launched")

    async def until(self, program: Program, condition: Callable[[int], bool], what: str) -> None:
        """Wait until the number of kernels that a program launches in 50 ms meets `condition`."""
        end, counts = time.monotonic() + SECONDS, list[int]()
        while not counts or not condition(counts[-1]):
            assert time.monotonic() < end, f"{what}: {counts[-20:]}"
            counts.append(await self.launched(program))

    def rank(self, *behind: Program) -> None:
        """Make these programs go behind the first."""
        identities = [identify(one.process.pid) for one in (self.first, *behind)]
        self.daemon.gpu.rank(dict.fromkeys(identities[1:], identities[:1]), HOLD_US)


@contextlib.asynccontextmanager
async def pair(tmp_path: Path, sanitize: str) -> AsyncIterator[Pair]:
    path = tmp_path / "daemon.sock"
    extra = {"GGROUP_SOCKET": str(path), "GGROUP_CUDA_POOL": "0", "GGROUP_CUDA_LOG": "1"}
    with contextlib.ExitStack() as stack:
        programs = []
        async with serving(path) as daemon:
            daemon.gpu.managed.info = attrs.evolve(daemon.gpu.info, uuid=f"GPU-{uuid.UUID(bytes=FAKE_UUID)}")
            for name in ("first", "second"):
                (tmp_path / name).mkdir()
                starts = running("turns", tmp_path=tmp_path / name, sanitize=sanitize, extra=extra)
                programs.append(stack.enter_context(starts))
                assert await trio.to_thread.run_sync(programs[-1].hears, "ready") == 0
            two = Pair(daemon, *programs)
            identities = [identify(one.process.pid) for one in programs]
            await daemon.until(lambda: all(map(daemon.gpu.manages, identities)), "both speak", SECONDS)
            yield two
            stack.close()
