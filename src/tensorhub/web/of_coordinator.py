"""What a coordinator shows: see docs/observing.md.

Responsible for the questions to the coordinator's loop, and for the form of their answers. Each
client gets the snapshot that is at most a second old. If the loop does not answer, clients get the
last snapshot, which then says by how much the coordinator is behind.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tensorhub.coordinator import Coordinator, limits
from tensorhub.coordinator.observing import Counters
from tensorhub.coordinator.overview import (
    ModelOverview,
    Overview,
    model_overviews,
    model_page,
    models_shown,
    overview,
    rows_of,
)
from tensorhub.coordinator.views import explained
from tensorhub.errors import TensorHubError, VersionUnavailable
from tensorhub.observed import ClusterEvent
from tensorhub.runtime.control.candidate import Candidate
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.types import release
from tensorhub.web.asking import OtherLoop, Post, Questions, Unanswered
from tensorhub.web.endpoint import Endpoint
from tensorhub.web.exposition import Figures, exposition, form_for, of_coordinator
from tensorhub.web.news import News
from tensorhub.web.pages import (
    Answer,
    application,
    healthz,
    host_of,
    json_answer,
    number_of,
    readiness,
    static,
    text_of,
)

LATE_S = 10.0  # a coordinator whose loop has not answered for so long is not ready

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A coordinator at one moment, and what was made of that for all clients."""

    taken_at: float  # by the endpoint's loop
    overview: Overview
    models: tuple[ModelOverview, ...]
    behind_s: float
    steps: int
    steps_s: float
    last_event: int
    counters: Counters
    # by what was asked for: of which second after it, and what was made
    forms: dict[object, tuple[int, bytes]] = field(default_factory=dict)

    def form(self, kind: object, late_s: float, make: Callable[[], bytes]) -> bytes:
        """What `make` makes, once for all clients, and anew in each second of `late_s`."""
        second, found = math.ceil(late_s), self.forms.get(kind)
        if found is None or found[0] != second:
            found = self.forms[kind] = second, make()
        return found[1]


