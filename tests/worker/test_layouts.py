"""A rank whose tensors are parts: what it says of them, and what it does with a version of another
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TypeVar

import pytest

from tensorhub.errors import (
    ManifestMismatch,
    ProtocolError,
    StateError,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub.layouts.identity import layout_id_of
from tensorhub.layouts.joining import (
    coordinates_of,
    parts_of,
    publication_of,
    reading_for,
    said_parts,
)
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.published import Published
from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.layouts.shared import Share
from tensorhub.layouts.views import at, entries_of, source
from tensorhub.messages import (
    Abandon,
    BegunWith,
    CheckCoverage,
    Compare,
    Compared,
    Covered,
    DigestAgain,
    Digests,
    ErrorInfo,
    Fill,
    GetManifest,
    GetPart,
    ManifestReply,
    Origin,
    Outcome,
    Prepared,
    ReadyAgain,
    ReadyToWrite,
    Refused,
    Register,
    RegisterAgain,
    Registered,
    SelectionRoot,
    Shared,
    Start,
    Stray,
    TellDigests,
    Write,
)
from tensorhub.model.digests import pack, unpack
from tensorhub.model.manifest import Manifest, RegionSpec, TensorDescription, build_manifest, id_of
from tensorhub.types import OpKey, OpKind, VersionInfo
from tensorhub.worker import known_parts
from tensorhub.worker.calls import (
    Action,
    CheckRanks,
    CompareDigests,
    FillCall,
    OpenGeneration,
    PlanReading,
    PublishCall,
    Say,
    StartPull,
)
from tensorhub.worker.chunk_reports import compare, roots
from tensorhub.worker.coverage import Found, check
from tensorhub.worker.interpreter import Interpreter
from tensorhub.worker.known_parts import KnownParts, KnownReadings
from tensorhub.worker.member import Member
from tensorhub.worker.planning import Planned, plan
from tensorhub.worker.registration_session import Shard

CHUNK_BYTES = 4096


def manifest_of(**rows: int) -> Manifest:
    """Tensors of so many rows, of 16 bytes each."""
    places = count(0x10000, 0x10000)
    tensors = [
        TensorDescription(name, "uint8", (n, 16), next(places), 16 * n) for name, n in rows.items()
    ]
    return build_manifest(tensors, CHUNK_BYTES, "xxh3-64", "world/1")


def shard_of(rank: int, sources: dict[str, object], *, partial: bool = False, **rows: int) -> Shard:
    """Of 2 ranks, as it is registered."""
    entries, _ = entries_of(rows, sources)
    manifest, declared = manifest_of(**rows), Declaration(rank, 2, {}, entries, partial)
    known = all(view.shape is not None for view in sources.values())  # type: ignore[attr-defined]
    return Shard(
        f"r{rank}",
        "m",
        "g",
        rank,
        2,
        False,
        layout_id_of(manifest, declared),
        manifest,
        rank,
        declared=declared,
        coordinates=coordinates_of(manifest, declared) if known else None,
    )


def member_of(shard: Shard) -> Member:
    numbers = count(1)
    return Member(
        shard, requests=lambda: next(numbers), generations=lambda: next(numbers), manifests={}
    )


def said(member: Member, actions: list[object]) -> Register:
    (say,) = actions
    assert isinstance(say, Say)
    assert isinstance(say.message, Register)
    return say.message


W = source("w", shape=(2048, 16))


def test_a_rank_names_its_parts_and_says_those_that_are_asked_for() -> None:
    shard = shard_of(1, {"w": W[1024:2048]}, partial=True, w=1024)
    member = member_of(shard)
    register = said(member, [*member.connected(0, 10)])
    assert shard.coordinates is not None
    assert register.part_ids == tuple(parts_of(shard.coordinates))
    assert (register.parts, register.partial) == ((), True)
    assert register.layout_id.startswith("own/")
    wanted = (register.part_ids[2], "another", register.part_ids[0])
    again = said(member, [*member.receive(RegisterAgain(register.request, False, wanted), 0)])
    assert [id_of(part) for part in again.parts] == [wanted[0], wanted[2]]
    assert again.part_ids == register.part_ids


def test_parts_of_what_is_held_lie_as_another_rank_has_published_them() -> None:
    """Its own tensors are the same, in another order."""
    sources: dict[str, object] = {"v": source("v", shape=(4, 16)), "w": W}
    theirs, mine = shard_of(0, sources, v=4, w=2048), shard_of(0, sources, w=2048, v=4)
    assert theirs.layout_id == mine.layout_id
    assert theirs.part_ids != mine.part_ids
    assert theirs.manifest is not None
    member, info = member_of(mine), VersionInfo("m", 1, "content", 0, 2)
    register = said(member, [*member.connected(0, 10)])
    member.receive(Registered(register.request, register.registration, 1, 0, True), 0)
    member.begin(FillCall(OpKind.REPLICATE, "latest"), 60, 0)
    assert member.running is not None
    assert member.running.key is not None
    asked = Start(
        member.running.key, 0, info, theirs.manifest.manifest_id, True, (), part_ids=theirs.part_ids
    )
    (question,) = member.receive(asked, 0)
    assert isinstance(question, Say)
    assert isinstance(question.message, GetManifest)
    member.receive(ManifestReply(question.message.request, theirs.manifest.encode()), 0)
    member.pull_done(0, b"root")
    member.receive(Outcome(member.running.key, 0, True, True, info, None), 0)
    member.disconnected(0)
    register = said(member, [*member.connected(0, 10)])
    assert register.held is not None
    assert (register.part_ids, register.held.part_ids) == (mine.part_ids, theirs.part_ids)
    wanted = (theirs.part_ids[2], mine.part_ids[1])
    again = said(member, [*member.receive(RegisterAgain(register.request, False, wanted), 0)])
    assert [id_of(part) for part in again.parts] == [*wanted]


def test_plain_tensors_have_no_parts() -> None:
    shard = Shard("r", "m", "g", 0, 1, False, "world/1", manifest_of(w=4), 0)
    register = said(member := member_of(shard), [*member.connected(0, 10)])
    assert (register.part_ids, register.parts, register.partial) == ((), (), False)


def test_what_does_not_say_its_shapes_cannot_be_published() -> None:
    shard = shard_of(0, {"w": source("whole")[0:1024]}, w=1024)
    member = member_of(shard)
    assert said(member, [*member.connected(0, 10)]).part_ids == ()
    with pytest.raises(
        StateError,
        match=r"how large 'whole' is as a whole; register it with source\('whole', shape=",
    ):
        member.begin(PublishCall(1), 10, 0)


# ------------------------------------------------------------------------------------ a version of
# another layout

A = TypeVar("A")


def publication_of_rows() -> tuple[Published, dict[str, bytes]]:
    """ "w" on two ranks, each of which has one half of its rows."""
    shards = [
        shard_of(rank, {"w": W[1024 * rank : 1024 * rank + 1024]}, w=1024) for rank in range(2)
    ]
    parts = {
        part_id: part
        for shard in shards
        if shard.manifest
        for part_id, part in shard.parts(shard.manifest).items()
    }
    published = Published("xxh3-64", CHUNK_BYTES, tuple([shard.part_ids for shard in shards]))
    return published, parts | {published.publication_id: published.encode()}


def columns(rank: int = 0) -> Shard:
    """A reader's rank: 8 of the 16 columns of "w", and what follows it is padding."""
    places = count(0x10000, 0x10000)
    tensors = [TensorDescription("mine", "uint8", (2056, 8), next(places), 2056 * 8)]
    manifest = build_manifest(tensors, CHUNK_BYTES, "xxh3-64", "world/2")
    entries, _ = entries_of(
        ["mine"], {"mine": [(at[0:2048], source("w")[:, 8 * rank : 8 * rank + 8])]}
    )
    declared = Declaration(rank, 2, {}, entries)
    manifest = replace(manifest, layout_id=layout_id_of(manifest, declared))
    return Shard(
        f"c{rank}",
        "m",
        "columns",
        rank,
        2,
        False,
        manifest.layout_id,
        manifest,
        rank,
        declared=declared,
    )


