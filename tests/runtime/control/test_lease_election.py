"""A Lease of Kubernetes: one candidate leads, by each one's own clock, and the shared state fences
a leader that does not know of its end.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import anyio
import pytest

from tensorhub.errors import InvalidValue, StateError
from tensorhub.runtime.control import lease_election
from tensorhub.runtime.control.election import Deposed
from tensorhub.runtime.control.elections import election_of
from tensorhub.runtime.control.lease_election import (
    LEASE_S,
    MARGIN_S,
    LeaseApi,
    LeaseElection,
    LeaseTerm,
    Record,
    lease_of,
)
from tensorhub.runtime.control.store import InUse, SqliteStore
from tests.rig import until
from tests.runtime.control.lease_api import LeaseServer, lease_server
from tests.runtime.control.test_store import publication
from tests.test_never_shown import SECRET, check_error

pytestmark = pytest.mark.anyio
LEASE = ("train", "hub")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Clock:
    """Of every candidate here; it goes on when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease_election, "now_s", clock)
    for pause in ("RENEW_S", "LOOK_S"):
        monkeypatch.setattr(lease_election, pause, 0.01)
    return clock


@pytest.fixture
def server(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[LeaseServer]:
    (tmp_path / "account").mkdir()
    with lease_server(tmp_path / "account") as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        yield server


@contextlib.asynccontextmanager
async def candidate(server: LeaseServer) -> AsyncIterator[LeaseElection]:
    state_dir = server.account.parent / "state"
    made = LeaseElection(LEASE, lambda: SqliteStore(state_dir, shared=True), server.account)
    try:
        yield made
    finally:
        await made.aclose()


class Campaign:
    """One that runs beside the test."""

    def __init__(self, of: LeaseElection, name: str) -> None:
        self.leaders: list[str] = []  # that it stood by
        self.term: LeaseTerm | None = None
        self._of, self._name = of, name

    async def run(self) -> None:
        self.term = await self._of.campaign(f"tcp://{self._name}:1", self.leaders.append)


async def looks(server: LeaseServer, times: int = 3) -> None:
    """So many looks of a candidate have been answered: it has drawn its conclusions from all but
    the last.
    """
    wanted = server.asked.count("GET") + times
    await until(lambda: server.asked.count("GET") >= wanted)


async def kept(term: LeaseTerm, server: LeaseServer, passes: Callable[[], None]) -> str:
    """Why the term ends that is kept while this happens."""
    why = ""

    async def keep() -> None:
        nonlocal why
        why = await term.lost()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep)
            wanted = server.asked.count("PUT") + 2
            await until(lambda: server.asked.count("PUT") >= wanted)
            passes()
    return why


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_one_leads_until_it_resigns_and_the_next_epoch_fences_it(server: LeaseServer) -> None:
    async with candidate(server) as first, candidate(server) as second:
        term = await first.campaign("tcp://a:1", lambda leader: None)
        term.store.write([publication(1)])
        campaign = Campaign(second, "b")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(campaign.run)
            await until(lambda: bool(campaign.leaders))
            assert (campaign.leaders, campaign.term) == (["tcp://a:1"], None)
            await term.resign()
        after = campaign.term
        assert after is not None
        assert (after.store.epoch, len(after.store.read().publications)) == (2, 1)
        assert server.holder.startswith("tcp://b:1#")
        await after.resign()
        assert server.holder == ""


async def test_a_silent_leader_is_replaced_after_the_length_of_the_lease_and_can_write_nothing(
    server: LeaseServer, clock: Clock
) -> None:
    async with candidate(server) as first, candidate(server) as second:
        old = await first.campaign("tcp://a:1", lambda leader: None)
        campaign = Campaign(second, "b")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(campaign.run)
            await until(lambda: bool(campaign.leaders))
            clock.now += LEASE_S
            await looks(server)
            assert campaign.term is None
            clock.now += 0.001
        assert campaign.term is not None
        with pytest.raises(Deposed, match="another leader"):
            old.store.write([publication(1)])
        assert "stopped, or its machine slept" in await old.lost()  # it wakes up
        await old.resign()
        assert server.holder.startswith("tcp://b:1#")
        campaign.term.store.write([publication(1)])
        await campaign.term.resign()


