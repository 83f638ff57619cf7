"""TensorHub on Ray: the coordinator as a detached named actor, and where a worker in an actor is.

    address = start_coordinator(state_dir="/shared/tensorhub")  # in any driver: the first starts it, later ones find it
    hub = sync.connect(address, location=location())  # in any actor, on any node

The address is "ray-actor://NAME". It does not change when Ray restarts the coordinator's actor on
another node: a worker looks the name up anew at each connection. The coordinator and its workers
take the cluster's secret from their own environment or token file, as `tensorhub.connect` does; Ray
never sees it.

Responsible for the coordinator's actor, for looking it up, and for locations. Not responsible for
Ray's tensor transport (`ray_transport`).
"""  # noqa: E501 - lines as they are typed

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental.internal_kv import _internal_kv_exists, _internal_kv_put
from ray.util.placement_group import get_current_placement_group, placement_group_table

from tensorhub import (
    CoordinatorUnavailable,
    InvalidValue,
    Location,
    Options,
    StateError,
    TensorHubError,
    sync,
)
from tensorhub.logs import get_logger

NAMESPACE: Final = "tensorhub"  # of Ray: every driver knows the coordinator by one name
RACK_LABELS: Final = ("tensorhub/rack", "ray.io/gpu-domain")  # of a node, the first that it has
SITE_LABELS: Final = ("tensorhub/site", "ray.io/availability-zone", "ray.io/availability-region")
ANSWER_S: Final = 10.0  # how long a lookup waits for the actor, which may be restarting
THREAD: Final = "tensorhub-coordinator"  # in which an embedded coordinator runs
RETRY_S: Final = 0.5
# for how long a restarted actor tries to open its state before Ray may try another node
OPEN_S: Final = 30.0

log = get_logger("tensorhub.ray")


def start_coordinator(
    name: str = "tensorhub",
    *,
    state_dir: str | os.PathLike[str],
    options: Options | None = None,
    timeout: float = 60.0,
    **actor_options: Any,
) -> str:
    """The address of the cluster's coordinator, which is started as a detached actor unless there
    is one of that name.

    Ray restarts the actor for as long as the Ray cluster lives, on any node; `ray.kill` ends it.
    `state_dir`: an absolute path on storage that every node on which it may restart can see.
    `actor_options`: of Ray, for instance `resources=` or `label_selector=` to name those nodes. The
    cluster's secret is looked for where the actor runs: TENSORHUB_TOKEN, TENSORHUB_TOKEN_FILE or
    the usual token file (a node's address is not loopback, so it needs one).

    Raises StateError (a `state_dir` that cannot be used, or differs from the running
    coordinator's), AuthenticationFailed (no secret), CoordinatorUnavailable (the actor could not be
    started in time).
    """
    directory = os.fspath(state_dir)
    if not os.path.isabs(directory):
        raise InvalidValue(
            f"state_dir={directory!r}: give an absolute path, which means the same on every node"
        )
    _check_initialized()
    wanted = {
        "num_cpus": 0,
        **actor_options,
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
    }
    wanted |= {"get_if_exists": True, "max_restarts": -1, "max_concurrency": 16}
    actor = ray.remote(CoordinatorActor).options(**wanted).remote(directory, options)
    try:
        problem, used = ray.get(actor.opened.remote(), timeout=timeout)
    except GetTimeoutError as error:
        raise CoordinatorUnavailable(
            f"the coordinator's actor {name!r} has not started within {timeout:g} s, with "
            f"{actor_options or 'no options'}. "
            f"Ray goes on trying, and the same call finds it; `ray status` says what no node has. "
            f"If the options are wrong, "
            f"end it before it is started with others: {_end(name)}"
        ) from error
    except RayError as error:
        raise CoordinatorUnavailable(
            f"the coordinator's actor {name!r} has not started: {error}"
        ) from error
    if problem is not None:
        ray.kill(actor)
        raise problem
    if used != directory:
        raise StateError(
            f"the coordinator {name!r} runs already, with state_dir={used!r} and not "
            f"{directory!r}. Give that one, or "
            f"another name=, or end it: {_end(name)}"
        )
    return f"ray-actor://{name}"


def _end(name: str) -> str:
    return f"ray.kill(ray.get_actor({name!r}, namespace={NAMESPACE!r}))"


