"""Whatever the versions, their chains, and what is kept: no crash leaves a visible version that
lacks an object, and what is wanted or in use stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from tensorhub.archives.catalogue import Key
from tensorhub.archives.retention import Entry, Keep, decide
from tensorhub.errors import InvalidValue


def entry(
    number: int, base: int | None = None, turn: int = 0, nbytes: int | None = None, lineage: int = 0
) -> Entry:
    key = Key(lineage, number)
    name = f"{key}.{turn}"
    size = nbytes if nbytes is not None else 100 if base is None else 2
    return Entry(
        f"m/{name}",
        key,
        turn,
        None if base is None else Key(lineage, base),
        {f"o/{name}/a": size, f"o/{name}/b": 0},
        frozenset([f"p/{number % 3}", "p/all"]),
        100,
    )


def numbers(keys: Collection[Key]) -> list[int]:
    return sorted(key.number for key in keys)


def chains(*lengths: int) -> list[Entry]:
    """Anchors, each with so many deltas behind it."""
    found: list[Entry] = []
    for length in lengths:
        first = len(found)
        found.append(entry(first))
        found += [entry(first + n, first + n - 1) for n in range(1, length + 1)]
    return found


def test_the_newest_stay_with_what_they_need() -> None:
    decision = decide(chains(3, 3, 3), Keep(2))
    assert decision.manifests == tuple(f"m/0-{n}.0" for n in range(7, -1, -1))
    assert "p/all" not in decision.objects  # others need it
    decision = decide(chains(3, 3), Keep(2))
    assert numbers(decision.held) == [4, 5]
    assert decision.manifests == tuple(f"m/0-{n}.0" for n in range(3, -1, -1))


def test_multiples_and_pinned_ones_stay() -> None:
    decision = decide(chains(*[0] * 10), Keep(1, every=4, pinned=frozenset([Key(0, 3), Key(7, 7)])))
    gone = {each.removeprefix("m/0-").removesuffix(".0") for each in decision.manifests}
    assert gone == {"1", "2", "5", "6", "7"}


def test_a_rollback_makes_later_numbers_of_the_old_lineage_older() -> None:
    entries = [entry(1), entry(2), entry(3), entry(2, lineage=1)]
    assert decide(entries, Keep(1)).manifests == ("m/0-3.0", "m/0-2.0", "m/0-1.0")


def test_a_version_that_holds_more_than_an_anchor_becomes_one() -> None:
    # 150 bytes in deltas below it
    entries = [entry(0), *[entry(n, n - 1, nbytes=30) for n in range(1, 7)]]
    decision = decide(entries, Keep(1))
    assert numbers(decision.anchor_first) == [6]
    assert decision.manifests == ()
    again = [*entries, entry(6, turn=1)]
    decision = decide(again, Keep(1))
    assert decision.anchor_first == ()
    assert decision.manifests == ("m/0-6.0", *[f"m/0-{n}.0" for n in range(5, -1, -1)])
    assert decide([entry(6, turn=1)], Keep(1)).manifests == ()


def test_of_a_version_that_was_stored_anew_the_older_manifest_goes_first() -> None:
    """A removal that ends in the middle brings no older manifest back."""
    entries = [entry(1), entry(1, turn=1), entry(2)]
    assert decide(entries, Keep(1)).manifests == ("m/0-1.0", "m/0-1.1")


def test_cheap_chains_are_left_alone() -> None:
    decision = decide(chains(20), Keep(1))
    assert (decision.anchor_first, decision.manifests) == ((), ())
    assert len(decision.held) == 20


def test_what_a_reader_uses_stays() -> None:
    entries = [*chains(2), entry(2, turn=1)]  # the reader reads 2 as a delta still
    uses = {"m/0-0.0", "m/0-1.0", "m/0-2.0"}
    assert decide(entries, Keep(1), uses).manifests == ()
    assert decide(entries, Keep(1)).manifests == ("m/0-2.0", "m/0-1.0", "m/0-0.0")


def test_what_a_reader_uses_keeps_nothing_else() -> None:
    entries = [*chains(2), entry(1, turn=1), entry(3)]  # it began before 1 was stored anew
    uses = {"m/0-0.0", "m/0-1.0", "m/0-2.0"}
    assert decide(entries, Keep(1), uses).manifests == ("m/0-1.1",)


@pytest.mark.parametrize(("latest", "every"), [(0, 0), (-1, 1), (1, -1)])
def test_keeping_nothing_is_refused(latest: int, every: int) -> None:
    with pytest.raises(InvalidValue, match="keep the newest 1 or more"):
        Keep(latest, every)


# --------------------------------------------------------------------------------------------------
# a store that crashes


@dataclass
class Kept:
    """What is left of entries: manifests and objects, by path."""

    entries: dict[str, Entry]
    objects: set[str]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Kept:
        objects = {path for each in entries for path in (*each.objects, *each.parts)}
        return cls({each.path: each for each in entries}, objects)

    def delete(self, path: str) -> None:
        self.entries.pop(path, None)
        self.objects.discard(path)

    def visible(self) -> dict[Key, Entry]:
        return {each.key: each for each in sorted(self.entries.values(), key=lambda e: e.turn)}

    def check(self) -> None:
        """Every visible version can be read."""
        visible = self.visible()
        for each in visible.values():
            at: Entry | None = each
            while at is not None:
                assert self.objects.issuperset((*at.objects, *at.parts)), at
                at = None if at.base is None else visible[at.base]


@st.composite
def archives(draw: st.DrawFn) -> list[Entry]:
    entries: list[Entry] = []
    keys: list[Key] = []
    for key in sorted(
        draw(st.sets(st.builds(Key, st.integers(0, 1), st.integers(0, 12)), min_size=1))
    ):
        base = draw(st.sampled_from([None, *keys]))
        size = draw(st.sampled_from([1, 30, 200])) if base is not None else 100
        name = f"{key}.0"
        parts = draw(st.sets(st.sampled_from(["p/1", "p/2", "p/3"])))
        entries.append(Entry(f"m/{name}", key, 0, base, {f"o/{name}": size}, frozenset(parts), 100))
        if base is not None and draw(st.booleans()):  # stored anew
            entries.append(
                Entry(f"m/{key}.1", key, 1, None, {f"o/{key}.1": 100}, frozenset(parts), 100)
            )
        keys.append(key)
    return entries


@st.composite
def keeps(draw: st.DrawFn, entries: Sequence[Entry]) -> Keep:
    pinned = draw(st.sets(st.sampled_from([each.key for each in entries])))
    return Keep(draw(st.integers(1, 4)), draw(st.integers(0, 5)), frozenset(pinned))


@given(st.data())
def test_any_crash_leaves_whole_versions(data: st.DataObject) -> None:
    entries = data.draw(archives())
    keep = data.draw(keeps(entries))
    visible = Kept.of(entries).visible()
    in_use = set[str]()
    for key in data.draw(st.sets(st.sampled_from(sorted(visible)))):
        at: Key | None = key
        while at is not None:
            in_use.add(visible[at].path)
            at = visible[at].base
    decision = decide(entries, keep, in_use)
    kept = Kept.of(entries)
    used = {
        path for each in entries if each.path in in_use for path in (*each.objects, *each.parts)
    }
    for path in (*decision.manifests, *decision.objects):
        kept.delete(path)
        kept.check()
        assert in_use <= kept.entries.keys()
        assert used <= kept.objects
    left = kept.visible()
    assert keep.chosen(visible) == keep.chosen(visible) & left.keys()
    assert decision.held == left.keys() - keep.chosen(visible) - {None}
    needed = {p for each in kept.entries.values() for p in (*each.objects, *each.parts)}
    assert kept.objects == needed  # nothing is left over
    after = decide([*kept.entries.values()], keep, in_use)
    assert after.manifests == ()


@given(st.data())
def test_storing_anew_frees_at_last(data: st.DataObject) -> None:
    """When no wanted version has to be stored anew, what is held for one is at most two anchors."""
    entries = data.draw(archives())
    keep = data.draw(keeps(entries))
    for _ in range(20):
        decision = decide(entries, keep)
        if not decision.anchor_first:
            break
        for key in decision.anchor_first:
            turn = max(each.turn for each in entries if each.key == key) + 1
            name = f"{key}.{turn}"
            entries.append(
                Entry(f"m/{name}", key, turn, None, {f"o/{name}": 100}, frozenset(), 100)
            )
    else:
        raise AssertionError("it never ends")
    gone = set(decision.manifests)
    held = [each for each in entries if each.path not in gone and each.key in decision.held]
    assert sum(each.nbytes for each in held) <= 200 * len(keep.chosen(each.key for each in entries))
