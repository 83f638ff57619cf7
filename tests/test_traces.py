"""Golden traces: whole interactions, one line per message, to be reviewed as diffs.

`pytest tests/test_traces.py --rewrite-traces` writes them anew. Ids are minted in order, so that
equal behaviour is an equal trace; a change of order or of a single message shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tensorhub.testing import CHUNK_BYTES, CHUNKS, BrokenHook, Choice, SimHandle, StepwiseCluster
from tensorhub.testing.sim import misdeeds
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import Location

TRACES = Path(__file__).parent / "traces"
ROOM = CHUNKS * CHUNK_BYTES  # host memory for one copy


def read_one_chunk(cluster: StepwiseCluster, reader: SimHandle) -> None:
    """Its fill begins, and gets so far."""
    cluster.run(until=lambda: reader.pull is not None and len(reader.pull.missing) == CHUNKS - 1)


def from_here(cluster: StepwiseCluster, line: str) -> None:
    """What came before is in other traces."""
    cluster.log.clear()
    cluster.note(line)


def come_back(cluster: StepwiseCluster) -> None:
    """Everybody finds the coordinator again."""
    for worker in cluster.workers.values():
        worker.connect()
    cluster.run()


def published(cluster: StepwiseCluster, *others: str) -> list[SimHandle]:
    """A trainer that has published version 1, and handles of these names that hold nothing."""
    handles = [cluster.handle(name) for name in ("trainer", *others)]
    cluster.run()
    handles[0].publish(1)
    cluster.run()
    return handles


def publish_next(cluster: StepwiseCluster, number: int, *ranks: SimHandle) -> None:
    for handle in ranks:
        if number > 1:
            handle.unpublish()
    cluster.run()
    for handle in ranks:
        handle.publish(number)
    cluster.run()


def two_versions(
    cluster: StepwiseCluster, trainers: list[SimHandle], readers: list[SimHandle]
) -> None:
    """The trainers have published version 2, and the readers hold version 1."""
    cluster.note("-- version 1")
    publish_next(cluster, 1, *trainers)
    for handle in readers:
        handle.replicate("latest")
    cluster.run()
    cluster.note("-- version 2")
    publish_next(cluster, 2, *trainers)


def retained(cluster: StepwiseCluster, room: str) -> SimHandle:
    """A trainer that is the only holder of a retained version; the worker of the name `room` has
    some for a copy.
    """
    for name in ("trainer", "other"):
        cluster.host_bytes = ROOM * (name == room)
        cluster.worker(name)
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.worker.asks.retain(1)
    cluster.run()
    trainer.publish(1)
    cluster.run()
    return trainer


def chain_and_update(cluster: StepwiseCluster) -> None:
    """A trainer publishes; one rollout reads from it, the next one from the first; the trainer
    publishes again.
    """
    trainer, first, second = (
        cluster.handle("trainer"),
        cluster.handle("first"),
        cluster.handle("second"),
    )
    cluster.run()
    cluster.note("-- publish, and a chain of two readers")
    trainer.publish(1)
    cluster.run()
    first.replicate("latest")
    cluster.run(Choice("read", first.name))
    second.replicate("latest")
    cluster.run()
    cluster.note("-- the next version")
    publish_next(cluster, 2, trainer)
    first.update("latest", hold=True)
    cluster.run()
    second.update("latest")
    cluster.run()
    cluster.note("-- everybody leaves")
    for handle in (trainer, first, second):
        handle.close()
        cluster.run()


def groups_of_two(cluster: StepwiseCluster) -> None:
    """Two ranks publish, two fetch; then one rank of the readers cannot pause, and the update ends
    on both.
    """
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    two_versions(cluster, trainers, readers)
    cluster.note("-- an update that one rank's hook ends")
    readers[1].hook_error = BrokenHook("the engine does not pause")
    for handle in readers:
        handle.update("latest", hold=True)
    cluster.run()


def source_lost_in_mid_read(cluster: StepwiseCluster) -> None:
    """The near source dies after one chunk; the reader goes on elsewhere and reads the other chunk
    only.
    """
    trainer = cluster.handle("trainer")
    near = cluster.worker("near", Location(host="h1")).register("near")
    reader = cluster.worker("reader", Location(host="h1")).register("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    near.replicate("latest")
    cluster.run()
    cluster.note("-- the read")
    reader.replicate("latest")
    read_one_chunk(cluster, reader)
    near.worker.crash()
    cluster.run()
    cluster.note("-- the dead worker's lease ends")
    cluster.advance(11)


def timeouts(cluster: StepwiseCluster) -> None:
    """Nothing to fetch; then a rank that does not call; then it calls late, and is in step with the
    others.
    """
    first, second = cluster.group("trainer", 2)
    cluster.run()
    first.replicate("latest", timeout_s=2)
    second.replicate("latest", timeout_s=3)
    cluster.advance(3)
    cluster.note("-- rank 1 does not call")
    first.publish(1, timeout_s=2)
    cluster.advance(3)
    cluster.note("-- rank 1 is late, rank 0 tries again")
    second.publish(1)
    cluster.run()
    first.publish(1)
    cluster.run()


def withdrawn_under_a_reader(cluster: StepwiseCluster) -> None:
    """The only source leaves: it waits out its grace, cuts its reader, and the reader of a number
    is told at once.
    """
    trainer, reader = published(cluster, "reader")
    reader.replicate(1)
    stuck = Choice("read", reader.name)
    cluster.run(stuck)
    cluster.note("-- a reader that reads nothing")
    trainer.unpublish()
    cluster.run(stuck)
    for _ in range(6):
        cluster.advance(1, run=False)
        cluster.run(stuck)


def fetched_from_a_source_that_leaves(cluster: StepwiseCluster) -> None:
    """Memory that serves nobody is filled, from one source and then from the other, and is gone."""
    _, keeper = published(cluster, "keeper")
    keeper.replicate("latest")
    cluster.run()
    cluster.note("-- the fetch")
    fetcher = cluster.fetcher("reader")
    fetcher.fetch("latest")
    read_one_chunk(cluster, fetcher)
    keeper.unpublish()
    cluster.run()


def coordinator_restarts(cluster: StepwiseCluster) -> None:
    """It dies while a publish is being made durable, which counts; and in the midst of a fill,
    which goes on.
    """
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run(until=lambda: cluster.unstored)
    cluster.restart(kept=True)
    come_back(cluster)
    cluster.note("-- a fill, of which one chunk is there")
    reader.replicate("latest")
    read_one_chunk(cluster, reader)
    cluster.restart()
    come_back(cluster)


def last_holder_waits(cluster: StepwiseCluster) -> None:
    """The last reliable holder of a retained version may leave once another one has it; that one is
    refused.
    """
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    trainer.worker.asks.retain(1)
    cluster.run()
    cluster.note("-- it wants to leave")
    trainer.unpublish()
    cluster.run()
    cluster.note("-- another one takes the version over")
    reader.replicate("latest")
    cluster.run()
    cluster.note("-- which would be the last")
    reader.unpublish(timeout_s=3)
    cluster.advance(3)


def rolled_back(cluster: StepwiseCluster) -> None:
    """Versions 1 and 2; a reader in the midst of 2; a new lineage after 1, in which 2 is another
    content.
    """
    trainer, keeper, reader = published(cluster, "keeper", "reader")
    keeper.replicate(1)
    cluster.run()
    publish_next(cluster, 2, trainer)
    reader.replicate("latest")
    cluster.run(Choice("read", reader.name))
    cluster.note("-- back to 1")
    trainer.worker.asks.rollback(1)
    cluster.run(Choice("read", reader.name))
    trainer.publish(2)
    cluster.run()
    reader.update("latest")
    cluster.run()


def bound_again(cluster: StepwiseCluster) -> None:
    """The only source of `latest` unpublishes in mid-read, and publishes the next version: its
    reader goes on with that.
    """
    trainer, reader = published(cluster, "reader")
    reader.replicate("latest")
    stuck = Choice("read", reader.name)
    cluster.run(stuck)
    cluster.note("-- a reader that reads nothing")
    trainer.unpublish()
    for _ in range(6):
        cluster.run(stuck)
        cluster.advance(1, run=False)
    cluster.run(stuck)
    cluster.note("-- the next version")
    trainer.publish(2)
    cluster.run()


def handed_over_to_another_worker(cluster: StepwiseCluster) -> None:
    """The last holder of a retained version takes its memory back: first another worker gets a
    copy.
    """
    trainer = retained(cluster, room="other")
    from_here(cluster, "-- it takes its memory back")
    trainer.unpublish()
    cluster.run()
    cluster.note("-- and publishes the next one: the copy is dropped")
    trainer.publish(2)
    cluster.run()


def handed_over_to_its_own_host_copy(cluster: StepwiseCluster) -> None:
    """The last holder's own worker has room: it copies the version, and only then overwrites it."""
    cluster.host_bytes = ROOM
    trainer = cluster.handle("trainer")
    cluster.host_bytes = 0
    reader, keeper = cluster.handle("reader"), cluster.handle("keeper")
    cluster.run()
    trainer.worker.asks.retain(2)
    cluster.run()
    keeper.publish(1)
    cluster.run()
    trainer.replicate()
    cluster.run()
    publish_next(cluster, 2, keeper)
    from_here(cluster, "-- the last holder of 1 updates to 2")
    trainer.update("latest")
    cluster.run()
    cluster.note("-- who reads 1 now, reads its copy")
    reader.replicate(1)
    cluster.run()