class Reader:
    """A rank of another layout, all that it says and wants, and a coordinator that answers what it
    asks for.
    """

    def __init__(self, known: KnownParts | None = None, shard: Shard | None = None) -> None:
        numbers = count(1)
        self.shard = shard if shard is not None else columns()
        self.parts = known if known is not None else KnownParts()
        self.published, self.blobs = publication_of_rows()
        self.member = Member(
            self.shard,
            requests=lambda: next(numbers),
            generations=lambda: next(numbers),
            manifests={},
            parts=self.parts,
        )
        self.actions: list[Action] = []
        self.connect()

    def connect(self) -> None:
        self.do(self.member.connected(0, 10))
        register = self.said(Register)[-1]
        self.do(
            self.member.receive(Registered(register.request, register.registration, 1, 0, True), 0)
        )

    def do(self, actions: list[Action]) -> None:
        self.actions += actions

    def said(self, kind: type[A]) -> list[A]:
        return [
            each.message
            for each in self.actions
            if isinstance(each, Say) and isinstance(each.message, kind)
        ]

    def wants(self, kind: type[A]) -> A:
        return [each for each in self.actions if isinstance(each, kind)][-1]

    @property
    def key(self) -> OpKey:
        assert self.member.running is not None
        assert self.member.running.key is not None
        return self.member.running.key

    def begin(
        self,
        kind: OpKind = OpKind.REPLICATE,
        *,
        number: int = 1,
        staged: bool = False,
        selector: int | str = 1,
    ) -> None:
        self.do(self.member.begin(FillCall(kind, selector, staged=staged), 60, 0))
        self.start(number)

    def start(self, number: int = 1) -> None:
        info = VersionInfo("m", number, f"content{number}", 2048 * 16, 2)
        assert self.shard.manifest is not None
        what = (
            info,
            self.shard.manifest.manifest_id,
            False,
            (),
            b"",
            (),
            self.published.publication_id,
        )
        self.do(self.member.receive(Start(self.key, 0, *what), 0))

    def answer(self) -> int:
        """Each part that was asked for; how many that were."""
        asked = 0
        while (questions := self.said(GetPart)[asked:]) != []:
            for each in questions:
                asked += 1
                self.do(
                    self.member.receive(ManifestReply(each.request, self.blobs[each.part_id]), 0)
                )
        return asked

    def plan(self) -> ReshardedManifest:
        action = self.wants(PlanReading)
        made = plan(action)
        self.do(self.member.planned(action.number, made, 0))
        assert isinstance(made, Planned)
        return made.reading

    def pulls(self, number: int = 1) -> ReshardedManifest:
        """Begun, planned, and told to write."""
        self.begin(number=number)
        self.answer()
        reading = self.plan()
        self.do(self.member.receive(Write(self.key, 0, ()), 0))
        return reading

    def votes(self, reading: ReshardedManifest) -> tuple[SelectionRoot, ...]:
        root, each = roots(reading, 8, range(reading.chunk_count))
        assert root == b""
        self.do(self.member.pull_done(0, root, each))
        return each


