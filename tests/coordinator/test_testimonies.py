"""The publisher's digests decide (R8): whose votes count, who is asked, and who is to blame."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from tensorhub.coordinator import Digested, entities, limits
from tensorhub.errors import IntegrityError, OperationTimeout, StateError
from tensorhub.messages import (
    DIGESTS_BYTES_MAX,
    Compare,
    Compared,
    Digests,
    FromWorker,
    Prepared,
)
from tensorhub.model.digests import pack, root_of
from tensorhub.testing import CHUNK_BYTES, CHUNKS, Choice, SimHandle, StepwiseCluster
from tensorhub.testing.sim import misdeeds
from tensorhub.testing.sim.memory import digest_of, make_manifest
from tensorhub.types import HandleState, Location

HERE = Location(host="here")


def published(*names: str) -> tuple[StepwiseCluster, list[SimHandle]]:
    """A trainer that has published version 1, and registrations on another host that hold
    nothing.
    """
    cluster = StepwiseCluster(
        manifest=make_manifest(CHUNKS, "xxh3-64"), host_bytes=CHUNKS * CHUNK_BYTES
    )
    handles = [
        cluster.handle("trainer"),
        *(cluster.worker(name, HERE).register(name) for name in names),
    ]
    cluster.run()
    handles[0].publish(1)
    cluster.run()
    return cluster, handles


def list_of(cluster: StepwiseCluster) -> entities.Testimony:
    return cluster.coordinator.cluster.models["actor"].versions[1].testimonies[0]


def said(cluster: StepwiseCluster, word: str) -> list[str]:
    return [line.split()[1] for line in cluster.log if f" {word} " in line]


def truth_of(trainer: SimHandle) -> list[str]:
    return list(trainer.cells)


def test_the_list_of_what_nobody_holds_any_more_takes_no_room() -> None:
    cluster, (trainer, reader) = published("reader")
    reader.replicate()
    cluster.run()
    books = cluster.coordinator.cluster
    assert list(books.testimonies) == [list_of(cluster)]
    for handle in (reader, trainer):
        handle.unpublish()
        cluster.run()
    assert not any(books.models["actor"].versions[1].holdings[0])
    assert not books.testimonies


def test_a_root_is_known_and_durable_once_all_chunks_were_read() -> None:
    cluster, (trainer, reader) = published("reader")
    assert not list_of(cluster).root
    reader.replicate()
    cluster.run()
    root = root_of(pack([digest_of(cell) for cell in trainer.cells], 8))
    assert list_of(cluster).root == root
    (entry,) = [each for each in cluster.store if isinstance(each, Digested)]
    assert (entry.model, entry.number, entry.roots) == ("actor", 1, root)
    cluster.restart()
    (again,) = cluster.coordinator.cluster.models["actor"].versions[1].testimonies.values()
    assert again.root == root


def test_roots_that_could_not_be_stored_are_stored_with_the_next_vote() -> None:
    cluster, (_, reader) = published("reader")

    def is_digested(entry: object) -> bool:
        return isinstance(entry, Digested)

    reader.replicate()
    cluster.run(until=lambda: any(is_digested(each.entry) for each in cluster.unstored.values()))
    cluster.fail_store()
    cluster.run()
    assert reader.member.version == 1
    assert sum(map(is_digested, cluster.store)) == 1


def test_digests_of_what_nobody_has_asked_for_change_nothing() -> None:
    """Those of generation 0, of memory that is not open, ended the coordinator."""
    cluster, (trainer, reader) = published("reader")
    reader.replicate()
    cluster.run()
    root = list_of(cluster).root
    for generation in (0, 12345):
        tell_it(
            cluster,
            trainer,
            Digests(trainer.id, generation, CHUNKS, ((0, CHUNKS),), b"x" * 8 * CHUNKS, True),
        )
    assert list_of(cluster).root == root


def test_a_liar_is_found_behind_an_honest_middleman_who_is_not_blamed() -> None:
    cluster, (trainer, liar, middle, reader) = published("liar", "middle", "reader")
    liar.replicate()
    cluster.run()
    assert misdeeds.lie(liar)
    middle.replicate()
    cluster.run(Choice("read", middle.name))
    reader.replicate()
    cluster.run(Choice("read", middle.name))  # which the reader waits for
    assert reader.pull is not None
    assert [grant.source for grant in reader.pull.grants.values()] == ["middle"]
    cluster.run()
    cluster.advance(3.0)
    assert [middle.member.version, reader.member.version] == [1, 1]
    assert middle.cells == reader.cells == truth_of(trainer)
    assert liar.member.state is HandleState.EMPTY
    assert not [line for line in cluster.log if "Revoked" in line and "liar" not in line]
    assert any("not as published" not in line and "Compared" in line for line in cluster.log)


def test_a_publisher_makes_what_is_missing_when_somebody_votes() -> None:
    """Not one word of what it made has come through so far."""
    cluster, (trainer, first) = published("first")
    first.replicate()
    cluster.run(Choice("up", "trainer"))
    assert trainer.worker.link is not None
    trainer.worker.link.up.clear()
    cluster.run()
    assert first.member.state is HandleState.FILLING
    trainer.worker.disconnect()
    trainer.worker.connect()
    cluster.run()
    assert first.member.version == 1


def test_a_vote_that_nobody_can_check_waits_until_its_deadline() -> None:
    cluster, (trainer, first) = published("first")
    asked = first.replicate(timeout_s=3.0)
    cluster.run(Choice("up", "trainer"), Choice("down", "trainer"))
    assert trainer.worker.link is not None
    trainer.worker.link.up.clear()
    trainer.worker.stopped_until = 100.0
    cluster.advance(3.0)
    with pytest.raises(OperationTimeout, match="is in place on rank") as caught:
        _ = asked.number
    assert caught.value.memory == "torn"
    assert trainer.member.version == 1


def test_of_those_that_held_other_bytes_the_newest_are_remembered() -> None:
    cluster, (_, *readers) = published("one", "two")
    for reader in readers:
        reader.replicate()
        cluster.run()
    with patch.object(limits, "INQUIRIES_MAX", 1):
        for reader in readers:
            holding = cluster.coordinator.cluster.members[reader.id].holding
            assert holding is not None
            cluster.coordinator._corruption_checks.condemn(holding)
    version = cluster.coordinator.cluster.models["actor"].versions[1]
    assert list(version.condemned) == [readers[1].worker.incarnation]


def test_a_liar_that_comes_back_is_not_taken_for_a_holder() -> None:
    cluster, (_, liar, reader) = published("liar", "reader")
    liar.replicate()
    cluster.run()
    misdeeds.lie(liar)
    reader.replicate()
    cluster.run(until=lambda: cluster.coordinator.cluster.models["actor"].versions[1].condemned)
    assert liar.worker.link is not None
    liar.worker.link.down.clear()
    liar.worker.disconnect()
    liar.worker.connect()
    cluster.run()
    assert liar.member.state is HandleState.EMPTY


def test_what_is_no_list_changes_nothing() -> None:
    cluster, (trainer, _) = published("first")
    content = trainer.member.content
    assert content is not None
    good = Digests(trainer.id, content.generation, CHUNKS, ((0, CHUNKS),), b"x" * 8 * CHUNKS, True)
    bad = [
        replace(good, digests=b"x"),
        replace(good, runs=((1, CHUNKS),)),
        replace(good, runs=((-1, CHUNKS),)),
        replace(good, runs=((0, 0),), digests=b""),
        replace(good, generation=content.generation + 1),
        replace(good, registration="nobody"),
    ]
    for message in bad:
        tell_it(cluster, trainer, message)
    assert (list_of(cluster).root, list_of(cluster).chunks) == (b"", -1)  # no list was begun


def test_only_a_publisher_and_who_is_asked_are_heard() -> None:
    cluster, (_, reader) = published("reader")
    reader.replicate()
    cluster.run(Choice("read", reader.name))
    content = reader.member.content
    assert content is not None
    tell_it(
        cluster,
        reader,
        Digests(reader.id, content.generation, CHUNKS, ((0, CHUNKS),), b"x" * 8 * CHUNKS, True),
    )
    assert not list_of(cluster).root
    cluster.run()
    assert reader.member.version == 1


def tell_it(cluster: StepwiseCluster, handle: SimHandle, message: FromWorker) -> None:
    handle.worker.say(message)
    cluster.do(Choice("up", handle.worker.name))


def test_lists_are_bounded_and_roots_are_kept() -> None:
    cluster, (_, reader) = published("reader")
    with patch.object(limits, "DIGEST_BYTES_MAX", 9 * CHUNKS - 1):
        asked = reader.replicate()
        cluster.run()
    with pytest.raises(StateError, match="DIGEST_BYTES_MAX") as caught:
        _ = asked.number
    assert caught.value.retryable
    again = reader.update()
    cluster.run()
    assert again.number == 1
    cluster.coordinator.cluster.forget_list(list_of(cluster))
    assert not cluster.coordinator.cluster.testimonies
    late = cluster.worker("late", HERE).register("late")
    cluster.run()
    late.replicate()
    cluster.run()
    assert late.member.version == 1  # by the root alone


def compares(cluster: StepwiseCluster, *names: str) -> list[Compare]:
    """What these workers were sent to compare, and have not taken."""
    links = [cluster.workers[name].link for name in names]
    return [
        each
        for link in links
        if link is not None
        for each in link.down
        if isinstance(each, Compare)
    ]


def test_who_votes_again_and_again_is_sent_one_page_and_all_are_sent_the_same() -> None:
    """Each would be half a megabyte in the outbox, for some eighty bytes."""
    cluster, (_, other, *readers) = published("other", "one", "two")
    other.replicate()
    cluster.run()
    keys = []
    for reader in readers:
        asked = reader.replicate()
        cluster.run(*(Choice("read", each.name) for each in readers))
        assert asked.key is not None
        keys.append(asked.key)
    for reader, key in zip(readers, keys, strict=True):
        for root in (b"other", b"other", b"another", b""):
            tell_it(cluster, reader, Prepared(key, 0, root))
    first, second = compares(cluster, "one", "two")
    assert first.digests is second.digests
    for following in (1, CHUNKS - 1):  # no page begins there
        tell_it(cluster, readers[0], Compared(keys[0], 0, following, ()))
    assert len(compares(cluster, "one")) == 1
    readers[0].worker.disconnect()  # it has not come
    readers[0].worker.connect()
    cluster.run(*(Choice("down", each.name) for each in readers))
    tell_it(cluster, readers[0], Prepared(keys[0], 0, b"other"))
    assert len(compares(cluster, "one")) == 1


def test_pages_together_are_the_list() -> None:
    cluster, _ = published("reader")
    testimony, chunks = list_of(cluster), DIGESTS_BYTES_MAX // 4
    testimony.begin(chunks)
    testimony.values[:] = pack(range(chunks), 8)
    testimony.missing, testimony.root = 0, b"root"
    testimony.finish()
    assert [len(page) for page in testimony.pages] == [DIGESTS_BYTES_MAX] * 2
    for chunk in (0, chunks // 2 - 1, chunks // 2, chunks - 1):
        assert testimony.digest(chunk) == chunk.to_bytes(8, "big")
    assert testimony.digest(chunks) == b""
    testimony.begin(-1)
    assert (testimony.is_there, testimony.nbytes, testimony.digest(0)) == (False, 0, b"")


def test_a_rank_that_never_agrees_is_not_asked_for_ever() -> None:
    cluster, (_, other, reader) = published("other", "reader")
    other.replicate()
    cluster.run()
    asked = reader.replicate()
    cluster.run(Choice("read", "reader"), Choice("read", reader.name))
    assert reader.worker.link is not None
    assert asked.key is not None
    key, link = asked.key, reader.worker.link
    link.up.clear()
    for _ in range(100):
        if not any(operation.key == key for operation in cluster.coordinator.cluster.operations()):
            break
        for message in (Prepared(key, 0, b"other"), Compared(key, 0, CHUNKS, (), rereads=True)):
            link.up.clear()
            tell_it(cluster, reader, message)
            link.down = type(link.down)(each for each in link.down if not isinstance(each, Compare))
    else:
        pytest.fail("it is asked for ever")
    link.up.clear()
    cluster.run()
    with pytest.raises(IntegrityError, match="still has other digests"):
        _ = asked.number


def test_a_vote_that_names_no_root_is_compared_too() -> None:
    """As that of a fetch by name, which has not all chunks: also where no root is known to compare
    it with.
    """
    cluster, (trainer, reader) = published("reader")
    asked = reader.replicate()
    cluster.run(Choice("read", reader.name))
    assert asked.key is not None
    tell_it(cluster, reader, Prepared(asked.key, 0))
    operation = cluster.coordinator.cluster.members[reader.id].group.operation
    assert operation is not None
    assert not operation.parts[0].voted
    cluster.run()
    assert list_of(cluster).root == root_of(
        pack([digest_of(cell) for cell in truth_of(trainer)], 8)
    )


def only_a_root_is_known(*names: str) -> tuple[StepwiseCluster, list[SimHandle]]:
    """The named ones hold version 1, of which the coordinator knows the root, and its publisher has
    left.
    """
    cluster, (trainer, *holders, reader) = published(*names, "reader")
    for holder in holders:
        holder.replicate()
        cluster.run()
    trainer.worker.crash()
    cluster.advance(cluster.options.lease_s + 1.0)
    cluster.coordinator.cluster.forget_list(list_of(cluster))
    list_of(cluster).answered.clear()
    return cluster, [*holders, reader]


def test_a_list_of_another_root_is_not_taken_and_convicts_who_says_it() -> None:
    _, (liar, honest, reader) = _told_wrongly()
    assert liar.member.state is HandleState.EMPTY
    assert (reader.member.version, reader.cells) == (1, honest.cells)


def _told_wrongly() -> tuple[StepwiseCluster, tuple[SimHandle, SimHandle, SimHandle]]:
    """Who is asked first for the list says another one; somebody else has made the reader ask."""
    cluster, (teller, honest, liar, reader) = only_a_root_is_known("teller", "honest", "liar")
    root, content = list_of(cluster).root, teller.member.content
    assert content is not None
    wrong = Digests(teller.id, content.generation, CHUNKS, ((0, CHUNKS),), b"x" * 8 * CHUNKS, True)
    teller.digests.tell = lambda question: teller.worker.say(wrong)  # type: ignore[method-assign]
    assert misdeeds.lie(liar)
    reader.replicate()
    cluster.run()
    cluster.advance(20.0)
    assert list_of(cluster).root == root
    return cluster, (teller, honest, reader)


def test_what_is_announced_with_another_root_is_not_held() -> None:
    cluster, (holder, _, _) = only_a_root_is_known("holder", "other")
    content = holder.member.content
    assert content is not None
    content.root = b"other"
    cluster.restart()
    holder.worker.connect()
    cluster.run()
    assert holder.member.state is HandleState.EMPTY
