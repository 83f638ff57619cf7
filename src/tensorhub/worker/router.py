"""Routes each message of the coordinator: to a handle, to the asker of a question, or to the worker
itself.

At the beginning of a session it says in which order the worker restates its wishes and its content.

A message names its subject in one of three ways: by a request, with the answer going to the asker;
by a registration; or by a rank of a group. Only this module keeps the worker's handles (of any kind
`H`) under these names. The worker's own questions (`runtime.worker.coordinator_client`) take their
numbers from this module's iterator, so no two questions share an answer.

Responsible for messages about an unknown or former subject: an answer that comes twice, a rank that
has left, a registration that has ended. Not responsible for connections, nor for what a handle does
with a message (`worker.member`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar, assert_never

from tensorhub import messages
from tensorhub.errors import RegistrationError
from tensorhub.worker.registration_session import Shard

H = TypeVar("H")


@dataclass(frozen=True, slots=True)
class Deliver(Generic[H]):
    """This handle's member receives it."""

    handle: H
    message: messages.ToRank


@dataclass(frozen=True, slots=True)
class Examine(Generic[H]):
    """This handle looks at its memory, and answers."""

    handle: H
    question: messages.DigestAgain | messages.TellDigests


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a question of the worker itself, unless the question is answered or given up
    already.
    """

    message: (
        messages.Done
        | messages.Refused
        | messages.ManifestReply
        | messages.PublicationReply
        | messages.VersionReply
        | messages.Description
        | messages.Events
        | messages.Explained
        | messages.Updates
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """Say this at once: no handle here could answer."""

    message: messages.FromWorker


# A bare message concerns the worker itself.
Routed = (
    Deliver[H]
    | Examine[H]
    | Answered
    | Reply
    | messages.Announce
    | messages.CutReader
    | messages.MakeCopy
    | messages.DropCopy
)


@dataclass(frozen=True, slots=True)
class LoseState(Generic[H]):
    """The coordinator has lost its state: this handle's member hears of it
    (`Member.state_lost`).
    """

    handle: H


@dataclass(frozen=True, slots=True)
class Resume(Generic[H]):
    """This handle's member restates itself over the new session (`Member.connected`)."""

    handle: H


class Anew(Enum):
    """The worker's own steps over a new session."""

    FORGET_VERSIONS = "what was newest is nothing to the coordinator, which has lost its state"
    WATCH = "say which models are watched"
    PIN = "say which versions are pinned"


Welcomed = LoseState[H] | Resume[H] | Anew


