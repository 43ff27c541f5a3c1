"""The lines of the screen of ``ggroupfs top``, which scroll. Textual's own table would make text of all of them."""

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
    """The lines. Only those that are seen are ever made into text: ten thousand cost what twenty do."""

    class Resized(Message):
        """Other columns fit."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Sequence[Line] = ()
        """What there is."""
        self.at = 0
        """Which of them is chosen."""
        self.folded: set[str] = set()
        """Keys of the nodes whose inside is not shown."""
        self.wanted: columns.Column | None = None
        """The column that is shown in any case: what the lines are sorted by."""
        self.least = columns.LABEL_LEAST
        """Characters that names get before there are columns."""

    @property
    def chosen(self) -> Line | None:
        """The line that the keys act on."""
        return self.lines[self.at] if self.at < len(self.lines) else None

    @property
    def columns(self) -> Sequence[columns.Column]:
        """Those that there is room for."""
        width = self.scrollable_content_region.width
        return columns.fitting(width, columns.LIVE, self.wanted, self.least)

    def show(self, found: Sequence[Line]) -> None:
        """Other lines; what was chosen stays so, wherever it is now."""
        at, before = self.at, self.chosen.node.key if self.chosen else None
        self.lines = found
        places = (place for place, line in enumerate(found) if line.node.key == before)
        self.at = next(places, min(self.at, max(len(found) - 1, 0)))
        self.virtual_size = Size(self.scrollable_content_region.width, len(found))
        if self.at != at:  # else it is where the wheel may have left it
            self._reveal()
        self.refresh()

    def headings(self) -> str:
        """What is above the lines."""
        return self._row("", [column.heading for column in self.columns])

    def render_line(self, y: int) -> Strip:
        """One line of what is seen."""
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
        """Names to the left, cut where they are too long, and the cells beside."""
        beside = "".join(
            " " + column.aligned(cell, column.width) for column, cell in zip(self.columns, cells, strict=True)
        )
        width = self.scrollable_content_region.width
        room = max(width - len(beside), 0)
        if cell_len(label) > room > 0:
            label = set_cell_size(label, room - 1) + "…"
        return set_cell_size(set_cell_size(label, room) + beside, width)

    def on_resize(self, _: events.Resize) -> None:
        """Another size has room for other columns."""
        self.virtual_size = Size(self.scrollable_content_region.width, len(self.lines))
        self._reveal()
        self.post_message(self.Resized())

    def on_click(self, event: events.Click) -> None:
        """Chooses what is pointed at."""
        self._choose(event.y + self.scroll_offset.y)

    def move(self, by: int) -> None:
        """Up and down."""
        self._choose(self.at + by)

    def page(self, by: int) -> None:
        """As far as is seen at once."""
        self._choose(self.at + by * max(self.scrollable_content_region.height - 1, 1))

    def edge(self, end: bool) -> None:
        """The first, the last."""
        self._choose(len(self.lines) if end else 0)

    def fold(self, fold: bool | None) -> None:
        """Hides what is in the node that is chosen, or shows it; None: the other of both."""
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
