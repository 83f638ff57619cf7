"""Engines and records of a fleet with one version in this process: what a seat may serve, and what
of a record is known after a fault.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub import sync
from tensorhub.errors import InvalidValue, ManifestMismatch, OperationTimeout, StateError
from tensorhub.integrations import one_version_engine
from tensorhub.integrations.one_version import ATTEMPTS
from tensorhub.integrations.one_version_engine import Engine, TensorSlots
from tensorhub.integrations.one_version_ranks import not_quick
from tensorhub.integrations.one_version_records import KEPT, RecordLog
from tensorhub.integrations.one_version_trainer import OneVersion
from tensorhub.runtime.clock import boot_time
from tests.integrations.fleet_actor import Policy, values
from tests.integrations.test_one_version_engine import LEASE_S, WAIT_S, Rig, _refuses, rig

__all__ = ["rig"]


def test_a_coordinator_that_restarts_after_the_trainer_has_gone(tmp_path: Path) -> None:
    """The commit is known, though the records' holder is not there any more."""
    first = sync.serve(token="", state_dir=tmp_path)
    port = int(first.address.rpartition(":")[2])
    with sync.connect(first.address) as hub:
        its = Engine(hub, "actor", Policy(8), lease_s=LEASE_S, timeout_s=WAIT_S)
        with sync.connect(first.address) as others:
            weights = others.register("actor", values(8, 1.0))
            trainer = OneVersion(others, "actor", lease_s=LEASE_S, timeout_s=WAIT_S)
            for version in (1, 2):
                trainer.update(weights.publish(version))
                weights.unpublish()
            trainer.close()
        first.close()
        with sync.serve(port=port, token="", state_dir=tmp_path):
            log = RecordLog(hub, "actor", WAIT_S)
            assert log.read().current == 2
            asked_at = boot_time()
            while its.seat.lease_until < asked_at + LEASE_S:  # until it has read them, too
                assert boot_time() < asked_at + WAIT_S
                time.sleep(0.01)
            assert its.version == 2
            its.close()


def test_an_engine_that_is_not_listed_serves_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer would not ask it, nor wait for its lease."""
    its = rig.engine()
    rig.trainer().update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    close = its._announced.close
    unlisted = SimpleNamespace(renew=lambda timeout_s: None, is_known=False, close=close)
    monkeypatch.setattr(its, "_announced", unlisted)
    until = time.monotonic() + WAIT_S
    while its.version is not None:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_engine_that_flips_puts_no_other_version_in_place(rig: Rig) -> None:
    """A poll from before the flip found it behind, and goes on after it."""
    its = rig.engine(decide_s=WAIT_S)
    rig.trainer().update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    rig.publish(2)
    its.stage(2 * ATTEMPTS)
    its.lost()
    its.flip(2 * ATTEMPTS)
    its._catch_up(1)
    assert RecordLog(rig.hub, "actor", WAIT_S).decide(2 * ATTEMPTS, is_commit=True)
    its.settle(2 * ATTEMPTS, is_commit=True)
    assert rig.serve() == [(2, {2.0})]


def test_weights_that_are_served_are_not_filled_by_a_poll_from_before(rig: Rig) -> None:
    """It found the engine behind, and goes on once the engine was updated."""
    its = rig.engine()
    rig.trainer().update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    rig.publish(2)
    its._catch_up(2)
    assert rig.serve() == [(1, {1.0})]


def test_an_engine_that_stages_takes_no_other_version_meanwhile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = rig.engine()
    rig.trainer().update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    rig.publish(2)
    fill, has_begun, may_go_on = its._slots.fill, threading.Event(), threading.Event()

    def slow(slot: int, version: int) -> None:
        has_begun.set()
        assert may_go_on.wait(WAIT_S)
        fill(slot, version)

    monkeypatch.setattr(its._slots, "fill", slow)
    with ThreadPoolExecutor(1) as thread:
        staged = thread.submit(its.stage, 2 * ATTEMPTS)
        assert has_begun.wait(WAIT_S)
        its._catch_up(2)
        may_go_on.set()
        staged.result()
    assert its._slots.holding(2) == its._staged != its._current


def test_an_engine_that_cannot_start_leaves_its_port_and_its_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StateError, match=f"port={port}"):
            rig.engine(port=port)
    with monkeypatch.context() as broken:
        broken.setattr(one_version_engine, "announce", _refuses)
        with pytest.raises(StateError, match="it does not flip"):
            rig.engine(port=port)
    assert [each.summary.groups for each in rig.hub.describe() if each.summary] in ([], [0])
    assert rig.engine(port=port).url.endswith(f":{port}")
    rig.policies[:-1] = []


def test_of_two_decisions_the_first_one_counts(rig: Rig) -> None:
    one, other = (RecordLog(rig.hub, "actor", WAIT_S) for _ in range(2))
    for attempt, first in ((5, False), (6, True)):
        assert one.fence(attempt)
        assert one.decide(attempt, first) is first
        assert other.decide(attempt, not first) is first
        assert not other.fence(attempt)


def test_records_whose_answers_are_lost_leave_nothing_registered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, publish = RecordLog(rig.hub, "actor", WAIT_S), sync.Weights.publish

    def loses(weights: sync.Weights, *given: Any) -> None:
        publish(weights, *given)
        raise OperationTimeout("the answer is lost")

    monkeypatch.setattr(sync.Weights, "publish", loses)
    for attempt in range(4 * KEPT):
        with pytest.raises(OperationTimeout):
            log.fence(attempt)
    assert log.read().fence == 4 * KEPT - 1
    (summary,) = [each.summary for each in rig.hub.describe() if each.summary]
    assert summary.groups <= KEPT + 2


def test_what_an_engine_has_said_before_counts_no_more(rig: Rig) -> None:
    """One with a longer lease stops an update, and none after it is gone."""
    rig.engine()
    trainer = rig.trainer(servers=None)
    trainer.update(rig.publish(1))
    rig.engine(lease_s=2 * LEASE_S).wait_until_served(WAIT_S)
    with pytest.raises(InvalidValue, match=r"and this engine .*'lease_s': 1\.0"):
        trainer.update(rig.publish(2))
    rig.engines.pop().close()
    rig.policies.pop()
    trainer.update(rig.publish(3))
    assert rig.serve() == [(3, {3.0})]


def test_a_version_of_another_dtype_is_told_from_what_only_a_loader_can_load() -> None:
    casts = {f"layers.{n}": ("float32", "bfloat16") for n in range(15)}
    error = not_quick(casts, "15 layer(s) can only be loaded by a loader")
    assert isinstance(error, ManifestMismatch)
    assert "'layers.0': published as float32, and the engine has bfloat16" in f"{error}"
    assert "register_converted" in f"{error}"
    assert len(error.differences) == 15
    assert "update this engine outside" in f"{not_quick({}, '2 layer(s)')}"


def test_a_commit_that_newer_records_hide_while_they_are_read_is_not_missed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with the version before would have a lease anew."""
    log = RecordLog(rig.hub, "actor", WAIT_S)
    described, asked = log._described, list[str]()

    def slow(model: str) -> Any:
        found = described(model)
        asked.append(model)
        if len(asked) == 1:
            with sync.connect(rig.address) as hub:
                trainer = RecordLog(hub, "actor", WAIT_S)
                for attempt, is_commit in ((ATTEMPTS, True), (2 * ATTEMPTS, False)):
                    assert trainer.fence(attempt)
                    assert trainer.decide(attempt, is_commit) is is_commit
                    trainer.note(1)
        return found

    monkeypatch.setattr(log, "_described", slow)
    assert log.read().current == 1


