"""SGLang on a machine without a GPU, where its engine does not start: everything of it that an
update goes through.

A rank has SGLang's model, `WeightUpdater`, `SchedulerWeightUpdaterManager` and `WeightChecker`, in
SGLang's process groups over gloo. Before them is SGLang's tokenizer manager, as far as it talks of
weights (`TokenizerControlMixin`). Left out is the scheduler between them, with its sockets and its
loop, and all that generates.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.frameworks.vllm_cpu import LLAMA

START_S = 300.0  # until a process of ranks is there, on a machine that does other things
ANSWER_S = 120.0
_kept: list[torch.library.Library] = []


def shim() -> None:
    """Define what is missing here, and is not called in an update: two operators of torchvision,
    and a kernel of vLLM's.
    """
    if _kept:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _kept.append(library)
    kernels = types.ModuleType("vllm._custom_ops")
    kernels.rotary_embedding = None  # type: ignore[attr-defined]
    sys.modules.setdefault("vllm", types.ModuleType("vllm"))
    sys.modules.setdefault("vllm._custom_ops", kernels)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def settings(directory: Path, size: int, config: dict[str, Any]) -> Any:
    """What a server of a small Llama is started with."""
    shim()
    from sglang.srt.server_args import ServerArgs

    from tensorhub.integrations.sglang import LOADER

    (directory / "config.json").write_text(json.dumps({**LLAMA, **config}))
    return ServerArgs(
        model_path=str(directory),
        device="cpu",
        tp_size=size,
        load_format="dummy",
        skip_tokenizer_init=True,
        custom_weight_loader=[LOADER],
    )


class Rank:
    """One rank of an engine, in this process; a process has one."""

    def __init__(
        self, directory: Path, rank: int = 0, size: int = 1, port: int = 0, **config: Any
    ) -> None:
        shim()
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.managers.scheduler_components.weight_updater import (
            SchedulerWeightUpdaterManager,
        )
        from sglang.srt.managers.tp_worker import BaseTpWorker
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.model_loader import get_model
        from sglang.srt.runtime_context import SpawnRanks, get_model as model_settings, publish
        from sglang.srt.utils.weight_checker import WeightChecker

        self.settings = settings(directory, size, config)
        publish(self.settings, role="scheduler", ranks=SpawnRanks(world_rank=rank))
        where = {
            "distributed_init_method": f"tcp://127.0.0.1:{port or free_port()}",
            "backend": "gloo",
            "timeout": 120,
        }
        parallel_state.init_distributed_environment(
            world_size=size, rank=rank, local_rank=rank, **where
        )
        parallel_state.initialize_model_parallel(backend="gloo")
        initialize_dp_attention(server_args=self.settings)
        model_config = ModelConfig.from_server_args(self.settings)
        load = LoadConfig(load_format="dummy")
        self.model = get_model(
            model_config=model_config, load_config=load, device_config=DeviceConfig("cpu")
        )
        self.updater = WeightUpdater(
            tp_rank=rank,
            device="cpu",
            gpu_id=0,
            model_config=model_config,
            custom_weight_loaders=model_settings().custom_weight_loader,
            get_model=lambda: self.model,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )
        self._checker = WeightChecker(get_model=lambda: self.model)
        self.flushed = 0
        runner = types.SimpleNamespace(
            weight_updater=self.updater, check_weights=self._checker.handle
        )
        worker = types.SimpleNamespace(
            weight_update_runners=lambda: [("target", runner)],
            deserialize_own_rank=lambda given: BaseTpWorker.deserialize_own_rank(None, given),
        )
        self.versions: list[str] = []
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=self._flush,
            is_fully_idle=lambda **_: True,
            scheduler=types.SimpleNamespace(record_weight_version_change=self._changed),
        )

    def _flush(self, empty_cache: bool) -> bool:
        self.flushed += 1
        return True

    def _changed(self, new_version: str | None) -> None:
        if new_version is not None:
            self.versions.append(new_version)

    def handle(self, request: Any) -> Any:
        """What the scheduler does with a request, in the mode in which its loop runs."""
        from sglang.srt.managers import io_struct

        calls: dict[type, Callable[[Any], Any]] = {
            io_struct.BeginWeightUpdateReqInput: self.manager.begin_weight_update,
            io_struct.UpdateWeightsFromTensorReqInput: self.manager.update_weights_from_tensor,
            io_struct.EndWeightUpdateReqInput: self.manager.end_weight_update,
            io_struct.CheckWeightsReqInput: self.manager.check_weights,
        }
        with torch.inference_mode():
            return calls[type(request)](request)

    def checksums(self) -> dict[str, str]:
        return dict(self._checker.handle("checksum", role="target")["checksums"])

    def ways(self) -> tuple[list[str], list[str]]:
        """The parameters that are written in place, and the published tensors that the loader is
        given.
        """
        plan = self.model._modules["tensorhub"].receiver._plan
        return sorted(plan.in_place), list(plan.loaded)

    def fail(self, text: str | None) -> None:
        """From now on the step after loading fails on this rank; None: no more."""
        from sglang.srt.model_loader import loader

        def fail(_: Any) -> None:
            raise RuntimeError(text)

        self._post_load = getattr(self, "_post_load", loader.post_load_weights)
        loader.post_load_weights = self._post_load if text is None else fail

    def tell_of_chunks(self, path: Path | None) -> None:
        """From now on that file is there once chunks are verified that this rank has read; None: no
        more.
        """
        from tensorhub.runtime.data.serving import SharedOwner

        def mark_available(*given: Any, **named: Any) -> Any:
            made = self._mark_available(*given, **named)
            assert path is not None
            path.touch()
            return made

        self._mark_available = getattr(self, "_mark_available", SharedOwner.mark_available)
        SharedOwner.mark_available = self._mark_available if path is None else mark_available  # type: ignore[method-assign]

    def die_in_the_next_update(self) -> None:
        from tensorhub.integrations.sglang_engine import Receiver

        Receiver._fill = lambda *_: os._exit(1)  # type: ignore[method-assign]

    def loaded_by_sglang(self, weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The checksums after SGLang has loaded these in its own way, with its default loader."""
        with torch.inference_mode():
            self.updater.begin_weight_update()
            done, said = self.updater.update_weights_from_tensor(list(weights.items()))
            assert done, said
            self.updater.end_weight_update(run_post_load=False)
        return self.checksums()


