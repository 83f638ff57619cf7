"""The parts of SGLang of which `sglang_cpu` makes an engine, for releases with sessions and for
older ones.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.frameworks.sglang_cpu import Rank, Ranks


def manager(rank: Rank) -> Any:
    """What a scheduler updates weights with, in releases with sessions."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.managers.tp_worker import BaseTpWorker
    from sglang.srt.model_executor.model_runner_components.weight_exporter import WeightExporter
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.runtime_context import get_model as model_settings

    def runner(model: Any) -> Any:
        updater = WeightUpdater(
            tp_rank=rank.rank,
            device="cpu",
            gpu_id=0,
            model_config=rank.config,
            custom_weight_loaders=model_settings().custom_weight_loader,
            get_model=lambda: model,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )
        return types.SimpleNamespace(weight_updater=updater, model=model)

    exporter = WeightExporter(
        tp_rank=rank.rank,
        tp_size=rank.size,
        gpu_id=0,
        get_model_path=lambda: str(rank.directory),
        get_model=lambda: rank.model,
    )
    target, draft = runner(rank.model), None
    if rank.draft is not None:
        of_draft = runner(rank.draft)
        draft = types.SimpleNamespace(weight_update_runners=lambda: [("draft", of_draft)])
    worker = types.SimpleNamespace(
        weight_update_runners=lambda: [("target", target)],
        model_runner=target,
        deserialize_own_rank=lambda given: BaseTpWorker.deserialize_own_rank(None, given),
        get_weights_by_name=lambda asked: exporter.get_weights_by_name(
            asked.name, asked.truncate_size
        ),
    )
    scheduler = types.SimpleNamespace(
        record_weight_version_change=lambda new_version: (
            None if new_version is None else rank.versions.append(new_version)
        ),
        _engine_paused=True,
        disaggregation_mode=None,
    )
    return SchedulerWeightUpdaterManager(
        tp_worker=worker,
        draft_worker=draft,
        memory_saver_adapter=memory_saver(),
        flush_cache=lambda **_: _flush(rank),
        is_fully_idle=lambda **_: True,
        scheduler=scheduler,
    )


def memory_saver() -> Any:
    """SGLang's, which takes no memory away here."""
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    return TorchMemorySaverAdapter.create(False)


def adapters(rank: Rank) -> Any:
    """What a scheduler gives requests about adapters to."""
    import inspect

    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_manager import LoRAManager

    settings = rank.settings
    asked = {
        "base_model": rank.model,
        "base_hf_config": rank.config.hf_config,
        "max_loras_per_batch": settings.max_loras_per_batch,
        "load_config": LoadConfig(),
        "dtype": rank.config.dtype,
        "server_args": settings,
        "lora_backend": settings.lora_backend,
        "max_lora_rank": settings.max_lora_rank,
        "target_modules": set(settings.lora_target_modules),
        "tp_size": rank.size,
        "tp_rank": rank.rank,
    }
    made = torch.tensor
    # there is no memory that a GPU reads
    torch.tensor = lambda *given, pin_memory=False, **named: made(*given, **named)
    known = inspect.signature(LoRAManager).parameters
    return LoRAManager(**{name: each for name, each in asked.items() if name in known})


def _flush(rank: Rank) -> bool:
    rank.flushed += 1
    return True


