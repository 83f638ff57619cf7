"""Which chunks of an archived version are loaded next, and how long it keeps its room."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from tensorhub.model.accesses import Refusal
from tensorhub.worker import loading
from tensorhub.worker.loading import IDLE_S, RETRY_S, TURN_S, Loading

CHUNKS = 20
NO_BUCKET = Refusal("no bucket")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch has 3 chunks, and 5 are read ahead."""
    monkeypatch.setattr(loading, "BATCH_BYTES", 3)
    monkeypatch.setattr(loading, "AHEAD_BYTES", 5)


def made() -> Loading:
    return Loading([1] * CHUNKS)


def load_all(made: Loading, now: float = 0.0) -> list[list[int]]:
    """Read what it wants, until it wants nothing."""
    batches = []
    while batch := made.take(now):
        made.arrived(batch, now)
        batches.append(batch)
    return batches


def test_what_is_asked_for_comes_first_and_then_what_follows_the_newest() -> None:
    machine = made()
    assert not machine.has_more(0)
    assert machine.want([(8, 2)], 0) is None
    assert machine.want([(4, 2)], 0) is None
    assert load_all(machine) == [[4, 8, 9], [5], [6, 7, 10]]
    assert machine.want([(8, 2)], 0) is None
    assert load_all(machine) == [[11, 12, 13], [14]]
    assert not machine.has_more(0)


def test_what_is_on_its_way_is_asked_for_once() -> None:
    machine = made()
    machine.want([(0, 3)], 0)
    assert machine.take(0) == [0, 1, 2]
    machine.want([(0, 4)], 0)
    assert machine.take(0) == [3]


def test_a_chunk_larger_than_a_batch_is_read_alone() -> None:
    machine = Loading([10, 10])
    machine.want([(0, 2)], 0)
    assert [machine.take(0), machine.take(0), machine.take(0)] == [[0], [1], []]


def test_what_cannot_be_read_is_told_for_a_while_and_then_tried_again() -> None:
    machine = made()
    machine.want([(0, 2)], 0)
    machine.failed(machine.take(0), NO_BUCKET, 0)
    assert not machine.has_more(0)  # nor is anything read ahead
    assert machine.want([(1, 1)], 1) == NO_BUCKET
    assert machine.want([(5, 1)], 1) is None
    assert machine.take(1) == [5]
    assert machine.want([(1, 1)], RETRY_S) is None
    batch = machine.take(RETRY_S)
    assert batch == [1]
    machine.arrived(batch, RETRY_S)
    assert machine.want([(1, 1)], 1) is None
    machine.emptied()
    machine.want([(0, 1)], RETRY_S)
    assert load_all(machine, RETRY_S) == [[0], [1, 2, 3], [4, 5]]  # it is read ahead again


def test_a_read_for_nothing_is_made_again_when_it_is_asked_for() -> None:
    machine = made()
    machine.want([(0, 1)], 0)
    machine.returned(machine.take(0))
    machine.want([(0, 1)], 0)
    assert machine.take(0) == [0]


def test_a_version_keeps_its_room_as_long_as_it_is_used_but_for_one_turn_at_most() -> None:
    machine = made()

    def left_s(now: float, *, asked_at: float = 0.0, is_read: bool = False) -> float:
        return machine.turn_left_s(asked_at, now, is_read=is_read)

    assert left_s(0) == 0
    machine.want([(0, 1)], 1)
    assert left_s(100) > 0  # it has nothing yet, however long that takes
    machine.arrived(machine.take(100), 100)
    machine.want([(0, 1)], 100)
    assert left_s(100) == pytest.approx(IDLE_S)
    machine.want([(5, 1)], 100)
    assert machine.take(100) == [5]
    assert left_s(100 + IDLE_S) == 0  # that it loads more keeps nothing
    assert left_s(101, is_read=True) == pytest.approx(IDLE_S)  # a slow reader, inside an access
    assert left_s(100 + TURN_S, is_read=True) == 0
    assert left_s(100 + TURN_S, asked_at=99 + TURN_S, is_read=True) > 0
    machine.emptied()
    assert left_s(200) == 0
    machine.want([(0, 1)], 200)
    assert machine.take(200) == [0]
    assert left_s(300) > 0  # it has nothing again


Step = tuple[str, int, int]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["want", "take", "arrive", "fail", "return", "empty"]),
            st.integers(0, CHUNKS - 1),
            st.integers(1, 4),
        )
    )
)
def test_no_chunk_is_read_twice_and_each_that_is_asked_for_comes(steps: Iterable[Step]) -> None:
    machine, now = made(), 0.0
    there, on_its_way = set[int](), list[list[int]]()
    for step, first, count in steps:
        now += 1
        match step:
            case "want":
                machine.want([(first, min(count, CHUNKS - first))], now)
            case "take":
                batch = machine.take(now)
                assert there.isdisjoint(batch)
                assert all(set(batch).isdisjoint(other) for other in on_its_way)
                on_its_way += [batch] if batch else []
            case "empty" if not on_its_way:
                machine.emptied()
                there.clear()
            case "arrive" if on_its_way:
                there.update(on_its_way[0])
                machine.arrived(on_its_way.pop(0), now)
            case "fail" if on_its_way:
                machine.failed(on_its_way.pop(0), Refusal("no"), now)
            case "return" if on_its_way:
                machine.returned(on_its_way.pop(0))
    for batch in on_its_way:
        machine.arrived(batch, now)
        there.update(batch)
    now += 2 * RETRY_S
    assert machine.want([(0, CHUNKS)], now) is None
    for batch in load_all(machine, now):
        assert there.isdisjoint(batch)
        there.update(batch)
    assert there == {*range(CHUNKS)}
