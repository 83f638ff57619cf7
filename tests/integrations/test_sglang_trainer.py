"""What a trainer for SGLang refuses, and what it calls in which order; SGLang itself is not needed
for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import (
    InvalidType,
    InvalidValue,
    OperationTimeout,
    StateError,
    VersionUnavailable,
)
from tensorhub.integrations.sglang import Trainer
from tensorhub.integrations.sglang_session import ASLEEP, REPORT, TORN, Order, Outcome, Report
from tensorhub.model.stamps import Stamp


def trainer(engines: object, **settings: Any) -> Trainer:
    with sync.serve(token="") as coordinator:
        return Trainer(
            {"a": torch.zeros(2)}, engines, coordinator.address, timeout_s=20.0, **settings
        )


def test_engines_that_are_none() -> None:
    with pytest.raises(
        InvalidValue, match=r"'127.0.0.1:30000' is not the URL .* give .http://HOST:PORT"
    ):
        trainer("127.0.0.1:30000")
    with pytest.raises(InvalidValue, match='has no /v1: give "http://HOST:PORT" only'):
        trainer("http://127.0.0.1:30000/v1/")
    with pytest.raises(InvalidType, match="engines=5: give the URL"):
        trainer(5)


def test_a_closed_trainer_says_so() -> None:
    with training(FakeEngine()) as made:
        made.send_weights()
    for call in (made.send_weights, made.check_weights):
        with pytest.raises(StateError, match="this Trainer is closed: make another one"):
            call()


def test_a_pause_that_is_none() -> None:
    with pytest.raises(
        InvalidValue, match="pause='abrot': give one of 'abort', 'retract', 'in_place', None"
    ):
        trainer("http://127.0.0.1:1", pause="abrot")


class FakeEngine:
    """An engine's control calls. `faults`: which it refuses, and what it says. `failed`: what its
    loader reports. `skips`: the loader was never called.
    """

    ranks, has_sessions, has_draft = 1, True, False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fields: list[dict[str, Any]] = []
        self.faults: dict[str, str] = {}
        self.failed: Outcome | None = None
        self.skips = False
        self.report: object = None
        self.torn: object = [0.0]

    def look(self) -> None:
        pass

    def call(self, name: str, **fields: Any) -> tuple[bool, str]:
        tensors = fields.pop("serialized_named_tensors", None)
        if tensors:
            order = Order.of(tensors)
            name = "check" if order.purpose == "check" else "load"
            if not self.skips:
                self.report = Report(order.nonce, self.failed).encode()
        self.calls.append(name)
        self.fields.append(fields)
        return name not in self.faults, self.faults.get(name, "")

    def parameter(self, name: str) -> object:
        return {REPORT: self.report, ASLEEP: [0.0], TORN: self.torn}[name]

    def serialized(self, tensors: Any) -> list[Any]:
        return list(tensors)


UPDATE = [
    "pause_generation",
    "begin_weight_update",
    "load",
    "update_weights_from_tensor",
    "end_weight_update",
    "continue_generation",
]


@contextmanager
def training(*engines: FakeEngine, **settings: Any) -> Iterator[Trainer]:
    with (
        sync.serve(token="") as coordinator,
        Trainer(
            {"a": torch.zeros(2)}, list(engines), coordinator.address, timeout_s=20.0, **settings
        ) as made,
    ):
        yield made


@pytest.mark.parametrize("clear_cache", [True, False])
def test_what_an_update_calls_and_that_the_label_is_the_stamp(clear_cache: bool) -> None:
    engine = FakeEngine()
    with training(engine, clear_cache=clear_cache) as trainer:
        assert [trainer.send_weights(), trainer.check_weights(), trainer.send_weights()] == [
            0,
            1,
            2,
        ]
    check = [name for name in UPDATE if name not in ("load", "update_weights_from_tensor")]
    assert engine.calls == [*UPDATE, *check[:2], "check", *check[2:], *UPDATE]
    assert engine.fields[0] == {"mode": "abort"}
    said = [each for each in engine.fields if "weight_version" in each]
    assert [Stamp.parse(each["weight_version"]).version for each in said] == [0, 2]
    assert [each["flush_cache"] for each in said] == [clear_cache] * 2


@pytest.mark.parametrize(
    ("fault", "memory", "after"),
    [
        ("pause_generation", None, ["continue_generation"]),  # perhaps it was paused
        ("begin_weight_update", None, ["continue_generation"]),
        ("load", None, ["end_weight_update"]),
        ("load", "torn", ["end_weight_update"]),
        ("load", "intact", ["end_weight_update", "continue_generation"]),
        ("update_weights_from_tensor", None, ["end_weight_update"]),  # new weights, old label
        ("end_weight_update", None, []),
    ],
)
def test_an_engine_whose_update_fails(fault: str, memory: Any, after: list[str]) -> None:
    """Torn weights stay paused until an update succeeds."""
    engine = FakeEngine()
    if memory is None:
        engine.faults[fault] = "no"
    else:
        engine.failed = Outcome("VersionUnavailable", "no", memory)
    error = StateError if memory is None else VersionUnavailable
    with training(engine) as trainer:
        with pytest.raises(error, match="no"):
            trainer.send_weights()
        assert engine.calls[engine.calls.index(fault) + 1 :] == after
        if "continue_generation" not in after:
            engine.faults, engine.failed = {"begin_weight_update": "no"}, None
            with pytest.raises(StateError, match="no"):
                trainer.send_weights()
            assert "continue_generation" not in engine.calls
        engine.faults, engine.failed = {}, None
        trainer.send_weights()
        assert engine.calls[-1] == "continue_generation"


@pytest.mark.parametrize("fault", ["pause_generation", "begin_weight_update"])
@pytest.mark.parametrize("torn", [[1.0], "no number", None])
def test_a_new_trainer_does_not_resume_what_the_one_before_has_torn(fault: str, torn: Any) -> None:
    """Nothing is torn yet in an engine whose loader was never called."""
    engine = FakeEngine()
    engine.torn, engine.faults = torn, {fault: "no"}
    with training(engine) as trainer:
        for _ in range(2):
            with pytest.raises(StateError, match="no"):
                trainer.send_weights()
            assert ("continue_generation" in engine.calls) == (torn is None)
        engine.faults = {}
        trainer.send_weights()
    assert engine.calls[-1] == "continue_generation"


def test_an_engine_that_says_that_it_has_loaded_and_never_called_the_loader() -> None:
    engine = FakeEngine()
    with training(engine) as trainer:
        engine.skips = True
        with pytest.raises(StateError, match="by get_weights_by_name, gives no report"):
            trainer.send_weights()
        engine.skips = False
        trainer.send_weights()
        engine.skips = True
        with pytest.raises(StateError, match="by get_weights_by_name, reports of another"):
            trainer.send_weights()
    assert engine.calls[-1] == "continue_generation"


def test_a_session_that_a_killed_trainer_has_left_open_is_ended() -> None:
    engine = FakeEngine()
    call = engine.call

    def first_is_open(name: str, **fields: Any) -> tuple[bool, str]:
        is_open = name == "begin_weight_update" and name not in engine.calls
        done, said = call(name, **fields)
        return (False, "a session is already open") if is_open else (done, said)

    engine.call = first_is_open  # type: ignore[method-assign]
    with training(engine) as trainer:
        trainer.send_weights()
    assert engine.calls == [
        *UPDATE[:2],
        "update_weights_from_tensor",
        "end_weight_update",
        *UPDATE[1:],
    ]


@pytest.mark.parametrize("is_back", [True, False])
def test_weights_that_may_have_been_published_may_be_written_and_take_their_number(
    monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    """As where the coordinator stood still. `is_back`: it answers once they are taken back."""
    with training(FakeEngine()) as trainer:
        first, publish = trainer.send_weights(), sync.Weights.publish

        def loses_the_answer(weights: sync.Weights, *given: Any) -> None:
            publish(weights, *given)
            raise OperationTimeout("it has not answered", memory="in_doubt")

        def fails(*_: object) -> None:
            raise OperationTimeout("it still stands", memory="in_doubt")

        with monkeypatch.context() as broken:
            broken.setattr(sync.Weights, "publish", loses_the_answer)
            if not is_back:
                broken.setattr(sync.Weights, "unpublish", fails)
            with pytest.raises(OperationTimeout, match="not answered" if is_back else "stands"):
                trainer.send_weights()
        assert (trainer._weights.version is None) is is_back
        assert trainer.send_weights() == first + 2
