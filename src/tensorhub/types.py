"""Identifiers and value types that every layer shares.

They are plain, immutable and comparable with `==`. Nothing here does I/O, knows a clock or keeps
state.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import operator
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Annotated, Final, Literal, NewType, NoReturn
from urllib.parse import unquote

from tensorhub.errors import InvalidType, InvalidValue, StateError, shown

# ---------------------------------------------------------------------------------------------
# bounds of wire fields


@dataclass(frozen=True, slots=True)
class Length:
    """The most characters, bytes or items that a field received from a socket may have."""

    most: int


@dataclass(frozen=True, slots=True)
class Range:
    """The smallest and the largest value, both included, that a number received from a socket may
    have.
    """

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Printable:
    """A text received from a socket has no character that a terminal would take for a command, or
    that shows nothing.
    """


@dataclass(frozen=True, slots=True)
class Since:
    """The version of the protocol that brought this field. An older peer is not sent it, and where
    it is missing, it has its default.
    """

    version: int


U64 = Annotated[int, Range(0, 2**64 - 1)]
Seconds = Annotated[float, Range(0, 10**9)]
Name = Annotated[str, Length(512), Printable()]  # models, groups, workers, sites, hosts, addresses
Id = Annotated[str, Length(64), Printable()]  # ids that a party of the cluster minted
Text = Annotated[str, Length(16_384)]  # what a person reads

# --------------------------------------------------------------------------------------------------
# identifiers

Incarnation = NewType("Incarnation", str)  # one life of one worker process; never used twice
# minted by a publication (R1); two publications never share one
ContentId = NewType("ContentId", str)
RegistrationId = NewType("RegistrationId", str)  # one rank's registered memory, of one incarnation
# one read lease; names one attempt of one reader to read one source
LeaseId = NewType("LeaseId", str)

Selector = int | str  # a version number, "latest", "latest-1" or "available"
LATEST: Literal["latest"] = "latest"
PREVIOUS: Literal["latest-1"] = "latest-1"
AVAILABLE: Literal["available"] = "available"
VERSION_MAX = 2**63 - 1


def invalid(value: object, kinds: type | tuple[type, ...], text: str) -> InvalidType | InvalidValue:
    """The error for an argument that is of another kind than these, or out of range."""
    fits = (isinstance(value, kinds) and not _is_bool(value)) or (
        kinds is int and as_integer(value) is not None
    )
    return InvalidValue(text) if fits else InvalidType(text)


def as_integer(value: object) -> int | None:
    """Any integer (also numpy's and torch's, which the wire cannot carry) as an int; None for any
    other value, as 1.5 and True.
    """
    if type(value) is int:
        return value
    # torch's True says that it is 1
    if _is_bool(value) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # each library refuses in its own way
        return None


def check_selector(selector: object) -> Selector:
    """Return `selector` if it is a version number (0 to 2**63-1), "latest", "latest-1" or
    "available".

    Raises InvalidValue or InvalidType for anything else.
    """
    number = as_integer(selector)
    if number is not None and 0 <= number <= VERSION_MAX:
        return number
    if isinstance(selector, str) and selector in (LATEST, PREVIOUS, AVAILABLE):
        return selector
    text = (
        f"{shown(selector)} is not a version selector: give a number from 0, 'latest', "
        f"'latest-1' or 'available'"
    )
    if isinstance(selector, str) and selector.isdecimal():
        text += "; a number is an integer here, not text"
    raise invalid(selector, str if number is None else int, text)


def check_version(version: object) -> int:
    """Return `version` as an int if it is a version number (0 to 2**63-1); else raise InvalidValue
    or InvalidType.
    """
    number = as_integer(version)
    if number is None or not 0 <= number <= VERSION_MAX:
        raise invalid(
            version, int, f"{shown(version)} is not a version: give an integer from 0 to 2**63 - 1"
        )
    return number


def check_flag(name: str, value: object) -> None:
    """Raise InvalidType unless `value`, an argument called `name`, is True or False."""
    if not isinstance(value, bool):
        raise InvalidType(f"{name}={shown(value)}: give True or False")


def check_name(what: str, name: object) -> str:
    """Return `name` if it can name a `what` (1 to 512 printable characters, not spaces only); else
    raise InvalidValue, InvalidType.
    """
    if isinstance(name, str) and name.strip() and len(name) <= 512 and name.isprintable():
        return name
    more = f" (of {len(name)} characters)" if isinstance(name, str) and len(name) > 512 else ""
    raise invalid(
        name,
        str,
        f"{shown(name)}{more} cannot name a {what}: give text, of 1 to 512 printable characters, "
        f"not spaces only",
    )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def release() -> str:
    """Which release of TensorHub this is. (An import of the package would be one of all its
    parts.)
    """
    version: str = vars(sys.modules["tensorhub"])["__version__"]
    return version


def printable(text: str) -> str:
    """A peer's text, for a person to read: line breaks stay, and other unprintable characters are
    as in a `repr`.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def as_seconds(value: object) -> float | None:
    """A time of 0 to 10**9 seconds, given as any number (numpy's are not for the wire); None if it
    is none.
    """
    try:
        seconds = float(value) if isinstance(value, Real) and not _is_bool(value) else -1.0
    except OverflowError:  # an integer that no float can be
        return None
    return seconds if 0 <= seconds < 10**9 else None


