"""Clients that do not read, do not ask, or come by the thousand: each costs its bound, and no more."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import pytest

import tensorhub
from tensorhub.web import endpoint, news, pages
from tensorhub.web.of_coordinator import CoordinatorPages, Snapshot
from tests.certificates import usual
from tests.rig import WAIT_S, connect, published, until
from tests.web.rig import HTTP, TOKEN, coordinator, fresh, get, raw

REQUEST = b"GET /summary HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def connections(url: str | None, number: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(raw(url)) for _ in range(number)]


def is_ended(connection: socket.socket) -> bool:
    """Whether the endpoint has ended it, once everything that it has sent is read."""
    connection.settimeout(WAIT_S)
    try:
        while connection.recv(65_536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


async def ended(connection: socket.socket) -> bool:
    return await anyio.to_thread.run_sync(is_ended, connection)


@pytest.mark.parametrize("said", [b"", b"GET /summ", REQUEST, REQUEST[:-2]])
async def test_a_client_that_says_nothing_more_is_given_up(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "TURN_S", 0.2)
    async with coordinator() as serving:
        with raw(serving.http_url) as connection:
            connection.sendall(said)
            assert await ended(connection)


async def test_a_slow_body_does_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "TURN_S", 0.2)
    async with coordinator() as serving:
        with raw(serving.http_url) as connection:
            connection.sendall(REQUEST[:-2] + b"Content-Length: 1000000\r\n\r\n" + b"x" * 1000)
            assert await ended(connection)


@pytest.mark.parametrize("path", ["/big", "/events"])
async def test_a_client_that_takes_no_answer_is_given_up_and_costs_little(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is far larger than what the kernel takes for a client."""
    monkeypatch.setattr(endpoint, "ANSWER_S", 0.5)
    held: list[int] = []
    body = b"x" * 100_000_000

    async def big(self: object, request: object) -> pages.Answer:
        return pages.Answer(body)

    def pieces(self: news.News, number: int) -> list[bytes]:
        return [b": " + b"x" * pages.SENT_AT_ONCE + b"\n\n"] * 2000

    monkeypatch.setattr(CoordinatorPages, "summary", big)
    monkeypatch.setattr(news.News, "_pieces", pieces)
    abort = endpoint.Connection.abort

    def counting(self: endpoint.Connection) -> None:
        held.append(self.transport.get_write_buffer_size())
        abort(self)

    monkeypatch.setattr(endpoint.Connection, "abort", counting)
    async with coordinator() as serving:
        asked = b"/summary" if path == "/big" else b"/events"
        unsent = 0
        while not unsent:  # again, where a busy machine's time is over before the answer begins
            with raw(serving.http_url) as connection:
                connection.sendall(REQUEST.replace(b"/summary", asked))
                await until(lambda: bool(held))
                unsent = held.pop()
                assert unsent < 4 * pages.SENT_AT_ONCE
                assert await ended(connection)


async def test_at_the_cap_a_new_client_gets_the_place_of_one_that_asks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "CONNECTIONS_MAX", 4)
    async with coordinator(TOKEN) as serving:
        with connections(serving.http_url, 12) as idle:
            assert (await get(serving.http_url, "/readyz", TOKEN)).status == 200
            for connection in idle[:8]:
                assert await ended(connection)


@pytest.mark.parametrize("encrypts", [False, True])
async def test_at_the_cap_a_flood_from_several_addresses_takes_its_own_places(
    encrypts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "CONNECTIONS_MAX", 4)
    async with coordinator(TOKEN, tls=usual() if encrypts else False) as serving:
        assert serving.http_url is not None
        url = urlsplit(serving.http_url)
        with contextlib.ExitStack() as stack:
            here = (url.hostname, url.port)
            slow = stack.enter_context(socket.create_connection(here, WAIT_S))
            flood = [
                stack.enter_context(
                    socket.create_connection(here, source_address=(f"127.0.0.{2 + n % 2}", 0))
                )
                for n in range(12)
            ]
            for connection in flood[:9]:
                assert await ended(connection)
            slow.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                slow.recv(1)


async def test_requests_that_are_under_way_are_not_given_up_for_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "CONNECTIONS_MAX", 3)
    async with coordinator() as serving:
        with connections(serving.http_url, 3) as following:
            for connection in following:
                connection.sendall(REQUEST.replace(b"/summary", b"/events"))
                assert (await anyio.to_thread.run_sync(connection.recv, 12)) == b"HTTP/1.1 200"
            with raw(serving.http_url) as one_more:
                assert await ended(one_more)
            for connection in following:
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    assert connection.recv(65_536)


