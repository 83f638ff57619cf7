"""The parts of a hub's calls, for the library's own tools: memory that is not a caller's tensors,
as a file's.

Internal, and may change. Not responsible for callers' tensors, nor for the documented calls
(`hub`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import anyio

from tensorhub.api.arguments import check_rank, check_ranks
from tensorhub.api.weights import Weights, callers_level
from tensorhub.errors import (
    InvalidValue,
    LeftOutStateWarning,
    RegistrationError,
    read_only_refusal,
    some,
)
from tensorhub.layouts.joining import publication_of
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.preview import preview_ranks
from tensorhub.layouts.published import Published
from tensorhub.layouts.whole import whole_manifest
from tensorhub.memory.claims import Claim
from tensorhub.memory.regions import CallersMemory, Memory
from tensorhub.memory.unallocated import Described
from tensorhub.messages import Events, PublicationReply
from tensorhub.model.manifest import TensorDescription
from tensorhub.model.read_plan import ReadPlan
from tensorhub.observed import UpdateRow
from tensorhub.runtime.worker import ports
from tensorhub.runtime.worker.calling import CallersHandle, ProgressListener
from tensorhub.runtime.worker.registering import CallersWorker
from tensorhub.types import (
    LATEST,
    FetchReport,
    HandleState,
    Options,
    Selector,
    VersionInfo,
    as_integer,
    check_flag,
    check_name,
    check_selector,
)


class Joined(Protocol):
    """See `tensorhub.Hub`."""

    @property
    def _worker(self) -> CallersWorker: ...

    @property
    def _thread(self) -> ports.ThreadPort: ...


async def register_memory(
    hub: Joined,
    model: str,
    memory: CallersMemory,
    *,
    group: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    spot: bool = False,
    declared: Declaration | None = None,
) -> Weights:
    """What `Hub.register` is made of, for memory that is not tensors, as a file's; internal, and
    may change.
    """
    check_full(hub._worker, "register")
    check_name("model", model)
    if group is not None:
        check_name("group", group)
    elif (as_integer(world_size) or 1) > 1:
        raise InvalidValue(
            "world_size > 1 needs group=: one string on all ranks, "
            "unique per replica within the model"
        )
    rank, world_size = check_ranks(rank, world_size)
    check_flag("spot", spot)
    described = hub._worker.describe_memory(memory, declared or Declaration(rank, world_size))
    make = partial(
        hub._worker.register,
        model,
        memory,
        described,
        group=group,
        rank=rank,
        world_size=world_size,
        spot=spot,
        timeout_s=hub._worker.timeout_s(None),
    )
    handle = await hub._thread.call(make, undo=hub._worker.drop_handle)
    return Weights(handle, memory, hub._worker, hub._thread, keeps=hub)


def tell_left_out(left_out: Mapping[str, str], model: str, options: Options) -> None:
    """Warn of state of a module that readers do not get, as the options say. RegistrationError: as
    an error.
    """
    if not left_out or options.left_out_state == "ignore":
        return
    names = some([f"{name!r} ({what})" for name, what in left_out.items()])
    text = (
        f"register {model!r}: {len(left_out)} part(s) of the module's state are not carried, and "
        f"readers keep their own: "
        f"{names}. Make each a buffer (register_buffer), or bring it to readers in another way. "
        f"Options.left_out_state "
        "turns this off, or into an error"
    )
    if options.left_out_state == "error":
        raise RegistrationError(text)
    warnings.warn(text, LeftOutStateWarning, stacklevel=callers_level())


def claim_of(weights: Weights, tensors: Iterable[TensorDescription]) -> Claim:
    """On the caller's tensors, for the registration behind these weights."""
    held = partial(_held, weakref.ref(weights._worker), weakref.ref(weights._handle))
    return Claim(weights._handle.member.shard.title, tensors, held)


def _held(worker: weakref.ref[CallersWorker], handle: weakref.ref[CallersHandle]) -> str:
    """What that registration's memory holds, for `Claim`. Any thread may ask."""
    its, there = worker(), handle()
    if its is None or there is None or there.member.shard.registration not in its.router.handles:
        return ""
    state, version = there.member.state, there.member.version
    if state in (HandleState.EMPTY, HandleState.TORN, HandleState.CLOSED):
        return ""
    return f"is {state.value}" if version is None else f"holds version {version}"


async def fetch_into(
    hub: Joined,
    model: str,
    selector: Selector,
    memory: Memory,
    *,
    rank: int | None = 0,
    timeout: float | None = None,
    progress: ProgressListener | None = None,
) -> tuple[VersionInfo, FetchReport]:
    """What `Hub.fetch` is made of, for memory that is made elsewhere; internal, and may change.

    `memory`: a `FilledMemory`, or tensors that are there. `memory.map` is called once the version
    is known, in the library's thread; the memory is the caller's again when this returns or raises.
    `progress(bytes verified, bytes wanted)` is called in the library's thread a few times a second
    and at the end; it must return at once.
    """
    check_name("model", model)
    selector = check_selector(selector)
    rank = None if rank is None else check_rank(rank)
    timeout_s = hub._worker.timeout_s(timeout)
    memory.check_writable()
    fetch = partial(
        hub._worker.fetch,
        model,
        selector,
        memory,
        rank=rank,
        timeout_s=timeout_s,
        progress=progress,
    )
    return await hub._thread.call(fetch)


