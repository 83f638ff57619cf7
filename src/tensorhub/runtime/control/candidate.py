"""A coordinator among those of its cluster: it stands by, leads for a term, and stands by again.

Responsible for the port, which is bound all the time and listened on only by a leader, so that
clients are refused at once by all others; and for a server of its own for each term. Not
responsible for the election (`Election`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import anyio

from tensorhub.errors import AuthenticationFailed, StateError
from tensorhub.logs import get_logger
from tensorhub.protocol.certificates import Certificates
from tensorhub.protocol.secret import check_open_access
from tensorhub.runtime.control.election import Deposed, Election, Term
from tensorhub.runtime.control.port import bound
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.transport import sockets
from tensorhub.types import Options

AGAIN_S = 1.0  # between campaigns, if the engine cannot be used
RESIGN_S = 3.0  # for an engine to take the leadership back

log = get_logger("tensorhub.coordinator")


class Candidate:
    """One coordinator on one address. `await run(...)` stands by and serves until cancelled."""

    def __init__(
        self,
        *,
        options: Options,
        secrets_accepted: Sequence[bytes],
        election: Election,
        certificates: Certificates | None = None,
    ) -> None:
        self.address = ""  # "tcp://host:port", once it is bound
        self.leader = ""  # another's address, as this one stands by; "": not known
        self.server: CoordinatorServer | None = None  # while this one leads
        self._options = options
        self._secrets = secrets_accepted
        self._certificates = certificates  # None: no TLS
        self._election = election
        self._has_begun = False
        self.failure = ""  # of the last campaign

    def __repr__(self) -> str:
        return f"<Candidate {self.address} {'leads' if self.server else 'stands by'}>"

    async def run(self, host: str, port: int, ready: Callable[[], None]) -> None:
        """Bind the port, and call `ready` once this one leads or stands by. Raises StateError: the
        port cannot be had, or the engine or its state cannot be used at the first try.
        """

        def begin() -> None:
            if not self._has_begun:
                self._has_begun = True
                ready()

        try:
            check_open_access(b"".join(self._secrets), host)
            with await bound(host, port, self._options.connect_timeout_s) as holder:
                self.address = sockets.address_of(holder)
                while True:
                    term = await self._campaign(begin)
                    if term is None:
                        await anyio.sleep(AGAIN_S)
                    else:
                        await self._lead(term, holder, begin)
        finally:
            with anyio.move_on_after(RESIGN_S, shield=True):
                await self._election.aclose()

    async def _campaign(self, begin: Callable[[], None]) -> Term | None:
        """None: the engine cannot be used now."""

        def stands_by(leader: str) -> None:
            self.leader = leader
            log.info("coordinator_stands_by", address=self.address, leader=leader or "unknown")
            begin()

        advertised = self._options.advertise
        address = self.address if advertised is None else f"tcp://{advertised}"
        try:
            term = await self._election.campaign(address, stands_by)
            self.failure = ""
            return term
        except (StateError, AuthenticationFailed, OSError) as error:
            if not self._has_begun:
                raise
            if self.failure != str(error):
                self.failure = str(error)
                log.error("campaign_failed", reason=self.failure)
            return None
        finally:
            self.leader = ""

    async def _lead(self, term: Term, holder: socket.socket, begin: Callable[[], None]) -> None:
        server = CoordinatorServer(
            options=self._options,
            secrets_accepted=self._secrets,
            store=term.store,
            certificates=self._certificates,
            left_s=lambda: term.left_s,
        )
        why, pause_s = "", 0.0

        def listens() -> None:
            self.server = server
            begin()

        try:
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    nonlocal why
                    why = await term.lost()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(watch)
                await server.run(holder, listens)
        except* (Deposed, StateError) as group:
            if not self._has_begun:
                raise
            why = why or _first(group) or term.why
            pause_s = AGAIN_S if group.subgroup(StateError) else 0.0
        finally:
            pause_s = pause_s if self.server else AGAIN_S  # a term that ended at once
            self.server = None
            with anyio.move_on_after(RESIGN_S, shield=True):
                await term.resign()
        await anyio.sleep(pause_s)  # and not on, if this coordinator is closed
        log.error("leadership_lost", epoch=term.store.epoch, reason=why)


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
