"""What is said to help: with figures that follow from other updates, and nothing that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from tensorhub.flows.what_if import HELPS, SAID_MAX, changes, helping
from tensorhub.observed import PART_NAMES, Explanation, LinkTiming, Part
from tensorhub.types import OpKey

MIB = 2**20
SITES = {"reader": "paris", "beside": "paris", "trainer": "london"}
PEERED = {"link", "loss", "source busy", "source disk", "upstream", "reader"}


def update(
    parts: dict[str, float],
    *,
    reader: str = "reader",
    source: str = "trainer",
    site: str = "",
    number: int = 1,
    nbytes: int = 100 * MIB,
    came: int | None = None,
    codec_s: float = 0.0,
    transport: str = "tcp",
    kind: str = "live",
    call: str = "update",
) -> Explanation:
    """`parts`: seconds by name. `came`: bytes of the one link, of `nbytes` of the version."""
    found = tuple(
        Part(
            name,
            seconds,
            reader,
            source if name in PEERED else "",
            "2.0 other readers at a time" if name == "source busy" else "",
        )
        for name, seconds in parts.items()
    )
    size = nbytes if came is None else came
    link = LinkTiming("lease", source, transport, kind, size, 1.0, codec_s=codec_s, site=site)
    key = OpKey("m", reader, 1, number)
    return Explanation(
        "m",
        1,
        reader,
        call,
        key,
        0.0,
        sum(parts.values()),
        "",
        found,
        (link,) if size else (),
        nbytes=nbytes,
    )


def seconds_of(name: str, found: Explanation, *others: Explanation) -> float:
    (seconds,) = [each.seconds for each in changes(found, others, SITES) if each.name == name]
    return seconds


FAR = update({"control": 0.1, "link": 1.8, "digest": 0.1}, site="london")
NEAR = update({"link": 0.4}, reader="beside", source="other", site="paris", number=2)


def test_a_seed_gives_what_another_worker_of_the_site_gave() -> None:
    assert seconds_of("seed", FAR, NEAR) == pytest.approx(0.1 + 0.4)
    text = f"with a seed in paris, at {100 * MIB * 8e-6 / 0.4 / 1000:.3g} Gbit/s: 0.5 s"
    assert helping(FAR, [NEAR], SITES) == (text,)


def test_the_readers_own_work_bounds_what_a_better_source_brings() -> None:
    slow_reader = update({"link": 1.2, "digest": 0.8}, site="london")
    assert seconds_of("seed", slow_reader, NEAR) == pytest.approx(0.8)


def test_nothing_is_said_of_rates_that_nothing_shows() -> None:
    elsewhere = update({"link": 0.1}, reader="trainer", source="other", site="london", number=3)
    assert helping(FAR, [elsewhere, FAR], SITES) == ()
    assert helping(FAR) == ()


def test_a_source_without_other_readers_gives_the_one_reader_all() -> None:
    busy = update({"control": 0.2, "link": 0.5, "source busy": 1.0})
    assert seconds_of("readers", busy) == pytest.approx(0.2 + 0.5)
    known = update({"link": 0.9}, number=2)  # more this reader's link has never carried
    assert seconds_of("readers", busy, known) == pytest.approx(0.2 + 0.9)


def test_a_second_source_helps_where_the_source_is_slow_and_not_the_reader() -> None:
    slow = update({"control": 0.2, "link": 2.0})
    fast = update({"link": 0.5}, number=2)
    others = update({"link": 1.9}, reader="beside", number=3)
    assert seconds_of("second source", slow, fast, others) == pytest.approx(0.2 + 0.5)
    quick = update({"link": 0.5}, reader="beside", number=3)
    assert helping(slow, [fast, quick], SITES) == ()
    # what its own link carries is not known
    assert not [each for each in changes(slow, [others]) if each.name == "second source"]


@pytest.mark.parametrize(
    ("change", "part"), [("hook", "before_write"), ("ranks", "ranks"), ("store", "store")]
)
def test_what_is_waited_for_is_taken_off(change: str, part: str) -> None:
    found = update({part: 1.0, "link": 0.5})
    assert seconds_of(change, found) == pytest.approx(0.5)


def test_deltas_are_offered_with_the_ratio_that_was_measured() -> None:
    found = update({"control": 0.1, "link": 2.0})
    deltas = update(
        {"link": 0.5, "codec": 0.3}, reader="beside", number=2, came=25 * MIB, codec_s=0.3
    )
    assert seconds_of("deltas", found, deltas) == pytest.approx(0.1 + 0.5)
    assert any("deltas, 25% of the bytes" in text for text in helping(found, [deltas], SITES))
    slow_codec = update(
        {"link": 0.5, "codec": 1.5}, reader="beside", number=2, came=25 * MIB, codec_s=1.5
    )
    assert seconds_of("deltas", found, slow_codec) == pytest.approx(0.1 + 1.5)


def test_a_prefetch_leaves_what_it_left_to_another_update() -> None:
    found = update({"control": 0.1, "before_write": 0.2, "link": 2.0, "others": 0.1})
    ahead = update({"control": 0.3, "copy": 0.05}, reader="beside", number=2, came=0)
    assert seconds_of("ahead", found, ahead) == pytest.approx(0.1 + 0.2 + 0.1 + 0.05)
    assert not [each for each in changes(found) if each.name == "ahead"]
    empty = update({"copy": 0.05}, reader="beside", number=2, nbytes=0)
    assert seconds_of("ahead", found, ahead, empty) == seconds_of("ahead", found, ahead)
    for mine, other in (
        (replace(found, call="fetch"), ahead),
        (found, replace(ahead, call="fetch")),
    ):
        assert not [each for each in changes(mine, [other]) if each.name == "ahead"]


def test_an_archive_is_read_directly_as_fast_as_by_another_worker() -> None:
    found = update({"control": 0.1, "link": 2.0}, source="archive", kind="archive")
    direct = update(
        {"link": 0.4},
        reader="beside",
        source="archive",
        kind="archive",
        transport="archive",
        number=2,
    )
    assert seconds_of("direct", found, direct) == pytest.approx(0.5)
    assert not [each for each in changes(direct, [found]) if each.name == "direct"]


def test_twice_the_connections_lose_twice_as_many_segments_at_twice_the_rate() -> None:
    found = update({"control": 0.1, "loss": 2.0}, site="london")
    assert seconds_of("connections", found) == pytest.approx(1.1)


def test_at_most_three_are_said_the_best_first_and_none_that_helps_little() -> None:
    parts = {"ranks": 1.0, "before_write": 2.0, "store": 3.0, "loss": 8.0, "link": 0.1}
    said = helping(update(parts))
    assert len(said) == SAID_MAX
    assert [text.split(":")[0].split(",")[0] for text in said] == [
        "with twice the WAN connections",
        "with a faster store",
        "without before_write",
    ]
    assert helping(update({"before_write": 0.09, "link": 0.91})) == ()


def test_hostile_names_are_short_text_and_a_part_without_a_link_is_no_read() -> None:
    found = update({"ranks": 1.0, "link": 0.5}, reader="x" * 10_000)
    assert all(len(text) < 200 for text in helping(found))
    assert helping(replace(FAR, links=()), [NEAR], SITES) == ()
    assert helping(replace(FAR, parts=(), seconds=0.0), [NEAR], SITES) == ()


seconds = st.floats(0.0, 1e6)
updates = st.builds(
    update,
    st.dictionaries(st.sampled_from(sorted(PART_NAMES)), seconds, max_size=8),
    reader=st.sampled_from(["reader", "beside"]),
    source=st.sampled_from(["trainer", "other"]),
    site=st.sampled_from(["", "london", "paris"]),
    number=st.integers(1, 5),
    nbytes=st.integers(0, 2**40),
    came=st.integers(0, 2**40) | st.none(),
    codec_s=seconds,
    transport=st.sampled_from(["tcp", "archive"]),
    kind=st.sampled_from(["live", "archive"]),
    call=st.sampled_from(["update", "fetch"]),
)


@given(updates, st.lists(updates, max_size=4))
def test_whatever_workers_claim_no_change_costs_time_or_takes_less_than_none(
    found: Explanation, others: list[Explanation]
) -> None:
    assert all(0.0 <= each.seconds <= found.seconds for each in changes(found, others, SITES))
    said = helping(found, others, SITES)
    assert len(said) <= SAID_MAX
    assert (
        not said
        or min(each.seconds for each in changes(found, others, SITES)) < HELPS * found.seconds
    )


@given(st.floats(0.01, 10.0), st.floats(0.01, 10.0), st.floats(0.0, 2.0))
def test_a_faster_seed_helps_at_least_as_much(one_s: float, other_s: float, own_s: float) -> None:
    found = update({"link": 5.0, "digest": own_s}, site="london")
    near = [
        replace(NEAR, parts=update({"link": s}, reader="beside", source="other").parts)
        for s in sorted((one_s, other_s))
    ]
    fast, slow = (seconds_of("seed", found, each) for each in near)
    assert fast <= slow
