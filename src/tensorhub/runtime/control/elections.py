"""The engines that `serve` can be told of, and the simplest: one process, or the lock of one
directory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import anyio.to_thread

from tensorhub.errors import InvalidType, InvalidValue, shown
from tensorhub.runtime.control.election import Election, Store
from tensorhub.runtime.control.etcd import place_of
from tensorhub.runtime.control.lease_election import LeaseElection, lease_of
from tensorhub.runtime.control.store import InUse, MemoryStore, SqliteStore

POLL_S = 0.1  # between looks whether the lock is free


def election_of(ha: str | None, state_dir: str | None) -> Callable[[], Election]:
    """How to open what `serve(ha=, state_dir=)` names. Raises InvalidValue, InvalidType; opening
    raises StateError.
    """
    if not isinstance(ha, str | None):
        raise InvalidType(f"ha={shown(ha)}: give the engine that elects, as text, or None")
    if ha is not None and ha.startswith("etcd://"):
        place = place_of(ha)
        if state_dir is not None:
            raise InvalidValue(
                f"state_dir={shown(state_dir)}: with {place} the state is in etcd: leave state_dir "
                f"out (what it holds is not taken over)"
            )

        def open_() -> Election:
            from tensorhub.runtime.control.etcd_election import EtcdElection

            return EtcdElection(place)

        return open_
    if ha is not None and ha.startswith("kubernetes://"):
        lease = lease_of(ha)
        if state_dir is None:
            raise InvalidValue(f"ha={shown(ha)} needs a state_dir, which the candidates share")
        return lambda: LeaseElection(lease, lambda: SqliteStore(state_dir, shared=True))
    if ha not in (None, "lock"):
        raise InvalidValue(
            f'ha={shown(ha)}: give "etcd://HOST:PORT[,HOST:PORT...]/PREFIX", '
            f'"kubernetes://NAMESPACE/LEASE" or "lock"'
        )
    if state_dir is not None:
        return lambda: LocalElection(
            lambda address: SqliteStore(state_dir, address=address), waits=ha is not None
        )
    if ha is not None:
        raise InvalidValue('ha="lock" needs a state_dir, which has the lock')
    return lambda: LocalElection(lambda address: MemoryStore())


class LocalElection:
    """See `Election`. The process leads that has opened the store. `waits`: until another process
    lets go of it.
    """

    def __init__(self, open_store: Callable[[str], Store], *, waits: bool = False) -> None:
        self._open_store = open_store
        self._waits = waits

    async def campaign(self, address: str, stands_by: Callable[[str], None]) -> LocalTerm:
        told: str | None = None
        while True:
            try:
                return LocalTerm(await anyio.to_thread.run_sync(self._open_store, address))
            except InUse as error:
                if not self._waits:
                    raise
                leader = error.leader
            if leader != told:
                told = leader
                stands_by(leader)
            await anyio.sleep(POLL_S)

    async def aclose(self) -> None:
        pass


class LocalTerm:
    """See `Term`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.left_s = math.inf
        self.why = ""

    async def lost(self) -> str:
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async def resign(self) -> None:
        self.store.close()
