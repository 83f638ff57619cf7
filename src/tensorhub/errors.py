"""Every error that TensorHub raises to its users.

    TensorHubError
    ├── VersionUnavailable      the version has no live source, or does not exist
    ├── VersionConflict         the number was used already, or is not above the mark
    ├── ManifestMismatch        the reader's tensors are not those of the version
    ├── RegistrationError       these tensors, or this (model, group, rank), cannot be registered
    ├── MutabilityViolation     published memory was written by its owner
    ├── StateError              the call, or one of its arguments, is not allowed in this state
    │   ├── InvalidType         an argument is of a kind that cannot be used (also a TypeError)
    │   └── InvalidValue        an argument is out of range, or says nothing that is known (also a ValueError)
    ├── OperationTimeout        a deadline passed (also a TimeoutError)
    │   └── DrainTimeout        memory could not be taken back in time: do not write it
    ├── RetentionError          leaving would lose a retained version
    ├── GroupAborted            another rank, or the group's membership, ended the operation
    ├── LeaseLost               this worker was taken for dead, or the coordinator has lost its state
    ├── IntegrityError          bytes do not have their digest, whichever source they come from
    ├── AuthenticationFailed    the secrets differ, the token is read-only, or access would be open beyond loopback
    ├── ProtocolError           the peer does not speak this protocol, or broke it
    ├── CoordinatorUnavailable  the coordinator cannot be reached
    ├── TransportUnavailable    a transport is unknown, not installed, or not shared with the peer
    └── ArchiveUnavailable      a bucket or directory is not there, is full, or refuses these credentials

Python warnings, no errors: StaleWeightsWarning (a `mutate` that has written nothing),
LeftOutStateWarning (a module has state that `register` does not carry).

Each error carries `retryable` (whether the same call may succeed later without a change by the
caller) and `memory`, the state of the caller's tensors: "intact" (as before the call), "torn" (no
version as it was published: parts of several, or written while published) or "in_doubt" (the call's
outcome is not known here; do not write them; the next call on the handle resolves it).

A group's call ends on all ranks: the failed rank raises its own error, all other ranks GroupAborted
with that cause. So it is if a rank refuses the call by itself, before or after the others have
called. (LeaseLost, CoordinatorUnavailable and a deadline do not refuse it for the others.) A
worker that was taken for dead goes on as a new incarnation and keeps its
handles: its group calls end with GroupAborted, and its other calls ask again. LeaseLost is raised
where a call needs something that was given up in the meantime.
"""  # noqa: E501 - a table

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

Memory = Literal["intact", "torn", "in_doubt"]


class TensorHubError(Exception):
    """Base of all errors that TensorHub raises on purpose.

    What to do: repeat the call if `retryable` says so, and treat the tensors as `memory` says.
    """

    retryable_by_default: ClassVar[bool] = False

    def __init__(
        self, message: str, *, retryable: bool | None = None, memory: Memory = "intact"
    ) -> None:
        super().__init__(_cut(message))
        self.retryable = self.retryable_by_default if retryable is None else retryable
        self.memory: Memory = memory


class VersionUnavailable(TensorHubError):
    """The version has no live source (retryable), or does not exist.

    What to do: for `latest`, compare the model's name with the trainer's (`tensorhub status`),
    or wait longer. For a number, ask for `latest`, or have versions kept by `Hub.retain`, a pin
    or an archive.
    """

    retryable_by_default = True


class VersionConflict(TensorHubError):
    """The version number was used already, or is not above the lineage's mark.

    What to do: publish a number above the mark (`tensorhub status` shows it), or
    `Hub.rollback` first.
    """


class ManifestMismatch(TensorHubError):
    """The reader's tensors are not those of the version; each difference is named in
    `differences`.

    What to do: correct the tensors that `differences` names; describe another layout by
    `sources=`; `partial=True` leaves published tensors unread.
    """

    def __init__(
        self,
        message: str,
        *,
        differences: tuple[str, ...] = (),
        retryable: bool | None = None,
        memory: Memory = "intact",
    ) -> None:
        super().__init__(message, retryable=retryable, memory=memory)
        self.differences = differences


class RegistrationError(TensorHubError):
    """These tensors, or this (model, group, rank), cannot be registered or used any more.

    What to do: correct the tensors that it names. If another process has this (model, group,
    rank), end it, or use another group.
    """


