"""A vLLM engine that starts late takes the newest version before it accepts requests.

    TENSORHUB_ADDRESS=tcp://10.0.0.1:17337 TENSORHUB_MODEL=actor vllm serve MODEL \
        --worker-extension-cls tensorhub.integrations.vllm_worker.WorkerExtension

Each worker reads it when its model is loaded, from its peers or the trainer. Where nothing was
published yet, the engine starts with the weights that vLLM has loaded.

Responsible for when that happens. Not responsible for the update (`vllm_updater`).
"""

from __future__ import annotations

import functools
import os
from typing import Any, Final

from tensorhub.errors import InvalidValue, StateError
from tensorhub.logs import get_logger
from tensorhub.runtime.control.addresses import split_addresses
from tensorhub.types import check_name

MODEL: Final = "TENSORHUB_MODEL"  # the environment's variable with the published name
ADDRESS: Final = "TENSORHUB_ADDRESS"
log = get_logger(__name__)


def watch() -> None:
    """Have the workers of this process do it, if the environment names a model. Raises
    InvalidValue: with another address or name the engine would start with old weights.
    """
    if not os.environ.get(MODEL):
        return
    try:
        check_name("model", os.environ[MODEL])
        split_addresses(os.environ.get(ADDRESS, ""))
    except StateError as error:
        raise InvalidValue(f"{MODEL} and {ADDRESS} of the environment: {error}") from error
    from vllm.v1.worker.gpu_worker import Worker  # the CPU's is one, too

    load = Worker.load_model
    if hasattr(load, "is_tensorhubs"):
        return

    @functools.wraps(load)
    def load_and_update(worker: Any, *given: Any, **named: Any) -> Any:
        result = load(worker, *given, **named)
        if hasattr(worker, "tensorhub_start"):
            state = worker.tensorhub_start(os.environ[ADDRESS], os.environ[MODEL])
            log.info("vllm_started", model=os.environ[MODEL], version=state["version"])
        return result

    load_and_update.is_tensorhubs = True  # type: ignore[attr-defined]
    Worker.load_model = load_and_update