class Router(Generic[H]):
    """The router of one worker. `numbers`: of requests, each used once."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.handles: dict[str, H] = {}  # by registration, in the order in which they came
        self._numbers = numbers
        # by (model, group, rank): a registration that has not left
        self._at: dict[tuple[str, str, int], str] = {}
        # by request that is not answered yet: a registration that has not ended
        self._asked: dict[int, str] = {}
        self._registered: dict[
            str, int
        ] = {}  # by registration: its Register that was answered last, which may be asked for again
        self._coordinator: messages.Welcome | None = None  # of the newest session
        self.losses = 0  # how often a coordinator came that lacks what the one before it has said

    def __repr__(self) -> str:
        return f"<Router: {len(self.handles)} handles, {len(self._asked)} without an answer>"

    @property
    def is_empty(self) -> bool:
        """Whether the router keeps no handle and no request."""
        return not (self.handles or self._at or self._asked or self._registered)

    @property
    def cluster(self) -> str:
        """The id of the cluster that this worker was welcomed in last; "": of none yet."""
        return self._coordinator.cluster if self._coordinator is not None else ""

    @property
    def epoch(self) -> int:
        """Of the coordinator that has welcomed this worker last: another one after each restart."""
        return self._coordinator.epoch if self._coordinator is not None else 0

    @property
    def term(self) -> str:
        """Of that coordinator; "": of none, or of one of an older release."""
        return self._coordinator.term if self._coordinator is not None else ""

    # -- the handles

    def check_free(self, model: str, group: str, rank: int) -> None:
        """Raise RegistrationError if this rank is registered here."""
        if (model, group, rank) in self._at:
            raise RegistrationError(
                f"rank {rank} of group {group!r} of {model!r} is registered by this worker "
                f"already: "
                "close it first, or take another group name (two sets of one model in one process "
                "need two groups)"
            )

    def add(self, shard: Shard, handle: H) -> None:
        """From now on the handle gets the messages that concern it."""
        self._at[shard.model, shard.group, shard.rank] = shard.registration
        self.handles[shard.registration] = handle

    def leave(self, shard: Shard) -> None:
        """The handle leaves: its rank is free at once, even if its end takes time."""
        name = shard.model, shard.group, shard.rank
        if self._at.get(name) == shard.registration:
            del self._at[name]

    def remove(self, shard: Shard) -> None:
        """The handle has ended, and does not wait for its answers any more."""
        self.leave(shard)
        self.handles.pop(shard.registration, None)
        self._registered.pop(shard.registration, None)
        for request in [
            number for number, asker in self._asked.items() if asker == shard.registration
        ]:
            del self._asked[request]

    def new_request(self, shard: Shard) -> int:
        """A number for a question of that handle."""
        number = next(self._numbers)
        self._asked[number] = shard.registration
        return number

    def asker(self, request: int) -> H | None:
        """The handle that waits for that answer."""
        return self.handles.get(self._asked.get(request, ""))

    def rank_at(self, model: str, group: str, rank: int) -> H | None:
        """The handle that has registered as that rank, and has not left."""
        return self.handles.get(self._at.get((model, group, rank), ""))

    # -- messages

    def welcomed(self, message: messages.Welcome) -> list[Welcomed[H]]:
        """A session is up. If the coordinator is a new cluster, or has an older state than its
        predecessor, no state may go back silently (R2, G3): the loss comes first. Pins are restated
        after the held content, so that there is something to pin.
        """
        before, self._coordinator = self._coordinator, message
        self._asked.clear()  # no earlier question is answered over the new session
        self._registered.clear()
        steps = list[Welcomed[H]]()
        if before is not None and _is_behind(message, before):
            self.losses += 1
            steps = [*map(LoseState, self.handles.values()), Anew.FORGET_VERSIONS]
        return [*steps, Anew.WATCH, *map(Resume, self.handles.values()), Anew.PIN]

    def route(self, message: messages.FromCoordinator) -> list[Routed[H]]:
        """The receivers of this message, in order."""
        match message:
            case messages.Registered():
                asker = self._asked.get(message.request, "")
                if asker in self.handles:
                    self._registered[asker] = message.request
                return self._tell(self._answer(message.request), message)
            case messages.RegisterAgain():
                return self._tell(
                    self._answer(message.request) or self._answered(message.request), message
                )
            case messages.LeaveGranted():
                return self._tell(self._answer(message.request), message)
            case messages.Done() | messages.Refused() | messages.ManifestReply():
                return self._tell(self._answer(message.request), message) or [Answered(message)]
            case messages.PublicationReply() | messages.VersionReply() | messages.Description():
                return [Answered(message)]
            case messages.Events() | messages.Explained() | messages.Updates():
                return [Answered(message)]
            case messages.Revoked() | messages.SetRetained():
                return self._tell(self.handles.get(message.registration), message)
            case (
                messages.Start()
                | messages.ReadyAgain()
                | messages.CheckCoverage()
                | messages.Write()
                | messages.AddSource()
                | messages.DropSource()
                | messages.Compare()
                | messages.Outcome()
            ):
                key = message.key
                return self._tell(self.rank_at(key.model, key.group, message.rank), message)
            case messages.EpochChanged():
                group = message.model, message.group
                return [
                    Deliver(self.handles[there], message)
                    for name, there in self._at.items()
                    if name[:2] == group
                ]
            case messages.DigestAgain():
                handle = self.handles.get(message.registration)
                missing = messages.DigestedAgain(message.inquiry, message.registration, None)
                return [Examine(handle, message) if handle is not None else Reply(missing)]
            case messages.TellDigests():
                handle = self.handles.get(message.registration)
                of = message.selection, message.shard
                nothing = messages.Digests(
                    message.registration, message.generation, 0, (), b"", True, *of
                )
                return [Examine(handle, message) if handle is not None else Reply(nothing)]
            case (
                messages.Announce()
                | messages.CutReader()
                | messages.MakeCopy()
                | messages.DropCopy()
            ):
                return [message]
            case (
                messages.HeartbeatAck()
                | messages.Welcome()
                | messages.Dismissed()
                | messages.Advice()
            ):
                return []  # the session's own
            case _:
                assert_never(message)

    def _answer(self, request: int) -> H | None:
        """The handle that has asked, and was not answered yet."""
        return self.handles.get(self._asked.pop(request, ""))

    def _answered(self, request: int) -> H | None:
        """The handle of that answered Register. The coordinator wants it again once it knows the
        layout of the group.
        """
        found = (name for name, answered in self._registered.items() if answered == request)
        return self.handles.get(next(found, ""))

    @staticmethod
    def _tell(handle: H | None, message: messages.ToRank) -> list[Routed[H]]:
        return [] if handle is None else [Deliver(handle, message)]


def _is_behind(message: messages.Welcome, before: messages.Welcome) -> bool:
    """Whether what the coordinator before has said may be unknown to this one: of another cluster,
    or on an older copy of the state, on which the same epoch may come again.
    """
    if (message.cluster, message.epoch) != (before.cluster, before.epoch):
        return message.cluster != before.cluster or message.epoch < before.epoch
    return "" not in (message.term, before.term) and message.term != before.term
