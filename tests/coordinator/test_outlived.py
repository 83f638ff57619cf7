"""A coordinator whose store is older than what a worker remembers says so before it says anything
else to that worker (G3). Without the rules of `beyond_record`, `latest` would silently go back.

A restored store with real processes: `tests/test_coordinator_restart.py`.
"""

from __future__ import annotations

import dataclasses

import pytest

from tensorhub.coordinator import (
    CloseSession,
    Connected,
    Decision,
    Outlived,
    Publication,
    Received,
    Send,
    limits,
)
from tensorhub.errors import LeaseLost, VersionConflict
from tensorhub.messages import FromWorker, Held, Join, Refused, Register, Watch, Welcome
from tensorhub.testing import DEVICE, StepwiseCluster
from tensorhub.types import HandleState, Location, Medium, OpKey, Purpose
from tensorhub.worker.active_call import DEADLINE_SLACK_S
from tests.worker.test_member import published

SESSION = 77
JOIN = Join("x", Location(), (), 1, 0, cluster="c", epoch=1)
HELD = Held(9, "other", 1, 1, 1, b"m", lineage=0)
REGISTER = Register(7, "r", "actor", "g", 0, 0, 1, True, False, *DEVICE, "", 1, 1, b"m", HELD)


def said(
    message: FromWorker, *, lineage: int = 0, read_only: bool = False, join: Join = JOIN
) -> str:
    """What makes a coordinator outlived, where version 1 is the newest, of that lineage; "": it
    is not.
    """
    cluster, _, _ = published()
    model = cluster.coordinator.cluster.models["actor"]
    model.history.lineage = lineage
    cluster.coordinator.step(Connected(SESSION, "x.1", "worker", read_only=read_only), 0.0)
    before = [] if isinstance(message, Join) else [join]
    reasons = [""]
    for each in (*before, message):
        for action in cluster.coordinator.step(Received(SESSION, each), cluster.now):
            if isinstance(action, Outlived):
                reasons.append(action.reason)
    return reasons[-1]


def joins(epoch: int, cluster: str = "c", term: str = "") -> Join:
    return dataclasses.replace(JOIN, cluster=cluster, epoch=epoch, term=term)


def holds(**more: object) -> FromWorker:
    return dataclasses.replace(REGISTER, held=dataclasses.replace(HELD, **more))  # type: ignore[arg-type]


def committed(group: str, sequence: int) -> FromWorker:
    """A rank of such a group was told so, by the coordinator of epoch 1 in the first membership."""
    key = OpKey("actor", group, (1 << 32) + 1, sequence)
    return dataclasses.replace(REGISTER, group=group, world_size=2, held=None, committed=key)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (joins(2), "worker 'x' was welcomed in epoch 2 already, and this is epoch 1"),
        (joins(1, term="another"), "welcomed in epoch 1 by another coordinator, and this is that"),
        (Watch("actor", 0, 2), "version 2 of 'actor', lineage 0: number 1 of lineage 0"),
        (Watch("actor", 1, 1), "version 1 of 'actor', lineage 1: number 1 of lineage 0"),
        (Watch("actor", 1), "no version of 'actor', lineage 1: number 1 of lineage 0"),
        (Watch("unknown", 0, 0), "version 0 of 'unknown', lineage 0: number None of lineage 0"),
        (holds(), "version 9 of 'actor', lineage 0: number 1 of lineage 0"),
        (holds(version=1), "version 1 of 'actor', lineage 0: other content"),
        (committed("trainer", 1), "trainer@4294967297#1 is committed: actor/trainer@4294967297#0"),
        (committed("g", 0), "actor/g@4294967297#0 is committed: none is known here"),
    ],
)
def test_what_only_a_later_coordinator_could_have_told_is_no_secret(
    message: FromWorker, why: str
) -> None:
    assert why in said(message)


@pytest.mark.parametrize(
    "message",
    [
        joins(1),  # by an older release
        joins(1, term="term1"),
        joins(1, "another", "another"),
        joins(0, term="another"),
        joins(2, "another"),
        Watch("actor"),
        Watch("actor", 0, 1),
        Watch("unknown"),
        holds(voted=True),
        holds(lineage=None),  # of a cluster before this one, or an older release
        committed("trainer", 0),
        dataclasses.replace(REGISTER, medium=Medium.HOST, purpose=Purpose.ARCHIVE),
    ],
)
def test_what_this_coordinator_could_have_told_is_none_of_it(message: FromWorker) -> None:
    assert not said(message)


@pytest.mark.parametrize("message", [Watch("actor", 0, 9), holds()])
def test_versions_of_an_earlier_lineage_prove_nothing(message: FromWorker) -> None:
    """A rollback has left them behind."""
    assert not said(message, lineage=1)


def test_a_decision_that_may_be_forgotten_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DECISIONS_MAX", 1)
    assert not said(committed("g", 0))
    assert said(committed("trainer", 1))


@pytest.mark.parametrize("message", [Watch("actor", 0, 9), holds(), committed("g", 0)])
def test_a_worker_of_another_cluster_proves_nothing(message: FromWorker) -> None:
    """What it says may have waited since before the state was lost."""
    assert not said(message, join=joins(9, "another"))


@pytest.mark.parametrize(
    "message", [joins(9), joins(1, term="x"), Watch("actor", 0, 9), committed("g", 0)]
)
def test_the_read_only_token_ends_no_coordinator(message: FromWorker) -> None:
    assert not said(message, read_only=True)


