"""Engines and trainers of a fleet with one version in this process: what is refused, lost, late."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import (
    AuthenticationFailed,
    InvalidValue,
    LeaseLost,
    ManifestMismatch,
    OperationTimeout,
    StateError,
    VersionConflict,
)
from tensorhub.integrations import one_version_engine, one_version_trainer, trainer_group
from tensorhub.integrations.announced import SEATS, SERVERS, announce, announced
from tensorhub.integrations.one_version import ATTEMPTS, Decide, Fence, Seat
from tensorhub.integrations.one_version_engine import Engine
from tensorhub.integrations.one_version_http import Remote
from tensorhub.integrations.one_version_records import RecordLog
from tensorhub.integrations.one_version_trainer import OneVersion
from tensorhub.runtime.clock import boot_time
from tests.integrations.fleet_actor import Policy, values

WAIT_S = 20.0
LEASE_S = 0.5


@dataclass
class Rig:
    address: str
    hub: sync.Hub
    engines: list[Engine] = field(default_factory=list)
    policies: list[Policy] = field(default_factory=list)
    closes: list[Callable[[], object]] = field(default_factory=list)

    def engine(self, **settings: Any) -> Engine:
        hub = sync.connect(self.address)
        self.closes.append(hub.close)
        self.policies.append(Policy(8))
        given = {"lease_s": LEASE_S, "decide_s": 1.0, "timeout_s": WAIT_S, **settings}
        its = Engine(hub, "actor", given.pop("tensors", self.policies[-1]), **given)
        self.engines.append(its)
        self.closes.append(its.close)
        return its

    def trainer(self, **settings: Any) -> OneVersion:
        urls = [each.url for each in self.engines]
        given = {"lease_s": LEASE_S, "timeout_s": WAIT_S, **settings}
        its = OneVersion(self.hub, "actor", given.pop("servers", urls), **given)
        self.closes.append(its.close)
        return its

    def publish(self, version: int) -> Any:
        if not hasattr(self, "weights"):
            self.tensors = values(8, 0.0)
            self.weights = self.hub.register("actor", self.tensors)
        with self.weights.mutate(version):
            for each in self.tensors.values():
                each.fill_(version)
        return self.hub.wait_for("actor", at_least=version)

    def serve(self) -> list[tuple[int, set[float]]]:
        """What each engine serves, once it serves something."""
        for each in self.engines:
            each.wait_until_served(WAIT_S)
        served, until = [], time.monotonic() + WAIT_S
        for each, policy in zip(self.engines, self.policies, strict=True):
            is_over = False
            while not is_over:
                try:
                    with each.use(WAIT_S) as version:
                        found = version, {p[0].item() for p in policy.parameters()}
                    is_over = True
                except StateError:  # a lease that has ended in the use
                    assert time.monotonic() < until
            served.append(found)
        return served


@pytest.fixture
def rig() -> Iterator[Rig]:
    with sync.serve(token="") as coordinator, sync.connect(coordinator.address) as hub:
        made = Rig(coordinator.address, hub)
        yield made
        for close in reversed(made.closes):
            close()


def test_a_module_points_at_each_version_and_at_the_old_one_where_another_engine_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = rig.engine(), rig.engine()
    with pytest.raises(StateError, match="no version may be served now"), one.use():
        pass
    trainer = rig.trainer(attempts_max=1)
    assert len(trainer.update(rig.publish(1)).done) == 2
    assert rig.serve() == [(1, {1.0}), (1, {1.0})]
    put = other._slots.put

    def fails(slot: int) -> None:
        if slot == other._slots.holding(2):
            raise RuntimeError("the graph cannot be captured")
        put(slot)

    monkeypatch.setattr(other._slots, "put", fails)
    with pytest.raises(StateError, match="no engine has taken version 2") as error:
        trainer.update(rig.publish(2))
    assert "the graph cannot be captured" in f"{error.value}"
    assert "the graph cannot be captured" in "".join(error.value.__notes__)
    assert rig.serve() == [(1, {1.0}), (1, {1.0})]
    monkeypatch.undo()
    assert len(trainer.update(rig.publish(3)).done) == 2
    assert rig.serve() == [(3, {3.0}), (3, {3.0})]
    one.settle(0, False)  # a late call changes nothing
    assert rig.serve() == [(3, {3.0}), (3, {3.0})]


def test_no_engine_is_told_from_engines_that_failed(rig: Rig) -> None:
    trainer = rig.trainer()
    with pytest.raises(StateError, match="there is no engine of 'actor': start one"):
        trainer.update(rig.publish(1))


@pytest.mark.parametrize("call", ["stage", "flip", "settle"])
def test_an_answer_that_is_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    one, _ = rig.engine(), rig.engine()
    trainer = rig.trainer()
    trainer.update(rig.publish(1))
    does, lost = Remote._ask, [call]

    def ask(remote: Remote, name: str, **given: Any) -> dict[str, Any]:
        answer = does(remote, name, **given)
        if remote.name == one.url and name in lost:
            lost.clear()
            raise StateError("the answer is lost")
        return answer

    monkeypatch.setattr(Remote, "_ask", ask)
    report = trainer.update(rig.publish(2))
    assert not lost
    assert len(report.done) == (2 if call == "settle" else 1)
    assert rig.serve() == [(2, {2.0}), (2, {2.0})]  # it comes back by itself
    assert len(trainer.update(rig.publish(3)).done) == 2


def test_weights_that_are_in_use_stay_until_the_use_is_over(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig.engine(decide_s=WAIT_S)
    trainer = rig.trainer()
    trainer.update(rig.publish(1))
    info = rig.publish(2)
    has_stopped, flip = threading.Event(), one.seat.flip

    def flipped(seat: Seat, attempt: int, now: float) -> bool:
        is_first = flip(attempt, now)
        has_stopped.set()
        return is_first

    monkeypatch.setattr(Seat, "flip", flipped)
    with one._use(WAIT_S) as version:
        thread = threading.Thread(target=trainer.update, args=(info,))
        thread.start()
        assert has_stopped.wait(WAIT_S)
        assert one.version is None  # it waits for this use
        assert (version, float(rig.policies[0].get_parameter("b")[0])) == (1, 1.0)
    thread.join(WAIT_S)
    assert rig.serve() == [(2, {2.0})]


def test_a_late_engine_takes_the_newest_version_before_it_serves(rig: Rig) -> None:
    rig.engine()
    trainer = rig.trainer()
    trainer.update(rig.publish(1))
    rig.weights.close()  # its peers have it
    late = rig.engine()
    assert late.wait_until_served(WAIT_S) == 1
    assert rig.serve() == [(1, {1.0}), (1, {1.0})]


def _sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the trainer waits for leases from now on."""
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(sleep=sleep, monotonic=monotonic)
    monkeypatch.setattr(one_version_trainer, "time", clock)
    return slept