class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """SGLang's package of kernels, which needs CUDA. Nothing in it is called in an update."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] != "sgl_kernel":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = lambda name: None


def older(rank: Rank) -> Any:
    """The same, in releases without sessions."""
    sys.meta_path.append(Kernels())  # after the model was made: its layers look for kernels
    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.managers.tp_worker import BaseTpWorker
    from sglang.srt.model_executor.model_runner import ModelRunner

    class Runner:
        update_weights_from_tensor = ModelRunner.update_weights_from_tensor
        get_weights_by_name = ModelRunner.get_weights_by_name

        def __init__(self, model: Any) -> None:
            self.device, self.model, self.server_args = "cpu", model, rank.settings
            self.tp_rank, self.tp_size = rank.rank, rank.size

    class Worker:
        update_weights_from_tensor = BaseTpWorker.update_weights_from_tensor
        get_weights_by_name = BaseTpWorker.get_weights_by_name

        def __init__(self, model: Any) -> None:
            self.model_runner, self.tp_rank = Runner(model), rank.rank

    draft = None
    if rank.draft is not None:
        from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

        class Draft:
            update_weights_from_tensor = EAGLEWorkerV2.update_weights_from_tensor
            tp_rank = rank.rank
            target_worker = Worker(rank.model)
            draft_worker = types.SimpleNamespace(draft_runner=Runner(rank.draft))

        draft = Draft()
    asked = {
        "tp_worker": Worker(rank.model),
        "draft_worker": draft,
        "tp_cpu_group": get_tp_group().cpu_group,
        "flush_cache": lambda **_: _flush(rank),
        "offload_tags": set(),
        "memory_saver_adapter": memory_saver(),
        "is_fully_idle": lambda **_: True,
    }
    try:
        from sglang.srt.managers.scheduler_components.weight_updater import (
            SchedulerWeightUpdaterManager,
        )
    except ImportError:
        from sglang.srt.managers.scheduler_update_weights_mixin import SchedulerUpdateWeightsMixin

        made = SchedulerUpdateWeightsMixin()
        vars(made).update(asked)
        return made
    return SchedulerWeightUpdaterManager(**asked)


def tokenizer_manager(ranks: Rank | Ranks) -> Any:
    """SGLang's tokenizer manager, as far as it talks of weights."""
    importlib.import_module("sglang.srt.layers.quantization")  # it looks for kernels
    sys.meta_path.append(Kernels())
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.utils.aio_rwlock import RWLock
    from sglang.utils import TypeBasedDispatcher

    try:
        from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin as Control
    except ImportError:
        from sglang.srt.managers.tokenizer_communicator_mixin import (
            TokenizerCommunicatorMixin as Control,
        )
    from tests.frameworks.sglang_cpu import has_sessions

    class Manager(Control):
        pause_generation = TokenizerManager.pause_generation
        continue_generation = TokenizerManager.continue_generation
        init_lora = TokenizerManager.init_lora

        def __init__(self) -> None:
            self.server_args = ranks.settings
            self.is_pause, self.is_pause_cond = False, asyncio.Condition()
            self.model_update_lock = RWLock()
            self.mm_processor = None
            self.startup_time = 0.0
            self.calls: list[str] = []
            self.died_of: BaseException | None = None
            self._result_dispatcher = TypeBasedDispatcher([])
            self.send_to_scheduler = types.SimpleNamespace(send_pyobj=self._dispatch_to_scheduler)
            self.init_communicators(*(() if has_sessions() else (self.server_args,)))
            self.init_lora()

        def auto_create_handle_loop(self) -> None:
            pass

        def abort_request(self, abort_all: bool) -> None:
            self.calls.append("abort")

        async def _async_dispatch_to_scheduler(self, request: Any) -> None:
            await self._dispatch_to_scheduler(request)

        def _dispatch_to_scheduler(self, request: Any) -> Any:
            return asyncio.get_running_loop().create_task(self._done(request))

        async def _done(self, request: Any) -> None:
            if "Generation" in type(request).__name__:
                self.calls.append(type(request).__name__)
                return
            try:
                answer = await asyncio.to_thread(ranks.handle, request)
            except BaseException as error:  # a scheduler that raises ends its engine
                self.died_of = error
                asyncio.get_running_loop().stop()
            else:
                self._result_dispatcher(answer)

        async def get_internal_state(self) -> list[Any]:
            return []

        if has_sessions():
            record_config_updates = TokenizerManager.record_config_updates

            def config_value(self, name: str) -> Any:
                from sglang.srt.runtime_context import get_context

                return get_context().config_leaf(name)

        else:

            def _update_weight_version_if_provided(self, version: str | None) -> None:
                if version is not None:
                    self.server_args.weight_version = version

            def config_value(self, name: str) -> Any:
                return getattr(self.server_args, name)

    if has_sessions():
        from sglang.srt.runtime_context import publish, publish_role

        ranks.settings.resolve_once()
        if publish_role() is None:
            publish(ranks.settings, role="tokenizer")
    return Manager()
