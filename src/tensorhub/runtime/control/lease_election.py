"""A Lease of Kubernetes (coordination.k8s.io/v1) elects, and a `state_dir` on a volume that the
candidates share keeps the state: `ha="kubernetes://NAMESPACE/LEASE"`.

Responsible for the Lease: taken by compare-and-swap of its resourceVersion once no candidate has
renewed it for its length by this machine's own clock, and given back. A Lease does not fence: a
leader that was paused may still write. The epoch in the shared state does (`SqliteStore`).
"""

from __future__ import annotations

import os
import re
import secrets
import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from tensorhub.errors import InvalidValue, StateError, install, shown
from tensorhub.logs import get_logger
from tensorhub.runtime.clock import boot_time
from tensorhub.runtime.control.election import STOPPED, Store
from tensorhub.runtime.control.etcd import answered, checked_token, without_frames

LEASE_S = 10.0
MARGIN_S = 2.0  # a leader that cannot renew stops so long before its Lease ends
RENEW_S = 2.0
LOOK_S = 0.5  # between a candidate's looks at the Lease
REQUEST_S = 3.0  # for one answer of the API server
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAME = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_URL = re.compile(rf"kubernetes://({_NAME})/({_NAME}(?:\.{_NAME})*)")
_FORBIDDEN = (401, 403)
_HOPELESS = (*_FORBIDDEN, 400, 404, 422)  # 404: of the namespace

log = get_logger("tensorhub.coordinator")
Record = dict[str, Any]  # a Lease, as JSON


def lease_of(url: str) -> tuple[str, str]:
    """The namespace and the Lease's name of "kubernetes://NAMESPACE/LEASE". Raises InvalidValue."""
    found = _URL.fullmatch(url)
    if found is None:
        raise InvalidValue(
            f"ha={shown(url)}: give kubernetes://NAMESPACE/LEASE, names as Kubernetes has"
        )
    return found[1], found[2]


now_s = boot_time


