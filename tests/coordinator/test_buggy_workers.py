"""A worker that has the secret and is wrong: what it says of others, or cannot mean, costs nobody
else anything (G9).

A story of several modules: every message that `core` takes; `membership`, `retention`, `lineage`
and `operations`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.coordinator.entities import Model
from tensorhub.errors import ProtocolError, RegistrationError, StateError
from tensorhub.messages import Fill, FromWorker, Held, Pin, Publish, Register
from tensorhub.protocol.codec import FROM_WORKER
from tensorhub.testing import DEVICE, MANIFEST, SimWorker, StepwiseCluster
from tensorhub.types import OpKey, OpKind


def model_of(cluster: StepwiseCluster) -> Model:
    return cluster.coordinator.cluster.models["actor"]


def registers(
    registration: str, group: str, held: Held | None = None, *, world_size: int = 1
) -> Register:
    return Register(
        7,
        registration,
        "actor",
        group,
        0,
        0,
        world_size,
        True,
        False,
        *DEVICE,
        "",
        1,
        1,
        MANIFEST.encode(),
        held,
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
    say(
        buggy.worker,
        registers(buggy.id, "buggy", Held(1, info.content_id, 99, 1, info.nbytes, b"")),
    )
    assert model_of(cluster).mark == 2
    assert [h.member.worker.name for h in model_of(cluster).versions[1].holdings[0]] == ["trainer"]


@pytest.mark.parametrize(
    ("number", "key"),
    [
        (2**63, OpKey("m", "g", 0, 0)),
        (0, OpKey("m", "g", 2**63, 0)),
        (0, OpKey("m", "g", 0, 2**63)),
    ],
)
def test_a_number_that_no_store_can_keep_is_no_message(number: int, key: OpKey) -> None:
    """Else the entries of other workers would fail together with its own."""
    with pytest.raises(ProtocolError, match="is not from 0 to 9223372036854775807"):
        FROM_WORKER.encode(Publish(key, 0, "r", number, 1, 60.0))


def test_a_version_of_more_bytes_than_a_store_can_count_is_refused() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    member = cluster.coordinator.cluster.members[trainer.id]
    for nbytes, error in ((2**63, "cannot have 9223372036854775808 bytes"), (2**63 - 1, "")):
        member.said = replace(member.said, nbytes=nbytes)
        asked = trainer.publish(1)
        cluster.run()
        assert error in str(asked.error or "")
    assert asked.number == 1