def test_the_read_only_token_is_not_welcomed_in_an_earlier_epoch() -> None:
    """A deposed leader would tell it of versions that are no more the newest (G9)."""
    cluster = StepwiseCluster()
    cluster.coordinator.step(Connected(SESSION, "x.1", "worker", read_only=True), 0.0)
    refused, closed = cluster.coordinator.step(Received(SESSION, joins(2)), 0.0)
    assert isinstance(refused, Send)
    assert isinstance(refused.message, Refused)
    assert refused.message.error.kind == "CoordinatorUnavailable"
    assert "welcomed in epoch 2 already" in refused.message.error.message
    assert isinstance(closed, CloseSession)


def test_the_read_only_token_is_not_turned_away_for_ever() -> None:
    """There may be no other worker that remembers the later epoch."""
    cluster = StepwiseCluster()
    lease_s = cluster.options.lease_s
    answers = list[object]()
    for session, now in enumerate((0.0, lease_s - 1, lease_s)):
        cluster.coordinator.step(Connected(session, "x.1", "worker", read_only=True), now)
        said = cluster.coordinator.step(Received(session, joins(2)), now)
        assert isinstance(said[0], Send)
        answers.append(type(said[0].message))
    assert answers == [Refused, Refused, Welcome]


def test_nothing_follows_a_later_join() -> None:
    cluster = StepwiseCluster()
    cluster.coordinator.step(Connected(SESSION, "x.1", "worker"), 0.0)
    (action,) = cluster.coordinator.step(Received(SESSION, joins(2)), 0.0)
    assert isinstance(action, Outlived)


def come_back(cluster: StepwiseCluster) -> None:
    """The coordinator restarts, and its live workers connect again."""
    cluster.restart()
    for worker in cluster.workers.values():
        if worker.alive:
            worker.connect()
    cluster.run()


def test_ranks_that_remember_a_commit_are_told_once_that_state_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a rank would hold what the coordinator does not know, and a rank in doubt be told that
    the commit was none (R6).
    """
    cluster, reasons = StepwiseCluster(), list[str]()
    monkeypatch.setattr(cluster, "begin_anew", lambda term, why: reasons.append(why))
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    for rank in trainers:
        rank.publish(1)
    cluster.run()
    for rank in readers:
        rank.replicate()
    cluster.run()
    assert isinstance(cluster.store[-1], Decision)
    cluster.take_older_state(len(cluster.store) - 1)
    come_back(cluster)
    assert reasons[0].endswith("reader@4294967298#0 is committed: none is known here")
    reasons.clear()
    cluster.become_new_cluster()
    come_back(cluster)
    asked = [rank.replicate() for rank in readers]
    cluster.run()
    assert all(isinstance(each.error, LeaseLost) for each in asked)
    come_back(cluster)  # what they were told before counts no more
    assert not reasons


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("is_in_doubt", [False, True])
def test_a_single_trainer_that_writes_its_memory_remembers_its_publication(
    is_in_doubt: bool, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds nothing meanwhile. Else `latest` would silently name the version before."""
    cluster, trainer, (reader,) = published("reader")
    reasons = list[str]()
    monkeypatch.setattr(cluster, "begin_anew", lambda term, why: reasons.append(why))
    reader.replicate()  # no record is made of it
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run(until=lambda: cluster.unstored)
    if is_in_doubt:
        trainer.worker.disconnect()
        trainer.apply(trainer.member.cancel(TimeoutError(), cluster.now))
        cluster.advance(2 * DEADLINE_SLACK_S)
        assert trainer.member.state is HandleState.IN_DOUBT
        trainer.worker.connect()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    assert trainer.member.state is HandleState.EMPTY
    if is_lost:
        cluster.take_older_state(len(cluster.store) - 1)
    come_back(cluster)
    assert len(reasons) == is_lost
    assert "that actor/trainer@4294967297#1 is committed" in "".join(reasons) or not is_lost


def test_a_rank_with_other_content_under_the_number_of_its_groups_commit_is_heeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An older copy of the state has led meanwhile, and the newer one is back. Else two contents of
    one version would be held in silence.
    """
    cluster, reasons = StepwiseCluster(), list[str]()
    monkeypatch.setattr(cluster, "begin_anew", lambda term, why: reasons.append(why))
    for rank in cluster.group("trainer", 2):
        rank.publish(1)
    cluster.run()
    (entry,) = cluster.store
    assert isinstance(entry, Publication)
    cluster.store[:] = [dataclasses.replace(entry, content_id="another")]
    cluster.is_older = True
    come_back(cluster)
    assert reasons[0] == "a worker was told of version 1 of 'actor', lineage 0: other content"


def test_a_vote_on_one_copy_of_the_state_is_none_in_an_operation_on_another() -> None:
    """The coordinator is started on an older copy by mistake, and on the newer one again. On both a
    coordinator of one epoch has led, to which the same group made its first call.
    """
    cluster, one, _ = published()
    one.unpublish()
    come_back(cluster)
    one.publish(2)
    cluster.run()
    one.worker.crash()
    newer, epoch = list(cluster.store), cluster.store.epoch
    cluster.take_older_state(0)
    cluster.restart()
    assert cluster.store.epoch == epoch
    two = cluster.handle("two", "trainer")
    cluster.run()
    asked = two.publish(2)
    cluster.run("store")
    cluster.coordinator_died(kept=0)
    cluster.store.extend(newer)
    cluster.guarantees.state_replaced([], cluster.store)
    come_back(cluster)
    with pytest.raises(VersionConflict):
        _ = asked.number
    assert two.member.state is HandleState.EMPTY
