"""A worker's own questions to its coordinator. A question is asked again after a lost
connection.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import anyio

from tensorhub import messages
from tensorhub.errors import (
    OperationTimeout,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
    unreachable,
)
from tensorhub.model.stamps import Stamp
from tensorhub.observed import Explanation, UpdateRow
from tensorhub.types import ModelInfo, ReplicaView, Selector, VersionInfo, WorkerView

Answer = (
    messages.Done
    | messages.Refused
    | messages.Description
    | messages.ManifestReply
    | messages.PublicationReply
    | messages.Events
    | messages.Explained
    | messages.Updates
    | messages.VersionReply
)

LOOK_S = 0.05  # how often it is looked whether there is a session again
EVENTS_EVERY_S = 0.5  # how often it is asked for what happens
PAGE_BYTES_MAX = 2**15  # of the ids and roots in one message of more than one version


class MessageSink(Protocol):
    """A worker's connection to its coordinator. `say` drops a message if there is no session."""

    @property
    def online(self) -> bool: ...

    @property
    def fault(self) -> TensorHubError | None:
        """Why there is no session, as far as it is known."""

    def say(self, message: messages.FromWorker) -> None: ...


def _random_id() -> str:
    return secrets.token_hex(12)


class CoordinatorClient:
    """Each question has a number of its own, and ends with its answer or at its deadline."""

    def __init__(
        self, link: MessageSink, numbers: Iterator[int], new_id: Callable[[], str] = _random_id
    ) -> None:
        """`new_id` makes ids that are unique for all time, for requests that are repeated and must
        be done once.
        """
        self.new_id = new_id
        self._link = link
        self._numbers = numbers
        self._waiting: dict[int, tuple[anyio.Event, list[Answer]]] = {}
        self._rolling_back = anyio.Lock()

    def __repr__(self) -> str:
        return f"<CoordinatorClient: {len(self._waiting)} without an answer>"

    def answered(self, message: Answer) -> None:
        waiting = self._waiting.get(message.request)
        if waiting is not None:
            waiting[1].append(message)
            waiting[0].set()

    def lost(self) -> None:
        """The session is over: no answer will come over it."""
        for event, _ in self._waiting.values():
            event.set()

    async def ask(
        self, make: Callable[[int], messages.FromWorker], what: str, timeout_s: float
    ) -> Answer:
        """Raises what the coordinator refuses with, CoordinatorUnavailable, AuthenticationFailed,
        OperationTimeout.
        """
        return await self._ask(make, what, timeout_s, anyio.current_time() + timeout_s)

    async def _ask(
        self,
        make: Callable[[int], messages.FromWorker],
        what: str,
        timeout_s: float,
        deadline: float,
    ) -> Answer:
        """As `ask`, where several questions share `timeout_s` seconds, which end at `deadline`."""
        with anyio.CancelScope(deadline=deadline):
            while True:
                request = next(self._numbers)
                event, answers = anyio.Event(), list[Answer]()
                self._waiting[request] = (event, answers)
                try:
                    if self._link.online:
                        self._link.say(make(request))
                        await event.wait()
                    else:
                        await anyio.sleep(LOOK_S)
                finally:
                    del self._waiting[request]
                if answers:
                    if isinstance(answers[0], messages.Refused):
                        raise answers[0].error.error()
                    return answers[0]
        if not self._link.online:
            text = f"{what}: the coordinator could not be reached within {timeout_s:g} s"
            raise unreachable(text, self._link.fault)
        raise OperationTimeout(f"{what}: the coordinator did not answer within {timeout_s:g} s")

    async def describe(
        self,
        model: str | None,
        timeout_s: float,
        version: int | None = None,
        after: WorkerView | str | None = None,
        workers_max: int | None = None,
    ) -> tuple[ModelInfo, ...]:
        """What the coordinator knows of one model, or a part of that (see `messages.Describe`), or
        of all.

        A large model comes in parts. Each worker is then as it is at some time during this call.
        """
        deadline = anyio.current_time() + timeout_s
        if model is not None:
            place = after if isinstance(after, str | None) else after.name
            incarnation = None if isinstance(after, str | None) else after.incarnation
            first = messages.Describe(0, model, place, incarnation, version, workers_max)
            answer = await self._description(first, timeout_s, deadline)
            return (await self._whole(answer, version, workers_max, timeout_s, deadline),)
        found: list[ModelInfo] = []
        is_last = False
        while not is_last:
            question = messages.Describe(
                0, None, found[-1].model if found else None, workers_max=workers_max
            )
            answer = await self._description(question, timeout_s, deadline)
            found += answer.models
            if answer.is_cut:
                found[-1] = await self._whole(answer, None, None, timeout_s, deadline)
            is_last = not (answer.more and answer.models)
        return tuple(found)

    async def _description(
        self, question: messages.Describe, timeout_s: float, deadline: float
    ) -> messages.Description:
        answer = await self._ask(
            lambda number: replace(question, request=number), "describe", timeout_s, deadline
        )
        assert isinstance(answer, messages.Description)
        return answer

    async def _whole(
        self,
        answer: messages.Description,
        version: int | None,
        workers_max: int | None,
        timeout_s: float,
        deadline: float,
    ) -> ModelInfo:
        """The last model of an answer, with the parts that it lacks; without them, if the model is
        forgotten meanwhile.
        """
        parts = [answer.models[-1]]
        left = None if workers_max is None else workers_max - len(parts[0].workers)
        while answer.is_cut and parts[-1].workers and left != 0:
            last = parts[-1].workers[-1]
            question = messages.Describe(
                0, parts[0].model, last.name, last.incarnation, version, left
            )
            try:
                answer = await self._description(question, timeout_s, deadline)
            except VersionUnavailable:
                break
            parts += answer.models
            left = None if left is None else left - len(parts[-1].workers)
        return joined(parts)

    async def manifest(self, info: VersionInfo, shard: int, timeout_s: float) -> bytes:
        """The encoded manifest of one shard of a version. VersionUnavailable if it has no such
        shard, or is no more.
        """
        what = f"manifest of shard {shard} of version {info.version} of {info.model!r}"
        answer = await self.ask(
            lambda request: messages.GetManifest(request, info.model, info.content_id, shard),
            what,
            timeout_s,
        )
        assert isinstance(answer, messages.ManifestReply)
        return answer.manifest

    async def publication(
        self, model: str, selector: Selector, timeout_s: float
    ) -> messages.PublicationReply:
        """The publication of the version that a selector means now. VersionUnavailable if there is
        none.
        """
        what = f"what was published of {model!r}"
        answer = await self.ask(
            lambda request: messages.GetPublication(request, model, selector), what, timeout_s
        )
        assert isinstance(answer, messages.PublicationReply)
        return answer

    async def part(self, part_id: str, timeout_s: float) -> bytes:
        """A part of a publication. VersionUnavailable if it is not known any more."""
        answer = await self.ask(
            lambda request: messages.GetPart(request, part_id), "a part of a publication", timeout_s
        )
        assert isinstance(answer, messages.ManifestReply)
        return answer.manifest

    async def explain(
        self, model: str, version: int | None, group: str | None, timeout_s: float
    ) -> Explanation:
        """Where the seconds of an update went. VersionUnavailable if none is known."""
        answer = await self.ask(
            lambda request: messages.Explain(request, model, version, group), "explain", timeout_s
        )
        assert isinstance(answer, messages.Explained)
        return answer.explanation

    async def events(
        self, after: int, epoch: int | None, timeout_s: float, *, waits: bool
    ) -> messages.Events:
        """A page of what has happened after that event of the coordinator of that epoch (None: not
        known); all that is known, if it is another one. `waits`: until there is something.
        """
        while True:
            number = after
            answer = await self.ask(
                lambda request: messages.GetEvents(request, number),  # noqa: B023 - called at once
                "events",
                timeout_s,
            )
            assert isinstance(answer, messages.Events)
            if after and (epoch not in (None, answer.epoch) or answer.following < after):
                after, epoch = 0, answer.epoch
            elif answer.events or not waits:
                return answer
            else:
                await anyio.sleep(EVENTS_EVERY_S)

    async def updates(self, model: str, timeout_s: float) -> tuple[UpdateRow, ...]:
        """The recent updates of a model, the newest first."""
        answer = await self.ask(
            lambda request: messages.GetUpdates(request, model), "updates", timeout_s
        )
        assert isinstance(answer, messages.Updates)
        return answer.rows

    async def check_number(self, model: str, version: int, timeout_s: float) -> None:
        """Raise VersionConflict if `version` could not be published now."""
        await self.ask(
            lambda request: messages.Check(request, model, version),
            f"version {version} of {model!r}",
            timeout_s,
        )

    async def check_stamp(self, stamp: Stamp, timeout_s: float) -> VersionInfo:
        """The version of a stamp. VersionUnavailable: it is not known. IntegrityError: it is
        another content.
        """
        said = stamp.model, stamp.lineage, stamp.version, stamp.content_id, stamp.root
        answer = await self.ask(
            lambda request: messages.CheckStamp(request, *said), f"stamp {stamp}", timeout_s
        )
        assert isinstance(answer, messages.VersionReply)
        return answer.version

    async def nothing_published(self, model: str, timeout_s: float) -> bool:
        """Whether no version of `model` was ever published. Raises as `ask`."""
        try:
            await self.check_number(model, 0, timeout_s)
        except VersionConflict:
            return False
        return True

    async def rollback(self, model: str, to: int, timeout_s: float) -> None:
        """Begin a new lineage after version `to`; durable on return."""
        what = f"rollback of {model!r} to {to}"
        # one at a time: the coordinator cannot remember any number of them
        with anyio.move_on_after(timeout_s) as turn:
            await self._rolling_back.acquire()
        if turn.cancelled_caught:
            raise OperationTimeout(
                f"{what}: an earlier rollback of this worker was not over within {timeout_s:g} s"
            )
        try:
            # one id for all retries: a second id would retire versions that were published since
            ident = self.new_id()
            left_s = max(0.0, turn.deadline - anyio.current_time())
            await self.ask(
                lambda request: messages.Rollback(request, ident, model, to), what, left_s
            )
        finally:
            self._rolling_back.release()

    async def retain(self, model: str, latest: int, timeout_s: float) -> None:
        """Keep the newest `latest` versions; durable, and known to every live holder, on return."""
        await self.ask(
            lambda request: messages.Retain(request, model, latest),
            f"retain of {model!r}",
            timeout_s,
        )

    async def restore(
        self,
        model: str,
        cluster: str,
        lineage: int,
        mark: int,
        versions: Sequence[messages.Restored],
        timeout_s: float,
    ) -> None:
        """Tell of the versions of an archive, the newest first, page by page; durable on return.
        The versions of the pages before an error stay restored.
        """
        deadline = anyio.current_time() + timeout_s
        newest = sorted(versions, key=lambda each: -each.version.version)
        what = f"restore versions of {model!r}"
        for page in [*_paged(newest)] or [()]:
            said = messages.Restore(0, model, cluster, lineage, mark, page)
            await self._ask(partial(_numbered, said), what, timeout_s, deadline)


