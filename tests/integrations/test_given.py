"""What several adapters refuse in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tensorhub import Options
from tensorhub.errors import CoordinatorUnavailable, InvalidType
from tensorhub.integrations import sglang, sglang_server, vllm_session
from tensorhub.integrations.checkpoint_engine import Exchange
from tensorhub.integrations.engine_feed import EngineFeed
from tensorhub.integrations.fleet import Fleet
from tensorhub.integrations.given import bounded, texts, wrapped
from tensorhub.integrations.one_version_trainer import OneVersion
from tensorhub.integrations.trl import RolloutWeights
from tests.integrations.test_sglang_server import Engine
from tests.integrations.test_vllm_session import Client

ADDRESS = "tcp://127.0.0.1:1"
HUB: Any = None  # it is not asked


def test_names_of_a_module_that_wraps_the_model_are_told() -> None:
    wanted = ["model.norm.weight", "lm_head.weight"]
    said = wrapped(["policy.model.norm.weight", "policy.lm_head.weight"], wanted)
    assert "all published names begin with 'policy.'" in said
    assert "publish the module within" in said
    for others in (["model.norm.bias"], ["policy.a", "value.a"], ["policy.a", "policy"], []):
        assert wrapped(others, wanted) == ""


@pytest.mark.parametrize(
    "call",
    [
        lambda given: vllm_session.Settings(ADDRESS, "actor", ignored=given),
        lambda given: sglang_server.Session(Engine(), ADDRESS, unused=given),
        lambda given: OneVersion(HUB, "actor", given),
        lambda given: EngineFeed(given),
    ],
)
@pytest.mark.parametrize("given", ["*x*", b"*x*", 5])
def test_one_text_is_no_list_of_texts(call: Callable[[Any], object], given: Any) -> None:
    """Its letters would be patterns, or engines."""
    with pytest.raises(InvalidType, match=r"=(b?'\*x\*'|5): give a list, as \["):
        call(given)


def test_a_list_of_texts_has_texts_alone() -> None:
    assert texts("ignored", ["*x*"], "*mtp*") == ("*x*",)
    with pytest.raises(InvalidType, match=r"ignored=\['\*x\*', 5\]: give a list"):
        texts("ignored", ["*x*", 5], "*mtp*")


@pytest.mark.parametrize(
    "joins",
    [
        lambda: Exchange(host="127.0.0.1", address=ADDRESS, timeout_s=0.2).prepare(),
        lambda: RolloutWeights(
            nn.Linear(2, 2),
            {"address": ADDRESS, "token": "", "model": "actor", "before": 0},
            timeout_s=0.2,
        ).refresh(),
        lambda: sglang.Trainer(nn.Linear(2, 2), Engine(), ADDRESS, timeout_s=0.2),
    ],
)
def test_a_coordinator_is_waited_for_no_longer_than_a_call_may_take(
    joins: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CoordinatorUnavailable, match="no coordinator can be reached"):
        joins()
    assert "for_s=0.2" in caplog.text


def test_options_and_seconds_that_are_none() -> None:
    assert bounded(None, math.inf) == Options()
    assert bounded(Options(coordinator_wait_s=0), 5.0) == Options(coordinator_wait_s=0)
    given: Any = "5"
    with pytest.raises(InvalidType, match=r"options='5': give tensorhub\.Options"):
        bounded(given, 5.0)
    with pytest.raises(InvalidType, match="timeout_s='5': give seconds"):
        bounded(None, given)


def test_a_number_alone_is_no_version() -> None:
    vllm = vllm_session.Session(client := Client(), vllm_session.Settings(ADDRESS, "actor"))
    sglang = sglang_server.Session(engine := Engine(), ADDRESS)
    fleet, step = Fleet([vllm]), 7
    calls: list[Callable[[Any], object]] = [
        vllm.update,
        vllm.check,
        sglang.update,
        sglang.check,
        fleet.update,
        lambda info: OneVersion.update(object.__new__(OneVersion), info),
    ]
    for call in calls:
        with pytest.raises(InvalidType, match="version 7: give what publish has returned"):
            call(step)
    assert (client.calls, engine.calls) == ([], [])
    fleet.close()