def test_a_version_of_another_layout_is_planned_and_said_before_anything_is_written() -> None:
    reader = Reader()
    reader.begin()
    assert reader.answer() == 1 + len({each for shard in reader.published.shards for each in shard})
    assert not reader.said(ReadyToWrite)
    reading = reader.plan()
    (ready,) = reader.said(ReadyToWrite)
    assert [need.shard for need in ready.needs] == [0, 1]
    assert [need.nbytes for need in ready.needs] == [1024 * 8, 1024 * 8]
    assert len({need.selection for need in ready.needs}) == 2
    reader.do(reader.member.receive(Write(reader.key, 0, ()), 0))
    assert reader.wants(OpenGeneration).manifest is reading
    assert reader.wants(StartPull).manifest is reading
    assert reading.regions == (RegionSpec(2056 * 8),)


def test_a_rank_that_is_ready_says_so_again_over_each_new_connection() -> None:
    """What it has said may be lost with the connection."""
    reader = Reader()
    reader.begin()
    reader.answer()
    reader.plan()
    reader.connect()
    first, second = reader.said(ReadyToWrite)
    assert first == second


def readers(reader: Reader, *others: Shard) -> Published:
    """Who reads: this rank and these, as they lie; the coordinator has what describes them."""
    made = reader.plan()
    reader.blobs |= said_parts(made)
    shards = [tuple(said_parts(made))]
    for shard in others:
        assert shard.manifest is not None
        assert shard.declared is not None
        publication = publication_of(reader.published, reader.blobs)
        theirs = said_parts(
            reading_for(reader.published, publication, shard.manifest, shard.declared)
        )
        reader.blobs |= theirs
        shards.append(tuple(theirs))
    described = Published("xxh3-64", CHUNK_BYTES, tuple(shards))
    reader.blobs[described.publication_id] = described.encode()
    return described