async def test_clients_without_a_token_keep_none_out_that_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They ask for what needs no token, and do not take the answer."""
    monkeypatch.setattr(endpoint, "CONNECTIONS_MAX", 4)
    files = {"large": (b"x" * 100_000_000, "text/css")}
    monkeypatch.setattr(pages, "_static_files", lambda: files)
    async with coordinator(TOKEN) as serving:
        with connections(serving.http_url, 4) as stuck:
            for connection in stuck:
                connection.sendall(REQUEST.replace(b"/summary", b"/static/large"))
                assert (await anyio.to_thread.run_sync(connection.recv, 12)) == b"HTTP/1.1 200"
            assert (await get(serving.http_url, "/readyz", TOKEN)).status == 200
            assert await ended(stuck[0])


async def test_followers_have_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub.web.news.STREAMS_MAX", 2)
    async with coordinator() as serving:
        with connections(serving.http_url, 2) as following:
            for connection in following:
                connection.sendall(REQUEST.replace(b"/summary", b"/events"))
                await anyio.to_thread.run_sync(connection.recv, 12)
            got = await get(serving.http_url, "/events")
            assert got.status == 503
            assert got.headers["retry-after"]
        await until_status(serving.http_url)


async def until_status(url: str | None) -> None:
    """Until a follower is taken again."""
    with anyio.fail_after(WAIT_S):
        while True:
            with raw(url) as connection:
                connection.sendall(REQUEST.replace(b"/summary", b"/events"))
                if await anyio.to_thread.run_sync(connection.recv, 12) == b"HTTP/1.1 200":
                    return


async def test_a_thousand_clients_ask_the_coordinator_no_more_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    take = CoordinatorPages._take

    async def counting(self: CoordinatorPages) -> object:
        asked.append(1)
        return await take(self)

    monkeypatch.setattr(CoordinatorPages, "_take", counting)
    monkeypatch.setattr("tensorhub.web.asking.FRESH_S", WAIT_S)
    async with coordinator() as serving, anyio.create_task_group() as tasks:
        for _ in range(100):
            for path in ("/summary", "/metrics", "/readyz"):
                tasks.start_soon(get, serving.http_url, path)
    assert len(asked) == 1


async def test_different_questions_come_one_at_a_time_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tensorhub.web.asking.WAITING_MAX", 2)
    monkeypatch.setattr("tensorhub.web.asking.SHARE", 1e-4)
    found: list[int] = []

    async def one(number: int) -> None:
        found.append((await get(serving.http_url, f"/models/m{number}")).status)

    async with coordinator() as serving, anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(one, number)
    assert set(found) == {404, 503}
    assert found.count(404) >= 2


async def test_a_loop_that_does_not_answer_is_behind_and_the_last_figures_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tensorhub.web.asking.ANSWER_S", 0.2)
    monkeypatch.setattr("tensorhub.web.of_coordinator.LATE_S", 0.1)
    held, may_go_on = threading.Event(), threading.Event()
    make, seconds = CoordinatorPages._summary, list[float]()

    def hold() -> None:
        held.set()
        may_go_on.wait(WAIT_S)

    def summary(self: CoordinatorPages, snapshot: Snapshot, late_s: float) -> bytes:
        seconds.append(math.ceil(late_s))
        return make(self, snapshot, late_s)

    monkeypatch.setattr(CoordinatorPages, "_summary", summary)

    async with coordinator() as serving, connect(serving.address) as hub:
        await published(hub)
        assert (await fresh(serving.http_url, "/summary")).json["models"]
        serving._thread.post(hold)
        await until(held.is_set)
        try:
            late = (await fresh(serving.http_url, "/summary")).json
            assert late["coordinator"]["behind_s"] > 1.0
            assert late["models"]
            # what is made of them is made once a second, however many ask
            async with anyio.create_task_group() as tasks:
                for _ in range(16):
                    tasks.start_soon(get, serving.http_url, "/summary")
            assert len(set(seconds)) == len(seconds)
            got = await get(serving.http_url, "/readyz")
            assert got.status == 503
            assert "behind" in got.json["why"]
            assert (await get(serving.http_url, "/healthz")).status == 200
            assert (await get(serving.http_url, "/models/m")).status == 503
        finally:
            may_go_on.set()
        await until(lambda: not serving._thread._posted)
        assert (await fresh(serving.http_url, "/readyz")).json["ready"]


async def test_an_endpoint_that_fails_begins_anew_and_the_coordinator_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint, "AGAIN_S", 0.05)
    make, tried = CoordinatorPages.application, [0]

    def failing(self: CoordinatorPages) -> object:
        tried[0] += 1
        if tried[0] < 3:
            raise RuntimeError("no pages")
        return make(self)

    monkeypatch.setattr(CoordinatorPages, "application", failing)
    async with coordinator() as serving, connect(serving.address) as hub:
        await published(hub)
        assert (await get(serving.http_url, "/readyz")).status == 200
    assert tried[0] == 3
    assert caplog.text.count("http_ended") == 2
    assert "no pages" in caplog.text


async def test_a_defect_in_one_answer_is_logged_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(self: object, request: object) -> pages.Answer:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(CoordinatorPages, "summary", fails)
    async with coordinator() as serving:
        got = await get(serving.http_url, "/summary")
        assert got.status == 500
        assert got.headers["x-content-type-options"] == "nosniff"
        assert "defect" not in got.text
        assert (await get(serving.http_url, "/readyz")).status == 200
    assert "http_request_failed" in caplog.text


async def test_closing_ends_every_client() -> None:
    async with tensorhub.serve(token="", options=HTTP) as serving:
        following = raw(serving.http_url)
        following.sendall(REQUEST.replace(b"/summary", b"/events"))
        await anyio.to_thread.run_sync(following.recv, 12)
    with following:
        assert await ended(following)