async def plan_group(
    hub: Joined,
    model: str,
    ranks: Sequence[Described],
    selector: Selector = LATEST,
    timeout: float | None = None,
) -> list[ReadPlan]:
    """What `Hub.plan` is made of, for several ranks of one group; internal, and may change. Of all
    its ranks, it is checked whether they read everything.
    """
    readers = [
        (hub._worker.describe_reader(descriptions, declared), declared)
        for descriptions, declared in ranks
    ]
    known = await hub._thread.call(
        hub._worker.known, model, selector, hub._worker.timeout_s(timeout)
    )
    return preview_ranks(known, readers)


@dataclass(frozen=True, slots=True)
class PublishedTensors:
    """A version, and the dtype and global shape of each of its tensors. `publication`: equal for
    versions that are published alike.
    """

    version: VersionInfo
    publication: bytes
    kinds: Mapping[str, tuple[str, tuple[int, ...]]]


async def published_tensors(
    hub: Joined,
    model: str,
    selector: Selector = LATEST,
    timeout: float | None = None,
    before: PublishedTensors | None = None,
) -> PublishedTensors:
    """What a version is made of; internal, and may change. Raises as `Hub.plan`. `before`: of
    another version. If this one is published alike, the coordinator is asked once, and nothing is
    worked out again.
    """
    timeout_s = hub._worker.timeout_s(timeout)
    known = None if before is None else before.publication
    reply, found = await hub._thread.call(
        _publication,
        hub._worker,
        model,
        selector,
        timeout_s,
        lambda told: told.publication == known,
    )
    if found is None:
        assert before is not None
        return replace(before, version=reply.version)
    whole = whole_manifest(found[0], publication_of(*found), None)
    kinds = {each.name: (each.dtype, each.global_shape) for each in whole.tensors}
    return PublishedTensors(reply.version, reply.publication, kinds)


async def _publication(
    worker: CallersWorker,
    model: str,
    selector: Selector,
    timeout_s: float,
    is_known: Callable[[PublicationReply], bool],
) -> tuple[PublicationReply, tuple[Published, Mapping[str, bytes]] | None]:
    deadline = anyio.current_time() + timeout_s
    check_name("model", model)
    reply = await worker.coordinator.publication(model, check_selector(selector), timeout_s)
    if is_known(reply):
        return reply, None
    return reply, await worker.parts_of(reply.publication, deadline)


async def published_parts(
    hub: Joined, model: str, selector: Selector, known: Container[str], timeout: float | None = None
) -> tuple[VersionInfo, tuple[Published, Mapping[str, bytes]] | None]:
    """A version, and what its publication is made of; None: the content id is `known`. Internal,
    and may change. Raises as `Hub.plan`.
    """
    timeout_s = hub._worker.timeout_s(timeout)
    reply, found = await hub._thread.call(
        _publication,
        hub._worker,
        model,
        selector,
        timeout_s,
        lambda told: told.version.content_id in known,
    )
    return reply.version, found


async def changed_tensors(weights: Weights) -> tuple[str, ...]:
    """Names of the registered tensors with bytes that differ from the published digests of the held
    version; internal, and may change. All bytes are read, and nothing is written. Raises
    StateError: no version with digests is held.
    """
    return await weights._thread.call(weights._handle.changed_tensors)


async def seed_shard(
    hub: Joined, info: VersionInfo, shard: int, timeout: float | None = None
) -> FetchReport:
    """Have this worker hold one shard of the model's newest version in host memory, as a seed;
    internal, and may change.

    `info`: a version of the model that is visible now; the seed's memory is reserved as it needs.
    Raises as `Weights.prefetch`.
    """
    check_full(hub._worker, "seed")
    timeout_s = hub._worker.timeout_s(timeout)
    return await hub._thread.call(hub._worker.copies.seed, info, shard, timeout_s)


async def events_page(
    hub: Joined, after: int, epoch: int | None, timeout: float | None = None
) -> Events:
    """What has happened after that event of the coordinator of that epoch (None: not known); all
    that is known, if the coordinator is another one by now. Internal, and may change. Raises
    OperationTimeout, CoordinatorUnavailable.
    """
    ask = partial(hub._worker.coordinator.events, waits=False)
    return await hub._thread.call(ask, after, epoch, hub._worker.timeout_s(timeout))


def show_seeding(hub: Joined, tell: Callable[[str, int, int, int], None]) -> None:
    """Have `tell(model, shard, bytes verified, bytes wanted)` called, in the library's thread, a
    few times a second while seeds of this worker are filled that are made from now on; internal,
    and may change. It must return at once.
    """
    hub._worker.copies.on_seeding = tell


async def recent_updates(
    hub: Joined, model: str, timeout: float | None = None
) -> tuple[UpdateRow, ...]:
    """The updates of a model that the coordinator knows, the newest first."""
    timeout_s = hub._worker.timeout_s(timeout)
    return await hub._thread.call(hub._worker.coordinator.updates, model, timeout_s)


def check_full(worker: CallersWorker, call: str) -> None:
    """Raise AuthenticationFailed, naming the call, if the token is read-only; the coordinator would
    refuse it, too.
    """
    if worker.read_only:
        raise read_only_refusal(call)
