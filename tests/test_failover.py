"""Coordinators that stand by for one another, in one process: by a directory's lock, by etcd."""

import json
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import tensorhub
from tensorhub import sync
from tensorhub.coordinator import Entry
from tensorhub.errors import GroupAborted, InvalidType, InvalidValue
from tensorhub.runtime.control.election import Deposed
from tensorhub.runtime.control.store import SqliteStore
from tensorhub.types import parse_address
from tests.cli.processes import WAIT_S, line_with, started
from tests.etcd_rig import etcd_servers, needs_etcd
from tests.rig import OPTIONS, connect, nothing_left, tensors, until


@contextmanager
def engine(kind: str, directory: Path) -> Iterator[dict[str, Any]]:
    """What `serve` is told."""
    if kind == "lock":
        yield {"ha": "lock", "state_dir": str(directory / "state")}
    else:
        with etcd_servers(directory) as (member,):
            yield {"ha": f"etcd://{member.endpoint}/t"}


def refuses(address: str) -> bool:
    try:
        socket.create_connection(parse_address(address), timeout=10).close()
    except ConnectionRefusedError:
        return True
    return False


def asked(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("kind", ["lock", pytest.param("etcd", marks=needs_etcd)])
async def test_another_takes_over_and_calls_go_on(kind: str, tmp_path: Path) -> None:
    """The second refuses connections until the first has closed."""
    observed = replace(OPTIONS, http="127.0.0.1:0")
    with engine(kind, tmp_path) as told:
        async with (
            nothing_left(),
            tensorhub.serve(token="", options=OPTIONS, **told) as first,
            tensorhub.serve(token="", options=observed, **told) as second,
        ):
            assert (first.leading, second.leading) == (True, False)
            assert refuses(second.address)
            assert second.http_url is not None
            pages = [f"{second.http_url}{page}" for page in ("healthz", "readyz")]
            health, ready = [await anyio.to_thread.run_sync(asked, page) for page in pages]
            assert health[0] == 200
            assert (ready[0], json.loads(ready[1])["error"]) == (
                503,
                f"this coordinator stands by; {first.address} leads",
            )
            async with connect(f"{first.address},{second.address}") as hub:
                weights = await hub.register("m", tensors(1))
                await weights.publish(1)
                await first.close()
                await weights.unpublish()
                await weights.publish(2)
                assert second.leading


async def test_a_term_whose_last_write_is_unknown_ends_and_the_next_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also without standbys: the call is neither lost nor done twice."""
    write = SqliteStore.write
    outcomes = iter(("not there", "there"))

    def failing(store: SqliteStore, entries: Sequence[Entry]) -> None:
        outcome = next(outcomes, None)
        if outcome != "not there":
            write(store, entries)
        if outcome is not None:
            raise Deposed("fsync failed")

    monkeypatch.setattr(SqliteStore, "write", failing)
    async with (
        nothing_left(),
        tensorhub.serve(token="", state_dir=tmp_path, options=OPTIONS) as coordinator,
        connect(coordinator.address) as hub,
    ):
        weights = await hub.register("m", tensors(1))
        for version in (1, 2, 3):
            try:
                await weights.publish(version)
            except GroupAborted:  # the first is repeated; of the second all is known
                assert version == 1
                await weights.publish(version)
            await weights.unpublish()
        assert coordinator.leading
    lost = [each for each in caplog.messages if "leadership_lost" in each]
    assert ["fsync failed" in each for each in lost] == [True, True]


async def test_a_standby_that_cannot_campaign_says_so_once_and_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, options = tmp_path / "state", replace(OPTIONS, http="127.0.0.1:0")
    async with (
        nothing_left(),
        tensorhub.serve(token="", state_dir=state, ha="lock", options=OPTIONS) as first,
        tensorhub.serve(token="", state_dir=state, ha="lock", options=options) as second,
    ):
        state.chmod(0o777)
        await until(lambda: "campaign_failed" in caplog.text)
        status, ready = await anyio.to_thread.run_sync(asked, f"{second.http_url}readyz")
        assert status == 503
        assert "stands by; its last campaign failed: see campaign_failed in its log" in ready
        state.chmod(0o700)
        with anyio.fail_after(WAIT_S):  # it stands by as it should: no word of what is over
            while f"{first.address} leads" not in ready:
                _, ready = await anyio.to_thread.run_sync(asked, f"{second.http_url}readyz")
        await first.close()
        await until(lambda: second.leading)
    failures = [each for each in caplog.messages if "campaign_failed" in each]
    assert ["can be written by everybody" in each for each in failures] == [True]


def test_the_blocking_form_stands_by_too(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(sync.serve(token="", state_dir=tmp_path, ha="lock"))
        second = stack.enter_context(sync.serve(token="", state_dir=tmp_path, ha="lock"))
        assert (first.leading, second.leading) == (True, False)
        assert repr(second).endswith(f"{second.address} stands by>>")


@pytest.mark.slow
@needs_etcd
@pytest.mark.usefixtures("prepared")
def test_a_leader_that_was_stopped_wakes_up_and_stands_by(tmp_path: Path) -> None:
    """Before it answers anything."""
    with etcd_servers(tmp_path) as (member,), ExitStack() as stack:
        command = ("serve", "--json", "--ha", f"etcd://{member.endpoint}/t?lease_s=2")
        first = stack.enter_context(started(*command))
        line_with("coordinator_listens", first.stderr)
        second = stack.enter_context(started(*command))
        line_with("coordinator_stands_by", second.stderr)
        first.send_signal(signal.SIGSTOP)
        assert "epoch=2" in line_with("coordinator_listens", second.stderr)
        first.send_signal(signal.SIGCONT)
        assert "leadership_lost" in line_with("leadership_lost", first.stderr)
        line_with("coordinator_stands_by", first.stderr)
        second.send_signal(signal.SIGTERM)
        assert "epoch=3" in line_with("coordinator_listens", first.stderr)
        assert second.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"ha": 3}, "give the engine that elects, as text, or None"),
        ({"ha": "zookeeper://host/x"}, r'ha=.*: give "etcd://'),
        ({"ha": "lock"}, "needs a state_dir"),
        ({"ha": "etcd://h:1/p", "state_dir": "x"}, "with etcd://h:1/p the state is in etcd"),
        ({"ha": "etcd://h:1/p", "host": "0.0.0.0"}, "give Options.advertise=HOST:PORT"),
    ],
)
def test_what_no_engine_is(arguments: dict[str, object], why: str) -> None:
    with pytest.raises((InvalidValue, InvalidType), match=why):
        tensorhub.serve(token="", **arguments)  # type: ignore[arg-type]
