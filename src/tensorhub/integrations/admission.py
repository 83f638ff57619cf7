"""An admission gate before an engine's HTTP API: a request says which versions of the weights it
accepts, and each answer says which version the engine had. ASGI middleware without dependencies:

    app = VersionGate(app, weights.stamp)

A request may carry one of

    TensorHub-Version: >=12     this version or a newer one
    TensorHub-Version: =12      this version alone

It is answered 400 if the header is neither, and 409 with `Retry-After` if the engine has another
version, or none at the moment. A request without the header is always let in.

Each answer has `TensorHub-Version-Start`, the stamp (`tensorhub.Stamp`) of the weights when the
request was let in, and `TensorHub-Version-End`, their stamp once the last byte of the body was
made. Either is "none" where no version was in place. Equal stamps: one content produced all of it
(unless the engine went to another version and back). Where the end comes:

    an answer in one piece                           in its headers
    a streamed one, and the server has the           as a trailer, which `Trailer` announces
    extension http.response.trailers
    a streamed one, and the server has it not        nowhere, but in the body if `ending` adds it
    (uvicorn over HTTP/1.1)

Responsible for HTTP; WebSockets pass. Not responsible for an update while a request waits inside
the engine: the two stamps tell. Put a middleware that compresses outside of this one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from tensorhub.errors import InvalidType, InvalidValue, StateError, shown
from tensorhub.model.stamps import Stamp
from tensorhub.types import VERSION_MAX

__all__ = ["VersionGate", "sse_ending"]

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Ending = Callable[[str, str, str], bytes]
Header = tuple[bytes, bytes]

ACCEPTS: Final = b"tensorhub-version"
START: Final = b"tensorhub-version-start"
END: Final = b"tensorhub-version-end"
NONE: Final = "none"  # no version was in place
_ACCEPTED: Final = re.compile(rb"(>=|=)\s*([0-9]{1,19})")
# what carries a body; the last two are servers' extensions
_BODIES: Final = frozenset(
    {"http.response.body", "http.response.pathsend", "http.response.zerocopysend"}
)


def sse_ending(content_type: str, start: str, end: str) -> bytes:
    """For `VersionGate(ending=)`: to server-sent events, an event "tensorhub" with both stamps as
    JSON; nothing to other bodies.
    """
    if content_type.partition(";")[0].strip().lower() != "text/event-stream":
        return b""
    return f"event: tensorhub\ndata: {json.dumps({'start': start, 'end': end})}\n\n".encode()


class VersionGate:
    """See above. `stamp`: of the engine's weights: `Weights.stamp`, or what else returns a Stamp
    and raises StateError while no version is in place. `ending`: given the content type of a
    streamed answer without a length and without trailers, and its two stamps, the bytes to append
    to its body, such as `sse_ending`.

    Raises InvalidType and InvalidValue for an argument that cannot be used.
    """

    def __init__(
        self,
        app: App,
        stamp: Callable[[], Stamp],
        *,
        retry_after_s: float = 1.0,
        ending: Ending | None = None,
    ) -> None:
        given: object = stamp
        if not callable(given):
            raise InvalidType(f"stamp={shown(given)}: give a function, such as weights.stamp")
        if not 0 <= retry_after_s < math.inf:
            raise InvalidValue(f"retry_after_s={shown(retry_after_s)}: give seconds, 0 or more")
        self._app, self._stamp, self._ending = app, stamp, ending
        self._retry_after = f"{max(1, math.ceil(retry_after_s))}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = self._now()
        has_trailers = "http.response.trailers" in (scope.get("extensions") or {})
        answer = _Answer(send, start, self._now, has_trailers, self._ending)
        try:
            accepts = _accepted(scope["headers"])
        except InvalidValue as error:
            await _refuse(answer, 400, str(error))
            return
        if accepts is None or accepts(start):
            await self._app(scope, receive, answer)
            return
        version = "no version now" if start is None else f"version {start.version}"
        text = f"this engine has {version}, and the request accepts {accepts}"
        await _refuse(answer, 409, text, (b"retry-after", self._retry_after))

    def _now(self) -> Stamp | None:
        try:
            return self._stamp()
        except StateError:
            return None


class _Accepted:
    """The versions that a request accepts."""

    def __init__(self, relation: str, number: int) -> None:
        self._relation, self._number = relation, number

    def __str__(self) -> str:
        return f"{self._relation}{self._number}"

    def __call__(self, stamp: Stamp | None) -> bool:
        if stamp is None:
            return False
        newer = self._relation == ">=" and stamp.version > self._number
        return newer or stamp.version == self._number


def _accepted(headers: Iterable[Header]) -> _Accepted | None:
    """None: the request does not say. InvalidValue: it says what cannot be understood."""
    said = [value.strip() for name, value in headers if name.lower() == ACCEPTS]
    if not said:
        return None
    found = _ACCEPTED.fullmatch(said[0]) if len(said) == 1 else None
    if found is None or int(found[2]) > VERSION_MAX:
        text = shown(b", ".join(said).decode("latin-1"))
        raise InvalidValue(f"TensorHub-Version: {text}: give >=N or =N, N from 0 to 2**63 - 1")
    return _Accepted(found[1].decode(), int(found[2]))


async def _refuse(send: Send, status: int, text: str, *headers: Header) -> None:
    body = f"{text}\n".encode("ascii", "backslashreplace")
    plain = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", f"{len(body)}".encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*plain, *headers]})
    await send({"type": "http.response.body", "body": body})


def _without_stamps(message: Message) -> list[Header]:
    """The application's own headers: what it passes on of another gate's would contradict this
    one's.
    """
    return [each for each in message.get("headers", ()) if each[0].lower() not in (START, END)]


def _text(stamp: Stamp | None) -> str:
    return NONE if stamp is None else str(stamp)


class _Answer:
    """The `send` of one answer: it adds the stamps. The headers wait for the first piece of the
    body, as the only piece brings the end with it.
    """

    def __init__(
        self,
        send: Send,
        start: Stamp | None,
        now: Callable[[], Stamp | None],
        has_trailers: bool,
        ending: Ending | None,
    ) -> None:
        self._send, self._start, self._now = send, _text(start), now
        self._has_trailers, self._ending = has_trailers, ending
        self._head: Message | None = None  # not sent yet
        self._app_trails = False  # the application sends trailers
        self._content_type: str | None = None  # of a body to which bytes may be appended
        self._told = False  # the end was said, or cannot be

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self._head = {**message, "headers": _without_stamps(message)}
        elif kind in _BODIES:
            is_last = not message.get("more_body", False)
            if self._head is not None:
                await self._begin(self._head, is_last)
                self._head = None
            await self._piece(message, is_last)
        elif kind == "http.response.trailers" and not self._told:
            if message.get("more_trailers", False):
                await self._send(message)
            else:
                self._told = True
                headers = [*_without_stamps(message), self._end()]
                await self._send({**message, "headers": headers})
        else:
            await self._send(message)

    async def _begin(self, head: Message, is_only: bool) -> None:
        """Send the headers; `is_only`: the first piece of the body is the only one."""
        headers: list[Header] = head["headers"]
        names = {name.lower(): value for name, value in headers}
        self._app_trails = bool(head.get("trailers", False))
        headers.append((START, self._start.encode()))
        if is_only:
            headers.append(self._end())
            self._told = True
        elif self._has_trailers:
            headers.append((b"trailer", END))
            head["trailers"] = True
        elif b"content-length" not in names:
            self._content_type = names.get(b"content-type", b"").decode("latin-1")
        await self._send(head)

    async def _piece(self, message: Message, is_last: bool) -> None:
        if not is_last or self._told:
            await self._send(message)
        elif self._has_trailers:
            await self._send(message)
            if not self._app_trails:
                self._told = True
                await self._send({"type": "http.response.trailers", "headers": [self._end()]})
        else:
            self._told = True
            last = b""
            if self._ending is not None and self._content_type is not None:
                last = self._ending(self._content_type, self._start, _text(self._now()))
            if last and message["type"] == "http.response.body":
                message = {**message, "body": message.get("body", b"") + last}
            await self._send(message)

    def _end(self) -> Header:
        return END, _text(self._now()).encode()
