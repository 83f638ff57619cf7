"""verl's real manager, worker groups and rollout workers on a real local Ray: two actors, two
rollouts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import anyio
import pytest
import torch

pytestmark = [pytest.mark.framework, pytest.mark.timeout(900)]

pytest.importorskip(
    "verl",
    reason="verl is not installed here; `make frameworks "
    "FRAMEWORKS=verl` installs it, and runs this",
)

import ray  # noqa: E402
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402
from verl.workers.config import CheckpointEngineConfig, RolloutConfig  # noqa: E402
from verl.workers.rollout import RolloutReplica  # noqa: E402

from tensorhub.errors import OperationTimeout, RegistrationError, StateError, VersionConflict  # noqa: E402
from tests.frameworks.verl_workers import Actor, Rollout, sums, weights  # noqa: E402

TIMEOUT_S, DEADLINE_S = 30.0, 300.0  # of an update, and of what a test waits for
NAMES = iter(range(1000))


class Replica(RolloutReplica):
    """Of one worker, whose engine is not a server."""

    def __init__(self, worker: Any) -> None:
        self.workers: list[Any] = [worker]
        self.servers: list[Any] = []

    async def launch_servers(self) -> None: ...


class Cluster:
    """`seen` asks the rollout workers that live."""

    def __init__(self, **settings: Any) -> None:
        self.ranks = [0, 1]
        engine = CheckpointEngineConfig(
            backend="tensorhub",
            custom_backend_module="tensorhub.integrations.verl",
            engine_kwargs={"tensorhub": settings},
        )
        self.actors = group(Actor, config=engine)
        self.rollouts = group(
            Rollout,
            rollout_config=RolloutConfig(name="vllm", checkpoint_engine=engine),
            model_config=None,
        )
        self.replicas = [Replica(worker) for worker in self.rollouts.workers]
        self.manager = CheckpointEngineManager(engine, self.actors, list(self.replicas))

    def update(self, version: int, steps: int | None, **how: bool) -> dict[str, float]:
        self.actors.train(version, **how)
        found: dict[str, float] = self.manager.update_weights(steps)
        return found

    def seen(self) -> list[tuple[list[str], dict[str, float]]]:
        """What has come of each update, and what is held now."""
        asked = [self.rollouts.workers[rank].seen.remote() for rank in self.ranks]
        seen: list[tuple[list[str], dict[str, float]]] = ray.get(asked, timeout=DEADLINE_S)
        return seen

    def outcomes(self, count: int) -> list[list[str]]:
        """Once there are so many."""
        until = time.monotonic() + DEADLINE_S
        while min(map(len, found := [outcomes for outcomes, _ in self.seen()])) < count:
            assert time.monotonic() < until, (
                f"a rollout neither has the version nor an error: {found}"
            )
        return found


def group(cls: type, **given: Any) -> Any:
    pool = RayResourcePool(
        [2], use_gpu=False, max_colocate_count=2, name_prefix=f"pool{next(NAMES)}"
    )
    return RayWorkerGroup(
        pool, RayClassWithInitArgs(cls=ray.remote(cls), **given), device_name="cpu", bin_pack=False
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all tests, as its processes take long to start; those that kill one of them come
    last.
    """
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        "local",
        num_cpus=64,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    yield Cluster(host="127.0.0.1", timeout_s=TIMEOUT_S)
    ray.shutdown()


def expected(version: int) -> dict[str, float]:
    return sums(dict(weights(version)))


def test_updates_bring_each_rollout_the_actors_bytes(cluster: Cluster) -> None:
    for version, steps in ((1, 1), (2, 2), (3, None), (7, 7)):
        costs = cluster.update(version, steps)
        assert [held for _, held in cluster.seen()] == [expected(version)] * 2
        assert costs["tensorhub/version"] == version
        assert costs["tensorhub/bytes"] == 16 * 2**20 + 14
    assert [outcomes for outcomes, _ in cluster.seen()] == [["1", "2", "None", "7"]] * 2
    assert cluster.rollouts.committed() == [[1, 2, 3, 7]] * 2


def test_a_generator_that_raises_publishes_nothing_and_the_next_update_is_whole(
    cluster: Cluster,
) -> None:
    with pytest.raises(RuntimeError, match="the gather has failed"):
        cluster.update(8, 8, fails=True)
    assert [held for _, held in cluster.seen()] == [expected(7)] * 2
    cluster.update(9, 8)  # what still waits for the failed update is given up
    assert [sorted(outcomes[4:]) for outcomes, _ in cluster.seen()] == [["8", "StateError"]] * 2
    assert [held for _, held in cluster.seen()] == [expected(9)] * 2