def look_up(name: str) -> str:
    """Where the coordinator of that name is now: "tcp://host:port". Waits some seconds for an actor
    that is restarting.

    Raises CoordinatorUnavailable (no such actor, or it does not answer; this process has no Ray).
    """
    _check_initialized()
    try:
        actor = ray.get_actor(name, namespace=NAMESPACE)
        address: str = ray.get(actor.address.remote(), timeout=ANSWER_S)
    except ValueError as error:
        raise CoordinatorUnavailable(
            f"this Ray cluster has no coordinator {name!r}: "
            f"tensorhub.integrations.ray.start_coordinator() starts one"
        ) from error
    except RayError as error:
        raise CoordinatorUnavailable(
            f"the coordinator's actor {name!r} does not answer: {error}"
        ) from error
    return address


def location(racks: Mapping[int, str] | None = None) -> Location:
    """Where this process is, for `connect`: the site and the rack by the labels of its Ray node,
    the host as without Ray.

    `racks`: the rack of each bundle of the placement group in which this process runs. Several Ray
    nodes on one machine are one host: they share its memory. Raises StateError (outside of a
    placement group), InvalidValue (this node has bundles of several racks, or one without).
    """
    _check_initialized()
    labels: Mapping[str, str] = ray.get_runtime_context().get_node_labels()
    rack = next((labels[label] for label in RACK_LABELS if labels.get(label)), "")
    if racks is not None:
        rack = _rack_of_bundles(racks)
    site = next((labels[label] for label in SITE_LABELS if labels.get(label)), Location().site)
    return Location(site=site, rack=rack)


def _rack_of_bundles(racks: Mapping[int, str]) -> str:
    group = get_current_placement_group()
    if group is None:
        raise StateError(
            "racks= are those of a placement group's bundles, and this process is in none"
        )
    here = ray.get_runtime_context().get_node_id()
    bundles = [
        index
        for index, node in placement_group_table(group)["bundles_to_node_id"].items()
        if node == here
    ]
    if missing := [index for index in bundles if index not in racks]:
        raise InvalidValue(
            f"racks={dict(racks)!r} says nothing of bundle(s) {missing}, which are on this node"
        )
    found = {racks[index] for index in bundles}
    if len(found) != 1:
        raise InvalidValue(
            f"racks={dict(racks)!r} gives this node several racks: its bundles are {bundles}"
        )
    return found.pop()


class CoordinatorActor:
    """A coordinator in an actor of its own. Made by `start_coordinator`.

    Its constructor never raises: Ray gives an actor up for good if its constructor raises.
    """

    def __init__(self, state_dir: str, options: Options | None) -> None:
        self._state_dir = state_dir
        self._options = options
        self._problem: TensorHubError | None = None  # with which it could not be opened at first
        self._coordinator: sync.Coordinator | None = None
        # Ray remembers it for as long as the actor. That the actor was restarted does not say that
        # it had opened before.
        opened = f"tensorhub/opened/{ray.get_runtime_context().get_actor_id()}".encode()
        is_restarted = _internal_kv_exists(opened)
        until = time.monotonic() + OPEN_S
        while self._coordinator is None and self._problem is None:
            try:
                self._coordinator = self._open(is_restarted)
            except TensorHubError as error:
                if (is_restarted or error.retryable) and time.monotonic() < until:
                    time.sleep(RETRY_S)  # the previous actor may still have the state open
                elif is_restarted:
                    log.error(
                        "coordinator_cannot_restart_here", state_dir=state_dir, reason=str(error)
                    )
                    os._exit(1)  # Ray restarts it, perhaps on a node that can
                else:
                    self._problem = error
        if self._problem is None:
            _internal_kv_put(opened, b"")

    def _open(self, is_restarted: bool) -> sync.Coordinator:
        if is_restarted and not any(Path(self._state_dir).glob("*")):
            # To make it would begin a new cluster, on storage that no other node sees.
            raise StateError(
                f"nothing is in {self._state_dir} here, where the "
                "coordinator's state was: is it mounted?"
            )
        return sync.serve(
            ray.util.get_node_ip_address(), state_dir=self._state_dir, options=self._options
        )

    def opened(self) -> tuple[TensorHubError | None, str]:
        """Why it could not be opened, if so, and its state_dir."""
        return self._problem, self._state_dir

    def address(self) -> str:
        """Where it listens now."""
        if self._coordinator is None:
            raise self._problem or StateError("the coordinator is not open")
        if not any(thread.name == THREAD for thread in threading.enumerate()):
            log.error("coordinator_has_ended", state_dir=self._state_dir)
            os._exit(1)  # Ray restarts the actor, as it does when the whole process ends
        return self._coordinator.address


def _check_initialized() -> None:
    # Ray's own calls would start a cluster of their own here
    if not ray.is_initialized():
        raise CoordinatorUnavailable(
            "this process has not joined a Ray cluster: call ray.init() first"
        )