def close_hands_over(cluster: StepwiseCluster) -> None:
    """What closes may end with its process: its own host copy does not count, another worker's
    does.
    """
    trainer = retained(cluster, room="trainer")
    from_here(cluster, "-- only its own worker has room")
    trainer.close(timeout_s=3)
    cluster.advance(3)
    cluster.note("-- a worker comes that has room, too")
    cluster.host_bytes = ROOM
    cluster.worker("late")
    cluster.run()
    trainer.close()
    cluster.run()


def retain_is_acknowledged(cluster: StepwiseCluster) -> None:
    """`retain` returns once it is durable and every live holder knows; one that comes back is told
    then.
    """
    trainer, near, away = published(cluster, "near", "away")
    for handle in (near, away):
        handle.replicate()
        cluster.run()
    away.worker.disconnect()
    from_here(cluster, "-- retain, while one holder is away")
    trainer.worker.asks.retain(1)
    cluster.run()
    cluster.note("-- it comes back")
    away.worker.connect()
    cluster.run()


def cut_off_owner_waits_for_its_lease(cluster: StepwiseCluster) -> None:
    """The last holder cannot ask: it takes its memory back when its own lease is over, and nobody
    counts on it any more.
    """
    trainer = retained(cluster, room="")
    from_here(cluster, "-- it is cut off, and takes its memory back")
    trainer.worker.disconnect()
    trainer.unpublish()
    for _ in range(5):
        cluster.advance(4)
    cluster.note("-- it is back: its incarnation was lost, and it goes on as a new one")
    for _ in range(2):
        trainer.worker.connect()
        cluster.run()