class Unanswered(StateError):
    """The API server did not answer as it should; `status` is 0 if it did not answer at all."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text, retryable=status not in _HOPELESS)
        self.status = status


class LeaseApi:
    """One Lease at the API server of this pod's cluster."""

    def __init__(self, namespace: str, name: str, account: Path = ACCOUNT) -> None:
        """Raises StateError outside of a pod, or without the extra `ha`."""
        try:
            import httpx
        except ImportError as error:
            raise StateError(f"a Lease needs httpx: {install('ha')}") from error
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise StateError(
                "ha=kubernetes://... works in a pod only: KUBERNETES_SERVICE_HOST is not set"
            )
        self.name, self._namespace, self._token = name, namespace, account / "token"
        try:
            verify = ssl.create_default_context(cafile=account / "ca.crt")
        except OSError as error:
            raise StateError(
                f"{account}/ca.crt cannot be used ({error}): set automountServiceAccountToken: true"
            ) from error
        at = f"[{host}]" if ":" in host else host
        self._leases = (
            f"https://{at}:{port}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        )
        self._client = httpx.AsyncClient(verify=verify, trust_env=False, timeout=REQUEST_S)

    async def get(self) -> Record | None:
        """None: there is no such Lease."""
        try:
            return await self._ask("GET", f"{self._leases}/{self.name}")
        except Unanswered as error:
            if error.status == 404:
                return None
            raise

    async def swap(self, found: Record | None, spec: Record) -> Record | None:
        """The Lease with this spec in place of what was found. None: it is another one by now."""
        metadata = {"name": self.name} if found is None else found["metadata"]
        record = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
        try:
            if found is None:
                written = await self._ask("POST", self._leases, record)
            else:
                written = await self._ask("PUT", f"{self._leases}/{self.name}", record)
            # an answer that names another holder is no success
            return written if _held(written)[0] == spec["holderIdentity"] else None
        except Unanswered as error:
            if error.status == 409 or (error.status == 404 and found is not None):
                return None
            raise

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._client.aclose()

    async def _ask(self, method: str, url: str, body: Record | None = None) -> Record:
        import httpx

        what = f"{method} of the Lease {self._namespace}/{self.name}"
        status = 0
        try:
            with anyio.fail_after(REQUEST_S):
                status, record = await without_frames(self._send(method, url, body))
            if status < 300:
                return _checked(record)
            why = record.get("message", "") if isinstance(record, dict) else ""
        except (httpx.HTTPError, OSError, ValueError, TypeError, KeyError) as error:
            text = f"{what}: no usable answer ({shown(error)})"
            raise Unanswered(text, status) from error
        advice = ": let a Role allow get, update and create of leases" * (status in _FORBIDDEN)
        raise Unanswered(f"{what}: {status} {shown(why)}{advice}", status)

    async def _send(self, method: str, url: str, body: Record | None) -> tuple[int, Any]:
        # it changes every hour
        token = checked_token(self._token.read_text(errors="replace").strip(), f"{self._token}")
        request = self._client.build_request(
            method, url, json=body, headers={"Authorization": f"Bearer {token}"}
        )
        return await answered(self._client, request)


def _checked(record: Any) -> Record:
    """A Lease that this module can use. Raises TypeError or KeyError."""
    if not isinstance(record["metadata"]["resourceVersion"], str):
        raise TypeError("a Lease without a resourceVersion")
    spec = record["spec"] = record.get("spec") or {}
    if not isinstance(spec, dict):
        raise TypeError("a Lease with a spec that is none")
    for key in ("holderIdentity", "leaseDurationSeconds", "leaseTransitions"):
        match spec.get(key):
            case None:
                continue
            case str() if key == "holderIdentity":
                continue
            case int(number) if key != "holderIdentity" and 0 <= number < 2**31:
                continue
        raise TypeError(f"a Lease with {key}={shown(spec[key])}")
    found: Record = record
    return found


class LeaseElection:
    """A candidate for a Lease."""

    def __init__(
        self, lease: tuple[str, str], open_store: Callable[[], Store], account: Path = ACCOUNT
    ) -> None:
        """`lease`: see `lease_of`. `open_store`: blocks, and makes this coordinator the one that
        may write. Raises StateError outside of a pod.
        """
        self._api = LeaseApi(*lease, account)
        self._open_store = open_store

    async def campaign(self, address: str, stands_by: Callable[[str], None]) -> LeaseTerm:
        """See `Election`."""
        identity = f"{address}#{secrets.token_hex(8)}"
        found = await self._api.get()
        seen, seen_at, told = "", now_s(), ""
        while True:
            if found is not None and found["metadata"]["resourceVersion"] != seen:
                seen, seen_at = found["metadata"]["resourceVersion"], now_s()
            holder, length_s = _held(found)
            try:
                # its own: the answer to an earlier try was lost
                if holder in ("", identity) or now_s() > seen_at + length_s:
                    sent_at = now_s()
                    record = await self._api.swap(found, _spec(identity, found))
                    if record is not None:
                        return await self._begin(record, sent_at)
                elif holder != told:
                    told = holder
                    stands_by(holder.partition("#")[0])
                await anyio.sleep(LOOK_S)
                found = await self._api.get()
            except Unanswered as error:  # what was found stays: to swap that fails if it changed
                if not error.retryable:
                    raise
                log.warning("lease_unanswered", reason=str(error))
                await anyio.sleep(LOOK_S)

    async def _begin(self, record: Record, sent_at: float) -> LeaseTerm:
        try:
            store = await anyio.to_thread.run_sync(self._open_store)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _give_back(self._api, record)
            raise
        return LeaseTerm(self._api, record, sent_at, store)

    async def aclose(self) -> None:
        await self._api.aclose()


class LeaseTerm:
    """One holding of the Lease. The Lease that this term wrote last is `_record`."""

    def __init__(self, api: LeaseApi, record: Record, sent_at: float, store: Store) -> None:
        self.store = store
        self._api = api
        self._record = record
        self._ends_at = sent_at + LEASE_S - MARGIN_S  # counted from before it was asked for
        self._late = STOPPED

    @property
    def left_s(self) -> float:
        """See `Term`."""
        return self._ends_at - now_s()

    @property
    def why(self) -> str:
        """See `Term`."""
        return f"the Lease {self._api.name} was not renewed in time: {self._late}"

    async def lost(self) -> str:
        """See `Term`."""
        pause_s = RENEW_S
        while (left_s := self.left_s) > 0:
            await anyio.sleep(min(pause_s, left_s))
            sent_at, pause_s = now_s(), LOOK_S
            if sent_at >= self._ends_at:
                break
            spec = {**self._record["spec"], "renewTime": _timestamp()}
            try:
                with anyio.fail_after(self._ends_at - sent_at):
                    record = await self._api.swap(self._record, spec)
                    if record is not None:
                        self._record, self._ends_at = record, sent_at + LEASE_S - MARGIN_S
                        pause_s, self._late = RENEW_S, STOPPED
                        continue
                    now = await self._api.get()
            except (Unanswered, TimeoutError) as error:
                self._late = str(error) or f"no answer within {REQUEST_S:g} s"
                continue
            if now is None or _held(now)[0] != _held(self._record)[0]:
                return f"the Lease {self._api.name} is held by {shown(_held(now)[0])}"
            self._record = now  # the answer to a renewal was lost; the next one counts
        return self.why

    async def resign(self) -> None:
        """See `Term`."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.store.close)
            await _give_back(self._api, self._record)


async def _give_back(api: LeaseApi, record: Record) -> None:
    """Free the Lease, if it is still this candidate's: the next one need not wait for its end."""
    with anyio.move_on_after(REQUEST_S), suppress(Unanswered):
        for _ in range(2):  # again, if the answer to the last renewal was lost
            free = {**record["spec"], "holderIdentity": "", "renewTime": _timestamp()}
            now = await api.swap(record, free) or await api.get()
            if now is None or _held(now)[0] != _held(record)[0]:
                return
            record = now


def _held(record: Record | None) -> tuple[str, float]:
    """By which candidate (""), and for how long after each renewal."""
    spec = {} if record is None else record["spec"]
    return spec.get("holderIdentity") or "", spec.get("leaseDurationSeconds") or LEASE_S


def _spec(identity: str, found: Record | None) -> Record:
    now = _timestamp()
    before = -1 if found is None else found["spec"].get("leaseTransitions") or 0
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": round(LEASE_S),
        "acquireTime": now,
        "renewTime": now,
        "leaseTransitions": before + 1,
    }


def _timestamp() -> str:
    """For a person who looks: no candidate trusts the clock of another one."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
