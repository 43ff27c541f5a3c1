"""Pages of docs/, for tests that compare them with the code."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
POLICIES = DOCS / "policies"


def section(title: str, page: Path) -> str:
    """Return the text below a title, up to the next title of its level."""
    found = page.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, title
    return found


def rows(text: str) -> list[tuple[str, str]]:
    """Return the first two cells of each table row that begins with code."""
    cells = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    return [(first.strip(), second.strip()) for first, second in cells]
