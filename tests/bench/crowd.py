"""Many programs of the software GPU, as children of one process: those that stay, and those that come and go.

    python -m tests.bench.crowd stay N MOUNT

N programs with a context and memory, which work a little now and then.

    python -m tests.bench.crowd pass N SECONDS MOUNT

N programs a second, each with a context, memory and one kernel; every other one is killed, the others end.

`stay` prints "ready" once all are there, and runs to the end of its standard input. `pass` prints how many came to
their end, how many seconds that took, and how many failed. The children die with their parent.
"""

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

from backend.soft.client import Device

MEMORY = 8 << 20
KERNEL_US = 200
REST = 5.0
"""Seconds of rest between two kernels of a program that stays."""
PR_SET_PDEATHSIG = 1


def child(work: Callable[[], None]) -> int:
    """Fork; return the pid. The exit status is 1 for a failure, which is reported on standard error."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def stay(mount: str, ready: int) -> None:
    with Device(mount) as device:
        tsg = device.join()
        pages = device.alloc(MEMORY)
        device.write(pages, os.getpid() << 32)
        os.write(ready, b".")
        os.close(ready)
        while True:
            device.launch(tsg, 1, KERNEL_US, pages)
            device.take_progress(REST)
            time.sleep(REST)


def visit(mount: str, killed: bool) -> None:
    with Device(mount) as device:
        tsg = device.join()
        pages = device.alloc(MEMORY)
        device.write(pages, os.getpid() << 32)
        device.launch(tsg, 1, KERNEL_US, pages)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)


def crowd(count: int, mount: str) -> int:
    reader, writer = os.pipe()
    pids = [child(partial(stay, mount, writer)) for _ in range(count)]
    os.close(writer)
    there = 0
    while chunk := os.read(reader, 65536):
        there += len(chunk)
    if there == count:
        print("ready", flush=True)
        while os.read(0, 65536):
            pass
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    return int(there != count or any(os.WIFEXITED(status) for status in ended))


def traffic(rate: int, seconds: float, mount: str) -> int:
    start = time.monotonic()
    running: set[int] = set()
    failed = ended = 0

    def reap(most: int) -> None:
        nonlocal failed, ended
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG if len(running) <= most else 0)
            if not pid:
                return
            running.discard(pid)
            ended += 1
            failed += status not in (0, signal.SIGKILL)

    for number in range(int(rate * seconds)):
        if (early := start + number / rate - time.monotonic()) > 0:
            time.sleep(early)
        running.add(child(partial(visit, mount, bool(number % 2))))
        reap(rate)
    reap(0)
    print(ended, time.monotonic() - start, failed)
    return 0


def main() -> int:
    gc.freeze()  # memory that children share with this process stays shared
    match sys.argv[1:]:
        case ["stay", count, mount]:
            return crowd(int(count), mount)
        case ["pass", rate, seconds, mount]:
            return traffic(int(rate), float(seconds), mount)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
