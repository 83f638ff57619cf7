"""Reading by NIXL between workers: when it is used, what a source that lies gets for it, and that
nothing stays.

Without NIXL, by a stand-in within the process; with it (marked) the same stories by the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import anyio.to_thread
import numpy as np
import pytest

import tensorhub
from tensorhub import Hub
from tensorhub.messages import ChunksLie, NotThisWay, ReadRefused, TransportReply
from tensorhub.protocol.certificates import Certificates
from tensorhub.testing.conformance import CHECKS
from tensorhub.testing.serving import ServedSource
from tensorhub.transport import sockets
from tensorhub.transport.base import Cutter, NotShared, ReadFailure, ReadRight, Unusable
from tensorhub.transport.nixl import agents as nixl
from tensorhub.transport.nixl.agents import AGENT_BYTES_MAX, DIALECT, ON_HOST, AgentIs
from tensorhub.transport.nixl.transport import NixlOwner, NixlTransport
from tensorhub.types import ContentId, Endpoint, Incarnation, LeaseId, RegistrationId
from tests.certificates import usual
from tests.cuda.double import Double
from tests.cuda.own import Own
from tests.rig import cluster, connect, holds, nothing_left, tensors, worker_of, write
from tests.runtime.data_rig import SECRET, Nowhere, answers
from tests.runtime.fake_nixl import Fabric, fabric
from tests.transport.patience import local

__all__ = ["fabric"]

RIGHT = ReadRight(LeaseId("l"), Incarnation("source"), RegistrationId("r"), 5, ContentId("c"))
REAL = pytest.param(
    "real",
    marks=[
        pytest.mark.nixl,
        pytest.mark.skipif(
            nixl.version() is None, reason=f"NIXL is not installed: {nixl.INSTALL}, or make nixl"
        ),
    ],
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["a stand-in", REAL])
def library(request: pytest.FixtureRequest) -> Iterator[None]:
    """NIXL, or what stands in for it; no agent of it stays."""
    if request.param == "real":
        yield
        return
    made: Fabric = request.getfixturevalue("fabric")
    yield
    assert not made.agents


def exposures_of(hub: Hub) -> nixl.Exposures:
    (side,) = [side for side in worker_of(hub)._owner.sides if isinstance(side, NixlOwner)]
    return side.exposures


# that is the connection's
@pytest.mark.parametrize("check", [name for name in CHECKS if name != "silence"])
@pytest.mark.parametrize(("on_gpu", "encrypts"), [(False, False), (True, False), (False, True)])
def test_a_stand_in_keeps_the_rules(
    fabric: Fabric, check: str, on_gpu: bool, encrypts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    certificates = Certificates(usual()) if encrypts else None
    transport = NixlTransport(replace(local(), certificates=certificates))
    device = Double() if on_gpu else None
    CHECKS[check](
        transport,
        lambda: ServedSource(SECRET, side=NixlOwner(), device=device, certificates=certificates),
    )
    transport.close()
    assert not fabric.agents


# --------------------------------------------------------------------------------------------------
# when it is chosen


@pytest.mark.anyio
@pytest.mark.usefixtures("library")
async def test_it_is_used_where_both_name_it() -> None:
    async with nothing_left(), cluster() as c:
        for theirs, mine, used in (
            (["nixl"], ["nixl", "tcp"], "nixl"),
            (["nixl", "tcp"], None, "tcp"),
            (None, ["nixl", "tcp"], "tcp"),
        ):
            async with (
                connect(c.address, "trainer", transports=theirs) as trainer,
                connect(c.address, "reader", transports=mine) as reader,
            ):
                source, memory = tensors(1), tensors()
                published = await trainer.register("m", source)
                await published.publish(1 if used == "nixl" else 10 if mine is None else 20)
                weights = await reader.register("m", memory)
                report = await weights.replicate()
                assert [each.transport for each in report.sources] == [used]
                assert holds(memory, 1)
                async with published.mutate(report.version + 1):
                    write(source, 2)
                assert [each.transport for each in (await weights.update()).sources] == [used]
                assert holds(memory, 2)
                await published.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("on_host", ["neither", "source", "reader"])
async def test_gpus_are_read(fabric: Fabric, on_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    source, target = Own(Double(3), 1), Own(Double(1), 0)
    async with (
        nothing_left(),
        cluster() as c,
        connect(c.address, "trainer", transports=["nixl", "tcp"]) as trainer,
        connect(c.address, "reader", transports=["nixl", "tcp"]) as reader,
    ):
        published = await source.register(trainer, on_host=on_host == "source")
        weights = await target.register(reader, on_host=on_host == "reader")
        for version in (1, 2):
            source.fill(version)
            await published.publish(version)
            report = await weights.update()
            assert [each.transport for each in report.sources] == ["nixl"]
            assert target.holds(version)
            await published.unpublish()
    kinds = (
        ("DRAM", 0) if on_host == "reader" else ("VRAM", 1),
        ("DRAM", 0) if on_host == "source" else ("VRAM", 3),
    )
    assert set(fabric.kinds) == {(*kinds[0], *kinds[1]), ("DRAM", 0, "DRAM", 0)}


@pytest.mark.anyio
async def test_a_read_only_token_is_told_of_no_agent(fabric: Fabric) -> None:
    token = "a token of the test"
    async with (
        cluster(token=token) as c,
        connect(c.address, "trainer", token=token, transports=["nixl", "tcp"]) as trainer,
        connect(
            c.address, "reader", token=tensorhub.read_only_token(token), transports=["nixl", "tcp"]
        ) as reader,
    ):
        await (await trainer.register("m", {"t": np.ones(100, np.float32)})).publish(1)
        await reader.fetch("m")
        assert "0 registrations" in repr(exposures_of(trainer))


@pytest.mark.anyio
async def test_without_rdma_another_host_is_not_read_unless_somebody_asks_for_it(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(nixl, "has_rdma", lambda: False)
    monkeypatch.setattr(
        "tensorhub.runtime.data.acceptor.sockets.is_local", lambda connection: False
    )
    for settings, used in (({}, "tcp"), ({"UCX_TLS": "tcp"}, "nixl")):
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        async with (
            cluster() as c,
            connect(c.address, "trainer", transports=["nixl", "tcp"]) as trainer,
            connect(c.address, "reader", transports=["nixl", "tcp"]) as reader,
        ):
            await (await trainer.register("m", tensors(1))).publish(1)
            report = await (await reader.register("m", tensors())).replicate()
            assert [each.transport for each in report.sources] == [used]


# --------------------------------------------------------------------------------------------------
# sources that lie


def metadata(name: str, places: int = 1) -> bytes:
    return (
        b"nixlSerDes|Agent"
        + len(name).to_bytes(8, sys.byteorder)
        + name.encode()
        + b"|Conns"
        + b"x" * places
    )


def agent(name: str, metadata: bytes, word: int = 0) -> TransportReply:
    return DIALECT.reply(0, AgentIs(name, metadata, word, ON_HOST))


LIES: dict[str, tuple[object, type[Exception], str]] = {
    "no agent": (NotThisWay(0, "there is none", is_usual=True), NotShared, "there is none"),
    "another name": (agent("other", metadata("agent")), Unusable, "none of that agent"),
    "nonsense": (agent("agent", b"\xff" * AGENT_BYTES_MAX), Unusable, "none of that agent"),
    "nobody": (agent("agent", metadata("agent")), Unusable, "NIXL cannot reach it"),
    "something else": (
        ChunksLie(0, ((0, 0, 0),), 0),
        ReadFailure,
        "a ChunksLie is no message of nixl",
    ),
    "refused": (ReadRefused(0, "not now"), ReadFailure, "not now"),
    "the end": (None, ReadFailure, "closed"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", LIES)
async def test_a_source_that_lies_is_left_and_nothing_stays(fabric: Fabric, name: str) -> None:
    message, kind, text = LIES[name]
    async with nothing_left():
        with sockets.listen("127.0.0.1") as listener:
            thread = answers(
                listener,
                lambda c: c.shutdown() if message is None else c.send(message),  # type: ignore[arg-type]
            )
            transport, endpoint = (
                NixlTransport(local()),
                Endpoint("nixl", sockets.address_of(listener)),
            )
            with pytest.raises(kind, match=text):
                await anyio.to_thread.run_sync(transport.open, endpoint, RIGHT, Nowhere(), Cutter())
            transport.close()
            await anyio.to_thread.run_sync(thread.join)
    assert not fabric.agents
