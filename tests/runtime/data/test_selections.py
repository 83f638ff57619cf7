"""A reader of another layout: selections of several sources, read by real lanes into memory of
strips.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import ProtocolError
from tensorhub.layouts.reading import Part, Reading, Selection, resharded
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import Grant, Origin
from tensorhub.model.accesses import CHUNKS_PER_ACCESS_MAX, Refusal
from tensorhub.model.manifest import Digest, id_of
from tensorhub.model.strips import Strip, straight
from tensorhub.runtime.data import selections as kept_selections, vote_budget
from tensorhub.runtime.data.lanes import PullRunner
from tensorhub.runtime.data.selections import Selections
from tensorhub.runtime.data.source_lane import SourceFailed
from tensorhub.runtime.data.vote_budget import VoteBudget
from tensorhub.transport.owner import CannotServe, Lane
from tensorhub.types import READ_ONLY, Incarnation
from tests.runtime.data_rig import CONTENT, KINDS, Node, finish, manifest_of, next_event, serving

ROWS, ROW_BYTES = 96, 3000  # of each of two published ranks, of which the reader takes some columns
FIRST = 650  # the first of the columns that the reader takes
GAP = 4  # behind each of the reader's rows
CHUNK_ROWS = 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Setting:
    """Two published ranks that hold the rows of one tensor, and a reader of columns of it."""

    a: Node
    b: Node
    reader: Node
    parts: dict[str, Part]
    columns: int

    @property
    def names(self) -> list[str]:
        return list(self.parts)

    def grant(self, node: Node, *, complete: bool = True) -> Grant:
        return node.grant(selection=self.names[node is self.b], complete=complete)

    def runner(self, transport: str = "tcp", connections: int = 1) -> PullRunner:
        nbytes = 2 * CHUNK_ROWS * self.columns
        return self.reader.runner(
            batch_bytes=nbytes, transport=transport, connections=connections, selections=self.parts
        )

    def check(self) -> None:
        rows = [
            bytes(array[at : at + ROW_BYTES])
            for node in (self.a, self.b)
            for array in node.arrays
            for at in starts()
        ]
        (mine,) = self.reader.arrays
        for number, row in enumerate(rows):
            at, end = number * (self.columns + GAP), (number + 1) * (self.columns + GAP)
            assert mine[at : end - GAP] == row[FIRST : FIRST + self.columns]
            assert not any(mine[end - GAP : end]), "the padding was written"


def starts() -> range:
    return range(0, ROWS * ROW_BYTES, ROW_BYTES)


made: list[Node] = []


@pytest.fixture(autouse=True)
def _close_listeners() -> Iterator[None]:
    yield
    for node in made:
        node.listener.close()
    made.clear()


def setting(digest: Digest = "xxh3-64", columns: int = 700, chunk_bytes: int = 4096) -> Setting:
    published = manifest_of((ROWS * ROW_BYTES,), digest, chunk_bytes)
    a, b = Node("a", published, filled=True), Node("b", published, filled=True)
    b.arrays[0][:] = b.arrays[0][::-1]
    places: list[tuple[Strip, ...]] = []
    taken: list[tuple[Strip, ...]] = []
    for first in range(0, ROWS, CHUNK_ROWS):
        count = min(CHUNK_ROWS, ROWS - first)
        taken.append(
            (Strip(0, first * ROW_BYTES + FIRST, 0, 0, 1, ((count, ROW_BYTES),), columns),)
        )
        places.append(
            (Strip(0, first * (columns + GAP), 0, 0, 1, ((count, (columns + GAP)),), columns),)
        )
    lower = [
        tuple([place._replace(offset=place.offset + ROWS * (columns + GAP)) for place in strips])
        for strips in places
    ]
    count = len(places)
    one = Part(0, (0,), Selection(tuple(taken)), tuple(range(count)))
    # The same columns, said in another way: else both parts would have one name.
    halves = tuple([(strips[0]._replace(loops=()), *_rest(strips[0])) for strips in taken])
    two = Part(1, (1,), Selection(halves), tuple(range(count, 2 * count)))
    sizes = tuple([strips[0].nbytes for strips in taken] * 2)
    mine = manifest_of((2 * ROWS * (columns + GAP),), digest)
    reading = Reading((*places, *lower), sizes, (one, two))
    reader = Node("reader", resharded(mine, digest, 4096, reading, "grid"), filled=False)
    made.extend([a, b, reader])
    return Setting(
        a, b, reader, {part.selection.selection_id: part for part in (one, two)}, columns
    )


def _rest(strip: Strip) -> Sequence[Strip]:
    """All rows of a strip but the first."""
    (times, apart), *_ = strip.loops
    return (strip._replace(offset=strip.offset + apart, loops=((times - 1, apart),)),)


# shorter ones are packed by their owner, whatever the transport
@pytest.mark.parametrize("columns", [700, 2300])
@pytest.mark.parametrize("transport", KINDS)
@pytest.mark.parametrize("digest", ["xxh3-64", "sha-256", "none"])
async def test_columns_come_from_two_ranks_that_hold_rows(
    digest: Digest, transport: str, columns: int
) -> None:
    its = setting(digest, columns)
    its.a.open(complete=True)
    its.b.open(complete=True)
    its.reader.open(complete=False)
    async with serving(its.a, its.b, its.reader), its.runner(transport) as runner:
        runner.add_source(its.grant(its.a))
        runner.add_source(its.grant(its.b))
        await finish(runner)
        report = runner.report()
    its.check()
    assert report.bytes_read == report.bytes_verified == 2 * ROWS * columns
    assert sorted(source.bytes_read for source in report.sources) == [ROWS * columns] * 2
    origins = {its.reader.owner.origin(its.reader.registration, 7, chunk) for chunk in (0, 9)}
    assert origins == {Origin(its.a.registration, 7), Origin(its.b.registration, 7)}


@pytest.mark.parametrize("columns", [700, 2300])
@pytest.mark.parametrize("transport", KINDS)
async def test_a_holder_of_the_readers_layout_serves_its_chunks(
    transport: str, columns: int
) -> None:
    its, other = setting(columns=columns), setting(columns=columns)
    for node in (its.a, its.b):
        node.open(complete=True)
    its.reader.open(complete=False)
    other.reader.name, other.reader.registration = "follower", other.reader.registration + "2"  # type: ignore[assignment]
    other.reader.open(complete=False)
    nodes = (its.a, its.b, its.reader, other.a, other.b, other.reader)
    async with serving(*nodes), its.runner() as bridges, other.runner(transport) as follows:
        follows.add_source(its.reader.grant(complete=False))
        bridges.add_source(its.grant(its.a))
        bridges.add_source(its.grant(its.b))
        await finish(bridges)
        await finish(follows)
    its.check()
    assert other.reader.arrays == its.reader.arrays


async def test_a_selection_that_is_not_of_the_memory_is_refused() -> None:
    its = setting()
    its.a.open(complete=True)
    its.reader.open(complete=False)
    beyond = Selection(((straight(0, ROWS * ROW_BYTES - 1, 2),),))
    part = Part(0, (0,), beyond, (0,))
    async with (
        serving(its.a, its.b, its.reader),
        its.reader.runner(selections={beyond.selection_id: part}) as runner,
    ):
        runner.add_source(its.a.grant(selection=beyond.selection_id))
        event = await next_event(runner)
    assert isinstance(event, SourceFailed)
    assert event.reason == "refused"
    assert "not within the shard's memory" in event.detail


# ------------------------------------------------------------------------------------------------
# what an owner keeps


def lane(reader: str) -> Lane:
    made = Lane(cast(Any, None))
    made.reader = Incarnation(reader)
    return made


MANY = 2**30
READER = lane("reader")


def blob_of(number: int, count: int = 1) -> tuple[str, bytes]:
    found = Selection(tuple([(straight(0, number + n, 1),) for n in range(count)]))
    return found.selection_id, found.encode()


def test_a_selection_is_said_in_pieces_and_may_be_said_again() -> None:
    known, (name, blob) = Selections(), blob_of(1, 50)
    assert known.find(name) is None
    assert known.upload(READER, MANY, name, len(blob), 0, blob[:9]) == (9, [])
    assert known.upload(READER, MANY, name, len(blob), 5, blob[5:9]) == (9, [])  # said already
    assert known.upload(READER, MANY, name, len(blob), 9, blob[9:]) == (len(blob), [])
    found = known.find(name)
    assert found is not None
    assert found.encode() == blob
    assert known.upload(READER, MANY, name, len(blob), 0, blob) == (len(blob), [])


def test_a_selection_of_more_parts_than_the_memory_has_is_refused() -> None:
    known, (name, blob) = Selections(), blob_of(1, 50)
    refused = known.upload(READER, 99, name, len(blob), 0, blob)
    assert isinstance(refused, Refusal)
    assert "a selection of 100 parts is not of this memory" in refused.reason
    assert known.find(name) is None
    assert known.upload(READER, 100, name, len(blob), 0, blob) == (len(blob), [])


@pytest.mark.parametrize("what", ["another name", "longer", "no selection"])
def test_what_is_no_selection_costs_its_reader_the_connection(what: str) -> None:
    known, (name, blob) = Selections(), blob_of(1)
    if what == "another name":
        name = blob_of(2)[0]
    elif what == "no selection":
        blob = b"\x93" * 40
        name = id_of(blob)
    with pytest.raises(ProtocolError):
        known.upload(READER, MANY, name, len(blob) - (what == "longer"), 0, blob)
    assert known.find(name) is None
    assert known.upload(READER, MANY, "x", 10, 0, b"") == (0, [])
    known.leave(READER)
    assert "0 under way" in repr(known)


def test_uploads_and_selections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    known, readers = Selections(), [lane(str(n)) for n in range(kept_selections.UPLOADS_MAX + 3)]
    for reader in range(kept_selections.UPLOADS_MAX + 3):
        name, blob = blob_of(reader)
        assert known.upload(readers[reader], MANY, name, len(blob), 0, blob[:3]) == (3, [])
    assert f"{kept_selections.UPLOADS_MAX} under way" in repr(known)
    name, blob = blob_of(0)
    # it gave way, and begins again
    assert known.upload(readers[0], MANY, name, len(blob), 3, blob[3:]) == (0, [])
    monkeypatch.setattr(kept_selections, "KEPT_MAX", 3)
    names = []
    for number in range(5):
        name, blob = blob_of(number)
        names.append(name)
        said = known.upload(READER, MANY, name, len(blob), 0, blob)
        assert not isinstance(said, Refusal)
        assert said[1] == ([names[number - 2]] if number > 2 else [])
        known.find(names[0])  # the one that is used stays
    assert [known.find(name) is not None for name in names] == [True, False, False, True, True]


def test_few_bytes_that_say_many_strips_do_not_fill_an_owners_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers that follow a rule are encoded as a run of them, so the bytes of an encoding bound
    nothing.
    """
    monkeypatch.setattr(kept_selections, "KEPT_PARTS_MAX", 15_000)
    known, names = Selections(), list[str]()
    for number in range(4):
        chunks = tuple(
            [(Strip(0, chunk + number, 0, 0, 1, ((2, 10_000),), 1),) for chunk in range(2000)]
        )
        names.append(upload(known, Selection(chunks)))
    kept = [known.find(name) is not None for name in names]
    assert kept == [False, False, True, True], (
        "2000 strips, which have a cell and a loop each, are 6000 parts"
    )
    larger = Selection(tuple([(straight(0, at, 1),) for at in range(10_000)]))
    assert known.find(upload(known, larger)) is not None, "what alone is too large is kept, alone"
    assert known.find(names[-1]) is None


