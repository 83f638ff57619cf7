"""What several adapters refuse in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tensorhub.errors import InvalidType
from tensorhub.integrations import sglang_server, vllm_session
from tensorhub.integrations.engine_feed import EngineFeed
from tensorhub.integrations.fleet import Fleet
from tensorhub.integrations.one_version_trainer import OneVersion
from tests.integrations.test_sglang_server import Engine
from tests.integrations.test_vllm_session import Client

ADDRESS = "tcp://127.0.0.1:1"
HUB: Any = None  # it is not asked


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