def asked_whether_all_is_read(*others: Shard) -> tuple[Reader, str]:
    """A rank that is ready, and has gathered who reads."""
    reader = Reader()
    reader.begin()
    reader.answer()
    described = readers(reader, *others)
    assert not reader.said(Covered)
    reader.do(reader.member.receive(CheckCoverage(reader.key, 0, described.publication_id), 0))
    return reader, described.publication_id


def digested(shares: Sequence[Share]) -> list[bytes]:
    return [b"equal"] * len(shares)


def checked(reader: Reader) -> None:
    action = reader.wants(CheckRanks)
    reader.do(reader.member.ranks_checked(action.number, check(action, digested), 0))


def test_where_it_will_lie_is_said_and_its_parts_when_they_are_asked_for() -> None:
    reader = Reader()
    reader.begin()
    reader.answer()
    parts = said_parts(reader.plan())
    (ready,) = reader.said(ReadyToWrite)
    assert (ready.part_ids, ready.parts) == (tuple(parts), ())
    catalogue, arrangement, coordinates = parts
    reader.do(
        reader.member.receive(ReadyAgain(reader.key, 0, (coordinates, "another", catalogue)), 0)
    )
    assert reader.said(ReadyToWrite)[-1] == replace(
        ready, parts=(parts[coordinates], parts[catalogue])
    )
    reader.do(reader.member.receive(Write(reader.key, 0, ()), 0))
    info = VersionInfo("m", 1, "content1", 2048 * 16, 2)
    reader.votes(reader.wants(StartPull).manifest)  # type: ignore[arg-type]
    reader.do(reader.member.receive(Outcome(reader.key, 0, True, True, info, None), 0))
    reader.do(reader.member.disconnected(1))
    reader.connect()
    held = reader.said(Register)[-1].held
    assert held is not None
    assert held.part_ids == ready.part_ids
    again = RegisterAgain(
        reader.said(Register)[-1].request, whole=False, part_ids=(arrangement, coordinates)
    )
    reader.do(reader.member.receive(again, 1))
    assert reader.said(Register)[-1].parts == (parts[arrangement], parts[coordinates])


def test_the_rank_that_is_asked_says_that_all_is_read() -> None:
    reader, described = asked_whether_all_is_read(columns(1))
    assert not [each for each in reader.actions if isinstance(each, CheckRanks)]
    reader.answer()
    assert reader.wants(CheckRanks).publication is not None, "as its own plan has made it"
    checked(reader)
    assert reader.said(Covered) == [Covered(reader.key, 0, described)]
    # it may not have been heard
    reader.do(reader.member.receive(CheckCoverage(reader.key, 0, described), 0))
    assert len(reader.said(Covered)) == 2
    assert len([each for each in reader.actions if isinstance(each, CheckRanks)]) == 1


def test_a_publishers_layout_is_asked_for_and_made_once_for_all_of_its_versions() -> None:
    published, blobs = publication_of_rows()
    member = member_of(shard_of(0, {"w": W[0:1024]}, w=1024))
    register = said(member, [*member.connected(0, 10)])
    member.receive(Registered(register.request, register.registration, 1, 0, True), 0)
    asked = []
    for number in (1, 2):
        member.begin(PublishCall(number), 60, 0)
        assert member.running is not None
        assert member.running.key is not None
        key = member.running.key
        actions = member.receive(CheckCoverage(key, 0, published.publication_id), 0)
        for action in actions:
            if isinstance(action, Say) and isinstance(action.message, GetPart):
                part = action.message
                asked.append(part.part_id)
                actions += member.receive(ManifestReply(part.request, blobs[part.part_id]), 0)
        (wanted,) = [each for each in actions if isinstance(each, CheckRanks)]
        assert (wanted.publication is None) is (number == 1)
        found = check(wanted, lambda shares: [])
        member.ranks_checked(wanted.number, found, 0)
        aborted = ErrorInfo.of(StateError("aborted"))
        member.receive(Outcome(key, 0, False, False, None, aborted), 0)
    assert sorted(asked) == sorted(blobs)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_digests_what_it_shares_where_its_own_memory_has_it(rank: int) -> None:
    norm = source("norm", shape=(4, 16))
    shards = [
        shard_of(0, {"w": W[:1024], "norm": norm}, w=1024, norm=4),
        shard_of(1, {"norm": norm, "w": W[1024:]}, norm=4, w=1024),
    ]
    parts = {
        part_id: part
        for shard in shards
        if shard.manifest
        for part_id, part in shard.parts(shard.manifest).items()
    }
    published = Published("xxh3-64", CHUNK_BYTES, tuple([shard.part_ids for shard in shards]))
    asked: list[Share] = []

    def digest(shares: Sequence[Share]) -> list[bytes]:
        asked.extend(shares)
        return [b"digest"] * len(shares)

    found = check(CheckRanks(1, published, parts, None, None, rank, 0), digest)
    assert isinstance(found, Found)
    assert found.shared == (Shared(0, "'norm'", b"digest"),)
    manifest = shards[rank].manifest
    assert manifest is not None
    (its,) = [tensor for tensor in manifest.tensors if tensor.name == "norm"]
    ((strip,),) = [share.chunks for share in asked]
    assert (strip.region, strip.offset, strip.nbytes) == (its.region, its.offset, its.nbytes)


