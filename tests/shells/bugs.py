"""Deliberate bugs of the shells and lanes: the proof that the seeds can find one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock
from weakref import WeakSet

import anyio

from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control.hearing import Hearing
from tensorhub.runtime.control.link import CoordinatorLink
from tensorhub.runtime.data.lanes import PullRunner
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.worker.coordinator_client import CoordinatorClient
from tensorhub.transport.one_sided import OneSidedSession
from tensorhub.worker.member import Member


def cancelled_question() -> tuple[Any, str, Callable[..., Any]]:
    """A question that is cancelled stays registered."""
    ask = CoordinatorClient._ask

    async def leaking(client: CoordinatorClient, *given: Any) -> Any:
        try:
            return await ask(client, *given)
        except anyio.get_cancelled_exc_class():
            client._waiting[next(client._numbers)] = (anyio.Event(), [])
            raise

    return CoordinatorClient, "_ask", leaking


def forgotten_reconnect() -> tuple[Any, str, Callable[..., Any]]:
    """After a reconnect nothing of what is unanswered is said again."""
    connected, before = Member.connected, WeakSet[Member]()

    def once(member: Member, *given: Any) -> Any:
        actions = connected(member, *given)
        if member in before:
            return []
        before.add(member)
        return actions

    return Member, "connected", once


def handshake_without_deadline() -> tuple[Any, str, Callable[..., Any]]:
    """The deadline of a handshake is not applied."""
    handshake = MessageStream.handshake

    async def patient(stream: Any, its: Any, timeout_s: float) -> Any:
        return await handshake(stream, its, 1e9)

    return MessageStream, "handshake", patient


def swallowed_silence() -> tuple[Any, str, Callable[..., Any]]:
    """What the heartbeat's task raises is swallowed: a silent session is never given up."""
    beat = CoordinatorLink._beat

    async def quiet(link: CoordinatorLink, welcomed: anyio.Event) -> None:
        with contextlib.suppress(Exception):
            await beat(link, welcomed)

    return CoordinatorLink, "_beat", quiet


def unclosed_stream() -> tuple[Any, str, Callable[..., Any]]:
    """A stream of messages is not closed at its end."""

    async def nothing(stream: Any) -> None:
        return

    return MessageStream, "aclose", nothing


def hasty_fence() -> tuple[Any, str, Callable[..., Any]]:
    """The fence does not wait for reads that run."""

    async def hasty(owner: SharedOwner, registration: Any, timeout_s: float = 0.0) -> None:
        with owner._changed:
            owner._close(registration)

    return SharedOwner, "fence_async", hasty


def unchecked_word() -> tuple[Any, str, Callable[..., Any]]:
    """A one-sided reader does not look whether the memory may still be read after its copy."""

    @contextlib.contextmanager
    def believing(session: Any, word: int) -> Iterator[Callable[[int], None]]:
        yield lambda nbytes: None

    return OneSidedSession, "_proving", believing


def unwoken_lane() -> tuple[Any, str, Callable[..., Any]]:
    """A lane that waits is not woken when its source is dropped."""

    def silent(runner: PullRunner, lease: Any) -> None:
        lane = runner._lanes.get(lease)
        if lane is not None:
            lane.cutter.cut()
            with runner._changed:
                runner._pull.drop_source(lease)

    return PullRunner, "drop_source", silent


def deaf_turn() -> tuple[Any, str, Callable[..., Any]]:
    """The server loses every hundredth message."""
    take, count = Hearing.take, iter(range(10**9))

    def losing(hearing: Hearing, session: Any, message: Any) -> None:
        if next(count) % 100 != 99:
            take(hearing, session, message)

    return Hearing, "take", losing


BUGS = {
    each.__name__: each
    for each in (
        cancelled_question,
        forgotten_reconnect,
        handshake_without_deadline,
        swallowed_silence,
        unclosed_stream,
        hasty_fence,
        unchecked_word,
        unwoken_lane,
        deaf_turn,
    )
}


def planted(name: str) -> contextlib.AbstractContextManager[object]:
    """For the length of a block."""
    return mock.patch.object(*BUGS[name]())