# what math.inf becomes, which no clock and no wire takes: 31 years
FOREVER_S: Final = 999_999_999.0


def as_timeout_s(timeout: float | None, default_s: float, name: str = "timeout") -> float:
    """The seconds that a call has: those given, or the default. Raises InvalidValue, InvalidType.

    math.inf: until it has succeeded or failed, is cancelled, or its hub is closed. `name`: what the
    caller calls it.
    """
    if timeout is None:
        return default_s
    given: object = timeout
    seconds = FOREVER_S if isinstance(given, float) and given == math.inf else as_seconds(given)
    if seconds is None:
        text = (
            f"{name}={shown(timeout)}: give seconds, 0 or more and less than 10**9, math.inf, "
            f"or None for the default"
        )
        raise invalid(timeout, Real, text)
    return seconds


@dataclass(frozen=True, slots=True, order=True)
class OpKey:
    """Names one group operation for all time: the n-th group call of a group's membership epoch
    (R6).
    """

    model: Name
    group: Name
    # as a store can keep them
    epoch: Annotated[int, Range(0, VERSION_MAX)]
    sequence: Annotated[int, Range(0, VERSION_MAX)]

    def __str__(self) -> str:
        return f"{self.model}/{self.group}@{self.epoch}#{self.sequence}"


# what the names begin with that a holder of the read-only token makes
READ_ONLY: Final = "read-only-"


def host_group(group: str) -> str:
    """The group of the host copies of a group's ranks: equal on all ranks, and no longer than a
    name may be.
    """
    name = f"{group}/host"
    return (
        name
        if len(name) <= 512
        else f"{group[:400]}-{hashlib.blake2b(group.encode(), digest_size=16).hexdigest()}/host"
    )


class OpKind(StrEnum):
    PUBLISH = "publish"
    REPLICATE = "replicate"
    UPDATE = "update"
    PREFETCH = "prefetch"
    FETCH = "fetch"  # into memory that serves no readers


class Medium(StrEnum):
    DEVICE = "device"  # the caller's own tensors, wherever they are
    HOST = "host"  # the library's own host memory


class Purpose(StrEnum):
    USE = "use"
    PREFETCH = "prefetch"
    RETENTION = "retention"
    SEED = "seed"
    ARCHIVE = "archive"  # of a version in an archive; read from there when a reader wants it


class DeltaUse(StrEnum):
    """Whether a read gets deltas in place of whole chunks; else why not (docs/deltas.md)."""

    UNDECIDED = "undecided"  # nothing has come yet
    USED = "used"
    OFF = "off"  # the reader's Options.deltas
    SAME_HOST = "same host"
    OTHER_LAYOUT = "other layout"
    NO_BASE = "no base"  # the reader's memory has no older content of these chunks
    NO_EXTRA = "no extra"  # `delta` is not installed at the reader
    TRANSPORT = "transport"  # it carries none: tcp does
    FAST_LINK = "fast link"  # whole chunks come sooner than the codec would make them
    NONE_SENT = "none sent"  # the source was asked, and has none


