"""The incremental check is sound: it looks at all that a step has changed, and finds there whatever
the full check finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from random import Random

import pytest

from tensorhub.coordinator import Action, Coordinator, Event, invariants
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import (
    Group,
    Holding,
    Member,
    Noted,
    Operation,
    RankPart,
    Withdrawal,
)
from tensorhub.coordinator.layout_holdings import LayoutHoldings
from tensorhub.machine import InvariantBroken, Stateful
from tensorhub.testing import StepwiseCluster
from tensorhub.testing.simulated import run_seed

Step = Callable[[Coordinator, Event, float], list[Action]]
Thing = Noted | Holding | RankPart | Withdrawal
ENTITIES = (Stateful, Holding, Member, Group)
UNCHECKED = {
    "story",
    "heard_at",
    "answers",
    "unbound",
    "restless",
    "flexible",
    "starving",
    "filed_in",
    "withdrawals",
}  # of no promise, or checked of another entity


def simulate(seed: int) -> None:
    """A run in which much happens."""
    run_seed(seed, events=250)


# ------------------------------------------------------------------------------------------- what a
# step has changed


def names(of: type, known: dict[type, list[str]] = {}) -> list[str]:  # noqa: B006 - what is found once is kept
    if of not in known:
        slots = [slot for kind in of.__mro__ for slot in getattr(kind, "__slots__", ())]
        found = [field.name for field in fields(of)] if is_dataclass(of) else slots
        known[of] = [name for name in found if name not in UNCHECKED]
    return known[of]


def value(of: object) -> object:
    match of:
        case dict():
            return tuple((key, value(item)) for key, item in of.items())
        case list():
            return tuple(of)
        case _:
            return of


def own(thing: Thing) -> list[Thing]:
    """An entity, and what belongs to it alone."""
    match thing:
        case Member():
            held = [h for h in (thing.holding, *thing.leaving) if h is not None]
            withdrawal = thing.group.model.withdrawals.get(thing.registration)
            return [thing, *held, *([withdrawal] if withdrawal is not None else [])]
        case Operation():
            return [thing, *thing.parts.values()]
        case _:
            return [thing]


def fingerprint(thing: Noted) -> list[tuple[Thing, str, object]]:
    return [
        (each, name, value(getattr(each, name)))
        for each in own(thing)
        for name in names(type(each))
    ]


def everything(cluster: Cluster) -> Iterator[Noted]:
    yield from cluster.workers.values()
    yield from cluster.members.values()
    yield from cluster.leases.values()
    yield from cluster.records.values()
    for model in cluster.models.values():
        yield model
        yield from model.versions.values()
        for group in model.groups.values():
            yield group
            yield from group.replicas
            if group.operation is not None:
                yield group.operation


@pytest.mark.heavy
def test_a_step_notes_all_that_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0

    def watched(coordinator: Coordinator, event: Event, now: float) -> list[Action]:
        nonlocal seen
        before = {thing: fingerprint(thing) for thing in everything(coordinator.cluster)}
        actions = step(coordinator, event, now)
        after = dict.fromkeys(everything(coordinator.cluster))
        noted = invariants.with_neighbours(coordinator.cluster.noted)
        for thing in {**before, **after}:
            was, now_is = before.get(thing, []), fingerprint(thing)
            changed = [part for part in now_is if part not in was] if now_is != was else []
            if changed or thing not in after:
                what = [name for _, name, _ in changed] or "its being there"
                assert thing in noted, (
                    f"{event} has changed {what} of a {type(thing).__name__}, which nobody noted"
                )
                seen += 1
        return actions

    step = Coordinator.step
    monkeypatch.setattr(Coordinator, "step", watched)
    for seed in range(5):
        simulate(seed)
    assert seen > 2_000


@pytest.mark.heavy
def test_a_step_notes_little_of_a_large_cluster() -> None:
    cluster = StepwiseCluster()
    handles = [cluster.handle(f"w{number}") for number in range(50)]
    cluster.run()
    handles[0].publish(1)
    cluster.run()
    for handle in handles[1:]:
        handle.replicate()
    sizes = []
    while choices := cluster.choices():
        cluster.do(choices[0])
        sizes.append(len(invariants.with_neighbours(cluster.coordinator.cluster.noted)))
    assert sum(sizes) / len(sizes) < 15


# ------------------------------------------------------------------------------------------------
# what it finds there


def broken_values(was: object, noted: Collection[object], random: Random) -> Iterator[object]:
    """Values that an attribute could have by a defect, instead of this one. What a step takes out
    of something is noted.
    """
    match was:
        case bool():
            yield not was
        case StrEnum():
            yield from (state for state in type(was) if state is not was)
        case int():
            yield from (was + 1, was - 1)
        case None | float() | str():
            pass
        case dict() if gone := [key for key, item in was.items() if may_go(item, noted)]:
            key = random.choice(gone)
            yield {k: item for k, item in was.items() if k != key}
            yield {**was, "another": was[key]}
        case list() if was:
            yield was[1:]
            yield [*was, was[0]]
        case _ if isinstance(was, ENTITIES):
            yield None


def may_go(item: object, noted: Collection[object]) -> bool:
    """Whether a step that takes it out of something has noted it. Whose layout goes is noted with
    its holders.
    """
    return not isinstance(item, LayoutHoldings) and (
        not isinstance(item, ENTITIES) or item in noted
    )


def finds(check: Callable[[], None]) -> bool:
    """Whether it raises: what is promised, or because of what is not there at all."""
    try:
        check()
    except (InvariantBroken, AssertionError, AttributeError, KeyError, IndexError, TypeError):
        return True
    return False


@pytest.mark.heavy
def test_what_a_step_breaks_is_found_by_looking_at_what_it_has_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attribute of what a step has noted is broken in turn: where the full check finds that,
    so does the other.
    """
    random = Random(1)
    found: dict[str, int] = {}

    def broken(coordinator: Coordinator, event: Event, now: float) -> list[Action]:
        actions = step(coordinator, event, now)
        assert not finds(coordinator.check_touched)
        if random.random() < 0.03:
            noted = invariants.with_neighbours(coordinator.cluster.noted)
            for thing in [each for changed in coordinator.cluster.noted for each in own(changed)]:
                for name in names(type(thing)):
                    try_out(coordinator, thing, name, noted)
        return actions

    def try_out(
        coordinator: Coordinator, thing: Thing, name: str, noted: Collection[Noted]
    ) -> None:
        was = getattr(thing, name)
        for instead in broken_values(was, noted, random):
            setattr(thing, name, instead)
            try:
                if finds(coordinator.check_invariants):
                    what = f"{type(thing).__name__}.{name}"
                    assert finds(coordinator.check_touched), (
                        f"{what} = {instead!r} instead of {was!r}: {thing!r}"
                    )
                    found[what] = found.get(what, 0) + 1
            finally:
                setattr(thing, name, was)

    step = Coordinator.step
    monkeypatch.setattr(Coordinator, "step", broken)
    for seed in range(12):
        simulate(seed)
    assert len(found) > 20, found


def test_a_quarantined_holding_that_is_still_a_source_is_found() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    holding = cluster.coordinator.cluster.members[trainer.id].holding
    assert holding is not None
    holding.trust.quarantined = True
    with pytest.raises(InvariantBroken, match="what is quarantined is no source"):
        cluster.coordinator.check_invariants()


def test_a_call_that_can_go_on_and_was_not_woken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    reader.replicate()
    cluster.run()
    monkeypatch.setattr(Cluster, "wake_all", lambda *_: None)
    trainer.publish(1)
    with pytest.raises(InvariantBroken, match="who can go on is woken"):
        cluster.run()