class Ranks:
    """An engine whose ranks are processes. `call` calls a method of `Rank` on each, by name."""

    def __init__(self, directory: Path, size: int, **config: Any) -> None:
        self.settings = settings(directory, size, config)
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            there = directory / f"{rank}"
            there.mkdir()
            process = context.Process(
                target=_serve, args=(theirs, there, rank, size, port, config), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            _answer(pipe, START_S)

    def handle(self, request: Any) -> Any:
        return self.call("handle", request)[0]

    def call(self, name: str, *given: Any) -> list[Any]:
        for pipe in self.pipes:
            _send(pipe, name, given)
        return [_answer(pipe, ANSWER_S) for pipe in self.pipes]

    def call_on(self, rank: int, name: str, *given: Any) -> Any:
        _send(self.pipes[rank], name, given)
        return _answer(self.pipes[rank], ANSWER_S)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def _send(pipe: Connection, name: str, given: tuple[Any, ...]) -> None:
    # SGLang changes how processes pickle tensors for each other
    pipe.send_bytes(pickle.dumps((name, given)))


def _answer(pipe: Connection, within_s: float) -> Any:
    assert pipe.poll(within_s), "a rank has not answered"
    answer = pipe.recv()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _serve(
    pipe: Connection, directory: Path, rank: int, size: int, port: int, config: dict[str, Any]
) -> None:
    one = Rank(directory, rank, size, port, **config)
    pipe.send(None)
    while True:
        name, given = pipe.recv()
        pipe.send(getattr(one, name)(*given))


def engine(ranks: Rank | Ranks) -> Any:
    """Like an `sglang.Engine` of these ranks: its loop, its settings, and SGLang's tokenizer
    manager as far as needed.
    """
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.runtime_context import get_context, publish, publish_role
    from sglang.srt.utils.aio_rwlock import RWLock
    from sglang.utils import TypeBasedDispatcher

    class Manager(TokenizerControlMixin):
        pause_generation = TokenizerManager.pause_generation
        continue_generation = TokenizerManager.continue_generation
        record_config_updates = TokenizerManager.record_config_updates

        def __init__(self, settings: Any) -> None:
            self.server_args = settings
            self.is_pause, self.is_pause_cond, self.model_update_lock = (
                False,
                asyncio.Condition(),
                RWLock(),
            )
            self.mm_processor = None
            self.startup_time = 0.0
            self.calls: list[str] = []
            self.died_of: BaseException | None = None
            self._result_dispatcher = TypeBasedDispatcher([])
            self.init_communicators()

        def auto_create_handle_loop(self) -> None:
            pass

        def abort_request(self, abort_all: bool) -> None:
            self.calls.append("abort")

        async def _async_dispatch_to_scheduler(self, request: Any) -> None:
            self.calls.append(type(request).__name__)

        def _dispatch_to_scheduler(self, request: Any) -> None:
            asyncio.get_running_loop().create_task(self._done(request))

        async def _done(self, request: Any) -> None:
            try:
                answer = await asyncio.to_thread(ranks.handle, request)
            except BaseException as error:  # a scheduler that raises ends its engine
                self.died_of = error
                asyncio.get_running_loop().stop()
            else:
                self._result_dispatcher(answer)

        def config_value(self, name: str) -> Any:
            return get_context().config_leaf(name)

        async def get_internal_state(self) -> list[Any]:
            return []

    ranks.settings.resolve_once()
    if publish_role() is None:
        publish(ranks.settings, role="tokenizer")
    manager = Manager(ranks.settings)
    return types.SimpleNamespace(
        loop=asyncio.new_event_loop(), server_args=ranks.settings, tokenizer_manager=manager
    )


@contextlib.contextmanager
def served(like_an_engine: Any) -> Iterator[str]:
    """The address of SGLang's HTTP routes before such an engine."""
    import uvicorn
    from sglang.srt.entrypoints import http_server

    http_server.set_global_state(
        http_server._GlobalState(like_an_engine.tokenizer_manager, None, {})
    )
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(http_server.app, "127.0.0.1", port, lifespan="off", log_level="warning")
    )

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # of a loop that was stopped: the engine has ended
            server.run()

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started:
        assert thread.is_alive(), "the server has not started"
        assert time.monotonic() < deadline, "the server has not started"
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
