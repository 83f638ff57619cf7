"""What does an update cost through a framework's adapter, beside what it must cost?

    python -m tests.frameworks --only-make verl
    PYTHONPATH=src:. .venv-frameworks/verl/bin/python -m benches.frameworks verl --mib 128 --rounds 7

An update through the adapter is compared with the sum of three others of the same bytes, in turns
in the same processes: a bare `update` of registered memory, the framework's own run with an engine
that moves nothing, and the copies that the framework's interface forces, at memory's speed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import torch

TENSORS = 16


def tensors(mib: int) -> dict[str, torch.Tensor]:
    return {f"layers.{number}": torch.zeros(mib * 2**18 // TENSORS) for number in range(TENSORS)}


def report(mib: int, through: list[float], parts: dict[str, list[float]]) -> None:
    """Medians, and the ratio that is to be 1.2 at most."""
    named = {"through the adapter": through, **parts}
    medians = {name: statistics.median(found) for name, found in named.items()}
    for name, found in named.items():
        print(
            f"{name:40} {1000 * medians[name]:9.1f} ms   ({1000 * min(found):.1f} to "
            f"{1000 * max(found):.1f})"
        )
    whole = sum(medians[name] for name in parts)
    print(
        f"{mib} MiB: the adapter's update takes {medians['through the adapter'] / whole:.2f} times "
        f"the sum of the others"
    )


def timed(call: Callable[..., object], *given: object) -> float:
    began = time.perf_counter()
    call(*given)
    return time.perf_counter() - began


def llama_sizes(mib: int) -> dict[str, Any]:
    """Of a Llama with so many MiB of weights, about."""
    return {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "num_hidden_layers": max(1, mib // 32),
    }


def ray(mib: int, rounds: int) -> None:
    """Two actors on a local Ray: weights that are updated in place, and objects that Ray Direct
    Transport moves, into new tensors and in place. The run that moves nothing has a transport that
    gives out tensors that it has.
    """
    import secrets
    import tempfile

    import ray
    from ray.experimental import set_target_for_ref
    from ray.experimental.rdt.tensor_transport_manager import (
        CommunicatorMetadata,
        TensorTransportMetadata,
    )
    from ray.experimental.rdt.util import get_tensor_transport_manager, register_tensor_transport

    from tensorhub import sync
    from tensorhub.integrations.ray import location, look_up, start_coordinator
    from tensorhub.integrations.ray_transport import TensorHubTransport, register_transport

    class Nothing(TensorHubTransport):
        """By value, as Ray's workers do not import this module under its name."""

        def __init__(self) -> None:
            self.held = list(tensors(mib).values())

        def tensor_transport_backend(self) -> str:
            return "NOTHING"

        def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: Any) -> Any:
            return TensorTransportMetadata([(each.shape, each.dtype) for each in rdt_object], "cpu")

        def recv_multiple_tensors(
            self, obj_id: str, of: Any, by: CommunicatorMetadata, target_buffers: Any = None
        ) -> Any:
            return self.held if target_buffers is None else list(target_buffers)

        def garbage_collect(self, obj_id: str, of: Any, its: Any) -> None: ...

    register_transport()
    register_tensor_transport("NOTHING", ["cpu"], Nothing, torch.Tensor)

    class Worker:
        def __init__(self, address: str, tcp: str) -> None:
            self.memory = {name: tensors(mib) for name in ("actor", "bare", "fresh", "object")}
            hub, bare = sync.connect(address, location=location()), sync.connect(tcp)
            self.weights = {
                name: each.register(name, self.memory[name])
                for name, each in (("actor", hub), ("bare", bare), ("fresh", bare))
            }

        def step(self, version: int) -> None:
            for name in ("actor", "bare"):
                with self.weights[name].mutate(version):
                    for each in self.memory[name].values():
                        each.fill_(version)
            for each in self.memory["object"].values():
                each.fill_(version)

        def update(self, version: int) -> None:
            self.weights["actor"].update(version)

        def bare(self, name: str, version: int) -> float:
            began = time.perf_counter()
            self.weights[name].update(version)
            return time.perf_counter() - began

        def publish(self, version: int) -> float:
            """As an object is published: its digests are made while it is read."""
            began = time.perf_counter()
            with self.weights["fresh"].mutate(version):
                pass
            return time.perf_counter() - began

        def allocate_and_copy(self) -> float:
            began = time.perf_counter()
            self.copied = [each.clone() for each in self.memory["object"].values()]
            took = time.perf_counter() - began
            del self.copied
            return took

        @ray.method(tensor_transport="tensorhub")
        def tensors(self) -> list[torch.Tensor]:
            return list(self.memory["object"].values())

        @ray.method(tensor_transport="nothing")
        def unmoved(self) -> list[torch.Tensor]:
            return list(self.memory["object"].values())

        def take(self, given: list[torch.Tensor], version: int) -> None:
            assert version == 0 or {each[-1].item() for each in given} == {version}

        def pending(self) -> int:
            return len(get_tensor_transport_manager("TENSORHUB")._published)

        def nothing(self) -> None: ...

    os.environ["TENSORHUB_TOKEN"] = secrets.token_hex()
    with tempfile.TemporaryDirectory() as state_dir:
        ray.init(
            "local",
            num_cpus=8,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
        )
        address = start_coordinator(state_dir=state_dir)
        remote = ray.remote(enable_tensor_transport=True)(Worker)
        trainer, rollout = [remote.remote(address, look_up("tensorhub")) for _ in range(2)]
        found: dict[str, list[float]] = {}
        own = list(tensors(mib).values())

        def timed(name: str, calls: Callable[[], Any]) -> None:
            began = time.perf_counter()
            ray.get(calls())
            found.setdefault(name, []).append(time.perf_counter() - began)

        def in_place(method: Any) -> Any:
            """Into the driver's tensors, as Ray takes a target from the owner of a reference
            only.
            """
            set_target_for_ref(of := method.remote(), own)
            return of

        def told(name: str, *calls: Callable[[], Any]) -> None:
            found.setdefault(name, []).append(sum(ray.get(call()) for call in calls))

        def turns(version: int) -> list[Callable[[], None]]:
            return [
                lambda: told("bare", lambda: rollout.bare.remote("bare", version)),
                lambda: told(
                    "fresh",
                    lambda: trainer.publish.remote(version),
                    lambda: rollout.bare.remote("fresh", version),
                ),
                lambda: timed("update", lambda: rollout.update.remote(version)),
                lambda: timed("call", rollout.nothing.remote),
                lambda: timed(
                    "object", lambda: rollout.take.remote(trainer.tensors.remote(), version)
                ),
                lambda: timed("in place", lambda: in_place(trainer.tensors)),
                lambda: timed("unmoved", lambda: rollout.take.remote(trainer.unmoved.remote(), 0)),
                lambda: timed("unmoved in place", lambda: in_place(trainer.unmoved)),
                lambda: told("copy", rollout.allocate_and_copy.remote),
            ]

        for version in range(1, rounds + 2):
            ray.get(trainer.step.remote(version))
            # each of them comes first now and then: it finds the trainer's memory in no cache
            first = version % 9
            for turn in turns(version)[first:] + turns(version)[:first]:
                turn()
                while ray.get(trainer.pending.remote()):
                    time.sleep(0.01)
        # the first round allocates, and connects
        after = {name: times[1:] for name, times in found.items()}
        bare, load = {"bare update": after["bare"]}, "{:.0f} {:.0f} {:.0f}".format(*os.getloadavg())
        report(mib, after["update"], {**bare, "a call of Ray that moves nothing": after["call"]})
        bare = {"bare publish and update": after["fresh"]}
        report(mib, after["object"], {**bare, "an object that is not moved": after["unmoved"]})
        report(
            mib,
            after["in place"],
            {**bare, "an object that is not moved, in place": after["unmoved in place"]},
        )
        print(
            f"beside it: new tensors and a copy take {1000 * statistics.median(after['copy']):.1f} "
            f"ms; load {load}"
        )
        ray.shutdown()


