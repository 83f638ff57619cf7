"""What an engine of two workers refuses: none of them waits for the other, and later calls have
answers of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tensorhub import sync
from tensorhub.integrations.one_version_trainer import OneVersion
from tests.frameworks.generating import answer_by
from tests.frameworks.test_vllm import actor
from tests.frameworks.vllm_generating import Engine

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(tmp_path_factory.mktemp("refusals") / "engine", {}, workers=2)
    try:
        assert made.hears() == "ready"
        yield made
    finally:
        made.kill()


def call(engine: Engine, method: str, **given: Any) -> Any:
    return engine.asks(f"tensorhub_{method} {json.dumps(given)}")


def test_refused_calls(engine: Engine) -> None:
    model = actor()
    with sync.serve(token="") as coordinator, sync.connect(coordinator.address) as hub:
        address = coordinator.address
        nowhere = {"address": "tcp://127.0.0.1:9", "timeout_s": 1.0}
        for method in ("join", "one_version"):
            assert "CoordinatorUnavailable" in call(engine, method, **nowhere)
        assert "comes first" in call(engine, "update", version=1)
        assert call(engine, "join", address=address, timeout_s=5.0) == "done"
        assert "VersionUnavailable" in call(engine, "update")  # nothing is published
        assert "VersionUnavailable" in call(engine, "update", version=3)
        weights = hub.register("actor", model)
        with weights.mutate(1):
            answer_by(model, 1)
        assert call(engine, "update") == "done"
        assert call(engine, "check") == "done"
        assert set(engine.asks("generate")) == {1}

        said = call(engine, "one_version", address=address, host="0.0.0.0")
        assert "can be reached by other machines" in said
        assert set(engine.asks("generate")) == {1}
        assert call(engine, "update", version=1) == "done"
        assert call(engine, "one_version", address=address, timeout_s=60.0) == "done"
        fleet = OneVersion(hub, "actor", timeout_s=60.0)
        with weights.mutate(2):
            answer_by(model, 2)
        fleet.update(hub.wait_for("actor", at_least=2))
        for method in ("update", "leave", "join"):
            given = {"address": address} if method == "join" else {}
            assert "is one of a fleet" in call(engine, method, **given)
            assert call(engine, "state") == "done"
        assert set(engine.asks("generate")) == {2}
        assert call(engine, "check") == "done"
        fleet.close()
