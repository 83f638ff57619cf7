"""What does not need a real etcd: a server that answers as etcd never does, one that tells lies, and
one that must not make a password or a token visible.
"""

import base64
import contextlib
import gc
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest
import trustme
from anyio.streams.buffered import BufferedByteReceiveStream

import tensorhub
from tensorhub.errors import InvalidValue, StateError
from tensorhub.runtime.control import etcd, etcd_election
from tensorhub.runtime.control.election import Deposed
from tensorhub.runtime.control.etcd import Etcd, Place, Refused, Unanswered, place_of
from tensorhub.runtime.control.etcd_election import EtcdElection, EtcdTerm
from tensorhub.runtime.control.etcd_store import Record
from tests.etcd_rig import ADDRESS, connected
from tests.test_never_shown import SECRET, check_error, check_hidden

Respond = Callable[[str, Any], bytes | int | None]
OFTEN = b'{"ID": "7", "TTL": "60", "result": {"TTL": "60"}}'


@contextlib.asynccontextmanager
async def fake_etcd(respond: Respond) -> AsyncIterator[Place]:
    """A server of one member. `respond` gets what comes after `/v3/` and the request's body. It
    returns an answer, a status without one, or None: the connection ends.
    """

    async def serve(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            request = BufferedByteReceiveStream(stream)
            while True:
                try:
                    head = (await request.receive_until(b"\r\n\r\n", 2**16)).lower()
                except (anyio.IncompleteRead, anyio.BrokenResourceError):
                    return
                length = int(head.split(b"content-length: ")[1].split()[0])
                body = json.loads(await request.receive_exactly(length))
                answer = respond(head.split()[1].decode().removeprefix("/v3/"), body)
                if answer is None:
                    return
                status, content = (answer, b"") if isinstance(answer, int) else (200, answer)
                start = b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n" % (status, len(content))
                with contextlib.suppress(anyio.BrokenResourceError):
                    await stream.send(start + content)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        yield Place((f"127.0.0.1:{port}",), "p")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (ask, body)
        for ask, bodies in {
            "grant": (
                b"[" * 10**5,
                b" " * 2**17 + b'{"ID": "7", "TTL": "5"}',  # longer than may be
                b'{"error": "\\u001b[2J", "code": [3]}',
                b'{"TTL": "5"}',
                b'{"ID": "7", "TTL": "nan"}',
                b'{"ID": "7", "TTL": "0"}',
                b'{"ID": "7", "TTL": "-5"}',
                b'{"ID": "7", "TTL": "1000000000"}',
                b'{"ID": "7", "TTL": "1' + b"0" * 400 + b'"}',
                b'{"ID": "' + b"7" * 5000 + b'", "TTL": "5"}',
            ),
            "keep_alive": (b'{"result": {"TTL": "-5"}}', b'{"result": {"TTL": "1000000000"}}'),
            "get": (
                b"{}",
                b'{"responses": null}',
                b'{"responses": [1]}',
                b'{"responses": [{"response_range": {"kvs": [{"key": "!"}]}}]}',
                b'{"responses": [{"response_range": {"kvs": [{"key": 5}]}}]}',
            ),
            "values": (b'{"more": true, "kvs": [{"key": "cA=="}]}',),  # for ever
        }.items()
        for body in bodies
    ],
)
async def test_what_etcd_never_answers_counts_as_no_answer(
    ask: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "ANSWER_BYTES_MAX", 2**17)

    async with fake_etcd(lambda path, given: body) as place, connected(place) as client:
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "grant": lambda: client.grant(5),
            "keep_alive": lambda: client.keep_alive(7, within_s=etcd.ANSWER_S),
            "get": lambda: client.transact((), [etcd.get(b"p")]),
            "values": lambda: client.values(b"p/"),
        }
        with pytest.raises(Unanswered) as caught:
            await asked[ask]()
        assert str(caught.value).isprintable()


async def test_pages_without_an_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "PAGES_S", 0.25)
    pages = 0

    def respond(path: str, body: Any) -> bytes:
        nonlocal pages
        pages += 1
        key = base64.b64encode(b"p/%09d" % pages).decode()
        return json.dumps({"more": True, "kvs": [{"key": key, "value": "A" * 120}]}).encode()

    async with fake_etcd(respond) as place, connected(place) as client:
        with pytest.raises(Unanswered, match=r"not told all of b'p/' within 0\.25 s"):
            await client.values(b"p/")
    assert pages


async def test_a_term_that_ends_ends_the_reading_of_its_state() -> None:
    pages = 0

    def respond(path: str, body: Any) -> bytes:
        nonlocal pages
        pages += 1
        if pages == 3:
            term._end("a test ends it")
        key = base64.b64encode(b"p/state/%09d" % pages).decode()
        return json.dumps({"more": True, "kvs": [{"key": key}]}).encode()

    async with fake_etcd(respond) as place, connected(place) as client:
        lease = etcd_election.Lease(client)
        term = EtcdTerm(client, place, lease, Record("c", 1), 1)
        with pytest.raises(Deposed, match="a test ends it"):
            await anyio.to_thread.run_sync(term.store.read)
        pages_then = pages
        with pytest.raises(Deposed):
            await anyio.to_thread.run_sync(term.store.read)
    assert pages == pages_then


