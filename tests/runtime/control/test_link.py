"""Several addresses of a coordinator: the first that takes the connection, whatever the others do
with it; and one at which nobody listens yet.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import msgpack
import pytest

import tensorhub
from tensorhub import sync
from tensorhub.errors import (
    AuthenticationFailed,
    CoordinatorUnavailable,
    ProtocolError,
    StateError,
    TensorHubError,
)
from tensorhub.messages import (
    VERSIONS,
    Dismissed,
    FromCoordinator,
    FromWorker,
    GetManifest,
    Join,
    Refused,
)
from tensorhub.protocol import codec
from tensorhub.protocol.frames import PREFACE_BYTES, preface
from tensorhub.protocol.handshake import NONCE_BYTES, ServerHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.stream import MessageStream
from tensorhub.protocol.tags import TAGS
from tensorhub.runtime.control import search as searching
from tensorhub.runtime.control.addresses import Addresses
from tensorhub.runtime.control.link import CoordinatorLink
from tensorhub.runtime.control.search import Search
from tensorhub.types import Incarnation, Location, Options
from tests.rig import (
    OPTIONS,
    WAIT_S,
    Restartable,
    cluster,
    connect,
    holds,
    nothing_left,
    tensors,
    until,
)

PATIENT = replace(OPTIONS, coordinator_wait_s=WAIT_S)


@contextlib.contextmanager
def a_proxy_with_nobody_behind_it(connections: int, answer: bytes = b"") -> Iterator[str]:
    """It accepts so often, and answers and closes when it has heard something."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)

        def close_each() -> None:
            for _ in range(connections):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65_536)
                    connection.sendall(answer)

        closing = threading.Thread(target=close_each)
        closing.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        closing.join(WAIT_S)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed the connection during the handshake"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not a TensorHub peer"),  # whose port it is now
    ],
)
async def test_an_address_that_ends_the_handshake_is_passed_over(answer: bytes, why: str) -> None:
    """For that address alone it is a typed error; beside another address it is nothing."""
    with a_proxy_with_nobody_behind_it(2, answer) as closed:
        async with cluster("trainer") as c:
            await (await c.hubs[0].register("m", tensors(1))).publish(1)
            with pytest.raises(ProtocolError, match=why) as caught:
                async with connect([closed]):
                    pass
            assert caught.value.retryable is not bool(answer)
            target = tensors()
            async with connect([closed, c.address], "reader") as reader:
                await (await reader.register("m", target)).replicate()
                assert holds(target, 1)