async def test_a_renewed_lease_is_not_taken_however_long_it_was_held(
    server: LeaseServer, clock: Clock
) -> None:
    async with candidate(server) as first, candidate(server) as second:
        term = await first.campaign("tcp://a:1", lambda leader: None)
        campaign = Campaign(second, "b")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(campaign.run)
            tasks.start_soon(term.lost)
            for _ in range(4):
                await until(lambda: bool(campaign.leaders))
                clock.now += LEASE_S / 2
                wanted = server.asked.count("PUT") + 2
                await until(lambda wanted=wanted: server.asked.count("PUT") >= wanted)  # type: ignore[misc]
                await looks(server)
            assert campaign.term is None
            tasks.cancel_scope.cancel()
        await term.resign()


async def test_a_term_outlasts_answers_that_do_not_come(server: LeaseServer, clock: Clock) -> None:
    async with candidate(server) as election:
        server.faults = [404, "lost"]  # the answer to its taking, too
        term = await election.campaign("tcp://a:1", lambda leader: None)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(term.lost)
            for fault in ("lost", "garbage", 500, 429, 403, 409):
                server.faults = [fault]
                wanted = server.asked.count("PUT") + 3
                await until(lambda wanted=wanted: server.asked.count("PUT") >= wanted)  # type: ignore[misc]
                clock.now += LEASE_S - MARGIN_S - 1
            tasks.cancel_scope.cancel()
        await term.resign()
        assert server.holder == ""


async def test_a_lease_lasts_as_long_as_it_says_whatever_address_its_holder_has(
    server: LeaseServer, clock: Clock
) -> None:
    """Of another release, say; or of a coordinator that was given another one's address."""
    async with candidate(server) as first, candidate(server) as second:
        term = await first.campaign("tcp://a:1", lambda leader: None)
        server.leases["hub"]["spec"]["leaseDurationSeconds"] = 3 * round(LEASE_S)
        campaign = Campaign(second, "a")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(campaign.run)
            await until(lambda: bool(campaign.leaders))
            clock.now += 2 * LEASE_S
            await looks(server)
            assert campaign.term is None
            clock.now += 2 * LEASE_S
        assert campaign.term is not None
        await campaign.term.resign()
        await term.resign()


@pytest.mark.parametrize(
    "spec",
    [["no"], "no", {"holderIdentity": 5}, {"leaseDurationSeconds": -1}, {"leaseTransitions": "5"}],
)
async def test_a_lease_that_no_candidate_writes_is_refused(
    server: LeaseServer, spec: object
) -> None:
    server.leases["hub"] = {"metadata": {"name": "hub", "resourceVersion": "1"}, "spec": spec}
    async with candidate(server) as election:
        with pytest.raises(StateError, match="no usable answer"):
            await election.campaign("tcp://a:1", lambda leader: None)


async def test_a_term_that_cannot_renew_ends_before_its_lease(
    server: LeaseServer, clock: Clock
) -> None:
    async with candidate(server) as election:
        term = await election.campaign("tcp://a:1", lambda leader: None)

        def passes() -> None:
            server.always = 500
            clock.now += LEASE_S - MARGIN_S

        why = await kept(term, server, passes)
        assert "was not renewed in time" in why
        await term.resign()  # which is no error while the server is away


