"""The publisher's digests decide (R8): whose votes count, who is asked, and who is to blame."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from tensorhub.coordinator import Digested, Send, entities, limits
from tensorhub.errors import IntegrityError, OperationTimeout, StateError
from tensorhub.messages import (
    DIGESTS_BYTES_MAX,
    Compare,
    Compared,
    Digests,
    FromWorker,
    Held,
    Message,
    Origin,
    Prepared,
    Register,
    Stray,
    digests_bytes_max,
)
from tensorhub.model.digests import pack, root_of, runs_of, unpack, width_in
from tensorhub.protocol import codec
from tensorhub.testing import CHUNK_BYTES, CHUNKS, Choice, SimHandle, StepwiseCluster
from tensorhub.testing.sim import misdeeds
from tensorhub.testing.sim.memory import digest_of, make_manifest
from tensorhub.types import HandleState, Location, OpKey, Options
from tensorhub.worker.chunk_reports import tell

HERE = Location(host="here")


def published(*names: str) -> tuple[StepwiseCluster, list[SimHandle]]:
    """A trainer that has published version 1, and registrations on another host that hold nothing."""
    cluster = StepwiseCluster(manifest=make_manifest(CHUNKS, "xxh3-64"), host_bytes=CHUNKS * CHUNK_BYTES)
    handles = [cluster.handle("trainer"), *(cluster.worker(name, HERE).register(name) for name in names)]
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
    assert list_of(cluster).root == root


def test_digests_of_what_nobody_has_asked_for_change_nothing() -> None:
    """Those of generation 0, of memory that is not open, ended the coordinator."""
    cluster, (trainer, reader) = published("reader")
    reader.replicate()
    cluster.run()
    root = list_of(cluster).root
    for generation in (0, 12345):
        tell_it(cluster, trainer, Digests(trainer.id, generation, CHUNKS, ((0, CHUNKS),), b"x" * 8 * CHUNKS, True))
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


def test_a_middleman_that_has_not_voted_leads_to_whom_it_has_read_from() -> None:
    """It is asked before it has compared anything itself: it names its source, and stays what it is."""
    cluster, (_, liar, middle, reader) = published("liar", "middle", "reader")
    liar.replicate()
    cluster.run()
    assert misdeeds.lie(liar)
    wrong = next(n for n, cell in enumerate(liar.cells) if "?" in cell)
    middle.replicate()
    reads = [Choice("read", each.name) for each in (middle, reader)]
    cluster.run(*reads)
    while middle.pull is None or wrong in middle.pull.missing:
        cluster.do(reads[0])
    holding = cluster.coordinator.cluster.members[middle.id].holding
    assert holding is not None
    reader.replicate()
    cluster.run(*reads)
    readers = cluster.coordinator.cluster.members[reader.id].group.operation
    assert readers is not None
    stray = Stray(wrong, Origin(middle.id, holding.generation))
    cluster.coordinator._corruption_checks.trace(readers.parts[0], stray)
    cluster.run()
    cluster.advance(3.0)
    assert liar.member.state is HandleState.EMPTY
    assert [middle.member.version, reader.member.version] == [1, 1]


def test_who_copies_what_his_own_prefetch_has_read_from_a_liar_is_not_blamed() -> None:
    cluster, (trainer, liar, middle, reader) = published("liar", "middle", "reader")
    liar.replicate()
    cluster.run()
    assert misdeeds.lie(liar)
    wrong = next(n for n, cell in enumerate(liar.cells) if "?" in cell)
    middle.prefetch()
    copy = middle.copy
    reads = [Choice("read", each.name) for each in (copy, middle)]
    cluster.run(*reads)
    while copy.pull is None or wrong in copy.pull.missing:
        cluster.do(reads[0])
    held = cluster.coordinator.cluster.members[liar.id].holding
    assert held is not None
    middle.replicate()
    cluster.run(reads[0])
    compared = next(line for line in cluster.log if "middle -> Compared" in line)
    assert f"Stray chunk={wrong} origin=Origin generation={held.generation}" in compared
    reader.replicate()
    cluster.run()
    cluster.advance(3.0)
    assert liar.member.state is HandleState.EMPTY
    assert [middle.member.version, reader.member.version] == [1, 1]
    assert middle.cells == reader.cells == truth_of(trainer)


def test_whatever_others_have_said_in_its_place_a_publisher_is_not_blamed() -> None:
    """It was away when somebody's word stood in for its own; its bytes are what it has published."""
    cluster, (trainer, reader) = published("reader")
    content, testimony = trainer.member.content, list_of(cluster)
    assert content is not None
    testimony.begin(CHUNKS)
    testimony.values[:], testimony.missing = b"x" * 8 * CHUNKS, 0
    testimony.root = root_of(testimony.values)
    testimony.finish()
    reader.replicate()
    cluster.run(Choice("read", reader.name))
    operation = cluster.coordinator.cluster.members[reader.id].group.operation
    assert operation is not None
    stray = Stray(0, Origin(trainer.id, content.generation))
    cluster.coordinator._corruption_checks.trace(operation.parts[0], stray)
    for action in cluster.coordinator.cluster.take_actions():
        assert isinstance(action, Send)
        cluster._send_down(action.session, action.message)
    cluster.run(Choice("read", reader.name))
    assert [line for line in cluster.log if "trainer -> DigestedAgain" in line]
    holding = cluster.coordinator.cluster.members[trainer.id].holding
    assert holding is not None
    assert not holding.trust.condemned
    assert trainer.member.version == 1


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
    assert (list_of(cluster).root, list_of(cluster).missing) == (b"", list_of(cluster).known.count(0))