def test_the_rank_that_is_asked_gives_up_with_all_that_is_unread() -> None:
    reader, _ = asked_whether_all_is_read()
    reader.answer()
    checked(reader)
    assert not reader.said(Covered)
    (given_up,) = reader.said(Abandon)
    error = given_up.error.error()
    assert isinstance(error, ManifestMismatch)
    assert error.differences == (
        "of tensor 'w', [0:2048, 8:16] (16384 bytes) is read by no rank of the group",
    )
    assert not [each for each in reader.actions if isinstance(each, OpenGeneration)]


def test_who_is_cut_off_while_it_gathers_asks_again() -> None:
    reader, described = asked_whether_all_is_read(columns(1))
    assert reader.said(GetPart)[-1].part_id == described
    reader.do(reader.member.disconnected(1))
    reader.actions.clear()
    reader.connect()
    # of a coordinator that may have started anew, and not know it yet
    assert not reader.said(GetPart)
    reader.start()
    assert [each.part_id for each in reader.said(GetPart)] == [described]
    reader.answer()
    checked(reader)
    assert reader.said(Covered)


def test_who_is_asked_again_while_it_gathers_asks_again() -> None:
    """As a publisher is over a new connection."""
    reader, described = asked_whether_all_is_read(columns(1))
    reader.actions.clear()
    reader.do(reader.member.receive(CheckCoverage(reader.key, 0, described), 0))
    assert [each.part_id for each in reader.said(GetPart)] == [described]
    reader.answer()
    checked(reader)
    assert reader.said(Covered)


def lying(kind: str, described: Published) -> bytes:
    """What describes readers, and is none."""
    if kind == "nothing":
        return b"x"
    order = {
        "one part": (0,),
        "turned round": (2, 1, 0),
        "coordinates twice": (0, 2, 2),
        "catalogue twice": (0, 1, 0),
    }[kind]
    shards = tuple([tuple([shard[part] for part in order]) for shard in described.shards])
    return Published("xxh3-64", CHUNK_BYTES, shards).encode()


@pytest.mark.parametrize(
    "kind", ["nothing", "one part", "turned round", "coordinates twice", "catalogue twice"]
)
def test_what_does_not_describe_readers_ends_the_call(kind: str) -> None:
    reader = Reader()
    reader.begin()
    reader.answer()
    blob = lying(kind, readers(reader, columns(1)))
    reader.blobs[id_of(blob)] = blob
    reader.do(reader.member.receive(CheckCoverage(reader.key, 0, id_of(blob)), 0))
    reader.answer()
    if [each for each in reader.actions if isinstance(each, CheckRanks)]:
        checked(reader)
    (given_up,) = reader.said(Abandon)
    assert isinstance(given_up.error.error(), ProtocolError)
    assert not reader.said(Covered)


def test_a_part_that_nobody_knows_any_more_ends_the_call() -> None:
    reader, _ = asked_whether_all_is_read(columns(1))
    request = reader.said(GetPart)[-1].request
    reader.do(
        reader.member.receive(Refused(request, ErrorInfo.of(VersionUnavailable("not known"))), 0)
    )
    (given_up,) = reader.said(Abandon)
    assert isinstance(given_up.error.error(), VersionUnavailable)


