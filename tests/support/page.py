"""Pages of docs/, for tests that compare them with what they are about."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
POLICIES = DOCS / "policies"


def section(title: str, page: Path) -> str:
    """What is below that title, up to the next of its kind."""
    found = page.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, title
    return found


def rows(text: str) -> list[tuple[str, str]]:
    """The first two cells of every row of a table that begins with code."""
    cells = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    return [(first.strip(), second.strip()) for first, second in cells]