class MutabilityViolation(TensorHubError):
    """Published memory was written by its owner (by torch's count of writes): readers may have got
    other bytes. Or memory that is being read differs from its digests: a reader found out, and the
    owner's own check confirmed it.

    Raised by `unpublish`, `close` and `mutate` (before its body) when the memory has been taken
    back, and by `update` before it does anything; `memory` is "torn" in each case.

    What to do: write only inside `mutate`, or after `unpublish`, and publish again.
    """


class StateError(TensorHubError):
    """The call, or one of its arguments, is not allowed in this state.

    What to do: what the error says; it names what has to come first, or what is too much.
    """


class InvalidType(StateError, TypeError):
    """An argument is of a kind that cannot be used; the error says what to give.

    What to do: correct the argument.
    """


class InvalidValue(StateError, ValueError):
    """An argument is out of range, or says nothing that is known; the error says what to give.

    What to do: correct the argument.
    """


class OperationTimeout(TensorHubError, TimeoutError):
    """A deadline passed. The outcome is unknown only if `memory` says "in_doubt".

    What to do: see in `tensorhub status` what the call waits for; then repeat it, perhaps with
    a longer `timeout=`.
    """

    retryable_by_default = True


class DrainTimeout(OperationTimeout):
    """Memory could not be taken back in time, and must not be written. It stays published (or
    becomes so again), unless its version was given up meanwhile, as by a rollback.

    What to do: do not write the memory. Repeat the call with a longer `timeout=`; `tensorhub
    status` shows the running reads.
    """


class RetentionError(TensorHubError):
    """Leaving would lose a retained version, and no worker could take it over.

    What to do: give a reliable worker `Options.host_memory_bytes` for the shard, run an
    archive, or lower `Hub.retain`.
    """

    retryable_by_default = True


class GroupAborted(TensorHubError):
    """The group's operation ended on all ranks; `causes` says why, per rank where a rank is to
    blame.

    What to do: correct what `causes` names, and repeat the call on all ranks.
    """

    retryable_by_default = True

    def __init__(
        self,
        message: str,
        *,
        causes: Mapping[int, str] | None = None,
        retryable: bool | None = None,
        memory: Memory = "intact",
    ) -> None:
        super().__init__(message, retryable=retryable, memory=memory)
        self.causes: dict[int, str] = dict(causes or {})


class LeaseLost(TensorHubError):
    """What this worker held, was lent or knew was given up: it was taken for dead, or the
    coordinator has lost its state.

    Raised by `unpublish` of a version that the coordinator does not know any more: the memory is
    its owner's to write. A coordinator that comes back without its state (it was served without a
    `state_dir`) is a new cluster. Whatever belonged to the old one raises this error once, and then
    goes on in the new one: a handle in the call that runs, or in its next `publish`, `replicate`,
    `update` or `unpublish`; a model in the first `newest`, `wait_for`, `watch` or `fetch`; a pin at
    the end of its block. Call `retain` again.

    What to do: repeat the call. Serve the coordinator with a `state_dir`. If a worker was taken
    for dead, look for pauses of its process longer than `Options.lease_s`.
    """

    retryable_by_default = True


class IntegrityError(TensorHubError):
    """Every source that was tried sent bytes that do not have their digest; the error names source,
    chunk and tensor. Where several sources have looked again and found their bytes unchanged, it
    names the machine that damages what it gets.

    Of a publish: ranks have different bytes of what both publish (docs/layouts.md).

    What to do: repeat the call; if that fails, too, replace the machine that it names.
    """

    retryable_by_default = True


class AuthenticationFailed(TensorHubError):
    """The secrets differ, the token is read-only and the call changes something, or open access was
    asked for beyond loopback. A call raises it at its deadline while the coordinator refuses a
    token that it took before.

    What to do: give both sides one token (`tensorhub token new`); for a call that changes
    something, the full one.
    """


class ProtocolError(TensorHubError):
    """The peer does not speak this protocol, or broke it.

    What to do: install one release of TensorHub on both sides, and connect to a TensorHub
    address.
    """


class CoordinatorUnavailable(TensorHubError):
    """The coordinator cannot be reached; the error says at which address, and why.

    What to do: start the coordinator, or correct the address; `Options.coordinator_wait_s`
    waits longer.
    """

    retryable_by_default = True


class TransportUnavailable(TensorHubError):
    """A transport is unknown, not installed, or not shared with the peer.

    What to do: see in `tensorhub doctor` what is missing; leave `tcp` in `transports=`.
    """