async def test_an_address_of_a_leader_is_told_in_part() -> None:
    leader = base64.b64encode(b"A" * 10**6).decode()

    def respond(path: str, body: Any) -> bytes:
        if path != "kv/txn":
            return OFTEN
        kvs: list[Any] = [
            [{"key": "cA==", "value": leader, "lease": "9"}] * (n < 2) for n in range(4)
        ]
        answers = [{"response_range": {"kvs": each}} for each in kvs[: len(body["success"])]]
        return json.dumps({"succeeded": True, "responses": answers}).encode()

    async with fake_etcd(respond) as place:
        election = EtcdElection(place)
        async with anyio.create_task_group() as tasks:

            def stands_by(told: str) -> None:
                assert told == "A" * etcd_election.ADDRESS_BYTES_MAX
                tasks.cancel_scope.cancel()

            await election.campaign(ADDRESS, stands_by)
        await election.aclose()


@pytest.mark.parametrize(
    ("fault", "surely"),
    [
        (TimeoutError(), False),
        (OSError("the connection ended"), False),
        (KeyError("no answer that etcd gives"), False),
        (etcd._Unsent("refused"), True),
    ],
    ids=lambda each: type(each).__name__,
)
async def test_a_refusal_is_sure_only_if_no_other_member_may_have_done_what_was_asked(
    fault: Exception, surely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(client: Etcd, member: str, path: str, body: Any, surely: bool) -> Any:
        raise fault if member == "a:1" else Refused("no room", 8, surely)

    monkeypatch.setattr(Etcd, "_ask", ask)
    async with connected(Place(("a:1", "b:1"), "p")) as client:
        with pytest.raises(Refused) as caught:
            await client.transact((), [etcd.put(b"p/x", b"")])
    assert caught.value.surely is surely


# --------------------------------------------------------------------------------------------------
# leaders that nobody sees


@pytest.mark.parametrize("succeeds", [True, False])
async def test_an_etcd_that_never_shows_a_leader_is_asked_at_a_pace_and_given_up(
    succeeds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of several etcds, say: each knows its own keys only."""
    looks, pauses = 0, list[float]()
    sleep = anyio.sleep

    async def counted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    def respond(path: str, body: Any) -> bytes:
        nonlocal looks
        if path != "kv/txn":
            return OFTEN
        asked = body["success"] if succeeds or not body["compare"] else []
        looks += any("request_range" in each for each in asked)
        answers: list[Any] = [{"response_range": {}} for _ in asked]  # no keys
        succeeded = succeeds or not body["compare"]
        return json.dumps({"succeeded": succeeded, "responses": answers}).encode()

    monkeypatch.setattr(anyio, "sleep", counted)
    async with fake_etcd(respond) as place:
        election = EtcdElection(place)
        with pytest.raises(StateError, match="no leader is found: are these endpoints") as caught:
            await election.campaign(ADDRESS, lambda leader: None)
        await election.aclose()
    assert caught.value.retryable
    assert looks == etcd_election.TAKES_MAX + 1
    assert pauses == [0] + [etcd_election.POLL_S] * (etcd_election.TAKES_MAX - 1)


# --------------------------------------------------------------------------------------------------
# secrets


def refusal(code: int, text: str) -> bytes:
    return json.dumps({"error": text, "code": code, "message": text}).encode()


TOKEN = json.dumps({"token": SECRET}).encode()
FAULTS: dict[
    str, tuple[bytes | int | None, bytes | int | None]
] = {  # by what is asked: a token, a key
    "a wrong password": (refusal(3, "authentication failed"), b""),
    "no token": (b"{}", b""),
    "a token that is none": (json.dumps({"token": f"{SECRET}\n"}).encode(), b""),
    "a token that is no text": (json.dumps({"token": f"{SECRET}\u1234"}).encode(), b""),
    "no answer to a password": (None, b""),
    "an error to a password": (500, b""),
    "a token that is not accepted": (TOKEN, refusal(16, "invalid auth token")),
    "no permission": (TOKEN, refusal(7, "permission denied")),
    "no answer": (TOKEN, None),
    "an error": (TOKEN, 503),
    "no JSON": (TOKEN, b"<html>"),
    "something else": (TOKEN, b"[1]"),
}


def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_ETCD_USER", "root")
    monkeypatch.setenv("TENSORHUB_ETCD_PASSWORD", SECRET)


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_error_shows_no_password_and_no_token(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor do the locals of any frame in its traceback, whichever library's."""
    caplog.set_level(logging.DEBUG)
    credentials(monkeypatch)
    of_token, of_key = FAULTS[fault]
    asked = list[str]()

    def respond(path: str, body: Any) -> bytes | int | None:
        asked.append(path)
        return of_token if path == "auth/authenticate" else of_key

    async with fake_etcd(respond) as place, connected(place) as client:
        with pytest.raises((Refused, Unanswered)) as caught:
            await client.grant(5)
        check_hidden(repr(client), "the client")
    check_error(caught.value, "")
    check_hidden(caplog.text, "the log")
    assert asked.count("lease/grant") == (fault in list(FAULTS)[6:]) + (code_of(of_key) == 16)


def code_of(answer: bytes | int | None) -> int:
    return json.loads(answer)["code"] if isinstance(answer, bytes) and b"code" in answer else 0


@pytest.mark.parametrize("path", ["auth/authenticate", "lease/grant"])
async def test_a_cancellation_shows_no_password_and_no_token(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials(monkeypatch)
    silent, raised = anyio.Event(), list[BaseException]()

    async def serve(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            request = BufferedByteReceiveStream(stream)
            while True:
                head = (await request.receive_until(b"\r\n\r\n", 2**16)).lower()
                await request.receive_exactly(int(head.split(b"content-length: ")[1].split()[0]))
                if path.encode() in head:
                    silent.set()
                    await anyio.sleep_forever()
                await stream.send(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(TOKEN) + TOKEN
                )

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with connected(Place((f"127.0.0.1:{port}",), "p")) as client:

            async def ask() -> None:
                try:
                    await client.grant(5)
                except BaseException as error:
                    raised.append(error)
                    raise

            async with anyio.create_task_group() as asking:
                asking.start_soon(ask)
                await silent.wait()
                asking.cancel_scope.cancel()
        tasks.cancel_scope.cancel()
    [error] = raised
    check_error(error, "")


async def test_a_file_of_a_password_that_is_no_text_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials(monkeypatch)
    (tmp_path / "password").write_bytes(SECRET.encode() + b"\xff")
    (tmp_path / "password").chmod(0o600)
    monkeypatch.setenv("TENSORHUB_ETCD_PASSWORD_FILE", str(tmp_path / "password"))
    async with connected(Place(("127.0.0.1:1",), "p")) as client:
        with pytest.raises(Refused, match=r"_PASSWORD_FILE=.* cannot be read: .*utf-8") as caught:
            await client.grant(5)
    check_error(caught.value, "")


@pytest.mark.parametrize(("mode", "why"), [(0o644, "chmod 600"), (None, "not a regular file")])
async def test_a_file_of_a_password_is_closed_to_others_and_does_not_keep_its_reader(
    mode: int | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials(monkeypatch)
    path = tmp_path / "password"
    if mode is None:
        os.mkfifo(path, 0o600)  # which has no writer
    else:
        path.write_text(SECRET)
        path.chmod(mode)
    monkeypatch.setenv("TENSORHUB_ETCD_PASSWORD_FILE", str(path))
    async with connected(Place(("127.0.0.1:1",), "p")) as client:
        with pytest.raises(Refused, match=rf"_PASSWORD_FILE=.* cannot be read: .*{why}"):
            await client.grant(5)


# --------------------------------------------------------------------------------------------------
# sockets


async def test_a_call_that_is_cancelled_in_a_handshake_leaves_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unclosed socket warns, which is an error here."""
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca")
    monkeypatch.setenv("TENSORHUB_ETCD_CA", str(tmp_path / "ca"))
    shakes_hands = anyio.Event()

    async def serve(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            await stream.receive()
            shakes_hands.set()
            await anyio.sleep_forever()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with (
            connected(Place((f"127.0.0.1:{port}",), "p")) as client,
            anyio.create_task_group() as asking,
        ):

            async def ask() -> None:
                with contextlib.suppress(Unanswered):
                    await client.keep_alive(7, within_s=1.0)

            asking.start_soon(ask)
            await shakes_hands.wait()
            asking.cancel_scope.cancel()
        tasks.cancel_scope.cancel()
    gc.collect()


# --------------------------------------------------------------------------------------------------
# where it is


async def test_an_etcd_that_is_not_there() -> None:
    with pytest.raises(
        StateError, match=r"etcd://127.0.0.1:1/t: etcd does not answer \(127.0.0.1:1"
    ):
        await tensorhub.serve(ha="etcd://127.0.0.1:1/t")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("etcd://", "give etcd://HOST:PORT"),
        ("etcd://host/prefix", "give etcd://HOST:PORT"),
        ("etcd://host:1", "give etcd://HOST:PORT"),
        ("etcd://host:1/", "give etcd://HOST:PORT"),
        ("etcd://host:1,/p", "give etcd://HOST:PORT"),
        ("etcd://host:1/p#x", "give etcd://HOST:PORT"),
        ("etcd://host:1/p/staged", "keys below 'staged': give another prefix"),
        ("etcd://host:1/p/state.7/of/mine", "keys below 'state.7': give another prefix"),
        ("etcd://host:1/p?ttl=5", "give etcd://HOST:PORT"),
        ("etcd://host:1/p?lease_s=1", "give 2 to 60 whole seconds"),
        ("etcd://host:1/p?lease_s=soon", "give etcd://HOST:PORT"),
        (
            "etcd://me:secret@host:1/p",
            "credentials do not belong in a URL: set TENSORHUB_ETCD_USER",
        ),
    ],
)
def test_a_url_that_says_too_little_or_too_much(url: str, why: str) -> None:
    with pytest.raises(InvalidValue, match=why) as caught:
        place_of(url)
    assert "secret" not in str(caught.value)
