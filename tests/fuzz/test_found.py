"""What fuzzing has found: each bug by itself."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import tensorhub
from tensorhub.coordinator import Publication
from tensorhub.errors import ProtocolError, StateError
from tensorhub.memory.checkpoint import Index, rewritten
from tensorhub.messages import AddSource, FromCoordinator, Outcome, Start, Write
from tensorhub.runtime.control.store import SqliteStore
from tensorhub.testing import SimHandle, StepwiseCluster
from tensorhub.types import OpKey, VersionInfo
from tests.rig import nothing_left

STATE = "state.sqlite3"


def written(state_dir: Path) -> Path:
    """The file of a store that holds one publication."""
    store = SqliteStore(state_dir)
    store.write([Publication("m", 0, 3, "content", 12, 1, "", OpKey("m", "g", 7, 1))])
    store.close()
    return state_dir / STATE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("UPDATE publications SET nbytes = 'many'", "nbytes: 'many' is not a whole number"),
        ("UPDATE publications SET world_size = 0", "world_size: 0 is not from 1"),
        ("UPDATE publications SET content_id = x'00ff'", "content_id"),
        ("UPDATE models SET mark = 2", "version 3 of 'm' is beyond its model's mark"),
        ("UPDATE described SET manifest_ids = zeroblob(31)", "the ids of the manifests of version 3 of 'm' are cut"),
        ("UPDATE models SET retain = -1", "retain: -1 is not from 0"),
        ("DELETE FROM models", "of 'm' only versions are there"),
        ("UPDATE publications SET model = CAST(x'ff' AS TEXT)", "UTF-8"),
        ("UPDATE cluster SET epoch = 'x'", "damaged"),
        ("UPDATE cluster SET epoch = 9223372036854775807", "damaged"),
        ("UPDATE cluster SET id = x'00'", "damaged"),
    ],
)
async def test_a_store_with_other_values_in_it_says_so(change: str, says: str, tmp_path: Path) -> None:
    with sqlite3.connect(written(tmp_path)) as db:
        db.execute(change)
    db.close()
    async with nothing_left():
        for _ in range(2):  # and lets go of the directory
            with pytest.raises(StateError, match=says) as caught:
                async with tensorhub.serve(state_dir=tmp_path):
                    pass
            assert str(tmp_path) in str(caught.value)


async def test_a_store_whose_pages_are_damaged_says_so(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(StateError, match=str(tmp_path)):
        async with tensorhub.serve(state_dir=tmp_path):
            pass


def test_a_store_whose_schema_is_no_text_says_so(tmp_path: Path) -> None:
    """SQLite's own message repeats those bytes, and Python cannot read it."""
    path = written(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE", b"CREATE\xc1TABLE"))
    for _ in range(2):
        with pytest.raises(StateError, match="cannot be used"):
            SqliteStore(tmp_path)


def test_an_index_that_is_nested_too_deeply_to_be_written_is_none() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    index = Index("i.index.json", b"", {"x": deep}, {})
    with pytest.raises(ValueError, match="nested too deeply"):
        rewritten(index, {})


def bound() -> tuple[StepwiseCluster, SimHandle, OpKey]:
    """A reader that is about to be told to read."""
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate()
    cluster.run(until=lambda: any(isinstance(said, Start) for said in cluster.workers["reader"].heard_soon()))
    running = reader.member.running
    assert running is not None
    assert running.key is not None
    return cluster, reader, running.key


def test_a_lease_that_is_named_twice_is_read_under_once() -> None:
    cluster, reader, key = bound()
    worker = cluster.workers["reader"]
    (start,) = [said for said in worker.heard_soon() if isinstance(said, Start)]
    assert worker.link is not None
    (grant,) = start.grants
    twice: list[FromCoordinator] = [Start(key, 0, start.version, start.manifest_id, start.write, (grant, grant))]
    twice += [Write(key, 0, (grant, grant)), AddSource(key, 0, grant)]
    worker.link.down.clear()
    worker.link.down.extend(twice)
    cluster.run()
    assert reader.member.version == 1


@pytest.mark.parametrize("what", ["other content", "what is being filled"])
def test_a_commit_that_this_rank_has_not_voted_for_costs_the_coordinator_its_connection(what: str) -> None:
    cluster, reader, key = bound()
    info = VersionInfo("actor", 1, what, 1, 1)
    cluster.workers["reader"].hear(cluster.workers["reader"].heard_soon()[0])  # type: ignore[arg-type]
    if what == "what is being filled":
        cluster.run(until=lambda: reader.pull is not None)
        info = cluster.coordinator.cluster.models["actor"].versions[1].info
    with pytest.raises(ProtocolError, match="its mistake"):
        reader.member.receive(Outcome(key, 0, True, True, info, None), cluster.now)
    cluster.run()
    assert reader.member.version == 1