class CoordinatorPages:
    """Lives in the endpoint's loop."""

    def __init__(
        self, candidate: Candidate, post: Post, secrets: Sequence[bytes], host: str
    ) -> None:
        """`post`: has a function called in the coordinator's loop."""
        self._candidate = candidate
        self._loop = OtherLoop(post)
        self._secrets = secrets
        self._host = host
        self._snapshots = Questions(self._loop)
        self._questions = Questions(self._loop)
        self._last: Snapshot | None = None
        self._news = News(self._events_after)

    def __repr__(self) -> str:
        return f"<CoordinatorPages of {self._candidate!r}>"

    def application(self) -> ASGIApp:
        routes = {
            "/healthz": healthz,
            "/readyz": self.readyz,
            "/metrics": self.metrics,
            "/summary": self.summary,
            "/models": self.model,  # ?name=: browsers take "." and ".." out of a path
            "/models/{model:path}": self.model,
            "/explain": self.explain,
            "/updates": self.updates,
            "/events": self._news.answer,
            "/": static,
            "/static/{name}": static,
        }
        return application(routes, self._secrets, self._host)

    # -- questions to the coordinator's loop

    def _server(self) -> CoordinatorServer:
        """Called there."""
        server, leader = self._candidate.server, self._candidate.leader
        if server is None:
            who = "no leader is known to it"
            if leader:
                who = f"{leader} leads"
            elif self._candidate.failure:
                who = "its last campaign failed: see campaign_failed in its log"
            raise Unanswered(f"this coordinator stands by; {who}")
        return server

    async def _ask(self, function: Callable[[Coordinator, float], T]) -> T:
        """`function(core, its time)`, called there."""

        def call() -> T:
            core, now, _ = self._server().show()
            return function(core, now)

        return await self._loop.ask(call)

    async def _snapshot(self) -> tuple[Snapshot, float]:
        """The newest snapshot, and how much later than it the coordinator is behind. Raises
        Unanswered, if there is none yet.
        """
        try:
            return await self._snapshots.ask("snapshot", self._take), 0.0
        except Unanswered:
            if self._last is None or self._candidate.server is None:
                raise
            return self._last, asyncio.get_running_loop().time() - self._last.taken_at

    async def _take(self) -> Snapshot:
        """In parts, so that other work of the coordinator's loop comes between them."""

        def begin() -> tuple[Snapshot, tuple[str, ...]]:
            server = self._server()
            core, now, behind_s = server.show()
            found = Snapshot(
                0.0,
                overview(core, now),
                (),
                behind_s,
                server.steps,
                server.steps_s,
                core.observations.last_event,
                copy.deepcopy(core.observations.counters),
            )
            return found, models_shown(core)

        found, names = await self._loop.ask(begin)
        models: list[ModelOverview] = []
        rows = limits.OVERVIEW_ROWS_MAX
        while names:
            part = await self._ask(lambda core, now: list(model_overviews(core, now, names, rows)))  # noqa: B023 - is called before they change
            names = names[len(part) :]
            come = [each for _, each in part if each is not None]
            rows -= sum(rows_of(each.info) for each in come)
            models += [
                replace(each, info=replace(each.info, coordinator_behind_s=found.behind_s))
                for each in come
            ]
        self._last = replace(
            found, taken_at=asyncio.get_running_loop().time(), models=tuple(models)
        )
        return self._last

    # -- answers

    async def readyz(self, request: Request) -> Response:
        """Whether it has its state, and is not late by far; and why not."""
        snapshot, late_s = await self._snapshot()
        state, left_s = snapshot.overview.state, snapshot.overview.recovers_in_s
        why = ""
        if max(late_s, snapshot.behind_s) > LATE_S:
            why = f"the coordinator is {max(late_s, snapshot.behind_s):.0f} s behind"
        elif state != "serving":
            why = f"workers still say what they hold: about {left_s:.1f} s more"
        return readiness(request, why, state=state)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus, in the form that it asks for."""
        snapshot, late_s = await self._snapshot()
        encode, kind = form_for(request)

        def make() -> bytes:
            figures = Figures(
                snapshot.overview,
                snapshot.models,
                snapshot.behind_s + late_s,
                snapshot.steps,
                snapshot.steps_s,
                snapshot.counters,
            )
            return exposition(of_coordinator(figures), encode)

        body = snapshot.form(kind, late_s, make)
        return Answer(body, headers={"Content-Type": kind})

    async def summary(self, request: Request) -> Response:
        """The whole cluster, in one document."""
        snapshot, late_s = await self._snapshot()
        body = snapshot.form("summary", late_s, partial(self._summary, snapshot, late_s))
        return Answer(body, media_type="application/json")

    def _summary(self, snapshot: Snapshot, late_s: float) -> bytes:
        seen = snapshot.overview
        about = {
            "address": self._candidate.address,
            "cluster": seen.cluster,
            "epoch": seen.epoch,
            "state": seen.state,
            "behind_s": snapshot.behind_s + late_s,
            "lease_s": seen.lease_s,
            "sessions": seen.sessions,
            "workers": sum(seen.workers.values()),
            "suspect": seen.workers["suspect"],
            "models": seen.models,
            "now": time.time() - late_s,
            "release": release(),
        }
        document = {
            "coordinator": about,
            "models": [
                asdict(each.info) | {"age_s": each.age_s, "age_is_least": each.age_is_least}
                for each in snapshot.models
            ],
            "events_last": snapshot.last_event,
        }
        return json.dumps(document).encode()

    async def model(self, request: Request) -> Response:
        """One model with its next workers. `next`: the parameters of the next page, or null."""
        name = request.path_params.get("model") or text_of(request, "name") or ""
        after, incarnation = text_of(request, "after"), text_of(request, "incarnation")
        place = None if after is None else (after, incarnation)
        question = partial(self._ask, lambda core, now: model_page(core, now, name, place))
        found = await self._questions.ask(("model", name, place), question, host_of(request))
        if found is None:
            raise HTTPException(404, f"no model {name[:100]!r} is known here")
        info, more = found
        following = None
        if more:
            last = info.workers[-1]
            following = {"after": last.name, "incarnation": last.incarnation}
        return json_answer({"model": asdict(info), "next": following})

    async def explain(self, request: Request) -> Response:
        """Where the seconds of a group's update went; of the newest that fits."""
        model, group = text_of(request, "model"), text_of(request, "group")
        version = number_of(request, "version")
        if model is None:
            raise HTTPException(400, "give model=NAME, and perhaps version=NUMBER and group=NAME")
        question = partial(
            self._ask,
            lambda core, now: explained(core.cluster, now, model, version, group),
        )
        try:
            found = await self._questions.ask(
                ("explain", model, version, group), question, host_of(request)
            )
        except VersionUnavailable as error:
            raise HTTPException(404, str(error)) from None
        except TensorHubError as error:
            raise HTTPException(400, str(error)) from None
        return json_answer(asdict(found))

    async def updates(self, request: Request) -> Response:
        """The newest updates, newest first."""
        model = text_of(request, "model")
        question = partial(self._ask, lambda core, now: core.observations.updates(now, model))
        rows = await self._questions.ask(("updates", model), question, host_of(request))
        return json_answer({"updates": [asdict(each) for each in rows]})

    async def _events_after(self, number: int) -> tuple[str, tuple[ClusterEvent, ...], bool]:
        """What the ids of this coordinator's events begin with, some events after that number, and
        whether there are more.
        """
        return await self._ask(
            lambda core, now: (
                f"{core.cluster.id[:12]}.{core.cluster.epoch}",
                *core.observations.events_after(number),
            )
        )


def show_coordinator(
    endpoint: Endpoint, candidate: Candidate, post: Post, secrets: Sequence[bytes]
) -> None:
    """Begin to serve it, once it listens."""
    endpoint.start(lambda: CoordinatorPages(candidate, post, secrets, endpoint.host).application())