async def test_a_worker_comes_again_in_the_older_version_of_its_coordinator() -> None:
    """And not for ever: a coordinator that answers so each time is an error."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)

        def answer() -> None:
            for _ in VERSIONS:
                connection, _ = listener.accept()
                with connection:
                    heard.append(connection.recv(PREFACE_BYTES, socket.MSG_WAITALL))
                    connection.sendall(preface(VERSIONS[0] - len(heard) + 1))
                    while connection.recv(65_536):
                        pass

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(ProtocolError, match="the peer speaks version 17"):
            await tensorhub.connect(
                f"tcp://127.0.0.1:{listener.getsockname()[1]}", token="", options=OPTIONS
            )
        answering.join(WAIT_S)
    assert heard == [preface(version) for version in reversed(VERSIONS)]


class Taken:
    """A connection, as far as a search knows it."""

    is_closed = False

    async def aclose(self) -> None:
        self.is_closed = True


def search(
    connect_to: Callable[[str], Awaitable[Taken]],
    given: Addresses | None = None,
    *,
    is_first: bool = True,
) -> Search:
    given = given or Addresses(["tcp://a:1", "tcp://b:1"])
    connect_: Any = connect_to
    return Search(given, connect_, lambda error: None, WAIT_S, is_first=is_first)


async def test_of_two_addresses_that_answer_at_once_one_connection_is_closed() -> None:
    made: list[Taken] = []
    both = anyio.Event()

    async def connect_to(address: str) -> Taken:
        made.append(taken := Taken())
        if len(made) == 1:
            await both.wait()
        both.set()
        return taken

    found: object = await search(connect_to).run()
    assert sorted((each is found, each.is_closed) for each in made) == [
        (False, True),
        (True, False),
    ]


async def test_an_error_about_several_addresses_says_where_to_look_if_none_leads() -> None:
    async def connect_to(address: str) -> Taken:
        raise ConnectionRefusedError

    given = Addresses(["tcp://a:1", "tcp://b:1"])
    connect_: Any = connect_to
    with pytest.raises(CoordinatorUnavailable, match="if none leads, its log says why"):
        await Search(given, connect_, lambda error: None, 0.0, is_first=True).run()


async def test_a_leader_that_comes_up_elsewhere_during_the_search_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Moving(Addresses):
        ahead = iter(["tcp://gone:1"])

        async def look_up(self, name: str) -> list[str]:
            return [next(self.ahead, "tcp://new:1")]

    async def connect_to(address: str) -> Taken:
        if address != "tcp://new:1":
            raise ConnectionRefusedError
        return made

    monkeypatch.setattr(searching, "LOOK_UP_S", 0.0)
    made = Taken()
    with anyio.fail_after(WAIT_S):
        found: object = await search(connect_to, Moving("etcd://e:1/x")).run()
    assert found is made


async def test_an_address_that_its_name_has_no_more_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Endless(Addresses):
        count = 0

        async def look_up(self, name: str) -> list[str]:
            self.count += 1
            self._behind[name] = [f"tcp://{self.count}.example:1"]
            return list(self._behind[name])

    async def connect_to(address: str) -> Taken:
        raise ConnectionRefusedError

    monkeypatch.setattr(searching, "LOOK_UP_S", 0.0)
    monkeypatch.setattr(searching, "RECONNECT_S", 0.0)
    given = Endless("etcd://e:1/x")
    one = search(connect_to, given)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.run)
        await until(lambda: given.count > 100)
        assert len(one._pursued) < 10
        tasks.cancel_scope.cancel()


async def test_a_worker_that_was_welcomed_once_outlasts_refusals() -> None:
    """The token of the coordinator is being changed, say. At first, a refusal ends the search."""
    made, refusals = Taken(), 2

    async def connect_to(address: str) -> Taken:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise AuthenticationFailed("another token")
        return made

    found: object = await search(connect_to, is_first=False).run()
    assert found is made
    refusals = 9
    with pytest.raises(AuthenticationFailed, match="another token"):
        await search(connect_to).run()


async def test_a_machine_that_does_not_answer_delays_no_other_address(tmp_path: Path) -> None:
    """Neither at first, nor after a restart; the addresses come as one text, too."""
    options = replace(OPTIONS, connect_timeout_s=1e6)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        async with nothing_left():
            coordinator = Restartable(tmp_path)
            await coordinator.start()
            given = f"{dead}, {coordinator.address}"
            async with connect(given, "worker", options) as hub:
                await coordinator.restart(hub)
            await coordinator.stop()


async def test_a_worker_without_a_coordinator_logs_each_reason_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = [[errno.ECONNREFUSED]] * 3
    link, dialled = link_that_meets([*refused, [errno.EHOSTUNREACH], *refused])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.keep, Deaf(), lambda: None)  # type: ignore[arg-type]
        await until(lambda: len(dialled) == 7)
        tasks.cancel_scope.cancel()
    assert caplog.text.count("coordinator_unreachable") == 2


@pytest.mark.parametrize(
    ("numbers", "kind", "said"),
    [
        (
            [errno.EMFILE],
            StateError,
            r"Too many open files: this process .*\(RLIMIT_NOFILE is \d+\): raise its `ulimit -n`",
        ),
        (
            [errno.ENFILE],
            StateError,
            r"this machine has too many files open: raise its sysctl fs.file-max",
        ),
        ([errno.ENOMEM], StateError, r"Cannot allocate memory: this machine has no memory left"),
        (
            [errno.ECONNREFUSED],
            CoordinatorUnavailable,
            r"tcp://127.0.0.1:1: Connection refused\): is one running there\?",
        ),
        (
            [errno.ECONNREFUSED, errno.EHOSTUNREACH],
            CoordinatorUnavailable,
            r"Connection refused; No route to host\): is one",
        ),
    ],
)
async def test_why_no_connection_could_be_made_is_said(
    numbers: list[int], kind: type[TensorHubError], said: str
) -> None:
    link, dialled = link_that_meets([numbers], Options(coordinator_wait_s=0))
    with pytest.raises(kind, match=said):
        await link.connect_first()
    assert dialled == ["127.0.0.1"]


def link_that_meets(
    faults: Iterable[list[int]], options: Options = OPTIONS
) -> tuple[CoordinatorLink, list[str]]:
    """A link, and the hosts that it has dialled: each time it meets the next of these lists of
    errors.
    """
    ahead, dialled = iter(faults), list[str]()

    async def dial(host: str, port: int) -> anyio.abc.ByteStream:
        """As anyio does it, for each address of a host."""
        dialled.append(host)
        causes = [OSError(number, os.strerror(number)) for number in next(ahead)]
        raise OSError("All connection attempts failed") from (
            causes[0] if len(causes) == 1 else ExceptionGroup("", causes)
        )

    ears = Ears()
    return CoordinatorLink(["tcp://127.0.0.1:1"], (b"",), options, ears, dial), dialled  # type: ignore[arg-type]


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_worker_that_starts_before_its_coordinator_waits_for_it(
    caplog: pytest.LogCaptureFixture, *, blocking: bool
) -> None:
    opened: list[tensorhub.Hub | sync.Hub] = []
    with socket.socket() as reserved:  # refuses until it is closed
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"

        async def join() -> None:
            if blocking:
                join_blocking = partial(sync.connect, address, token="", options=PATIENT)
                opened.append(await anyio.to_thread.run_sync(join_blocking))
            else:
                opened.append(await tensorhub.connect(address, token="", options=PATIENT))

        async with nothing_left():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(join)
                await until(lambda: "coordinator_awaited" in caplog.text)
                reserved.close()
                coordinator = await tensorhub.serve(port=port, token="", options=OPTIONS)
            hub = opened.pop()
            if isinstance(hub, sync.Hub):
                await anyio.to_thread.run_sync(hub.close)
            else:
                await hub.close()
            await coordinator.close()
    told = [
        record.getMessage()
        for record in caplog.records
        if "coordinator_awaited" in record.getMessage()
    ]
    assert len(told) == 1
    assert address in told[0]


async def test_another_token_is_refused_at_once_though_a_coordinator_is_waited_for() -> None:
    async with cluster(token="right") as c:
        with pytest.raises(AuthenticationFailed):
            await tensorhub.connect(
                c.address, token="wrong", options=Options(coordinator_wait_s=1e8)
            )


class Deaf(AsyncIterator[FromCoordinator]):
    """A connection that takes no message any more, over which the coordinator's last words come."""

    def __init__(self) -> None:
        self.tried = anyio.Event()

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        pass

    async def send(self, message: FromWorker) -> None:
        self.tried.set()
        raise ConnectionLost("the connection is gone")

    def __aiter__(self) -> AsyncIterator[FromCoordinator]:
        return self

    async def __anext__(self) -> FromCoordinator:
        await self.tried.wait()
        await anyio.wait_all_tasks_blocked()
        return Dismissed("idle")


