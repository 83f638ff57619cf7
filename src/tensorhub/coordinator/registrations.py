"""What may be registered: whether memory fits its group, and whether there is room for it.

Responsible for these questions. Not responsible for what becomes of a registration (`membership`).
"""

from __future__ import annotations

from itertools import chain

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Worker
from tensorhub.errors import RegistrationError, TensorHubError
from tensorhub.messages import Register
from tensorhub.types import Medium, Purpose


def misfit(cluster: Cluster, message: Register) -> TensorHubError | None:
    """Why that memory cannot be a rank of that group, if it cannot."""
    if message.rank >= message.world_size:
        return RegistrationError(f"rank {message.rank} does not exist in a group of {message.world_size}")
    if (message.medium is Medium.HOST) == (message.purpose is Purpose.USE):
        return RegistrationError(f"memory of medium {message.medium} is not registered for {message.purpose}")
    if message.serves and not message.manifest:
        return RegistrationError("memory that serves says with its manifest what it has")
    if len(message.part_ids) not in (0, 3):
        return RegistrationError("a rank's parts are its catalogue, arrangement and coordinates: name all, or none")
    is_copy = message.purpose in (Purpose.RETENTION, Purpose.SEED)
    any_shard = is_copy or not (message.serves or message.layout_id)
    if (message.world_size > 1 and (is_copy or not message.serves)) or not (any_shard or message.shard == message.rank):
        return RegistrationError(
            "memory that serves holds its own rank's shard; a fetch, and a copy of one shard, is a group of its own"
        )
    model = cluster.models.get(message.model)
    group = model.groups.get(message.group) if model is not None else None
    if group is None:
        return None
    if group.world_size != message.world_size:
        return RegistrationError(
            f"group {group.name!r} of {message.model!r} has {group.world_size} ranks, not {message.world_size}: "
            "give every rank the same world_size, or take another group name"
        )
    kinds = {(member.medium, member.purpose) for member in group.members.values()}
    if kinds and kinds != {(message.medium, message.purpose)}:
        return RegistrationError(f"group {group.name!r} is registered with other memory: all its ranks take one medium")
    before = group.members.get(message.rank)
    if before is not None and before.worker.session is not None:
        return RegistrationError(
            f"rank {message.rank} of group {group.name!r} of {message.model!r} is registered by worker "
            f"{before.worker.name!r}, which is connected: close it first, or take another group name "
            "(two sets of one model in one process need two groups)",
            retryable=True,  # it may close, or be found dead
        )
    return None


def too_much(cluster: Cluster, worker: Worker, message: Register, *parts: tuple[bytes, ...]) -> TensorHubError | None:
    """Which bound this registration would exceed. Where it is a bound on all workers, there may soon be room again."""
    bytes_here = cluster.manifest_bytes[worker.incarnation] + sum(map(len, (message.manifest, *parts[0])))
    blobs = [message.manifest, *chain(*parts), *([message.held.manifest] if message.held is not None else [])]
    what, in_all = "", False
    if len(worker.members) >= limits.REGISTRATIONS_OF_WORKER_MAX:
        what = f"it has {len(worker.members)} registrations already (REGISTRATIONS_OF_WORKER_MAX)"
    elif bytes_here > limits.MANIFEST_BYTES_OF_WORKER_MAX:
        what = f"its manifests would have {bytes_here} bytes (MANIFEST_BYTES_OF_WORKER_MAX)"
    elif len(cluster.members) >= limits.REGISTRATIONS_MAX:
        what, in_all = f"there are {len(cluster.members)} registrations in all (REGISTRATIONS_MAX)", True
    elif not cluster.manifests.has_room_for(*blobs):
        what, in_all = f"all manifests have {cluster.manifests.nbytes} bytes (MANIFEST_BYTES_MAX)", True
    elif not cluster.has_room_for(message.model):
        what, in_all = f"there are {limits.MODELS_MAX} models in all (MODELS_MAX)", True
    if not what:
        return None
    return RegistrationError(f"worker {worker.name!r} cannot register: {what}; close handles first", retryable=in_all)
