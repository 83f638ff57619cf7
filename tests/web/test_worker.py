"""What a worker's endpoint shows of it."""

from __future__ import annotations

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tensorhub
from tensorhub.errors import StateError
from tensorhub.types import Options
from tests.rig import OPTIONS, WAIT_S, cluster, connect, nothing_left, published, tensors, until
from tests.web.rig import HTTP, TOKEN, Got, coordinator, fresh, get, place_of

READ_ONLY = tensorhub.read_only_token(TOKEN)


def samples(got: Got) -> dict[tuple[str, ...], float]:
    """Each sample's value by its name and its labels' values, in the order of the labels."""
    return {
        (sample.name, *dict(sorted(sample.labels.items())).values()): sample.value
        for family in text_string_to_metric_families(got.text)
        for sample in family.samples
    }


async def test_what_it_holds_reads_and_serves() -> None:
    async with (
        nothing_left(),
        tensorhub.serve(token="", options=OPTIONS) as serving,
        connect(serving.address, "source", HTTP, transports=["tcp"]) as source,
        connect(serving.address, "reader", HTTP, transports=["tcp"]) as reader,
    ):
        await published(source, 7)
        weights = await reader.register("m", tensors())
        report = await weights.update(7)
        found = samples(await fresh(reader.http_url, "/metrics"))
        assert found["tensorhub_worker_held_version", "m"] == 7
        assert found["tensorhub_worker_read_bytes_total", "live", "tcp"] == report.bytes_read
        assert found["tensorhub_worker_update_seconds_count", "total"] == 1
        taken = found["tensorhub_worker_update_seconds_sum", "total"]
        assert taken == pytest.approx(report.seconds, abs=0.5)
        assert found["tensorhub_worker_retries_total",] == 0
        with anyio.fail_after(WAIT_S):
            while not found.get(("tensorhub_worker_readers_total",)):
                found = samples(await fresh(source.http_url, "/metrics"))
        assert found["tensorhub_worker_served_bytes_total",] >= report.bytes_read
        summary = (await get(reader.http_url, "/summary")).json
        assert summary["worker"]["name"] == "reader"
        assert summary["worker"]["online"]
        (handle,) = summary["handles"]
        assert (handle["model"], handle["version"], handle["state"]) == ("m", 7, "ready")


async def test_it_is_not_ready_while_its_coordinator_is_away() -> None:
    async with nothing_left():
        serving = await tensorhub.serve(token="", options=OPTIONS)
        async with connect(serving.address, options=HTTP) as hub:
            assert (await get(hub.http_url, "/readyz")).json["ready"]
            await serving.close()
            await until(lambda: "offline" in repr(hub))
            got = await fresh(hub.http_url, "/readyz")
            assert got.status == 503
            assert "coordinator" in got.json["why"]
            assert (await get(hub.http_url, "/healthz")).status == 200


async def test_access_is_that_of_a_coordinator() -> None:
    async with (
        coordinator(TOKEN) as serving,
        connect(serving.address, options=HTTP, token=TOKEN) as hub,
    ):
        assert (await get(hub.http_url, "/readyz")).json == {"ready": True}
        for path in ("/summary", "/metrics"):
            assert (await get(hub.http_url, path)).status == 401
            assert (await get(hub.http_url, path, "wrong")).status == 401
            assert (await get(hub.http_url, path, READ_ONLY)).status == 200
        assert (await get(hub.http_url, "/healthz")).status == 200
        assert (await get(hub.http_url, "/", TOKEN)).status == 404


async def test_a_port_in_use_fails_the_connect() -> None:
    async with coordinator() as serving:
        host, port = place_of(serving.http_url)
        with pytest.raises(StateError, match=f"Options.http: port {port} of {host} is in use"):
            async with connect(serving.address, options=Options(http=f"{host}:{port}")):
                pass


async def test_without_the_option_there_is_none() -> None:
    async with cluster("a") as made:
        assert made.hubs[0].http_url is None
        assert made.coordinator.http_url is None
