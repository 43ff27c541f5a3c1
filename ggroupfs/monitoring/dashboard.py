"""The dashboard as the JSON that Grafana imports; `python -m ggroupfs.monitoring.dashboard` prints it."""

from __future__ import annotations

import json
import sys
from typing import Any

from ggroupfs.monitoring.panels import PANELS, Curve, Panel

SOURCE = {"type": "prometheus", "uid": "${source}"}
"""Data source of all panels: the one that the variable names."""
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
"""Panels in a row, and the size of each; Grafana's grid is 24 wide."""
SCHEMA = 38
"""Version of Grafana's dashboard schema: Grafana 10."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return {
        "title": "ggroupfs",
        "uid": "ggroupfs",
        "tags": ["gpu", "ggroupfs"],
        "schemaVersion": SCHEMA,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _variable("instance", "Node"), _variable("gpu", "GPU")]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def text() -> str:
    """Return the content of the file that is shipped."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.words,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [_target(place, curve) for place, curve in enumerate(panel.curves)],
    }


def _target(place: int, curve: Curve) -> dict[str, Any]:
    letter = chr(ord("A") + place)
    return {"refId": letter, "datasource": SOURCE, "expr": curve.expression, "legendFormat": curve.legend}


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}


def _variable(name: str, label: str) -> dict[str, Any]:
    """Return a variable with the values of a label, all of which are selected at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values(ggroup_gpu_capacity_bytes, {name})", "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    sys.stdout.write(text())
