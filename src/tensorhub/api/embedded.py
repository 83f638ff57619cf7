"""A coordinator in this process: `serve`, part of the public async API. A bridge to a thread of its
own, no logic.

Not responsible for what a coordinator does (`coordinator`, `runtime.control`).
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING, Literal

from tensorhub.api.arguments import checked_options
from tensorhub.api.opening import Opening, Unpicklable
from tensorhub.errors import InvalidType, InvalidValue, shown
from tensorhub.protocol.certificates import TLS, open_certificates, resolve_tls
from tensorhub.protocol.secret import check_open_access, resolve_token
from tensorhub.runtime.control.candidate import Candidate
from tensorhub.runtime.control.elections import election_of
from tensorhub.runtime.control.keyring import open_keyring
from tensorhub.runtime.ending import CLOSE_S, Parting
from tensorhub.runtime.loop_thread import CallerMode, LoopThread
from tensorhub.types import Options, as_integer, invalid
from tensorhub.web import open_endpoint

if TYPE_CHECKING:
    from tensorhub.web.endpoint import Endpoint


class Coordinator(Unpicklable):
    """A coordinator embedded in this process, on a thread and loop of its own. Made by `serve`."""

    def __init__(self, candidate: Candidate, thread: LoopThread, http_url: str | None) -> None:
        self._candidate = candidate
        self._thread = thread
        self._http_url = http_url

    @property
    def address(self) -> str:
        """What `connect` takes: "tcp://host:port"."""
        return self._candidate.address

    @property
    def leading(self) -> bool:
        """Whether it serves; else it stands by (see `serve(ha=)`)."""
        return self._candidate.server is not None

    @property
    def http_url(self) -> str | None:
        """Of its HTTP endpoint and dashboard: "http://host:port/", "https://" with TLS; None
        without `Options.http`.
        """
        return self._http_url

    def __repr__(self) -> str:
        return f"<Coordinator at {self.address}{'' if self.leading else ' stands by'}>"

    async def close(self) -> None:
        """End it; the end of its block does that too, and so does the interpreter's exit."""
        self._thread.end_soon(Parting(CLOSE_S, "the coordinator was closed"))
        await self._thread.ended()


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | bytes | os.PathLike[str] | None = None,
    tls: TLS | Literal[False] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    ha: str | None = None,
    options: Options | None = None,
) -> Opening[Coordinator]:
    """Run a coordinator: `async with tensorhub.serve() as coordinator`, for the length of the
    block, or `coordinator = await tensorhub.serve()`, until its `close()` or the interpreter's
    exit.

    `port` 0 takes a free one. `token`: the cluster's secret (text or bytes), or a token file (a
    `pathlib.Path`; one token a line: each is accepted, and the file is read again when it changes);
    None takes
    TENSORHUB_TOKEN, then a token file, else access is open, which only loopback allows.
    `tls`: the files for TLS; None takes TENSORHUB_TLS_CERT, _KEY and _CA, else connections are not
    encrypted, as with False. `state_dir`: where versions' marks are kept (SQLite, synced), a
    directory that this user or root owns, and that is not world-writable; without one, a
    coordinator that restarts is a new cluster.

    Raises StateError (port in use, also that of `Options.http`; state_dir in use or unusable),
    AuthenticationFailed (open access beyond loopback, a file of `token` or `tls` that cannot be
    used).
    """
    files = resolve_tls(tls)
    secret, token = resolve_token(token), None  # what this frame has, a traceback with locals shows
    if not isinstance(host, str):
        raise InvalidType(f"host={shown(host)}: give a name or an address to listen on, as text")
    number = as_integer(port)
    if number is None or not 0 <= number <= 65_535:
        raise invalid(port, int, f"port={shown(port)}: give a port, 0 (any free one) to 65535")
    port = number
    if not isinstance(state_dir, str | os.PathLike | None):
        raise InvalidType(f"state_dir={shown(state_dir)}: give the path of a directory, or None")
    if isinstance(state_dir, str) and (not state_dir or "\0" in state_dir):
        raise InvalidValue(f"state_dir={shown(state_dir)}: give the path of a directory, or None")
    checked = checked_options(options)
    open_election = election_of(ha, None if state_dir is None else os.fspath(state_dir))
    if ha is not None and host in ("0.0.0.0", "::") and checked.advertise is None:
        text = f"with ha= and host={shown(host)}, give Options.advertise=HOST:PORT"
        raise InvalidValue(f"{text}, where workers reach this coordinator")

    async def begin(mode: CallerMode) -> Coordinator:
        secrets, certificates = open_keyring(secret), open_certificates(files)
        check_open_access(secrets[0], host)
        candidate: list[Candidate] = []
        http_url: list[str] = []

        async def main(thread: LoopThread) -> None:
            with contextlib.ExitStack() as stack:
                candidate.append(
                    Candidate(
                        options=checked,
                        secrets_accepted=secrets,
                        election=open_election(),
                        certificates=certificates,
                    )
                )
                ready = thread.ready
                if checked.http is not None:
                    endpoint = stack.enter_context(
                        await open_endpoint(
                            checked.http, secrets[0], checked.connect_timeout_s, certificates
                        )
                    )
                    http_url.append(endpoint.url)
                    ready = partial(show, endpoint, thread)
                await candidate[0].run(host, port, ready)

        def show(endpoint: Endpoint, thread: LoopThread) -> None:
            from tensorhub.web.of_coordinator import show_coordinator

            show_coordinator(endpoint, candidate[0], thread.post, secrets)
            thread.ready()

        thread = LoopThread(
            "tensorhub-coordinator", main, mode, exit_s=checked.exit_timeout_s, ends_last=True
        )
        await thread.start()
        return Coordinator(candidate[0], thread, http_url[0] if http_url else None)

    return Opening(begin, "serve")
