"""Runs the daemon's door for CUDA programs of one revision: ``python door.py SOCKET``, with PYTHONPATH that revision.

It does what each line of standard input says, and answers with a line of JSON. It runs in trees of other revisions, so
it uses only what 0.1 had.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import trio
from pyfuse3 import FUSEError

FOLDER = Path("tests/t6_cuda")
NAME = next(name for name in ("daemon", "t6_daemon") if any(Path(at, FOLDER, f"{name}.py").exists() for at in sys.path))
"""The module with the tests' daemon; in 0.1 it had the second name."""
serving = importlib.import_module(".".join((*FOLDER.parts, NAME))).serving


async def main(path: str) -> None:
    """Serve until standard input ends."""
    async with serving(Path(path)) as daemon:
        print(json.dumps("ready"), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            verb, *words = line.split()
            if verb == "write":
                await daemon.h.write(words[0], words[1])
                print(json.dumps("written"), flush=True)
            else:
                try:
                    text = await daemon.h.read(words[0])
                except FUSEError:  # no such file yet
                    text = ""
                print(json.dumps(text), flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