class HandleState(StrEnum):
    """What one registration's memory holds: what `weights.state` shows."""

    EMPTY = "empty"  # holds no version; the caller may write the memory
    FILLING = "filling"  # the library writes the memory
    READY = "ready"  # holds a version; the memory is immutable
    DRAINING = "draining"  # still immutable; on its way to empty
    TORN = "torn"  # not a version's bytes: a fill was broken off, or published memory was written
    # this rank has voted and does not know the outcome; its next call resolves that first
    IN_DOUBT = "in_doubt"
    CLOSED = "closed"  # the registration has ended


# --------------------------------------------------------------------------------------------------
# locations

_THIS_HOST = socket.gethostname()


def _here(what: str, otherwise: str) -> str:
    """What the environment says of this process' place. An empty variable counts as unset, as of a
    pod whose node lacks the label.
    """
    name = os.environ.get(f"TENSORHUB_{what}", "").strip()
    return check_name(f"place (TENSORHUB_{what})", name) if name else otherwise


@dataclass(frozen=True, slots=True)
class Location:
    """Where a worker is. Equal `host` means: same kernel, same network namespace, memory can be
    shared.

    Network namespaces and containers set different hosts. A worker without a site is in "default";
    a mistyped name is a site of its own. The environment gives what is left out: TENSORHUB_SITE,
    TENSORHUB_RACK, TENSORHUB_HOST. Raises InvalidValue for one that is no name.
    """

    site: Name = field(default_factory=lambda: _here("SITE", "default"))  # a datacenter
    rack: Name = field(default_factory=lambda: _here("RACK", ""))  # else none
    host: Name = field(default_factory=lambda: _here("HOST", _THIS_HOST))  # else this one's name


