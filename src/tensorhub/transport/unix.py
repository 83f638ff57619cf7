"""Unix sockets for the data plane: connections within a host that can pass descriptors, and which
users are given any.

Their names are of Linux' abstract kind. So no file is left behind, and only the same network
namespace sees them.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Collection

from tensorhub.transport.base import Cutter, ReadFailure, Unusable
from tensorhub.transport.sockets import listen_at, make, shutdown
from tensorhub.types import UNMAPPED_UID

PREFIX = "unix:"


def listen() -> socket.socket:
    """A non-blocking listening socket with a new name. OSError: Unix sockets are missing here;
    StateError: this process lacks something.
    """
    return listen_at(make(socket.AF_UNIX), "\0tensorhub-" + secrets.token_hex(16))


def address_of(listener: socket.socket) -> str:
    """The "unix:name" that reaches a listener, from the same network namespace."""
    name: bytes = listener.getsockname()
    return PREFIX + name[1:].decode()


def peer_uid(connection: socket.socket) -> int:
    """The effective user of the process at the other end when it connected, according to the
    kernel.
    """
    return _peer(connection)[1]


def is_this_process(descriptor: int) -> bool:
    """Whether it is this very process that listens, or has connected, at the other end, according
    to the kernel.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return _peer(connection)[0] == os.getpid()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process and its effective user."""
    form = "=iII"
    pid, uid, _ = struct.unpack(
        form, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form))
    )
    return int(pid), int(uid)


def why_not_given(uid: int, named: Collection[int]) -> str:
    """Why a process of that user may not map this process' memory; "": it may. `named`: users that
    may, besides this user and root. A user that the kernel cannot name may be any user, and so is
    refused even if this user has the same number.
    """
    mine = os.geteuid()
    if uid == UNMAPPED_UID:
        return (
            f"user {uid} stands for all users whom the source's user namespace does not know, and "
            f"is given no memory to "
            "map: run both in one user namespace, as one user that it knows"
        )
    if uid in (mine, 0) or uid in named:
        return ""
    return (
        f"user {uid} is given no memory of user {mine} to map: name {uid} in the source's "
        f"Options.shared_memory_uids"
    )


def given_to() -> str:
    """Users with processes that may map this process' memory, by `why_not_given`, as a text for
    people.
    """
    mine = os.geteuid()
    users = "root" if mine in (0, UNMAPPED_UID) else f"user {mine} and root"
    return (
        f"for processes of {users} (others: Options.shared_memory_uids at the source) that have "
        f"the full token"
    )


def connect(address: str, timeout_s: float, cutter: Cutter) -> socket.socket:
    """A blocking connection to "unix:name"; attached to the cutter, as by `tcp.connect`. Unusable:
    there is no listener. StateError: this process lacks something.
    """
    connection = make(socket.AF_UNIX)
    try:
        cutter.attach(lambda: shutdown(connection))
        until = time.monotonic() + timeout_s
        whole, part = divmod(max(1, int(timeout_s * 1_000_000)), 1_000_000)
        # of connect, too
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, part)
        )
        connection.connect("\0" + address.removeprefix(PREFIX))
        if cutter.is_cut or time.monotonic() > until:
            raise ReadFailure("unreachable", f"{address}: the read was given up")
    except BaseException as error:
        cutter.detach()
        connection.close()
        if isinstance(error, BlockingIOError):  # its backlog was full for all that time
            raise ReadFailure("unreachable", f"{address}: no answer in time") from error
        if isinstance(error, OSError | ValueError):
            raise Unusable(
                f"{address} cannot be connected to ({error}): workers in different network "
                f"namespaces need different hosts"
            ) from error
        raise
    return connection