def test_only_a_publisher_and_who_is_asked_are_heard() -> None:
    cluster, (_, reader) = published("reader")
    reader.replicate()
    cluster.run(Choice("read", reader.name))
    content = reader.member.content
    assert content is not None
    tell_it(cluster, reader, Digests(reader.id, content.generation, CHUNKS, ((0, CHUNKS),), b"x" * 8 * CHUNKS, True))
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


def test_a_list_is_told_again_where_only_its_root_is_known() -> None:
    cluster, (_, liar, reader) = published("liar", "reader")
    liar.replicate()
    cluster.run()
    cluster.coordinator.cluster.forget_list(list_of(cluster))
    list_of(cluster).answered.clear()
    misdeeds.lie(liar)
    reader.replicate()
    cluster.run()
    cluster.advance(3.0)
    assert reader.member.version == 1
    assert list_of(cluster).is_there


def compares(cluster: StepwiseCluster, *names: str) -> list[Compare]:
    """What these workers were sent to compare, and have not taken."""
    links = [cluster.workers[name].link for name in names]
    return [each for link in links if link is not None for each in link.down if isinstance(each, Compare)]


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


def test_pages_fit_the_frames_that_there_are() -> None:
    """Who was sent one that did not lost its connection, and again when it was back."""
    least = 65_536  # as `Options.frame_bytes_max` may be
    cluster = StepwiseCluster(manifest=make_manifest(CHUNKS, "xxh3-64"), options=Options(frame_bytes_max=least))
    cluster.handle("trainer").publish(1)
    cluster.run()
    testimony, chunks = list_of(cluster), DIGESTS_BYTES_MAX // 8
    testimony.begin(chunks)
    testimony.values[:] = pack(range(chunks), 8)
    testimony.missing, testimony.root = 0, b"root"
    testimony.finish()
    assert b"".join(testimony.pages) == pack(range(chunks), 8)
    key, most = OpKey("m" * 255, "g" * 255, 2**63, 2**63), digests_bytes_max(least)
    said: list[Message] = [Compare(key, 0, 2**63, page, last=False) for page in testimony.pages]
    sparse = [(2**24 - 2 * number, number) for number in range(chunks, 0, -1)]
    said += tell("r" * 64, 2**63, 2**24, 8, sparse, last=True, page_bytes=most)
    assert max(len(codec.encode(message)) for message in said) <= least


