"""One example for each public name: shown in docs/reference.md, run by
tests/examples/test_reference.py.

`address` is a running coordinator's; `trainer` and `rollout` are hubs that are connected to it,
anew for each example.
"""

import math
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch
import trustme

import tensorhub
from tensorhub import sync
from tensorhub.archives.store import Store
from tensorhub.conversion import cast, register_converted
from tensorhub.fs import TensorHubFileSystem

Example = Callable[..., Any]
EXAMPLES: dict[str, Example] = {}
RAISES: dict[Example, type[tensorhub.TensorHubError]] = {}


def shows(
    *names: str, raises: type[tensorhub.TensorHubError] | None = None
) -> Callable[[Example], Example]:
    """This is the example of these names; `raises`: what it ends with."""

    def enter(example: Example) -> Example:
        EXAMPLES.update(dict.fromkeys(names, example))
        if raises is not None:
            RAISES[example] = raises
        return example

    return enter


# ------------------------------------------------------------------------------------------------
# serving, connecting


@shows("serve", "Coordinator", "Coordinator.address", "Coordinator.close")
async def serve() -> None:
    async with tensorhub.serve(options=tensorhub.Options(lease_s=30)) as coordinator:
        assert coordinator.address.startswith("tcp://127.0.0.1:")
    # without a block: until it is closed, or the process ends
    coordinator = await tensorhub.serve()
    await coordinator.close()