@pytest.mark.parametrize("is_commit", [False, True])
def test_an_engine_whose_memory_is_lost_in_a_flip_takes_what_was_decided_anew(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_commit: bool
) -> None:
    """As where its process stood still: what it would put in place is there no more."""
    its, _ = rig.engine(decide_s=WAIT_S), rig.engine(decide_s=WAIT_S)
    rig.trainer().update(rig.publish(1))
    rig.serve()
    rig.publish(2)
    slots, attempt = its._slots, 2 * ATTEMPTS
    assert isinstance(slots, TensorSlots)
    put, is_lost = slots.put, [is_commit]  # of a commit the flip has failed before

    def held(slot: int) -> None:
        if is_lost[0] or slots._weights[slot].version is None:
            raise StateError("there is no version to put in place")
        put(slot)

    monkeypatch.setattr(slots, "put", held)
    log = RecordLog(rig.hub, "actor", WAIT_S)
    its.stage(attempt)
    assert log.fence(attempt)
    with suppress(StateError):
        its.flip(attempt)
    is_lost[0] = False
    slots._weights[its._staged if is_commit else its._current].unpublish()
    assert log.decide(attempt, is_commit) is is_commit
    version = 2 if is_commit else 1
    assert rig.serve() == [(version, {float(version)})] * 2


def test_an_engine_that_closes_serves_nothing_once_its_port_is_free(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine after it may flip there, while this one still waits for the coordinator."""
    its = rig.engine(lease_s=5.0)
    rig.trainer(lease_s=5.0).update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    read, has_begun, may_go_on = its._log.read, threading.Event(), threading.Event()

    def slow() -> Any:
        records = read()
        has_begun.set()
        assert may_go_on.wait(WAIT_S)
        return records

    monkeypatch.setattr(its._log, "read", slow)
    assert has_begun.wait(WAIT_S)
    port, until = int(its.url.rpartition(":")[2]), time.monotonic() + WAIT_S
    with ThreadPoolExecutor(1) as thread:
        closed = thread.submit(its.close)
        while True:
            assert time.monotonic() < until
            with suppress(OSError), socket.create_server(("127.0.0.1", port)):
                break
        its.seat.lease_until = boot_time() + WAIT_S
        assert its.version is None
        may_go_on.set()
        closed.result(WAIT_S)
    assert its.version is None
    rig.closes.remove(its.close)


def test_a_use_that_outlasts_its_lease_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a process that stood still: the others have another version by then."""
    rig.engine()
    its = rig.engine()
    trainer = rig.trainer()
    trainer.update(rig.publish(1))
    rig.serve()
    monkeypatch.setattr(its, "stage", _refuses)
    use = its.use(WAIT_S)
    assert use.__enter__() == 1
    assert trainer.update(rig.publish(2)).done == (rig.engines[0].url,)
    with pytest.raises(StateError, match="discard what was computed"):
        use.__exit__(None, None, None)
    assert rig.serve() == [(2, {2.0}), (2, {2.0})]


def test_a_flip_begins_when_the_last_use_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the engine next looks at the records."""
    its = rig.engine(decide_s=4 * WAIT_S)
    rig.trainer().update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    rig.publish(2)
    its.stage(2 * ATTEMPTS)
    poll = its._poll
    with ThreadPoolExecutor(1) as thread, its._use(WAIT_S):
        monkeypatch.setattr(its, "_poll", lambda: None)
        flipped = thread.submit(its.flip, 2 * ATTEMPTS)
        with its._lock:
            assert its._lock.wait_for(lambda: its._is_flipped(2 * ATTEMPTS), WAIT_S)
    flipped.result(WAIT_S)
    its.settle(2 * ATTEMPTS, is_commit=False)
    monkeypatch.setattr(its, "_poll", poll)
    assert rig.serve() == [(1, {1.0})]