class Ears:
    incarnation = Incarnation("worker")
    dismissals = 0

    def introduce(self) -> Join:
        return Join("worker", Location(), (), 1, 0)

    def dismissed(self) -> None:
        self.dismissals += 1


async def test_the_last_words_are_heard_also_where_nothing_can_be_said_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ears = Ears()
    link = CoordinatorLink(["tcp://127.0.0.1:1"], (b"",), Options(), ears)  # type: ignore[arg-type]
    with anyio.fail_after(WAIT_S):
        await link._hold_session(Deaf(), lambda: None)  # type: ignore[arg-type]
    assert ears.dismissals == 1
    assert str(link.fault) == "tcp://127.0.0.1:1: idle"
    assert "coordinator_lost" not in caplog.text


class Curious(Ears):
    """Asks first."""

    def __init__(self) -> None:
        self.heard = list[FromCoordinator]()
        self.answered = anyio.Event()

    def introduce(self) -> Any:
        return GetManifest(7, "m", "content", 0)

    def received(self, message: FromCoordinator) -> None:
        self.heard.append(message)
        self.answered.set()


async def test_a_session_outlasts_messages_that_one_side_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message of a younger coordinator is passed over. A question that an older coordinator lacks
    is refused to its caller.
    """
    monkeypatch.setattr(codec, "SINCE", {GetManifest: VERSIONS[1]})
    monkeypatch.setattr(
        codec, "written_for", lambda version: codec.Vocabulary[Any]("", TAGS, version=version)
    )
    ears = Curious()

    async def coordinate(stream: anyio.abc.ByteStream) -> None:
        async with MessageStream(stream, codec.FROM_WORKER, OPTIONS.frame_bytes_max) as messages:
            shaken = ServerHandshake("coordinator", "c", (b"",), b"s" * NONCE_BYTES)
            await messages.handshake(shaken, WAIT_S)
            await messages.send_encoded(msgpack.packb([2**14, "of a younger release"]))
            await ears.answered.wait()
            await messages.send(Dismissed("idle"))

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, coordinate)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        link = CoordinatorLink([f"tcp://127.0.0.1:{port}"], (b"",), OPTIONS, ears)  # type: ignore[arg-type]
        with anyio.fail_after(WAIT_S):
            messages = await link.connect_first()
            messages.version = VERSIONS[0]
            await link._hold_session(messages, lambda: None)
        tasks.cancel_scope.cancel()
    assert str(link.fault).endswith(": idle")
    (refused,) = ears.heard
    assert isinstance(refused, Refused)
    assert refused.request == 7
    assert "upgrade the peer" in str(refused.error.error())
