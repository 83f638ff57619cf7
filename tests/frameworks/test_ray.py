"""`tensorhub.integrations.ray` on a real Ray cluster: several nodes, each with processes of its
own, on loopback addresses.

Whatever is killed here is killed as a machine kills it, and Ray itself starts it again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorhub import (
    CoordinatorUnavailable,
    InvalidValue,
    StateError,
    VersionUnavailable,
    sync,
)

ray: Any = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

from examples import ray_weights  # noqa: E402
from tensorhub.integrations import ray as tensorhub_ray  # noqa: E402
from tensorhub.types import parse_address  # noqa: E402
from tests.frameworks.ray_objects import SIZE, Destination, Source  # noqa: E402
from tests.frameworks.ray_workers import Rollout, Trainer, started  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

DEADLINE_S = 200
HEAD = "127.0.0.2"
# A node that is gone is known to be gone after 2 s.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, on which the driver and the trainers are, and no other node yet."""
    kept = Path(tempfile.mkdtemp(prefix="th-ray-"))  # short: sockets are made in it
    token = kept / "token"
    token.touch(mode=0o600)
    token.write_text("a secret that only this cluster has")
    # Ray writes the cluster's address there, and makes the folder elsewhere only
    Path("/tmp/ray").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_rdt_fetch_fail_timeout_milliseconds", "40000")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("TENSORHUB_TOKEN_FILE", str(token))  # nodes and their workers inherit it
        head = {
            "num_cpus": 4,
            "node_ip_address": HEAD,
            "temp_dir": str(kept),
            "resources": {"head": 100},
        }
        made = Cluster(
            head_node_args={**head, "include_dashboard": False, "_system_config": HEALTH},
            initialize_head=True,
        )
        try:
            ray.init(address=made.address, _node_ip_address=HEAD, log_to_driver=False)
            made.state_dir = kept / "state"
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            shutil.rmtree(kept, ignore_errors=True)


