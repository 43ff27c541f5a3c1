"""Stand-in without a GPU for programs of the benchmark, with the same page: for critical.cu (the second argument is a
kind), for decode.cu or science.cu (MiB), or for products.cu (no second argument).

The kind `gather` computes wrong results, and `dies` ends the program at once with a message. A request takes REQUEST_NS
of busy waiting.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time

REQUEST_NS = 500_000
ARRIVALS, LATENCIES, SIZE = 4096, 4096 + 32768, 4096 + 65536


def u32(page: mmap.mmap, at: int) -> int:
    return int(struct.unpack_from("<I", page, at)[0])


def wait_until(due: int) -> int:
    while (now := time.monotonic_ns()) < due:
        pass
    return now


def critical(page: mmap.mmap) -> None:
    struct.pack_into("<Q", page, 8, 1)
    while not u32(page, 24):
        if u32(page, 32) == u32(page, 36):
            continue
        start, (limit,), served = time.monotonic_ns(), struct.unpack_from("<Q", page, 48), 0
        struct.pack_into("<Q", page, 0, 0)
        for number in range(u32(page, 40)):
            due = start + struct.unpack_from("<Q", page, ARRIVALS + 8 * number)[0]
            now = wait_until(due)
            if now < start + limit:
                now = wait_until(now + REQUEST_NS)
                served += 1
            struct.pack_into("<Q", page, LATENCIES + 8 * number, now - due)
            struct.pack_into("<Q", page, 0, number + 1)
        struct.pack_into("<I", page, 44, served)
        struct.pack_into("<I", page, 36, u32(page, 32))


def products(page: mmap.mmap) -> None:
    done = 0
    struct.pack_into("<IQ", page, 36, 1, time.monotonic_ns())
    struct.pack_into("<Q", page, 8, 1)
    while not u32(page, 24):
        work = u32(page, 32)
        struct.pack_into("<I", page, 36, 1 - work)
        done += work
        struct.pack_into("<Q", page, 0, done)


def job(page: mmap.mmap, kind: str) -> int:
    """Make passes, and write what the library would write about its moves."""
    struct.pack_into("<Q", page, 16, (1 << 64) - 1)
    print("ggroup: device 0: 3 MiB were clean", file=sys.stderr)
    print("ggroup: gpu 0: asked to move 8 MiB, moved 4 MiB in 1000 us", file=sys.stderr, flush=True)
    done = 0
    while not u32(page, 24):
        done += 1
        struct.pack_into("<Q", page, 0, done)
        time.sleep(0.001)
    struct.pack_into("<Q", page, 16, kind == "gather")
    return int(kind == "gather")


def main() -> None:
    with open(sys.argv[1], "r+b") as file:
        page = mmap.mmap(file.fileno(), 0)
    if sys.argv[2:] == ["dies"]:
        sys.exit("cudaMalloc: out of memory")
    if sys.argv[2:] and sys.argv[2].isdigit():
        sys.exit(job(page, *(sys.argv[3:] or [""])))
    (critical if len(sys.argv) > 2 else products)(page)


if __name__ == "__main__":
    main()
