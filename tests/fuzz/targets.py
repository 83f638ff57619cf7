"""The targets by name, and how much of a run each one gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import contents, conversations, deltas, lanes, liars, protocol, strides, workers

CORPUS = Path(__file__).with_name("corpus")


@dataclass(frozen=True, slots=True)
class Target:
    """`share`: of all inputs, in thousandths; what is slower gets fewer. `bytes_max`: of one
    input.
    """

    run: Callable[[bytes], None]
    share: int
    bytes_max: int


TARGETS: Mapping[str, Target] = {
    "frames": Target(protocol.frames, 120, 600),
    "relays": Target(protocol.relays, 30, 300),
    "bodies": Target(protocol.bodies, 170, 1000),
    "messages": Target(protocol.messages, 110, 300),
    "handshakes": Target(protocol.handshakes, 100, 300),
    "errors": Target(protocol.errors, 20, 300),
    "manifests": Target(contents.manifests, 100, 1000),
    "selections": Target(contents.selections, 60, 600),
    "publications": Target(contents.publications, 20, 600),
    "headers": Target(contents.headers, 60, 1000),
    "checkpoints": Target(contents.checkpoints, 30, 1000),
    "deltas": Target(deltas.deltas, 15, 600),
    "texts": Target(contents.texts, 100, 5000),
    "stores": Target(contents.stores, 5, 300),
    "liars": Target(liars.liars, 10, 1500),
    "bystanders": Target(conversations.bystanders, 2, 600),
    "ranks": Target(workers.ranks, 30, 600),
    "readers": Target(lanes.readers, 5, 600),
    "locators": Target(lanes.locators, 3, 600),
    "owners": Target(lanes.owners, 5, 600),
    "strides": Target(strides.strides, 5, 600),
}