@pytest.fixture
def node(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Makes nodes, each with an address of its own; `node.kill(one)` kills all its processes."""
    made: list[Any] = []

    def add(**arguments: Any) -> Any:
        number = 3 + len(made)
        made.append(cluster.add_node(num_cpus=4, node_ip_address=f"127.0.0.{number}", **arguments))
        return made[-1]

    def kill(one: Any) -> None:
        cluster.remove_node(one, allow_graceful=False)

    add.kill = kill  # type: ignore[attr-defined]
    yield add
    for each in made:
        if each in cluster.worker_nodes:
            cluster.remove_node(each, allow_graceful=False)


@pytest.fixture
def coordinator(cluster: Any) -> Iterator[Callable[..., str]]:
    """Starts the coordinator, which is ended with the test."""

    def start(**options: Any) -> str:
        return tensorhub_ray.start_coordinator(
            state_dir=cluster.state_dir, timeout=DEADLINE_S, **options
        )

    yield start
    if any(
        named["name"] == "tensorhub" for named in ray.util.list_named_actors(all_namespaces=True)
    ):
        ray.kill(the_actor())
        eventually(lambda: not ray.util.list_named_actors(all_namespaces=True))
    shutil.rmtree(cluster.state_dir, ignore_errors=True)


def the_actor() -> Any:
    return ray.get_actor("tensorhub", namespace=tensorhub_ray.NAMESPACE)


def eventually(holds: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


def found() -> str:
    """The address, as soon as there is one."""
    until = time.monotonic() + DEADLINE_S
    while True:
        try:
            return tensorhub_ray.look_up("tensorhub")
        except CoordinatorUnavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def host(address: str) -> str:
    return parse_address(address)[0]


def actors(kind: Any, count: int, address: str, **options: Any) -> list[Any]:
    remote = ray.remote(kind)
    made = [
        remote.options(num_cpus=0.1, max_restarts=-1, max_task_retries=-1, **options).remote(
            address
        )
        for _ in range(count)
    ]
    return [started(each) for each in made]


def test_what_any_driver_starts_every_driver_finds(
    cluster: Any, coordinator: Callable[..., str]
) -> None:
    with pytest.raises(CoordinatorUnavailable, match="has no coordinator 'tensorhub'"):
        tensorhub_ray.look_up("tensorhub")
    address = coordinator()
    assert address == "ray-actor://tensorhub" == coordinator()
    there = tensorhub_ray.look_up("tensorhub")
    assert there.startswith(f"tcp://{HEAD}:")
    with sync.connect(address) as hub:
        assert hub.describe() == ()
    with pytest.raises(
        StateError,
        match=r"runs already, with state_dir=.* end it: ray.kill\(ray.get_actor\('tensorhub'",
    ):
        tensorhub_ray.start_coordinator(state_dir="/another")
    program = f"""
import ray
from tensorhub.integrations.ray import look_up, start_coordinator
ray.init(address={cluster.address!r}, _node_ip_address={HEAD!r}, log_to_driver=False)
print(start_coordinator(state_dir={str(cluster.state_dir)!r}), look_up("tensorhub"))
"""
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert other.stdout.split() == [address, there], other.stderr


@pytest.mark.usefixtures("cluster")
def test_a_coordinator_that_cannot_be_opened_says_why_and_leaves_no_actor() -> None:
    with pytest.raises(StateError, match="/proc/nothing cannot be used"):
        tensorhub_ray.start_coordinator(state_dir="/proc/nothing")
    eventually(lambda: not ray.util.list_named_actors(all_namespaces=True))
    with pytest.raises(InvalidValue, match="give an absolute path"):
        tensorhub_ray.start_coordinator(state_dir="state")


def test_a_coordinator_for_which_no_node_has_room(
    cluster: Any, coordinator: Callable[..., str]
) -> None:
    with pytest.raises(
        CoordinatorUnavailable, match=r"within 2 s, with {'resources': {'haed': 1}}.*: ray.kill\("
    ) as error:
        tensorhub_ray.start_coordinator(
            state_dir=cluster.state_dir, timeout=2.0, resources={"haed": 1}
        )
    ray.kill(the_actor())  # as it says
    eventually(lambda: not ray.util.list_named_actors(all_namespaces=True))
    assert str(error.value).endswith("ray.kill(ray.get_actor('tensorhub', namespace='tensorhub'))")
    assert coordinator(resources={"head": 1}) == "ray-actor://tensorhub"


def test_a_coordinator_does_not_begin_anew_where_its_state_is_missing(
    cluster: Any, coordinator: Callable[..., str]
) -> None:
    with sync.connect(coordinator()) as hub:
        hub.retain("kept", latest=1)
        elsewhere = cluster.state_dir.rename(cluster.state_dir.with_name("elsewhere"))
        ray.kill(the_actor(), no_restart=False)
        eventually(lambda: "offline" in repr(hub))
        with pytest.raises(CoordinatorUnavailable, match="does not answer"):
            tensorhub_ray.look_up("tensorhub")
        assert not cluster.state_dir.exists()
        elsewhere.rename(cluster.state_dir)
        found()
        eventually(lambda: "online" in repr(hub))
        assert [each.model for each in hub.describe()] == ["kept"]


def test_a_coordinator_that_has_ended_in_an_actor_that_lives_is_restarted(
    coordinator: Callable[..., str],
) -> None:
    with sync.connect(coordinator()) as hub:
        ray.get(
            the_actor().__ray_call__.remote(lambda actor: actor._coordinator.close()),
            timeout=DEADLINE_S,
        )
        eventually(lambda: "offline" in repr(hub))
        found()
        eventually(lambda: "online" in repr(hub))


def test_the_coordinator_of_a_dead_node_comes_back_on_another_one(
    node: Any, coordinator: Callable[..., str]
) -> None:
    nodes = {f"127.0.0.{3 + number}": node(resources={"coordinator": 1}) for number in range(2)}
    address = coordinator(resources={"coordinator": 1})
    at_first = host(found())
    (trainer,) = actors(Trainer, 1, address, resources={"head": 1})
    rollout, doomed = (
        actors(Rollout, 1, address, resources={at: 1})[0] for at in ("head", f"node:{at_first}")
    )
    ray.get(trainer.publish.remote(1), timeout=DEADLINE_S)
    assert ray.get(
        [each.update.remote(1) for each in (rollout, doomed)], timeout=DEADLINE_S
    ) == 2 * [(1, [1.0])]
    waits = rollout.update.remote(2)
    node.kill(nodes.pop(at_first))  # with the coordinator, and a worker
    eventually(lambda: host(found()) in nodes)  # its processes die a moment after it
    ray.get(trainer.publish.remote(2), timeout=DEADLINE_S)
    assert ray.get(waits, timeout=DEADLINE_S) == (2, [2.0])


def test_a_process_that_has_not_joined_ray_is_told_so_and_starts_no_cluster() -> None:
    program = """
import ray
from tensorhub import CoordinatorUnavailable, sync
from tensorhub.integrations.ray import location, start_coordinator
calls = location, lambda: start_coordinator(state_dir="/state"), lambda: sync.connect("ray-actor://tensorhub", token="")
for call in calls:
    try:
        call()
    except CoordinatorUnavailable as error:
        print("call ray.init() first" in str(error), ray.is_initialized())
"""
    alone = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert alone.stdout.splitlines() == 3 * ["True False"], alone.stderr


def test_labels_and_bundles_say_where_a_worker_is(
    node: Any, coordinator: Callable[..., str]
) -> None:
    node(
        labels={"ray.io/gpu-domain": "rack-1", "ray.io/availability-zone": "zone-a"},
        resources={"labelled": 1},
    )
    node(resources={"plain": 1})
    address = coordinator()
    (labelled,) = actors(Rollout, 1, address, resources={"labelled": 1})
    where = ray.get(labelled.where.remote(), timeout=DEADLINE_S)
    assert (where.site, where.rack) == ("zone-a", "rack-1")
    assert where.host == tensorhub_ray.location().host  # two nodes on one machine share its memory
    ray.kill(labelled)
    bundles = placement_group(
        [{"CPU": 1, "labelled": 0.5}, {"CPU": 1, "plain": 0.5}], strategy="STRICT_SPREAD"
    )
    ray.get(bundles.ready(), timeout=DEADLINE_S)
    remote = ray.remote(num_cpus=1)(Rollout)

    def in_bundle(index: int, racks: dict[int, str]) -> Any:
        strategy = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=index)
        return started(remote.options(scheduling_strategy=strategy).remote(address, racks))

    racks = {0: "left", 1: "right"}
    workers = [in_bundle(index, racks) for index in racks]
    assert [
        each.rack for each in ray.get([each.where.remote() for each in workers], timeout=DEADLINE_S)
    ] == [
        "left",
        "right",
    ]
    with pytest.raises(StateError, match="this process is in none"):
        tensorhub_ray.location(racks)
    remove_placement_group(bundles)


def test_objects_of_ray_are_fetched_in_place_and_closed_when_ray_frees_them(
    coordinator: Callable[..., str],
) -> None:
    coordinator()
    source = started(
        ray.remote(Source).options(num_cpus=0.1, max_restarts=-1, max_task_retries=-1).remote()
    )
    destination = ray.remote(num_cpus=0.1, enable_tensor_transport=True)(Destination)
    destinations = [destination.remote(serves) for serves in (False, True)]

    def filled(value: float) -> list[tuple[list[int], str, list[float]]]:
        dtypes = "torch.float32", "torch.bfloat16", "torch.float32"
        return [
            (shape, dtype, [value])
            for shape, dtype in zip(([SIZE], [4, 3], []), dtypes, strict=True)
        ]

    tensors = source.tensors.remote(1)
    assert ray.get(
        [each.take.remote(tensors) for each in destinations], timeout=DEADLINE_S
    ) == 2 * [filled(1)]
    assert ray.get(destinations[0].take_in_place.remote([tensors]), timeout=DEADLINE_S) == filled(1)
    # in the driver
    assert [each.unique().item() for each in ray.get(tensors, timeout=DEADLINE_S)] == 3 * [1]
    assert ray.get(source.published.remote(), timeout=DEADLINE_S) == 1
    assert ray.get(source.asked_again.remote(), timeout=DEADLINE_S)
    del tensors
    eventually(lambda: ray.get(source.published.remote(), timeout=DEADLINE_S) == 0)
    eventually(lambda: ray.get(destinations[0].kept.remote(), timeout=DEADLINE_S) == 1)

    tensors = source.tensors.remote(2)
    assert ray.get(destinations[0].take.remote(tensors), timeout=DEADLINE_S) == filled(2)
    ray.kill(source, no_restart=False)
    # and no actor is killed for that
    with pytest.raises(VersionUnavailable, match="has lost its last source"):
        ray.get(destinations[1].take.remote(tensors), timeout=DEADLINE_S)
    assert ray.get(
        destinations[1].take.remote(source.tensors.remote(3)), timeout=DEADLINE_S
    ) == filled(3)


def test_the_example_runs(
    cluster: Any, coordinator: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator()  # a busy machine takes longer than the example's minute to start an actor
    for before in (0, 3):  # the coordinator outlives the first run
        ray_weights.run(str(cluster.state_dir))
        assert capsys.readouterr().out.splitlines() == [
            f"version {before + n}: [{n}.0, {n}.0]" for n in (1, 2, 3)
        ]


def test_the_examples_trainer_goes_on_with_its_weights_after_a_restart(
    coordinator: Callable[..., str],
) -> None:
    address = coordinator()
    example: Any = ray_weights
    trainer, rollout = example.Trainer.remote(address), example.Rollout.remote(address)
    for version in (1, 2):
        assert ray.get(trainer.step.remote(), timeout=DEADLINE_S) == version
        assert ray.get(rollout.generate.remote(version), timeout=DEADLINE_S) == version
    # version 3 dies with the trainer
    assert ray.get(trainer.step.remote(), timeout=DEADLINE_S) == 3
    ray.kill(trainer, no_restart=False)
    stepped = trainer.step.options(max_task_retries=-1).remote()  # Ray may not know that it is gone
    version = ray.get(stepped, timeout=DEADLINE_S)
    assert version > 3
    assert ray.get(rollout.generate.remote(version), timeout=DEADLINE_S) == 2 + 1
