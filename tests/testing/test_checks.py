"""Checks from outside, one by one: each finds, in the shortest story, what it is for."""

from __future__ import annotations

import pytest

from tensorhub.coordinator import Received
from tensorhub.machine import InvariantBroken
from tensorhub.messages import Heartbeat, Pin, Watch
from tensorhub.testing import GuaranteeBroken, Handle, PureCluster
from tensorhub.testing.memory import CHUNKS, make_manifest
from tensorhub.testing.scripted import Choice
from tests.testing.bugs import inside, outside


def published() -> tuple[PureCluster, Handle, Handle]:
    cluster = PureCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    return cluster, trainer, reader


def test_a_lost_incarnation_that_is_welcomed_again_is_noticed() -> None:
    cluster, trainer, _ = published()
    trainer.worker.disconnect()
    cluster.advance(11.0)
    trainer.worker.connect()
    with outside.lost_incarnation_comes_back(), pytest.raises(GuaranteeBroken, match=r"G9: trainer.1 is welcomed"):
        cluster.run()


def test_what_is_heeded_over_a_former_connection_is_noticed() -> None:
    cluster, trainer, _ = published()
    former = trainer.worker.link
    assert former is not None
    with outside.former_connection_heard():
        trainer.worker.disconnect()
        trainer.worker.connect()
        cluster.do(Choice("up", "trainer"))  # it joins; nobody has noticed the former connection's end
        with pytest.raises(GuaranteeBroken, match=r"G9: .*HeartbeatAck.* follows of what came too late"):
            cluster.step(Received(former.session, Heartbeat(1)))


def test_a_question_over_a_former_connection_may_be_answered_there() -> None:
    cluster, trainer, _ = published()
    former = trainer.worker.link
    assert former is not None
    trainer.worker.disconnect()
    trainer.worker.connect()
    cluster.do(Choice("up", "trainer"))
    cluster.step(Received(former.session, Watch("actor")))
    cluster.step(Received(former.session, Pin(1, "pin", "actor", 1)))  # costs that connection
    cluster.run()
    assert not cluster.coordinator.cluster.models["actor"].pins


def test_a_reader_that_does_not_wait_for_a_crashed_source_is_noticed() -> None:
    cluster, trainer, reader = published()
    reader.replicate(timeout_s=60.0)
    while reader.pull is None:
        cluster.do(cluster.choices()[0])
    trainer.worker.crash()
    with outside.crash_taken_for_a_leave(), pytest.raises(GuaranteeBroken, match="R12: nobody has left"):
        cluster.advance(15.0)


@pytest.mark.parametrize("timeout_s", [0.0, 5.0])
def test_a_reader_whose_source_leaves_or_tries_to_need_not_wait(timeout_s: float) -> None:
    cluster, trainer, reader = published()
    asked = reader.replicate(timeout_s=60.0)
    while reader.pull is None:
        cluster.do(cluster.choices()[0])
    trainer.unpublish(timeout_s)
    cluster.advance(15.0)
    assert asked.has_ended()


def test_a_version_that_is_held_again_and_counts_as_left_is_noticed() -> None:
    cluster, trainer, reader = published()
    reader.replicate()
    cluster.run()
    reader.worker.disconnect()
    cluster.advance(11.0)  # lost
    trainer.unpublish()
    cluster.run()
    reader.worker.connect()
    cluster.run()  # it is dismissed, and comes back as another incarnation
    reader.worker.connect()
    with outside.abandoned_for_ever(), pytest.raises(InvariantBroken, match=r"\(R12\)"):
        cluster.run()


def test_a_holder_whose_bytes_have_changed_and_that_is_counted_on_is_noticed() -> None:
    cluster, trainer, _ = published()
    cluster.check_agreement()
    content = trainer.member.content
    assert content is not None
    content.spoiled = True
    with pytest.raises(GuaranteeBroken, match="holds generation None, the coordinator thinks"):
        cluster.check_agreement()


def test_a_reader_that_is_blamed_for_one_sources_bytes_is_noticed() -> None:
    """R8: two sources that are unchanged are needed for that."""
    cluster = PureCluster(manifest=make_manifest(CHUNKS, "xxh3-64"))
    trainer, other, reader = cluster.handle("trainer"), cluster.handle("other"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    other.replicate()
    cluster.run()
    reader.replicate()
    while reader.pull is None or not reader.pull.lanes:
        cluster.do(cluster.choices()[0])
    with inside.cleared_at_once():
        next(iter(reader.pull.lanes.values())).end("corrupt", 0)
        with pytest.raises(GuaranteeBroken, match=r"R8: .* is blamed for"):
            cluster.run()
