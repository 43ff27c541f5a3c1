"""The screen of ``ggroupfs top``. Threads read and write the tree, so a slow or dead tree never blocks a key."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Static

from ggroupfs.commands.actions import ASKED, Action, freeze
from ggroupfs.commands.keys import KEYS, Help
from ggroupfs.commands.kill import QUESTION, Victim, seize, send
from ggroupfs.errors import UsageError
from ggroupfs.view.columns import FULL_LEAST, LABEL_LEAST, SORTED
from ggroupfs.view.commandlines import CommandLines
from ggroupfs.view.frame import Frame, Wishes, gauges, look, summary
from ggroupfs.view.listing import Listing
from ggroupfs.view.outline import lines
from ggroupfs.view.snapshot import GpuUse, ProcessUse

# Colours that colour-blind people can distinguish (Okabe and Ito). No information is given by colour alone.
BLUE, ORANGE, GREY = Style(color="#56b4e9"), Style(color="#e69f00", bold=True), Style(color="#8a8a8a")

BASE_LEAST_S = 0.5
"""Shortest time over which rates are computed, seconds: a write triggers a read at once, so two passes may be close."""

NOTICED_S = 1.0
"""Seconds above which the time of a pass is shown, if it also exceeds the delay."""


class Top(App[int]):
    """The application. All that it shows comes from a Frame, and all that it does is in actions."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #summary, #headings { text-wrap: nowrap; text-overflow: ellipsis; }
    #summary { height: auto; max-height: 40%; overflow-y: auto; padding: 0; }
    #headings { height: 1; margin-top: 1; text-style: bold; }
    Listing { height: 1fr; overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1; }
    #message { height: auto; max-height: 4; }
    #prompt { height: 1; display: none; text-wrap: nowrap; }
    #keys { height: 1; color: #8a8a8a; }
    """
    # Every key has priority, so that keys are handled at once and in order. Otherwise text typed before a line has
    # opened would be taken for commands, and a command would act on the line that was selected before preceding arrow
    # keys.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, action, priority=True)
        for key, action in {
            "q": "leave",
            "ctrl+c": "leave",
            "up": "move(-1)",
            "down": "move(1)",
            "pageup": "page(-1)",
            "pagedown": "page(1)",
            "home": "edge(False)",
            "end": "edge(True)",
            "enter,space": "fold(None)",
            "left": "fold(True)",
            "right": "fold(False)",
            "f": "freeze",
            "l": "ask('limit')",
            "t": "ask('timeslice')",
            "slash": "ask('filter')",
            "m": "sort('memory')",
            "s": "sort('share')",
            "p": "sort('pid')",
            "k": "sort('kernels')",
            "w": "sort('swap')",
            "W": "sort('weight')",
            "P": "sort('priority')",
            "U": "sort('user')",
            "x": "kill",
            "c": "commands",
            "a": "unused",
            "v": "flat",
            "question_mark,h": "help",
            "escape": "cancel",
        }.items()
    ]

    def __init__(self, mount: Path, delay: float, wishes: Wishes | None = None) -> None:
        super().__init__()
        self._wishes = wishes or Wishes()
        self._victim: Victim | None = None  # while the user is asked whether to kill it
        self._mount, self._delay = mount, delay
        self._frame: Frame | None = None
        self._order, self._pattern, self._flat = "memory", "", False
        self._asking, self._target, self._typed = "", "", ""
        self._wake, self._ended, self._lost = threading.Event(), False, False
        self._listing = Listing()

    def compose(self) -> ComposeResult:
        """Compose the screen, from top to bottom."""
        with Vertical():
            yield Static(id="summary", markup=False)
            yield Static(id="headings", markup=False)
            yield self._listing
            yield Static(id="message", markup=False)
            yield Static(id="prompt", markup=False)
            yield Static(KEYS, id="keys", markup=False)

    def on_mount(self) -> None:
        """Begin reading. A terminating signal leaves the terminal as it was."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError):  # not the main thread: embedded in another program, or a test
                asyncio.get_running_loop().add_signal_handler(number, self.action_leave)
        self._listing.focus()
        self._missed(f"reading {self._mount} ...", False)
        threading.Thread(target=self._read, name="ggroupfs-top-reader", daemon=True).start()

    # Reading and writing, each in its own thread

    def _read(self) -> None:
        """Read the tree repeatedly, at most half of the time: a large tree is read less often, to spare its daemon."""
        base, passed, previous = None, self._delay, None
        while not self._ended:
            try:
                frame = previous = look(self._mount, base, self._wishes, previous)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self._tell(self._missed, f"{reason}: {self._mount}")
            else:
                if base is None or frame.snapshot.at - base.at >= BASE_LEAST_S:
                    base = frame.snapshot
                passed = frame.snapshot.took
                self._tell(self._arrived, frame)
            self._wake.wait(max(self._delay, passed))
            self._wake.clear()

    def _do(self, action: Action, directory: str, value: str = "") -> None:
        """Perform an action in a thread, as a write returns only once it holds."""

        def act() -> None:
            try:
                words, failed = action(self._mount, directory, value), False
            except (OSError, RuntimeError, UsageError) as error:
                words, failed = str(error), True
            self._tell(self._say, words, failed)
            self._wake.set()

        threading.Thread(target=act, name="ggroupfs-top-writer", daemon=True).start()

    def _tell(self, what: Callable[..., Any], *words: Any) -> None:
        with contextlib.suppress(RuntimeError, asyncio.CancelledError):  # it is ending
            if not self._ended:
                self.call_from_thread(what, *words)

    # Showing

    def _missed(self, reason: str, failed: bool = True) -> None:
        """Keep showing the last pass, with the reason why it is old, until there is a newer one."""
        self._lost = True
        self._say(reason, failed)

    def _arrived(self, frame: Frame) -> None:
        self._frame = frame
        if self._lost:
            self._lost = False
            self._say("")
        self._redraw()

    def _redraw(self) -> None:
        """Redraw everything from the present data. Textual sends only the differences to the terminal."""
        frame = self._frame
        if frame is None:
            return
        self._listing.wanted = SORTED.get(self._order)
        self._listing.least = LABEL_LEAST if self._wishes.commands is None else FULL_LEAST
        self._listing.show(lines(frame.gpus, self._order, self._listing.folded, self._pattern, flat=self._flat))
        words = f"ggroupfs top: {summary(frame)}, by {self._order}"
        if self._pattern:
            words += f", with {self._pattern!r}"
        if frame.snapshot.took > max(self._delay, NOTICED_S):
            words += f", read in {frame.snapshot.took:.1f} s"
        words += f", on {self._mount}"
        bars = Text("\n".join(gauges(gpu, self.size.width) for gpu in frame.gpus))
        bars.highlight_regex("[█▏▎▍▌▋▊▉]+", BLUE)
        bars.highlight_regex("░+", GREY)
        self.query_one("#summary", Static).update(Text(words + "\n", no_wrap=True).append_text(bars))
        self.query_one("#headings", Static).update(Text(self._listing.headings(), no_wrap=True))

    def on_listing_resized(self, _: Listing.Resized) -> None:
        """Redraw bars and headings, which are as wide as the lines."""
        self._redraw()

    def _say(self, words: str, failed: bool = False) -> None:
        """Show a message at the bottom; an error has a mark besides its colour."""
        text = Text(f"! {words}", ORANGE) if failed else Text(words)
        self.query_one("#message", Static).update(text)

    # Keys

    async def on_event(self, event: events.Event) -> None:
        """Handle typed text directly while a line is open; in the queue of a widget, later events could overtake it."""
        if self._asking and isinstance(event, events.Key):
            self._type(event)
        elif self._asking and isinstance(event, events.Paste):
            self._typed += "".join(letter for letter in event.text if letter.isprintable())
            self._prompt()
        else:
            await super().on_event(event)

    def _type(self, event: events.Key) -> None:
        if event.key == "enter":
            self._submit()
            return
        if event.key in ("escape", "ctrl+c"):
            self.action_cancel()
            return
        if event.key in ("backspace", "ctrl+h"):
            self._typed = self._typed[:-1]
        elif event.key == "ctrl+u":
            self._typed = ""
        elif event.is_printable and event.character:
            self._typed += event.character
        self._prompt()

    def _prompt(self) -> None:
        """Show the line in which a value is typed; a filter takes effect during the typing."""
        line = self.query_one("#prompt", Static)
        line.display = bool(self._asking)
        if not self._asking:
            return
        if self._asking == "filter":
            self._pattern = self._typed
            self._redraw()
            words = "text in the name of a process or slice"
        elif self._victim is not None:
            words = f"{self._victim}: {QUESTION}"
        else:
            words = f"{self._target}: {ASKED[self._asking][0]}"
        line.update(Text.assemble((words, GREY), f" > {self._typed}", ("_", Style(blink=True))))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow only closing while the help screen is open."""
        return action in ("cancel", "leave") or not isinstance(self.screen, Help)

    def action_move(self, by: int) -> None:
        """Move the selection by a number of lines."""
        self._listing.move(by)

    def action_page(self, by: int) -> None:
        """Move the selection by a number of pages."""
        self._listing.page(by)

    def action_edge(self, end: bool) -> None:
        """Move the selection to the first or the last line."""
        self._listing.edge(end)

    def action_fold(self, fold: bool | None) -> None:
        """Hide or show the children of the selected node."""
        self._listing.fold(fold)
        self._redraw()

    def action_leave(self) -> None:
        """End the program."""
        self._ended = True
        self._wake.set()
        self.exit(0)

    def action_sort(self, order: str) -> None:
        """Sort in another order."""
        self._order = order
        self._redraw()

    def action_flat(self) -> None:
        """Toggle between processes alone and processes in their slices."""
        self._flat = not self._flat
        self._redraw()

    def action_commands(self) -> None:
        """Toggle between full command lines and names of programs."""
        self._wishes.commands = CommandLines() if self._wishes.commands is None else None
        self._wake.set()

    def action_unused(self) -> None:
        """Toggle between processes on every GPU and on those that they use."""
        self._wishes.unused = not self._wishes.unused
        self._wake.set()

    def action_kill(self) -> None:
        """Ask whether to end the selected process, which is held by a pidfd meanwhile."""
        line = self._listing.chosen
        if line is None or not isinstance(line.node.use, ProcessUse):
            self._say("only a process can be killed: choose one", True)
            return
        try:
            self._victim = seize(line.node.use)
        except RuntimeError as error:
            self._say(str(error), True)
            return
        self._asking, self._target, self._typed = "kill", line.node.key, ""
        self._say("")
        self._prompt()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())

    def action_freeze(self) -> None:
        """Freeze or thaw the selected group."""
        directory = self._chosen()
        if directory is not None:
            self._do(freeze, directory)

    def action_ask(self, what: str) -> None:
        """Open the line for a value. It applies to the present selection, even if the lines move."""
        if what == "filter":
            self._typed = self._pattern
        else:
            directory = self._chosen()
            if directory is None:
                return
            self._target, self._typed = directory, ""
        self._asking = what
        self._say("")
        self._prompt()

    def _submit(self) -> None:
        """Perform the action with the typed value."""
        what, value, victim = self._asking, self._typed.strip(), self._victim
        if victim is not None and value:
            self._victim = None  # the action closes it
            self._do(partial(send, victim), self._target, value)
        self._close()
        if what in ASKED and value:
            self._do(ASKED[what][1], self._target, value)

    def action_cancel(self) -> None:
        """Close what is open; if nothing is, reset the filter."""
        if isinstance(self.screen, Help):
            self.pop_screen()
            return
        if self._asking in ("", "filter"):
            self._pattern = ""
        self._close()
        self._say("")
        self._redraw()

    def _close(self) -> None:
        if self._victim is not None:
            self._victim.close()
            self._victim = None
        self._asking = ""
        self._prompt()

    def _chosen(self) -> str | None:
        """Return the directory of the selected process or slice; for a GPU None, with a message."""
        line = self._listing.chosen
        if line is None or isinstance(line.node.use, GpuUse):
            self._say("a GPU has no control files: choose a process or a slice", True)
            return None
        return line.node.key