def test_who_has_begun_to_write_is_asked_for_nothing_more() -> None:
    reader, described = asked_whether_all_is_read(columns(1))
    reader.do(reader.member.receive(Write(reader.key, 0, ()), 0))
    reader.answer()
    for action in [each for each in reader.actions if isinstance(each, CheckRanks)]:
        reader.do(reader.member.ranks_checked(action.number, check(action, digested), 0))
    reader.do(reader.member.receive(CheckCoverage(reader.key, 0, described), 0))
    assert not reader.said(Covered)


def test_what_was_planned_is_not_asked_for_again() -> None:
    reader = Reader()
    first = reader.pulls()
    reader.votes(first)
    info = VersionInfo("m", 1, "content1", 2048 * 16, 2)
    reader.do(reader.member.receive(Outcome(reader.key, 0, True, True, info, None), 0))
    assert reader.member.version == 1
    reader.actions.clear()
    reader.begin(OpKind.UPDATE, number=2)
    assert reader.answer() == 0
    (ready,) = reader.said(ReadyToWrite)
    assert len(ready.needs) == 2
    other = Reader(reader.parts)  # of the same worker
    other.begin()
    assert other.answer() == 0
    assert other.wants(PlanReading).publication is not None


@pytest.mark.parametrize("wrong", ["content", "meaning", "refusal"])
def test_parts_that_are_none_end_the_call(wrong: str) -> None:
    reader = Reader()
    reader.begin()
    (asked,) = reader.said(GetPart)
    answer: ManifestReply | Refused = ManifestReply(asked.request, b"no such thing")
    if wrong == "meaning":
        reader.do(reader.member.receive(ManifestReply(asked.request, reader.published.encode()), 0))
        (asked, *_) = reader.said(GetPart)[1:]
        answer = ManifestReply(asked.request, b"")
    elif wrong == "refusal":
        answer = Refused(asked.request, ErrorInfo("VersionUnavailable", "it is gone", True))
    reader.do(reader.member.receive(answer, 0))
    assert len(reader.said(Abandon)) == 1
    assert not [each for each in reader.actions if isinstance(each, PlanReading)]


def test_what_does_not_fit_ends_the_call_with_everything_that_is_wrong() -> None:
    reader = Reader()
    reader.begin()
    reader.answer()
    action = reader.wants(PlanReading)
    made = plan(
        replace(action, declared=replace(action.declared, sources={"mine": ((None, source("v")),)}))
    )
    assert isinstance(made, TensorHubError)
    assert "'v' is not published" in str(made)
    reader.do(reader.member.planned(action.number, made, 0))
    assert "'v' is not published" in reader.said(Abandon)[0].error.message


def test_without_a_manifest_the_regions_of_the_whole_model_are_planned() -> None:
    published, blobs = publication_of_rows()
    for names, found in ((None, ["w"]), (("w",), ["w"])):
        made = plan(PlanReading(1, published, blobs, None, None, Declaration(), names))
        assert isinstance(made, Planned)
        assert [tensor.name for tensor in made.base.tensors] == found
        assert made.base.nbytes == made.reading.nbytes == 2048 * 16
    wrong = plan(PlanReading(1, published, blobs, None, None, Declaration(), ("v",)))
    assert isinstance(wrong, ManifestMismatch)


def test_a_plan_that_comes_too_late_changes_nothing() -> None:
    reader = Reader()
    reader.begin()
    reader.answer()
    action = reader.wants(PlanReading)
    unknown = Outcome(
        reader.key,
        0,
        False,
        False,
        None,
        ErrorInfo("GroupAborted", "unheard of", True),
        unknown=True,
    )
    reader.do(reader.member.receive(unknown, 0))
    reader.start()  # by another coordinator, which gives the same
    later = reader.wants(PlanReading)
    assert later.number != action.number
    reader.do(reader.member.planned(action.number, plan(action), 0))
    assert not reader.said(ReadyToWrite)
    reader.do(reader.member.planned(later.number, plan(later), 0))
    assert len(reader.said(ReadyToWrite)) == 1


def test_parts_are_asked_for_again_over_a_new_connection() -> None:
    reader = Reader()
    reader.begin()
    reader.do(reader.member.disconnected(0))
    reader.actions.clear()
    reader.connect()
    reader.start()
    assert [each.part_id for each in reader.said(GetPart)] == [reader.published.publication_id]