def test_engines_need_not_be_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts late is found; one that is gone delays the next update by its lease, and by
    more, as its clock may be slower.
    """
    slept = _sleeps(monkeypatch)
    one = rig.engine()
    trainer = rig.trainer(servers=None)
    assert trainer.update(rig.publish(1)).done == (one.url,)
    late = rig.engine()
    late.wait_until_served(WAIT_S)
    assert set(trainer.update(rig.publish(2)).done) == {one.url, late.url}
    late.close()
    assert list(announced(rig.hub, "actor", SEATS)) == [one.url]
    assert len(rig.hub.describe("actor").replicas) == 3  # the trainer's, and both slots of `one`
    rig.engines.pop(), rig.policies.pop()
    slept.clear()
    assert trainer.update(rig.publish(3)).done == (one.url,)
    assert LEASE_S < sum(slept) < 2 * LEASE_S
    assert rig.serve() == [(3, {3.0})]


def test_an_engine_that_is_dead_and_still_listed_delays_an_update_by_one_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, dead = rig.engine(), rig.engine()
    trainer = rig.trainer(servers=None)
    trainer.update(rig.publish(1))
    slept = _sleeps(monkeypatch)
    dead._listener.close()
    assert trainer.update(rig.publish(2)).done == (one.url,)
    assert LEASE_S < sum(slept) < 2 * LEASE_S


@pytest.mark.parametrize("is_named", [False, True])
def test_an_engine_that_stands_still_is_waited_for_until_the_coordinator_lists_it_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """A process that is stopped, or a machine without a network, closes no connection."""
    one, other = rig.engine(), rig.engine()
    trainer = rig.trainer(**({} if is_named else {"servers": None}))
    trainer.update(rig.publish(1))
    goes_on = threading.Event()

    def still(attempt: int) -> None:
        monkeypatch.setattr(other, "_poll", lambda: None)
        other._announced.close()
        assert goes_on.wait(2 * WAIT_S)

    other.stage = still  # type: ignore[method-assign]
    report = trainer.update(rig.publish(2))
    goes_on.set()
    assert report.done == (one.url,)
    assert "the coordinator does not list it any more" in f"{report.failed[other.url]}"


def test_what_all_engines_refuse_is_the_cause(rig: Rig) -> None:
    """An update that cannot succeed later is not to be repeated as it is."""
    its = rig.engine()
    trainer = rig.trainer()
    other = rig.hub.register("actor", values(9, 1.0), group="other")
    with pytest.raises(StateError, match="so none is served") as refused:
        trainer.update(other.publish(1))
    assert isinstance(refused.value.__cause__, ManifestMismatch)
    assert not refused.value.retryable
    trainer.update(rig.publish(2))
    its.stage = _refuses  # type: ignore[method-assign]
    with pytest.raises(StateError, match="engines that serve go on with version 2"):
        trainer.update(rig.publish(3))


def test_a_trainer_that_was_closed_updates_nothing(rig: Rig) -> None:
    rig.engine()
    trainer = rig.trainer()
    trainer.close()
    with pytest.raises(StateError, match="was closed: make another one"):
        trainer.update(rig.publish(1))


def test_reports_call_engines_as_they_are_called(rig: Rig) -> None:
    """A number of a port that the system has chosen says nothing to people."""
    asked = ("http://10.0.0.2:8000", "http://10.0.0.3:8000", "twice", "twice")
    engines = [rig.engine(called=called, decide_s=WAIT_S) for called in asked]
    trainer = rig.trainer(servers=None, failures_max=1)
    names = {*asked[:2], engines[2].url, engines[3].url}
    assert set(trainer.update(rig.publish(1)).done) == names

    def broken(attempt: int) -> None:
        raise StateError("no room")

    engines[1].stage = broken  # type: ignore[method-assign]
    report = trainer.update(rig.publish(2))
    assert set(report.done) == names - {asked[1]}
    assert ([*report.failed], report.excluded) == ([asked[1]], (asked[1],))
    for each in engines:
        each.stage = broken  # type: ignore[method-assign]
    with pytest.raises(StateError, match="no engine has taken version 3") as caught:
        trainer.update(rig.publish(3))
    noted = {each.partition(": ")[0] for each in caught.value.__notes__}
    assert noted | {asked[1]} == names  # that one is not waited for


def test_an_engine_that_joins_in_mid_update_serves_no_other_version(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.engine()
    trainer = rig.trainer(servers=None)
    trainer.update(rig.publish(1))
    does, served = trainer._do, list[Any]()

    def do(step: Any) -> Any:
        if isinstance(step, Fence) and not served:  # all have voted that were asked
            late = rig.engine()
            served.append(late.wait_until_served(WAIT_S))
        if isinstance(step, Decide):
            served.append(rig.engines[1].version)
        return does(step)

    monkeypatch.setattr(trainer, "_do", do)
    trainer.update(rig.publish(2))
    assert served == [1, None]
    assert rig.serve() == [(2, {2.0}), (2, {2.0})]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_coordinator_that_comes_back_without_its_state_finds_the_engines_again(
    after: int,
) -> None:
    """A trainer that starts again begins at any number, and its first update reaches them."""
    first = sync.serve(token="")
    port = int(first.address.rpartition(":")[2])
    with sync.connect(first.address) as hub, sync.connect(first.address) as others:
        policy = Policy(8)
        its = Engine(hub, "actor", policy, lease_s=LEASE_S, timeout_s=WAIT_S)
        server = announce(others, "actor", SERVERS, "http://10.0.0.1:8000")
        server.keep()
        weights = others.register("actor", values(8, 1.0))
        trainer = OneVersion(others, "actor", lease_s=LEASE_S, timeout_s=WAIT_S)
        assert trainer.update(weights.publish(2)).done == (its.url,)
        trainer.close()
        its.wait_until_served(WAIT_S)
        first.close()
        with sync.serve(port=port, token=""):
            with sync.connect(first.address) as newcomer:
                until = time.monotonic() + WAIT_S
                for kind, url in ((SEATS, its.url), (SERVERS, "http://10.0.0.1:8000")):
                    while list(announced(newcomer, "actor", kind)) != [url]:
                        assert time.monotonic() < until
                        time.sleep(0.01)
                info = newcomer.register("actor", values(8, 3.0)).publish(after)
                trainer = OneVersion(newcomer, "actor", lease_s=LEASE_S, timeout_s=WAIT_S)
                assert trainer.update(info).done == (its.url,)
                trainer.close()
                assert its.wait_until_served(WAIT_S) == after
                with its._use(WAIT_S):
                    assert policy.get_parameter("b")[0] == 3.0
            server.close()
            its.close()


def test_what_was_decided_before_a_coordinator_lost_its_state_is_not_recorded_after_it() -> None:
    """It would be a newer number than those of a trainer that starts again."""
    first = sync.serve(token="")
    port = int(first.address.rpartition(":")[2])
    with sync.connect(first.address) as hub:
        log = RecordLog(hub, "actor", WAIT_S)
        log.prepare()
        assert log.fence(80 * ATTEMPTS)
        first.close()
        with sync.serve(port=port, token=""):
            until = time.monotonic() + WAIT_S
            while log.current_history == log.history:
                assert time.monotonic() < until
                time.sleep(0.01)
            with pytest.raises(LeaseLost, match=r"without its state.*--state-dir"):
                log.decide(80 * ATTEMPTS, True)
            with pytest.raises(LeaseLost, match="update them again"):
                log.fence(81 * ATTEMPTS)
            assert log.read().newest == -1
            log.prepare()
            assert log.fence(ATTEMPTS)
            assert log.decide(ATTEMPTS, True)
            assert log.read().current == 1


def test_a_trainer_goes_on_after_a_coordinator_has_lost_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With any numbers, and waits for engines that serve a version of before: they may not have
    reached it.
    """
    first = sync.serve(token="")
    port = int(first.address.rpartition(":")[2])
    with sync.connect(first.address) as hub, sync.connect(first.address) as others:
        its = Engine(hub, "actor", Policy(8), lease_s=LEASE_S, timeout_s=WAIT_S)
        trainer = OneVersion(others, "actor", lease_s=LEASE_S, timeout_s=WAIT_S)
        old = others.register("actor", values(8, 1.0), group="old")
        trainer.update(old.publish(80))
        first.close()
        with sync.serve(port=port, token=""):
            until = time.monotonic() + WAIT_S
            while list(announced(others, "actor", SEATS)) != [its.url]:
                assert time.monotonic() < until
                time.sleep(0.01)
            slept = _sleeps(monkeypatch)
            weights = others.register("actor", values(8, 2.0))
            assert trainer.update(weights.publish(1)).done == (its.url,)
            assert slept
            assert its.wait_until_served(WAIT_S) == 1
            trainer.close()
            its.close()


