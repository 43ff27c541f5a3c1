"""Makes docs/dashboard.svg: the panels of the dashboard, as a real Prometheus answers them of a tree with programs.
Only root may.

Two software GPUs and four programs, for a minute and a half: limits, a freeze and a priority come on the way. What is
measured is not the same each time: the picture is as it was on the day. Prometheus is in Debian's package of that name.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import matplotlib

HERE = Path(__file__).resolve().parent
sys.path.insert(0, os.fspath(HERE.parent))

from docs.screenshot import NAMESPACES, tenant  # noqa: E402
from ggroupfs.monitoring.dashboard import COLUMNS  # noqa: E402
from ggroupfs.monitoring.panels import INTERVAL, PANELS, Curve, Panel  # noqa: E402
from ggroupfs.mounts import DEFAULT_MOUNTPOINT  # noqa: E402
from tests.support.cgroups import cgroup  # noqa: E402
from tests.support.mounted import mounted  # noqa: E402

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import FuncFormatter  # noqa: E402

EXPORTER, SERVER = "127.0.0.1:9817", "127.0.0.1:9818"
"""Where metrics are served, and where Prometheus is asked."""
RATES_S = 8
"""Seconds over which rates are taken."""
STEP_S = 18.0
"""Seconds between two things that are done to the programs."""
ANSWERS_S = 60.0
"""Seconds in which Prometheus answers."""
CONFIGURED = f"""
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: ggroupfs
  static_configs:
  - targets: ["{EXPORTER}"]
    labels: {{instance: node}}
