"""A process of its own: an engine in a plain loop, or a trainer that updates engines and dies at a
step. It answers each line of its input with a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from tensorhub import sync
from tensorhub.errors import StateError
from tensorhub.integrations.one_version import Step
from tensorhub.integrations.one_version_engine import Engine
from tensorhub.integrations.one_version_trainer import OneVersion

LEASE_S, DECIDE_S = 1.0, 1.5
TIMEOUT_S = 30.0


def values(size: int, value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size,), value), "b": torch.full((4,), value)}


class Policy(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        for name, each in values(size, 0.0).items():
            setattr(self, name, torch.nn.Parameter(each, requires_grad=False))


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def engine(address: str, name: str, port: str, size: str, die_at: str) -> None:
    """`die_at`: "flip before" for example; "": never."""
    policy = Policy(int(size))
    with sync.connect(address, name=name) as hub:
        its = Engine(
            hub,
            "actor",
            policy,
            port=int(port),
            lease_s=LEASE_S,
            decide_s=DECIDE_S,
            timeout_s=TIMEOUT_S,
        )
        if die_at:
            call, _, when = die_at.partition(" ")
            _die(its, call, is_before=when == "before")
        say(url=its.url)
        for _ in sys.stdin:
            try:
                with its.use() as version:
                    ends = [each[place].item() for each in policy.parameters() for place in (0, -1)]
                say(version=version, values=sorted(set(ends)))
            except StateError:
                say(version=None, values=[])
        its.close()


def _die(its: Any, call: str, *, is_before: bool) -> None:
    does = getattr(its, call)

    def dying(*given: Any, **named: Any) -> None:
        if not is_before:
            does(*given, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(its, call, dying)


def trainer(address: str, servers: str, first: str, die_at: str) -> None:
    """Brings a version to the servers, and the next one, in which it dies after a step: "Flip"."""
    with sync.connect(address, name=f"trainer-{os.getpid()}") as hub:
        tensors = values(1000, 0.0)
        weights = hub.register("actor", tensors)
        fleet = OneVersion(hub, "actor", json.loads(servers), lease_s=LEASE_S, timeout_s=TIMEOUT_S)
        does = fleet._do

        def dying(step: Step) -> Any:
            answer = does(step)
            if type(step).__name__ == die_at and weights.version == int(first) + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        fleet._do = dying  # type: ignore[method-assign]
        for version in (int(first), int(first) + 1):
            with weights.mutate(version):
                for each in tensors.values():
                    each.fill_(version)
            fleet.update(hub.wait_for("actor", at_least=version))
            say(version=version)


if __name__ == "__main__":
    runs: dict[str, Callable[..., None]] = {"engine": engine, "trainer": trainer}
    runs[sys.argv[1]](*sys.argv[2:])