def test_nothing_is_agreed_by_a_list_that_is_forgotten_meanwhile() -> None:
    """As it is where others need its room: a part of it says nothing of the rest."""
    cluster, (_, other, reader) = published("other", "reader")
    other.replicate()
    cluster.run()
    asked = reader.replicate()
    cluster.run(Choice("read", reader.name))
    assert asked.key is not None
    tell_it(cluster, reader, Prepared(asked.key, 0))
    cluster.coordinator.cluster.forget_list(list_of(cluster))
    tell_it(cluster, reader, Compared(asked.key, 0, CHUNKS - 1, ()))
    operation = cluster.coordinator.cluster.members[reader.id].group.operation
    assert operation is not None
    assert not operation.parts[0].voted


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


def test_lists_and_runs() -> None:
    assert unpack(pack([1, 2**64 - 1], 8), 8) == [1, 2**64 - 1]
    assert unpack(pack([1, 2**255], 32), 32) == [1, 2**255]
    assert runs_of([0, 1, 4, 6, 7]) == [(0, 2), (4, 1), (6, 2)]
    assert [width_in(make_manifest(2, name).encode()) for name in ("none", "xxh3-64")] == [0, 8]
    assert [width_in(junk) for junk in (b"", b"\xdc", b"\xff" * 70, b"\x93\x02\x90\x90")] == [0] * 4


def test_what_is_told_has_a_bounded_size() -> None:
    dense = list(tell("r", 1, 70_000, 8, [(n, n) for n in range(70_000)], last=True))
    assert [(len(m.runs), len(m.digests), m.last) for m in dense] == [(1, 2**19, False), (1, 8 * 70_000 - 2**19, True)]
    sparse = list(tell("r", 1, 10_000, 8, [(2 * n, n) for n in range(5000)], last=False))
    assert [(len(m.runs), m.last) for m in sparse] == [(4096, False), (904, False)]
    assert [m.last for m in tell("r", 1, 0, 8, [], last=True)] == [True]


def test_a_vote_that_names_no_root_is_compared_too() -> None:
    """As that of a fetch by name, which has not all chunks: also where no root is known to compare it with."""
    cluster, (trainer, reader) = published("reader")
    asked = reader.replicate()
    cluster.run(Choice("read", reader.name))
    assert asked.key is not None
    tell_it(cluster, reader, Prepared(asked.key, 0))
    operation = cluster.coordinator.cluster.members[reader.id].group.operation
    assert operation is not None
    assert not operation.parts[0].voted
    cluster.run()
    assert list_of(cluster).root == root_of(pack([digest_of(cell) for cell in truth_of(trainer)], 8))


def test_who_finds_nothing_wrong_in_a_list_of_another_root_is_not_believed() -> None:
    cluster, (_, other, reader) = published("other", "reader")
    other.replicate()
    cluster.run()
    asked = reader.replicate()
    cluster.run(Choice("read", reader.name))
    assert asked.key is not None
    tell_it(cluster, reader, Prepared(asked.key, 0, b"other"))
    tell_it(cluster, reader, Compared(asked.key, 0, CHUNKS, ()))
    operation = cluster.coordinator.cluster.members[reader.id].group.operation
    assert operation is not None
    assert not operation.parts[0].voted