def prefetched_then_adopted(cluster: StepwiseCluster) -> None:
    """The next version comes into host memory while the current one is in use; the update reads
    nothing over the network.
    """
    trainer = cluster.handle("trainer")
    cluster.host_bytes = ROOM
    reader = cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate()
    cluster.run()
    publish_next(cluster, 2, trainer)
    from_here(cluster, "-- prefetch")
    reader.prefetch()
    cluster.run()
    cluster.note("-- update")
    reader.update("latest", hold=True)
    cluster.run()


def staged(cluster: StepwiseCluster, *, breaks: bool) -> None:
    """Version 1 is held by two readers, who get 2 in a staged update; the second one's hook may
    break.
    """
    trainers = cluster.group("trainer", 2)
    cluster.host_bytes = ROOM
    readers = cluster.group("reader", 2)
    cluster.run()
    two_versions(cluster, trainers, readers)
    from_here(cluster, "-- the staged update")
    readers[1].hook_error = BrokenHook("the engine does not pause") if breaks else None
    for handle in readers:
        handle.stage("latest", hold=True)
    cluster.run()


def staged_update_committed(cluster: StepwiseCluster) -> None:
    """It is in host memory first, and is copied over the old version once that is decided."""
    staged(cluster, breaks=False)


def staged_update_aborted(cluster: StepwiseCluster) -> None:
    """One rank's hook breaks: both hold the old version, which was never closed."""
    staged(cluster, breaks=True)