def test_an_engine_that_voted_for_a_trainer_that_died_serves_no_other_version(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not listed when the next trainer begins, and its vote is none for that one."""
    one, other = rig.engine(), rig.engine()
    dead = rig.trainer()
    dead.update(rig.publish(1))
    rig.serve()
    info, staged = rig.publish(2), dead._do
    monkeypatch.setattr(
        dead, "_do", lambda step: _refuses() if isinstance(step, Fence) else staged(step)
    )
    with pytest.raises(StateError):
        dead.update(info)  # both have voted
    dead.close()
    trainer = rig.trainer(servers=None)
    find, does, served = trainer._list, trainer._do, list[Any]()

    def do(step: Any) -> Any:
        if isinstance(step, Fence):
            monkeypatch.setattr(trainer, "_list", find)
        if isinstance(step, Decide):
            served.append(other.version)
        return does(step)

    monkeypatch.setattr(trainer, "_do", do)
    monkeypatch.setattr(trainer, "_list", lambda: [each for each in find() if each[0] == one.url])
    assert trainer.update(info).done == (one.url,)
    assert served == [None]
    assert rig.serve() == [(2, {2.0}), (2, {2.0})]


@pytest.mark.parametrize("is_known", [True, False])
def test_an_engine_that_was_started_anew_elsewhere_at_its_url_serves_no_other_version(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """As where a name leads to another machine now: calls reach the new one, and the one before
    it lives.
    """
    one, before = rig.engine(), rig.engine()
    before._announced.close()
    trainer = rig.trainer(servers=None)
    served = list[Any]()

    def list_again() -> None:
        before._announced = announce(rig.hub, "actor", SEATS, one.url)

    list_again()
    trainer.update(rig.publish(1))
    rig.serve()
    before._announced.close()
    does = trainer._do

    def do(step: Any) -> Any:
        if isinstance(step, Fence) and not is_known:
            list_again()
            before.wait_until_served(WAIT_S)
        if isinstance(step, Decide):
            served.append(before.version)
        return does(step)

    monkeypatch.setattr(trainer, "_do", do)
    if is_known:
        list_again()
        before.wait_until_served(WAIT_S)
    trainer.update(rig.publish(2))
    assert served == [None]
    assert rig.serve() == [(2, {2.0}), (2, {2.0})]


@pytest.mark.parametrize("lease_s", [0.0, 10.0, math.nan])
def test_a_lease_is_shorter_than_the_coordinators(rig: Rig, lease_s: float) -> None:
    """Else a trainer would not wait for an engine that is listed no more, and serves."""
    text = "give more than 0, and less than the coordinator's, 10"
    with pytest.raises(InvalidValue, match=text):
        rig.engine(lease_s=lease_s)
    with pytest.raises(InvalidValue, match=text):
        rig.trainer(lease_s=lease_s)


def test_in_place_by_a_function(rig: Rig) -> None:
    live = values(8, 0.0)

    def put(tensors: Mapping[str, torch.Tensor]) -> None:
        for name, each in live.items():
            each.copy_(tensors[name])

    its = rig.engine(tensors={name: each.clone() for name, each in live.items()}, put=put)
    rig.trainer().update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    assert live["a"].tolist() == [1.0] * 8
    with pytest.raises(StateError, match="give put="):
        rig.engine(tensors=values(8, 0.0))


def test_a_version_of_which_a_part_was_put_in_place_is_taken_back_as_a_whole(rig: Rig) -> None:
    live = values(8, 0.0)

    def put(tensors: Mapping[str, torch.Tensor]) -> None:
        live["a"].copy_(tensors["a"])
        if tensors["a"][0] == 2.0:
            raise RuntimeError("there is no memory")
        live["b"].copy_(tensors["b"])

    its = rig.engine(tensors={name: each.clone() for name, each in live.items()}, put=put)
    trainer = rig.trainer(attempts_max=1)
    trainer.update(rig.publish(1))
    with pytest.raises(StateError, match="there is no memory"):
        trainer.update(rig.publish(2))
    with its._use(WAIT_S) as version:
        assert (version, {each[0].item() for each in live.values()}) == (1, {1.0})


def test_two_trainers_and_an_older_version(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.engine()
    trainer = rig.trainer()

    def sleep(_: float) -> None:
        trainer.close()

    first = rig.publish(1)
    trainer.update(rig.publish(2))
    with pytest.raises(VersionConflict, match="version 1 of 'actor' is older"):
        trainer.update(first)
    with sync.connect(rig.address) as hub:
        with pytest.raises(StateError, match="another trainer updates the engines of 'actor'"):
            OneVersion(hub, "actor", [rig.engines[0].url], timeout_s=0.1)
        monkeypatch.setattr(
            trainer_group, "time", SimpleNamespace(sleep=sleep, monotonic=monotonic)
        )
        OneVersion(hub, "actor", [rig.engines[0].url]).close()  # it waits: it may be dead


def test_a_number_that_has_no_attempts(rig: Rig) -> None:
    rig.engine()
    trainer = rig.trainer()
    with pytest.raises(InvalidValue, match="up to"):
        trainer.update(rig.publish(2**52))


def test_no_engine_answers(rig: Rig) -> None:
    trainer = rig.trainer(servers=["http://127.0.0.1:9"])
    with pytest.raises(StateError, match="no engine has taken version 1") as error:
        trainer.update(rig.publish(1))
    assert "does not answer /stage: is it up" in error.value.__notes__[0]
    late = rig.engine()
    with pytest.raises(OperationTimeout, match="no version was committed"):
        late.wait_until_served(0.1)


def test_calls_that_are_not_allowed(rig: Rig) -> None:
    its = rig.engine(token="secret")
    with pytest.raises(AuthenticationFailed, match="expects another token"):
        Remote(its.url, "guess").stage(1024)
    with pytest.raises(StateError, match="has not voted in attempt 7"):
        Remote(its.url, "secret").flip(7)
    with pytest.raises(InvalidValue, match="is not the URL of an engine"):
        Remote("127.0.0.1:1")
    with pytest.raises(InvalidValue, match=r"host='0\.0\.0\.0' can be reached .* give token="):
        rig.engine(host="0.0.0.0")
    host, _, port = its.url.removeprefix("http://").partition(":")
    for body, path in ((b"x" * 5000, "/stage"), (b"{}", "/close"), (b"[1", "/flip")):
        connection = HTTPConnection(host, int(port), timeout=WAIT_S)
        connection.request("POST", path, body, {"Authorization": "Bearer secret"})
        assert connection.getresponse().status == 409
        connection.close()


def test_a_version_that_has_no_attempts_left_is_never_another_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts are numbered by versions: the next number may be one of another version."""
    its = rig.engine()
    trainer = rig.trainer(attempts_max=1)
    trainer.update(rig.publish(1))
    rig.publish(5)
    fifth = rig.hub.wait_for("actor", at_least=5)
    with sync.connect(rig.address) as hub:
        hub.register("actor", values(8, 0.0)).update(5)
        seventh = rig.publish(7)
        with monkeypatch.context() as broken:
            broken.setattr(Remote, "flip", _refuses)
            with pytest.raises(StateError, match="no engine has taken version 7"):
                trainer.update(seventh)
        with pytest.raises(VersionConflict, match="a newer one was attempted, 7: publish these"):
            trainer.update(fifth)
        with pytest.raises(InvalidValue, match="version 7 is one of 'critic'"):
            trainer.update(replace(seventh, model="critic"))
    its.wait_until_served(WAIT_S)
    assert rig.serve() == [(1, {1.0})]
    trainer._next = 8 * ATTEMPTS
    with pytest.raises(VersionConflict, match="publish these weights with a newer number"):
        trainer.update(seventh)


def _refuses(*_: object, **__: object) -> None:
    raise StateError("it does not flip")


def test_what_a_trainer_has_committed_before_it_died_is_served_after_updates_that_fail(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit is in no list once there are newer records."""
    its = rig.engine()
    info = rig.publish(1)
    with sync.connect(rig.address) as hub, monkeypatch.context() as dies:
        first = OneVersion(hub, "actor", [its.url], lease_s=LEASE_S, timeout_s=WAIT_S)
        dies.setattr(first._log, "note", _refuses)
        with pytest.raises(StateError):
            first.update(info)
        first.close()
    trainer = rig.trainer(attempts_max=1)
    monkeypatch.setattr(Remote, "flip", _refuses)
    for version in (2, 3):
        with pytest.raises(StateError, match="go on with version 1"):
            trainer.update(rig.publish(version))
    assert rig.engine().wait_until_served(WAIT_S) == 1
    assert rig.serve()[0] == (1, {1.0})


def test_a_trainer_that_is_not_this_engines(rig: Rig) -> None:
    its = rig.engine()
    rig.trainer().update(rig.publish(1))
    with sync.connect(rig.address) as hub:
        info = hub.register("critic", values(8, 9.0)).publish(1)
        other = OneVersion(hub, "critic", [its.url], lease_s=LEASE_S)
        with pytest.raises(InvalidValue, match=r"the trainer has \{'model': 'critic'"):
            other.update(info)
        other.close()
    with pytest.raises(InvalidValue, match=r"'lease_s': 0\.1\}, and this engine"):
        Remote(its.url, terms={"model": "actor", "lease_s": 0.1}).stage(ATTEMPTS)
    with pytest.raises(InvalidValue, match="give each engine once"):
        rig.trainer(servers=[its.url, f"{its.url}/"])
    assert rig.serve() == [(1, {1.0})]


def test_an_engine_with_a_longer_lease_keeps_all_at_the_old_version(rig: Rig) -> None:
    """The trainer would not wait long enough: that engine would go on with the old version."""
    rig.engine()
    trainer = rig.trainer()
    trainer.update(rig.publish(1))
    rig.engine(lease_s=2 * LEASE_S).wait_until_served(WAIT_S)
    trainer.close()
    with pytest.raises(InvalidValue, match=r"and this engine .*'lease_s': 1\.0"):
        rig.trainer().update(rig.publish(2))
    assert rig.serve() == [(1, {1.0}), (1, {1.0})]


def test_what_is_no_url_is_no_engine(rig: Rig) -> None:
    its = rig.engine()
    with pytest.raises(InvalidValue, match="is not the URL of this engine"):
        announce(rig.hub, "actor", SEATS, "10.0.0.1:8000")
    for group in ("10.0.0.1:8000", f"{its.url}/ again"):
        rig.hub.register("actor/seats", {"engine": torch.zeros(1)}, group=group).publish(
            (rig.hub.describe("actor/seats", limit=0).mark or 0) + 1
        )
    assert list(announced(rig.hub, "actor", SEATS)) == [its.url]


def test_weights_in_use_are_not_replaced_by_a_decision_that_comes_late(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the others have committed in later attempts, whose records hide this one's."""
    its = rig.engine(decide_s=0.2)
    trainer = rig.trainer(attempts_max=1)
    trainer.update(rig.publish(1))
    rig.publish(2)
    attempt = 2 * ATTEMPTS
    with its._use(WAIT_S):
        monkeypatch.setattr(its, "_poll", lambda: None)  # else it records "abort" itself
        its.stage(attempt)
        with pytest.raises(OperationTimeout, match="still being used"):
            its.flip(attempt)
        with pytest.raises(StateError, match="still being used"):
            its.settle(attempt, is_commit=True)
        assert rig.policies[0].get_parameter("b")[0] == 1.0
    its.settle(attempt, is_commit=True)
    assert rig.policies[0].get_parameter("b")[0] == 2.0


@pytest.mark.parametrize("by", ["abort", "later commit"])
def test_an_attempt_that_is_decided_while_a_flip_waits_for_a_use(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """As where the trainer has waited long enough, and goes on without this engine: what is served
    then stays in place when the use ends.
    """
    its = rig.engine(decide_s=WAIT_S)
    trainer = rig.trainer(attempts_max=1)
    trainer.update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    rig.publish(2)
    attempt = 2 * ATTEMPTS
    its.stage(attempt)
    monkeypatch.setattr(its, "_poll", lambda: None)  # the calls are made here
    errors = list[Exception]()

    def flip() -> None:
        try:
            its.flip(attempt)
        except StateError as error:
            errors.append(error)

    thread = threading.Thread(target=flip)
    with its._use(WAIT_S):
        thread.start()
        with its._lock:
            assert its._lock.wait_for(lambda: its._is_flipped(attempt), WAIT_S)
        with pytest.raises(OperationTimeout, match="still being used"):
            its.flip(attempt)  # a repeated call does not say that it is done
        if by == "abort":
            its.settle(attempt, is_commit=False)
        else:
            with pytest.raises(StateError, match="still being used"):
                its.settle(attempt, is_commit=True)
    thread.join(WAIT_S)
    if by == "abort":
        assert "was decided while" in str(errors)
        its.seat.lease_until = boot_time() + WAIT_S
    else:
        assert not errors
        its.settle(attempt, is_commit=True)
    version = 1 if by == "abort" else 2
    assert rig.serve() == [(version, {float(version)})]


def test_what_an_engine_has_read_before_a_commit_puts_nothing_in_place_after_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has voted, and takes the version before anew, because that was lost."""
    rig.engine()
    its = rig.engine()
    trainer = rig.trainer()
    trainer.update(rig.publish(1))
    rig.serve()
    does, read = trainer._do, its._log.read
    has_read, may_go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=its._catch_up, args=(1,))

    def slow() -> Any:
        records = read()
        has_read.set()
        assert may_go_on.wait(WAIT_S)
        return records

    def do(step: Any) -> Any:
        if isinstance(step, Fence):  # all have voted
            monkeypatch.setattr(its, "_poll", lambda: None)
            monkeypatch.setattr(its._log, "read", slow)
            its.lost()
            thread.start()
            assert has_read.wait(WAIT_S)
        return does(step)

    monkeypatch.setattr(trainer, "_do", do)
    assert len(trainer.update(rig.publish(2)).done) == 2
    its.seat.lease_until = boot_time() + WAIT_S
    may_go_on.set()
    thread.join(WAIT_S)
    assert its.version == 2
    assert rig.serve() == [(2, {2.0}), (2, {2.0})]


def test_weights_in_use_are_not_filled_by_an_engine_that_is_behind(rig: Rig) -> None:
    its = rig.engine()
    rig.trainer().update(rig.publish(1))
    rig.publish(2)
    with its._use(WAIT_S):
        its._catch_up(2)
        assert rig.policies[0].get_parameter("b")[0] == 1.0


def test_a_flip_that_has_failed_fails_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer repeats a call whose answer was lost."""
    its = rig.engine(decide_s=WAIT_S)
    rig.publish(1)
    its.stage(ATTEMPTS)
    with monkeypatch.context() as broken:
        broken.setattr(its._slots, "put", _refuses)
        for _ in range(2):
            with pytest.raises(StateError, match="it does not flip"):
                its.flip(ATTEMPTS)


def test_an_engine_that_hears_of_no_decision_goes_back_by_itself(rig: Rig) -> None:
    """Flipped, or kept from serving by a fence, by a trainer that is gone."""
    its = rig.engine(decide_s=0.2)
    rig.trainer().update(rig.publish(1))
    rig.publish(2)
    its.stage(2 * ATTEMPTS)
    its.flip(2 * ATTEMPTS)
    assert rig.serve() == [(1, {1.0})]
    log, until = RecordLog(rig.hub, "actor", WAIT_S), time.monotonic() + WAIT_S
    assert log.fence(2 * ATTEMPTS + 1)
    while (decision := log.read().decision(2 * ATTEMPTS + 1)) is None:
        assert time.monotonic() < until
    assert not decision
    assert rig.serve() == [(1, {1.0})]


def test_an_engine_that_fails_to_go_back_comes_back_by_itself(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = rig.engine(decide_s=0.2)
    rig.trainer().update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    put, faults = its._slots.put, [RuntimeError("the device has no memory")]

    def fails_once(slot: int) -> None:
        if slot == its._current and faults:
            raise faults.pop()
        put(slot)

    monkeypatch.setattr(its._slots, "put", fails_once)
    rig.publish(2)
    its.stage(2 * ATTEMPTS)
    its.flip(2 * ATTEMPTS)
    assert rig.serve() == [(1, {1.0})]
    assert not faults


def test_weights_that_are_lost_are_put_in_place_anew(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = rig.engine()
    rig.trainer().update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    put, puts = its._slots.put, list[int]()

    def noted(slot: int) -> None:
        puts.append(slot)
        put(slot)

    monkeypatch.setattr(its._slots, "put", noted)
    its.lost()
    assert its.wait_until_served(WAIT_S) == 1
    assert puts == [its._current]


def test_a_lease_begins_when_the_records_are_asked_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that comes after its lease gives none: a fence may have been recorded since."""
    its = rig.engine()
    rig.trainer().update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    read, late = its._log.read, [0.0]

    def slow() -> Any:
        records = read()
        late[0] += 10 * LEASE_S
        return records

    monkeypatch.setattr(its._log, "read", slow)
    monkeypatch.setattr(one_version_engine, "now_s", lambda: boot_time() + late[0])
    its._poll()
    assert its.version is None


def test_a_lease_ends_while_the_machine_sleeps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    its, wakes = rig.engine(), threading.Event()
    rig.trainer().update(rig.publish(1))
    its.wait_until_served(WAIT_S)
    monkeypatch.setattr(its, "_poll", wakes.set)  # it reads nothing from now on
    assert wakes.wait(WAIT_S)
    its.seat.lease_until = one_version_engine.now_s() + WAIT_S
    assert its.version == 1
    tells = time.clock_gettime

    def later(clock: int) -> float:  # `time.monotonic` stands still meanwhile
        return tells(clock) + (2 * WAIT_S if clock == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", later)
    assert its.version is None


def test_fifty_failed_updates_leave_nothing_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = rig.engine()
    trainer = rig.trainer(attempts_max=1)
    trainer.update(rig.publish(1))
    info = rig.publish(2)
    monkeypatch.setattr(Remote, "flip", _refuses)

    def fails(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            with pytest.raises(StateError, match="no engine has taken version 2"):
                trainer.update(info)
        models = rig.hub.describe()
        groups = sum(each.summary.groups for each in models if each.summary is not None)
        return groups, threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = fails(10)
    groups, threads, descriptors = fails(50)
    assert groups < before[0] + 20  # some may be about to leave
    assert threads <= before[1] + 2
    assert descriptors <= before[2] + 4
    monkeypatch.undo()
    trainer.update(rig.publish(3))
    its.wait_until_served(WAIT_S)
    assert rig.serve() == [(3, {3.0})]