def test_few_bytes_do_not_make_a_source_work_without_end() -> None:
    """Of each chunk of a selection a source makes the digest."""
    memory = setting().a.memory
    # of the first chunk, and of the last one
    ends = (Strip(0, 0, 0, 0, 1, ((2, sum(memory.sizes) - 1),), 1),)
    everything = (straight(0, 0, sum(memory.sizes)),)
    assert not memory.fault(Selection((everything,) * 16))
    assert "more than 16 times" in memory.fault(Selection((everything,) * 16 + (ends,)))
    again = (Strip(0, 0, 0, 0, 1, ((17, 0),), sum(memory.sizes)),)  # in one loop that stands still
    assert "more than 16 times" in memory.fault(Selection((again,)))


@pytest.mark.parametrize("token", [b"full", b"read-only"])
def test_a_budget_hangs_on_a_token_and_an_address_and_not_on_a_name_that_a_reader_chooses(
    token: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_selections, "BUDGET_PARTS", 100)
    monkeypatch.setattr(kept_selections, "READ_ONLY_PARTS", 100)
    known = Selections(clock=lambda: 0.0)

    def says(number: int, address: str = "10.0.0.1", secret: bytes = token) -> bool:
        reader = lane(f"{READ_ONLY if token == b'read-only' else ''}incarnation {number}")
        reader.secret, reader.address = secret, address
        name, blob = blob_of(number, 15)
        return not isinstance(known.upload(reader, MANY, name, len(blob), 0, blob), Refusal)

    assert [says(number) for number in range(6)] == [True, True, True, False, False, False]
    assert says(6, address="10.0.0.2")
    assert says(7, secret=b"another token")


