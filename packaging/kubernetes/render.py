"""`python packaging/kubernetes/render.py`: renders the chart with its default values to manifests.yaml.

The namespace is ggroupfs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MANIFESTS = HERE / "manifests.yaml"
NAMESPACE = "ggroupfs"
HEAD = "# Made by `make kubernetes` from chart/: change it there. kubectl create namespace ggroupfs comes first.\n"


def rendered(values: dict[str, Any] | None = None) -> str:
    """Return the chart as Helm renders it, file by file. Helm raises an error for values that its schema rejects."""
    import helm_python as helm

    with helm.Chart.load(str(HERE / "chart")) as chart:
        chart.validate_schema(values or {})
        files = chart.render(values or {}, name="ggroupfs-dra", namespace=NAMESPACE)
    return HEAD + "".join(f"---\n{files[name].strip()}\n" for name in sorted(files) if files[name].strip())


if __name__ == "__main__":
    MANIFESTS.write_text(rendered(), encoding="utf-8")
    sys.exit(0)
