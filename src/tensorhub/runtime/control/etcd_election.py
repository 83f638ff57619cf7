"""Leadership by a lease in etcd, whose keys are:

    PREFIX/cluster           the cluster's record: its id, the newest leader's epoch, a sequence
    PREFIX/leader            the leader's address, for as long as its lease lives
    PREFIX/candidates/ID     each candidate's address, the same
    PREFIX/state/, state.N/, staged/   rows (`etcd_store`)

Each transaction of a leader compares the record's value and the revision that has created `leader`,
and raises the sequence. So no other term, and no earlier attempt at the same transaction, comes
between; and an attempt with an unknown outcome is repeated until the record says what it was.

A term ends by this machine's own clock (which also counts while the machine sleeps) a fifth of a
lease before etcd can end the lease.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import anyio

from tensorhub.errors import StateError, shown
from tensorhub.runtime.clock import boot_time
from tensorhub.runtime.control import etcd
from tensorhub.runtime.control.election import STOPPED, Deposed, Store
from tensorhub.runtime.control.etcd import (
    ANSWER_S,
    ATTEMPT_S,
    Etcd,
    KeyValue,
    Place,
    Refused,
    Unanswered,
)
from tensorhub.runtime.control.etcd_store import EtcdStore, Record

POLL_S = 0.1  # between a candidate's looks at the leader's key
TAKES_MAX = 20  # transactions for the leadership in a row, after which no look finds a leader
AGAIN_S = 0.1  # between attempts that etcd does not answer
ADDRESS_BYTES_MAX = 512  # of a leader's, as it is logged
CALM = 0.2  # of a lease: what is left of it when a term ends, and the time between two renewals


now = boot_time


class Lease:
    """A lease of etcd, and its end by this machine's own clock."""

    def __init__(self, etcd_: Etcd) -> None:
        self._etcd = etcd_
        self.id = 0
        self.seconds = 0.0
        self.ends_at = 0.0

    @property
    def left_s(self) -> float:
        return self.ends_at - now()

    @property
    def is_due(self) -> bool:
        """Whether it is time to renew it."""
        return self.left_s < (1 - 2 * CALM) * self.seconds

    async def grant(self, seconds: int) -> None:
        began = now()
        self.id, granted_s = await self._etcd.grant(seconds)
        self._count(began, granted_s)

    async def renew(self, within_s: float = ANSWER_S) -> bool:
        """Whether etcd still has it."""
        began = now()
        seconds = await self._etcd.keep_alive(self.id, within_s=within_s)
        if seconds <= 0:
            return False
        self._count(began, seconds)
        return True

    def _count(self, began: float, seconds: float) -> None:
        self.seconds, self.ends_at = seconds, began + (1 - CALM) * seconds

    async def revoke(self) -> None:
        """End it, if there is one, and by that its keys. Raises Unanswered, Refused."""
        if self.id:
            await self._etcd.revoke(self.id)
            self.id = 0


class EtcdElection:
    """See `Election`."""

    def __init__(self, place: Place) -> None:
        """Raises StateError: the extra is not installed, a certificate cannot be used."""
        self._place = place
        self._etcd = Etcd(place)
        self._lease = Lease(self._etcd)
        self._candidate = place.key(f"candidates/{secrets.token_hex(8)}")
        self._seen: Record | None = None  # of this process' newest term

    def __repr__(self) -> str:
        return f"<EtcdElection at {self._place}>"

    async def campaign(self, address: str, stands_by: Callable[[str], None]) -> EtcdTerm:
        try:
            return await self._campaign(address.encode(), stands_by)
        except Refused as error:
            raise error.for_caller() from error
        except Unanswered as error:
            raise StateError(f"{self._place}: {error}", retryable=True) from error

    async def _campaign(self, address: bytes, stands_by: Callable[[str], None]) -> EtcdTerm:
        await self._lease.revoke()  # of a term before
        whole, ours = self._place.key(""), self._place.key("candidates/")
        look = [
            etcd.get(self._place.key("cluster")),
            etcd.get(self._place.key("leader")),
            etcd.get(whole, ours, 1),  # the first of all other keys
            etcd.get(etcd.after(ours), etcd.after(whole), 1),
        ]
        told: bytes | None = None
        takes = 0
        while True:
            if not self._lease.id or (self._lease.is_due and not await self._lease.renew()):
                await self._lease.grant(self._place.lease_s)
                await self._put(self._candidate, address)
            found = await self._etcd.transact((), look)
            cluster, leader, *others = (each[0] if each else None for each in found.ranges)
            if cluster is None and (other := others[0] or others[1]) is not None:
                text = f"the prefix has something else, such as {shown(other.key)}"
                raise StateError(f"{self._place}: {text}: give another one")
            if leader is None:
                if takes == TAKES_MAX:
                    text = f"{takes} transactions for the leadership, and no leader is found"
                    hint = "are these endpoints members of one etcd?"
                    raise StateError(f"{self._place}: {text}: {hint}", retryable=True)
                await anyio.sleep(POLL_S if takes else 0)
                await self._take(cluster, address)
                takes += 1
                continue
            takes = 0
            if leader.lease == self._lease.id and cluster is not None:
                self._seen = Record.decode(cluster.value, self._place)
                return EtcdTerm(self._etcd, self._place, self._lease, self._seen, leader.created)
            if leader.value != told:
                told = leader.value
                stands_by(told[:ADDRESS_BYTES_MAX].decode(errors="replace"))
            await anyio.sleep(POLL_S)

    async def _put(self, key: bytes, value: bytes) -> None:
        put = etcd.put(key, value, self._lease.id)
        await self._etcd.transact((), [put])

    async def _take(self, cluster: KeyValue | None, address: bytes) -> None:
        """Begin a term, if no other candidate is faster: a new leader and its epoch, in one
        transaction.
        """
        key, leader = self._place.key("cluster"), self._place.key("leader")
        if cluster is None:
            before, record = etcd.is_created(key, 0), Record(secrets.token_hex(8), 1)
        else:
            last = Record.decode(cluster.value, self._place)
            before = etcd.is_value(key, cluster.value)
            record = replace(last, epoch=last.epoch + 1, sequence=0)
        seen = self._seen
        if seen and record.epoch <= seen.epoch:
            text = (
                f"it knows less than this coordinator: epoch {record.epoch - 1} of cluster "
                f"{record.cluster}, after epoch {seen.epoch} of {seen.cluster}. Was etcd restored "
                f"from an old copy? Restart the coordinators to go on with that"
            )
            raise StateError(f"{self._place}: {text}")
        await self._etcd.transact(
            [before, etcd.is_created(leader, 0)],
            [etcd.put(key, record.encode()), etcd.put(leader, address, self._lease.id)],
        )

    async def aclose(self) -> None:
        with contextlib.suppress(Unanswered, Refused):  # then etcd ends it by itself
            await self._lease.revoke()
        await self._etcd.aclose()


