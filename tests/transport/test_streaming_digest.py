"""Pieces that are moved and digested: every byte once, in order, and each chunk's own digest."""

from __future__ import annotations

import xxhash
from hypothesis import given, strategies as st

from tensorhub.protocol.blocking import BUFFERS_MAX
from tensorhub.transport.streaming_digest import (
    DIGEST_BYTES_PER_S,
    SLACK_S,
    GilWatch,
    StreamingDigests,
    cut,
)

SIZES = st.lists(st.integers(0, 5000), max_size=30)


@given(SIZES, st.integers(1, 3000))
def test_pieces_are_all_bytes_in_order_and_digests_are_of_whole_chunks(
    sizes: list[int], call_bytes: int
) -> None:
    views = [memoryview(bytes([number % 251]) * size) for number, size in enumerate(sizes)]
    digests, moved = StreamingDigests(enumerate(views)), b""
    for call in cut(views, call_bytes):
        assert call
        assert all(view.nbytes for view in call)
        assert sum(view.nbytes for view in call) <= call_bytes
        digests.go_on([view.nbytes for view in call])
        moved += b"".join(call)
    assert moved == b"".join(views)
    assert digests.made == {
        number: xxhash.xxh3_64_intdigest(view) for number, view in enumerate(views)
    }


def test_a_call_takes_no_more_buffers_than_the_kernel_does() -> None:
    calls = list(cut([memoryview(b"x")] * (2 * BUFFERS_MAX + 1)))
    assert [len(call) for call in calls] == [BUFFERS_MAX, BUFFERS_MAX, 1]


def test_another_thread_keeps_the_gil_if_two_digests_in_a_row_take_long() -> None:
    watch, nbytes = GilWatch(), 2**20
    fast, slow = nbytes / DIGEST_BYTES_PER_S, nbytes / DIGEST_BYTES_PER_S + 2 * SLACK_S
    seen = []
    for seconds in (fast, slow, fast, slow, slow, slow, fast):
        watch.digested(nbytes, seconds)
        seen.append(watch.is_contended)
    assert seen == [False, False, False, False, True, True, False]
