"""Public test tools: the simulated cluster, fault plans, the transport conformance suite, Hypothesis
strategies.

Responsible for running the real coordinator, scheduler and pull machines over a simulated network and
clock, and for proving that a transport keeps its promises. The same seed gives the same trace, always.

Not responsible for anything that happens outside tests: no other package imports this one.
"""

from tensorhub.testing.conformance import ConformanceBroken, transport_conformance
from tensorhub.testing.demands import GuaranteeBroken
from tensorhub.testing.embedded import WorkerCrashed
from tensorhub.testing.faults import Fault
from tensorhub.testing.handle import Asked, BrokenHook, Handle
from tensorhub.testing.loopback import Loopback
from tensorhub.testing.memory import CHUNK_BYTES, CHUNKS, DEVICE, MANIFEST
from tensorhub.testing.running import RunningCluster, simulate
from tensorhub.testing.scripted import Choice, PureCluster
from tensorhub.testing.search import SeedReport, run_seed
from tensorhub.testing.serving import ServedSource
from tensorhub.testing.simulated import SimulatedCluster
from tensorhub.testing.virtual import VirtualLoop
from tensorhub.testing.worker import SimWorker

__all__ = [
    "CHUNKS",
    "CHUNK_BYTES",
    "DEVICE",
    "MANIFEST",
    "Asked",
    "BrokenHook",
    "Choice",
    "ConformanceBroken",
    "Fault",
    "GuaranteeBroken",
    "Handle",
    "Loopback",
    "PureCluster",
    "RunningCluster",
    "SeedReport",
    "ServedSource",
    "SimWorker",
    "SimulatedCluster",
    "VirtualLoop",
    "WorkerCrashed",
    "run_seed",
    "simulate",
    "transport_conformance",
]
