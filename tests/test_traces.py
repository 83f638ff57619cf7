"""Golden traces: whole interactions, one line per message, to be reviewed as diffs.

`pytest tests/test_traces.py --rewrite-traces` writes them anew. Ids are minted in order, so that equal behaviour is an
equal trace; a change of order or of a single message shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tensorhub.testing import BrokenHook, Choice, PureCluster
from tensorhub.types import Location

TRACES = Path(__file__).parent / "traces"


def run_but(cluster: PureCluster, *left: Choice) -> None:
    """Let everything happen but that."""
    while (choices := [choice for choice in cluster.choices() if choice not in left]) != []:
        cluster.do(choices[0])


def chain_and_update(cluster: PureCluster) -> None:
    """A trainer publishes; one rollout reads from it, the next one from the first; the trainer publishes again."""
    trainer, first, second = cluster.handle("trainer"), cluster.handle("first"), cluster.handle("second")
    cluster.run()
    cluster.note("-- publish, and a chain of two readers")
    trainer.publish(1)
    cluster.run()
    first.replicate("latest")
    run_but(cluster, Choice("read", first.name))
    second.replicate("latest")
    cluster.run()
    cluster.note("-- the next version")
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    first.update("latest", hold=True)
    cluster.run()
    second.update("latest")
    cluster.run()
    cluster.note("-- everybody leaves")
    for handle in (trainer, first, second):
        handle.close()
        cluster.run()


def groups_of_two(cluster: PureCluster) -> None:
    """Two ranks publish, two fetch; then one rank of the readers cannot pause, and the update ends on both."""
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for number in (1, 2):
        cluster.note(f"-- version {number}")
        for handle in trainers:
            if number > 1:
                handle.unpublish()
        cluster.run()
        for handle in trainers:
            handle.publish(number)
        cluster.run()
        if number == 1:
            for handle in readers:
                handle.replicate("latest")
            cluster.run()
    cluster.note("-- an update that one rank's hook ends")
    readers[1].hook_error = BrokenHook("the engine does not pause")
    for handle in readers:
        handle.update("latest", hold=True)
    cluster.run()


def source_lost_in_mid_read(cluster: PureCluster) -> None:
    """The near source dies after one chunk; the reader goes on elsewhere and reads the other chunk only."""
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
    while reader.pull is None or len(reader.pull.missing) != 1:
        cluster.do(cluster.choices()[0])
    near.worker.crash()
    cluster.run()
    cluster.note("-- the dead worker's lease ends")
    cluster.advance(11)


def timeouts(cluster: PureCluster) -> None:
    """Nothing to fetch; then a rank that does not call; then it calls late, and is in step with the others."""
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


def withdrawn_under_a_reader(cluster: PureCluster) -> None:
    """The only source leaves: it waits out its grace, cuts its reader, and the reader is told at once."""
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate("latest")
    stuck = Choice("read", reader.name)
    run_but(cluster, stuck)
    cluster.note("-- a reader that reads nothing")
    trainer.unpublish()
    run_but(cluster, stuck)
    for _ in range(6):
        cluster.advance(1, run=False)
        run_but(cluster, stuck)


def fetched_from_a_source_that_leaves(cluster: PureCluster) -> None:
    """Memory that serves nobody is filled, from one source and then from the other, and is gone."""
    trainer, keeper = cluster.handle("trainer"), cluster.handle("keeper")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    keeper.replicate("latest")
    cluster.run()
    cluster.note("-- the fetch")
    fetcher = cluster.fetcher("reader")
    fetcher.fetch("latest")
    while fetcher.pull is None or len(fetcher.pull.missing) != 1:
        cluster.do(cluster.choices()[0])
    keeper.unpublish()
    cluster.run()


def coordinator_restarts(cluster: PureCluster) -> None:
    """It dies while a publish is being made durable, which counts; and in the midst of a fill, which goes on."""
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    while not cluster.unstored:
        cluster.do(cluster.choices()[0])
    cluster.restart(kept=True)
    for worker in cluster.workers.values():
        worker.connect()
    cluster.run()
    cluster.note("-- a fill, of which one chunk is there")
    reader.replicate("latest")
    while reader.pull is None or len(reader.pull.missing) != 1:
        cluster.do(cluster.choices()[0])
    cluster.restart()
    for worker in cluster.workers.values():
        worker.connect()
    cluster.run()


def last_holder_waits(cluster: PureCluster) -> None:
    """The last reliable holder of a retained version may leave once another one has it; that one is refused."""
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    trainer.worker.retain(1)
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


def rolled_back(cluster: PureCluster) -> None:
    """Versions 1 and 2; a reader in the midst of 2; a new lineage after 1, in which 2 is another content."""
    trainer, keeper, reader = cluster.handle("trainer"), cluster.handle("keeper"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    keeper.replicate(1)
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    reader.replicate("latest")
    run_but(cluster, Choice("read", reader.name))
    cluster.note("-- back to 1")
    trainer.worker.rollback(1)
    run_but(cluster, Choice("read", reader.name))
    trainer.publish(2)
    cluster.run()
    reader.replicate("latest")
    cluster.run()


SCENES: list[Callable[[PureCluster], None]] = [
    chain_and_update,
    groups_of_two,
    source_lost_in_mid_read,
    timeouts,
    withdrawn_under_a_reader,
    fetched_from_a_source_that_leaves,
    coordinator_restarts,
    last_holder_waits,
    rolled_back,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_trace_is_the_golden_one(scene: Callable[[PureCluster], None], rewrite_traces: bool) -> None:
    cluster = PureCluster()
    scene(cluster)
    text = "\n".join([f"# {scene.__doc__}", *cluster.log]) + "\n"
    path = TRACES / f"{scene.__name__}.txt"
    if rewrite_traces:
        path.write_text(text)
    assert text == path.read_text(), "the interaction has changed: if it should, pytest --rewrite-traces"


def test_there_is_no_trace_without_a_scene() -> None:
    assert {path.stem for path in TRACES.iterdir()} == {scene.__name__ for scene in SCENES}
