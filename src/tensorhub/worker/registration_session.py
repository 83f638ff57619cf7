"""One registration's standing with the coordinator: whether it is connected, whether it is known,
and its next operation.

Responsible for the membership epoch and for the sequence of this rank's group calls: an `OpKey` is
taken once. After each lost connection the session registers again, and ends an operation that was
left without an outcome. Not responsible for calls (`worker.active_call`) or memory
(`worker.member_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.joining import coordinates_of, parts_of
from tensorhub.layouts.pieces import Declaration
from tensorhub.messages import (
    FORMER_KEYS_MAX,
    Abandon,
    EpochChanged,
    ErrorInfo,
    Held,
    Register,
    Registered,
)
from tensorhub.model.manifest import Manifest
from tensorhub.types import Medium, OpKey, Purpose

# Of a lease. The coordinator counts on a worker for at most one lease after the coordinator's
# newest message that the worker has answered, however late the answer arrives. The margin is for
# clocks that do not agree.
LEASE_MARGIN = 0.6
TOLD_UNASKED_BYTES = 4096  # of a manifest


@dataclass(frozen=True, slots=True)
class Shard:
    """A registration, as the coordinator sees it."""

    registration: str
    model: str
    group: str
    rank: int
    world_size: int
    spot: bool
    layout_id: str
    manifest: Manifest | None  # as this rank publishes; None: a fetch, which never serves readers
    # of the shard of a version that this memory is for; the rank, but for a fetch and a copy of one
    # shard
    number: int
    medium: Medium = Medium.DEVICE
    purpose: Purpose = Purpose.USE
    # the caller's declaration of the tensors; None: they are plain ones
    declared: Declaration | None = None
    # of the declaration, if they can be known before a publication is
    coordinates: Coordinates | None = None
    # patterns of what a fetch of the whole model takes; None: all
    names: tuple[str, ...] | None = None

    @property
    def part_ids(self) -> tuple[str, ...]:
        """The ids of the parts that describe its tensors. Empty: its manifest describes them, or
        nothing does.
        """
        return () if self.coordinates is None else tuple(parts_of(self.coordinates))

    def parts(self, manifest: Manifest) -> dict[str, bytes]:
        """The catalogue, the arrangement and the coordinates of its tensors by their ids, for the
        positions in this manifest: its own, or one of equal tensors. Empty as `part_ids`.
        """
        if self.coordinates is None or self.declared is None:
            return {}
        is_its = self.manifest is not None and manifest.manifest_id == self.manifest.manifest_id
        return parts_of(self.coordinates if is_its else coordinates_of(manifest, self.declared))

    @property
    def serves(self) -> bool:
        """Whether readers may read this memory."""
        return self.manifest is not None

    @property
    def title(self) -> str:
        """The shard's name in error texts."""
        if not self.serves:
            return f"{self.model!r} (rank {self.number})"
        return f"{self.model!r} (group {self.group!r}, rank {self.rank})"


def said_manifest(manifest: Manifest, *, told: bool) -> bytes:
    """The manifest in Register, beside its id: all of it if the coordinator asked for it, or if it
    is short; else empty.
    """
    encoded = manifest.encode()
    return encoded if told or len(encoded) <= TOLD_UNASKED_BYTES else b""


