"""A worker that has the secret and is wrong: what it says of others, or cannot mean, costs nobody else anything (G9).

A story of several modules: every message that `core` takes; `membership`, `retention`, `lineage` and `operations`.
"""

from __future__ import annotations

import dataclasses
import typing
from enum import StrEnum
from random import Random
from typing import Any

import pytest

from tensorhub.coordinator import Connected, Disconnected, Received, Tick
from tensorhub.coordinator.entities import Model
from tensorhub.errors import RegistrationError, StateError
from tensorhub.messages import Fill, FromWorker, Held, Join, Leave, Pin, Register, Retain, Rollback
from tensorhub.testing import DEVICE, MANIFEST, SimulatedCluster, SimWorker, StepwiseCluster
from tensorhub.types import Endpoint, Location, OpKey, OpKind, Range


def model_of(cluster: StepwiseCluster) -> Model:
    return cluster.coordinator.cluster.models["actor"]


def registers(registration: str, group: str, held: Held | None = None, *, world_size: int = 1) -> Register:
    return Register(
        7, registration, "actor", group, 0, 0, world_size, True, False, *DEVICE, "", 1, 1, MANIFEST.encode(), held
    )


def say(worker: SimWorker, message: FromWorker) -> None:
    worker.say(message)
    assert isinstance(worker.cluster, StepwiseCluster)
    worker.cluster.run()


def test_a_registration_is_its_own_workers() -> None:
    cluster = StepwiseCluster()
    trainer, buggy = cluster.handle("trainer"), cluster.worker("buggy")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    say(buggy, registers(trainer.id, "mine"))
    error = buggy.asks.answers[7]
    assert isinstance(error, RegistrationError)
    assert "is worker 'trainer''s" in str(error)
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate()
    cluster.run()
    assert asked.number == 1
    cluster.check_agreement()


def test_a_publication_is_not_a_fill() -> None:
    cluster = StepwiseCluster()
    trainer, buggy = cluster.handle("trainer"), cluster.handle("buggy")
    cluster.run()
    key = OpKey("actor", "buggy", cluster.coordinator.cluster.members[buggy.id].group.epoch, 0)
    fill = Fill(key, 0, buggy.id, OpKind.PUBLISH, 1, None, 9, False, False, 1.0)
    say(buggy.worker, fill)
    assert buggy.worker.link is None
    asked = trainer.publish(1)
    cluster.run()
    assert asked.number == 1


def test_a_pin_is_its_own_workers() -> None:
    cluster = StepwiseCluster()
    trainer, one, other = cluster.handle("trainer"), cluster.worker("one"), cluster.worker("other")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    pin, _ = one.asks.pin(1)
    cluster.run()
    for version in (1, 5):
        say(other, Pin(7, pin, "actor", version))
        assert isinstance(other.asks.answers.pop(7), StateError)
    assert model_of(cluster).pins[pin].incarnation == one.incarnation


def test_a_rollback_that_is_said_again_with_another_number_is_what_it_was() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    for number in (1, 2, 3):
        trainer.publish(number)
        cluster.run()
        trainer.unpublish()
        cluster.run()
    trainer.worker.asks.rollback(1, ident="same")
    while not cluster.unstored:
        cluster.do(next(choice for choice in cluster.choices() if choice.kind != "store"))
    trainer.worker.asks.rollback(3, ident="same")
    cluster.run()
    assert (model_of(cluster).mark, model_of(cluster).history.lineage) == (1, 1)
    assert not any(error for error in trainer.worker.asks.answers.values())


def test_who_publishes_holds_nothing_else() -> None:
    cluster = StepwiseCluster()
    trainer, buggy = cluster.handle("trainer"), cluster.handle("buggy")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    info = model_of(cluster).versions[1].info
    buggy.publish(2)
    while not cluster.unstored:
        cluster.do(next(choice for choice in cluster.choices() if choice.kind != "store"))
    say(buggy.worker, registers(buggy.id, "buggy", Held(1, info.content_id, 99, 1, info.nbytes, b"")))
    assert model_of(cluster).mark == 2
    assert [h.member.worker.name for h in model_of(cluster).versions[1].holdings[0]] == ["trainer"]


# ------------------------------------------------------------------------------------------------ whatever it may say

SAID = [kind for kind in typing.get_args(FromWorker) if kind not in (Join, Leave, Rollback, Retain)]  # those change all