@pytest.mark.parametrize(
    "addresses", [["10.0.0.1"], ["10.0.0.2"], [f"10.0.1.{n}" for n in range(8)]]
)
def test_uploads_that_are_begun_and_never_ended_keep_no_honest_reader_from_saying_its_own(
    addresses: Sequence[str],
) -> None:
    """The token of the attackers is the read-only one of the reader's token. They are at the
    reader's address, at another one, or at many.
    """
    known, (name, blob) = Selections(), blob_of(99, 50)
    honest = lane("honest")
    honest.secret, honest.address = b"secret", "10.0.0.1"
    attackers = [lane(f"{READ_ONLY}{number}") for number in range(8)]
    for at in range(len(blob)):
        for number, attacker in enumerate(attackers):
            attacker.secret = b"secret"
            attacker.address = addresses[number % len(addresses)]
            other, its = blob_of(number)
            known.upload(attacker, MANY, other, len(its), 0, its[:1])
            known.leave(attacker) if at % 2 else None
        assert known.upload(honest, MANY, name, len(blob), at, blob[at : at + 1]) == (at + 1, [])
    assert known.find(name) is not None


def test_a_source_digests_no_more_bytes_than_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes of each of its own chunks are asked for."""
    its, digested = setting(), 0
    its.a.open(complete=True)
    its.a.owner.make_digests(its.a.registration, 7, CONTENT)
    memory = its.a.memory
    ends = [(straight(chunk.region, chunk.offset, 64),) for chunk in memory.manifest.chunks]
    name = upload_to(its, Selection(tuple(ends)))
    made = ChunkMemory.guarded_digest

    def counted(self: ChunkMemory, chunk: int) -> int:
        nonlocal digested
        digested += self.sizes[chunk]
        return made(self, chunk)

    monkeypatch.setattr(ChunkMemory, "guarded_digest", counted)
    for chunk in range(len(ends)):
        with its.a.owner.access(
            READER, its.a.registration, 7, CONTENT, [chunk], 64, 0.0, name
        ) as answer:
            assert isinstance(answer, tuple)
            its.a.owner.digests_of(*answer)
    assert digested == 64 * len(ends)


def test_once_a_reader_is_stopped_no_further_digest_is_made_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An access may have 64 MiB in runs of one byte, and a fence waits for it."""
    its = setting()
    its.a.open(complete=True)
    name, reader = upload_to(its, Selection(((straight(0, 0, 64),),) * 16)), lane("reader")
    digested = list[int]()

    def stopped(self: ChunkMemory, chunk: int) -> int:
        digested.append(chunk)
        reader.is_stopped = True
        return 1

    monkeypatch.setattr(ChunkMemory, "guarded_digest", stopped)
    with its.a.owner.access(
        reader, its.a.registration, 7, CONTENT, range(16), MANY, 0.0, name
    ) as answer:
        assert isinstance(answer, tuple)
        with pytest.raises(CannotServe, match="served no more"):
            its.a.owner.digests_of(*answer)
    assert digested == [0]