def test_it_votes_with_the_root_of_each_selection_also_out_of_a_doubt() -> None:
    reader = Reader()
    reading = reader.pulls()
    each = reader.votes(reading)
    (vote,) = reader.said(Prepared)
    assert (vote.root, vote.roots) == (b"", each)
    assert [root.shard for root in each] == [0, 1]
    assert each[0].root != each[1].root
    reader.do(reader.member.cancel(TensorHubError("enough"), 0))  # in doubt
    reader.do(reader.member.disconnected(0))
    reader.connect()
    assert reader.said(Prepared)[-1].roots == each
    (held,) = [register.held for register in reader.said(Register) if register.held is not None]
    assert reader.shard.manifest is not None
    assert (held.manifest_id, held.voted) == (reader.shard.manifest.manifest_id, True)


def test_what_it_holds_is_named_by_its_own_manifest_whatever_digests_the_publisher_makes() -> None:
    shard = columns()
    assert shard.manifest is not None
    reader = Reader(shard=replace(shard, manifest=replace(shard.manifest, digest="sha-256")))
    reading = reader.pulls()
    assert reading.digest == "xxh3-64"
    reader.votes(reading)
    reader.do(reader.member.disconnected(0))
    reader.connect()
    held = reader.said(Register)[-1].held
    assert held is not None
    assert reader.shard.manifest is not None
    assert held.manifest_id == reader.shard.manifest.manifest_id != reading.manifest_id


def test_a_selection_is_compared_in_its_own_numbers() -> None:
    reader = Reader()
    reading = reader.pulls()
    reader.votes(reading)
    part = reading.parts[1]
    key, name = reader.key, part.selection.selection_id
    page = pack([*part.chunks], 8)
    reader.do(reader.member.receive(Compare(key, 0, 0, page, True, name, part.shard), 0))
    action = reader.wants(CompareDigests)
    digests = [
        chunk if chunk not in part.chunks else chunk + 100 for chunk in range(reading.chunk_count)
    ]
    origin = Origin("from", 7)
    wrong, following = compare(action, 8, digests, lambda _: origin)
    assert following == len(part.chunks)
    assert [(chunk, must) for chunk, must, _ in wrong] == [(chunk, chunk) for chunk in part.chunks]
    reader.do(reader.member.compared(action.generation, following, wrong, 0))
    (said,) = reader.said(Compared)
    assert (said.selection, said.shard, said.rereads) == (name, part.shard, True)
    assert said.strays == (Stray(0, origin),)
    again = reader.wants(StartPull)
    assert again.published == {chunk: chunk for chunk in part.chunks}
    assert again.copied == frozenset(range(reading.chunk_count)) - set(part.chunks)


@pytest.mark.parametrize("is_another", [False, True], ids=["the same coordinator", "another one"])
@pytest.mark.parametrize("is_right", [False, True])
def test_a_vote_is_not_said_again_before_it_is_known_whether_it_is_void(
    is_right: bool, is_another: bool
) -> None:
    """A connection is lost while it compares the last page. The coordinator cannot know whether its
    question was heard, and would count the vote.
    """
    reader = Reader()
    reading = reader.pulls()
    reader.votes(reading)
    part = reading.parts[1]
    digests = pack([*part.chunks], 8)
    question = Compare(reader.key, 0, 0, digests, True, part.selection.selection_id, part.shard)
    reader.do(reader.member.receive(question, 0))
    action = reader.wants(CompareDigests)
    reader.actions.clear()
    reader.do(reader.member.disconnected(0))
    reader.connect()
    if is_another:
        error = ErrorInfo("GroupAborted", "unheard of", True)
        reader.do(
            reader.member.receive(
                Outcome(reader.key, 0, False, False, None, error, unknown=True), 0
            )
        )
        reader.start()
        reader.do(reader.member.receive(Write(reader.key, 0, ()), 0))
    assert not reader.said(Prepared)
    mine = [chunk + (not is_right) for chunk in range(reading.chunk_count)]
    wrong, following = compare(action, 8, mine, lambda _: None)
    reader.do(reader.member.compared(action.generation, following, wrong, 0))
    (said,) = reader.said(Compared)
    assert said.rereads is not is_right
    assert len(reader.said(Prepared)) == is_right


