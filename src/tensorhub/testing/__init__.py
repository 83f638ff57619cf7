"""Public test tools: the simulated cluster, its faults, and the transport conformance suite.

Responsible for running the real coordinator, workers and scheduler over a simulated network and
clock, and for proving that a transport keeps its promises. A seed always gives one trace. `sim` is
the simulated world with its judges; `drivers` decide what happens in it when.

Not responsible for anything that happens outside tests: no other package imports this one.
"""

from tensorhub.testing.checking import ConformanceBroken
from tensorhub.testing.conformance import transport_conformance
from tensorhub.testing.drivers.hosted import WorkerCrashed
from tensorhub.testing.drivers.stepwise import Choice, StepwiseCluster
from tensorhub.testing.drivers.virtual import VirtualLoop
from tensorhub.testing.running import RunningCluster
from tensorhub.testing.serving import ServedSource
from tensorhub.testing.sim.assertion import GuaranteeBroken
from tensorhub.testing.sim.faults import Fault
from tensorhub.testing.sim.handle import BrokenHook, CallRecord
from tensorhub.testing.sim.memory import CHUNK_BYTES, CHUNKS, DEVICE, MANIFEST
from tensorhub.testing.sim.worker import SimHandle, SimWorker
from tensorhub.testing.simulated import SeedReport, SimulatedCluster, run_seed, simulate

__all__ = [
    "CHUNKS",
    "CHUNK_BYTES",
    "DEVICE",
    "MANIFEST",
    "BrokenHook",
    "CallRecord",
    "Choice",
    "ConformanceBroken",
    "Fault",
    "GuaranteeBroken",
    "RunningCluster",
    "SeedReport",
    "ServedSource",
    "SimHandle",
    "SimWorker",
    "SimulatedCluster",
    "StepwiseCluster",
    "VirtualLoop",
    "WorkerCrashed",
    "run_seed",
    "simulate",
    "transport_conformance",
]
