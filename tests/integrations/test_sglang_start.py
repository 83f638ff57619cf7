"""What the environment of an SGLang engine may say. SGLang is not needed to refuse it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tensorhub.errors import InvalidValue
from tensorhub.integrations import sglang_start


def test_an_engine_that_is_of_no_fleet_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORHUB_FLEET_HOST", raising=False)
    monkeypatch.delenv("TENSORHUB_MODEL", raising=False)
    sglang_start.register()
    assert "sglang" not in sys.modules


def test_an_engine_with_a_model_and_no_fleet_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TENSORHUB_FLEET_HOST", raising=False)
    monkeypatch.setenv("TENSORHUB_MODEL", "actor")
    sglang_start.register()
    assert "sglang_fleet_not_joined" in caplog.text
    assert "TENSORHUB_FLEET_HOST" in caplog.text


UNSET = "TENSORHUB_MODEL is not set, but TENSORHUB_FLEET_HOST is"
BAD = "TENSORHUB_MODEL and TENSORHUB_ADDRESS of"


@pytest.mark.parametrize(
    ("model", "address", "said"),
    [
        (None, "tcp://10.0.0.1:17337", UNSET),
        ("", "tcp://10.0.0.1:17337", UNSET),
        ("actor", None, BAD),
        ("actor", "10.0.0.1", BAD),
    ],
)
def test_an_engine_that_cannot_join_its_fleet_loads_no_model(
    monkeypatch: pytest.MonkeyPatch, model: str | None, address: str | None, said: str
) -> None:
    """It would serve another version than the fleet does."""
    monkeypatch.setenv("TENSORHUB_FLEET_HOST", "10.0.0.2")
    for name, given in (("TENSORHUB_MODEL", model), ("TENSORHUB_ADDRESS", address)):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    hooks: dict[int, Any] = {}
    registry = SimpleNamespace(register=lambda place, hook, when: hooks.update({when: hook}))
    module: Any = SimpleNamespace(
        HookRegistry=registry, HookType=SimpleNamespace(BEFORE=0, AFTER=1)
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    sglang_start.register()
    for hook, before in ((hooks[0], ()), (hooks[1], (None,))):  # a scheduler is made, and was made
        with pytest.raises(InvalidValue, match=said):
            hook(*before, object())
