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

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tensorhub.coordinator.observing import Histogram
from tensorhub.messages import Took
from tensorhub.observed import PHASE_NAMES, ServedTiming
from tensorhub.runtime.worker.worker import Worker
from tensorhub.types import release
from tensorhub.web.asking import OtherLoop, Post, Questions
from tensorhub.web.endpoint import Endpoint
from tensorhub.web.exposition import MODELS_MAX, counter, gauge, histogram, label_of, metrics_answer
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
        self, worker: Worker, counts: Counts, post: Post, secrets: Sequence[bytes], host: str
    ) -> None:
        """`post`: has a function called in the worker's loop."""
        self._worker = worker
        self._counts = counts
        self._loop = OtherLoop(post)
        self._secrets = secrets
        self._host = host
        self._questions = Questions(self._loop)

    def __repr__(self) -> str:
        return f"<WorkerPages of {self._worker!r}>"

    def application(self) -> ASGIApp:
        routes = {
            "/healthz": healthz,
            "/readyz": self.readyz,
            "/metrics": self.metrics,
            "/summary": self.summary,
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
    counts = Counts()
    worker.timings.on_call, worker.timings.on_reader = counts.add_call, counts.add_reader
    endpoint.start(lambda: WorkerPages(worker, counts, post, secrets, endpoint.host).application())