class ArchiveUnavailable(TensorHubError):
    """The bucket or directory of an archive cannot be used: it is not there, is full, cannot be
    reached, or refuses these credentials. What was archived before is intact. Retryable where the
    same call may succeed later.

    What to do: correct URL, credentials or room, and repeat the call.
    """


class StaleWeightsWarning(UserWarning):
    """The body of `mutate` has apparently written none of the registered tensors: the version has
    no new bytes.

    Given where torch's count of writes stands still for every tensor *and* sampled bytes of all are
    unchanged. A registration with a tensor that has no count of its own (a numpy array, a view of a
    larger storage, an inference tensor) never gives it. The version is published all the same.
    `Options.stale_weights`: "error" raises a StateError instead, and "ignore" does not look. Where
    an error is raised, also by a filter of Python's, nothing is published.
    """


class LeftOutStateWarning(UserWarning):
    """A registered module has state that is no parameter or persistent buffer and is not carried:
    readers keep their own.

    That is what `get_extra_state`, or a class' own way of saving, makes anew each time (a tensor
    that is saved in place is carried); a quantization state at a packed parameter; and a tensor
    that is a plain attribute, unless it looks like a cache (its name begins with `_`, or has
    `cache` in it) or follows from parameters or buffers. The warning names each. Buffers that are
    not persistent are no state. `Options.left_out_state`: "error" raises a RegistrationError
    instead, and "ignore" says nothing.
    """


def install(extras: str) -> str:
    """What to type to get extras, as "torch,cuda"."""
    return f"pip install 'tensorhub-ros[{extras}]'"


def shortage(error: OSError) -> StateError | None:
    """What to raise for it, if it says that this process or its machine lacks something: neither a
    peer's fault, nor one of an address.
    """
    match error.errno:
        case errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            text = (
                f"this process has too many files open (RLIMIT_NOFILE is {limit}): raise its "
                f"`ulimit -n`, or close some"
            )
        case errno.ENFILE:
            text = (
                "this machine has too many files open: raise its sysctl fs.file-max, or end "
                "what opens them"
            )
        case errno.ENOMEM | errno.ENOBUFS:
            text = "this machine has no memory left for it: free some"
        case _:
            return None
    return StateError(f"{os.strerror(error.errno)}: {text}", retryable=True)


def read_only_refusal(call: str) -> AuthenticationFailed:
    """The error that `call` raises in a process that connected with the read-only token."""
    return AuthenticationFailed(
        f"this token is read-only: {call} needs the cluster's full token (fetch, newest, wait_for, "
        f"watch, describe and plan do not). Connect with the full token, or make this call in a "
        f"process that has it"
    )


def unreachable(text: str, fault: TensorHubError | None) -> TensorHubError:
    """The error of a call that no coordinator can answer; `fault`: why there is no session with
    one, as far as it is known.
    """
    refused = isinstance(fault, AuthenticationFailed)
    kind = AuthenticationFailed if refused else CoordinatorUnavailable
    return kind(text if fault is None else f"{text}: {fault}")


def text_of(error: BaseException) -> str:
    """What any error says, with its kind; also of one that cannot say it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


_RUN = re.compile(r"\S{161,}")


def _cut(message: str) -> str:
    """The message with the middle of overlong words left out: names have up to 512 characters,
    tensors' more.
    """
    return (
        _RUN.sub(lambda found: f"{found[0][:100]}...{found[0][-40:]}", message)
        if len(message) > 160
        else message
    )


def shown(value: object, chars: int = 80) -> str:
    """The `repr` of a caller's value, for a message: the middle of a long one is cut out."""
    try:
        text = (
            repr(value[: 2 * chars])
            if isinstance(value, (str, bytes)) and len(value) > 2 * chars
            else repr(value)
        )
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= chars else f"{text[: chars // 2]}...{text[-chars // 4 :]}"


def _family(base: type[TensorHubError]) -> dict[str, type[TensorHubError]]:
    found = {base.__name__: base}
    for child in base.__subclasses__():
        found.update(_family(child))
    return found


# the wire form of an error names its class
BY_NAME: Mapping[str, type[TensorHubError]] = _family(TensorHubError)


def some(texts: Sequence[str], separator: str = ", ", most: int = 10) -> str:
    """The first of these, and how many more there are."""
    more = len(texts) - most
    return separator.join(texts[:most]) + (f" (and {more} more)" if more > 0 else "")
