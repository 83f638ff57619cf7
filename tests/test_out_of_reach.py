"""A worker that advertises an address of the loopback network to workers on other hosts."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

import tensorhub
from tensorhub import Location, TensorHubError
from tensorhub.cli.sheets import sheets
from tests.rig import OPTIONS, cluster, published, tensors, until
from tests.runtime.data_rig import waited_out_s

WARNING, OWN = "'worker_out_of_reach'", "'out_of_reach'"


def told(caplog: pytest.LogCaptureFixture, event: str = WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if event in record.getMessage()]


async def test_it_is_warned_of_once_there_is_another_host_and_never_on_one_machine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster("trainer", "rollout", token="right") as c:
        for hub in c.hubs:
            await hub.register("m", tensors(1))
        assert told(caplog) == []
        elsewhere, options = (
            Location(host="elsewhere"),
            replace(OPTIONS, advertise="gateway.example:7001"),
        )
        async with tensorhub.connect(
            c.address, name="far", token="right", location=elsewhere, options=options
        ) as far:
            await far.register("m", tensors(1))
            first = told(caplog)[0]
            assert "advertises tcp://127.0.0.1:" in first
            assert "set Options.advertise or Options.listen_host there" in first
            await until(lambda: told(caplog, OWN) != [])  # at the worker, too
            assert "set Options.advertise or Options.listen_host, or" in told(caplog, OWN)[0]
            await c.hubs[0].register("n", tensors(1))
            shown = str([sheet.rows for sheet in sheets([await far.describe("m")])])
            assert shown.count("not from other hosts: set Options.advertise") == 2


@pytest.mark.parametrize("host", ["elsewhere", None])
async def test_the_error_of_a_reader_elsewhere_names_what_to_set_at_the_source(
    host: str | None,
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{closed.getsockname()[1]}"
        location = Location() if host is None else Location(host=host)
        async with (
            cluster() as c,
            tensorhub.connect(
                c.address, token="", transports=["tcp"], options=replace(OPTIONS, advertise=there)
            ) as trainer,
            tensorhub.connect(
                c.address, token="", transports=["tcp"], options=OPTIONS, location=location
            ) as rollout,
        ):
            await published(trainer)
            copy = await rollout.register("m", tensors())
            with pytest.raises(TensorHubError, match="ECONNREFUSED") as caught:
                await copy.replicate(timeout=waited_out_s())
            assert (
                "set Options.advertise or Options.listen_host at the source" in str(caught.value)
            ) == (host is not None)
