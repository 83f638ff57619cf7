"""TLS over real sockets: what a wiretap reads, which certificates are taken by whom, and what each
side is told of a wrong one.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np
import pytest
import trustme
from anyio.streams.tls import TLSListener

import tensorhub
from tensorhub import sync
from tensorhub.errors import AuthenticationFailed, CoordinatorUnavailable, ProtocolError
from tensorhub.protocol import certificates
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.certificates import TLS, Certificates
from tensorhub.protocol.frames import SpeaksTls
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.types import Options, parse_address
from tests.certificates import LONG_AGO, authority, issue, usual
from tests.rig import OPTIONS, WAIT_S, cluster, holds, nothing_left, published, tensors

TOKEN = "the cluster's own"
HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at for each connection."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)


def connect(
    address: str, name: str, tls: TLS | None = None, options: Options = OPTIONS
) -> contextlib.AbstractAsyncContextManager[tensorhub.Hub]:
    return tensorhub.connect(
        address, name=name, token=TOKEN, tls=tls or usual(), options=options, transports=["tcp"]
    )


class Wiretap:
    """Passes a connection on, and keeps what passes. `inside`: it ends TLS with this certificate,
    and begins it anew.
    """

    def __init__(self, inside: Certificates | None = None) -> None:
        self.seen = bytearray()
        self.target = (HERE, 0)
        self._inside = inside

    @contextlib.asynccontextmanager
    async def between(self) -> AsyncIterator[str]:
        """Where it is reached: "host:port"."""
        listener: anyio.abc.Listener[anyio.abc.ByteStream]
        listener = tcp = await anyio.create_tcp_listener(local_host=HERE, local_port=0)
        if self._inside is not None:
            listener = TLSListener(tcp, self._inside.context("server")[0], False)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, self._pass_on)
            yield f"{HERE}:{tcp.extra(anyio.abc.SocketAttribute.local_port)}"
            tasks.cancel_scope.cancel()

    async def _pass_on(self, client: anyio.abc.ByteStream) -> None:
        upstream: anyio.abc.ByteStream
        if self._inside is None:
            upstream = await anyio.connect_tcp(*self.target)
        else:
            context, host = self._inside.context("client")[0], self.target[0]
            upstream = await anyio.connect_tcp(
                *self.target, ssl_context=context, tls_standard_compatible=False, tls_hostname=host
            )
        async with client, upstream, anyio.create_task_group() as tasks:
            for source, target in ((client, upstream), (upstream, client)):
                tasks.start_soon(self._copy, source, target, tasks.cancel_scope)

    async def _copy(
        self,
        source: anyio.abc.ByteStream,
        target: anyio.abc.ByteStream,
        ends: anyio.CancelScope,
    ) -> None:
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            while True:
                self.seen += (data := await source.receive())
                await target.send(data)
        ends.cancel()


@pytest.mark.parametrize("encrypts", [True, False])
async def test_a_wiretap_reads_neither_weights_nor_messages(encrypts: bool) -> None:
    tls: TLS | Literal[False] = usual() if encrypts else False
    needle = os.urandom(64)
    with socket.create_server((own := f"127.2.{os.getpid() % 250}.9", 0)) as free:
        port = int(free.getsockname()[1])
    control, data = Wiretap(), Wiretap()
    data.target = (own, port)
    async with nothing_left(), control.between() as front, data.between() as advertised:
        options = replace(OPTIONS, listen_host=own, listen_port=port, advertise=advertised)
        async with tensorhub.serve(token=TOKEN, tls=tls) as coordinator:
            control.target = parse_address(coordinator.address)
            join = partial(
                tensorhub.connect, f"tcp://{front}", token=TOKEN, tls=tls, transports=["tcp"]
            )
            async with (
                join(name="trainer", options=options) as trainer,
                join(name="rollout", options=OPTIONS) as rollout,
            ):
                content = np.frombuffer(needle * 10_000, np.uint8).copy()
                weights = await trainer.register("model-of-the-tap", {"w": content})
                await weights.publish(1)
                target = np.zeros_like(content)
                await (await rollout.register("model-of-the-tap", {"w": target})).update("latest")
                assert (target == content).all()
    assert len(data.seen) > len(content)
    assert (needle in data.seen) is not encrypts
    assert (b"model-of-the-tap" in control.seen) is not encrypts
    assert TOKEN.encode() not in control.seen + data.seen


async def test_a_relay_with_a_certificate_of_its_own_is_refused(tmp_path: Path) -> None:
    """Its certificate is valid for the coordinator's address. The token's proof is not."""
    relay = Wiretap(Certificates(issue(tmp_path)))
    async with cluster(token=TOKEN, tls=usual()) as c, relay.between() as front:
        relay.target = parse_address(c.address)
        joining = tensorhub.connect(f"tcp://{front}", token=TOKEN, tls=usual(), options=OPTIONS)
        with pytest.raises(AuthenticationFailed, match="a relay with another certificate"):
            await joining


STRANGER = trustme.CA()
Make = Callable[[Path], Any]


def _trusts(stranger: trustme.CA, files: TLS) -> TLS:
    Path(files.ca).write_bytes(stranger.cert_pem.bytes())
    return files


def _expired(to: Path) -> TLS:
    return issue(to, not_before=LONG_AGO, not_after=LONG_AGO)


def _another(to: Path) -> TLS:
    return issue(to, by=STRANGER)


@pytest.mark.parametrize(
    ("served", "presented", "error", "said"),
    [
        (None, _expired, AuthenticationFailed, "does not accept this side's certificate .*expired"),
        (None, _another, AuthenticationFailed, "does not accept this side's.*unknown ca"),
        (_expired, None, AuthenticationFailed, "expired; renew it"),
        (_another, None, AuthenticationFailed, "an authority in .*ca.pem must have signed it"),
        (lambda to: issue(to, "elsewhere"), None, AuthenticationFailed, f"issued for '{HERE}'"),
        (None, lambda to: _trusts(STRANGER, issue(to)), AuthenticationFailed, "must have signed"),
        (None, lambda to: False, SpeaksTls, "set TLS up on both sides or on neither"),
        (lambda to: False, None, ProtocolError, "the coordinator speaks no TLS"),
    ],
)
async def test_a_worker_is_told_what_is_wrong(
    tmp_path: Path,
    served: Make | None,
    presented: Make | None,
    error: type[Exception],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs = served(tmp_path / "served") if served else usual()
    ours = presented(tmp_path / "presented") if presented else usual()
    async with cluster(token=TOKEN, tls=theirs) as c:
        joining = tensorhub.connect(c.address, token=TOKEN, tls=ours, options=OPTIONS)
        with pytest.raises(error, match=said):
            await joining
        with anyio.fail_after(WAIT_S):  # and the coordinator's log has it, too
            while "peer_refused" not in caplog.text:  # noqa: ASYNC110 - a log has no event
                await anyio.sleep(0.01)
    assert TOKEN not in caplog.text


async def test_certificates_and_authorities_are_changed_under_running_workers(
    tmp_path: Path,
) -> None:
    """An operator's three steps: both authorities, then the new certificates, then the new
    authority alone.
    """
    new = trustme.CA()
    files = {name: issue(tmp_path / name) for name in ("coordinator", "a", "b")}
    stale = _trusts(new, issue(tmp_path / "stale"))

    def trust(*authorities: trustme.CA) -> None:
        for each in files.values():
            Path(each.ca).write_bytes(b"".join(ca.cert_pem.bytes() for ca in authorities))

    async with (
        cluster(token=TOKEN, tls=files["coordinator"]) as c,
        connect(c.address, "a", files["a"]) as a,
    ):
        weights = await published(a)
        for name in files:
            issue(tmp_path / name, by=new)
        trust(authority(), new)
        async with connect(c.address, "b", files["b"]) as b:
            target = tensors()
            copy = await b.register("m", target)
            await copy.update("latest")
            assert holds(target, 1)
            trust(new)
            with pytest.raises(AuthenticationFailed, match="unknown ca"):
                await tensorhub.connect(c.address, token=TOKEN, tls=stale, options=OPTIONS)
            await weights.unpublish()
            await weights.publish(2)
            await copy.update("latest")


async def test_an_owner_takes_no_reader_without_tls() -> None:
    async with (
        cluster(token=TOKEN, tls=usual()) as c,
        connect(c.address, "a") as a,
    ):
        await published(a)
        [worker] = (await a.describe("m")).workers
        host, port = parse_address(worker.endpoints[0].address)

        def read() -> None:
            sock = socket.create_connection((host, port))
            with BlockingConnection(sock, stall_timeout_s=WAIT_S) as connection:
                hello = ClientHandshake("reader", "r", TOKEN.encode(), bytes(NONCE_BYTES))
                connection.handshake(hello, WAIT_S)

        with pytest.raises(SpeaksTls, match="this side does not"):
            await anyio.to_thread.run_sync(read)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_client_that_stops_within_the_handshake_meets_its_deadline(said: bytes) -> None:
    options = replace(OPTIONS, connect_timeout_s=0.1)
    async with cluster(token=TOKEN, tls=usual(), options=options) as c:
        stream = await anyio.connect_tcp(*parse_address(c.address))
        async with stream:
            if said:
                await stream.send(said)
            with anyio.fail_after(WAIT_S), pytest.raises(anyio.EndOfStream):
                await stream.receive()
        with pytest.raises(CoordinatorUnavailable, match="no coordinator can be reached"):
            await tensorhub.connect("tcp://127.0.0.1:1", token=TOKEN, tls=usual(), options=OPTIONS)


async def test_http_needs_a_token_and_no_certificate() -> None:
    """A browser, a probe of Kubernetes and Prometheus have none."""
    trusts = ssl.create_default_context(cadata=authority().cert_pem.bytes().decode())
    options = replace(OPTIONS, http=f"{HERE}:0")

    def get(url: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(url, context=trusts, timeout=WAIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    async with cluster(token=TOKEN, tls=usual(), options=options) as c:
        url = c.coordinator.http_url
        assert url is not None
        assert url.startswith("https://")
        asked = [f"{url}healthz", f"{url}metrics", url.replace("https", "http"), f"{url}healthz"]
        answers = [await anyio.to_thread.run_sync(get, each) for each in asked]
        assert [code for code, _ in answers] == [200, 401, 400, 200]
        assert b"https://" in answers[2][1]


def test_the_commands_of_the_page_make_certificates_that_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "SECURITY.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```sh\n(openssl.*?)```", page, re.DOTALL)
    commands = commands.replace("DNS:a.example", "DNS:localhost")
    subprocess.run(
        ["sh", "-ec", commands], cwd=tmp_path, check=True, capture_output=True, timeout=WAIT_S
    )
    files = TLS(*[tmp_path / name for name in ("coordinator.pem", "coordinator.key", "ca.pem")])
    with sync.serve("localhost", token=TOKEN, tls=files) as coordinator:
        address = coordinator.address.replace(HERE, "localhost")
        with sync.connect(address, token=TOKEN, tls=files, options=OPTIONS) as hub:
            assert hub.describe() == ()


def test_the_blocking_form_takes_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As adapters of frameworks do."""
    for name in ("cert", "key", "ca"):
        monkeypatch.setenv(f"TENSORHUB_TLS_{name.upper()}", str(getattr(usual(), name)))
    with sync.serve(token=TOKEN) as coordinator:
        with sync.connect(coordinator.address, token=TOKEN, options=OPTIONS) as hub:
            assert hub.describe() == ()
        with pytest.raises(SpeaksTls):
            sync.connect(coordinator.address, token=TOKEN, tls=False, options=OPTIONS)