def test_another_model_than_the_first_is_named_in_full_and_not_published(cluster: Cluster) -> None:
    with pytest.raises(RegistrationError) as error:
        cluster.update(10, 9, changes=True)
    text = str(error.value)
    assert "4 tensor(s) are not those of the first update" in text
    for each in (
        "'layers.0' is float32 (9,)",
        "'norm' is float32 (7,)",
        "'extra' is new",
        "'layers.1' is missing",
    ):
        assert each in text
    assert [held for _, held in cluster.seen()] == [expected(9)] * 2
    cluster.update(9, 9)
    assert [sorted(outcomes[6:]) for outcomes, _ in cluster.seen()] == [["9", "StateError"]] * 2


def test_a_number_that_was_used_is_refused_on_both_sides(cluster: Cluster) -> None:
    with pytest.raises(VersionConflict):
        cluster.update(10, 7)
    assert [outcomes[-1] for outcomes in cluster.outcomes(9)] == ["VersionConflict"] * 2
    assert [held for _, held in cluster.seen()] == [expected(9)] * 2


def test_a_rollout_that_is_killed_in_an_update_leaves_the_others_and_the_next_update_whole(
    cluster: Cluster,
) -> None:
    cluster.update(11, 11)
    cluster.rollouts.workers[1].die_in_update.remote()
    with pytest.raises(ray.exceptions.RayActorError):
        cluster.update(12, 12)
    cluster.ranks = [0]
    ((*_, outcome),) = cluster.outcomes(11)
    assert outcome == "12"
    assert cluster.seen()[0][1] == expected(12)
    cluster.manager.remove_replicas([cluster.replicas[1]])
    cluster.update(12, 12)  # the same number and bytes: nothing is published again
    cluster.update(13, 13)
    ((outcomes, held),) = cluster.seen()
    assert outcomes[-3:] == ["12", "12", "13"]
    assert held == expected(13)


def test_an_actor_that_dies_leaves_rollouts_with_a_typed_error(cluster: Cluster) -> None:
    before = len(cluster.seen()[0][0])
    # The manager hears first of the death, or of the other actor's collective that failed by it.
    with pytest.raises((ray.exceptions.RayActorError, RuntimeError), match=r"unexpectedly|gloo"):
        cluster.update(14, 14, dies=True)
    ((*_, outcome),) = cluster.outcomes(before + 1)
    assert outcome in ("OperationTimeout", "CoordinatorUnavailable", "LeaseLost")
    assert cluster.seen()[0][1] == expected(13)


def engine(**given: Any) -> Any:
    """One of this process."""
    import_module("tensorhub.integrations.verl")
    return CheckpointEngineRegistry.new(
        "tensorhub", **{"bucket_size": 2**20, "host": "127.0.0.1", **given}
    )


def test_one_of_the_actors_sends_and_everybody_hears_from_it() -> None:
    sender, other = engine(is_master=True, host="127.0.0.2", model="policy"), engine()
    meeting, nothing = sender.prepare(), other.prepare()
    assert nothing == {}
    assert meeting["tensorhub"]["address"].startswith("tcp://127.0.0.2:")
    actors, rollouts = sender.build_topology(2, 3, [nothing, meeting, {}, {}, {}])
    assert actors == {"role": ["idle", "sender"], "meeting": [meeting] * 2}
    assert rollouts == {"role": ["receiver"] * 3, "meeting": [meeting] * 3}
    for count, said in ((0, [{}] * 4), (2, [meeting, meeting, {}, {}]), (1, [{}, {}, meeting, {}])):
        with pytest.raises(
            StateError,
            match=f"{count} of the processes send: one of the actors is to be made with is_m",
        ):
            sender.build_topology(2, 2, said)
    receiver = engine(model="policy")
    for each, role in ((sender, "sender"), (other, "idle"), (receiver, "receiver")):
        each.init_process_group(role=role, meeting=meeting)

    async def update() -> dict[str, torch.Tensor]:
        given = {"a": torch.arange(3.0)}
        costs = await sender.send_weights(iter(given.items()), 7)
        assert costs["tensorhub/version"] == 7
        assert await other.send_weights(iter(given.items()), 7) == {}
        with pytest.raises(OperationTimeout):  # the number is asked for as it was given
            await anext(hasty.receive_weights(8))
        found = {name: tensor.clone() async for name, tensor in receiver.receive_weights(7)}
        await receiver._exchange.leave()
        await hasty._exchange.leave()
        return found

    hasty = engine(model="policy", timeout_s=0.5)
    hasty.init_process_group(role="receiver", meeting=meeting)
    found = anyio.run(update)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [0, 1, 2]}
    for each in (sender, other, receiver):
        each.finalize()
    assert sender._exchange._sender.version == 7, "what was sent stays"
    sender._exchange.close()