"""
UNITS = {"percentunit": "%", "bytes": "GiB", "Bps": "GiB/s", "short": "", "s": "s"}
"""Units of Grafana, as the axes have them."""
FACTORS = {"percentunit": 100.0, "bytes": 2.0**-30, "Bps": 2.0**-30}
"""What values are multiplied by for that."""
HEADROOM = 1.6
"""Height of a panel, in greatest values: the legend is above the lines."""
NAMES_MOST = 5
"""Series of a panel that its legend names."""


@attrs.frozen
class Series:
    """One line of a panel."""

    name: str
    at: Sequence[float]
    """Seconds from the start."""
    values: Sequence[float]


def asked(path: str, **words: object) -> dict:
    """Return what Prometheus answers. OSError."""
    with urllib.request.urlopen(f"http://{SERVER}{path}?{urllib.parse.urlencode(words)}") as answer:
        return json.load(answer)


@contextlib.contextmanager
def prometheus(place: Path) -> Iterator[None]:
    """A server that scrapes the exporter each second."""
    program = shutil.which("prometheus", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        raise RuntimeError("prometheus is not installed: it is in Debian's package of that name")
    (place / "prometheus.yml").write_text(CONFIGURED)
    words = [program, f"--config.file={place / 'prometheus.yml'}", f"--storage.tsdb.path={place / 'data'}"]
    with (place / "log").open("w") as log:
        process = subprocess.Popen([*words, f"--web.listen-address={SERVER}"], stderr=log)
    try:
        end = time.monotonic() + ANSWERS_S
        while not _value("sum(up)"):
            if time.monotonic() > end:
                raise TimeoutError((place / "log").read_text())
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def _value(expression: str) -> float:
    """One number; 0 where there is none, or nothing answers yet."""
    with contextlib.suppress(OSError):
        for one in asked("/api/v1/query", query=expression)["data"]["result"]:
            return float(one["value"][1])
    return 0.0


def found(curve: Curve, start: float, end: float) -> Iterator[Series]:
    """Yield the series of an expression, each with its name."""
    expression = curve.expression.replace(INTERVAL, f"{RATES_S}s").replace("$instance", ".*").replace("$gpu", ".*")
    answer = asked("/api/v1/query_range", query=expression, start=start, end=end, step=1)
    for one in answer["data"]["result"]:
        labels = one["metric"]
        name = re.sub(r"{{(\w+)}}", lambda match, told=labels: told.get(match[1], ""), curve.legend)
        at, values = zip(*one["values"], strict=True)
        yield Series(name, [moment - start for moment in at], [float(value) for value in values])


def draw(axes: Axes, panel: Panel, series: Sequence[Series], seconds: float) -> None:
    """Draw one panel; of many lines the greatest are named."""
    factor = FACTORS.get(panel.unit, 1.0)
    ranked = sorted(series, key=lambda one: -max(filter(math.isfinite, one.values), default=0.0))
    for number, one in enumerate(ranked):
        label = one.name if number < NAMES_MOST else None
        axes.plot(one.at, [value * factor for value in one.values], label=label, linewidth=1.2)
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.set_xlim(0, seconds)
    most = max((value for one in series for value in one.values if math.isfinite(value)), default=0.0)
    axes.set_ylim(0, most * factor * HEADROOM or 1)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    unit = UNITS[panel.unit]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} {unit}".strip()))
    axes.legend(fontsize=6, loc="upper left", framealpha=0.7)


def play(tree: Path, steps: Sequence[tuple[str, str]]) -> None:
    """Do one thing after the other to the programs."""
    for name, text in steps:
        time.sleep(STEP_S)
        (tree / name).write_text(text)
    time.sleep(STEP_S)


def picture(tree: Path, wait: Callable[[Path], None]) -> None:
    """Scrape while programs run, ask for all panels, and draw them."""
    with tempfile.TemporaryDirectory(prefix="ggroup-dashboard-") as place, prometheus(Path(place)):
        start = time.time()
        wait(tree)
        end = time.time()
        shown = [[one for curve in panel.curves for one in found(curve, start, end)] for panel in PANELS]
    pyplot.rcParams |= {"svg.hashsalt": "ggroupfs", "svg.fonttype": "none"}
    rows = -(-len(PANELS) // COLUMNS)
    figure, places = pyplot.subplots(rows, COLUMNS, figsize=(4.6 * COLUMNS, 2.5 * rows), layout="constrained")
    for axes, panel, series in zip(places.flat, PANELS, shown, strict=True):
        draw(axes, panel, series, end - start)
    for axes in places[-1]:
        axes.set_xlabel("s", fontsize=7)
    figure.savefig(HERE / "dashboard.svg", format="svg", metadata={"Date": None})
    for panel, series in zip(PANELS, shown, strict=True):
        print(f"{panel.title}: {len(series)} series")


def main() -> None:
    """Mount, start, scrape, draw, and leave nothing behind."""
    if os.getpid() != 1:
        os.execvp(NAMESPACES[0], [*NAMESPACES, sys.executable, __file__])
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    DEFAULT_MOUNTPOINT.mkdir()
    with contextlib.ExitStack() as stack:
        tree = stack.enter_context(mounted(DEFAULT_MOUNTPOINT, "soft.gpus=2")).path
        exporter = [sys.executable, "-m", "ggroupfs", "metrics", "--mount", os.fspath(tree), "--listen", EXPORTER]
        serving = subprocess.Popen(exporter, stdout=subprocess.DEVNULL)
        stack.callback(serving.wait)
        stack.callback(serving.terminate)
        batch, web, lab = (stack.enter_context(cgroup(f"{name}.slice")) for name in ("batch", "web", "lab"))
        stack.enter_context(tenant(4242, "train", batch, "--gmem", "9G", "--kernel", "4ms"))
        stack.enter_context(tenant(4243, "evaluate", batch, "--gmem", "3G"))
        stack.enter_context(tenant(4310, "serve", web, "--gmem", "1536M", "--kernel", "1ms"))
        stack.enter_context(tenant(4377, "notebook", lab, "--gmem", "700M", "--gpu", "1", "--depth", "1"))
        steps = [
            ("slice/batch.slice/0/gmem.limit.high", "8G"),
            ("4243/0/compute.freeze", "1"),
            ("slice/web.slice/0/compute.priority", "0"),
            ("4243/0/compute.freeze", "0"),
        ]
        picture(tree, lambda path: play(path, steps))


if __name__ == "__main__":
    main()
