"""Which connection makes room: by a model that sorts all of them each time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from tensorhub.runtime.control.waiting import Waiting

ADDRESSES = st.sampled_from("abc")


@given(st.lists(st.tuples(st.booleans(), ADDRESSES, st.integers(0, 20))))
def test_the_oldest_of_an_address_with_most_goes_first(
    steps: list[tuple[bool, str, int]],
) -> None:
    waiting, model = Waiting[int](), dict[int, str]()
    for number, (adds, address, which) in enumerate(steps):
        if adds:
            waiting.add(number, address)
            model[number] = address
        else:
            waiting.discard(which)
            model.pop(which, None)
        counts = Counter(model.values())
        assert (list(waiting), waiting.addresses) == (list(model), frozenset(counts))
        first = waiting.first()
        if first is None:
            assert not model
            continue
        assert counts[model[first]] == max(counts.values())
        assert first == min(each for each in model if model[each] == model[first])


def test_one_that_waits_alone_stays_while_another_address_has_more() -> None:
    waiting = Waiting[str]()
    waiting.add("alone", "here")
    for number in range(100):
        waiting.add(f"{number}", f"flood {number % 40}")
    for _ in range(60):
        waiting.discard(waiting.first() or "")
    assert "alone" in waiting
