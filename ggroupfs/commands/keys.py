"""The keys of ``ggroupfs top``: the summary in the last line of the screen, and the full list as a help screen."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.screen import ModalScreen
from textual.widgets import Static

KEYS = "f freeze  l limit  t timeslice  x kill  c command  / filter  ? help  q quit"

HELP = """\
 up down pgup pgdn home end   choose a line
 enter, left, right           fold what is in it, and unfold

 f   freeze, or thaw
 l   limit of memory on the GPU: 8G, 50%, max
 t   timeslice: 2ms, 500us, default
 x   kill a process: asks first, which signal too

 m s p k w   sort by memory, share, pid, kernels, swap
 W P U       sort by weight, priority, user
 v   processes alone, or in their slices
 c   full command lines, or names
 a   GPUs, too, that a process does not use
 /   only names with some text in them; esc: all again
 q   quit

 - is what this machine does not tell. A wider terminal has
 more columns: user, weight, priority, the share of late
 (HISTORY), why it is off the runlist (OFF), memory moved in
 and out in MB/s, and the pod, container, job or unit.

 esc closes this."""


class Help(ModalScreen[None]):
    """The help screen."""

    CSS = """
    Help { align: center middle; }
    Help > Static { width: 66; height: auto; border: round #56b4e9; background: $background; }
    """

    def compose(self) -> ComposeResult:
        """Compose the screen: a single box."""
        yield Static(HELP, markup=False)
