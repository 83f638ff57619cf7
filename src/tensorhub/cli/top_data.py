"""What `tensorhub top` asks, and what it remembers between its questions: events, progress, ages.

Responsible for `Seen`, everything that a screen shows. Not responsible for showing it (`top_rows`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import tensorhub
from tensorhub.api.tools import events_page, recent_updates
from tensorhub.errors import (
    CoordinatorUnavailable,
    OperationTimeout,
    VersionUnavailable,
)
from tensorhub.observed import ClusterEvent, UpdateRow
from tensorhub.types import ModelInfo

WORKERS_MAX = 64  # of a model whose rows are asked for; larger ones are counted
EVENTS_KEPT = 200
RATE_S = 3.0  # over which a rate is taken
SKEW_S = 2.0  # less than that between two clocks is not known

Clock = Callable[[], float]
ShardKey = tuple[str, int]  # replica, rank


@dataclass(frozen=True, slots=True)
class Seen:
    """All that is known at one time. Times are seconds since 1970, by this machine's clock.

    `models`: all, in counts, by name. `chosen`: the model that is shown, "" if there is none.
    `rows`: all of it; None: it has more than `WORKERS_MAX` workers. `published`: when versions of
    any model became visible, as far as that is known. `since`: when the coordinator had its state,
    or `top` began to look; all other versions are older. `fault`: why no answer has come since
    `answered_at`; then all else is as it was. `ahead_s`: of the coordinator's clock, if the clocks
    differ.
    """

    at: float
    address: str
    since: float
    answered_at: float
    models: tuple[ModelInfo, ...] = ()
    chosen: str = ""
    rows: ModelInfo | None = None
    updates: tuple[UpdateRow, ...] = ()
    events: tuple[ClusterEvent, ...] = ()  # the newest last
    published: Mapping[tuple[str, int], float] = field(default_factory=dict)
    rates: Mapping[ShardKey, float] = field(default_factory=dict)  # bytes/s of what is filled now
    fault: str = ""
    ahead_s: float = 0.0

    @property
    def gone_s(self) -> float:
        """So long the coordinator has given no answer, though it was asked."""
        return max(0.0, self.at - self.answered_at) if self.fault else 0.0

    @property
    def model(self) -> ModelInfo | None:
        """The chosen one, in counts."""
        return next((each for each in self.models if each.model == self.chosen), None)


class Watch:
    """Looks at a cluster through a hub, again and again."""

    def __init__(self, hub: tensorhub.Hub, address: str, clock: Clock = time.time) -> None:
        self._hub, self._clock = hub, clock
        self.seen = Seen(clock(), address, clock(), clock())
        self._after, self._epoch = 0, -1  # of the events that were read; of no coordinator
        self._events = deque[ClusterEvent](maxlen=EVENTS_KEPT)
        self._since = self.seen.since
        self._published: dict[tuple[str, int], float] = {}
        self._chunks: dict[ShardKey, deque[tuple[float, int]]] = {}  # of each fill, when how many
        self._ahead_s: float | None = None  # of events that were heard as they happened, the most

    async def look(self, model: str | None, timeout_s: float) -> Seen:
        """What there is now; what there was, if the coordinator does not answer. `model`: to choose
        (None: the one with the newest version).

        Raises what asking again does not help with.
        """
        try:
            await self._ask(model, timeout_s)
        except (CoordinatorUnavailable, OperationTimeout) as error:
            if not error.retryable:
                raise
            self.seen = replace(self.seen, at=self._clock(), fault=str(error))
        return self.seen

    async def _ask(self, model: str | None, timeout_s: float) -> None:
        models = await self._hub.describe(None, timeout_s, limit=0)
        await self._read_events(timeout_s)
        names = [each.model for each in models]
        newest = max(self._published, key=self._published.__getitem__, default=("", 0))[0]
        chosen = model if model is not None else newest if newest in names else "".join(names[:1])
        counts = next((each.summary for each in models if each.model == chosen), None)
        rows, updates = None, tuple[UpdateRow, ...]()
        if counts is not None:
            try:
                if counts.workers <= WORKERS_MAX:
                    rows = await self._hub.describe(chosen, timeout_s, limit=WORKERS_MAX)
                updates = await recent_updates(self._hub, chosen, timeout_s)
            except VersionUnavailable:
                rows = None  # the model has gone meanwhile
        now = self._clock()
        ahead_s = self._ahead_s if abs(self._ahead_s or 0.0) > SKEW_S else None
        self.seen = Seen(
            now,
            self.seen.address,
            self._since - (ahead_s or 0.0),
            now,
            models,
            chosen,
            rows,
            updates,
            tuple(self._events),
            {key: at - (ahead_s or 0.0) for key, at in self._published.items()},
            self._rates(rows, now),
            ahead_s=ahead_s or 0.0,
        )

    async def _read_events(self, timeout_s: float) -> None:
        """What has happened since the last question."""
        while True:
            epoch = self._epoch if self._epoch >= 0 else None
            page = await events_page(self._hub, self._after, epoch, timeout_s)
            is_following = page.epoch == self._epoch
            if not is_following:
                self._events.clear()
            self._after, self._epoch = page.following, page.epoch
            for event in page.events:
                self._events.append(event)
                if event.kind == "published" and event.version is not None:
                    self._published.pop((event.model, event.version), None)  # the newest last
                    self._published[event.model, event.version] = event.at
                elif event.kind == "serving":
                    self._since = min(self._since, event.at)
            while len(self._published) > 4 * EVENTS_KEPT:
                del self._published[next(iter(self._published))]
            if page.events and (is_following or page.events[-1].at > self._clock()):
                lead_s = page.events[-1].at - self._clock()
                self._ahead_s = lead_s if self._ahead_s is None else max(self._ahead_s, lead_s)
            if not page.more:
                return

    def _rates(self, rows: ModelInfo | None, now: float) -> dict[ShardKey, float]:
        """Of each shard that is filled, as if all of the version's shards were of one size."""
        nbytes = {view.version: view.nbytes for view in rows.versions} if rows is not None else {}
        samples, rates = dict[ShardKey, deque[tuple[float, int]]](), dict[ShardKey, float]()
        for replica in rows.replicas if rows is not None else ():
            for shard in replica.shards:
                if shard.state != "filling":
                    continue
                key = replica.replica, shard.rank
                kept = samples[key] = self._chunks.get(key) or deque()
                if kept and kept[-1][1] > shard.chunks_verified:
                    kept.clear()  # it began anew
                kept.append((now, shard.chunks_verified))
                while len(kept) > 2 and now - kept[1][0] >= RATE_S:
                    kept.popleft()
                (then, before), size = kept[0], nbytes.get(replica.version, 0) / len(replica.shards)
                if now > then:
                    share = (shard.chunks_verified - before) / max(1, shard.chunks)
                    rates[key] = share * size / (now - then)
        self._chunks = samples
        return rates
