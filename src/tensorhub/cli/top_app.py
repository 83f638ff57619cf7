"""The terminal of `tensorhub top`: draws the lines of `top_rows`, and hears keys.

Needs the extra `top`. Responsible for the terminal only.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import ClassVar

import anyio
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget

from tensorhub.cli import common, top_rows
from tensorhub.cli.top_data import Seen
from tensorhub.errors import TensorHubError

TICK_S = 0.5  # how often the screen is drawn, answer or not
INTERRUPTED = common.INTERRUPTED

Look = Callable[[str | None], Awaitable[Seen]]


class _Lines(Widget):
    """The whole screen."""

    DEFAULT_CSS = "_Lines { width: 100%; height: 100%; }"

    def __init__(self, lines: Callable[[int, int], list[top_rows.Line]]) -> None:
        super().__init__()
        self._lines = lines
        self.drawn = list[top_rows.Line]()

    def refresh_if_changed(self) -> None:
        if self._lines(self.size.width, self.size.height) != self.drawn:
            self.refresh()

    def render(self) -> Text:
        text = Text(no_wrap=True, overflow="crop", end="")
        self.drawn = self._lines(self.size.width, self.size.height)
        for number, line in enumerate(self.drawn):
            text.append("\n" * bool(number)).append(line.text, line.style or None)
        return text


class TopApp(App[int]):
    """`look`: asks for what there is, of the model of that name (None: of any). `chosen`: the model
    to begin with. `first`: what was seen already.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: ansi_default; color: ansi_default; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave(0)", priority=True),
        Binding("ctrl+c", f"leave({INTERRUPTED})", priority=True),
        Binding("ctrl+q", "leave(0)", priority=True),
        Binding("up", "move(-1)"),
        Binding("down", "move(1)"),
        Binding("pageup", "move(-10)"),
        Binding("pagedown", "move(10)"),
        Binding("enter", "page('model')"),
        Binding("escape", "page('all')"),
        Binding("question_mark", "page('help')"),
    ]

    def __init__(
        self, look: Look, first: Seen, *, chosen: str | None = None, interval_s: float = 1.0
    ) -> None:
        super().__init__(ansi_color=True)
        self.seen, self.view = first, top_rows.View()
        self._look, self._chosen, self._interval_s = look, chosen, interval_s
        self._lines = _Lines(self._drawn)
        self._is_asked = anyio.Event()
        self.error: TensorHubError | None = None  # that asking again does not help with

    @property
    def drawn(self) -> list[top_rows.Line]:
        """What is on the terminal."""
        return self._lines.drawn

    def compose(self) -> ComposeResult:
        yield self._lines

    def on_mount(self) -> None:
        self.set_interval(TICK_S, self._lines.refresh_if_changed)
        self.run_worker(self._follow(), exit_on_error=True)

    async def _follow(self) -> None:
        while True:
            chosen = self._chosen
            try:
                seen = await self._look(chosen)
            except TensorHubError as error:
                self.error = error
                self.exit()
                return
            if self._chosen in (None, chosen):  # else another one was chosen meanwhile
                self.seen = seen
                self._chosen = self._chosen or seen.chosen or None
                self._lines.refresh()
            with anyio.move_on_after(self._interval_s):
                await self._is_asked.wait()
            self._is_asked = anyio.Event()

    def _drawn(self, width: int, height: int) -> list[top_rows.Line]:
        return top_rows.screen(replace(self.seen, at=time.time()), self.view, width, height)

    def action_leave(self, code: int) -> None:
        self.exit(code)

    def action_page(self, page: str) -> None:
        pages: dict[str, top_rows.View] = {
            "all": top_rows.View("all"),
            "model": top_rows.View("model"),
            "help": top_rows.View("help"),
        }
        self.view = pages[page]
        self._lines.refresh()

    def action_move(self, lines: int) -> None:
        if self.view.page == "model":
            size = self._lines.size
            last = len(top_rows.model_page(self.seen, size.width)) - max(0, size.height - 2)
            offset = min(max(0, self.view.offset + lines), max(0, last))
            self.view = replace(self.view, offset=offset)
        elif self.view.page == "all" and self.seen.models:
            names = [each.model for each in self.seen.models]
            at = names.index(self.seen.chosen) if self.seen.chosen in names else 0
            self._chosen = names[min(max(0, at + lines), len(names) - 1)]
            # the counts are there; rows come with the next answer
            self.seen = replace(self.seen, chosen=self._chosen, rows=None, updates=(), rates={})
            self._is_asked.set()
        self._lines.refresh()