# they reach from one host to that host only
SAME_HOST_TRANSPORTS: Final = frozenset({"cma", "shm", "cuda_ipc"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to reach a worker's memory: a transport's name and an address that this transport
    understands.

    `strides`: this worker reads and serves chunks of several pieces of memory this way, and so
    across layouts.
    """

    transport: Name
    address: Name
    strides: bool = True


# --------------------------------------------------------------------------------------------------
# options


UNMAPPED_UID: Final = 65534  # the kernel's id for each user that a user namespace does not map
_RDMA_PORTS: Final = re.compile(r"[\w.-]+(:\d{1,3}(:\d{1,4})?)?(,[\w.-]+(:\d{1,3}(:\d{1,4})?)?)*\Z")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of `serve` and `connect`; the comment of each names the process that uses it.

    Raises `InvalidValue` or `InvalidType` (each a `StateError`) for a value out of range, naming
    it.
    """

    op_timeout_s: float = 60.0  # caller's: the deadline of a call that is given none
    lease_s: float = 10.0  # coordinator's: a worker unheard of for this long is lost
    # coordinator's: how long a leaving source waits for its running readers
    drain_grace_s: float = 5.0
    chunk_bytes: int = 8 * 2**20  # publisher's: the most bytes in one chunk
    # publisher's: tensors of so many bytes at most travel packed together, as a copy; 0: none
    pack_bytes: int = 0
    # publisher's: of chunks; SHA-256 is for host memory only
    digest: Literal["xxh3-64", "sha-256"] = "xxh3-64"
    integrity: bool = True  # publisher's: False writes digest "none" into the manifest
    # worker's: budget for host copies (prefetch, staged updates, retention)
    host_memory_bytes: int = 0
    # worker's: whether versions come as deltas of the version before, over links slower than the
    # codec; a source keeps what it needs for that within `host_memory_bytes`
    deltas: Literal["auto", "off"] = "auto"
    # worker's: data listeners' address; None: that of the coordinator connection
    listen_host: str | None = None
    # worker's: the data listener's port; 0 takes a free one, "41000-41100" the first that is free
    listen_port: int | str = 0
    # worker's: "host:port" where readers reach the data listener, if not where it listens (of
    # several ports, the first one's); also where workers reach a coordinator
    advertise: str | None = None
    # caller's: of a `mutate` that writes nothing
    stale_weights: Literal["warn", "error", "ignore"] = "warn"
    # caller's: a module's state that `register` does not carry
    left_out_state: Literal["warn", "error", "ignore"] = "warn"
    # worker's: "DEVICE[:PORT[:GID_INDEX]],..."; None: TENSORHUB_RDMA_PORTS, else all
    rdma_ports: str | None = None
    # worker's: users, besides its own and root, whose processes may map its memory
    shared_memory_uids: tuple[int, ...] = ()
    connect_timeout_s: float = 10.0  # caller's: connecting and authenticating, each attempt
    # caller's: how long `connect` waits for a coordinator to come up; 0: not at all
    coordinator_wait_s: float = 60.0
    # caller's: the interpreter's exit waits so long for open hubs; 0: not at all
    exit_timeout_s: float = 5.0
    stall_timeout_s: float = 10.0  # reader's: a source that is silent for this long is given up
    # reader's: the beginnings of URLs, such as "s3://bucket/runs", of archives that it reads by
    # itself; it reads others from the worker that serves them
    direct: tuple[str, ...] = ()
    readers_max: int = 64  # worker's: connections from readers that it serves at a time
    wan_connections: int = 4  # reader's: at most, over tcp, to one source in another site
    # coordinator's: connections of workers at a time, and workers; fewer if `ulimit -n` is low
    sessions_max: int = 16_384
    frame_bytes_max: int = 64 * 2**20  # everyone's: a larger control frame is refused unread
    # each process' own: "HOST:PORT" of an HTTP endpoint for browsers, probes and Prometheus (port 0
    # takes a free one; needs the extra `http`)
    http: str | None = None

    def __post_init__(self) -> None:
        may_be_zero = ("drain_grace_s", "exit_timeout_s", "coordinator_wait_s")
        for name in (
            "op_timeout_s",
            "lease_s",
            "connect_timeout_s",
            "stall_timeout_s",
            *may_be_zero,
        ):
            seconds, may_be_0 = as_seconds(getattr(self, name)), name in may_be_zero
            if seconds is None or (seconds == 0 and not may_be_0):
                range_ = (
                    "0 or more and less than 10**9"
                    if may_be_0
                    else "more than 0 and less than 10**9"
                )
                self._refuse(name, Real, f"give a number of seconds, {range_}")
            object.__setattr__(self, name, seconds)
        for name, least, most, advice in (
            ("chunk_bytes", 4096, 2**30, "give 4096 to 2**30 bytes"),
            ("pack_bytes", 0, math.inf, "give bytes, 0 or more"),
            ("host_memory_bytes", 0, math.inf, "give bytes, 0 or more"),
            ("readers_max", 1, math.inf, "give 1 or more"),
            ("wan_connections", 1, 16, "give 1 to 16"),
            ("sessions_max", 1, math.inf, "give 1 or more"),
            ("frame_bytes_max", 65_536, 2**31, "give 65536 to 2**31 bytes"),
        ):
            number = as_integer(getattr(self, name))
            if number is None:
                self._refuse(name, int, f"give an integer: {advice.removeprefix('give ')}")
            if not least <= number <= most:
                self._refuse(name, int, advice)
            object.__setattr__(self, name, number)
        if (ports := _ports(self.listen_port)) is None:
            advice = "give a port, 0 (any free one) to 65535, or a text such as '41000-41100'"
            self._refuse("listen_port", str if isinstance(self.listen_port, str) else int, advice)
        if self.advertise is not None and _can_be_reached(self.advertise):
            last = parse_address(f"tcp://{self.advertise}")[1] + len(ports) - 1
            if last > 65_535:
                advice = f"its last port would be {last}: give one of at most {65_536 - len(ports)}"
                self._refuse("advertise", str, advice)
        object.__setattr__(self, "listen_port", self.listen_port if ports[1:] else ports[0])
        check_flag("Options.integrity", self.integrity)
        if not isinstance(self.listen_host, str | None):
            self._refuse(
                "listen_host", str, "give the address of the data listener, as text, or None"
            )
        if self.advertise is not None and not _can_be_reached(self.advertise):
            advice = "give HOST:PORT, as readers reach the data listener, in at most 512 characters"
            self._refuse("advertise", str, advice + _brackets(self.advertise))
        if self.http is not None and not _can_be_listened_on(self.http):
            advice = "give HOST:PORT to listen on, such as '127.0.0.1:8080', or None"
            self._refuse("http", str, advice + _brackets(self.http))
        if self.rdma_ports is not None and not _RDMA_PORTS.match(str(self.rdma_ports)):
            self._refuse(
                "rdma_ports",
                str,
                "give DEVICE[:PORT[:GID_INDEX]], several with commas between them",
            )
        uids: object = self.shared_memory_uids
        if not isinstance(uids, tuple) or any(
            (uid := as_integer(each)) is None or not 0 <= uid < 2**32 - 1 for each in uids
        ):
            self._refuse("shared_memory_uids", tuple, "give a tuple of user ids, such as (1000,)")
        object.__setattr__(self, "shared_memory_uids", tuple(map(as_integer, uids)))
        if UNMAPPED_UID in self.shared_memory_uids:
            text = (
                "that id stands for every user whom a user namespace does not know; give the "
                "process a user of its own"
            )
            self._refuse("shared_memory_uids", tuple, f"{UNMAPPED_UID} cannot be named: {text}")
        direct: object = self.direct
        if not isinstance(direct, tuple) or None in map(archive_place, direct):
            text = "give a tuple of URLs of archives, or of what they begin with, such as"
            raise invalid(direct, tuple, f"Options.direct: {text} ('s3://bucket/runs',)")
        for name in ("stale_weights", "left_out_state"):
            if getattr(self, name) not in ("warn", "error", "ignore"):
                self._refuse(name, str, "give 'warn', 'error' or 'ignore'")
        if self.deltas not in ("auto", "off"):
            self._refuse("deltas", str, "give 'auto' or 'off'")
        if self.digest not in ("xxh3-64", "sha-256"):
            self._refuse("digest", str, "give 'xxh3-64' (fast) or 'sha-256' (cryptographic)")

    @property
    def listen_ports(self) -> Sequence[int]:
        """Those that `listen_port` allows."""
        return _ports(self.listen_port) or ()

    def _refuse(self, name: str, kinds: type, advice: str) -> NoReturn:
        value = getattr(self, name)
        raise invalid(value, kinds, f"Options.{name} = {shown(value)}: {advice}")


# ----------------------------------------------------------------------------------------------
# what callers receive


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One visible version of a model. `nbytes` counts every shard of it."""

    model: Name
    version: U64  # 0 to 2**63 - 1
    content_id: Id  # minted by the publication; two publications never share one
    nbytes: U64  # of every shard together; tied tensors count once
    world_size: Annotated[int, Range(1, 2**20)]  # ranks of the group that published it
    lineage: Annotated[int, Range(0, VERSION_MAX)] = 0  # each rollback begins the next one


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What one source gave to one fetch. `outcome`: "used", or why the reader left it.

    A source of another layout gives parts of its shard: `cells`, of so many `runs`, that were
    verified. `shard` says then which of that layout's shards it was (of equal ones the first). It
    is None where the source has the reader's own layout, or is another rank of the reader's group.

    `kind`: of the source's memory: "live", tensors that a caller has registered; "host copy", one
    that a worker keeps (prefetch, staged updates, retention); "seed" or "archive". `deltas`:
    "used"; else why its chunks came whole, as docs/deltas.md lists it.
    """

    name: str  # the worker's
    transport: str
    bytes_read: int
    seconds: float  # while it was a source
    # "used", "dropped", or why the read failed: lost, stalled, refused, starved, corrupt, damaged,
    # unreachable
    outcome: str
    shard: int | None = None  # of the source's layout, where that is another one than the reader's
    cells: int = 0  # parts of tensors that the source has and the reader wants
    runs: int = 0  # contiguous in both memories
    bytes_saved: int = 0  # of the chunks that came as deltas: what they are longer than the deltas
    codec_s: float = 0.0  # that applying them took
    kind: str = "live"
    deltas: DeltaUse = DeltaUse.UNDECIDED
    words: int = 0  # to which deltas were applied; of a chain, to which each of them was
    words_changed: int = 0  # by these deltas
    fault: str = ""  # what is known of why the read failed


@dataclass(frozen=True, slots=True)
class FetchReport:
    """What one rank's one call of `replicate`, `update`, `prefetch` or `fetch` did.

    `bytes_read`: payload taken off transports, discarded included, local copies excluded.
    `reread_bytes`: the part at offsets that had been verified before in this call. `changed` is
    False when the version was held already. `cells`, `runs`, `bytes_across`: reads from layouts
    other than the reader's own.

    `verified_by`: "publisher": the digests of all that this rank holds are the publisher's.
    "source": of some of it no publisher could be asked, so that the digests of the workers it was
    read from count (SECURITY.md). Without digests (`Options.digest`) it is "source".

    `phases`: wall seconds by name, which add up to `seconds`, the whole call. An update that
    changed nothing has `resolve` only:

    - `resolve`: until a version was bound;
    - `wait`: for `before_write`, other ranks and sources;
    - `transfer`, `verify`: bytes and digests. Where several sources were read at once, their time
      is shared out;
    - `unpack`: copies of what had arrived;
    - `commit`: until the decision.
    """

    version: int  # that is held now
    changed: bool  # False: that content was held before
    bytes_read: int = 0  # off transports, bytes that were discarded included
    seconds: float = 0.0  # of the whole call
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds; they add up to `seconds`
    sources: tuple[SourceReport, ...] = ()
    retries: int = 0  # chunks that had to be asked for again
    reread_bytes: int = 0  # the part of bytes_read that had been verified before
    # how often a call by selector was bound to another version, since the bound one had gone away
    rebinds: int = 0
    verified_by: Literal["publisher", "source"] = "publisher"  # whose digests the bytes have

    @property
    def cells(self) -> int:
        return sum(source.cells for source in self.sources)

    @property
    def runs(self) -> int:
        return sum(source.runs for source in self.sources)

    @property
    def bytes_saved(self) -> int:
        """The bytes that were not read, since deltas came in place of whole chunks."""
        return sum(source.bytes_saved for source in self.sources)

    @property
    def codec_s(self) -> float:
        """Seconds that applying deltas took, summed over threads."""
        return sum(source.codec_s for source in self.sources)

    @property
    def changed_words(self) -> float | None:
        """The share of the words that deltas changed, of those to which they were applied (of a
        chain of deltas, each counts). None: no chunk came as a delta.
        """
        words = sum(source.words for source in self.sources)
        return sum(source.words_changed for source in self.sources) / words if words else None

    @property
    def bytes_by_kind(self) -> Mapping[str, int]:
        """The bytes that were read, by the kind of the source's memory (`SourceReport.kind`)."""
        kinds = dict.fromkeys([source.kind for source in self.sources], 0)
        for source in self.sources:
            kinds[source.kind] += source.bytes_read
        return kinds

    @property
    def bytes_across(self) -> int:
        """The part of bytes_read that came from replicas of another layout."""
        return sum(source.bytes_read for source in self.sources if source.shard is not None)


MISSING_TOLD_MAX = 16


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """One of the layouts in which a version is held. Readers of one layout read from one another
    chunk by chunk; its first ones bridge: they read from holders of the published layout.
    """

    layout_id: Name
    published: bool  # the version was published in this layout
    replicas: U64
    ready: U64  # of these
    bridging: U64  # groups of which a rank reads from replicas of another layout now
    shards: U64  # of all its replicas
    chunks: U64  # of all these shards, when they are complete
    chunks_verified: U64  # that are there


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """What `describe` counts of one version. Replicas are counted by state; a shard of a replica is
    one rank's memory.
    """

    copies: U64  # complete copies that can be read now: of each shard so many at least
    ready: U64  # replicas
    filling: U64
    draining: U64
    torn: U64
    doubtful: U64  # shards whose worker is not heard at the moment, and may be dead
    quarantined: U64  # shards with changed bytes: they are not read
    readers: U64  # reads that are running
    layouts_known: U64 = 0  # in which there are replicas; `layouts` has 8 of them at most
    # If replicas have several layouts: the published layout first, then by falling number of
    # replicas.
    layouts: Annotated[tuple[LayoutSummary, ...], Length(1024)] = ()
    # shards of the published layout that no replica which takes readers has all of
    missing: U64 = 0


@dataclass(frozen=True, slots=True)
class VersionView:
    """One version in `describe`.

    `state`: "available": it can be fetched; "unavailable": it has no complete holder now; "staged":
    not all ranks have published it. `missing`: the first 16 ranks of the published layout without a
    complete shard in a replica that takes readers: the shards were lost or have left. They are why
    the version is unavailable, unless the worker of a shard is "doubtful".
    """

    version: U64
    content_id: Id
    state: Name
    nbytes: U64
    world_size: U64
    lineage: U64
    retained: bool  # `retain` or a pin keeps it
    layout_id: Name = ""  # in which it was published; replicas may have other layouts
    missing: Annotated[tuple[U64, ...], Length(MISSING_TOLD_MAX)] = ()
    # None: this is a page of the model, or the version is not among the newest 32
    summary: VersionSummary | None = None


@dataclass(frozen=True, slots=True)
class ShardView:
    """One rank's memory in `describe`; `chunks_verified` of `chunks` can be read from it.

    `state`: "complete", "filling", "doubtful": its worker is not heard at the moment, and may be
    dead; or "quarantined": its bytes have changed, and are not read.
    """

    rank: U64  # of the shard, in the replica's layout
    worker: Name
    state: Name
    chunks_verified: U64
    chunks: U64
    readers: U64


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One group's copy of one version in `describe`.

    `state`: "ready", "filling", "draining": it takes no new readers; or "torn": its fill was broken
    off. `medium`: "device" is the caller's own memory, "host" a host copy. `purpose`: what it is
    for: "use", "prefetch", "retention", "seed" or "archive". `layout_id`: names which part of which
    tensors each rank has. `bridging`: how many of its ranks read from replicas of another layout
    now, those of which this answer tells counted.
    """

    group: Name
    version: U64
    state: Name
    medium: Name
    purpose: Name
    layout_id: Name
    spot: bool
    shards: Annotated[tuple[ShardView, ...], Length(2**20)]
    replica: Id = ""  # an id that no other replica has
    bridging: U64 = 0


@dataclass(frozen=True, slots=True)
class LeaseView:
    """One running read in `describe`: its reader, its version and its source.

    `rank`: of the shard that is read, in the source's replica. `state`: "active"; or "fencing": the
    source must not be read any more, and its owner has not yet confirmed that the read has ended.
    """

    lease: Id
    reader: Name
    source: Name
    version: U64
    rank: U64
    state: Name
    # the reader has another layout than the source, and reads a part of the shard
    across: bool = False
    # as the reader said last, which it does of reads that last
    deltas: DeltaUse = DeltaUse.UNDECIDED


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker in `describe`.

    `state`: "live"; or "suspect": it is silent or disconnected, and counts again once it is heard.
    Lost ones are not shown.
    """

    name: Name
    incarnation: Id
    state: Name
    location: Location
    endpoints: Annotated[tuple[Endpoint, ...], Length(16)]
    release: Annotated[Name, Since(19)] = ""  # of TensorHub; "": of the protocol's version 18


@dataclass(frozen=True, slots=True)
class CallsSummary:
    """The running calls of one kind that wait for one thing. A group's call counts once.

    `call`: "publish", "replicate", "update", "prefetch", "fetch", "leave" (`unpublish`, `close` and
    the like), "retain", "pin", "unpin" or "rollback". `waits_for`:

    - "ranks": other ranks of the group, which have not called yet.
    - "version": a version that can be fetched; no published version fits, or it has no holder now.
    - "successor": another holder of a retained version, which the caller holds last.
    - "before_write": a rank that is not ready to be overwritten; its `before_write` runs.
    - "source": a worker to read from.
    - "chunks": bytes that are being read.
    - "digests": agreement with the digests of the publisher.
    - "readers": running reads of the memory that is to be given up.
    - "holders": holders that have not acknowledged yet that they keep the version.
    - "store": the coordinator's store.

    `longest_s`: the longest time without progress of any of these calls. The call itself, a chosen
    version, new bytes and a rank's vote are progress. A call that waits for chunks without progress
    for more than a few seconds is stalled.
    """

    call: Name
    waits_for: Name
    count: U64
    longest_s: Seconds
    # the group of the call with `longest_s`; of a leave the worker, of the last four kinds ""
    who: Name


@dataclass(frozen=True, slots=True)
class SilentWorker:
    """A worker that is suspect: it is not heard, and may be dead."""

    name: Name
    incarnation: Id
    silent_s: Seconds


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What `describe` counts of one model: as short for thousands of workers as for ten. All counts
    are of one moment.
    """

    workers: U64  # that have registered memory, read-only ones included
    suspect: U64  # those of them that are not heard
    groups: U64
    shards: U64  # of all replicas
    reads: U64  # read leases: reads that run, and reads that are being cut off
    versions_known: U64
    calls: Annotated[tuple[CallsSummary, ...], Length(1024)]  # what has stood still longest first
    # 16 suspect workers at most, longest silent first
    silent: Annotated[tuple[SilentWorker, ...], Length(1024)]

    @property
    def rows(self) -> int:
        """How many versions, shards, reads and workers `describe` lists."""
        return self.versions_known + self.shards + self.reads + self.workers


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """All that the coordinator knows about one model."""

    model: Name
    lineage: U64
    mark: int | None  # the newest number ever published in this lineage
    retain: U64  # so many of the newest versions are kept
    versions: Annotated[tuple[VersionView, ...], Length(2**20)]
    replicas: Annotated[tuple[ReplicaView, ...], Length(2**20)]
    leases: Annotated[tuple[LeaseView, ...], Length(2**20)]
    workers: Annotated[tuple[WorkerView, ...], Length(2**20)]
    summary: ModelSummary | None = None  # None: this is a page of the model
    # how late the coordinator is with calls
    coordinator_behind_s: Seconds = field(default=0.0, compare=False)


_ARCHIVE = re.compile(r"(?:(?:s3|gs|az)://[^/\\?#@%]+|file://)(?:/[^\\?#]*)?")


def archive_place(url: object) -> tuple[str, ...] | None:
    """The bucket and the directories that an archive's URL names, decoded: URLs of one place are
    equal. None: it is no such URL, or could be taken for another place.
    """
    if not isinstance(url, str) or not url.isprintable() or not _ARCHIVE.fullmatch(url):
        return None
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    names = unquote(path).removesuffix("/").split("/") if path not in ("", "/") else []
    if any(name in ("", ".", "..") or "\\" in name or not name.isprintable() for name in names):
        return None
    return scheme, bucket, *names


_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%]+\]|[^:/\[\]]+):(?P<port>\d{1,5})\Z")


def parse_address(address: object) -> tuple[str, int]:
    """Split "tcp://host:port" (IPv6 hosts in brackets) into host and port; else raise InvalidValue
    or InvalidType.
    """
    match = _ADDRESS.match(address) if isinstance(address, str) else None
    if match is None or int(match["port"]) > 65_535:
        raise invalid(
            address,
            str,
            f"{shown(address)} is not a TensorHub address: give "
            f'"tcp://HOST:PORT", with a PORT of 0 to 65535{_brackets(address)}',
        )
    return match["host"].strip("[]"), int(match["port"])


def _brackets(address: object) -> str:
    """Advice for an address with an IPv6 host without brackets; empty for any other address."""
    place = address.removeprefix("tcp://") if isinstance(address, str) else ""
    host, _, port = place.rpartition(":")
    for each, its_port in ((host, port), (place, "PORT")):
        try:
            return (
                f"; an IPv6 host is written in brackets: [{ipaddress.IPv6Address(each)}]:{its_port}"
            )
        except ValueError:
            continue
    return ""


def _ports(said: object) -> range | None:
    """What an `Options.listen_port` allows; None: it is none."""
    if isinstance(said, str):
        first, _, last = said.partition("-")
        is_text = (first + last).isascii() and first.isdecimal() and last.isdecimal()
        ends = (int(first), int(last)) if is_text and len(said) <= 11 else (0, 0)
        return range(ends[0], ends[1] + 1) if 0 < ends[0] <= ends[1] <= 65_535 else None
    port = as_integer(said)
    return None if port is None or not 0 <= port <= 65_535 else range(port, port + 1)


def _can_be_reached(advertised: object) -> bool:
    """Whether it is a HOST:PORT of a listener; no wildcard, which is where one listens."""
    if not _can_be_listened_on(advertised):
        return False
    host, port = parse_address(f"tcp://{advertised}")
    return port > 0 and host not in ("0.0.0.0", "::")


def _can_be_listened_on(where: object) -> bool:
    """Whether it is a HOST:PORT, also a wildcard's."""
    try:
        parse_address(f"tcp://{where}")
    except StateError:
        return False
    return isinstance(where, str) and len(where) <= 506 and where.isprintable() and " " not in where


def format_address(host: str, port: int) -> str:
    """The "tcp://host:port" form of an address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
