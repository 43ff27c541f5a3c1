"""The door of CUDA programs of one revision, in a process: ``python door.py SOCKET``, with PYTHONPATH that revision.

It does what a line of standard input says and answers with a line of JSON. It runs in trees of other revisions, so it
uses only what 0.1 had.
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
"""Module with the daemon of tests: the second name is that of 0.1."""
serving = importlib.import_module(".".join((*FOLDER.parts, NAME))).serving


async def main(path: str) -> None:
    """Until standard input ends."""
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
                except FUSEError:  # it is not there yet
                    text = ""
                print(json.dumps(text), flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
