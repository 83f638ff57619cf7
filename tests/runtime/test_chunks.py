"""What is told from how long digests take."""

from __future__ import annotations

from tensorhub.transport.streaming_digest import DIGEST_BYTES_PER_S, SLACK_S, GilWatch


def test_another_thread_keeps_the_gil_if_two_digests_in_a_row_take_long() -> None:
    watch, nbytes = GilWatch(), 2**20
    fast, slow = nbytes / DIGEST_BYTES_PER_S, nbytes / DIGEST_BYTES_PER_S + 2 * SLACK_S
    seen = []
    for seconds in (fast, slow, fast, slow, slow, slow, fast):
        watch.digested(nbytes, seconds)
        seen.append(watch.is_contended)
    assert seen == [False, False, False, False, True, True, False]
