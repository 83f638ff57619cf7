"""Clients that follow what happens: in order, once each, also across a coordinator's restart."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import tensorhub
from tensorhub.cli.top_data import Watch
from tensorhub.cli.top_rows import age
from tensorhub.coordinator.observing import Observations
from tensorhub.observed import WORKER_EVENT_KINDS, ClusterEvent
from tensorhub.web.news import News
from tests.rig import WAIT_S, connect, published, tensors
from tests.web.rig import HTTP, connection_to, coordinator, get, place_of


class Follower:
    """One connection to /events."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._answer: http.client.HTTPResponse
        self.last_id = ""

    async def begin(self, last_id: str = "") -> None:
        def ask() -> http.client.HTTPResponse:
            headers = {"Last-Event-ID": last_id} if last_id else {}
            self._connection.request("GET", "/events", headers=headers)
            return self._connection.getresponse()

        self._answer = await anyio.to_thread.run_sync(ask)
        assert self._answer.status == 200
        assert self._answer.headers["content-type"].startswith("text/event-stream")
        assert self._answer.headers["cache-control"] == "no-store"

    async def lines(self) -> dict[str, str]:
        """The fields of the next block."""
        fields: dict[str, str] = {}
        while True:
            line = await anyio.to_thread.run_sync(self._answer.readline)
            if not line:
                raise EOFError
            if line == b"\n":
                return fields
            name, _, value = line.decode().rstrip("\n").partition(": ")
            fields[name] = value

    async def event(self) -> dict[str, Any]:
        """The next event."""
        with anyio.fail_after(WAIT_S):
            while True:
                fields = await self.lines()
                if "data" in fields:
                    self.last_id = fields["id"]
                    found: dict[str, Any] = json.loads(fields["data"])
                    return found

    async def is_over(self) -> bool:
        """Whether the endpoint ends the stream."""
        try:
            with anyio.fail_after(WAIT_S):
                while True:
                    await self.lines()
        except (EOFError, ConnectionError, http.client.HTTPException):
            return True

    async def until(self, kind: str, version: int | None = None) -> list[dict[str, Any]]:
        """The next events, up to the first of that kind."""
        found = [await self.event()]
        while (found[-1]["kind"], found[-1]["version"]) != (kind, version):
            found.append(await self.event())
        return found


@contextlib.asynccontextmanager
async def following(url: str | None, last_id: str = "") -> AsyncIterator[Follower]:
    with contextlib.closing(connection_to(url)) as connection:
        follower = Follower(connection)
        await follower.begin(last_id)
        yield follower


async def test_events_come_in_order_and_a_client_that_comes_back_misses_none() -> None:
    async with coordinator() as serving, connect(serving.address) as hub:
        weights = await published(hub, 1)
        async with following(serving.http_url) as follower:
            seen = await follower.until("published", 1)
            last_id = follower.last_id
        await weights.unpublish()
        await weights.publish(2)
        async with following(serving.http_url, last_id) as follower:
            seen += await follower.until("published", 2)
        numbers = [event["number"] for event in seen]
        assert numbers == list(range(1, len(numbers) + 1))
        assert all(event["model"] == "m" for event in seen if event["kind"] == "published")
        async with (
            following(serving.http_url, last_id) as other,
            following(serving.http_url, str(numbers[-2])) as third,
        ):
            assert (await other.event())["number"] > seen[0]["number"]
            assert (await third.event())["number"] == numbers[-1]


async def test_a_client_hears_what_happens_while_it_follows() -> None:
    async with (
        coordinator() as serving,
        following(serving.http_url) as follower,
        connect(serving.address) as hub,
    ):
        await published(hub, 5)
        await follower.until("published", 5)


async def test_a_worker_tells_its_own_calls_and_readers() -> None:
    async with (
        coordinator() as serving,
        connect(serving.address, "source", HTTP) as source,
        connect(serving.address, "reader", HTTP) as reader,
    ):
        await published(source)
        weights = await reader.register("m", tensors())
        async with following(reader.http_url) as calls, following(source.http_url) as readers:
            report = await weights.update()
            called, served = await calls.event(), await readers.event()
        assert (called["kind"], called["model"], called["worker"]) == ("called", "m", "reader")
        assert f"{report.bytes_read:,} bytes from 'source'" in called["text"]
        assert (served["kind"], served["worker"]) == ("served", "source")
        assert {called["kind"], served["kind"]} == WORKER_EVENT_KINDS.keys()