def readers_complete_each_other(cluster: StepwiseCluster) -> None:
    """The only complete source dies; two readers have half of it each, and that is enough."""
    trainer, first, second = (
        cluster.worker(name, Location(host="h")).register(name) for name in ("trainer", "a", "b")
    )
    cluster.run()
    trainer.publish(1)
    cluster.run()
    second.reads_backwards = True
    reads = [Choice("read", reader.name) for reader in (first, second)]
    for reader in (first, second):
        reader.replicate()
        cluster.run(*reads)
    from_here(cluster, "-- the second one is sent to the trainer as well, and each reads one chunk")
    assert second.pull is not None
    second.source_ended(next(iter(second.pull.lanes)), "stalled")
    cluster.run(*reads)
    for reader in (first, second):
        assert reader.pull is not None
        while len(reader.pull.missing) == CHUNKS:
            cluster.do(Choice("read", reader.name))
    cluster.note("-- the only complete source dies")
    trainer.worker.crash()
    cluster.run()
    cluster.advance(11)


def changed_source_is_quarantined(cluster: StepwiseCluster) -> None:
    """A trainer's memory is written while it is published: its reader notices, it is found guilty,
    and is read no more.
    """
    cluster.manifest = make_manifest(CHUNKS, "xxh3-64")
    trainer, keeper = cluster.handle("trainer"), cluster.handle("keeper")
    reader = cluster.worker("reader", Location(host="trainer")).register("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    keeper.replicate()
    cluster.run()
    from_here(cluster, "-- the trainer writes, and somebody reads")
    misdeeds.overwrite(trainer)
    reader.replicate()
    cluster.run()
    cluster.note("-- it takes its memory back")
    trainer.unpublish()
    cluster.run()


def restart_resumes_a_fill(cluster: StepwiseCluster) -> None:
    """One rank has read everything and voted, the other one chunk: after the restart that one reads
    the rest only.
    """
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    for handle in readers:
        handle.replicate()
    late = Choice("read", readers[1].name)
    cluster.run(late)
    while readers[1].pull is None or len(readers[1].pull.missing) == CHUNKS:
        cluster.do(late)
    from_here(cluster, "-- rank 0 has voted, rank 1 has one chunk")
    cluster.restart()
    come_back(cluster)


def coordinator_without_state(cluster: StepwiseCluster) -> None:
    """It is a new cluster: every handle says so once, nothing that was published before comes back,
    and life goes on.
    """
    trainer, reader = published(cluster, "reader")
    reader.replicate()
    cluster.run()
    from_here(cluster, "-- it comes back without its state")
    cluster.restart(lost=True)
    come_back(cluster)
    cluster.note("-- the first calls")
    trainer.publish(1)
    reader.update("latest")
    cluster.run()
    cluster.note("-- the second ones")
    trainer.publish(1)
    cluster.run()
    reader.update("latest")
    cluster.run()


SCENES: list[Callable[[StepwiseCluster], None]] = [
    chain_and_update,
    groups_of_two,
    source_lost_in_mid_read,
    timeouts,
    withdrawn_under_a_reader,
    fetched_from_a_source_that_leaves,
    coordinator_restarts,
    last_holder_waits,
    rolled_back,
    bound_again,
    handed_over_to_another_worker,
    handed_over_to_its_own_host_copy,
    close_hands_over,
    retain_is_acknowledged,
    cut_off_owner_waits_for_its_lease,
    prefetched_then_adopted,
    staged_update_committed,
    staged_update_aborted,
    readers_complete_each_other,
    changed_source_is_quarantined,
    restart_resumes_a_fill,
    coordinator_without_state,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_trace_is_the_golden_one(
    scene: Callable[[StepwiseCluster], None], rewrite_traces: bool
) -> None:
    cluster = StepwiseCluster()
    scene(cluster)
    title = " ".join((scene.__doc__ or "").split())
    text = "\n".join([f"# {title}", *cluster.log]) + "\n"
    path = TRACES / f"{scene.__name__}.txt"
    if rewrite_traces:
        path.write_text(text)
    assert text == path.read_text(), (
        "the interaction has changed: if it should, pytest --rewrite-traces"
    )


def test_there_is_no_trace_without_a_scene() -> None:
    assert {path.stem for path in TRACES.iterdir()} == {scene.__name__ for scene in SCENES}
