"""What the environment of a vLLM engine may say. vLLM is not needed to refuse it."""

from __future__ import annotations

import pytest

from tensorhub.errors import InvalidValue
from tensorhub.integrations import vllm_start


@pytest.mark.parametrize(
    ("model", "address"),
    [
        ("actor", None),
        ("actor", ""),
        ("actor", "10.0.0.1"),
        ("actor", "http://10.0.0.1:17337"),
        ("actor", "tcp://10.0.0.1:17337,,"),
        (" ", "tcp://10.0.0.1:17337"),
        ("a" * 513, "tcp://10.0.0.1:17337"),
    ],
)
def test_an_engine_that_would_start_with_old_weights_does_not_start(
    monkeypatch: pytest.MonkeyPatch, model: str, address: str | None
) -> None:
    monkeypatch.setenv("TENSORHUB_MODEL", model)
    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("TENSORHUB_ADDRESS", address)
    with pytest.raises(InvalidValue, match="TENSORHUB_MODEL and TENSORHUB_ADDRESS of"):
        vllm_start.watch()


def test_an_engine_without_a_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORHUB_MODEL", raising=False)
    monkeypatch.setenv("TENSORHUB_ADDRESS", "rubbish")
    vllm_start.watch()
