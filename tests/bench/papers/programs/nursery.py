"""Jobs of Salus' models, each a process of its own with a context of its own, without the start of an interpreter.

    nursery.py PAGE ORDERS [--device cuda]

What a job imports is imported before it is forked, and the nursery itself never uses the GPU: so a job begins in about
a second, as in Salus, whose jobs are sessions of a server. Round n is asked for by the page's `go`; ORDERS/n.json has

    {"most": jobs at once, "together": begin when all are ready, "jobs": [{"at": seconds, "model": ...,
    "mode": "train" or "infer", "batch": N, "iterations": N, or "rate": R and "seconds": S, "seed": N}, ...]}

Jobs begin in the order of their times when there is a place. ORDERS/n.result.json has for each `at`, `began`, `ended`
(seconds from the begin of the round), `latencies` (of inferences with a rate, seconds) and `error` (null for none).
Passes are jobs that have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torchvision  # noqa: F401  imported here, so that no job has to

with contextlib.suppress(ImportError):
    import timm  # noqa: F401  the same
from page import GO, OVER, PASSES, READY, UNKNOWN, WRONG, Page, whole
from zoo import due, inferrer, model_of, trainer

LOOK_S = 0.005


def work(job: dict[str, Any], device: str, mine: Path, begin: Path) -> dict[str, Any]:
    """Do a job, in its process; what is told of it."""
    torch.manual_seed(job.get("seed", 1))
    model, data = model_of(job["model"], job["batch"], device)
    step = trainer(model, data) if job["mode"] == "train" else inferrer(model, data)

    def once() -> None:
        found = step()
        if device != "cpu":
            torch.cuda.synchronize()
        del found

    once()
    mine.with_suffix(".ready").touch()
    while not begin.exists():
        time.sleep(LOOK_S)
    latencies: list[float] = []
    if "rate" not in job:
        for _ in range(job["iterations"]):
            once()
        return {"latencies": latencies}
    start = time.monotonic()
    for at in due(job["rate"], job.get("seed", 1)):
        if at > job["seconds"]:
            break
        time.sleep(max(0.0, start + at - time.monotonic()))
        once()
        latencies.append(round(time.monotonic() - start - at, 6))
    return {"latencies": latencies}


def forked(number: int, job: dict[str, Any], device: str, folder: Path, begin: Path) -> int:
    """The pid of a process that does a job."""
    mine = folder / f"job-{number}.json"
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        whole(mine, json.dumps({"error": None, **work(job, device, mine, begin)}))
        code = 0
    except BaseException as error:
        traceback.print_exc()
        whole(mine, json.dumps({"error": f"{type(error).__name__}: {error}"[:200], "latencies": []}))
    finally:
        os._exit(code)


def ended(running: dict[int, int]) -> list[int]:
    """Numbers of the jobs that have, which are forgotten."""
    found = []
    for pid in list(running):
        if os.waitpid(pid, os.WNOHANG)[0]:
            found.append(running.pop(pid))
    return found


def serve(order: dict[str, Any], device: str, folder: Path, page: Page) -> list[dict[str, Any]]:
    """All jobs of a round. A job that fails is told, and the others go on."""
    for path in folder.glob("job-*"):
        path.unlink()
    begin, jobs = folder / "begin", order["jobs"]
    begin.unlink(missing_ok=True)
    if not order["together"]:
        begin.touch()
    told: list[dict[str, Any]] = [{"at": one["at"], "began": None, "ended": None} for one in jobs]
    waiting, running = sorted(range(len(jobs)), key=lambda number: jobs[number]["at"]), dict[int, int]()
    start = time.monotonic()
    while (waiting or running) and not page.stop:
        now = time.monotonic() - start
        for number in ended(running):
            told[number]["ended"] = round(now, 4)
            path = folder / f"job-{number}.json"
            killed = {"error": "the process was killed", "latencies": []}
            told[number] |= json.loads(path.read_text()) if path.exists() else killed
            page.set64(PASSES, page.u64(PASSES) + 1)
        while waiting and len(running) < order["most"] and jobs[waiting[0]]["at"] <= now:
            number = waiting.pop(0)
            told[number]["began"] = round(now, 4)
            running[forked(number, jobs[number], device, folder, begin)] = number
        if not begin.exists() and not waiting:
            gone = sum(one["ended"] is not None for one in told)  # before it was ready, by an error or a signal
            if len(list(folder.glob("job-*.ready"))) + gone >= len(jobs):
                begin.touch()
        time.sleep(LOOK_S)
    for pid in running:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return told


def main() -> int:
    """Serve rounds until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page")
    parser.add_argument("orders", type=Path)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    page, number = Page(options.page), 0
    page.set64(WRONG, UNKNOWN)
    page.set64(READY, 1)
    while not page.stop:
        if page.u32(GO) == number:
            time.sleep(LOOK_S)
            continue
        number = page.u32(GO)
        order = json.loads((options.orders / f"{number}.json").read_text())
        whole(options.orders / f"{number}.result.json", json.dumps(serve(order, options.device, options.orders, page)))
        page.set32(OVER, number)
    page.set64(WRONG, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
