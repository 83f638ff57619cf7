"""What a trainer and an SGLang engine say to each other; SGLang itself is not needed for it
(tests/frameworks has it).
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from tensorhub.errors import (
    GroupAborted,
    InvalidValue,
    ManifestMismatch,
    Memory,
    OperationTimeout,
    StateError,
    TensorHubError,
)
from tensorhub.integrations.sglang_session import (
    LOADER,
    Order,
    Outcome,
    Report,
    check_loader,
    has_sessions,
)

ORDER = Order(
    ["tcp://127.0.0.1:1"],
    "actor",
    "sglang-1",
    "check",
    7,
    "content",
    2**30,
    5.0,
    ("lm_head.*",),
    fleet={"host": "10.0.0.2", "token": None},
)


class Unplanned(ManifestMismatch):
    """Of another module's own."""


def test_a_kind_of_error_that_only_the_engine_has_is_told_as_the_public_one() -> None:
    assert isinstance(Outcome.of(Unplanned("why"), "intact").error(), ManifestMismatch)


def test_an_order_goes_as_a_name_without_any_weight() -> None:
    ((name, tensor),) = pickle.loads(pickle.dumps(ORDER.tensors()))
    assert tensor.numel() == 0
    assert Order.of([(name, tensor)]) == ORDER


def test_an_order_of_another_release_ends_no_engine() -> None:
    name = ORDER.tensors()[0][0].replace('"version"', '"newer"')
    with pytest.raises(InvalidValue, match=r"another release orders \['newer'\]"):
        Order.of([(name, torch.empty(0))])


@pytest.mark.parametrize("names", [["model.norm.weight"], ["tensorhub:{}", "lm_head.weight"]])
def test_tensors_that_are_no_order(names: list[str]) -> None:
    with pytest.raises(InvalidValue, match="was given tensors of its own"):
        Order.of([(name, torch.zeros(2)) for name in names])


def told(error: Exception, memory: Memory) -> TensorHubError:
    """An error of an engine's ranks, as the trainer gets it."""
    report = Report("a word", Outcome.of(error, memory))
    decoded = Report.decode(report.encode())
    assert decoded == report
    assert decoded.failed is not None
    return decoded.failed.error()


def test_an_outcome_is_the_same_error_at_the_trainer() -> None:
    mismatch = told(ManifestMismatch("2 names", differences=("'a'", "'b'")), "torn")
    assert type(mismatch) is ManifestMismatch
    assert (f"{mismatch}", mismatch.memory) == ("2 names [the engine's weights are torn]", "torn")
    assert mismatch.differences == ("'a'", "'b'")
    aborted = told(GroupAborted("rank 1 is gone", causes={1: "lost"}), "intact")
    assert (type(aborted), aborted.memory) == (GroupAborted, "intact")
    assert isinstance(told(OperationTimeout("late"), "intact"), TimeoutError)


def test_what_is_no_error_of_ours() -> None:
    error = told(RuntimeError("out of memory"), "torn")
    assert (type(error), error.memory) == (StateError, "torn")
    assert "RuntimeError: out of memory" in f"{error}"


def test_a_report_with_a_kind_that_is_none() -> None:
    kind: Any = ["StateError"]
    assert type(Outcome(kind, "no", "torn").error()) is StateError


@pytest.mark.parametrize(
    "numbers",
    [
        *(None, [], [0.5, 1.0], [300.0], "text", [[1.0]], [123.0, 125.0]),
        *([float("inf")], [float(ord("["))] * 10**5),
    ],
)
def test_numbers_that_are_no_report(numbers: object) -> None:
    assert Report.decode(numbers) is None


def test_releases_with_sessions() -> None:
    for release in ("0.5.21", "0.5.23", "0.5.23.post1", "0.6", "1.0"):
        assert has_sessions(release), release
    for release in ("0.5.10.post1", "0.5.12", "0.5.20", "0.4.9.post6", "0.5"):
        assert not has_sessions(release), release


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