class RegistrationSession:
    """The coordinator's knowledge of one registration, in this worker's view."""

    def __init__(self, shard: Shard, requests: Callable[[], int]) -> None:
        self.shard = shard
        self.online = False  # the coordinator can be told something
        # offline: when this worker's lease has ended for certain, by its own clock (R4)
        self.lease_over = -inf
        self.confirmed = False  # it has answered the Register of this connection
        self.refusal: ErrorInfo | None = None  # the coordinator has refused the registration
        # this rank ended that operation, and has not heard the outcome
        self.left: Abandon | None = None
        self._requests = requests
        self._lease_s = 0.0
        self._register_request = 0
        self._epoch = 0
        self._sequence = 0  # of the next group call
        self.lineage: int | None = None  # the model's, as far as it was heard of
        # the group's newest recorded operation that it was told is committed, in this cluster
        self.committed: OpKey | None = None
        # what the key of the next group call would have been at former coordinators
        self.untaken: tuple[OpKey, ...] = ()
        self.keys_taken = 0  # how many group calls this rank has said, or refused

    @property
    def ready(self) -> bool:
        """Whether a group call can be made: the coordinator hears it, and knows this
        registration.
        """
        return self.online and self.confirmed

    @property
    def was_known(self) -> bool:
        """Whether a coordinator has ever confirmed this registration."""
        return self._epoch > 0

    def connected(self, lease_s: float) -> None:
        self.online, self.confirmed, self.refusal = True, False, None
        self._lease_s = lease_s

    def disconnected(self, now: float) -> None:
        """The coordinator heard nothing after now: a lease (and a margin) later it does not count
        on this worker.
        """
        if self.online:
            self.lease_over = now + self._lease_s * (1 + LEASE_MARGIN)
        self.online = self.confirmed = False

    def register(self, held: Held | None, *, told: bool, parts: Sequence[bytes] = ()) -> Register:
        """The Register message. The coordinator forgets content that is not in `held`. `told`: the
        coordinator has asked for the manifests themselves. `parts`: the parts that it has asked
        for.
        """
        s, manifest = self.shard, self.shard.manifest
        self._register_request = self._requests()
        return Register(
            request=self._register_request,
            registration=s.registration,
            model=s.model,
            group=s.group,
            rank=s.rank,
            shard=s.number,
            world_size=s.world_size,
            serves=s.serves,
            spot=s.spot,
            medium=s.medium,
            purpose=s.purpose,
            layout_id=s.layout_id,
            nbytes=manifest.nbytes if manifest is not None else 0,
            chunks=manifest.chunk_count if manifest is not None else 0,
            manifest=said_manifest(manifest, told=told) if manifest is not None else b"",
            held=held,
            manifest_id=manifest.manifest_id if manifest is not None else "",
            part_ids=s.part_ids,
            parts=tuple(parts),
            partial=s.declared is not None and s.declared.partial,
            committed=self.committed,
        )

    def asked(self, request: int) -> bool:
        """Whether this request is the newest Register."""
        return request == self._register_request

    def confirm(self, message: Registered) -> bool:
        """The coordinator's answer; True if it is the first answer of this connection."""
        self._move_to(message.epoch, message.sequence)
        self.lineage = message.in_lineage
        first, self.confirmed = not self.confirmed, True
        return first

    def epoch_changed(self, message: EpochChanged) -> None:
        self._move_to(message.epoch, message.sequence)

    def _move_to(self, epoch: int, sequence: int) -> None:
        """Within an epoch the sequence never goes back: the coordinator may not have heard of a key
        that was taken here.
        """
        if epoch == self._epoch:
            sequence = max(sequence, self._sequence)
        elif self.was_known and epoch >> 32 != self._epoch >> 32:  # another coordinator's
            self.untaken = (*self.untaken, self._next_key())[-FORMER_KEYS_MAX:]
        self._epoch, self._sequence = epoch, sequence

    def _next_key(self) -> OpKey:
        return OpKey(self.shard.model, self.shard.group, self._epoch, self._sequence)

    def take_key(self) -> OpKey:
        """The key of this rank's next group call."""
        key = self._next_key()
        self._sequence += 1
        self.keys_taken += 1
        self.untaken = ()
        return key

    def is_older(self, key: OpKey) -> bool:
        """Whether that operation began before the present membership, which the answer to Register
        tells: its commit may not have counted this memory.
        """
        return not self.confirmed or key.epoch != self._epoch

    def abandon(self, key: OpKey, error: ErrorInfo) -> Abandon:
        """End that operation; it is `left` until its outcome is heard."""
        self.left = Abandon(key, self.shard.rank, error)
        return self.left

    def heard(self, key: OpKey, *, committed: bool, publishes: bool) -> bool:
        """That operation's outcome is known now; True if this rank had left the operation. Of a
        single rank only publishes are recorded.
        """
        if committed and (publishes or self.shard.world_size > 1):
            self.committed = max(key, self.committed or key)
        if self.left is None or self.left.key != key:
            return False
        self.left = None
        return True
