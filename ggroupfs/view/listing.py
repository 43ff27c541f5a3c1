"""The scrolling list of ``ggroupfs top``. Textual's own table would format every line, visible or not."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ggroupfs.view import columns
from ggroupfs.view.outline import Line
from ggroupfs.view.snapshot import GpuUse

FROZEN = Style(color="#56b4e9")


class Listing(ScrollView, can_focus=True):
    """The list. Only visible lines are formatted, so ten thousand lines cost as much as twenty."""

    class Resized(Message):
        """Sent when other columns fit into the width."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Sequence[Line] = ()
        """All lines."""
        self.at = 0
        """Index of the selected line."""
        self.folded: set[str] = set()
        """Keys of the nodes whose children are hidden."""
        self.wanted: columns.Column | None = None
        """The column that is shown in any case, because the lines are sorted by it."""
        self.least = columns.LABEL_LEAST
        """Least width for names before columns are added, characters."""

    @property
    def chosen(self) -> Line | None:
        """The selected line, on which the keys act."""
        return self.lines[self.at] if self.at < len(self.lines) else None

    @property
    def columns(self) -> Sequence[columns.Column]:
        """The columns that fit into the width."""
        width = self.scrollable_content_region.width
        return columns.fitting(width, columns.LIVE, self.wanted, self.least)

    def show(self, found: Sequence[Line]) -> None:
        """Replace the lines. The selection stays on its node, wherever that is now."""
        at, before = self.at, self.chosen.node.key if self.chosen else None
        self.lines = found
        places = (place for place, line in enumerate(found) if line.node.key == before)
        self.at = next(places, min(self.at, max(len(found) - 1, 0)))
        self.virtual_size = Size(self.scrollable_content_region.width, len(found))
        if self.at != at:  # otherwise keep the position set by the mouse wheel
            self._reveal()
        self.refresh()

    def headings(self) -> str:
        """Return the line of headings."""
        return self._row("", [column.heading for column in self.columns])

    def render_line(self, y: int) -> Strip:
        """Return one visible line."""
        place, width = y + self.scroll_offset.y, self.scrollable_content_region.width
        if place >= len(self.lines):
            return Strip.blank(width, self.rich_style)
        line = self.lines[place]
        text = self._row(columns.label(line), [column.cell(line.node) for column in self.columns])
        style = self.rich_style
        if isinstance(line.node.use, GpuUse):
            style += Style(bold=True)
        elif line.node.figures.frozen:
            style += FROZEN
        if place == self.at:
            style += Style(reverse=True)
        return Strip([Segment(text, style)], width)

    def _row(self, label: str, cells: Sequence[str]) -> str:
        """Return a name on the left, cut if it is too long, with the cells next to it."""
        beside = "".join(
            " " + column.aligned(cell, column.width) for column, cell in zip(self.columns, cells, strict=True)
        )
        width = self.scrollable_content_region.width
        room = max(width - len(beside), 0)
        if cell_len(label) > room > 0:
            label = set_cell_size(label, room - 1) + "…"
        return set_cell_size(set_cell_size(label, room) + beside, width)

    def on_resize(self, _: events.Resize) -> None:
        """Adapt the columns to another size."""
        self.virtual_size = Size(self.scrollable_content_region.width, len(self.lines))
        self._reveal()
        self.post_message(self.Resized())

    def on_click(self, event: events.Click) -> None:
        """Select the line under the mouse."""
        self._choose(event.y + self.scroll_offset.y)

    def move(self, by: int) -> None:
        """Move the selection by a number of lines."""
        self._choose(self.at + by)

    def page(self, by: int) -> None:
        """Move the selection by a number of pages."""
        self._choose(self.at + by * max(self.scrollable_content_region.height - 1, 1))

    def edge(self, end: bool) -> None:
        """Move the selection to the first or the last line."""
        self._choose(len(self.lines) if end else 0)

    def fold(self, fold: bool | None) -> None:
        """Hide or show the children of the selected node; None toggles."""
        if self.chosen is None or not self.chosen.node.children:
            return
        key = self.chosen.node.key
        if fold is None:
            fold = key not in self.folded
        (self.folded.add if fold else self.folded.discard)(key)

    def _choose(self, place: int) -> None:
        self.at = min(max(place, 0), max(len(self.lines) - 1, 0))
        self._reveal()

    def _reveal(self) -> None:
        width = self.scrollable_content_region.width
        self.scroll_to_region(Region(0, self.at, width, 1), animate=False, force=True)
        self.refresh()
