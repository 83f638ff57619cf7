"""One HTTP listener, and the thread that serves it.

Responsible for the thread's life, and for what one connection may cost: its time, its memory and
its place. A failure here is logged, and the endpoint begins anew: what it shows goes on. Not
responsible for what is answered (`pages`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from h11 import ProtocolError
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from tensorhub.errors import (
    AuthenticationFailed,
    StateError,
    TensorHubError,
    shortage,
    shown,
)
from tensorhub.logs import Tally, get_logger
from tensorhub.protocol.certificates import Certificates
from tensorhub.protocol.secret import check_open_access
from tensorhub.protocol.tls import Tls
from tensorhub.runtime.control.accepting import network_of
from tensorhub.runtime.control.waiting import Waiting
from tensorhub.runtime.ending import CLOSE_S
from tensorhub.transport import sockets
from tensorhub.transport.forks import close_in_children
from tensorhub.types import parse_address
from tensorhub.web.pages import HEAD_BYTES_MAX

CONNECTIONS_MAX = 256  # and an eighth of the process' descriptors at most
TURN_S = (
    10.0  # from a connection's begin, or its last answer, to the end of the next request's head
)
ANSWER_S = 30.0  # for a client to take an answer
BACKLOG = 128
AGAIN_S = 5.0  # after a failure

log = get_logger("tensorhub.http")
refused = Tally(log.warning, "http_client_refused")
SILENT = logging.getLogger("tensorhub.http.connections")
SILENT.setLevel(logging.CRITICAL + 1)  # clients can make uvicorn say as much as they like


class Endpoint:
    """One listener. `start` begins to serve, `close` ends it."""

    def __init__(self, where: str, secret: bytes, certificates: Certificates | None = None) -> None:
        """Listen at "host:port". Raises StateError (it cannot be had), AuthenticationFailed (open
        access beyond loopback). `secret`: empty for open access.
        """
        host, port = parse_address(f"tcp://{where}")
        try:
            check_open_access(secret, host)
        except AuthenticationFailed as error:
            raise AuthenticationFailed(f"Options.http: {error}") from None
        try:
            self._listener = close_in_children(sockets.listen(host, port))
        except OSError as error:
            if (lack := shortage(error)) is not None:
                raise lack from error
            raise StateError(
                f"Options.http: port {port} of {host} {_advice(error)}",
                retryable=error.errno == errno.EADDRINUSE,
            ) from error
        self.host, self.port = self._listener.getsockname()[:2]
        self._pages: Callable[[], ASGIApp]
        self._certificates = certificates  # None: no TLS
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._wake: Callable[[], object] | None = None  # ends the loop, while there is one
        self._failures = Tally(log.error, "http_request_failed")

    def __repr__(self) -> str:
        return f"<Endpoint {self.url}>"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self._certificates else ''}://{host}:{self.port}/"

    def start(self, pages: Callable[[], ASGIApp]) -> None:
        """Serve what `pages` makes, in the thread. It is called in the thread's loop, and again
        after a failure.
        """
        self._pages = pages
        self._thread = threading.Thread(target=self._run, name="tensorhub-http", daemon=True)
        self._thread.start()
        log.info("http_listens", address=self.url)

    def close(self) -> None:
        """End all connections and the thread. Returns when that is done."""
        self._is_closing = True
        self._listener.close()
        wake = self._wake
        if wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                wake()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    # -- the thread

    def _run(self) -> None:
        pause = threading.Event()  # which only `close` ends
        while not self._is_closing:
            try:
                with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                    runner.run(self._serve())
            except Exception as error:
                self._wake = pause.set
                if not self._is_closing:
                    log.error("http_ended", address=self.url, reason=str(error), again_s=AGAIN_S)
                    pause.wait(AGAIN_S)

    async def _serve(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self._wake = partial(loop.call_soon_threadsafe, stop.set)
        if self._is_closing:
            return
        loop.set_exception_handler(self._loop_failed)
        config = _Config(
            self._pages(),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        config.load()
        connections = Connections(self._failures)

        def connection() -> asyncio.Protocol:
            made = Connection(config, connections)
            if self._certificates is None:
                return made
            return TlsFront(made, Tls(self._certificates, "http", peer="browser"))

        server = await loop.create_server(
            connection,
            sock=close_in_children(self._listener.dup()),
            backlog=BACKLOG,
        )
        try:
            await stop.wait()
        finally:
            server.close()
            connections.close()
            await asyncio.sleep(0)  # so that their sockets are closed

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback's exception, or a lack of descriptors when a connection was to be accepted."""
        self._failures.count(reason=f"{context.get('message')}: {context.get('exception')}")


