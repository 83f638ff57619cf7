"""The common part of the checkpoint engines of verl and NeMo-RL: the cluster to join, and the
number of an update.

One process sends: rank 0 of the trainer. Its `prepare()` returns the coordinator's address and the
version numbers, and the framework takes both to every process. Where no address is configured, the
sender runs a coordinator of its own, and `prepare()` also returns the token; then each start of the
trainer is a new cluster.

Not responsible for the copies (`streamed`), nor for a framework's own names of these calls.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio

import tensorhub
from tensorhub import sync
from tensorhub.api.arguments import is_list
from tensorhub.errors import (
    InvalidType,
    InvalidValue,
    StateError,
    VersionConflict,
    VersionUnavailable,
    shown,
)
from tensorhub.integrations.announced import SERVERS, announced
from tensorhub.integrations.given import bounded
from tensorhub.integrations.streamed import Receiver, Sender
from tensorhub.logs import get_logger
from tensorhub.runtime.control.addresses import split_addresses
from tensorhub.types import Options, VersionInfo, as_timeout_s, check_flag, check_name

if TYPE_CHECKING:
    import torch

Role = Literal["sender", "idle", "receiver"]
KEY = "tensorhub"  # of a meeting, in what `prepare` says
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Meeting:
    """The sender's message to all processes. `token`: of its own coordinator. `mark`: the newest
    number that was published before. `held`: the number that the sender serves.
    """

    address: str
    token: str | None
    mark: int | None
    held: int | None

    @property
    def next(self) -> int:
        """The number of an update that is given none."""
        return 1 if self.mark is None else self.mark + 1


class Exchange:
    """One process's part in updates. `prepare` on the process that sends, `join` and then `send` or
    `receive` on each.

    `address`: a coordinator's; None takes TENSORHUB_ADDRESS, and without that the sender runs a
    coordinator, on `host`. `token`: the path of a token file, for a coordinator that is given by
    its address; see `tensorhub.connect`. `model`: the name under which weights are published;
    trainers that share a coordinator need different ones. `device`: of the buffers. `timeout_s`:
    how long an update may take, from this process's call on. `allow_no_readers`: an update that
    nothing reads is no error (`readers`). `transports`, `options`: as for `tensorhub.connect`;
    `options` by name.

    They come from a configuration, perhaps in many processes. So all of it is checked here, before
    the first update.
    """

    def __init__(
        self,
        *,
        host: str,
        address: str | None = None,
        token: str | None = None,
        model: str = "actor",
        device: str = "cpu",
        timeout_s: float = 300.0,
        allow_no_readers: bool = False,
        transports: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
        **unknown: object,
    ) -> None:
        _check_known(
            "setting",
            unknown,
            [name for name in signature(Exchange).parameters if name != "unknown"],
        )
        self._address = address or os.environ.get("TENSORHUB_ADDRESS", "")
        if self._address:
            split_addresses(self._address)
        self.model = check_name("model", model)
        self._host = host
        self._token = None if token is None else Path(token)
        if str(device).partition(":")[0] not in ("cpu", "cuda"):
            raise InvalidValue(
                f"device={shown(device)}: give 'cpu', or 'cuda' for the GPU that the process uses"
            )
        self._device = device
        check_flag("allow_no_readers", allow_no_readers)
        self._allow_no_readers = allow_no_readers
        self.timeout_s = as_timeout_s(timeout_s, 0.0, "timeout_s")
        if transports is not None and not is_list(transports):
            raise InvalidType(f'transports={shown(transports)}: give a list of names, as ["tcp"]')
        self._transports = None if transports is None else list(transports)
        if not isinstance(options, Mapping | None):
            raise InvalidType(
                f'options={shown(options)}: give values by their names, as {{"host_memory_bytes": '
                f"2**30}}"
            )
        _check_known("option", options or (), [field.name for field in fields(Options)])
        asked = Options(**{"op_timeout_s": self.timeout_s, **(options or {})})
        self._options = bounded(asked, self.timeout_s)
        self._coordinator: sync.Coordinator | None = None
        self._own_token = secrets.token_hex(32)
        self._hub: sync.Hub | None = None  # the sender's
        self._sender: Sender | None = None
        self._role: Role | None = None
        self._meeting: Meeting | None = None
        self._receiver: Receiver | None = None
        self._receives_from: tuple[str, str | None] | None = None
        self._receiving: anyio.CancelScope | None = None  # while an update is waited for

    # -- before an update

    def prepare(self) -> dict[str, Any]:
        """The meeting, as JSON values. The framework uses only the sender's."""
        hub = self._connected()
        held = None if self._sender is None else self._sender.version
        meeting = Meeting(self._found(), self._shown_token, _mark(hub, self.model), held)
        return {KEY: asdict(meeting)}

    @property
    def _shown_token(self) -> str | None:
        return self._own_token if self._coordinator is not None else None

    @property
    def has_address(self) -> bool:
        """Whether the coordinator is another process's."""
        return bool(self._address)

    def _found(self) -> str:
        if self._address:
            return self._address
        if self._coordinator is None:
            self._coordinator = sync.serve(self._host, token=self._own_token)
            log.info("coordinator_embedded", address=self._coordinator.address)
        return self._coordinator.address

    def _connected(self) -> sync.Hub:
        if self._hub is None:
            address = self._found()
            token = self._shown_token or self._token
            transports, options = self._transports, self._options
            self._hub = sync.connect(address, token=token, transports=transports, options=options)
        return self._hub

    def join(self, role: Role, meeting: Mapping[str, Any]) -> Meeting:
        """Take part in the updates that follow. What an update before has left undone here is given
        up.
        """
        if KEY not in meeting:
            raise StateError(
                "the sender's prepare() was not called, or was another backend's: all use backend "
                "tensorhub"
            )
        if self._receiving is not None:
            self._receiving.cancel()
        self._role, self._meeting = role, Meeting(**meeting[KEY])
        if role != "sender":
            self._leave()
        return self._meeting

    def _joined(self, *roles: Role) -> Meeting:
        if self._meeting is None or self._role not in roles:
            role = (
                "takes no part in updates yet"
                if self._role is None
                else f"is {self._role!r} in updates"
            )
            raise StateError(
                f"this process {role}: prepare(), build_topology() and "
                "init_process_group() come first"
            )
        return self._meeting

    # -- an update

    def send(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int | None
    ) -> dict[str, float]:
        """Publish what the generator yields; a rank that does not send runs through it only. What
        it took, by name.
        """
        meeting = self._joined("sender", "idle")
        if self._role == "idle":
            for _ in weights:
                pass
            return {}
        if self._sender is None:
            self._sender = Sender(
                self._connected(),
                self.model,
                device=self._device,
                timeout_s=self.timeout_s,
                allow_no_readers=self._allow_no_readers,
            )
        number = meeting.next if version is None else version
        if (used := self._used(number, meeting)) is not None:
            for _ in weights:  # other ranks may wait in its collectives
                pass
            raise used
        sent = self._sender.send(number, weights)
        log.info(
            "weights_sent",
            model=self.model,
            version=number,
            nbytes=sent.nbytes,
            seconds=round(sent.seconds, 4),
        )
        costs = {
            "version": sent.version,
            "bytes": sent.nbytes,
            "copy_s": sent.copy_s,
            "seconds": sent.seconds,
        }
        return {f"tensorhub/{name}": float(value) for name, value in costs.items()}

    def _used(self, number: int, meeting: Meeting) -> VersionConflict | None:
        """Why this update cannot have that number, if it cannot. A framework's user has no hub: the
        error has the whole call.
        """
        if meeting.mark is None or number > meeting.mark or number == meeting.held:
            return None
        text = (
            f"version {number} of {self.model!r} cannot be sent: versions up to {meeting.mark} "
            f"were published before this update"
        )
        if number > 0:
            text += (
                f". If this run resumes from a checkpoint, take them back down to {number - 1}: "
                f"`with tensorhub.sync.connect({meeting.address!r}) as hub: "
                f"hub.rollback({self.model!r}, to={number - 1})`"
            )
        return VersionConflict(f"{text}. If another trainer published them, give another model=")

    def servers(self) -> list[str]:
        """The URLs of the engines' servers that are there now (`announced`)."""
        return list(announced(self._connected(), self.model, SERVERS))

    def published(self, version: int) -> VersionInfo:
        """What was sent as `version`. Raises VersionConflict where there is a newer one."""
        info = self._connected().wait_for(self.model, at_least=version, timeout=self.timeout_s)
        if info.version != version:
            raise VersionConflict(
                f"version {version} of {self.model!r} is not the newest any more: another trainer "
                f"has published {info.version}. Give each trainer another model="
            )
        return info

    async def receive(self, version: int | None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Each tensor of the update, once all of it is verified."""
        meeting = self._joined("receiver")
        number = meeting.next if version is None else version
        if (used := self._used(number, meeting)) is not None:
            raise used
        with anyio.CancelScope() as scope:
            self._receiving = scope
            try:
                buffers, report = await (await self._receiver_for(meeting)).receive(
                    number, self.timeout_s
                )
            finally:
                self._receiving = None if self._receiving is scope else self._receiving
        if scope.cancelled_caught:
            raise StateError(
                f"the update to version {number} was given up here: a later one has begun, which "
                f"this error does not concern"
            )
        log.info(
            "weights_received",
            model=self.model,
            version=number,
            nbytes=report.bytes_read,
            seconds=report.seconds,
        )
        for name, tensor in buffers.items():
            yield name, tensor

    async def _receiver_for(self, meeting: Meeting) -> Receiver:
        """The receiver in the meeting's cluster. After a restart of the trainer this may be a new
        one: then the process leaves the old cluster.
        """
        place = meeting.address, meeting.token
        if self._receiver is None or self._receives_from != place:
            hub = await tensorhub.connect(
                meeting.address,
                token=meeting.token or self._token,
                transports=self._transports,
                options=self._options,
            )
            await self.leave()
            self._receiver, self._receives_from = (
                Receiver(hub, self.model, device=self._device),
                place,
            )
        return self._receiver

    async def leave(self) -> None:
        """Give up the received version, and leave the cluster."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await receiver.close()

    def close(self) -> None:
        """Send nothing any more: the published version is withdrawn, and a coordinator of its own
        ends.
        """
        self._role = None
        self._leave()

    def _leave(self) -> None:
        """Give up what only the sender needs."""
        self._sender = None
        for each in (self._hub, self._coordinator):
            if each is not None:
                each.close()
        self._hub = self._coordinator = None


def _check_known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            close = get_close_matches(str(name), known, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise InvalidType(
                f"TensorHub has no {what} {shown(name)}{hint}; there are {', '.join(known)}"
            )


def _mark(hub: sync.Hub, model: str) -> int | None:
    try:
        return hub.describe(model, limit=0).mark
    except VersionUnavailable:
        return None
