"""An SGLang engine joins a fleet with one version (`one_version`) as it starts, by a plug-in of
SGLang's.

    TENSORHUB_ADDRESS=tcp://10.0.0.1:17337 TENSORHUB_MODEL=actor TENSORHUB_FLEET_HOST=10.0.0.2 \
        python -m sglang.launch_server --model-path MODEL --custom-weight-loader \
        tensorhub.integrations.sglang.load

TENSORHUB_FLEET_HOST is this machine's name for the trainer, TENSORHUB_FLEET_TOKEN the fleet's
token; reports call the engine by TENSORHUB_ENGINE_URL. Releases without plug-ins join by a call,
`sglang_server.Session.join_fleet`.

Responsible for when that happens. Not responsible for the fleet (`sglang_one_version`).
"""

from __future__ import annotations

import os
from typing import Any, Final

from tensorhub.integrations.environment import FLEET_HOST, FLEET_TOKEN, MODEL, URL, check
from tensorhub.logs import get_logger

MADE: Final = "sglang.srt.managers.scheduler.Scheduler.__init__"


log = get_logger(__name__)


def register() -> None:
    """The plug-in, in each of SGLang's processes."""
    if os.environ.get(FLEET_HOST):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(MADE, look, HookType.BEFORE)
        HookRegistry.register(MADE, start, HookType.AFTER)
    elif model := os.environ.get(MODEL):
        log.warning("sglang_fleet_not_joined", model=model, unset=FLEET_HOST)


def look(*given: Any, **named: Any) -> None:
    """Before a scheduler loads its model. Raises InvalidValue, which ends the engine."""
    check()


def start(made: None, scheduler: Any, *given: Any, **named: Any) -> None:
    """Once a scheduler is made, before it takes requests. Raises, which ends the engine: it would
    serve another version than the fleet does.
    """
    address, model = check(), os.environ[MODEL]
    from tensorhub.integrations.sglang_engine import answering

    answering(scheduler.tp_worker.model_runner.model).start(
        scheduler,
        address,
        model,
        host=os.environ[FLEET_HOST],
        token=os.environ.get(FLEET_TOKEN),
        called=os.environ.get(URL, ""),
    )
