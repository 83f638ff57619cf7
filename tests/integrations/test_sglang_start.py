"""What the environment of an SGLang engine may say. SGLang is not needed to refuse it."""

from __future__ import annotations

import sys

import pytest

from tensorhub.errors import InvalidValue
from tensorhub.integrations import sglang_start


def test_an_engine_that_is_of_no_fleet_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORHUB_FLEET_HOST", raising=False)
    sglang_start.register()
    assert "sglang" not in sys.modules


@pytest.mark.parametrize(
    ("model", "address"),
    [(None, "tcp://10.0.0.1:17337"), ("actor", None), ("actor", "10.0.0.1")],
)
def test_an_engine_that_cannot_join_its_fleet_does_not_start(
    monkeypatch: pytest.MonkeyPatch, model: str | None, address: str | None
) -> None:
    """It would serve another version than the fleet does."""
    monkeypatch.setenv("TENSORHUB_FLEET_HOST", "10.0.0.2")
    for name, given in (("TENSORHUB_MODEL", model), ("TENSORHUB_ADDRESS", address)):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    with pytest.raises(InvalidValue, match="TENSORHUB_MODEL and TENSORHUB_ADDRESS of"):
        sglang_start.start(None, object())
