"""Bytes without their digest (R8): the owner digests again, and only the guilty party pays."""

from __future__ import annotations

import pytest

from tensorhub.coordinator import limits
from tensorhub.coordinator.actions import Received
from tensorhub.coordinator.corruption_checks import INQUIRY_S
from tensorhub.coordinator.states import VersionState
from tensorhub.coordinator.views import describe
from tensorhub.errors import IntegrityError, VersionUnavailable
from tensorhub.messages import DigestAgain, DigestedAgain, ReadFailed
from tensorhub.testing import CHUNKS, Choice, SimHandle, StepwiseCluster
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import HandleState
from tests.coordinator.layout_world import Rank, World
from tests.coordinator.test_bridges import filling, published


def holders(*names: str) -> tuple[StepwiseCluster, list[SimHandle]]:
    """Workers of these names that hold version 1, which the first has published, and a reader that
    holds nothing.
    """
    cluster = StepwiseCluster(manifest=make_manifest(CHUNKS, "xxh3-64"))
    handles = [cluster.handle(name) for name in (*names, "reader")]
    cluster.run()
    handles[0].publish(1)
    cluster.run()
    for handle in handles[1:-1]:
        handle.replicate()
        cluster.run()
    return cluster, handles


def shard_states(cluster: StepwiseCluster) -> dict[str, str]:
    info = describe(cluster.coordinator.cluster.models["actor"], cluster.now)[0]
    return {shard.worker: shard.state for replica in info.replicas for shard in replica.shards}


def source_of(reader: SimHandle) -> str:
    assert reader.pull is not None
    return next(iter(reader.pull.grants.values())).source


def begin(cluster: StepwiseCluster, reader: SimHandle) -> None:
    reader.replicate()
    cluster.run("read")


def accuse(cluster: StepwiseCluster, reader: SimHandle, chunk: int = 0) -> str:
    """The reader says that its source's chunk came without its digest; whose that was."""
    assert reader.pull is not None
    lane = next(iter(reader.pull.lanes.values()))
    name = lane.grant.source
    lane.end("corrupt", chunk)
    cluster.run("read")
    return name


def questions(cluster: StepwiseCluster) -> int:
    return sum("<- DigestAgain" in line for line in cluster.log)


def test_who_finds_out_that_his_own_memory_has_changed_is_quarantined_unasked() -> None:
    cluster, (trainer, other, reader) = holders("trainer", "other")

    def says(handle: SimHandle, *, generation: int, changed: bool) -> None:
        found = DigestedAgain("", handle.id, changed, generation=generation)
        handle.worker.say(found)
        cluster.run()

    says(other, generation=other.generation + 1, changed=True)  # of something else
    says(other, generation=other.generation, changed=False)
    assert shard_states(cluster) == {"trainer": "complete", "other": "complete"}
    says(other, generation=other.generation, changed=True)
    assert shard_states(cluster) == {"trainer": "complete", "other": "quarantined"}
    reader.replicate()
    cluster.run()
    assert reader.member.version == trainer.member.version == 1


def test_a_publisher_whose_bytes_have_changed_is_quarantined_and_nobody_else() -> None:
    cluster, (trainer, _, reader) = holders("trainer", "other")
    begin(cluster, reader)
    assert accuse(cluster, reader) == "other"  # without cause: it is cleared
    trainer.worker.hear = lambda message: hear_guilty(trainer, message)  # type: ignore[method-assign]
    assert accuse(cluster, reader) == "trainer"
    del trainer.worker.hear
    assert shard_states(cluster) == {
        "trainer": "quarantined",
        "other": "complete",
        "reader": "filling",
    }
    assert trainer.member.state is HandleState.READY  # until its caller takes it back
    cluster.advance(1.0)
    assert reader.member.version == 1
    gone = trainer.unpublish()
    cluster.run()
    assert (gone.done, gone.error) == (True, None)
    assert "trainer" not in shard_states(cluster)


def test_a_reader_that_became_a_holder_gives_up_what_has_changed() -> None:
    cluster, (trainer, other, reader) = holders("trainer", "other")
    begin(cluster, reader)
    assert source_of(reader) == "other"
    other.worker.hear = lambda message: hear_guilty(other, message)  # type: ignore[method-assign]
    accuse(cluster, reader)
    del other.worker.hear
    assert (other.member.state, trainer.member.state) == (HandleState.EMPTY, HandleState.READY)
    cluster.run()
    assert reader.member.version == 1
    again = other.replicate()
    cluster.run()
    assert again.number == 1


def hear_guilty(handle: SimHandle, message: object) -> None:
    """As if its memory had changed; the simulated one has not, so that the other guarantees still
    hold.
    """
    if isinstance(message, DigestAgain):
        error = IntegrityError("changed")
        apply = handle.member.digested_again(
            message.inquiry, message.generation, True, error, handle.cluster.now
        )
        handle.apply(apply)
    else:
        type(handle.worker).hear(handle.worker, message)  # type: ignore[arg-type]


def test_a_source_that_is_cleared_serves_on_and_the_reader_goes_elsewhere_first() -> None:
    cluster, (_, _, reader) = holders("trainer", "other")
    begin(cluster, reader)
    accused = accuse(cluster, reader)
    assert source_of(reader) != accused
    assert set(shard_states(cluster).values()) == {"complete", "filling"}
    cluster.run()
    assert reader.member.version == 1


