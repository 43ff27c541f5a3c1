"""The dashboard and the rules, checked by promtool against the export of a mounted tree with programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ggroupfs.fs.controls import CONTROLS
from ggroupfs.monitoring import dashboard
from ggroupfs.monitoring.panels import INTERVAL, PANELS
from ggroupfs.text.names import slice_directory
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import ok
from tests.support.mounted import BUSY, Mounted, Tenant, eventually

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "packaging/monitoring"
RULES, TESTS, DASHBOARD = (SHIPPED / name for name in ("rules.yml", "rules.test.yml", "dashboard.json"))
NAME = re.compile(r"\bggroup_[a-z_]*[a-z]\b")
"""Name of a metric in an expression."""
ALERT = re.compile(r"^  - alert: (\w+)$", re.MULTILINE)
ALERT_OF_PAGE = re.compile(r"^  - alert: (\w+)", re.MULTILINE)
"""An alert of the page for operators, which a comment follows."""
SCRAPES = 10
"""Number of scrapes that promtool is given, a minute apart."""
GROWTH = 3.0
"""Growth of each counter from one scrape to the next."""


def promtool(*words: str | Path, text: str = "", cwd: Path = SHIPPED) -> str:
    """Return promtool's output. AssertionError where it complains or is missing (Debian's package prometheus)."""
    program = shutil.which("promtool", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, "promtool is not installed: it is in Debian's package prometheus"
    result = subprocess.run([program, *words], input=text, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@contextlib.contextmanager
def programs(mount: Mounted) -> Iterator[None]:
    """Two programs in a slice: one computes, with a part of its memory in the host, and the other is frozen."""
    with cgroup("ggroupmonitoring.slice") as place, contextlib.ExitStack() as stack:
        for options in (("--gmem", "64M", *BUSY), ("--gmem", "16M", *BUSY)):
            tenant = stack.enter_context(Tenant(mount, *options))
            enter(tenant.pid, place)
        here = mount / slice_directory(slice_path(place)) / "0"
        eventually(here.exists, "its slice appears")
        eventually(lambda: int((here / "gmem.current").read_text()) == 80 << 20, "both programs are in it")
        (here / "gmem.limit.high").write_text("40M\n")
        tenant.write("compute.freeze", 1)
        yield


def exported(mount: Mounted) -> dict[str, float]:
    """Return the samples of an export by series as Prometheus names them, with an `instance`."""
    found = {}
    for family in text_string_to_metric_families(ok("metrics", "--mount", mount.path)):
        for sample in family.samples:
            labels = {"instance": "node", **sample.labels}
            pairs = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
            found[f"{sample.name}{{{pairs}}}"] = sample.value
    return found


def series(samples: dict[str, float]) -> list[dict[str, str]]:
    """Return the samples as promtool's input, a value a minute; counters grow as they would."""
    found = []
    for name, value in samples.items():
        number = "+Inf" if value == float("inf") else repr(value)
        grows = "_total{" in name
        values = f"{number}+{GROWTH}x{SCRAPES}" if grows else " ".join([number] * (SCRAPES + 1))
        found.append({"series": name, "values": values})
    return found


def expressions() -> list[str]:
    """Return every expression of the shipped dashboard, with its variables as Grafana fills them in."""
    shown = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in shown["panels"] for target in panel["targets"]]
    return [text.replace(INTERVAL, "4m").replace("$instance", ".*").replace("$gpu", ".*") for text in found]


def test_the_dashboard_that_is_shipped_is_that_of_the_code() -> None:
    assert DASHBOARD.read_text() == dashboard.text(), "make dashboard"


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """It fits the parts of Grafana's schema that it uses: no overlaps on the grid, and all names are there."""
    shown = dashboard.dashboard()
    cells = set()
    for panel in shown["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24
        taken = {(x, place["y"]) for x in range(place["x"], place["x"] + place["w"])}
        assert not taken & cells
        cells |= taken
        assert panel["description"]
        assert [target["refId"] for target in panel["targets"]] == [*"ABCDEFGH"][: len(panel["targets"])]
    assert len({panel["id"] for panel in shown["panels"]}) == len(PANELS) == len({p.title for p in PANELS})
    variables = {variable["name"] for variable in shown["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(shown))) - {"__rate_interval", "__all"}
    assert used == variables


def test_every_alert_fires_in_a_test_of_its_own_and_rests_when_all_is_well() -> None:
    assert "SUCCESS: 15 rules found" in promtool("check", "rules", RULES)
    assert "SUCCESS" in promtool("test", "rules", TESTS)
    alerts = ALERT.findall(RULES.read_text())
    assert len(alerts) == 12
    assert set(ALERT_OF_PAGE.findall((ROOT / "docs/operators.md").read_text())) <= set(alerts)
    well, *others = TESTS.read_text().split("- name: ")[1:]
    for alert in alerts:
        assert f"alertname: {alert}}}" in well, f"{alert} is not tested where all is well"
        assert any(f"alertname: {alert}\n    exp_alerts" in other for other in others), f"{alert} is not tested"


def test_promtool_evaluates_all_of_it_on_what_a_tree_exports(mount: Mounted, tmp_path: Path) -> None:
    """Each expression of the dashboard has a value, each rule is about existing metrics, and both alerts that are true
    of these programs fire."""
    with programs(mount):
        found = exported(mount)
    names = {name.partition("{")[0] for name in found}
    asked = set(NAME.findall(" ".join(expressions()) + RULES.read_text()))
    assert asked
    assert asked <= names
    frozen = next(name for name, value in found.items() if name.startswith("ggroup_process_frozen{") and value == 1)
    labels = frozen.partition("{")[2].rstrip("}")
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series(found),
                "promql_expr_test": [
                    {
                        "expr": f"count({expression}) > bool 0",
                        "eval_time": "8m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                    for expression in expressions()
                ]
                + [
                    {
                        "expr": f'ALERTS{{alertname="GGroupForgottenFreeze",{labels}}}',
                        "eval_time": "8m",
                        "exp_samples": [
                            {
                                "labels": 'ALERTS{alertname="GGroupForgottenFreeze",alertstate="pending",'
                                f'severity="info",{labels}}}',
                                "value": 1,
                            }
                        ],
                    }
                ],
                "alert_rule_test": [{"eval_time": "8m", "alertname": "GGroupDown"}],
            }
        ],
    }
    file = tmp_path / "tree.test.yml"
    file.write_text(json.dumps(test))  # JSON is YAML, too
    assert "SUCCESS" in promtool("test", "rules", file, cwd=tmp_path)


def test_a_wrong_expression_is_found(mount: Mounted, tmp_path: Path) -> None:
    """Proof that the test above can fail: a metric that is not exported has no value."""
    found = exported(mount)
    test = {
        "tests": [
            {
                "interval": "1m",
                "input_series": series(found),
                "promql_expr_test": [
                    {
                        "expr": "count(ggroup_gpu_capacity_octets) > bool 0",
                        "eval_time": "8m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                ],
            }
        ]
    }
    file = tmp_path / "tree.test.yml"
    file.write_text(json.dumps(test))
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", file, cwd=tmp_path)


def test_alerts_name_controls_that_there_are() -> None:
    named = set(re.findall(r"\b(?:compute|gmem)\.[a-z.]+[a-z]", RULES.read_text()))
    assert named
    assert {name for name in named if "(" not in name} <= {control.name for control in CONTROLS} | {"compute"}