class EtcdTerm:
    """See `Term`. It is the fence of its store, too."""

    def __init__(
        self, etcd_: Etcd, place: Place, lease: Lease, record: Record, created: int
    ) -> None:
        self._etcd = etcd_
        self._place = place
        self._lease = lease
        self._record = record
        self._created = created  # the revision of the leader's key
        self._why_ended = ""
        self._late = STOPPED
        self._under_way = anyio.CancelScope()  # of what the store asks
        self._ended = anyio.Event()
        self.store: Store = EtcdStore(place, self)

    @property
    def record(self) -> Record:
        return self._record

    @property
    def left_s(self) -> float:
        return 0.0 if self._why_ended else self._lease.left_s

    @property
    def why(self) -> str:
        return self._why_ended or f"its lease was not renewed in time: {self._late}"

    async def lost(self) -> str:
        try:
            self._end(await self._keep())
        finally:  # the shell may end it first
            self._end("its shell ended the term" if self._lease.left_s > 0 else self.why)
        return self.why

    async def _keep(self) -> str:
        while not self._why_ended:
            if self._lease.left_s <= 0:
                return self.why
            if not self._lease.is_due:
                with anyio.move_on_after(CALM / 2 * self._lease.seconds):
                    await self._ended.wait()
                continue
            within_s = min(2 * ATTEMPT_S, self._lease.left_s)
            self._late = self._late if self._late != STOPPED else "etcd has not answered"
            try:
                if not await self._lease.renew(within_s):
                    return "etcd ended its lease"
                leader = etcd.get(self._place.key("leader"))
                found = await self._etcd.transact((), [leader], within_s=within_s)
                if not found.ranges[0] or found.ranges[0][0].created != self._created:
                    return f"another coordinator leads: {found.ranges[0]}"
                self._late = STOPPED
            except (Unanswered, Refused) as error:
                self._late = str(error)
                await anyio.sleep(AGAIN_S)
        return self._why_ended

    async def resign(self) -> None:
        self._end("it resigned")
        self.store.close()
        with contextlib.suppress(Unanswered, Refused):  # the next campaign tries again
            await self._lease.revoke()

    def _end(self, why: str) -> None:
        self._why_ended = self._why_ended or why
        self._ended.set()
        self._under_way.cancel()

    # -- the fence

    def depose(self, why: str) -> NoReturn:
        self._end(why)
        raise Deposed(f"the term of epoch {self._record.epoch} has ended: {self._why_ended}")

    async def values(self, name: str) -> list[KeyValue]:
        with anyio.CancelScope(shield=True) as self._under_way:
            if not self._why_ended:
                try:
                    return await self._etcd.values(self._place.key(name))
                except Unanswered as error:
                    raise StateError(f"{self._place}: {error}", retryable=True) from error
        self.depose("")

    async def commit(
        self, operations: Sequence[dict[str, Any]], record: Record | None = None
    ) -> None:
        """See `Fence`. Repeats the transaction until its outcome is known, or the term ends."""
        record = replace(record or self._record, sequence=self._record.sequence + 1)
        with anyio.CancelScope(shield=True) as self._under_way:
            if not self._why_ended:
                await self._commit(record, operations)
                self._record = record
                return
        self.depose("")

    async def _commit(self, record: Record, operations: Sequence[dict[str, Any]]) -> None:
        key, leader = self._place.key("cluster"), self._place.key("leader")
        then = [etcd.put(key, record.encode()), *operations]
        compare = [
            etcd.is_value(key, self._record.encode()),
            etcd.is_created(leader, self._created),
        ]
        surely, reason = True, ""  # whether no attempt can have come through, nor ever will
        while (left_s := self._lease.left_s) > 0:
            try:
                found = await self._etcd.transact(
                    compare, then, [etcd.get(key), etcd.get(leader)], within_s=min(ANSWER_S, left_s)
                )
            except Unanswered as error:
                surely, reason = False, str(error)
            except Refused as error:
                if surely and error.surely:
                    raise OSError(f"the state cannot be written: {error}") from error
                reason = str(error)
            else:
                if found.succeeded:
                    return
                at_key, at_leader = found.ranges
                leads = [each.created for each in at_leader] == [self._created]
                if leads and [each.value for each in at_key] == [record.encode()]:
                    return  # by an attempt that was not answered
                self.depose(f"another coordinator has written: {at_leader or at_key}")
            await anyio.sleep(AGAIN_S)
        self.depose(f"whether etcd has the last write is unknown: {reason}")