class Babbler:
    """A worker that says well-formed messages with the ids of others in them."""

    def __init__(self, cluster: SimulatedCluster, random: Random) -> None:
        self.cluster = cluster
        self.random = random
        self.life = 0
        self.session = 0

    def babble(self) -> FromWorker:
        sessions = self.cluster.coordinator.cluster.sessions
        if self.session not in sessions or sessions[self.session].worker is None:
            self.life += 1
            self.session = next(self.cluster.sessions)
            self.cluster.step(Connected(self.session, f"babbler.{self.life}", "worker"))
            self.say(Join("babbler", Location(), (Endpoint("tcp", "nowhere"),), 1, 0))
            self.say(registers(f"b{self.life}", "babble", world_size=self.random.choice((1, 1, 2))))
        message: FromWorker = self.value("", self.random.choice(SAID), self.pools())
        self.say(message)
        return message

    def say(self, message: FromWorker) -> None:
        self.cluster.note(f"babbler -> {message}"[:300])
        self.cluster.step(Received(self.session, message))

    def stop(self) -> None:
        if self.session in self.cluster.coordinator.cluster.sessions:
            self.cluster.step(Disconnected(self.session))

    def pools(self) -> dict[str, list[Any]]:
        """What there is now, by the name of the field that may have it."""
        c, shift = self.cluster.coordinator.cluster, self.random.choice((-1, 0, 0, 0, 1))
        groups = [group for model in c.models.values() for group in model.groups.values()]
        versions = [version for model in c.models.values() for version in model.versions.values()]
        holdings = [h for member in c.members.values() for h in (member.holding, *member.leaving) if h is not None]
        return {
            "registration": [*c.members, "b1"],
            "model": ["actor"],
            "group": [*(group.name for group in groups if not group.members), "babble", "fresh"],
            "lease": [*c.leases, "x"],
            "content_id": [version.info.content_id for version in versions],
            "pin": [pin for model in c.models.values() for pin in model.pins],
            "generation": [holding.generation for holding in holdings],
            "key": [OpKey(g.model.name, g.name, g.epoch, max(0, g.sequence + shift)) for g in groups],
            "version": [version.number for version in versions],
            "selector": [*(version.number for version in versions), "latest", "latest-1", "available", "junk"],
        }

    def value(self, name: str, annotation: Any, pools: dict[str, list[Any]]) -> Any:
        random = self.random
        if pools.get(name) and random.random() < 0.95:
            return random.choice(pools[name])
        bounds = next((e for e in getattr(annotation, "__metadata__", ()) if isinstance(e, Range)), None)
        kind = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
        if kind is type(None):
            return None
        if kind is int:
            return random.choice((0, 1, 2, 3)) + (int(bounds.least) if bounds is not None else -1)
        if kind is float:
            return random.choice((0.0, 0.01, 60.0, 1e9))
        if kind is bool:
            return random.random() < 0.5
        if kind is str or kind is bytes:
            return kind()
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind, include_extras=True)
            return kind(**{field: self.value(field, hint, pools) for field, hint in hints.items()})  # type: ignore[operator]
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return random.choice(list(kind))
        members = typing.get_args(kind)
        return () if typing.get_origin(kind) is tuple else self.value(name, random.choice(members), pools)


def standing(cluster: SimulatedCluster) -> dict[str, int | None]:
    """The generation that each memory of a connected worker holds; but for those that want to leave."""
    found = {}
    for registration, member in cluster.coordinator.cluster.members.items():
        if member.worker.session is not None and member.worker.name != "babbler":
            committed = member.holding is not None and member.holding.committed
            leaving = registration in member.group.model.withdrawals
            found[registration] = (
                member.holding.generation if member.holding is not None and committed and not leaving else None
            )
    return found


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_buggy_worker_says_the_others_keep_what_they_have(seed: int) -> None:
    cluster, random = SimulatedCluster(seed), Random(~seed)
    cluster.guarantees.contents.has_outsiders = True
    babbler = Babbler(cluster, random)
    cluster.begin()
    for _ in range(1000):
        cluster.take_event()
        if cluster.timeline.coordinator.alive and random.random() < 0.2:
            cluster.step(Tick())
            before = standing(cluster)
            said = babbler.babble()
            after = standing(cluster)
            assert all(after.get(r) == held for r, held in before.items() if held is not None), said
            assert after.keys() >= before.keys(), said
            cluster.coordinator.check_touched()
    babbler.stop()
    cluster.end_faults()
    cluster.healing().run()
