"""What observing over HTTP costs a coordinator: its loop's processor time and its readers' time,
alone and watched.

The coordinator is a process of its own; thin workers (benches/scale) connect, idle, and fill each
version. The observers are another process: a scraper, a client that asks as the dashboard does, and
one that follows the events. Each asks as often as it may, once a second. Alternate rounds are
watched and unwatched, on one coordinator, so that whatever else the machine does meets both. Thin
workers never say Fenced, so that more than 16 versions in all, by more or longer rounds, end with
an error: `--rounds 8 --seconds 0.1` has one version in each half. At the end a browser, if there is
one, opens the model's page three times.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import anyio
import anyio.to_thread

from benches.comparison.facts import facts
from benches.remotes import Remote, obey
from benches.scale.connected import WAIT_S, Cluster
from tensorhub.testing.flow.thin import MODEL
from tensorhub.types import Options

EVERY_S = 1.0
ANSWER_S = 10.0
LOOP, HTTP = "tensorhub-coordinator", "tensorhub-http"
PAGE = ("/summary", f"/models/{MODEL}", f"/updates?model={MODEL}")

# --------------------------------------------------------------------------------------------------
# the observers' process


class Observers:
    """Three clients, which may be told to pause."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._may_ask = threading.Event()
        self._ends = threading.Event()
        self.scrapes: list[tuple[float, int]] = []  # seconds and bytes
        self.answers = 0
        self.events = 0
        self._last = ""  # the id of the newest of these

    def begin(self) -> None:
        for each in (self._scrape, self._browse, self._follow):
            threading.Thread(target=self._repeat, args=(each,), daemon=True).start()

    def _repeat(self, ask: Callable[[], None]) -> None:
        while not self._ends.is_set():
            self._may_ask.wait()
            with contextlib.suppress(OSError, http.client.HTTPException):
                ask()
            self._ends.wait(EVERY_S)

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200, (path, answer.status, body[:200])
            return body

    def _scrape(self) -> None:
        began = time.perf_counter()
        body = self._get("/metrics")
        self.scrapes.append((time.perf_counter() - began, len(body)))

    def _browse(self) -> None:
        for path in PAGE:
            self._get(path)
            self.answers += 1

    def _follow(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.request("GET", "/events", headers={"Last-Event-ID": self._last})
            answer = connection.getresponse()
            while self._may_ask.is_set():
                name, _, value = answer.readline().decode().rstrip().partition(": ")
                self.events += name == "data"
                self._last = value if name == "id" else self._last

    async def watch(self, *, watches: bool) -> None:
        """From now on, or no longer."""
        if watches:
            self._may_ask.set()
        else:
            self._may_ask.clear()

    async def found(self) -> tuple[list[tuple[float, int]], int, int]:
        return self.scrapes, self.answers, self.events


def observers_main(pipe: Connection, port: int) -> None:
    observers = Observers(port)
    observers.begin()
    pipe.send((True, None))

    async def run() -> None:
        await obey(
            pipe,
            {
                "watch": lambda: observers.watch(watches=True),
                "stop": lambda: observers.watch(watches=False),
                "found": observers.found,
            },
        )

    anyio.run(run)


# --------------------------------------------------------------------------------------------------
# rounds


@dataclass
class Side:
    """The rounds that were watched, or those that were not."""

    idle_share: list[float] = field(default_factory=list)  # of a core, of the loop
    version_ms: list[float] = field(default_factory=list)  # that the loop takes for a version
    http_share: list[float] = field(default_factory=list)  # of the endpoint's thread
    version_s: list[float] = field(default_factory=list)  # until all have it


@dataclass
class Figures:
    workers: int
    alone: Side
    watched: Side
    page_s: list[float]  # until a browser shows the model's rows
    scrape_ms: list[float]
    scrape_bytes: int
    answers: int
    events: int

    def __str__(self) -> str:
        lines = [f"{self.workers} workers{'alone':>24}{'watched':>12}{'more':>12}"]
        for name, text in (
            ("idle_share", "loop, idle, of a core"),
            ("http_share", "HTTP thread, of a core"),
        ):
            alone, watched = median(getattr(self.alone, name)), median(getattr(self.watched, name))
            lines.append(f"{text:<30}{alone:>9.2%}{watched:>12.2%}{watched - alone:>12.2%}")
        for name, text in (
            ("version_ms", "loop, ms of a version"),
            ("version_s", "seconds until all have it"),
        ):
            alone, watched = median(getattr(self.alone, name)), median(getattr(self.watched, name))
            lines.append(f"{text:<30}{alone:>9.2f}{watched:>12.2f}{watched / alone - 1:>12.1%}")
        if self.page_s:
            lines.append(f"the page: {median(self.page_s):.2f} s, at most {max(self.page_s):.2f} s")
        lines.append(
            f"a scrape: {median(self.scrape_ms):.1f} ms, at most {max(self.scrape_ms):.1f} ms, "
            f"{self.scrape_bytes:,} bytes; {self.answers} answers, {self.events} events"
        )
        return "\n".join(lines)


async def measure(workers: int, rounds: int, seconds: float, manifest_bytes: int) -> Figures:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = Options(sessions_max=max(4096, 2 * workers), http=f"127.0.0.1:{port}")
    cluster = Cluster(options, 1, manifest_bytes)
    sides = {True: Side(), False: Side()}
    with anyio.fail_after(WAIT_S + rounds * (4 * seconds + WAIT_S)):
        async with cluster.running():
            publishers = await cluster.join(1)
            readers = await cluster.join(workers)
            observers = Remote("observers", observers_main, port)
            try:
                await anyio.to_thread.run_sync(observers.hear)
                for number in range(2 * rounds):
                    watched = bool(number % 2)
                    await anyio.to_thread.run_sync(observers.ask, "watch" if watched else "stop")
                    await anyio.sleep(min(1.0, seconds))
                    side = sides[watched]
                    idle = await _idle(cluster, seconds)
                    side.idle_share.append(idle[LOOP])
                    side.http_share.append(idle.get(HTTP, 0.0))
                    before, used_s = len(side.version_s), (await cluster.threads())[LOOP]
                    until = time.perf_counter() + seconds
                    while time.perf_counter() < until:
                        went = await cluster.version(publishers, readers)
                        side.version_s.append(went.took_s)
                    used_s = (await cluster.threads())[LOOP] - used_s
                    side.version_ms.append(used_s / (len(side.version_s) - before) * 1e3)
                page_s = await anyio.to_thread.run_sync(_pages, port)
                scrapes, answers, events = await anyio.to_thread.run_sync(observers.ask, "found")
            finally:
                observers.end()
    return Figures(
        workers,
        sides[False],
        sides[True],
        page_s,
        [took * 1e3 for took, _ in scrapes],
        max(nbytes for _, nbytes in scrapes),
        answers,
        events,
    )


def _pages(port: int) -> list[float]:
    """Seconds until a browser shows a model's rows."""
    from tests.web.browser import browser, why_not

    if why_not() is not None:
        return []
    found = list[float]()
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as tab:
        for _ in range(3):
            tab.open("about:blank")
            began = time.perf_counter()
            tab.open(f"http://127.0.0.1:{port}/#/model/{MODEL}")
            tab.see("Who reads from whom")
            found.append(time.perf_counter() - began)
    return found


async def _idle(cluster: Cluster, seconds: float) -> dict[str, float]:
    """Of a core that each thread of the coordinator takes while nothing happens but heartbeats."""
    before, began = await cluster.threads(), time.perf_counter()
    await anyio.sleep(seconds)
    after, took_s = await cluster.threads(), time.perf_counter() - began
    return {name: (used - before.get(name, 0.0)) / took_s for name, used in after.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches observing", description=__doc__)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2, help="each, watched and not")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each half of a round")
    parser.add_argument("--manifest", type=int, default=100_000, help="bytes of a manifest")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    given = parser.parse_args(arguments)
    found = anyio.run(measure, given.workers, given.rounds, given.seconds, given.manifest)
    print(found)
    if given.json is not None:
        given.json.write_text(json.dumps({"facts": facts(), "observing": asdict(found)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
