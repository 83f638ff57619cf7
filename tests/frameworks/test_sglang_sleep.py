"""An SGLang engine that gives the memory of its weights away, by SGLang's own calls. No memory goes
on a CPU: garbage stands for what is there afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import IntegrityError, StateError, VersionUnavailable
from tests.frameworks import sglang_cpu
from tests.frameworks.test_sglang import check
from tests.frameworks.test_vllm import actor, train

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> sglang_cpu.Rank:
    return sglang_cpu.Rank(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(rank: sglang_cpu.Rank) -> Iterator[Any]:
    made = sglang_cpu.engine(rank)
    yield made
    assert made.tokenizer_manager.died_of is None
    made.loop.close()
    rank.receiver.close()
    del rank.model.get_weights_by_name


@pytest.fixture
def address() -> Iterator[str]:
    with sync.serve() as coordinator:
        yield coordinator.address


def sleep(engine: Any, *, is_asleep: bool) -> None:
    from sglang.srt.managers import io_struct

    name = "Release" if is_asleep else "Resume"
    request = getattr(io_struct, f"{name}MemoryOccupationReqInput")(tags=["weights"])
    call = getattr(engine.tokenizer_manager, f"{name.lower()}_memory_occupation")
    engine.loop.run_until_complete(call(request))


def lose(rank: sglang_cpu.Rank) -> None:
    for parameter in rank.model.parameters():
        parameter.data.fill_(7.0)


def trainer(model: torch.nn.Module, engine: Any, address: str, **settings: Any) -> Any:
    from tensorhub.integrations.sglang import Trainer

    return Trainer(model, engine, address, timeout_s=60.0, **settings)


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_after_a_sleep_the_next_update_writes_everything(
    rank: sglang_cpu.Rank, engine: Any, address: str, host_memory_bytes: int
) -> None:
    model = actor(1)
    with trainer(model, engine, address, host_memory_bytes=host_memory_bytes) as sender:
        sender.send_weights()
        sleep(engine, is_asleep=True)
        calls = len(engine.tokenizer_manager.calls)
        for call in (sender.send_weights, sender.check_weights):
            with pytest.raises(StateError, match=r'resume_memory_occupation\(tags=\["weights"\]\)'):
                call()
        assert len(engine.tokenizer_manager.calls) == calls, "it was not even paused"
        lose(rank)
        sleep(engine, is_asleep=False)
        with pytest.raises(IntegrityError, match=r"15 tensor\(s\)"):
            sender.check_weights()
        sender.send_weights()
        check(rank, model)  # with the padding of embeddings
        sender.check_weights()


def test_the_memory_of_an_engine_that_sleeps_is_no_source(
    rank: sglang_cpu.Rank, engine: Any, address: str
) -> None:
    model = actor(2)
    with trainer(model, engine, address) as sender:
        sender.send_weights()
        plan = rank.receiver._plan
        with sync.connect(address) as hub:

            def update(group: str) -> None:
                memory = {name: torch.zeros_like(each) for name, each in plan.in_place.items()}
                sources = plan.recording.sources
                reader = hub.register(
                    "actor", memory, sources=sources, group=group, partial=True, spot=True
                )
                reader.update(0, timeout=10.0)
                assert all(torch.equal(each, plan.in_place[name]) for name, each in memory.items())
                reader.close()

            update("before")  # from the engine, for the trainer has it no longer
            sleep(engine, is_asleep=True)
            lose(rank)
            with pytest.raises(VersionUnavailable):
                update("after")
        sleep(engine, is_asleep=False)
        train(model)
        sender.send_weights()
        check(rank, model)


def test_an_engine_that_sleeps_before_its_first_update(
    rank: sglang_cpu.Rank, engine: Any, address: str
) -> None:
    model = actor(3)
    sleep(engine, is_asleep=True)
    with trainer(model, engine, address) as sender:
        before = rank.checksums()
        with pytest.raises(StateError, match="the engine sleeps"):
            sender.send_weights()
        assert rank.checksums() == before
        sleep(engine, is_asleep=False)
        sender.send_weights()
        check(rank, model)