@pytest.mark.parametrize("last_id", ["x", "-1", "..", "1.2.3", "9" * 400, "\xff", "abc.1.7"])
async def test_an_id_of_no_event_begins_with_the_oldest(last_id: str) -> None:
    async with coordinator() as serving, connect(serving.address) as hub:
        await published(hub, 1)
        async with following(serving.http_url, last_id) as follower:
            assert (await follower.event())["number"] == 1


async def test_a_quiet_stream_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub.web.news.QUIET_S", 0.05)
    async with coordinator() as serving, following(serving.http_url) as follower:
        with anyio.fail_after(WAIT_S):
            while "" not in await follower.lines():  # a comment has no name
                pass


async def test_a_client_that_lags_goes_on_with_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tensorhub.web.news.EVENTS_MAX", 3)
    async with coordinator() as serving, connect(serving.address) as hub:
        weights = await published(hub, 1)
        for version in range(2, 8):
            await weights.unpublish()
            await weights.publish(version)
        async with following(serving.http_url) as follower:
            seen = await follower.until("published", 7)
            assert len(seen) <= 3
            assert seen[0]["number"] > 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # an endpoint's loop
async def test_what_happens_while_a_client_takes_a_piece_is_told_next() -> None:
    observations = Observations(0.0)
    observations.happened(1.0, "first")

    async def events_after(number: int) -> tuple[str, tuple[ClusterEvent, ...], bool]:
        return ("life.1", *observations.events_after(number))

    news = News(events_after)
    async with contextlib.aclosing(news.follow("")) as slow:
        with anyio.fail_after(WAIT_S):
            while b'"first"' not in await anext(slow):
                pass
            observations.happened(2.0, "second")
            async with contextlib.aclosing(news.follow("")) as quick:
                while b'"second"' not in await anext(quick):
                    pass
            assert b'"second"' in await anext(slow)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # an endpoint's loop
async def test_a_client_that_follows_hears_the_next_term_from_its_beginning() -> None:
    """The coordinator has stood by in between; its numbers begin anew."""
    terms = [Observations(0.0), Observations(0.0)]
    terms[0].happened(1.0, "first")
    terms[0].happened(1.0, "second")
    terms[1].happened(2.0, "third")
    term = 0

    async def events_after(number: int) -> tuple[str, tuple[ClusterEvent, ...], bool]:
        return (f"life.{term}", *terms[term].events_after(number))

    news = News(events_after)
    async with contextlib.aclosing(news.follow("")) as follower:
        with anyio.fail_after(WAIT_S):
            while b'"second"' not in await anext(follower):
                pass
            term = 1
            assert b"id: life.1.1\ndata: {" in (event := await anext(follower))
            assert b'"third"' in event


async def test_a_client_follows_over_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    """The numbers begin anew with the new coordinator; an id says which one's it is."""
    options = replace(HTTP, lease_s=2.0)
    async with tensorhub.serve(token="", options=options, state_dir=tmp_path) as first:
        port = int(first.address.rpartition(":")[2])
        host, http_port = place_of(first.http_url)
        async with connect(first.address) as hub:
            weights = await published(hub, 1)
            for version in range(2, 8):
                await weights.unpublish()
                await weights.publish(version)
            async with following(first.http_url) as follower:
                seen = await follower.until("published", 7)
                last_id = follower.last_id
                await first.close()
                assert await follower.is_over()
            options = replace(options, http=f"{host}:{http_port}")
            async with tensorhub.serve(
                port=port, token="", options=options, state_dir=tmp_path
            ) as second:
                async with following(second.http_url, last_id) as follower:
                    event = await follower.event()
                    assert event["number"] == 1 < seen[-1]["number"]
                    await follower.until("serving")
                assert (await get(second.http_url, "/readyz")).json["ready"]
                # how old the version is at least, said alike everywhere
                (model,) = (await get(second.http_url, "/summary")).json["models"]
                assert model["age_is_least"]
                metrics = (await get(second.http_url, "/metrics")).text
                assert 'tensorhub_version_age_seconds{model="m"}' in metrics
                async with connect(second.address) as other:
                    seen_now = await Watch(other, second.address).look("m", WAIT_S)
                assert age(seen_now, "m", 7).startswith("> ")
                assert seen_now.since < seen_now.at - model["age_s"] + options.lease_s
