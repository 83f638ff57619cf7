"""What a long command shows on stderr while it runs: bars on a terminal, elsewhere a line now and
then.

Bars leave nothing behind: the result says what was done. Nothing is imported before the first bar.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from tensorhub.cli import common
from tensorhub.types import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

LINE_S = 5.0  # between two lines about the same, where there is no terminal

Clock = Callable[[], float]
Tell = Callable[[int, int], None]  # (bytes done, bytes in all)


@contextlib.contextmanager
def bytes_bar(title: str, *, shown: bool) -> Iterator[Tell]:
    """Bytes of one thing. Any thread may tell."""
    with BytesBar(shown=shown) as bar:
        yield lambda done, total: bar.tell(title, done, total)


class BytesBar:
    """Bytes of one thing after another. Any thread may tell.

    On a terminal: a bar from the first news to the last. Elsewhere: a line every `LINE_S`.
    """

    def __init__(self, *, shown: bool, clock: Clock = time.monotonic) -> None:
        self._shown, self._clock = shown, clock
        self._lock = threading.Lock()
        self._title = ""  # of what is under way; "": nothing is
        self._bar: Progress | None = None  # only on a terminal
        self._lined = (0.0, 0)  # when the last line was printed, or nothing was done yet; how much

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._shown = False
            self._end()

    def tell(self, title: str, done: int, total: int) -> None:
        """So many bytes are done of so many, which ends with the last of them."""
        with self._lock:
            if not self._shown or (done >= total and title != self._title):
                return  # what is done at once has no bar
            if title != self._title:
                self._end()
                self._begin(title, done)
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=done, total=total)
            else:
                self._line(done, total)
            if done >= total:
                self._end()

    def end(self) -> None:
        """What was under way is over, done or not."""
        with self._lock:
            self._end()

    def _begin(self, title: str, done: int) -> None:
        self._title, self._lined = title, (self._clock(), done)
        console = _terminal()
        if console is not None:
            self._bar = _bytes_progress(console)
            self._bar.add_task(_plain(title), total=None)
            self._bar.start()

    def _end(self) -> None:
        self._title = ""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, done: int, total: int) -> None:
        now, (before, had) = self._clock(), self._lined
        if now - before < LINE_S:
            return
        self._lined = now, done
        print(
            _plain(line(self._title, done, total, (done - had) / max(now - before, 1e-9))),
            file=sys.stderr,
            flush=True,
        )


def seeding(bar: BytesBar) -> Callable[[str, int, int, int], None]:
    """What shows the bytes of all shards of a model's seeds as one, see `tools.show_seeding`."""
    shards: dict[int, tuple[int, int]] = {}

    def tell(model: str, shard: int, done: int, wanted: int) -> None:
        shards[shard] = done, wanted
        of_all, wanted_of_all = map(sum, zip(*shards.values(), strict=True))
        bar.tell(f"reading {model}", of_all, wanted_of_all)
        if of_all >= wanted_of_all:
            shards.clear()  # the next version begins

    return tell


def line(title: str, done: int, total: int, bytes_per_s: float) -> str:
    """ "fetching actor: 1.2 GB of 15.0 GB (8 %), 350.0 MB/s, 39 s left"."""
    share = math.floor(100 * done / total) if total else 100
    there = f"{common.format_bytes(done)} of {common.format_bytes(total)} ({share} %)"
    left = f", {(total - done) / bytes_per_s:,.0f} s left" if bytes_per_s > 0 else ""
    return f"{title}: {there}, {common.format_bytes(int(bytes_per_s))}/s{left}"


def bars(*columns: ProgressColumn | str, shown: bool) -> Progress:
    """Bars on stderr; disabled if stderr is no terminal, or not `shown`."""
    from rich.progress import Progress

    console = _terminal() if shown else None
    return Progress(*columns, console=console, disable=console is None)


def _terminal() -> Console | None:
    """stderr, if bars can be drawn there."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_interactive else None  # or it cannot move its cursor


def _bytes_progress(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        expand=True,
        # what a command prints goes where it belongs
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _plain(title: str) -> str:
    return printable(title).replace("\n", "\\n")
