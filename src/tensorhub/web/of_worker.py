"""What a worker shows of itself: see docs/observing.md.

Responsible for counting what the worker tells of its calls and readers, in the worker's loop, and
for the form of the answers, in the endpoint's loop.
"""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from secrets import token_hex

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tensorhub.coordinator.observing import Histogram, Observations
from tensorhub.errors import some
from tensorhub.messages import Took
from tensorhub.observed import PHASE_NAMES, ClusterEvent, ServedTiming
from tensorhub.runtime.worker.worker import Worker
from tensorhub.types import release
from tensorhub.web.asking import OtherLoop, Post, Questions
from tensorhub.web.endpoint import Endpoint
from tensorhub.web.exposition import MODELS_MAX, counter, gauge, histogram, label_of, metrics_answer
from tensorhub.web.news import News
from tensorhub.web.pages import Answer, application, healthz, readiness

HANDLES_MAX = 1024  # that a summary lists


@dataclass(slots=True, eq=False)
class Counts:
    """Since the endpoint was opened. Lives in the worker's loop."""

    update_seconds: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram() for name in (*PHASE_NAMES, "total")}
    )
    read_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by transport and kind
    served_bytes: int = 0
    readers: int = 0
    retries: int = 0

    def add_call(self, took: Took, retries: int) -> None:
        for name, seconds in (*took.phases, ("total", took.seconds)):
            self.update_seconds[name].add(seconds)
        for link in took.links:
            self.read_bytes[link.transport, link.kind] += link.nbytes
        self.retries += retries

    def add_reader(self, timing: ServedTiming) -> None:
        self.served_bytes += timing.nbytes
        self.readers += 1


class WorkerEvents:
    """The newest ones since the endpoint was opened. Lives in the worker's loop. `life`: what their
    ids begin with.
    """

    def __init__(self, name: str) -> None:
        self.life = token_hex(6)
        self.kept = Observations(0.0)
        self._name = name

    def called(self, took: Took) -> None:
        read = sum(link.nbytes for link in took.links)
        sources = some([repr(link.source) for link in took.links]) or "no other worker"
        text = f"{took.seconds:.3f} s, {read:,} bytes from {sources}"
        self.kept.happened(time.time(), "called", took.key.model, None, self._name, text)

    def served(self, timing: ServedTiming) -> None:
        text = f"{timing.seconds:.3f} s, {timing.nbytes:,} bytes"
        self.kept.happened(time.time(), "served", "", None, self._name, text)


@dataclass(frozen=True, slots=True)
class HandleShown:
    """One registration of the worker. `version`: that it holds."""

    model: str
    group: str
    rank: int
    world_size: int
    medium: str
    purpose: str
    state: str
    version: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """A worker at one moment."""

    name: str
    incarnation: str
    online: bool
    read_only: bool
    handles_known: int
    handles: tuple[HandleShown, ...]
    counts: Counts


class WorkerPages:
    """Lives in the endpoint's loop; `show` in the worker's."""

    def __init__(
        self,
        worker: Worker,
        counts: Counts,
        events: WorkerEvents,
        post: Post,
        secrets: Sequence[bytes],
        host: str,
    ) -> None:
        """`post`: has a function called in the worker's loop."""
        self._worker = worker
        self._counts = counts
        self._events = events
        self._loop = OtherLoop(post)
        self._secrets = secrets
        self._host = host
        self._questions = Questions(self._loop)
        self._news = News(self._events_after)

    def __repr__(self) -> str:
        return f"<WorkerPages of {self._worker!r}>"

    def application(self) -> ASGIApp:
        routes = {
            "/healthz": healthz,
            "/readyz": self.readyz,
            "/metrics": self.metrics,
            "/summary": self.summary,
            "/events": self._news.answer,
        }
        return application(routes, self._secrets, self._host)

    def _show(self) -> Shown:
        worker = self._worker
        members = [handle.member for handle in worker.router.handles.values()]
        handles = [
            HandleShown(
                shard.model,
                shard.group,
                shard.rank,
                shard.world_size,
                shard.medium.value,
                shard.purpose.value,
                member.state.value,
                member.version,
            )
            for member in islice(members, HANDLES_MAX)
            for shard in (member.shard,)
        ]
        return Shown(
            worker.name,
            worker.incarnation,
            worker.link.online,
            worker.read_only,
            len(members),
            tuple(handles),
            copy.deepcopy(self._counts),
        )

    async def _events_after(self, number: int) -> tuple[str, tuple[ClusterEvent, ...], bool]:
        events = self._events
        return events.life, *await self._loop.ask(lambda: events.kept.events_after(number))

    async def _shown(self) -> Shown:
        return await self._questions.ask("shown", lambda: self._loop.ask(self._show))

    async def readyz(self, request: Request) -> Response:
        """Whether the coordinator knows it."""
        online = (await self._shown()).online
        why = "" if online else "there is no connection to the coordinator; it is tried again"
        return readiness(request, why)

    async def summary(self, request: Request) -> Response:
        """The worker and its handles, in one document."""
        shown = await self._shown()
        about = {
            "name": shown.name,
            "incarnation": shown.incarnation,
            "online": shown.online,
            "read_only": shown.read_only,
            "coordinators": list(self._worker.link.addresses),
            "handles": shown.handles_known,
            "now": time.time(),
            "release": release(),
        }
        document = {"worker": about, "handles": [asdict(each) for each in shown.handles]}
        return Answer(json.dumps(document), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """For Prometheus, in the form that it asks for."""
        return metrics_answer(request, _families(await self._shown()))


def _families(shown: Shown) -> Iterator[Metric]:
    counts = shown.counts
    yield gauge("tensorhub_worker_online", "1: its coordinator knows it; else 0", shown.online)
    yield gauge("tensorhub_worker_handles", "Registered memories", shown.handles_known)
    held: dict[str, int] = {}
    for handle in shown.handles:
        if handle.version is not None:
            label = label_of(handle.model)
            if label in held or len(held) < MODELS_MAX:
                held[label] = max(handle.version, held.get(label, 0))
    text = "The newest version that this worker holds"
    yield gauge("tensorhub_worker_held_version", text, held, "model")
    text = "Its calls that fill memory, by phase"
    yield histogram("tensorhub_worker_update_seconds", text, counts.update_seconds, "phase")
    text = "Bytes that it has read, by transport and kind of source"
    labels = ("transport", "kind")
    yield counter("tensorhub_worker_read_bytes_total", text, counts.read_bytes, *labels)
    text = "Bytes that it has sent to readers; a reader that maps memory is not seen"
    yield counter("tensorhub_worker_served_bytes_total", text, {(): counts.served_bytes})
    text = "Readers that it has served"
    yield counter("tensorhub_worker_readers_total", text, {(): counts.readers})
    text = "Chunks that it had to ask for again"
    yield counter("tensorhub_worker_retries_total", text, {(): counts.retries})


def show_worker(endpoint: Endpoint, worker: Worker, post: Post, secrets: Sequence[bytes]) -> None:
    """Begin to serve it. In the worker's loop."""
    counts, events = Counts(), WorkerEvents(worker.name)

    def on_call(took: Took, retries: int) -> None:
        counts.add_call(took, retries)
        events.called(took)

    def on_reader(timing: ServedTiming) -> None:
        counts.add_reader(timing)
        events.served(timing)

    worker.timings.on_call, worker.timings.on_reader = on_call, on_reader
    endpoint.start(
        lambda: WorkerPages(worker, counts, events, post, secrets, endpoint.host).application()
    )