def by_votes(its: Setting, *names: str) -> list[int]:
    """How many digests of each of these selections are there, after a vote on each."""
    for name in names:
        its.a.owner.make_digests(its.a.registration, 7, CONTENT, name)
    there = [its.a.owner.digests(its.a.registration, 7, name) for name in names]
    return [len([each for each in digests or () if each is not None]) for digests in there]


def test_votes_make_the_digests_of_what_was_not_sent() -> None:
    its = setting()
    its.a.open(complete=True)
    name = upload_to(its, Selection(tuple([(straight(0, at, 64),) for at in range(9)])))
    assert by_votes(its, name) == [9]


def test_votes_have_a_budget_of_which_readers_with_a_read_only_token_leave_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many names they choose. What is sent is digested in any case."""
    monkeypatch.setattr(vote_budget, "PUBLICATION_S", 1e9)
    its = setting()
    its.a.open(complete=True)
    budget = its.a.owner._votes[its.a.registration]
    budget.spent_s = vote_budget.READ_ONLY_SHARE * 1e9 + 1.0
    all_of_it = tuple([(straight(0, at, 64),) for at in range(9)])
    names = [
        upload_to(its, Selection(all_of_it, of=f"{number}"), lane(f"{READ_ONLY}{number}"))
        for number in range(3)
    ]
    assert by_votes(its, *names) == [0, 0, 0]
    assert upload_to(its, Selection(all_of_it, of="1")) == names[1]  # also a worker reads so
    assert by_votes(its, *names) == [0, 9, 0]
    budget.spent_s = 2e9
    last = upload_to(its, Selection(all_of_it, of="last"))
    with its.a.owner.access(READER, its.a.registration, 7, CONTENT, [3], 64, 0.0, last) as answer:
        assert isinstance(answer, tuple)
        its.a.owner.digests_of(*answer)
    assert by_votes(its, last) == [1]
    its.a.owner.make_digests(its.a.registration, 7, CONTENT)  # of its own chunks all are made
    assert None not in (its.a.owner.digests(its.a.registration, 7) or (None,))


def test_a_selection_that_has_given_way_is_not_taken_for_a_workers_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_selections, "KEPT_MAX", 2)
    its = setting()
    its.a.open(complete=True)
    names = [upload_to(its, Selection(((straight(0, at, 64),),), of=f"{at}")) for at in range(3)]
    assert its.a.owner._votes[its.a.registration].of_workers == set(names[1:])


def test_a_vote_that_uses_up_the_budget_ends_with_the_chunks_of_one_access(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vote_budget, "PUBLICATION_S", 1e-30)
    monkeypatch.setattr(vote_budget, "GB_S", 0.0)
    its = setting()
    its.a.open(complete=True)
    count = 5 * CHUNKS_PER_ACCESS_MAX
    name = upload_to(its, Selection(tuple([(straight(0, at, 1),) for at in range(count)])))
    (made_now,) = by_votes(its, name)
    assert made_now <= CHUNKS_PER_ACCESS_MAX
    assert by_votes(its, name) == [made_now]
    fence_and_open_again(its)
    assert its.a.owner._votes[its.a.registration].spent_s == 0.0, "another publication"


def fence_and_open_again(its: Setting) -> None:
    its.a.owner.fence(its.a.registration)
    its.a.generation += 1
    its.a.open(complete=True)


@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(0.0, 2.0), st.integers(0, 3)), min_size=1, max_size=50
    ),
    st.integers(0, 10**10),
)
def test_whatever_readers_vote_on_a_budget_is_exceeded_by_one_step_and_workers_have_most_of_it(
    steps: list[tuple[bool, float, int]], nbytes: int
) -> None:
    budget, whole = VoteBudget(nbytes), vote_budget.PUBLICATION_S + vote_budget.GB_S * nbytes / 1e9
    by_read_only = 0.0
    for is_worker, seconds, name in steps:
        selection = f"{is_worker} {name}"
        if is_worker:
            budget.of_workers.add(selection)
        if budget.allows(selection):
            budget.spent_s += seconds
            by_read_only += 0.0 if is_worker else seconds
    assert budget.spent_s < whole + 2.0
    assert by_read_only < vote_budget.READ_ONLY_SHARE * whole + 2.0


def upload_to(its: Setting, selection: Selection, reader: Lane = READER) -> str:
    """Say it to the first rank, and have that read so."""
    blob, name = selection.encode(), selection.selection_id
    assert its.a.owner.upload(reader, its.a.registration, name, len(blob), 0, blob) == len(blob)
    assert its.a.owner.select(reader, its.a.registration, 7, name) is True
    return name


def upload(known: Selections, selection: Selection) -> str:
    blob = selection.encode()
    assert len(blob) < 1000
    known.upload(READER, MANY, selection.selection_id, len(blob), 0, blob)
    return selection.selection_id