class _Config(uvicorn.Config):
    def configure_logging(self) -> None:
        """Leave the loggers alone: the process may run a server of its own."""


class Connections:
    """All connections of an endpoint."""

    def __init__(self, failures: Tally) -> None:
        self.state = ServerState()
        self.failures = failures
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = min(CONNECTIONS_MAX, CONNECTIONS_MAX if soft < 0 else max(1, soft // 8))
        # without a request under way that may be answered, or with one that needs no token: those
        # that give their place up
        self.idle = Waiting[Connection]()
        self.open: set[Connection] = set()

    def admit(self, connection: Connection) -> bool:
        """Whether there is a place for one more. If all are taken, it gets that of a connection
        that has asked nothing, or has shown no token where one is needed.
        """
        if len(self.open) >= self.most:
            first = self.idle.first()
            if first is None:
                return False
            first.abort()
        self.open.add(connection)
        return True

    def close(self) -> None:
        for connection in list(self.open):
            connection.abort()


class Connection(H11Protocol):
    """One client's connection. The client has a time for each request, and for taking each
    answer.
    """

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config, connections.state, {})
        self.logger = SILENT
        self.access_log = False
        self._pages = self.app
        self.app = self._answer
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None  # of the request that is under way

    def abort(self) -> None:
        """End it at once, whatever lies unsent."""
        self._leave()
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._connections.admit(self):
            close_in_children(self)
            self._await_request()
        else:
            transport.abort()

    def close(self) -> None:
        """See `close_in_children`: the child's copy of the socket."""
        socket: Any = self.transport.get_extra_info("socket")
        socket._sock.close()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except ProtocolError:  # the client goes on after what was no request
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._leave()
        if self._task is not None:
            self._task.cancel()

    def _leave(self) -> None:
        self._connections.open.discard(self)
        self._connections.idle.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()

    def _await_request(self) -> None:
        self._connections.idle.discard(self)
        self._connections.idle.add(self, network_of(self.client[0] if self.client else ""))
        self._deadline = self.loop.call_later(TURN_S, self.abort)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["keep_place"] = partial(self._connections.idle.discard, self)
        if self._deadline is not None:
            self._deadline.cancel()
        self._task = asyncio.current_task()
        try:
            async with asyncio.timeout(ANSWER_S) as deadline:
                scope["deadline"] = deadline
                await self._pages(scope, receive, send)
        except TimeoutError:
            self.abort()
        except Exception as error:
            self._connections.failures.count(reason=f"{type(error).__name__}: {error}")
        finally:
            self._task = None
            if self in self._connections.open:
                self._await_request()


_NOT_HTTPS = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\n"
    b"This endpoint speaks TLS: write https:// in place of http://\n"
)


class TlsFront(asyncio.Protocol):
    """One client's connection, which counts from its first byte on, behind TLS. The client shows a
    token, and needs no certificate.
    """

    def __init__(self, connection: Connection, tls: Tls) -> None:
        self._connection = connection
        self._tls = tls
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        sealing: Any = _SealingTransport(transport, self._tls)
        self._connection.connection_made(sealing)

    def data_received(self, data: bytes) -> None:
        tls = self._tls
        try:
            if tls.is_open:
                tls.receive_data(data)
            else:
                tls.handshake(data)
                self._transport.write(tls.data_to_send())
            while tls.is_open and (received := tls.read()):
                self._connection.data_received(received)
        except TensorHubError as error:
            refused.count(reason=str(error))
            is_http = data[:1].isalpha()  # it begins with a method
            self._transport.write(_NOT_HTTPS if is_http else tls.data_to_send())
            self._transport.close()
        if tls.has_ended:
            self._transport.close()

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class _SealingTransport:
    """What the connection behind a `TlsFront` writes to."""

    def __init__(self, transport: asyncio.Transport, tls: Tls) -> None:
        self._transport = transport
        self._tls = tls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_extra_info(self, name: str) -> Any:
        return self._tls if name == "sslcontext" else self._transport.get_extra_info(name)

    def write(self, data: bytes) -> None:
        self._transport.write(self._tls.seal(data))

    def close(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._tls.close())
            self._transport.close()


def _advice(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            "is in use: stop the process that listens there, or choose another port (0 takes a "
            "free one)"
        )
    if error.errno == errno.EACCES:
        return "needs more rights: choose a port above 1023"
    return f"cannot be listened on: {shown(str(error))}"