def test_a_reader_that_gets_damaged_bytes_from_everybody_is_the_guilty_one() -> None:
    cluster, (_, _, reader) = holders("trainer", "other")
    begin(cluster, reader)
    asked = reader.last_call
    assert asked is not None
    assert {accuse(cluster, reader), accuse(cluster, reader)} == {"trainer", "other"}
    says = (
        r"(?s)what rank 0 got from 'other', 'trainer' does not .* unchanged. The machine of "
        r"worker 'reader', or the way"
    )
    with pytest.raises(IntegrityError, match=says) as caught:
        _ = asked.number
    assert caught.value.memory == "torn"
    assert set(shard_states(cluster).values()) == {"complete"}


def test_with_one_source_the_deadline_says_that_it_is_unchanged() -> None:
    cluster, (_, reader) = holders("trainer")
    cluster.fetcher("first").fetch()  # so that there are digests
    cluster.run()
    begin(cluster, reader)
    asked = reader.last_call
    assert asked is not None
    for _ in range(200):
        if asked.done:
            break
        assert reader.pull is not None
        if reader.pull.lanes:
            accuse(cluster, reader)
        cluster.advance(0.5, run=False)
        cluster.run("read")
    with pytest.raises(
        IntegrityError, match="'trainer' does not have its digest, and they have digested it again"
    ):
        _ = asked.number


def test_a_reader_that_lies_costs_a_source_a_digest_a_second() -> None:
    cluster, (trainer, reader) = holders("trainer")
    for _ in range(20):
        asked = reader.replicate() if reader.member.state is HandleState.EMPTY else reader.update()
        cluster.run("read")
        accuse(cluster, reader)
        reader.cancel()
        cluster.run("read")
        assert asked.done
    assert questions(cluster) == 1
    cluster.advance(INQUIRY_S, run=False)
    reader.update()
    cluster.run("read")
    accuse(cluster, reader)
    assert questions(cluster) == 2
    assert trainer.member.version == 1


def test_stale_and_foreign_answers_change_nothing() -> None:
    cluster, (trainer, other, reader) = holders("trainer", "other")
    begin(cluster, reader)
    name = accuse(cluster, reader)
    guilty = trainer if name == "trainer" else other
    bystander = other if guilty is trainer else trainer
    ident = (
        next(line for line in cluster.log if "<- DigestAgain" in line)
        .split("inquiry=")[1]
        .split()[0]
    )
    for worker, handle in (
        (guilty.worker, guilty),
        (bystander.worker, guilty),
        (bystander.worker, bystander),
    ):
        assert worker.link is not None
        for inquiry in (ident, "", "invented"):
            cluster.step(Received(worker.link.session, DigestedAgain(inquiry, handle.id, True)))
    assert "quarantined" not in shard_states(cluster).values()


def test_an_accusation_of_what_one_does_not_read_asks_nobody() -> None:
    cluster, (_, reader) = holders("trainer")
    begin(cluster, reader)
    running = reader.member.running
    assert running is not None
    assert running.key is not None
    assert reader.worker.link is not None
    for lease in ("invented", ""):
        cluster.step(
            Received(
                reader.worker.link.session, ReadFailed(running.key, 0, lease, "corrupt", "", 0)
            )
        )
    cluster.run("read")
    assert questions(cluster) == 0


def test_a_quarantined_only_source_leaves_its_version_unavailable() -> None:
    cluster, (trainer, reader) = holders("trainer")
    begin(cluster, reader)
    asked = reader.last_call
    assert asked is not None
    trainer.worker.hear = lambda message: hear_guilty(trainer, message)  # type: ignore[method-assign]
    accuse(cluster, reader)
    del trainer.worker.hear
    version = cluster.coordinator.cluster.models["actor"].versions[1]
    assert version.state is VersionState.UNAVAILABLE
    trainer.worker.disconnect()
    trainer.worker.connect()
    cluster.run("read")
    assert version.state is VersionState.UNAVAILABLE  # it does not announce again what is none
    cluster.advance(100)
    with pytest.raises((IntegrityError, VersionUnavailable)):
        _ = asked.number
    assert Choice("read", reader.name) not in cluster.choices()


def corrupt_at(world: World, reader: Rank, source: Rank, chunk: int = 0) -> DigestAgain:
    """The reader says that of a chunk of this source: what the source is asked."""
    world.lose_source(reader, world.lease(reader, source.name), "corrupt", chunk)
    (question,) = source.take(DigestAgain)
    return question


def test_of_very_many_accusations_only_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INQUIRIES_MAX", 1)
    world, (trainer, _) = published()
    for name in ("r", "s", "u"):
        (reader,) = filling(world, name)
        corrupt_at(world, reader, trainer)
    (holding,) = world.member(trainer).holdings
    assert list(holding.trust.inquiries) == ["worker of u0"]


def test_who_leaves_is_asked_nothing() -> None:
    world, (trainer, _) = published()
    (reader,) = filling(world)
    filling(world, "late")  # it waits for its readers
    world.leave(trainer)
    world.lose_source(reader, world.lease(reader, trainer.name), "corrupt", 0)
    assert not trainer.take(DigestAgain)