async def test_a_term_is_counted_from_before_it_was_asked_for(
    server: LeaseServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the answer comes: another candidate may have seen the Lease before it."""
    swap, asked = LeaseApi.swap, []

    async def late(api: LeaseApi, found: Record | None, spec: Record) -> Record | None:
        asked.append(clock.now)
        record = await swap(api, found, spec)
        clock.now += 3
        return record

    monkeypatch.setattr(LeaseApi, "swap", late)
    async with candidate(server) as election:
        term = await election.campaign("tcp://a:1", lambda leader: None)
        assert clock.now + term.left_s <= asked[0] + LEASE_S - MARGIN_S
        await kept(term, server, lambda: setattr(clock, "now", clock.now + LEASE_S))
        assert clock.now + term.left_s <= asked[-1] + LEASE_S - MARGIN_S
        await term.resign()


@pytest.mark.parametrize("now", ["tcp://b:1#other", None])
async def test_a_lease_that_another_one_took_or_deleted_ends_the_term(
    server: LeaseServer, now: str | None
) -> None:
    async with candidate(server) as election:
        term = await election.campaign("tcp://a:1", lambda leader: None)

        def passes() -> None:
            with server.lock:
                lease = server.leases.pop("hub")
                if now is not None:
                    lease["spec"]["holderIdentity"] = now
                    server._keep(lease, 200)

        assert f"is held by {now or ''!r}" in await kept(term, server, passes)
        await term.resign()
        assert now is None or server.holder == now


async def test_a_renewal_that_is_answered_with_the_lease_of_another_one_ends_the_term(
    server: LeaseServer,
) -> None:
    async with candidate(server) as election:
        term = await election.campaign("tcp://a:1", lambda leader: None)

        def passes() -> None:
            with server.lock:
                server.faults.append("taken")

        assert "is held by 'tcp://b:1#other'" in await kept(term, server, passes)
        await term.resign()


@pytest.mark.parametrize(
    ("always", "text", "retryable"),
    [(401, "Role", False), (403, "Role", False), (500, "leader changed", True)],
)
async def test_a_server_that_cannot_be_used_at_first_is_an_error(
    server: LeaseServer, always: int, text: str, retryable: bool
) -> None:
    server.always = always
    async with candidate(server) as election:
        with pytest.raises(StateError, match=text) as caught:
            await election.campaign("tcp://a:1", lambda leader: None)
    assert caught.value.retryable is retryable


async def test_an_api_server_may_have_an_address_of_ipv6(
    server: LeaseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    async with candidate(server) as election:
        assert election._api._leases.startswith(f"https://[fd00::1]:{server.port}/apis/")


async def test_a_token_that_has_changed_and_a_state_that_cannot_be_opened(
    server: LeaseServer,
) -> None:
    state_dir = server.account.parent / "state"
    async with candidate(server) as election:
        alone = SqliteStore(state_dir)  # without a Lease
        with pytest.raises(InUse):
            await election.campaign("tcp://a:1", lambda leader: None)
        assert server.holder == ""  # the next one need not wait
        alone.close()
        server.token = "second"
        (server.account / "token").write_text("second")
        term = await election.campaign("tcp://a:1", lambda leader: None)
        with pytest.raises(InUse):
            SqliteStore(state_dir)
        await term.resign()


@pytest.mark.parametrize(
    ("fault", "content"),
    [
        (401, SECRET),
        ("lost", SECRET),
        (500, SECRET),
        ("", f"{SECRET}\nmore"),  # which no header may have
        ("", f"{SECRET}\xff"),
    ],
)
async def test_an_error_shows_no_token(server: LeaseServer, fault: int | str, content: str) -> None:
    """Nor do the locals of any frame in its traceback, whichever library's."""
    server.token = SECRET
    (server.account / "token").write_bytes(content.encode("latin-1"))
    server.faults.append(fault)
    api = LeaseApi(*LEASE, server.account)
    with pytest.raises(StateError) as caught:
        await api.get()
    await api.aclose()
    check_error(caught.value, "")


async def test_where_there_is_no_cluster(
    server: LeaseServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def made(account: Path = server.account) -> LeaseElection:
        return LeaseElection(LEASE, lambda: SqliteStore(tmp_path), account)

    assert lease_of("kubernetes://train/hub") == LEASE
    for url in ("kubernetes://hub", "kubernetes://a/B", "kubernetes://a/b/c", "etcd://a/b"):
        with pytest.raises(InvalidValue, match="kubernetes://NAMESPACE/LEASE"):
            lease_of(url)
    with pytest.raises(InvalidValue, match="needs a state_dir"):
        election_of("kubernetes://train/hub", None)
    with pytest.raises(StateError, match="automountServiceAccountToken"):
        made(tmp_path / "nowhere")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(StateError, match="in a pod only"):
        made()
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(StateError, match="ha"):
        made()
