"""SGLang on a machine without a GPU, where its engine does not start: everything of it that an
update goes through, of each release that the adapter supports.

A rank has SGLang's model and what of its scheduler updates weights, in SGLang's process groups over
gloo. Before them is SGLang's tokenizer manager, as far as it talks of weights. Left out is the
scheduler between them, with its sockets and its loop, and all that generates.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import pickle
import re
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.frameworks import sglang_parts
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
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        importlib.import_module("sglang.srt.layers.quantization")  # it looks for kernels
        sys.meta_path.append(sglang_parts.Kernels())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def has_sessions() -> bool:
    from sglang import __version__

    from tensorhub.integrations import sglang_session

    return sglang_session.has_sessions(__version__)


def settings(directory: Path, size: int, config: dict[str, Any]) -> Any:
    """What a server of a small Llama is started with. `config`: of the model; "server": of the
    server; "draft": of a draft model with a checkpoint of its own.
    """
    shim()
    from sglang.srt.server_args import ServerArgs

    from tensorhub.integrations.sglang import LOADER

    config = {**LLAMA, **config}
    server, draft = config.pop("server", {}), config.pop("draft", None)
    (directory / "config.json").write_text(json.dumps(config))
    if draft is not None:
        (directory / "draft").mkdir(exist_ok=True)
        (directory / "draft" / "config.json").write_text(json.dumps({**LLAMA, **draft}))
    made = ServerArgs(
        **{
            "model_path": str(directory),
            "device": "cpu",
            "tp_size": size,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "custom_weight_loader": [LOADER],
            "speculative_draft_model_path": draft and str(directory / "draft"),
            **server,
        }
    )
    if made.speculative_draft_model_path is not None:
        made.speculative_algorithm = "EAGLE"  # not before: then SGLang looks for a GPU
    return made


class Rank:
    """One rank of an engine, in this process."""

    def __init__(
        self,
        directory: Path,
        rank: int = 0,
        size: int = 1,
        store: Path | None = None,
        **config: Any,
    ) -> None:
        shim()
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.dp_attention import initialize_dp_attention

        self.rank, self.size, self.directory = rank, size, directory
        self.settings = settings(directory, size, config)
        if has_sessions():
            from sglang.srt.runtime_context import SpawnRanks, publish

            publish(self.settings, role="scheduler", ranks=SpawnRanks(world_rank=rank))
        else:
            from sglang.srt.server_args import set_global_server_args_for_scheduler

            set_global_server_args_for_scheduler(self.settings)
        where = {
            "distributed_init_method": f"file://{store or directory / 'store'}",
            "backend": "gloo",
            "timeout": 120,
        }
        self.config = ModelConfig.from_server_args(self.settings)
        if not torch.distributed.is_initialized():  # one rank after the other may be in a process
            parallel_state.init_distributed_environment(
                world_size=size, rank=rank, local_rank=rank, **where
            )
            sizes = {} if has_sessions() else {"tensor_model_parallel_size": size}
            parallel_state.initialize_model_parallel(backend="gloo", **sizes)
            models = {} if has_sessions() else {"model_config": self.config}
            initialize_dp_attention(server_args=self.settings, **models)
        self.model = self._loaded(self.settings.load_format)
        self.draft: Any = None
        if self.settings.speculative_draft_model_path is not None:
            self.draft = self._loaded(self.settings.load_format, is_draft=True)
            self.draft.set_embed_and_head(*self.model.get_embed_and_head())
        self.versions: list[str] = []
        self.flushed = 0
        self.manager = sglang_parts.manager(self) if has_sessions() else sglang_parts.older(self)
        self.adapters: Any = sglang_parts.adapters(self) if self.settings.enable_lora else None
        # as a scheduler has them
        self.disable_radix_cache = False
        self.server_args, self.draft_worker, self.weight_updater = self.settings, None, self.manager
        self.tp_worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=self.model))

    def _loaded(self, load_format: str, *, is_draft: bool = False) -> Any:
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader import get_model

        config = self.config
        if is_draft:
            path = self.settings.speculative_draft_model_path
            config = type(config).from_server_args(
                self.settings, model_path=path, is_draft_model=True
            )
        return get_model(
            model_config=config,
            load_config=LoadConfig(load_format=load_format),
            device_config=DeviceConfig("cpu"),
        )

    def handle(self, request: Any) -> Any:
        """What the scheduler does with a request, in the mode in which its loop runs."""
        name = type(request).__name__.removesuffix("ReqInput").replace("LoRA", "Lora")
        name = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
        with torch.inference_mode():
            if "lora" in name:
                return getattr(self.adapters, name)(request.to_ref())
            return getattr(self.manager, name)(request)

    def run_batch(self) -> dict[str, str]:
        """In the place of a scheduler's, which uses the weights."""
        return self.checksums()

    def checksums(self) -> dict[str, str]:
        """Of all parameters and buffers of the model."""
        return checksums(self.model)

    @property
    def receiver(self) -> Any:
        return self.model.get_weights_by_name.receiver

    def ways(self) -> tuple[list[str], list[str]]:
        """The parameters that are written in place, and the layers that SGLang's loader loads."""
        plan = self.receiver._plan
        loaded = [layer.name for batch in plan.loaded for layer in batch.layers]
        return sorted(plan.in_place), loaded

    def fail(self, text: str | None) -> None:
        """From now on the step after loading fails on this rank; None: no more."""

        def fail() -> None:
            raise RuntimeError(text)

        self.model.__dict__.pop("post_load_weights", None)
        if text is not None:
            self.model.post_load_weights = fail

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
        """The checksums of another model that SGLang has loaded from a checkpoint of these."""
        path = self.directory / "model.safetensors"
        kept = path.read_bytes() if path.exists() else None
        save_file({name: each.detach().clone() for name, each in weights.items()}, path)
        try:
            return checksums(self._loaded("auto"))
        finally:
            path.unlink() if kept is None else path.write_bytes(kept)


def checksums(model: torch.nn.Module) -> dict[str, str]:
    return {
        name: hashlib.sha256(
            each.data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, each in model.state_dict().items()
    }


class Ranks:
    """An engine whose ranks are processes. `call` calls a method of `Rank` on each, by name."""

    def __init__(self, directory: Path, size: int, **config: Any) -> None:
        self.settings = settings(directory, size, config)
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            there = directory / f"{rank}"
            there.mkdir()
            process = context.Process(
                target=_serve,
                args=(theirs, there, rank, size, directory / "store", config),
                daemon=True,
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
    pipe: Connection, directory: Path, rank: int, size: int, store: Path, config: dict[str, Any]
) -> None:
    one = Rank(directory, rank, size, store, **config)
    pipe.send(None)
    while True:
        name, given = pipe.recv()
        pipe.send(getattr(one, name)(*given))


def engine(ranks: Rank | Ranks) -> Any:
    """Like an `sglang.Engine` of these ranks: its loop, its settings, and SGLang's tokenizer
    manager as far as needed.
    """
    from tensorhub.integrations import sglang_engine

    sglang_engine._shown.clear()  # it knows one engine in a process
    manager = sglang_parts.tokenizer_manager(ranks)
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
