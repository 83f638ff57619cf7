"""Where a worker listens for its readers, and what they are told: `Options.listen_port` and
`Options.advertise`.

Covers `runtime.worker.worker`.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator

import pytest

import tensorhub
from benches.chaos.relay import Path, Relay
from tensorhub.errors import AuthenticationFailed, InvalidType, InvalidValue, StateError
from tensorhub.types import Options
from tests.rig import OPTIONS, cluster, connect, holds, tensors, until

HOST = "127.0.0.1"
# of this process: others use 127.0.0.1
OWN = f"127.1.{os.getpid() % 2**16 // 256}.{os.getpid() % 256 or 255}"


def a_free_port() -> int:
    """Of an address that nobody else uses: it stays free."""
    with socket.create_server((OWN, 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as made:
        yield made


def forwarded(relay: Relay) -> tuple[Options, Path]:
    """Options of a worker whose readers come through a relay."""
    port = a_free_port()
    path = relay.add((HOST, 0), (OWN, port))
    reached = f"{HOST}:{path.listener.getsockname()[1]}"
    return dataclasses.replace(OPTIONS, listen_host=OWN, listen_port=port, advertise=reached), path


async def test_readers_come_through_what_is_advertised(relay: Relay) -> None:
    options, path = forwarded(relay)
    async with (
        cluster("reader") as c,
        connect(c.address, "trainer", options, transports=("tcp",)) as trainer,
    ):
        source, target = tensors(1), tensors()
        await (await trainer.register("m", source)).publish(1)
        await (await c.hubs[0].register("m", target)).replicate()
        assert holds(target, 1)
        [shown] = [
            worker for worker in (await trainer.describe("m")).workers if worker.name == "trainer"
        ]
        assert [endpoint.address for endpoint in shown.endpoints] == [f"tcp://{options.advertise}"]
        assert path.bytes_passed > sum(tensor.nbytes for tensor in source.values())
        # the relay's sockets are this process' too, and end when its thread comes to that
        path.cut(reset=False)
        await until(lambda: not path.links)


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        async with cluster() as c:
            with pytest.raises(
                StateError,
                match=rf"'127.0.0.1', port {port} \(.*\): set Options.listen_host and listen_port",
            ):
                async with connect(
                    c.address, options=dataclasses.replace(OPTIONS, listen_port=port)
                ):
                    pass


async def test_open_access_is_not_advertised_beyond_loopback() -> None:
    """Whoever forwards a port of this machine's loopback takes the weights beyond it."""
    async with cluster() as c:
        with pytest.raises(
            AuthenticationFailed,
            match=r"open access is for loopback only, and 'gateway\.example' is not",
        ):
            async with connect(
                c.address, options=dataclasses.replace(OPTIONS, advertise="gateway.example:4000")
            ):
                pass
    async with cluster(token="secret") as c:
        options = dataclasses.replace(OPTIONS, advertise="gateway.example:4000")
        async with tensorhub.connect(c.address, token="secret", options=options) as hub:
            await hub.register("m", tensors())


async def test_the_first_free_port_of_several_is_taken_and_the_port_that_leads_there_advertised() -> (
    None
):
    with socket.create_server((OWN, 0)) as first:
        port = first.getsockname()[1]
        options = dataclasses.replace(
            OPTIONS,
            listen_host=OWN,
            listen_port=f"{port}-{port + 1}",
            advertise="127.0.0.1:7000",
        )
        async with cluster() as c, connect(c.address, options=options) as hub:
            await hub.register("m", tensors())
            (shown,) = (await hub.describe("m")).workers
            assert "tcp://127.0.0.1:7001" in [each.address for each in shown.endpoints]
            with pytest.raises(StateError, match=rf"port {port}-{port + 1} .* listen_port"):
                async with connect(c.address, options=options):
                    pass


@pytest.mark.parametrize(
    "ports", ["", "7", "7-", "-7", "8-7", "0-7", "7-65536", "7-8-9", "\u0667-\u0668"]
)
def test_several_ports_are_a_range(ports: str) -> None:
    with pytest.raises(InvalidValue, match=r"give a port, 0 .* or a text such as '41000-41100'"):
        Options(listen_port=ports)
    with pytest.raises(InvalidValue, match="last port would be 65536: give one of at most 65534"):
        Options(listen_port="7-8", advertise="h:65535")


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_is_a_port(port: int) -> None:
    with pytest.raises(
        StateError, match=r"Options\.listen_port = -?\d+: give a port, 0 \(any free one\) to 65535"
    ):
        Options(listen_port=port)


@pytest.mark.parametrize("port", [1.0, None, True])
def test_a_port_is_an_integer(port: object) -> None:
    with pytest.raises(InvalidType, match=r"Options\.listen_port = .*: give a port"):
        Options(listen_port=port)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["gateway:1", "10.0.0.1:65535", "[::1]:7000"])
def test_what_can_be_advertised(address: str) -> None:
    assert Options(advertise=address).advertise == address


@pytest.mark.parametrize(
    "address",
    [
        *(
            "",
            "gateway",
            ":7000",
            "gateway:0",
            "gateway:70000",
            "::1:7000",
            "0.0.0.0:7000",
            "[::]:7000",
            "a b:1",
        ),
        *(7000, b"g:1", "x" * 600 + ":1", "tcp://gateway:1", "gate\nway:1"),
    ],
)
def test_what_cannot_be_advertised(address: object) -> None:
    with pytest.raises(
        StateError,
        match=r"Options\.advertise = (?s:.*): give HOST:PORT, as readers reach the data listener",
    ):
        Options(advertise=address)  # type: ignore[arg-type]
