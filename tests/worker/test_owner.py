"""The owner's authority: what may be read, under which generation, and when memory is fenced."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorhub.machine import IllegalStep, InvariantBroken
from tensorhub.messages import Origin
from tensorhub.model.accesses import CHUNKS_PER_ACCESS_MAX, Access, Refusal, Wait
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.owner import Owner

R = RegistrationId("r")
C = ContentId("c")
SIZES = (10, 20, 30, 40)


def opened(*, complete: bool = True, generation: int = 1) -> Owner:
    owner = Owner()
    owner.open(R, generation, C, SIZES, complete=complete)
    return owner


def begun(
    owner: Owner, wanted: tuple[int, ...] = (0, 1, 2, 3), bytes_max: int = 1000, generation: int = 1
) -> Access:
    access = owner.begin(R, generation, C, wanted, bytes_max)
    assert isinstance(access, Access), access
    return access


def test_a_complete_holder_serves_what_is_asked_for_in_the_order_of_asking() -> None:
    access = begun(opened(), (3, 0))
    assert access.chunks == (3, 0)
    assert access.digests == (None, None)
    assert access.rest == ()


@pytest.mark.parametrize(
    ("bytes_max", "chunks", "rest"),
    [
        (1, (0,), (1, 2, 3)),
        (30, (0, 1), (2, 3)),
        (59, (0, 1), (2, 3)),
        (60, (0, 1, 2), (3,)),
        (100, (0, 1, 2, 3), ()),
    ],
)
def test_an_access_takes_one_chunk_at_least_and_then_no_more_than_its_bytes(
    bytes_max: int, chunks: tuple[int, ...], rest: tuple[int, ...]
) -> None:
    access = begun(opened(), bytes_max=bytes_max)
    assert (access.chunks, access.rest) == (chunks, rest)


def test_digests_of_a_broken_fill_are_kept_for_the_same_content() -> None:
    owner = opened(complete=False)
    assert owner.kept(R, 1) == []
    owner.mark_available(R, 1, [(1, 11), (3, 13)])
    owner.close(R)
    owner.open(R, 2, C, SIZES, complete=False)
    assert owner.kept(R, 1) == []
    assert owner.kept(R, 2) == [(1, 11), (3, 13)]
    assert isinstance(owner.begin(R, 2, C, [1], 100), Wait)  # before it is verified again
    owner.mark_available(R, 2, [(3, 13)])
    assert owner.kept(R, 2) == [(1, 11)]
    owner.close(R)
    owner.open(R, 3, C, SIZES, complete=False)
    assert owner.kept(R, 3) == [(1, 11), (3, 13)]
    owner.close(R)
    owner.open(R, 4, ContentId("another"), SIZES, complete=False)
    assert owner.kept(R, 4) == []
    owner.close(R)
    owner.open(R, 5, C, SIZES, complete=False)
    assert owner.kept(R, 5) == []  # other bytes were here


def test_where_a_chunk_was_read_is_known_as_long_as_the_content_is_the_same() -> None:
    owner, origin = opened(complete=False), Origin("source", 7)
    assert owner.origin(R, 1, 1) is None
    owner.mark_available(R, 1, [(1, 11)], origin)
    owner.mark_available(R, 1, [(3, 13)])
    assert [owner.origin(R, 1, chunk) for chunk in range(4)] == [None, origin, None, None]
    assert owner.origins(begun(owner, (3, 1))) == [None, origin]
    assert owner.origin(R, 2, 1) is None
    assert owner.origin(RegistrationId("other"), 1, 1) is None


def test_what_an_update_can_begin_with_is_all_of_another_content_under_its_generation() -> None:
    owner, new, digests = opened(complete=False), ContentId("new"), [10, 11, 12, 13]
    owner.mark_available(R, 1, enumerate(digests[:3]))
    assert owner.held(R, new, "") is None
    owner.mark_available(R, 1, [(3, 13)])
    assert owner.held(R, new, "") == (1, C, digests, bytearray(b"\1" * 4))
    assert owner.held(R, C, "") is None
    assert owner.held(R, new, "another grid") is None
    assert owner.held(RegistrationId("other"), new, "") is None
    owner.close(R)
    assert owner.held(R, new, "") is None
    assert owner.former(R, new, "") == (C, digests, bytearray(b"\1" * 4))


def test_chunks_of_another_grid_are_not_kept() -> None:
    """Equal numbers are other bytes there."""
    owner = Owner()
    owner.open(R, 1, C, SIZES, complete=False, grid="one")
    owner.mark_available(R, 1, [(1, 11), (3, 13)])
    owner.close(R)
    owner.open(R, 2, C, SIZES, complete=False, grid="another")
    assert owner.kept(R, 2) == []


def test_a_publication_keeps_nothing_of_the_last_one() -> None:
    owner = Owner()
    owner.open(R, 1, ContentId(""), SIZES, complete=True)
    owner.set_digest(R, 1, 0, 10)
    owner.close(R)
    owner.open(R, 2, ContentId(""), SIZES, complete=True)
    assert owner.digests(R, 2) == (None, None, None, None)


def test_what_is_there_is_told_in_bounded_runs() -> None:
    owner = opened(complete=False)
    assert owner.has(R, 1, 9) == ()
    owner.mark_available(R, 1, [(1, 0), (3, 0)])
    assert owner.has(R, 1, 9) == ((1, 1), (3, 1))
    assert owner.has(R, 1, 1) == ((1, 1),)
    assert owner.has(R, 2, 9) == ()
    owner.mark_available(R, 1, [(2, 0)])
    assert owner.has(R, 1, 9) == ((1, 3),)


def test_an_access_takes_no_more_chunks_than_a_frame_names() -> None:
    owner = Owner()
    owner.open(R, 1, C, [1] * 3000, complete=True)
    access = begun(owner, tuple(range(3000)), 10**9)
    assert len(access.chunks) == CHUNKS_PER_ACCESS_MAX
    assert access.rest == tuple(range(CHUNKS_PER_ACCESS_MAX, 3000))


def test_a_filling_holder_serves_only_what_was_verified() -> None:
    owner = opened(complete=False)
    assert owner.begin(R, 1, C, (0, 1), 1000) == Wait()
    assert owner.mark_available(R, 1, [(1, 77)])
    access = begun(owner, (0, 1, 2))
    assert (access.chunks, access.digests, access.rest) == ((1,), (77,), (0, 2))
    assert not owner.is_complete(R, 1)
    owner.mark_available(R, 1, [(0, None), (2, None), (3, None), (3, None)])
    assert owner.is_complete(R, 1)


@pytest.mark.parametrize(
    ("registration", "generation", "content", "wanted", "says"),
    [
        ("other", 1, "c", (0,), "nothing is registered"),
        ("r", 2, "c", (0,), "generation"),
        ("r", 1, "other", (0,), "another content"),
        ("r", 1, "c", (4,), "chunks 0 to 3"),
        ("r", 1, "c", (-1,), "chunks 0 to 3"),
        ("r", 1, "c", (), "chunks 0 to 3"),
    ],
)
def test_a_read_under_any_other_right_is_refused(
    registration: str, generation: int, content: str, wanted: tuple[int, ...], says: str
) -> None:
    answer = opened().begin(
        RegistrationId(registration), generation, ContentId(content), wanted, 100
    )
    assert isinstance(answer, Refusal)
    assert says in answer.reason


def test_closed_memory_refuses_at_once_and_is_quiet_when_the_last_access_ends() -> None:
    owner = opened()
    first, second = begun(owner), begun(owner)
    owner.close(R)
    assert isinstance(owner.begin(R, 1, C, (0,), 100), Refusal)
    owner.end(first)
    assert not owner.is_quiet(R)
    owner.end(second)
    assert owner.is_quiet(R)


def test_memory_cannot_be_opened_while_it_is_open_in_use_or_under_its_last_generation() -> None:
    owner = opened()
    access = begun(owner)
    for problem in ("is open already", "running accesses", "was used before"):
        with pytest.raises(IllegalStep, match=problem):
            owner.open(R, 1, C, SIZES, complete=True)
        if problem == "is open already":
            owner.close(R)
        elif problem == "running accesses":
            owner.end(access)
    owner.open(R, 2, C, SIZES, complete=True)
    begun(owner, generation=2)


def test_a_fence_that_is_given_up_lets_readers_in_again_and_the_next_one_waits_for_the_old_access_too() -> (
    None
):
    """G2: what began under the first generation still reads the memory that the second fence is
    about.
    """
    owner = opened(complete=False)
    owner.mark_available(R, 1, [(0, 5), (1, 6)])
    old = begun(owner)
    with pytest.raises(IllegalStep, match="is open already"):
        owner.reopen(R, 2)
    owner.close(R)
    with pytest.raises(IllegalStep, match="was open under generation 1"):
        owner.reopen(R, 1)
    owner.reopen(R, 2)
    assert owner.begin(R, 1, C, (0,), 100) == Refusal("the memory has changed its generation")
    new = begun(owner, generation=2)
    assert (new.chunks, new.digests, new.rest) == ((0, 1), (5, 6), (2, 3))
    owner.end(new)
    owner.close(R)
    assert not owner.is_quiet(R)
    with pytest.raises(IllegalStep, match="running accesses"):
        owner.open(R, 3, C, SIZES, complete=True)
    owner.end(old)
    assert owner.is_quiet(R)


def test_results_of_an_older_generation_are_dropped() -> None:
    owner = opened(complete=False)
    owner.close(R)
    owner.open(R, 2, C, SIZES, complete=False)
    assert not owner.mark_available(R, 1, [(0, 5)])
    assert owner.set_digest(R, 1, 0, 5) is None
    assert owner.digests(R, 1) is None
    assert owner.begin(R, 2, C, (0, 1, 2, 3), 100) == Wait()
    assert owner.digests(R, 2) == (None,) * 4


def test_the_first_digest_of_a_chunk_counts() -> None:
    owner = opened()
    assert owner.set_digest(R, 1, 0, 5) == 5
    assert owner.set_digest(R, 1, 0, 6) == 5
    assert owner.digest(R, 1, 0) == 5


@pytest.mark.parametrize("reopened", [False, True])
def test_the_first_digest_counts_for_who_reads_on_when_the_memory_is_closed(reopened: bool) -> None:
    owner = opened()
    access = begun(owner)
    assert access.digests[0] is None
    assert owner.set_digest(R, 1, access.chunks[0], 5) == 5  # another reader's
    owner.close(R)
    if reopened:
        owner.reopen(R, 2)
    assert owner.set_digest(R, 1, access.chunks[0], 6) == 5
    owner.end(access)
    if reopened:
        assert owner.set_digest(R, 1, access.chunks[0], 7) is None


def test_an_access_ends_once() -> None:
    owner = opened()
    access = begun(owner)
    owner.end(access)
    with pytest.raises(IllegalStep, match="has ended before"):
        owner.end(access)


def test_only_closed_and_quiet_memory_is_forgotten() -> None:
    owner = opened()
    with pytest.raises(IllegalStep):
        owner.forget(R)
    owner.close(R)
    owner.forget(R)
    assert isinstance(owner.begin(R, 1, C, (0,), 100), Refusal)


S = "selection"
SELECTED = (5, 6, 7)


def select(owner: Owner, generation: int = 1, name: str = S) -> bool:
    return owner.select(R, generation, name, SELECTED)


def test_a_selection_may_be_read_once_all_of_the_memory_is_there() -> None:
    owner = opened(complete=False)
    assert isinstance(owner.begin(R, 1, C, (0,), 100, S), Refusal)
    assert select(owner)
    assert owner.begin(R, 1, C, (0, 1, 2), 100, S) == Wait()
    owner.mark_available(R, 1, [(0, 10), (1, 11), (2, 12)])
    assert owner.begin(R, 1, C, (0, 1, 2), 100, S) == Wait()
    assert owner.has(R, 1, 9, S) == ()
    owner.mark_available(R, 1, [(3, 13)])
    access = owner.begin(R, 1, C, (0, 1, 2), 6, S)
    assert isinstance(access, Access)
    assert (access.chunks, access.rest, access.selection, access.digests) == (
        (0,),
        (1, 2),
        S,
        (None,),
    )
    assert owner.has(R, 1, 9, S) == ((0, 3),)
    owner.close(R)
    assert not owner.is_quiet(R)
    owner.end(access)
    assert owner.is_quiet(R)


def test_a_selection_of_memory_that_is_loaded_may_be_read_once_what_lies_under_it_is_there() -> (
    None
):
    owner = opened(complete=False)
    under = {0: [(0, 1)], 1: [(0, 1), (2, 2)], 2: [(1, 3)]}
    assert owner.select(R, 1, S, SELECTED, under.__getitem__)
    assert owner.begin(R, 1, C, (0, 1, 2), 100, S) == Wait()
    for chunk, found in ((0, (0,)), (2, (0,)), (3, (0, 1)), (1, (0, 1, 2))):
        owner.mark_available(R, 1, [(chunk, chunk)])
        access = owner.begin(R, 1, C, (0, 1, 2), 100, S)
        assert isinstance(access, Access)
        assert access.chunks == found


@pytest.mark.parametrize(
    ("name", "wrong"), [("accesses", 2), ("missing", 1), ("available", bytearray(2))]
)
def test_books_that_disagree_are_noticed(name: str, wrong: object) -> None:
    owner = opened()
    begun(owner)
    owner.check_invariants()
    setattr(owner._memories[R], name, wrong)
    with pytest.raises(InvariantBroken):
        owner.check_invariants()


def test_what_is_unloaded_is_read_no_more_and_keeps_its_digests() -> None:
    owner = opened(complete=False)
    assert owner.select(R, 1, S, SELECTED, lambda chunk: [(chunk, 1)])
    owner.mark_available(R, 1, [(chunk, 10 + chunk) for chunk in range(3)])
    owner.set_digest(R, 1, 0, 50, S)
    running = begun(owner, (0, 1))
    assert owner.unload(R) == {running.number}
    for selection in ("", S):
        assert owner.begin(R, 1, C, (0, 1), 100, selection) == Wait()
    assert owner.has(R, 1, 9) == ()
    assert (owner.digests(R, 1), owner.digests(R, 1, S)) == ((10, 11, 12, None), (50, None, None))
    owner.end(running)
    owner.check_invariants()
    owner.close(R)
    owner.reopen(
        R, 2
    )  # a fence that was given up: nothing is there under its new generation either
    assert owner.unload(R) == frozenset()
    assert owner.begin(R, 2, C, (0,), 100) == Wait()
    assert owner.unload(RegistrationId("another")) == frozenset()


def test_a_selections_digests_are_its_own() -> None:
    owner = Owner()
    owner.open(R, 1, C, SIZES, complete=True, tells=True)
    assert select(owner)
    assert owner.set_digest(R, 1, 0, 50, S) == 50
    assert owner.set_digest(R, 1, 0, 60, S) == 50
    assert owner.is_news(R, S)
    assert owner.set_digest(R, 1, 1, 51, S) == 51
    assert owner.take_made(R, S, if_all=True) == ([], False)
    assert owner.take_made(R, S) == ([(0, 50), (1, 51)], False)
    assert owner.set_digest(R, 1, 2, 52, S) == 52
    assert owner.take_made(R, S) == ([(2, 52)], True)
    assert (owner.digests(R, 1), owner.digests(R, 1, S)) == ((None,) * 4, (50, 51, 52))
    assert owner.take_made(R) == ([], False)
    assert owner.digests(R, 1, "another") is None
    assert select(owner)  # again: what is known of it stays
    assert owner.digests(R, 1, S) == (50, 51, 52)


def test_a_selection_ends_with_the_opening_of_its_memory_and_outlives_a_fence_that_was_given_up() -> (
    None
):
    owner = opened()
    assert select(owner)
    owner.close(R)
    assert not select(owner)
    owner.reopen(R, 2)
    assert isinstance(owner.begin(R, 2, C, (0,), 100, S), Access)
    owner = opened()
    assert select(owner)
    owner.close(R)
    owner.open(R, 2, C, SIZES, complete=True)
    assert isinstance(owner.begin(R, 2, C, (0,), 100, S), Refusal)
    assert not select(owner, generation=1)


def test_what_is_revoked_is_revoked_in_each_selection() -> None:
    owner = opened(complete=False)
    assert select(owner)
    owner.mark_available(R, 1, [(chunk, chunk) for chunk in range(4)])
    for chunk in (0, 1):
        owner.set_digest(R, 1, chunk, 50 + chunk, S)
    one, other = (owner.begin(R, 1, C, (chunk,), 100, S) for chunk in (0, 1))
    assert isinstance(one, Access)
    assert isinstance(other, Access)
    assert owner.revoke(R, 1, [2]) == {one.number, other.number}  # one of them may touch it
    assert owner.digests(R, 1, S) == (None, None, None)
    assert owner.has(R, 1, 9, S) == ()
    owner.check_invariants()


def test_a_selection_is_forgotten_although_it_is_read() -> None:
    owner = opened()
    assert select(owner)
    assert select(owner, name="another")
    access = owner.begin(R, 1, C, (0,), 1, S)
    assert isinstance(access, Access)
    owner.deselect(S)
    assert owner.selections(R) == ("another",)
    assert owner.set_digest(R, 1, 0, 5, S) is None
    assert owner.revoke(R, 1, [3]) == {access.number}  # nobody knows any more what it touches
    owner.end(access)
    assert owner.is_quiet(R)


class OwnerMachine(RuleBasedStateMachine):
    """Against a model of what was opened: no access ever covers a chunk that was not verified under
    its generation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owner = Owner()
        self.generation = 0
        self.is_open = False
        self.available: set[int] = set()
        self.running: list[Access] = []

    @precondition(lambda self: not self.is_open and not self.running)
    @rule(complete=st.booleans())
    def open(self, complete: bool) -> None:
        self.generation += 1
        self.owner.open(R, self.generation, C, SIZES, complete=complete)
        self.is_open = True
        self.available = set(range(4)) if complete else set()

    @precondition(lambda self: not self.is_open and self.generation)
    @rule()
    def reopen(self) -> None:
        self.generation += 1
        self.owner.reopen(R, self.generation)
        self.is_open = True

    @rule()
    def close(self) -> None:
        self.owner.close(R)
        self.is_open = False

    @rule(chunk=st.integers(0, 3), lag=st.integers(0, 1))
    def mark(self, chunk: int, lag: int) -> None:
        taken = self.owner.mark_available(R, self.generation - lag, [(chunk, chunk)])
        assert taken == (self.is_open and lag == 0)
        if taken:
            self.available.add(chunk)

    @rule(wanted=st.permutations(range(4)), bytes_max=st.integers(1, 100), lag=st.integers(0, 1))
    def begin(self, wanted: list[int], bytes_max: int, lag: int) -> None:
        answer = self.owner.begin(R, self.generation - lag, C, wanted, bytes_max)
        if not self.is_open or lag:
            assert isinstance(answer, Refusal)
        elif not self.available:
            assert answer == Wait()
        else:
            assert isinstance(answer, Access)
            assert set(answer.chunks) <= self.available
            assert sorted(answer.chunks + answer.rest) == [0, 1, 2, 3]
            self.running.append(answer)

    @rule(lag=st.integers(0, 1))
    def select(self, lag: int) -> None:
        assert select(self.owner, self.generation - lag) == (self.is_open and lag == 0)

    @rule(wanted=st.permutations(range(3)), bytes_max=st.integers(1, 20))
    def begin_selected(self, wanted: list[int], bytes_max: int) -> None:
        answer = self.owner.begin(R, self.generation, C, wanted, bytes_max, S)
        there = set(range(3)) if self.available == set(range(4)) else set[int]()
        if not self.is_open or S not in self.owner.selections(R):
            assert isinstance(answer, Refusal)
        elif not there:
            assert answer == Wait()
        else:
            assert isinstance(answer, Access)
            assert set(answer.chunks) <= there
            self.running.append(answer)

    @precondition(lambda self: self.is_open)
    @rule(chunk=st.integers(0, 3))
    def revoke(self, chunk: int) -> None:
        found = self.owner.revoke(R, self.generation, [chunk])
        touched = [
            access.number for access in self.running if access.selection or chunk in access.chunks
        ]
        assert found == set(touched)
        self.available.discard(chunk)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.owner.end(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @invariant()
    def books_agree(self) -> None:
        self.owner.check_invariants()
        assert self.owner.is_quiet(R) == (not self.running)


TestOwnerMachine = OwnerMachine.TestCase