def _numbered(message: messages.Restore, request: int) -> messages.Restore:
    return replace(message, request=request)


def _paged(versions: Sequence[messages.Restored]) -> Iterator[tuple[messages.Restored, ...]]:
    """As many in a message as it can carry."""
    page: list[messages.Restored] = []
    nbytes = 0
    for each in versions:
        size = len(each.manifest_ids) + len(each.roots)
        if page and (len(page) == messages.RESTORED_MAX or nbytes + size > PAGE_BYTES_MAX):
            yield tuple(page)
            page, nbytes = [], 0
        page.append(each)
        nbytes += size
    if page:
        yield tuple(page)


def joined(parts: Sequence[ModelInfo]) -> ModelInfo:
    """One model of its parts, which arrived one after the other. Versions and counts are those of
    the first part.
    """
    replicas: dict[str, ReplicaView] = {}
    for view in (view for part in parts for view in part.replicas):
        before = replicas.get(view.replica)
        shards = {
            shard.rank: shard
            for each in (before, view)
            if each is not None
            for shard in each.shards
        }
        replicas[view.replica] = replace(
            view, shards=tuple(shards[rank] for rank in sorted(shards))
        )
    return replace(
        parts[0],
        replicas=tuple(
            sorted(replicas.values(), key=lambda view: (view.group, view.version, view.replica))
        ),
        leases=tuple({view.lease: view for part in parts for view in part.leases}.values()),
        workers=tuple({view.incarnation: view for part in parts for view in part.workers}.values()),
    )
