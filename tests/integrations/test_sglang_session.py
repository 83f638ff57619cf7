"""What a trainer and an SGLang engine say to each other; SGLang itself is not needed for it
(tests/frameworks has it).
"""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from tensorhub.errors import (
    GroupAborted,
    InvalidValue,
    ManifestMismatch,
    OperationTimeout,
    StateError,
)
from tensorhub.integrations.sglang_session import LOADER, Order, Outcome, check_loader, check_sglang

ORDER = Order(["tcp://127.0.0.1:1"], "actor", "sglang-1", 7, "content", 2**30, 5.0, ("lm_head.*",))


def test_an_order_goes_as_a_name_without_any_weight() -> None:
    ((name, tensor),) = pickle.loads(pickle.dumps(ORDER.tensors()))
    assert tensor.numel() == 0
    assert Order.of([(name, tensor)]) == ORDER


@pytest.mark.parametrize("names", [["model.norm.weight"], ["tensorhub:{}", "lm_head.weight"]])
def test_tensors_that_are_no_order(names: list[str]) -> None:
    with pytest.raises(InvalidValue, match="was given tensors of its own"):
        Order.of([(name, torch.zeros(2)) for name in names])


def test_an_outcome_is_the_same_error_at_the_trainer() -> None:
    told = Outcome.error(
        Outcome.of(ManifestMismatch("2 names", differences=("'a'", "'b'")), "torn").message()
    )
    assert type(told) is ManifestMismatch
    assert (f"{told}", told.memory) == ("2 names [the engine's weights are torn]", "torn")
    assert told.differences == ("'a'", "'b'")
    aborted = Outcome.error(
        Outcome.of(GroupAborted("rank 1 is gone", causes={1: "lost"}), "intact").message()
    )
    assert (type(aborted), aborted.memory) == (GroupAborted, "intact")
    assert isinstance(
        Outcome.error(Outcome.of(OperationTimeout("late"), "intact").message()), TimeoutError
    )


def test_what_is_no_error_of_ours() -> None:
    told = Outcome.error(Outcome.of(RuntimeError("out of memory"), "torn").message())
    assert (type(told), told.memory) == (StateError, "torn")
    assert "RuntimeError: out of memory" in f"{told}"
    refused = Outcome.error("no weight-update session is open")
    assert (type(refused), f"{refused}") == (
        StateError,
        "SGLang has refused: no weight-update session is open",
    )


def test_an_unsupported_release_is_refused() -> None:
    check_sglang("0.5.23")
    check_sglang("0.5.23.post1")
    for release in ("0.5.22", "0.5.230", "0.6.23", "0.5"):
        with pytest.raises(StateError, match=rf"SGLang {release} is installed.*made for 0\.5\.23:"):
            check_sglang(release)


def test_an_engine_that_was_started_without_the_loader_is_refused() -> None:
    check_loader("E", [LOADER, "another.loader"])
    for loaders in (None, [], ["another.loader"]):
        with pytest.raises(
            StateError,
            match=f"E was started without .* would end it: start it with .*-loader {LOADER}",
        ):
            check_loader("E", loaders)


@pytest.mark.heavy
def test_a_trainer_needs_no_sglang() -> None:
    said = (
        "import sys; from tensorhub.integrations.sglang import LOADER, Trainer; print('sglang' "
        "in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "False\n"