def verl(mib: int, rounds: int) -> None:
    """verl's manager, two actors and two rollout workers on a local Ray."""
    import ray
    from verl.checkpoint_engine import (
        CheckpointEngine,
        CheckpointEngineManager,
        CheckpointEngineRegistry,
        CheckpointEngineWorker,
    )
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    from examples.verl_update import Engine, Replica, group
    from tensorhub import Options, sync

    everyone = register(dispatch_mode=Dispatch.ONE_TO_ALL)

    def nowhere(actors: int, rollouts: int, metadata: Any) -> Any:
        return {"rank": [0] * actors}, {"rank": [0] * rollouts}

    def engine(name: str, is_master: bool = False) -> Any:
        """By value, as Ray's workers do not import this module under its name."""
        import tensorhub.integrations.verl  # noqa: F401

        class Nothing(CheckpointEngine):
            def __init__(self) -> None:
                # in pages that are there
                self.held = {name: each.fill_(1) for name, each in tensors(mib).items()}

            def prepare(self) -> dict[str, Any]:
                return {}

            build_topology = staticmethod(nowhere)

            def init_process_group(self, rank: int) -> None: ...

            def finalize(self) -> None: ...

            async def send_weights(
                self, weights: Iterable[Any], global_steps: int | None = None
            ) -> None:
                for _ in weights:
                    pass

            async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Any]:
                for each in self.held.items():
                    yield each

        if name == "nothing":
            return Nothing()
        settings = {"host": "127.0.0.1", "is_master": is_master}
        return CheckpointEngineRegistry.new(name, bucket_size=2**30, **settings)

    class Bare:
        """Registered memory, without the adapter."""

        def join(self, address: str, options: Any) -> None:
            self.memory = tensors(mib)
            self.hub = sync.connect(address, token="", options=options)
            self.weights = self.hub.register("bare", self.memory)

    class Actor(Worker):
        def __init__(self) -> None:
            super().__init__()
            initialize_global_process_group_ray(backend="cpu:gloo")
            self.is_master = torch.distributed.get_rank() == 0
            self.engines = {name: engine(name, self.is_master) for name in ("tensorhub", "nothing")}
            self.bare, self.present, self.target = Bare(), tensors(mib), tensors(mib)

        @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
        def execute_checkpoint_engine(self, method: str, *given: Any, **named: Any) -> Any:
            return getattr(self.checkpoint_engine, method)(*given, **named)

        @everyone
        def use(self, name: str) -> None:
            self.checkpoint_engine = self.engines[name]

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        async def update_weights(self, global_steps: int, mode: str) -> Any:
            return await self.checkpoint_engine.send_weights(self.gathered(), global_steps)

        def gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from self.present.items()

        @everyone
        def join(self, address: str, options: Any) -> None:
            if self.is_master:
                self.bare.join(address, options)

        @everyone
        def step(self, version: int) -> float:
            """Other bytes, and how long one copy of them takes."""
            for each in self.present.values():
                each.fill_(version)
            began = time.perf_counter()
            for name, each in self.present.items():
                self.target[name].copy_(each)
            return time.perf_counter() - began

        @everyone
        def publish(self, version: int) -> float:
            """When a bare publication began; its readers wait for it already, as those of the
            adapter do.
            """
            if not self.is_master:
                return 0.0
            with self.bare.weights.mutate(version):
                for each in self.bare.memory.values():
                    each.fill_(version)
                began = time.time()
            return began

    class Rollout(CheckpointEngineWorker):
        @everyone
        def use(self, name: str) -> None:
            if not hasattr(self, "engines"):
                self.engines = {each: engine(each) for each in ("tensorhub", "nothing")}
            self.checkpoint_engine = self.engines[name]

        @everyone
        def join(self, address: str, options: Any) -> None:
            self.bare = Bare()
            self.bare.join(address, options)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        def bare_update(self, version: int) -> float:
            """When it was complete."""
            self.bare.hub.wait_for("bare", at_least=version)
            self.bare.weights.update(version)
            return time.time()

    config = {
        name: CheckpointEngineConfig(
            backend=name,
            custom_backend_module="tensorhub.integrations.verl",
            engine_kwargs={name: {"host": "127.0.0.1"}},
        )
        for name in ("tensorhub", "nothing")
    }
    ray.init(
        "local",
        num_cpus=64,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    options = Options(op_timeout_s=120.0)
    with sync.serve(token="") as coordinator:
        actors = group("actors", Actor)
        rollout = RolloutConfig(name="vllm", checkpoint_engine=config["tensorhub"])
        rollouts = group(
            "rollouts", Rollout, server_adapter=Engine(), rollout_config=rollout, model_config=None
        )
        replicas = [Replica(worker) for worker in rollouts.workers]
        CheckpointEngineRegistry.register("nothing")(
            type("Nothing", (), {"build_topology": staticmethod(nowhere)})
        )
        managers = {
            name: CheckpointEngineManager(config[name], actors, replicas) for name in config
        }
        for workers in (actors, rollouts):
            workers.join(coordinator.address, options)
        through, bare, nothing, copies = [], [], [], []
        for version in range(1, rounds + 2):  # the first round allocates and registers
            copied = max(actors.step(version))
            updating = rollouts.bare_update(version)
            began_at = max(actors.publish(version))
            updated = max(ray.get(updating)) - began_at
            seconds = {}
            for name, manager in managers.items():
                for workers in (actors, rollouts):
                    workers.use(name)
                began = time.perf_counter()
                manager.update_weights(version)
                seconds[name] = time.perf_counter() - began
            if version > 1:
                through.append(seconds["tensorhub"])
                nothing.append(seconds["nothing"])
                bare.append(updated)
                copies.append(copied)
        parts = {
            "bare update": bare,
            "verl with an engine that moves nothing": nothing,
            "the sender's copy": copies,
        }
        report(mib, through, parts)
    ray.shutdown()


def trl(mib: int, rounds: int) -> None:
    """TRL's calls of a weight transfer, and a rollout in the same process; an engine that moves
    nothing iterates.
    """
    from tensorhub import sync
    from tensorhub.integrations.trl import RolloutWeights, WeightTransfer

    def parameters() -> torch.nn.ParameterList:
        return torch.nn.ParameterList([torch.nn.Parameter(each) for each in tensors(mib).values()])

    trained, policy, bare_policy, target = (parameters() for _ in range(4))
    transfer = WeightTransfer()
    transfer.init_weight_transfer()
    rollout = RolloutWeights(policy, transfer.rollout_settings)
    found: list[list[float]] = []
    with (
        sync.serve(token="") as coordinator,
        sync.connect(coordinator.address, token="") as sender,
        sync.connect(coordinator.address, token="") as receiver,
        torch.no_grad(),
    ):
        published, updated = (
            sender.register("bare", trained),
            receiver.register("bare", bare_policy),
        )
        for version in range(1, rounds + 2):
            with published.mutate(version):
                for each in trained:
                    each.fill_(version)
            bare_s = updated.update(version).seconds
            moments = [time.perf_counter()]
            for to, each in zip(target, trained, strict=True):
                to.copy_(each)
            moments.append(time.perf_counter())
            for _ in trained.named_parameters():
                pass
            moments.append(time.perf_counter())
            transfer.pause()
            transfer.send_weights(trained.named_parameters())
            transfer.resume()
            rollout.update_model_version(version)
            assert rollout.refresh() == version
            moments.append(time.perf_counter())
            copy_s, nothing_s, through_s = (b - a for a, b in itertools.pairwise(moments))
            found.append([through_s, bare_s, nothing_s, copy_s])
    rollout.close()
    transfer.destroy()
    through, bare, nothing, copies = map(list, zip(*found[1:], strict=True))
    report(
        mib,
        through,
        {"bare update": bare, "an engine that moves nothing": nothing, "the sender's copy": copies},
    )


def vllm(mib: int, rounds: int, extension: bool = True) -> None:
    """vLLM's offline `LLM` and a trainer in one process; every layer is written in place, so that
    no copy is forced. `extension`: with the worker extension, else with vLLM's own interface, where
    a trainer publishes and unpublishes in the same call.
    """
    import tempfile
    from pathlib import Path

    from tests.frameworks import vllm_cpu

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    vllm_cpu.LLAMA.update(llama_sizes(mib))
    path = vllm_cpu.prepare(Path(tempfile.mkdtemp()))
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from tensorhub import sync
    from tensorhub.integrations.vllm import OfflineClient, TrainerInit
    from tensorhub.integrations.vllm_ranks import Outcome
    from tensorhub.integrations.vllm_session import ExtensionClient, Session, Settings
    from tensorhub.integrations.vllm_updater import Updater

    how: dict[str, Any] = {"weight_transfer_config": WeightTransferConfig(backend="tensorhub")}
    if extension:
        how = {"worker_extension_cls": "tensorhub.integrations.vllm_worker.WorkerExtension"}
    llm = LLM(model=path, **how, **vllm_cpu.ENGINE)
    model = LlamaForCausalLM(LlamaConfig(**vllm_cpu.LLAMA)).to(torch.bfloat16)
    moving = Updater.prepare, Updater.update
    with (
        sync.serve() as coordinator,
        sync.connect(coordinator.address) as hub,
        sync.connect(coordinator.address) as readers,
    ):
        published, reader = hub.register("bare", model), None
        if extension:
            session = Session(ExtensionClient(llm), Settings(coordinator.address, "actor"))
            weights = hub.register("actor", model)
        else:
            trainer = WeightTransferTrainerFactory.trainer_init(
                TrainerInit(address=coordinator.address, rank=0),
                client=OfflineClient(llm),
                source=model,
            )
            session = trainer._fleet._members[0].engine
        through, bare, nothing = list[float](), list[float](), list[float]()
        for version in range(rounds + 1):  # the first round records and registers
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            # in turns: the second one finds the trainer's memory in caches
            order = ("adapter", "bare")
            for name in order if version % 2 == 0 else reversed(order):
                if name == "bare":
                    if reader is None:
                        (updater,) = llm.collective_rpc(updater_of)
                        memory = {
                            name: torch.zeros_like(each) for name, each in updater.live.items()
                        }
                        sources = updater.plan.recording.sources
                        reader = readers.register("bare", memory, sources=sources, partial=True)
                    info = published.publish(version)
                    bare.append(timed(reader.update, version))
                    published.unpublish()
                elif extension:
                    info = weights.publish(version)
                    through.append(timed(session.update, info))
                    weights.unpublish()
                else:
                    through.append(timed(trainer.send_weights))
            Updater.prepare = Updater.update = lambda self, version: Outcome()  # type: ignore[method-assign]
            nothing.append(timed(session.update, info))
            Updater.prepare, Updater.update = moving  # type: ignore[method-assign]
        nbytes = sum(tensor.nbytes for tensor in memory.values()) >> 20
        report(
            nbytes,
            through[1:],
            {"bare update": bare[1:], "vLLM with an engine that moves nothing": nothing[1:]},
        )
        if not extension:
            trainer.shutdown()
        llm.collective_rpc(leave)


def updater_of(worker: Any) -> Any:
    engine = getattr(worker, "weight_transfer_engine", None)
    return worker._tensorhub_updater if engine is None else engine.updater


def leave(worker: Any) -> None:
    updater_of(worker).close()


def sglang(mib: int, rounds: int) -> None:
    """One rank of SGLang's and a trainer in one process; every layer is written in place, so that
    no copy is forced.
    """
    import tempfile
    from pathlib import Path

    from tests.frameworks import sglang_cpu, vllm_cpu

    config = llama_sizes(mib)
    rank = sglang_cpu.Rank(Path(tempfile.mkdtemp()), **config)
    from transformers import LlamaConfig, LlamaForCausalLM

    from tensorhub import sync
    from tensorhub.integrations.sglang import Trainer
    from tensorhub.integrations.sglang_engine import Receiver
    from tensorhub.integrations.sglang_session import Order, Report

    model = LlamaForCausalLM(LlamaConfig(**{**vllm_cpu.LLAMA, **config})).to(torch.bfloat16)
    take = Receiver.take

    def no_op(self: Receiver, named_tensors: Any) -> None:
        self.report = Report(Order.of(named_tensors).nonce)

    with (
        sync.serve() as coordinator,
        sync.connect(coordinator.address) as hub,
        sync.connect(coordinator.address) as readers,
        Trainer(model, sglang_cpu.engine(rank), coordinator.address) as trainer,
    ):
        published, reader = hub.register("bare", model), None
        through, bare, nothing = [], [], []
        for version in range(rounds + 1):  # the first round probes, records and registers
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            # in turns: who comes second finds the trainer's memory in caches
            order = ("adapter", "bare")
            for name in order if version % 2 == 0 else reversed(order):
                if name == "adapter":
                    began = time.perf_counter()
                    trainer.send_weights()
                    through.append(time.perf_counter() - began)
                    continue
                if reader is None:
                    plan = rank.receiver._plan
                    memory = {
                        name: torch.zeros_like(tensor) for name, tensor in plan.in_place.items()
                    }
                    reader = readers.register(
                        "bare", memory, sources=plan.recording.sources, partial=True
                    )
                info = published.publish(version)
                began = time.perf_counter()
                reader.update(version)
                bare.append(time.perf_counter() - began)
                published.unpublish()
            Receiver.take = no_op  # type: ignore[method-assign]
            began = time.perf_counter()
            trainer._fleet.update(info)
            nothing.append(time.perf_counter() - began)
            Receiver.take = take  # type: ignore[method-assign]
        nbytes = sum(tensor.nbytes for tensor in memory.values()) >> 20
        report(
            nbytes,
            through[1:],
            {"bare update": bare[1:], "SGLang with a loader that moves nothing": nothing[1:]},
        )


FRAMEWORKS: dict[str, Callable[[int, int], None]] = {
    "ray": ray,
    "sglang": sglang,
    "trl": trl,
    "verl": verl,
    "vllm": vllm,
    "vllm-backend": functools.partial(vllm, extension=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.frameworks", description=__doc__)
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    FRAMEWORKS[arguments.framework](arguments.mib, arguments.rounds)


if __name__ == "__main__":
    main()
