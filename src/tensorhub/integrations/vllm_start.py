"""A vLLM engine that starts late takes the newest version before it accepts requests.

    TENSORHUB_ADDRESS=tcp://10.0.0.1:17337 TENSORHUB_MODEL=actor vllm serve MODEL \
        --worker-extension-cls tensorhub.integrations.vllm_worker.WorkerExtension

Each worker reads it when all else is ready, from its peers or the trainer. Where nothing was
published yet, the engine starts with the weights that vLLM has loaded. With TENSORHUB_ENGINE_URL,
the server's URL, trainers find it (`announced`). With TENSORHUB_FLEET_HOST, this machine's name for
the trainer, it joins a fleet with one version (`one_version`); TENSORHUB_FLEET_TOKEN is for it, and
reports call it by TENSORHUB_ENGINE_URL.

Responsible for when that happens. Not responsible for the update (`vllm_updater`).
"""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from typing import Any

from tensorhub import sync
from tensorhub.errors import StateError, TensorHubError
from tensorhub.integrations.announced import SERVERS, announce
from tensorhub.integrations.environment import ADDRESS, FLEET_HOST, FLEET_TOKEN, MODEL, URL, check
from tensorhub.logs import get_logger

log = get_logger(__name__)


def watch() -> None:
    """Have the workers of this process do it, if the environment names a model or a fleet. Raises
    InvalidValue: with another address or name the engine would start with old weights.
    """
    if not (os.environ.get(MODEL) or os.environ.get(FLEET_HOST)):
        return
    check()
    from vllm.v1.worker.gpu_worker import Worker  # the CPU's is one, too

    load = Worker.load_model
    if hasattr(load, "is_tensorhubs"):
        return

    @functools.wraps(load)
    def load_model(worker: Any, *given: Any, **named: Any) -> Any:
        result = load(worker, *given, **named)
        if os.environ.get(MODEL) and hasattr(worker, "tensorhub_start"):
            _start_after(worker)
        elif os.environ.get(FLEET_HOST):
            raise StateError(
                f"{FLEET_HOST} is set, and this engine would serve outside of the fleet: start it "
                f"with --worker-extension-cls tensorhub.integrations.vllm_worker.WorkerExtension"
            )
        return result

    load_model.is_tensorhubs = True  # type: ignore[attr-defined]
    Worker.load_model = load_model


def _start_after(worker: Any) -> None:
    """After vLLM's last call before requests, whose own steps are of no version."""
    warm_up = worker.compile_or_warm_up_model

    def warm_up_and_start(*given: Any, **named: Any) -> Any:
        result = warm_up(*given, **named)
        start(worker)
        return result

    worker.compile_or_warm_up_model = warm_up_and_start


def start(worker: Any) -> None:
    address, model = os.environ[ADDRESS], os.environ[MODEL]
    if host := os.environ.get(FLEET_HOST):
        worker.tensorhub_one_version(address, model, host, token=os.environ.get(FLEET_TOKEN))
        return
    state = worker.tensorhub_start(address, model)
    if (version := state["version"]) is None:
        log.warning("vllm_started_unpublished", model=model)
    else:
        log.info("vllm_started", model=model, version=version)
    if (url := os.environ.get(URL)) and worker.vllm_config.parallel_config.rank == 0:
        # not the connection of updates, which ends where a trainer has other settings
        hub = sync.connect(address, name=url)
        announcement = announce(hub, model, SERVERS, url)
        announcement.keep()
        worker.__dict__["_tensorhub_announced"] = hub, announcement


def withdraw(worker: Any) -> None:
    """Have trainers find this engine no more."""
    if (found := worker.__dict__.pop("_tensorhub_announced", None)) is not None:
        hub, announcement = found
        with suppress(TensorHubError):
            announcement.close()
        hub.close()
