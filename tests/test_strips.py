"""Strips: their shortest form has the same bytes in the same order, and no walk is needed to see
where they lie.
"""

from __future__ import annotations

from hypothesis import given, strategies as st

from tensorhub.model.strips import Strip, beyond, shortest, straight

LOOPS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=3).map(tuple)
STRIPS = st.builds(
    Strip,
    st.integers(0, 3),
    st.integers(0, 30),
    st.integers(-1, 1),
    st.integers(-5, 12),
    st.integers(1, 4),
    LOOPS,
    st.integers(1, 5),
)


def bytes_of(strip: Strip) -> list[tuple[int, int]]:
    return [(region, at + n) for region, at in strip.places() for n in range(strip.run)]


@given(STRIPS)
def test_the_shortest_form_has_the_same_bytes_in_the_same_order(strip: Strip) -> None:
    short = shortest(strip)
    assert bytes_of(short) == bytes_of(strip)
    assert short.runs <= strip.runs
    assert short.nbytes == strip.nbytes == len(bytes_of(strip))
    assert shortest(short) == short


def test_what_is_contiguous_is_one_run() -> None:
    assert shortest(Strip(2, 5, 0, 24, 3, ((2, 12), (3, 4)), 4)) == straight(2, 5, 72)
    assert shortest(Strip(2, 5, 0, 40, 3, ((2, 20), (3, 4)), 4)) == Strip(
        2, 5, 0, 0, 1, ((6, 20),), 12
    )
    assert shortest(Strip(2, 5, 1, 0, 3, ((2, 4),), 4)) == Strip(2, 5, 1, 0, 3, (), 8)
    backwards = Strip(2, 5, 0, -4, 2, (), 4)
    assert shortest(backwards) == backwards


@given(STRIPS, st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_beyond_says_what_a_walk_says(strip: Strip, sizes: list[int]) -> None:
    places = [
        0 <= region < len(sizes) and at >= 0 and at + strip.run <= sizes[region]
        for region, at in strip.places()
    ]
    assert beyond(strip, sizes) == (not all(places))
