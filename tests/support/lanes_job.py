"""A program of the software GPU that is a job of the policy `lanes`, for tests.

    lanes_job.py MOUNT SOCKET NAME --iterations N --kernel US [--duration S] [--gmem BYTES] [--held N] [--wait] [--fork]

Each iteration is one kernel, which touches all of the job's memory. Before each of the first `--held` iterations the
program waits for a line on standard input. It prints one JSON object a line, with SECONDS of time.monotonic():
`{"turn": SECONDS}` when it is first told to go, `{"begin": SECONDS}` and `{"end": SECONDS}` around each iteration, with
the number of iterations done; `{"refused": WHY}` if it was refused; `{"left": SECONDS}` when it stops being a job,
after which it waits for the end of standard input. With `--wait` it first reports that it is ready and waits for a
line. With `--fork` it has a child with the same descriptors, which lives as long as the job unless it is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time

from backend.soft.client import Device
from ggroupfs.client import Job


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mount")
    parser.add_argument("socket")
    parser.add_argument("name")
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--kernel", type=int, required=True)
    parser.add_argument("--duration", type=float)
    parser.add_argument("--gmem", type=int, default=16 << 20)
    parser.add_argument("--held", type=int, default=0)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--fork", action="store_true")
    arguments = parser.parse_args()
    job = Job(
        persistent=arguments.gmem,
        ephemeral=0,
        duration=arguments.duration or arguments.iterations * arguments.kernel / 1e6,
        name=arguments.name,
        socket=arguments.socket,
    )
    if arguments.wait:
        say(ready=True)
        sys.stdin.readline()
    with Device(arguments.mount) as device:
        try:
            with job:
                say(turn=time.monotonic())
                if arguments.fork and not os.fork():
                    end = select.poll()
                    end.register(0, 0)  # reports the hangup only, and consumes nothing
                    end.poll()
                    os._exit(0)
                work(job, device, arguments)
        except OSError as error:
            say(refused=error.strerror)
        say(left=time.monotonic())
        sys.stdin.read()


def work(job: Job, device: Device, arguments: argparse.Namespace) -> None:
    tsg = device.join()
    pages = device.alloc(arguments.gmem)
    for number in range(arguments.iterations):
        with job.iteration():
            say(begin=time.monotonic(), done=number)
            if number < arguments.held:
                sys.stdin.readline()
            device.launch(tsg, 1, arguments.kernel, pages)
            while device.finished[tsg] <= number:
                device.take_progress(1.0)
            say(end=time.monotonic(), done=number + 1)


if __name__ == "__main__":
    main()
