"""What users and unauthenticated peers get wrong: each is a typed error that says what to do, and
nobody else notices.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

import tensorhub
from tensorhub.errors import (
    AuthenticationFailed,
    CoordinatorUnavailable,
    GroupAborted,
    ProtocolError,
    StateError,
    TensorHubError,
)
from tensorhub.messages import PROTOCOL_VERSION
from tensorhub.protocol.frames import PREFACE
from tensorhub.types import Location, Options, VersionInfo
from tests.rig import CHUNK_BYTES, WAIT_S, cluster, connect, nothing_left, published, tensors
from tests.runtime.data_rig import waited_out_s

AT_ONCE = Options(
    op_timeout_s=WAIT_S, connect_timeout_s=WAIT_S, coordinator_wait_s=0, chunk_bytes=CHUNK_BYTES
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def check(error: TensorHubError, *, retryable: bool) -> None:
    assert (error.retryable, error.memory) == (retryable, "intact")


# -------------------------------------------------------------------------------------------------
# connecting, serving


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Something that listens, says `answer` to whoever connects, and hears it out."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer = listener.accept()[0]
                    with peer:
                        peer.sendall(answer)
                        while answer and peer.recv(65536):
                            pass

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            PREFACE[:-1] + bytes([PROTOCOL_VERSION + 1]),
            (
                f"speaks version {PROTOCOL_VERSION + 1} of the protocol, this side 18 or "
                f"{PROTOCOL_VERSION}: upgrade"
            ),
        ),
        (PREFACE + b"\xff\xff\xff\xff", "4294967295 bytes"),
        (PREFACE + b"\x00\x00\x00\x03abc", "."),
    ],
    ids=["version", "oversized", "garbage"],
)
async def test_not_a_coordinator(answer: bytes, text: str) -> None:
    async with nothing_left():
        with answering(answer) as address:
            with pytest.raises(ProtocolError, match=text) as caught:
                async with connect(address, options=AT_ONCE):
                    pass
            check(caught.value, retryable=False)


async def test_of_several_addresses_a_silent_one_does_not_use_up_the_time_of_the_others() -> None:
    seconds = waited_out_s()
    quick = replace(AT_ONCE, connect_timeout_s=seconds)
    async with cluster(options=AT_ONCE) as c:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            async with connect([address, c.address], options=quick) as hub:
                assert await hub.describe() == ()
            text = (
                rf"handshake took longer than {seconds:g} s, and nothing was said at all: it has "
                rf"very much to|no answer within {seconds:g} s"
            )
            with pytest.raises(CoordinatorUnavailable, match=text):
                async with connect(address, options=quick):
                    pass


async def test_open_data_listeners_beyond_loopback() -> None:
    async with cluster() as c:
        with pytest.raises(AuthenticationFailed, match="open access is for loopback only"):
            async with connect(c.address, options=Options(listen_host="0.0.0.0")):
                pass


@pytest.mark.parametrize(
    "settings",
    [
        {"name": ""},
        {"name": " "},
        {"name": "x" * 513},
        {"name": "a\nb"},
        {"location": Location(site="x" * 513)},
        {"location": Location(host="\0")},
    ],
    ids=str,
)
async def test_names_that_cannot_be_said(settings: dict[str, object]) -> None:
    async with cluster() as c:
        with pytest.raises(StateError, match="1 to 512 printable characters"):
            async with tensorhub.connect(c.address, token="", **settings):  # type: ignore[arg-type]
                pass


# --------------------------------------------------------------------------------------------------
# arguments


async def test_arguments_that_no_message_can_carry() -> None:
    """Such a message would cost the connection, again and again."""
    async with cluster("worker") as c:
        hub = c.hubs[0]
        weights = await hub.register("m", tensors(1))
        mistakes: list[Callable[[], object]] = [
            lambda: hub.wait_for("m", at_least="latest"),  # type: ignore[arg-type]
            lambda: hub.wait_for("m", at_least=1, timeout=float("nan")),
            lambda: weights.update(at_least="latest"),  # type: ignore[arg-type]
            lambda: weights.update(at_least=2**63),
            lambda: weights.update(1, at_least=1),
            lambda: weights.replicate(True),
            lambda: weights.replicate(2**63),
            lambda: weights.publish(2**63),
            lambda: weights.publish(1.0),  # type: ignore[arg-type]
            lambda: weights.publish(1.5),  # type: ignore[arg-type]
            lambda: weights.publish(np.bool_(True)),  # type: ignore[arg-type]
            lambda: weights.publish(torch.tensor(True)),  # type: ignore[arg-type]
            lambda: weights.publish(1, timeout=1e10),
            lambda: hub.register("x" * 513, tensors()),
            lambda: hub.register("m", tensors(), spot=1),  # type: ignore[arg-type]
            lambda: hub.describe("x" * 513),
            lambda: hub.describe("half a character: \ud800"),
            lambda: hub.describe(5),  # type: ignore[call-overload]
            lambda: hub.describe(version=1),  # type: ignore[call-overload]
            lambda: hub.describe(None, limit=1),
            lambda: hub.describe("m", version=-1),
            lambda: hub.describe("m", version="latest"),  # type: ignore[call-overload]
            lambda: hub.describe("m", limit=-1),
            lambda: hub.describe("m", limit=2**64),
            lambda: hub.describe("m", limit=True),
            lambda: hub.describe("m", after=""),
            lambda: hub.describe("m", after="x" * 513),
            lambda: hub.describe("x" * 513, limit=0),
            lambda: hub.retain("m", latest=1, timeout="5"),  # type: ignore[arg-type]
            lambda: tensorhub.connect(c.address, location=Location(rack=5)).__aenter__(),  # type: ignore[arg-type]
        ]
        for mistake in mistakes:
            with pytest.raises(StateError) as caught:
                await mistake()  # type: ignore[misc]
            check(caught.value, retryable=False)
        await weights.publish(1, timeout=np.float64(WAIT_S))  # numbers are numbers
        await weights.unpublish(timeout=np.float32(WAIT_S))  # type: ignore[arg-type]
        await weights.publish(2, timeout=int(WAIT_S))
        assert weights.state == "ready"


@pytest.mark.parametrize(
    "kind", [np.int64, np.uint8, torch.tensor, IntEnum("Numbers", {f"n{n}": n for n in range(64)})]
)
async def test_an_integer_may_be_of_any_library(kind: Callable[[int], Any]) -> None:
    """Each public argument that is a number of something; on the wire there are plain ones only."""
    options = Options(
        readers_max=kind(8),
        chunk_bytes=np.int64(CHUNK_BYTES),  # type: ignore[arg-type]
        shared_memory_uids=(kind(3),),
    )
    plain = (options.readers_max, options.chunk_bytes, *options.shared_memory_uids)
    assert [type(each) for each in plain] == [int, int, int]
    async with cluster("trainer", "rollout", options=replace(options, op_timeout_s=WAIT_S)) as c:
        trainer, rollout = c.hubs
        weights = await trainer.register(
            "m", tensors(1), group="g", rank=kind(0), world_size=kind(1)
        )
        reader = await rollout.register("m", tensors())
        await weights.publish(kind(3))
        assert (await rollout.wait_for("m", at_least=kind(3))).version == 3
        assert (await reader.replicate(kind(3))).version == 3
        async with rollout.pin("m", kind(3)):
            await trainer.retain("m", latest=kind(1))
        fetched = await rollout.fetch("m", kind(3), rank=kind(0))
        assert fetched.info.version == 3
        assert [
            v.version
            for v in (await rollout.describe("m", version=kind(3), limit=kind(5))).versions
        ] == [3]
        assert (
            await rollout.plan("m", tensors(), kind(3), rank=kind(0), world_size=kind(1))
        ).version.version == 3
        async with weights.mutate(kind(4)):
            pass
        assert (await reader.update(at_least=kind(4))).version == 4
        await trainer.rollback("m", to=kind(3))
        assert {type(each.version) for each in (await rollout.describe("m")).versions} <= {int}


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("tcp://::1:41337", r"in brackets: \[::1\]:41337"),
        ("tcp://fe80::2:41337", r"in brackets: \[fe80::2\]:41337"),
        ("tcp://::1", r"in brackets: \[::1\]:PORT"),
        ("::1:41337", r"in brackets: \[::1\]:41337"),
    ],
)
async def test_an_ipv6_host_without_brackets(address: str, advice: str) -> None:
    with pytest.raises(StateError, match=advice):
        tensorhub.connect(address)
    with pytest.raises(StateError, match=advice):
        Options(advertise=address.removeprefix("tcp://"))
    with pytest.raises(StateError) as caught:
        tensorhub.connect("tcp://some:where:1")
    assert "brackets" not in str(caught.value)


async def test_options_may_be_any_numbers() -> None:
    options = Options(op_timeout_s=np.float64(WAIT_S), lease_s=np.float32(10), drain_grace_s=0)  # type: ignore[arg-type]
    async with cluster("worker", options=options) as c:
        await published(c.hubs[0])
    for name in ("op_timeout_s", "lease_s"):
        for value in ("5", None, 0, -1, float("nan"), 1e9):
            with pytest.raises(
                StateError, match=rf"Options\.{name} = .*: give a number of seconds, more than 0"
            ):
                Options(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"Options\.readers_max = 2\.5: give an integer"):
        Options(readers_max=2.5)  # type: ignore[arg-type]
    assert [Options(wan_connections=each).wan_connections for each in (1, 16)] == [1, 16]
    for each in (0, 17, -1):
        with pytest.raises(StateError, match=rf"Options\.wan_connections = {each}: give 1 to 16"):
            Options(wan_connections=each)
    for value in (True, 4.0, "4", None):
        with pytest.raises(StateError, match=r"Options\.wan_connections = .*: give an integer"):
            Options(wan_connections=value)  # type: ignore[arg-type]


async def test_an_error_of_the_callers_may_say_anything() -> None:
    """The other ranks hear of it, so it is said to the coordinator: what cannot be said would cost
    the connection.
    """

    async def hook(_: VersionInfo) -> None:
        raise ZeroDivisionError("half a character: \ud800" + 99_999 * "!")

    class Mute(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())
        with pytest.raises(ZeroDivisionError):
            await weights.update(before_write=hook)
        assert (await weights.update(timeout=WAIT_S)).version == 1
        group = [
            await hub.register("n", tensors(), group="g", rank=rank, world_size=2)
            for rank, hub in enumerate(c.hubs)
        ]
        with pytest.raises(Mute):
            async with group[0].mutate(1):
                raise Mute
        with pytest.raises(GroupAborted, match=r"the body of mutate\(1\) raised Mute"):
            await group[1].publish(1)