@shows("TLS")
async def encrypted(tmp_path: Path) -> None:
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")  # in earnest: by your own authority
    (tmp_path / "tls.crt").write_bytes(issued.cert_chain_pems[0].bytes())
    (tmp_path / "tls.key").touch(0o600)
    (tmp_path / "tls.key").write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "ca.crt").write_bytes(ca.cert_pem.bytes())

    tls = tensorhub.TLS(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt")
    async with (
        tensorhub.serve(tls=tls) as coordinator,
        tensorhub.connect(coordinator.address, tls=tls) as hub,
    ):
        assert hub.newest("actor") is None


@shows("connect", "Location", "Options", "Hub", "Hub.name")
async def connect(address: str) -> None:
    here = tensorhub.Location(site="paris", rack="r7")
    options = tensorhub.Options(op_timeout_s=120, chunk_bytes=4 * 2**20)
    async with tensorhub.connect(address, name="rollout-17", location=here, options=options) as hub:
        assert hub.name == "rollout-17"
    # without a block: until it is closed, or the process ends
    hub = await tensorhub.connect(address)
    await hub.close()


@shows("leave_on_sigterm")
async def preempted(address: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    tensorhub.leave_on_sigterm(25)  # this one line; the machine's notice is 30 s
    async with tensorhub.connect(address) as hub:
        weights = await hub.register("actor", {"w": torch.ones(4)}, spot=True)
        await weights.publish(1)
    signal.signal(signal.SIGTERM, before)  # as it was


@shows("read_only_token")
async def read_only_token() -> None:
    async with tensorhub.serve(token="the cluster's") as coordinator:
        token = tensorhub.read_only_token("the cluster's")
        async with tensorhub.connect(coordinator.address, token=token) as dashboard:
            assert await dashboard.describe() == ()
            try:
                await dashboard.retain("actor", latest=2)
            except tensorhub.AuthenticationFailed as error:
                assert "this token is read-only" in str(error)  # noqa: PT017


@shows("Hub.close")
async def close_hub(address: str) -> None:
    hub = await tensorhub.connect(address)
    await hub.close()  # the end of a block does it too


# --------------------------------------------------------------------------------------------------
# one model


@shows("Hub.register", "Weights", "Weights.model", "Weights.state", "Weights.version")
async def register(trainer: tensorhub.Hub) -> None:
    layer = torch.nn.Linear(8, 4)
    weights = await trainer.register("actor", layer)  # its parameters and buffers, in place
    assert (weights.model, weights.state, weights.version) == ("actor", "empty", None)
    layer.half()  # replaces the parameters: their new memory is not what was registered
    try:
        await weights.publish(1)
    except tensorhub.RegistrationError as error:
        assert ("'weight': its dtype is torch.float16, not torch.float32") in str(error)  # noqa: PT017


@shows("shared_empty_like")
async def shared(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    # converted copies go in here
    weights = tensorhub.shared_empty_like(torch.nn.Linear(8, 4).state_dict())
    weights["weight"].fill_(2)
    await (await trainer.register("actor", weights)).publish(1)
    mine = {"weight": torch.empty(4, 8), "bias": torch.empty(4)}
    report = await (await rollout.register("actor", mine)).replicate()
    assert report.sources[0].transport == "shm"  # on one host, by a mapping
    assert mine["weight"].eq(2).all()


@shows("Weights.publish", "VersionInfo")
async def publish(trainer: tensorhub.Hub) -> None:
    weights = await trainer.register("actor", {"w": torch.ones(4, 2, dtype=torch.bfloat16)})
    info = await weights.publish(1)
    assert (info.model, info.version, info.nbytes, info.world_size) == ("actor", 1, 16, 1)


@shows("Weights.stamp", "Stamp", "check_stamp")
async def stamp(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    await (await trainer.register("actor", {"w": torch.ones(4)})).publish(1)
    weights = await rollout.register("actor", {"w": torch.empty(4)})
    await weights.replicate()
    sample = {"text": "...", "weights": str(weights.stamp())}
    # later, elsewhere
    stamp = tensorhub.Stamp.parse(sample["weights"])
    assert (stamp.model, stamp.lineage, stamp.version) == ("actor", 0, 1)
    assert (await tensorhub.check_stamp(stamp, rollout)).version == 1
    forged = replace(stamp, content_id="another")
    try:
        await tensorhub.check_stamp(forged, rollout)
    except tensorhub.IntegrityError as error:
        assert "another content" in str(error)  # noqa: PT017


@shows("Weights.unpublish")
async def unpublish(trainer: tensorhub.Hub) -> None:
    tensor = torch.ones(4)
    weights = await trainer.register("actor", {"w": tensor})
    await weights.publish(1)
    await weights.unpublish()
    tensor.mul_(2)  # nobody can read it any more


@shows("Weights.mutate")
async def mutate(trainer: tensorhub.Hub) -> None:
    tensor = torch.zeros(4)
    weights = await trainer.register("actor", {"w": tensor})
    for version in range(1, 4):
        async with weights.mutate(version):
            tensor.add_(1)
    assert weights.version == 3


@shows("StaleWeightsWarning")
async def stale_weights(trainer: tensorhub.Hub) -> None:
    layer = torch.nn.Linear(8, 4)
    # aliases: they do not follow the module
    weights = await trainer.register("actor", layer.state_dict())
    layer.load_state_dict(torch.nn.Linear(8, 4).state_dict(), assign=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        async with weights.mutate(1):
            # of the new parameter; register(layer) would have refused to go on
            layer.weight.data.zero_()
    assert told[0].category is tensorhub.StaleWeightsWarning


@shows("LeftOutStateWarning")
async def left_out_state(trainer: tensorhub.Hub) -> None:
    layer = torch.nn.Linear(8, 4)
    # layer.register_buffer("scale", torch.tensor(2.0)) would be carried
    layer.scale = torch.tensor(2.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        await trainer.register("actor", layer)
    assert told[0].category is tensorhub.LeftOutStateWarning
    assert "'scale'" in str(told[0].message)


@shows("Weights.replicate", "FetchReport", "SourceReport")
async def replicate(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    await (await trainer.register("actor", {"w": torch.ones(1024)})).publish(1)
    mine = torch.empty(1024)
    report = await (await rollout.register("actor", {"w": mine}, spot=True)).replicate("latest")
    assert mine.sum() == 1024
    assert (report.version, report.changed, report.bytes_read) == (1, True, 4096)
    assert report.sources[0].name == trainer.name
    assert (report.bytes_by_kind, report.changed_words) == ({"live": 4096}, None)
    assert report.sources[0].deltas == "same host"
    assert set(report.phases) == {"resolve", "wait", "transfer", "verify", "unpack", "commit"}


@shows("Weights.update")
async def update(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    tensor, mine = torch.ones(4), torch.empty(4)
    source = await trainer.register("actor", {"w": tensor})
    await source.publish(1)
    weights = await rollout.register("actor", {"w": mine})
    await weights.replicate()

    async def pause_engine(info: tensorhub.VersionInfo) -> None:
        # the old version is in place until this returns
        assert (info.version, weights.version) == (2, 1)

    async with source.mutate(2):
        tensor.fill_(2)
    report = await weights.update("latest", at_least=2, before_write=pause_engine)
    assert (report.changed, weights.version, mine.tolist()) == (True, 2, [2, 2, 2, 2])
    assert not (await weights.update()).changed


@shows("Weights.prefetch")
async def prefetch(trainer: tensorhub.Hub, address: str) -> None:
    tensor, mine = torch.ones(4), torch.empty(4)
    source = await trainer.register("actor", {"w": tensor})
    await source.publish(1)
    # for host copies: one version's shard, or more
    options = tensorhub.Options(host_memory_bytes=1 * 2**20)
    # prefetch=True: each new version, by itself
    async with tensorhub.connect(address, options=options) as rollout:
        weights = await rollout.register("actor", {"w": mine})
        await weights.replicate()
        async with source.mutate(2):
            tensor.fill_(2)
        report = await weights.prefetch()
        assert (report.version, weights.version, mine.tolist()) == (2, 1, [1, 1, 1, 1])
        # staged: whatever fails, version 1 would still be there
        report = await weights.update(staged=True)
        assert (report.version, report.bytes_read, mine.tolist()) == (2, 0, [2, 2, 2, 2])


@shows("Weights.close")
async def close_weights(trainer: tensorhub.Hub) -> None:
    weights = await trainer.register("actor", {"w": torch.ones(4)})
    await weights.publish(1)
    await weights.close()
    assert weights.state == "closed"


# --------------------------------------------------------------------------------------------------
# fetching


@shows("Hub.fetch", "Fetched", "Fetched.info", "Fetched.report")
async def fetch(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    tensors = {
        "layers.0.weight": torch.ones(4, 2),
        "layers.1.weight": torch.zeros(4, 2, dtype=torch.bool),
    }
    await (await trainer.register("actor", tensors)).publish(1)
    fetched = await rollout.fetch("actor", "latest")  # no tensors needed: they are made
    assert list(fetched) == ["layers.0.weight", "layers.1.weight"]
    assert torch.equal(fetched["layers.0.weight"], torch.ones(4, 2))
    assert (fetched.info.version, fetched.report.bytes_read) == (1, 40)
    fetched = await rollout.fetch("actor", 1, names="layers.1.*")
    # the other one was not read
    assert (list(fetched), fetched.report.bytes_read) == (["layers.1.weight"], 8)


@shows("Hub.plan", "ReadPlan", "PlannedSource", "ReadPlan.nbytes")
async def plan(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    await (await trainer.register("actor", {"w": torch.ones(8, 4)})).publish(1)
    columns = {"half": torch.empty(8, 2, device="meta")}  # shapes are enough
    found = await rollout.plan(
        "actor", columns, sources={"half": tensorhub.source("w")[:, 2:]}, partial=True
    )
    assert (found.nbytes, found.runs, found.excess_nbytes) == (64, 8, 0)
    assert [(source.ranks, source.workers, source.cells) for source in found.sources] == [
        ((0,), (trainer.name,), 1)
    ]
    whole = await rollout.plan("actor")  # what fetch(rank=None) reads
    assert (whole.nbytes, whole.runs) == (128, 1)


# -------------------------------------------------------------------------------------------------
# keeping, going back


@shows("Hub.retain", "RetentionError", raises=tensorhub.RetentionError)
async def retain(trainer: tensorhub.Hub) -> None:
    await trainer.retain("actor", latest=1)
    weights = await trainer.register("actor", {"w": torch.ones(4)})
    await weights.publish(1)
    await weights.unpublish(timeout=0.2)  # nobody else holds version 1 by then: it stays published


@shows("Hub.pin")
async def pin(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    tensor = torch.ones(4)
    weights = await trainer.register("reference", {"w": tensor})
    await weights.publish(1)
    async with rollout.pin("reference", 1):
        # it can be fetched for as long as the block lasts
        fetched = await rollout.fetch("reference", 1)
        assert fetched["w"].sum() == 4
    await weights.unpublish()


@shows(
    "archive",
    "Archive",
    "Archive.versions",
    "Archive.wait_for",
    "Archive.close",
    "ArchivedVersion",
)
async def archive(address: str) -> None:
    options = tensorhub.Options(host_memory_bytes=2**20)  # two versions or more
    async with tensorhub.connect(address, options=options) as hub:
        with tempfile.TemporaryDirectory() as bucket:  # or "s3://bucket/run-7"
            async with tensorhub.archive(hub, "actor", f"file://{bucket}", keep=10) as there:
                weights = await hub.register("actor", {"w": torch.ones(4)})
                await weights.publish(1)
                assert (await there.wait_for(at_least=1)).base is None
                await weights.close(abandon=True)
                assert (await hub.fetch("actor", 1))["w"].sum() == 4


@shows("Hub.rollback")
async def rollback(trainer: tensorhub.Hub) -> None:
    tensor = torch.ones(4)
    weights = await trainer.register("actor", {"w": tensor})
    for version in (90, 95):
        async with weights.mutate(version):
            tensor.add_(1)
    await trainer.rollback("actor", to=90)
    assert (weights.state, weights.version) == ("empty", None)  # 95 is retired
    await weights.publish(91)


# ------------------------------------------------------------------------------------------- what
# the cluster knows


@shows("Hub.newest", "Hub.wait_for")
async def newest(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    await (await trainer.register("actor", {"w": torch.ones(4)})).publish(7)
    info = await rollout.wait_for("actor", at_least=7, timeout=10)
    assert rollout.newest("actor") == info  # no I/O


@shows("Hub.watch", "Watcher")
async def watch(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    weights = await trainer.register("actor", {"w": torch.ones(4)})
    await weights.publish(1)
    async for info in rollout.watch("actor"):
        if info.version == 2:
            break
        await weights.unpublish()
        await weights.publish(2)


@shows("Watcher.end")
async def end_watch(rollout: tensorhub.Hub) -> None:
    watcher = rollout.watch("actor")
    watcher.end()
    async for _ in watcher:
        raise AssertionError("it has ended")


@shows(
    "Hub.describe",
    "ModelInfo",
    "VersionView",
    "ReplicaView",
    "ShardView",
    "LeaseView",
    "WorkerView",
)
async def describe(trainer: tensorhub.Hub) -> None:
    await (await trainer.register("actor", {"w": torch.ones(4)}, group="trainer")).publish(1)
    model = await trainer.describe("actor")
    assert (model.mark, [view.state for view in model.versions]) == (1, ["available"])
    assert [(view.group, view.shards[0].worker) for view in model.replicas] == [
        ("trainer", trainer.name)
    ]
    assert not model.leases  # nobody reads
    assert model.workers[0].location == tensorhub.Location()
    assert await trainer.describe() == (model,)
    # the first ten workers of one version
    page = await trainer.describe("actor", version=1, limit=10)
    assert (page.replicas, page.workers) == (model.replicas, model.workers)


@shows("ModelSummary", "VersionSummary", "CallsSummary", "SilentWorker")
async def counts(trainer: tensorhub.Hub) -> None:
    await (await trainer.register("actor", {"w": torch.ones(4)}, group="trainer")).publish(1)
    model = await trainer.describe("actor", limit=0)
    counted, version = model.summary, model.versions[-1].summary
    assert counted is not None  # a page has none
    assert version is not None
    assert (counted.workers, counted.suspect, counted.shards, counted.reads) == (1, 0, 1, 0)
    assert (version.copies, version.ready) == (1, 1)
    assert not counted.calls  # nobody waits
    assert await trainer.describe(limit=0) == (model,)


@shows("Hub.explain", "Explanation", "Hub.events", "ClusterEvent")
async def explain(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    await (await trainer.register("actor", {"w": torch.ones(4)})).publish(1)
    await (await rollout.register("actor", {"w": torch.empty(4)})).replicate()
    why = await rollout.explain("actor", 1)
    assert math.isclose(sum(part.seconds for part in why.parts), why.seconds)
    kinds = [event.kind async for event in rollout.events() if event.model == "actor"]
    assert kinds[0] == "published"


@shows("Hub.http_url")
async def endpoint_of_worker(address: str) -> None:
    options = tensorhub.Options(http="127.0.0.1:0")  # any free port
    async with tensorhub.connect(address, options=options) as hub:
        assert str(hub.http_url).startswith("http://127.0.0.1:")


# --------------------------------------------------------------------------------------------------
# errors


@shows(
    "TensorHubError",
    "VersionUnavailable",
    "GroupAborted",
    "OperationTimeout",
    "LeaseLost",
    "CoordinatorUnavailable",
)
async def retry(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    weights = await rollout.register("actor", {"w": torch.empty(4)})
    try:
        await weights.replicate("latest", timeout=0.1)
    except tensorhub.TensorHubError as error:  # nothing was published yet: VersionUnavailable
        # GroupAborted, OperationTimeout, LeaseLost and CoordinatorUnavailable are
        if not error.retryable:
            raise
    await (await trainer.register("actor", {"w": torch.ones(4)})).publish(1)
    await weights.replicate("latest")


@shows("VersionConflict", raises=tensorhub.VersionConflict)
async def conflict(trainer: tensorhub.Hub) -> None:
    tensor = torch.zeros(4)
    weights = await trainer.register("actor", {"w": tensor})
    async with weights.mutate(5):
        tensor.fill_(5)
    async with weights.mutate(5):  # used; the body does not run
        raise AssertionError


@shows("ManifestMismatch", raises=tensorhub.ManifestMismatch)
async def mismatch(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    await (await trainer.register("actor", {"w": torch.ones(4)})).publish(1)
    weights = await rollout.register("actor", {"w": torch.ones(4, dtype=torch.float16)})
    await weights.replicate()  # its `differences` name every tensor


@shows("RegistrationError", raises=tensorhub.RegistrationError)
async def not_contiguous(trainer: tensorhub.Hub) -> None:
    # names the tensor, and says: register `.T` of it, with `.T` behind its view in sources=
    await trainer.register("actor", {"w": torch.ones(4, 2).t()})


@shows("StateError", raises=tensorhub.StateError)
async def published_twice(trainer: tensorhub.Hub) -> None:
    weights = await trainer.register("actor", {"w": torch.ones(4)})
    await weights.publish(1)
    await weights.publish(2)  # unpublish first, or use mutate


@shows("InvalidType", "InvalidValue", raises=tensorhub.InvalidValue)
async def what_is_no_version(trainer: tensorhub.Hub) -> None:
    weights = await trainer.register("actor", {"w": torch.ones(4)})
    try:
        await weights.publish("1")  # type: ignore[arg-type]
    except TypeError as error:  # each is a StateError, too
        assert "'1' is not a version: give an integer" in str(error)  # noqa: PT017
    await weights.publish(-1)  # a ValueError


@shows("MutabilityViolation", raises=tensorhub.MutabilityViolation)
async def written_while_published(trainer: tensorhub.Hub) -> None:
    tensor = torch.ones(4)
    weights = await trainer.register("actor", {"w": tensor})
    await weights.publish(1)
    tensor.add_(1)  # readers may get this, or fail: unpublish first, or use mutate
    await weights.unpublish()


@shows("IntegrityError", raises=tensorhub.IntegrityError)
async def bytes_without_their_digest(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    array = numpy.ones(1024, dtype=numpy.float32)
    await (await trainer.register("actor", {"w": array})).publish(1)
    await rollout.fetch("actor", 1)  # its digests are known from here on
    array[7] = 3  # not allowed, and nothing counts writes to a numpy array
    await rollout.fetch("actor", 1, timeout=4)


@shows("DrainTimeout")
async def no_time_to_drain(trainer: tensorhub.Hub) -> None:
    weights = await trainer.register("actor", {"w": torch.ones(4)})
    await weights.publish(1)
    try:
        await weights.unpublish(timeout=0)
    except tensorhub.DrainTimeout:  # somebody was reading at that moment
        assert weights.state == "ready"  # still published: do not write it
        await weights.unpublish()


@shows("AuthenticationFailed", raises=tensorhub.AuthenticationFailed)
async def other_secret() -> None:
    async with (
        tensorhub.serve(token="one") as coordinator,
        tensorhub.connect(coordinator.address, token="another"),
    ):
        raise AssertionError


@shows("TransportUnavailable", raises=tensorhub.TransportUnavailable)
async def unknown_transport(address: str) -> None:
    async with tensorhub.connect(address, transports=["carrier-pigeon"]):
        raise AssertionError


@shows("ArchiveUnavailable", raises=tensorhub.ArchiveUnavailable)
async def no_such_directory() -> None:
    Store("file:///nowhere")  # a call that takes a URL opens it so


@shows("ProtocolError", raises=tensorhub.ProtocolError)
async def not_a_coordinator() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer).start()
        async with tensorhub.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}"):
            raise AssertionError


# --------------------------------------------------------------------------------------------------
# without a loop


@shows("sync.serve", "sync.Coordinator", "sync.Coordinator.address", "sync.Coordinator.close")
@shows("sync.Coordinator.leading")
def serve_blocking() -> None:
    with sync.serve() as coordinator:
        assert coordinator.address
        assert coordinator.leading  # with `ha=` it may stand by
    coordinator = sync.serve()  # without a block: until it is closed, or the process ends
    coordinator.close()


@shows(
    "sync.connect",
    "sync.Hub",
    "sync.Hub.name",
    "sync.Hub.register",
    "sync.Weights",
    "sync.Weights.model",
)
@shows(
    "sync.Weights.publish", "sync.Weights.unpublish", "sync.Weights.mutate", "sync.Weights.close"
)
@shows("sync.Weights.state", "sync.Weights.version", "sync.Hub.close")
def train_blocking(address: str) -> None:
    tensor = torch.zeros(4)
    with sync.connect(address, name="trainer-0") as hub:
        weights = hub.register("actor", {"w": tensor})
        weights.publish(1)
        with weights.mutate(2):
            tensor.fill_(2)
        assert (hub.name, weights.model, weights.version) == ("trainer-0", "actor", 2)
        weights.unpublish()
        weights.close()
        assert weights.state == "closed"
    # without a block: until it is closed, or the process ends
    hub = sync.connect(address, name="trainer-0")
    hub.close()


@shows(
    "sync.Weights.replicate",
    "sync.Weights.update",
    "sync.Hub.newest",
    "sync.Hub.wait_for",
    "sync.Hub.describe",
)
@shows("sync.Hub.plan")
@shows("sync.Hub.watch", "sync.Watcher", "sync.Hub.fetch")
def roll_out_blocking(address: str) -> None:
    with sync.connect(address, name="trainer-0") as trainer, sync.connect(address) as hub:
        source = trainer.register("actor", {"w": torch.ones(4)})
        source.publish(1)
        weights = hub.register("actor", {"w": torch.empty(4)})
        weights.replicate()
        source.unpublish()
        source.publish(2)
        hub.wait_for("actor", at_least=2)
        paused: list[tensorhub.VersionInfo] = []
        report = weights.update(before_write=paused.append)
        assert report.version == 2
        assert [info.version for info in paused] == [2]
        assert next(hub.watch("actor")) == hub.newest("actor")
        assert hub.describe("actor", limit=0).mark == 2
        assert hub.fetch("actor", 2)["w"].sum() == 4
        assert hub.plan("actor", {"w": torch.empty(4)}).nbytes == 16


@shows("sync.Hub.explain", "sync.Hub.events", "sync.Hub.http_url", "sync.Coordinator.http_url")
def watch_blocking() -> None:
    options = tensorhub.Options(http="127.0.0.1:0")
    with (
        sync.serve(options=options) as coordinator,
        sync.connect(coordinator.address, options=options) as hub,
    ):
        assert coordinator.http_url != hub.http_url
        hub.register("actor", {"w": torch.ones(4)}).publish(1)
        assert "published" in [event.kind for event in hub.events()]
        reader = hub.register("actor", {"w": torch.empty(4)}, group="reader")
        reader.replicate()
        assert hub.explain("actor").version == 1


@shows("sync.Weights.prefetch")
def prefetch_blocking(address: str) -> None:
    options = tensorhub.Options(host_memory_bytes=1 * 2**20)
    with (
        sync.connect(address, name="trainer-0") as trainer,
        sync.connect(address, options=options) as hub,
    ):
        source = trainer.register("actor", {"w": torch.ones(4)})
        source.publish(1)
        weights = hub.register("actor", {"w": torch.empty(4)})
        assert weights.prefetch().version == 1
        assert weights.update().bytes_read == 0


@shows("sync.archive", "sync.Archive", "sync.Archive.versions", "sync.Archive.wait_for")
@shows("sync.Archive.close")
def archive_blocking(address: str) -> None:
    options = tensorhub.Options(host_memory_bytes=2**20)
    with sync.connect(address, options=options) as hub, tempfile.TemporaryDirectory() as bucket:
        hub.register("actor", {"w": torch.ones(4)}).publish(1)
        with sync.archive(hub, "actor", f"file://{bucket}") as there:
            there.wait_for(at_least=1)
            assert [each.version for each in there.versions] == [1]


@shows("sync.Weights.stamp", "sync.check_stamp")
def stamp_blocking(address: str) -> None:
    with sync.connect(address) as hub:
        weights = hub.register("actor", {"w": torch.ones(4)})
        weights.publish(1)
        assert sync.check_stamp(weights.stamp(), hub).version == 1


@shows("sync.Hub.retain", "sync.Hub.pin", "sync.Hub.rollback")
def keep_blocking(address: str) -> None:
    with sync.connect(address) as hub:
        weights = hub.register("actor", {"w": torch.ones(4)})
        weights.publish(1)
        weights.unpublish()
        weights.publish(2)
        hub.retain("actor", latest=2)
        with hub.pin("actor", 2):
            assert hub.describe("actor").versions[-1].retained
        hub.retain("actor", latest=0)
        hub.rollback("actor", to=1)
        assert hub.describe("actor").mark == 1


# --------------------------------------------------------------------------------------------------
# converted copies


@shows(
    "register_converted",
    "cast",
    "ConvertedWeights",
    "ConvertedWeights.publish",
    "ConvertedWeights.stamp",
    "ConversionReport",
)
async def convert(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    masters = torch.nn.Linear(8, 4)  # fp32
    weights = await register_converted(
        trainer, "actor", cast(masters, torch.bfloat16), group="trainer"
    )
    report = await weights.publish(1)
    assert weights.stamp().version == report.version == 1
    print(f"{report.nbytes} bytes converted in {report.convert_s:.3f} s")
    engine = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    await (await rollout.register("actor", engine)).replicate()
    assert torch.equal(engine.weight, masters.weight.to(torch.bfloat16))


@shows("TensorHubFileSystem")
def read_files(address: str) -> None:
    with sync.connect(address) as hub:
        hub.register("actor", {"weight": torch.ones(8, 4)}).publish(1)
        # fsspec.open("tensorhub://HOST:PORT/actor/latest/model.safetensors") does the same
        fs = TensorHubFileSystem(address)
        with fs.open("actor/latest/model.safetensors") as file:
            weights = safetensors.torch.load(file.read())
        fs.close()
    assert torch.equal(weights["weight"], torch.ones(8, 4))


@shows(
    "sync.register_converted",
    "sync.ConvertedWeights",
    "sync.ConvertedWeights.publish",
    "sync.ConvertedWeights.stamp",
    "sync.ConvertedWeights.version",
    "sync.ConvertedWeights.close",
)
def convert_without_a_loop(address: str) -> None:
    masters = torch.nn.Linear(8, 4)
    with sync.connect(address) as hub:
        weights = sync.register_converted(
            hub, "actor", cast(masters, torch.bfloat16), group="trainer"
        )
        weights.publish(1)
        assert weights.version == weights.stamp().version == 1
        weights.close()


# --------------------------------------------------------------------------------------------------
# other layouts


@shows("source", "at")
async def layouts(trainer: tensorhub.Hub, rollout: tensorhub.Hub) -> None:
    weights = {
        name: torch.full((4, 8), value) for name, value in (("q", 1.0), ("k", 2.0), ("embed", 3.0))
    }
    await (await trainer.register("actor", weights)).publish(1)
    engine = {"qk": torch.zeros(6, 8), "padded": torch.zeros(5, 8)}
    q, k, embed = (tensorhub.source(name) for name in ("q", "k", "embed"))
    sources = {
        "qk": [q[0:4], k[0:2]],  # one behind the other
        "padded": [(tensorhub.at[0:4], embed)],  # the last row stays as it is
    }
    await (await rollout.register("actor", engine, sources=sources, partial=True)).replicate()
    assert engine["qk"][:, 0].tolist() == [1, 1, 1, 1, 2, 2]
    assert engine["padded"][:, 0].tolist() == [3, 3, 3, 3, 0]
