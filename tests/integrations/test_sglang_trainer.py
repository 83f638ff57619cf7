"""What a trainer for SGLang refuses before it asks an engine for anything; SGLang itself is not
needed for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import InvalidType, InvalidValue
from tensorhub.integrations.sglang import Trainer


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
    with pytest.raises(InvalidType, match="engines=5: give the URL"):
        trainer(5)


def test_a_pause_that_is_none() -> None:
    with pytest.raises(
        InvalidValue, match="pause='abrot': give one of 'abort', 'retract', 'in_place', None"
    ):
        trainer([], pause="abrot")
