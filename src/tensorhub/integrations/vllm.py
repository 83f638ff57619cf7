"""vLLM: the weight-transfer backend `tensorhub`, for its engine and for the trainer that feeds it.

`WeightTransferConfig(backend="tensorhub")` is all that the engine needs to be told: vLLM finds the
backend by the entry point `vllm.general_plugins`. The trainer makes a `Trainer` by
`WeightTransferTrainerFactory.trainer_init(TrainerInit(...), ...)`, and calls `send_weights()` after
each step. Needs vLLM 0.32 or newer; `vllm_worker` does not.

Responsible for these names, and for what both sides say to each other. The trainer's side is in
`vllm_trainer`, the engine's in `vllm_engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorhub.errors import StateError
from tensorhub.integrations import vllm_first_load, vllm_lora_requests
from tensorhub.integrations.vllm_session import BACKEND

if TYPE_CHECKING:
    from torch import nn

    from tensorhub.integrations.vllm_trainer import OfflineClient, Trainer, TrainerInit
    from tensorhub.integrations.vllm_updater import Updater

__all__ = ["OfflineClient", "Trainer", "TrainerInit", "register"]


def register() -> None:
    """Make the backend known to vLLM, if this release has such backends. vLLM calls it in each of
    its processes; a trainer calls it once.
    """
    vllm_first_load.watch()
    vllm_lora_requests.watch()
    from vllm.distributed.weight_transfer import factory

    trainers = getattr(factory, "WeightTransferTrainerFactory", None)
    if trainers is None:
        return
    for each, module, name in (
        (factory.WeightTransferEngineFactory, "tensorhub.integrations.vllm_engine", "Engine"),
        (trainers, "tensorhub.integrations.vllm_trainer", "Trainer"),
    ):
        if BACKEND not in each._registry:
            each.register_engine(BACKEND, module, name)


def new_updater(model: nn.Module, vllm_config: Any, draft: nn.Module | None = None) -> Updater:
    """What updates a worker's model, with its draft. StateError: this release lacks what that
    needs.
    """
    try:
        from tensorhub.integrations.vllm_updater import Updater
    except ImportError as error:
        from vllm import __version__

        raise StateError(
            f"vLLM {__version__} lacks what TensorHub updates its weights by ({error}): install a "
            f"release that TensorHub was tested with (docs/frameworks.md)"
        ) from error
    return Updater(model, vllm_config, draft)


def __getattr__(name: str) -> Any:
    """What only a trainer needs: loaded when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from tensorhub.integrations import vllm_trainer
    except ImportError as error:
        raise StateError(
            "this release of vLLM has no trainers of weight-transfer backends (0.32 has them): use "
            "vllm_session.ExtensionClient, and vllm_worker.WorkerExtension in the engine"
        ) from error
    return getattr(vllm_trainer, name)
