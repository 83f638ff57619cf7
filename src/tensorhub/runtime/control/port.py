"""A coordinator's port: bound all the time, listened on only while the coordinator leads. Until
then the kernel refuses connections at once, and clients go on to the next address.
"""

from __future__ import annotations

import errno
import socket

import anyio

from tensorhub.errors import StateError, shortage
from tensorhub.transport import sockets


async def bound(host: str, port: int, within_s: float) -> socket.socket:
    """A socket that holds a port, which does not listen: for `listening` only, no other process
    may listen there meanwhile. Raises StateError if the address cannot be had.
    """
    try:
        with anyio.fail_after(within_s):
            found = await anyio.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        holder = _bind(*found[0][:1], found[0][4])
        _share(holder, False)
        return holder
    except TimeoutError as error:
        text = f"host {host!r} was not resolved within {within_s:g} s: give an address"
        raise StateError(text, retryable=True) from error
    except OSError as error:
        raise _refusal(host, port, error) from error


def listening(holder: socket.socket) -> socket.socket:
    """A socket that listens on the held port, until it is closed. Raises StateError."""
    address = holder.getsockname()
    try:
        _share(holder, True)
        listener = _bind(holder.family, address)
        try:
            listener.listen(sockets.BACKLOG)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise _refusal(address[0], address[1], error) from error
    finally:
        _share(holder, False)
    return listener


def _share(holder: socket.socket, may_share: bool) -> None:
    """Whether another socket may be bound to the port, too."""
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, may_share)


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    made = sockets.make(family)
    try:
        _share(made, True)  # with connections of an earlier process
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _refusal(host: str, port: int, error: OSError) -> StateError:
    if (lack := shortage(error)) is not None:
        return lack
    if error.errno == errno.EADDRINUSE:
        advice = (
            "is in use: stop whoever listens there, or choose another port (0 takes a free one)"
        )
    elif error.errno == errno.EACCES:
        advice = "needs more rights: choose a port above 1023"
    else:
        advice = f"cannot be listened on: {error}"
    in_use = error.errno == errno.EADDRINUSE
    return StateError(f"port {port} of {host} {advice}", retryable=in_use)