def test_who_takes_a_publishers_place_is_not_its_publisher() -> None:
    """Nor where it says so."""
    cluster, (trainer, first) = published("first")
    truth = truth_of(trainer)
    first.replicate()
    cluster.run(Choice("up", "trainer"))
    content = trainer.member.content
    assert content is not None
    shard, info = trainer.member.shard, content.version
    trainer.worker.crash()
    thief = cluster.worker("thief", HERE)
    cluster.run()
    members = cluster.coordinator.cluster.members
    before = members[trainer.id]
    held = Held(info.version, info.content_id, 7, info.world_size, info.nbytes, content.manifest.encode(), published=True)
    register = Register(
        request=99,
        registration="stolen",
        model="actor",
        group=shard.group,
        rank=0,
        shard=0,
        world_size=1,
        serves=True,
        spot=False,
        medium=before.said.medium,
        purpose=before.said.purpose,
        layout_id=before.said.layout_id,
        nbytes=before.said.nbytes,
        chunks=CHUNKS,
        manifest=before.said.manifest,
        held=held,
    )
    thief.say(register)
    cluster.do(Choice("up", "thief"))
    assert "stolen" in members
    publisher = list_of(cluster).publisher
    assert publisher is not None
    assert publisher.member.registration == trainer.id
    cluster.run()
    cluster.advance(cluster.options.lease_s + 1.0)
    assert (first.member.version, first.cells) == (1, truth)
    assert not list_of(cluster).root  # the digests of its source have counted


def only_a_root_is_known(*names: str) -> tuple[StepwiseCluster, list[SimHandle]]:
    """The named ones hold version 1, of which the coordinator knows the root, and its publisher has left."""
    cluster, (trainer, *holders, reader) = published(*names, "reader")
    for holder in holders:
        holder.replicate()
        cluster.run()
    trainer.worker.crash()
    cluster.advance(cluster.options.lease_s + 1.0)
    cluster.coordinator.cluster.forget_list(list_of(cluster))
    list_of(cluster).answered.clear()
    return cluster, [*holders, reader]


def test_a_holder_that_says_nothing_does_not_hold_others_up() -> None:
    cluster, (mute, honest, liar, reader) = only_a_root_is_known("mute", "honest", "liar")
    assert misdeeds.lie(liar)
    mute.digests.tell = lambda question: None  # type: ignore[method-assign]
    asked = reader.replicate()
    cluster.run()
    assert said(cluster, "TellDigests")[-1] == "mute"
    cluster.advance(20.0)
    assert asked.number == 1
    assert (reader.cells, honest.member.version) == (honest.cells, 1)


def test_words_of_several_are_not_mixed_where_a_root_is_known() -> None:
    """Else who says the last of them would be accused of what another one has said."""
    cluster, (liar, honest, _) = only_a_root_is_known("liar", "honest")
    testimonies, cut = cluster.coordinator._testimonies, list_of(cluster)
    for handle in (liar, honest):
        content = handle.member.content
        assert content is not None
        if handle is liar:  # as if it had come back as its publisher
            cut.publisher = cluster.coordinator.cluster.members[liar.id].holding
            testimonies.told(
                cluster.coordinator.cluster.members[liar.id].worker,
                Digests(liar.id, content.generation, CHUNKS, ((0, 1),), b"x" * 8, False),
            )
    assert not any(cut.known)


def test_the_first_word_of_a_chunk_counts_and_all_of_a_root() -> None:
    cluster, (trainer, reader) = published("reader")
    content = trainer.member.content
    assert content is not None
    for value in (b"x", b"y"):
        tell_it(cluster, trainer, Digests(trainer.id, content.generation, CHUNKS, ((0, 1),), value * 8, False))
    assert list_of(cluster).values[:8] == b"x" * 8
    tell_it(
        cluster, trainer, Digests(trainer.id, content.generation, CHUNKS, ((1, CHUNKS - 1),), b"x" * 8 * (CHUNKS - 1), True)
    )
    root = list_of(cluster).root
    assert root == root_of(b"x" * 8 * CHUNKS)
    asked = reader.replicate()
    cluster.run(Choice("read", reader.name))
    assert asked.key is not None
    tell_it(cluster, reader, Prepared(asked.key, 0, root[:-1] + bytes([root[-1] ^ 1])))
    operation = cluster.coordinator.cluster.members[reader.id].group.operation
    assert operation is not None
    assert not operation.parts[0].voted


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
