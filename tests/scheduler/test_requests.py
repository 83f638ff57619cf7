"""What one lane asks for, and which of what arrives is good."""

from __future__ import annotations

import pytest

from tensorhub.scheduler.pull import Pull
from tensorhub.scheduler.requests import Requests
from tensorhub.types import LeaseId

LEASE = LeaseId("lease")


def asking(chunks: int = 6) -> tuple[Pull, Requests]:
    pull = Pull([1] * chunks)
    pull.add_source(LEASE, complete=True)
    return pull, Requests(pull, LEASE)


def test_two_batches_are_open_at_a_time() -> None:
    _, requests = asking()
    assert requests.ask(2) == [(0, 1), (2, 3)]
    assert requests.ask(2) == []
    requests.arrived([(0, None)], [])
    assert requests.ask(2) == []
    requests.arrived([(1, None)], [])
    assert requests.ask(2) == [(4, 5)]
    assert requests.asked == [{2, 3}, {4, 5}]


def test_what_came_with_another_digest_and_what_is_lacking_is_wanted_again() -> None:
    pull, requests = asking(4)
    requests.ask(4)
    requests.arrived([(0, 7)], [1])
    assert not requests.lacked([2], [(0, 2)], 0.0)
    assert requests.asked == [{3}]
    assert (pull.chunks_verified, pull.retries, pull.in_flight(LEASE)) == (1, 1, frozenset({3}))
    pull.check_invariants()


@pytest.mark.parametrize(
    ("named", "made", "published", "is_good"),
    [
        (5, 5, {}, True),
        (5, 6, {}, False),  # damaged
        (5, 5, {0: 6}, False),  # not as published, whatever its source says
        (6, 6, {0: 6}, True),
        (None, 5, {}, False),  # its source has no digest of what has one
    ],
)
def test_a_chunk_is_good_with_its_digest_which_is_the_published_one(
    named: int | None, made: int, published: dict[int, int], is_good: bool
) -> None:
    good, bad = Requests.sort_out([(0, named)], {0: made}, published, is_digested=True)
    assert (good, bad) == (([(0, named)], []) if is_good else ([], [0]))


def test_without_digests_whatever_arrives_is_good() -> None:
    assert Requests.sort_out([(0, None), (1, 3)], {}, {}, is_digested=False) == (
        [(0, None), (1, 3)],
        [],
    )


def test_a_source_that_never_gets_what_it_lacks_is_given_up() -> None:
    pull = Pull([1] * 3)
    pull.add_source(LEASE, complete=False)
    requests = Requests(pull, LEASE, patience_s=5.0)
    for now in (1.0, 4.0, 6.0):
        (batch,) = requests.ask(3)
        assert not requests.lacked(batch, [], now)
    requests.ask(1)
    requests.arrived([(0, None)], [])  # it gets on
    for now in (7.0, 12.0):
        (batch,) = requests.ask(3)
        assert not requests.lacked(batch, [(0, 1)], now)
    (batch,) = requests.ask(3)
    assert "5 s" in requests.lacked(batch, [(0, 1)], 12.1)


def test_a_source_is_not_given_up_for_what_another_one_is_asked_for() -> None:
    """R9: readers that fill from one another have their turns; so each of them lacks the rest for
    long.
    """
    pull = Pull([1])
    other = LeaseId("other")
    for lease in (LEASE, other):
        pull.add_source(lease, complete=False)
    mine, others = (Requests(pull, lease, patience_s=5.0) for lease in (LEASE, other))
    for now in (0.0, 4.0, 8.0, 12.0):
        for requests, idle in ((mine, others), (others, mine)):
            assert requests.ask(1) == [(0,)]
            assert idle.ask(1) == []
            assert not requests.lacked([0], [], now)
