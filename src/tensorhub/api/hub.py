"""The public async API: `connect` and the hub. A bridge to the library's own thread, no logic.

Every call may be made from asyncio or trio, and from several tasks; one call at a time runs on one
handle. A call without a timeout gets `Options.op_timeout_s`. Errors: see `tensorhub.errors`; each
says in `memory` what the caller's tensors are.

Not responsible for an embedded coordinator (`embedded`), for one registration's calls (`weights`),
for checks of arguments that several calls share (`arguments`), nor for memory that is not a
caller's tensors (`tools`).
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from tensorhub.api.arguments import (
    check_event,
    check_latest,
    check_part,
    check_ranks,
    checked_options,
    checked_sources,
    is_list,
)
from tensorhub.api.opening import Block, Opening, Unpicklable, close_after
from tensorhub.api.tools import (
    check_full,
    claim_of,
    fetch_into,
    plan_group,
    register_memory,
    tell_left_out,
)
from tensorhub.api.tracing import traced
from tensorhub.api.watcher import Watcher
from tensorhub.api.weights import Weights
from tensorhub.errors import InvalidType, InvalidValue, TensorHubError, shown
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.preview import preview_whole
from tensorhub.memory.allocated import AllocatedMemory, patterns
from tensorhub.memory.tensors import RegisteredMemory
from tensorhub.memory.unallocated import described
from tensorhub.messages import Events
from tensorhub.model.read_plan import ReadPlan
from tensorhub.observed import ClusterEvent, Explanation
from tensorhub.protocol.certificates import TLS, open_certificates, resolve_tls
from tensorhub.protocol.secret import resolve_token
from tensorhub.runtime.control.addresses import split_addresses
from tensorhub.runtime.control.keyring import open_keyring
from tensorhub.runtime.ending import CLOSE_S, Parting
from tensorhub.runtime.loop_thread import CallerMode, LoopThread
from tensorhub.runtime.worker import ports
from tensorhub.runtime.worker.registering import CallersWorker
from tensorhub.runtime.worker.worker import Worker
from tensorhub.types import (
    LATEST,
    FetchReport,
    Location,
    ModelInfo,
    Options,
    Selector,
    VersionInfo,
    WorkerView,
    check_flag,
    check_name,
    check_selector,
    check_version,
)
from tensorhub.web import open_endpoint

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tensorhub.web.endpoint import Endpoint


def connect(
    address: str | Sequence[str],
    *,
    name: str | None = None,
    location: Location | None = None,
    token: str | bytes | os.PathLike[str] | None = None,
    tls: TLS | Literal[False] | None = None,
    transports: Sequence[str] | None = None,
    prefetch: bool = False,
    options: Options | None = None,
) -> Opening[Hub]:
    """Join a cluster as a worker; leaving it closes every handle.

    `async with tensorhub.connect(...) as hub` leaves at the end of the block. `hub = await
    tensorhub.connect(...)` leaves by `hub.close()`, also in another event loop, or when the last
    reference to the hub, its `Weights` and its watchers goes. A hub that is open when the
    interpreter exits leaves then, within `Options.exit_timeout_s`; threads that are not daemons
    keep the process as long as they run, and may use the hub.

    `address`: a coordinator's "tcp://host:port", or those of several candidates, as a list or with
    commas between them; the etcd:// URL that they were started with (`serve(ha=)`); on Ray
    "ray-actor://NAME". etcd and Ray are asked anew at each connection. `name`: for people; default:
    host and process id. `token`: as for `serve` (text is the token itself, a `pathlib.Path` a token
    file, of which the first token is presented). With a read-only one (`read_only_token`) `fetch`,
    `newest`, `wait_for`, `watch`, `describe` and `plan` may be called; all other calls raise
    AuthenticationFailed. `tls`: as for `serve`. `transports`: names in order of preference,
    and only these. `prefetch`: each new version of a model is prefetched in the background for the
    handles that were filled with an earlier one, so that `update` copies it from host memory
    (`Options.host_memory_bytes`).

    A coordinator that does not run yet is waited for, `Options.coordinator_wait_s` long; with 0, it
    fails at once.

    Raises CoordinatorUnavailable, AuthenticationFailed (another token, a certificate that is not
    accepted, a file of `token` or `tls` that cannot be used), ProtocolError (not a TensorHub
    coordinator, of another version, or only one side expects TLS), TransportUnavailable, StateError
    (an address that is none, `prefetch` without host memory, a lack of file descriptors, the port
    of `Options.http` in use).
    """
    secret, token = resolve_token(token), None  # what this frame has, a traceback with locals shows
    files = resolve_tls(tls)
    if not isinstance(address, str) and not is_list(address):
        raise InvalidType(
            f'address={shown(address)}: give a coordinator\'s "tcp://HOST:PORT", or a list of them'
        )
    addresses = split_addresses(address)
    if not isinstance(location, Location | None):
        raise InvalidType(
            f"location={shown(location)}: give "
            "tensorhub.Location(site=..., rack=..., host=...), or None"
        )
    here = location or Location()
    for part, place in (("site", here.site), ("rack", here.rack), ("host", here.host)):
        if place != "":
            check_name(part, place)
    if transports is not None and not is_list(transports):
        raise InvalidType(
            f'transports={shown(transports)}: give a list of names, as ["tcp"], or None for the '
            f"best"
        )
    check_flag("prefetch", prefetch)
    if prefetch and not checked_options(options).host_memory_bytes:
        raise InvalidValue("prefetch=True needs host memory: set Options.host_memory_bytes")
    called = check_name("worker", name) if name is not None else f"{here.host}-{os.getpid()}"
    checked = checked_options(options)
    make = partial(
        Worker,
        addresses,
        name=called,
        location=here,
        transports=transports,
        options=checked,
        prefetch=prefetch,
    )

    async def join(mode: CallerMode) -> Hub:
        secrets, certificates = open_keyring(secret), open_certificates(files)
        worker: list[Worker] = []
        http_url: list[str] = []

        async def main(thread: LoopThread) -> None:
            with contextlib.ExitStack() as stack:
                ready = thread.ready
                if checked.http is not None:
                    endpoint = stack.enter_context(
                        await open_endpoint(
                            checked.http, secrets[0], checked.connect_timeout_s, certificates
                        )
                    )
                    http_url.append(endpoint.url)
                    ready = partial(show, endpoint, thread)
                worker.append(make(secrets_accepted=secrets, certificates=certificates))
                await worker[0].run(ready)

        def show(endpoint: Endpoint, thread: LoopThread) -> None:
            from tensorhub.web.of_worker import show_worker

            show_worker(endpoint, worker[0], thread.post, secrets)
            thread.ready()

        async def farewell(parting: Parting) -> None:
            for each in worker:
                await each.close(parting)

        thread = LoopThread(
            f"tensorhub-{called}", main, mode, farewell=farewell, exit_s=checked.exit_timeout_s
        )
        await thread.start()
        return Hub(worker[0], thread, *http_url)

    return Opening(join, "connect")


class Hub(Unpicklable):
    """A worker's view of its cluster. Made by `connect`. `async with hub:` closes it at the end."""

    def __init__(
        self, worker: CallersWorker, thread: ports.ThreadPort, http_url: str | None = None
    ) -> None:
        self._worker = worker
        self._thread = thread
        self._http_url = http_url
        weakref.finalize(self, thread.dropped).atexit = False

    def __repr__(self) -> str:
        return f"<Hub of {self._worker!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await close_after(self, error)

    @property
    def name(self) -> str:
        """This worker's name, as `describe` and reports show it."""
        return self._worker.name

    @property
    def http_url(self) -> str | None:
        """Of this worker's HTTP endpoint: "http://host:port/"; None without `Options.http`."""
        return self._http_url

    async def register(
        self,
        model: str,
        tensors: nn.Module | Mapping[str, Any],
        *,
        group: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        spot: bool = False,
        sources: Mapping[str, object] | Callable[[str], object] | None = None,
        partial: bool = False,
    ) -> Weights:
        """Register contiguous tensors, on the CPU or on one CUDA device, as one rank's weights:
        used in place, never copied. On a GPU, what the calling thread has queued on its present
        stream before a call comes first. Tensors with padded rows (`buffer[:, :512]`) can be
        filled, and their padding stays as it is. To publish them, register all of `buffer`, with a
        place in `sources` (`at[:, :512]`).

        `tensors`: a module, or a mapping of names to torch tensors and numpy arrays (an entry of a
        mapping within it gets a dotted name). Of a module they are its parameters and persistent
        buffers under the names of its `state_dict()`, which is not called; the prefixes of
        `torch.compile`, `DistributedDataParallel` and activation checkpointing are left out. A
        tensor that `get_extra_state`, or a class' own way of saving, returns in place is carried as
        a buffer is. Other state of the module is named by a LeftOutStateWarning. A DTensor is this
        rank's local part of it, in place: nothing is gathered (FSDP2: while the module is sharded,
        as it is after each backward, or after `reshard()`).

        `sources`: the published parts of a tensor, where names or parts differ from the published
        ones. It maps names to entries, or is a function of a name that returns an entry (None: no
        entry). A publisher states the shapes: `source(name, shape=...)`. An entry is one of these:

        - a view: `tensorhub.source("q")[0:2048]`;
        - a list of views, which are concatenated along dimension 0;
        - a list of pairs `[(tensorhub.at[0:2048], view), ...]`;
        - `[]`: the tensor is left alone.

        Without an entry, a tensor is the tensor of its name: the local part of a DTensor; the whole
        tensor, where `world_size` is 1; else a tensor that is local to the rank: only this rank of
        an equal layout reads it.

        `partial`: the group may leave published tensors, and parts of them, unread.

        The module or mapping is kept. `publish`, `mutate`, `replicate`, `update` and `prefetch`
        compare it with what was registered, in the caller's thread: when they are called, after
        `mutate`'s body, and after `before_write`. RegistrationError then names each tensor with a
        changed memory, shape, stride or dtype. In a module the comparison finds each tensor that
        was replaced or resized (`load_state_dict(assign=True)`, `m.weight = Parameter(...)`,
        `p.data = ...`, `m.half()`, `m.to_empty()`, `resize_`), removed or added. In a mapping it
        finds changes of the mapping's own tensors, and new tensors under their names. So a dict of
        parameters does not show that the module has new parameters. A `state_dict()` has aliases,
        and does not show `p.data = ...` and `m.half()` either: register the module.

        `group`: one string for all ranks of a replica, unique per replica within the model;
        required if `world_size` > 1; None makes a fresh one. Does not wait for other ranks. A rank
        of several may have no tensors (`{}`), as a pipeline's stage without an adapter: it still
        makes the calls of its group.

        Memory may be registered more than once in a process, as a part that two models share. A
        fill of it (`replicate`, `update`) raises StateError if another registration of it holds a
        version, or is just filled or published, when the fill is called or is to write; so does
        `mutate`, and a `publish` while another registration is filled.

        Raises RegistrationError, which names each tensor that cannot be registered and what to do,
        or (with `Options.left_out_state="error"`) the module's state that is not carried.
        """
        check_flag("partial", partial)
        rank, world_size = check_ranks(rank, world_size)
        memory = RegisteredMemory(tensors, checked_sources(sources), world_size)
        tell_left_out(memory.left_out, model, self._worker.options)
        strides = {each.name: each.strides for each in memory.descriptions if each.strides}
        declared = Declaration(rank, world_size, memory.shardings, memory.entries, partial, strides)
        weights = await register_memory(
            self,
            model,
            memory,
            group=group,
            rank=rank,
            world_size=world_size,
            spot=spot,
            declared=declared,
        )
        memory.claim = claim_of(weights, memory.filled)
        return weights

    def newest(self, model: str) -> VersionInfo | None:
        """The newest visible version that this worker has heard of, without I/O; None if it has
        heard of none.

        The first question about a model begins to watch it, and returns None whatever there is: the
        coordinator has not answered yet. `await hub.wait_for(model, at_least=0)` waits until it
        has, and something is published. Raises LeaseLost, once, if the coordinator has come back
        without its state: then the newest version may be an older one, or none; StateError if the
        hub is closed, or this process was forked since it was opened.
        """
        check_name("model", model)
        self._thread.check_usable()
        self._worker.version_watches.report_loss(model)
        if not self._worker.version_watches.watches(model):
            self._worker.version_watches.check_room(model)
            self._thread.post(partial(self._worker.version_watches.watch, model))
        return self._worker.version_watches.newest(model)

    async def wait_for(
        self, model: str, *, at_least: int, timeout: float | None = None
    ) -> VersionInfo:
        """The newest version of `model`, once it is `at_least`; 0: whatever is the newest. While
        nothing is published under that name, perhaps a mistyped one, a log event (`call_waits`)
        says so. With `timeout=math.inf` it waits until it has succeeded or failed, is cancelled, or
        the hub is closed; so with every call that takes a `timeout`.

        Raises OperationTimeout, CoordinatorUnavailable, LeaseLost (as `newest`; also while it
        waits).
        """
        check_name("model", model)
        at_least = check_version(at_least)
        wait_for, timeout_s = self._worker.version_watches.wait_for, self._worker.timeout_s(timeout)
        return await self._thread.call(wait_for, model, at_least, timeout_s)

    def watch(self, model: str) -> Watcher:
        """Iterate over newest versions, the known one first; a slow consumer gets only the newest
        of those it missed.

        After a rollback the newest version is an older one than before. Raises LeaseLost as
        `newest`, also during the iteration: an iteration that goes on then gets the versions of the
        new cluster.
        """
        check_name("model", model)
        self._thread.check_usable()
        self._worker.version_watches.report_loss(model)
        return Watcher(self._worker, self._thread, model, keeps=self)

    @overload
    async def describe(
        self,
        model: str,
        timeout: float | None = None,
        *,
        version: int | None = None,
        after: WorkerView | str | None = None,
        limit: int | None = None,
    ) -> ModelInfo: ...
    @overload
    async def describe(
        self, model: None = None, timeout: float | None = None, *, limit: int | None = None
    ) -> tuple[ModelInfo, ...]: ...
    async def describe(
        self,
        model: str | None = None,
        timeout: float | None = None,
        *,
        version: int | None = None,
        after: WorkerView | str | None = None,
        limit: int | None = None,
    ) -> ModelInfo | tuple[ModelInfo, ...]:
        """The coordinator's view of one model, or (None) of all, by name; it includes all calls
        that ended before.

        Of all, each model is as it is at some time during the call. One model is as it is at one
        moment if it has less than 1,024 workers, shards and reads. Of a larger one, each worker is
        as it is at some time during the call.

        `limit=0`: counts only, and the newest 32 versions. `info.summary` has the workers, the
        calls by what they wait for, and for how long; `summary` of each version has its replicas by
        state. That answer is short, however many workers there are, so that a dashboard may ask
        every second. A whole description has the counts, too, and grows with the model.

        Of one model a part can be asked for. `version`: only that version, its replicas, its reads,
        and the workers that hold or read it. `limit`, `after`: a page of workers by name, the next
        `limit` after `after`, with the shards that they hold and the reads that bring them bytes.
        `after` is a name, or a worker of the page before: `after=info.workers[-1]`. A page has no
        counts. Raises VersionUnavailable for an unknown model or version.
        """
        number, most = check_part(model, version, after, limit)
        call = partial(
            self._worker.coordinator.describe, version=number, after=after, workers_max=most
        )
        found = await self._thread.call(call, model, self._worker.timeout_s(timeout))
        return found if model is None else found[0]

    async def explain(
        self,
        model: str,
        version: int | None = None,
        *,
        group: str | None = None,
        timeout: float | None = None,
    ) -> Explanation:
        """Where the seconds of one update went, over all machines: its critical path.

        An update is any call that fills memory: `update`, `replicate`, `prefetch` or `fetch`. Of
        several that fit, the newest one is explained: of `version` (None: of the newest version
        that was updated to), by `group` (None: the group that took longest). It may be running
        still, or have failed. `parts` are in their order in time, each with its seconds, worker and
        peer, and add up to `seconds`; what is left over is the part "other". `print(explanation)`
        is one sentence about the longest part.

        The coordinator keeps the last 32 updates of each model, and forgets them when it restarts.
        Workers tell their timings after their calls: until then the read is not divided. Raises
        VersionUnavailable (no such update is known), StateError, OperationTimeout,
        CoordinatorUnavailable.
        """
        check_name("model", model)
        number = None if version is None else check_version(version)
        chosen = None if group is None else check_name("group", group)
        timeout_s = self._worker.timeout_s(timeout)
        return await self._thread.call(
            self._worker.coordinator.explain, model, number, chosen, timeout_s
        )

    async def events(
        self,
        *,
        follow: bool = False,
        after: int | ClusterEvent | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[ClusterEvent]:
        """Iterate over what has happened in the cluster, oldest first: `async for event in ...`.

        The coordinator keeps the last 1,024 events. `after`: only those after this event, or with
        larger numbers. `follow`: go on with each event that happens, about half a second after it,
        until the iteration is left. Each coordinator counts from 1 on: after its restart, the
        iteration goes on with all events of the new one, also if `after` is an event of the old one
        (of a number that cannot be told). `timeout`: of each question, in seconds. Raises
        StateError, OperationTimeout, CoordinatorUnavailable; go on with `after=` the last event.
        """
        epoch = (after.epoch or None) if isinstance(after, ClusterEvent) else None
        said = after.number if isinstance(after, ClusterEvent) else after
        number = 0 if said is None else check_event(said)
        timeout_s = self._worker.timeout_s(timeout)
        while True:
            ask = partial(self._worker.coordinator.events, waits=follow)
            page: Events = await self._thread.call(ask, number, epoch, timeout_s)
            for event in page.events:
                yield event
            number, epoch = page.following, page.epoch
            if not (follow or page.more):
                return

    async def plan(
        self,
        model: str,
        tensors: nn.Module | Mapping[str, Any] | None = None,
        selector: Selector = LATEST,
        *,
        rank: int = 0,
        world_size: int = 1,
        sources: Mapping[str, object] | Callable[[str], object] | None = None,
        partial: bool = False,
        names: str | Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> ReadPlan:
        """The transfer plan of one rank of a layout for a version. Nothing is registered, and
        nothing is read.

        `tensors`, `rank`, `world_size`, `sources`, `partial`: as in `register`; but the tensors may
        be on torch's meta device, so that any rank of a layout can be planned anywhere. Without
        `tensors` it is what `fetch(rank=None, names=names)` reads. The plan holds for the first
        reader of its layout: later readers read from it, chunk by chunk. It leaves out reads
        between ranks of one group (docs/layouts.md). For a model of 100,000 tensors it is made in
        some seconds, in the caller's thread.

        Raises what a fill would raise before it reads: RegistrationError, ManifestMismatch (not for
        bytes that no rank of several reads: this is one rank), VersionUnavailable (also where
        nothing is published yet: it does not wait), OperationTimeout, CoordinatorUnavailable.
        """
        check_name("model", model)
        selector = check_selector(selector)
        rank, world_size = check_ranks(rank, world_size)
        check_flag("partial", partial)
        if tensors is None and (
            sources is not None or (rank, world_size, partial) != (0, 1, False)
        ):
            raise InvalidValue(
                "rank=, world_size=, sources= and partial= are of a "
                "reader's tensors: give these, too"
            )
        if tensors is not None and names is not None:
            raise InvalidValue(
                "names= chooses of the whole model: leave it out, and give the tensors that are to "
                "be filled"
            )
        chosen = patterns(names)
        if tensors is not None:
            declared = described(tensors, rank, world_size, checked_sources(sources), partial)
            (found,) = await plan_group(self, model, [declared], selector, timeout)
            return found
        known = await self._thread.call(
            self._worker.known, model, selector, self._worker.timeout_s(timeout)
        )
        return preview_whole(known, chosen)

    async def retain(self, model: str, *, latest: int, timeout: float | None = None) -> None:
        """Keep the newest `latest` versions of `model` fetchable, lost ones counted; the last call
        wins, 0 keeps none.

        A worker that is not spot and would be the last to hold a kept version hands it over: to its
        own host memory (`Options.host_memory_bytes`; not for `close`), else to another worker's. If
        no worker has room, its `unpublish`, `mutate`, `update` and `close` wait for another holder
        and, at their deadline, raise RetentionError with the version still published.
        `close(abandon=True)` and leaving the hub do not wait. On return the setting is durable, and
        every live holder knows it: a holder that is cut off keeps the version until its own lease
        is over. The model need not exist yet. Raises StateError (`latest` is no number from 0),
        OperationTimeout, CoordinatorUnavailable.
        """
        check_full(self._worker, "retain")
        check_name("model", model)
        kept = check_latest(latest)
        await self._thread.call(
            self._worker.coordinator.retain, model, kept, self._worker.timeout_s(timeout)
        )

    def pin(
        self, model: str, version: int, timeout: float | None = None
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Keep one version fetchable for the length of the block, whatever `retain` says; pins of
        one version count.

        It outlives a coordinator with a `state_dir`, and ends with this worker; a rollback ends it
        too. Once the block begins every live holder knows, as with `retain`. Raises
        VersionUnavailable (not published, or without a holder now), StateError, OperationTimeout,
        CoordinatorUnavailable; at the end of the block LeaseLost, if this worker was taken for dead
        and the version could not be pinned again.
        """
        return Block(self._pin(model, version, timeout), "hub.pin")

    @contextlib.asynccontextmanager
    async def _pin(self, model: str, version: int, timeout: float | None) -> AsyncIterator[None]:
        check_full(self._worker, "pin")
        check_name("model", model)
        version = check_version(version)
        timeout_s = self._worker.timeout_s(timeout)
        ident = await self._thread.call(
            self._worker.pins.pin, model, version, timeout_s, undo=self._worker.pins.drop
        )
        try:
            yield
        except BaseException:
            with self._thread.mode.shield(), contextlib.suppress(TensorHubError):
                await self._thread.call(self._worker.pins.unpin, ident, timeout_s)
            raise
        await self._thread.call(self._worker.pins.unpin, ident, timeout_s)

    async def rollback(self, model: str, *, to: int, timeout: float | None = None) -> None:
        """Begin a new lineage of `model` after version `to`, for a trainer that restarts from that
        checkpoint.

        The versions up to `to` stay where workers hold them; later ones are retired: their holders'
        handles become empty, their readers get VersionUnavailable, publishes in progress
        VersionConflict. The next number to publish is `to` + 1. If no worker holds version `to` any
        more, no older version stands for it: `newest` gives None, and "latest" waits, until the
        next publish. Durable on return. Raises VersionConflict (nothing was published, or
        `to` is above the newest number), OperationTimeout, CoordinatorUnavailable.
        """
        check_full(self._worker, "rollback")
        check_name("model", model)
        to = check_version(to)
        await self._thread.call(
            self._worker.coordinator.rollback, model, to, self._worker.timeout_s(timeout)
        )

    async def fetch(
        self,
        model: str,
        selector: Selector = LATEST,
        *,
        rank: int | None = 0,
        names: str | Sequence[str] | None = None,
        device: object = "cpu",
        timeout: float | None = None,
    ) -> Fetched:
        """Allocate the tensors of a version and fill them; they serve no readers. `selector`: as
        `Weights.replicate`.

        `rank`: the shard of a version of several ranks; None: the whole model, put together from
        all ranks that have parts of it, if their layout describes the parts (DTensors, `sources=`).
        `names`: only these tensors, by name or glob ("layers.0.*"), one or several; no other tensor
        is read (but the first reader of a version waits until the publisher has digested the wanted
        bytes; with `rank`, the whole shard). `device`: a torch device, for the tensors in the end;
        they arrive, and are verified, in host memory.

        Raises VersionUnavailable, ManifestMismatch (no such rank, a name that no tensor has, a
        dtype that this torch lacks), StateError (arguments; no torch; a device that cannot be used;
        no memory), OperationTimeout, GroupAborted, CoordinatorUnavailable, LeaseLost (as `newest`).
        """
        memory = AllocatedMemory(names, device)
        with traced("fetch", model) as its:
            said = await fetch_into(self, model, selector, memory, rank=rank, timeout=timeout)
            info, report = said
            its.ended(report)
        return Fetched(memory.tensors(), info, report)

    async def close(self) -> None:
        """Close every handle and leave the cluster; returns when that is done. The end of a block
        does it too.
        """
        self._thread.end_soon(Parting(CLOSE_S))
        await self._thread.ended()


class Fetched(Mapping[str, "torch.Tensor"]):
    """Tensors by name, in the publisher's order; the caller's own, contiguous, with the publisher's
    shapes and dtypes.

    Tensors that share memory at the publisher share it here. `info`: the version. `report`: what
    fetching it took.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], info: VersionInfo, report: FetchReport
    ) -> None:
        self._tensors = dict(tensors)
        self.info = info
        self.report = report

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<Fetched {self.info.model} version {self.info.version}: {len(self)} tensors>"
