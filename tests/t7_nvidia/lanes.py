"""PyTorch programs that are jobs of the policy `lanes`: all train the same model in the same way.

    lanes.py SOCKET NAME ITERATIONS STEPS SECONDS

An iteration is STEPS steps of workload.py's training, of some 20 ms each; SECONDS is the duration that the job
announces. The program loads the model and does a first step, which together take some 8 s and would count as run time.
Then it prints `ready`, and enters the job when it reads a line. After that it prints a JSON object a line, with times
of time.monotonic(): `turn` when it first may use the GPU; for each iteration `begin`, `end`, `ran` (the total time of
its turns) and the `losses`; `left` when it is through. Another line makes it leave the job after its iteration, and the
end of standard input makes it exit.
"""

from __future__ import annotations

import json
import select
import sys
import time

import torch
from workload import Train

from ggroupfs.client import Job

GIB = 1 << 30


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    place, name = sys.argv[1:3]
    iterations, steps = map(int, sys.argv[3:5])
    job = Job(
        persistent=4 * GIB,
        ephemeral=4 * GIB,
        duration=float(sys.argv[5]),
        name=name,
        settle=torch.cuda.synchronize,
        socket=place,
    )
    work, number = Train(), 1
    work.step(0)
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    with job:
        say(turn=time.monotonic())
        for _ in range(iterations):
            if select.select([sys.stdin], [], [], 0)[0]:
                break
            losses = []
            with job.iteration():
                begin = time.monotonic()
                for _ in range(steps):
                    losses.append(work.step(number))
                    number += 1
                end = time.monotonic()  # a loss was read, so all of the step but the optimizer's part is done
            say(begin=begin, end=end, ran=job.ran / 1e9, losses=losses)
    say(left=time.monotonic())
    sys.stdin.read()


if __name__ == "__main__":
    main()