def test_a_list_of_what_is_not_read_is_not_compared() -> None:
    reader = Reader()
    reader.votes(reader.pulls())
    reader.do(reader.member.receive(Compare(reader.key, 0, 0, b"", True, "unknown", 0), 0))
    assert not [each for each in reader.actions if isinstance(each, CompareDigests)]


def test_another_coordinator_hears_what_is_read_where_the_fill_has_begun() -> None:
    reader = Reader()
    reader.pulls()
    assert len(reader.said(ReadyToWrite)) == 1
    unknown = Outcome(
        reader.key,
        0,
        False,
        False,
        None,
        ErrorInfo("GroupAborted", "unheard of", True),
        unknown=True,
    )
    reader.do(reader.member.receive(unknown, 0))
    begun = reader.said(Fill)[-1].resume
    assert begun is not None
    assert reader.shard.manifest is not None
    assert (begun.manifest_id, begun.written) == (reader.shard.manifest.manifest_id, True)
    assert reader.said(BegunWith)[-1].manifest == reader.shard.manifest.encode()
    reader.start()
    first, second = reader.said(ReadyToWrite)
    assert second.needs == first.needs
    assert second.key != first.key
    # the pull goes on
    assert len([each for each in reader.actions if isinstance(each, StartPull)]) == 1


def test_parts_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_parts, "PARTS_BYTES_MAX", 10)
    known = KnownParts()
    for part in (b"aaaa", b"bbbb", b"aaaa"):
        known.add(id_of(part), part)
        known.get(id_of(b"aaaa"))
    known.add(id_of(b"cccc"), b"cccc")
    assert [known.get(id_of(part)) for part in (b"aaaa", b"bbbb", b"cccc")] == [
        b"aaaa",
        None,
        b"cccc",
    ]
    known.add(id_of(b"d" * 99), b"d" * 99)  # however large, it is there for whoever has asked
    assert known.get(id_of(b"d" * 99)) is not None
    with pytest.raises(ProtocolError, match="it is not what its id"):
        known.add(id_of(b"a"), b"b")


def test_a_plan_is_of_one_publication_into_the_regions_of_one_manifest() -> None:
    """Groups of one layout read into the regions of the first of them, and otherwise into their
    own.
    """
    reader = Reader()
    reader.begin()
    reader.answer()
    made, known = reader.plan(), KnownReadings()
    known.keep("publication", "its own", made)
    assert known.get("publication", "its own") is made
    assert known.get("publication", "of the first group") is None
    assert known.get("another", "its own") is None


# ------------------------------------------------------------------------- what it tells of what it
# has read in selections


def told(reader: Reader, *, shard: int, selection: str = "") -> Digests:
    """Its answer to TellDigests, where its chunks have their own number as digest."""
    content = reader.member.content
    assert content is not None
    question = TellDigests(reader.shard.registration, content.generation, selection, shard)
    count = content.manifest.chunk_count

    def listed(target: str, of: str) -> tuple[int, Sequence[int | None]] | None:
        return (8, range(count)) if target == reader.shard.registration and not of else None

    (said,) = Interpreter(reader.member, list).tell_digests(question, listed)
    assert (said.selection, said.shard, said.last) == (selection, shard, True)
    return said


def test_what_was_read_in_a_selection_is_told_in_its_numbers() -> None:
    reader = Reader()
    reading = reader.pulls()
    part = reading.parts[1]
    name = part.selection.selection_id
    said = told(reader, shard=part.shard, selection=name)
    assert (said.chunks, unpack(said.digests, 8)) == (len(part.chunks), [*part.chunks])
    assert told(reader, shard=part.shard, selection="unknown").chunks == 0


def test_a_chunk_that_was_read_in_a_selection_is_looked_at_where_it_is() -> None:
    reader = Reader()
    part = reader.pulls().parts[1]
    interpreter = Interpreter(reader.member, list)
    content = reader.member.content
    assert content is not None

    def asked(chunk: int, selection: str) -> tuple[int, str]:
        question = DigestAgain(
            "i", reader.shard.registration, content.generation, chunk, selection, part.shard
        )
        return interpreter.asked_about(question)

    assert asked(1, part.selection.selection_id) == (part.chunks[1], "")
    assert asked(7, "") == (7, "")
    # which nothing is known of
    assert asked(10**6, part.selection.selection_id) == (10**6, part.selection.selection_id)
