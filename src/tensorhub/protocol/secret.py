"""Where the cluster's secret comes from, and when there need not be one.

Responsible for finding the token (argument, environment, file), for never showing it, and for refusing open
access beyond loopback. Not responsible for proving it to a peer (`handshake`). Raises
`AuthenticationFailed`, with what to do.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path
from typing import Final

from tensorhub.errors import AuthenticationFailed

TOKEN_VARIABLE: Final = "TENSORHUB_TOKEN"
TOKEN_FILE_VARIABLE: Final = "TENSORHUB_TOKEN_FILE"
TOKEN_FILE: Final = Path(".config/tensorhub/token")  # in the home directory
TOKEN_BYTES_MAX: Final = 4096


class Secret(bytes):
    """A token's bytes, which neither `repr` nor `str` shows. Empty: open access."""

    def __repr__(self) -> str:
        return f"<Secret: {'hidden' if self else 'none, open access'}>"

    __str__ = __repr__


def resolve_token(token: str | bytes | None) -> Secret:
    """The secret to use: `token`, else the environment's, else that of the token file, else none (open
    access).

    Text is stripped of white space at its ends, wherever it comes from; bytes are taken as they are. An
    empty `token` asks for open access; an empty environment variable counts as unset. Raises
    AuthenticationFailed for a token file that is named but cannot be read, is empty or too large, or that
    others than its owner may read.
    """
    if isinstance(token, bytes):
        return Secret(token)
    if token is not None:
        return Secret(token.strip().encode("utf-8", "surrogateescape"))
    from_environment = os.environ.get(TOKEN_VARIABLE, "").strip()
    if from_environment:
        return Secret(os.fsencode(from_environment))
    named = os.environ.get(TOKEN_FILE_VARIABLE, "")
    if named:
        return _read_token_file(Path(named))
    try:
        usual = Path.home() / TOKEN_FILE
        exists = usual.exists()
    except (OSError, RuntimeError):  # no home directory, or one that this user may not look into
        return Secret()
    return _read_token_file(usual) if exists else Secret()


def _read_token_file(path: Path) -> Secret:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AuthenticationFailed(
            f"the token file {path} cannot be read ({error.strerror}): create it, or set {TOKEN_VARIABLE}"
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise AuthenticationFailed(f"the token file {path} is not a regular file: put the token into one")
        if status.st_mode & 0o077:
            raise AuthenticationFailed(
                f"the token file {path} is open to others than its owner (mode {status.st_mode & 0o777:o}): "
                f"run chmod 600 {path}"
            )
        content = file.read(TOKEN_BYTES_MAX + 1)
    if len(content) > TOKEN_BYTES_MAX:
        raise AuthenticationFailed(f"the token file {path} has more than {TOKEN_BYTES_MAX} bytes: is it the right one?")
    token = content.strip()
    if not token:
        raise AuthenticationFailed(f"the token file {path} is empty: put a token into it, or remove it")
    return Secret(token)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`: "localhost", or an address of the loopback network."""
    name = host.strip("[]").partition("%")[0].lower()
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def check_open_access(secret: bytes, host: str) -> None:
    """Raise AuthenticationFailed if there is no secret and `host` is not loopback."""
    if not secret and not is_loopback(host):
        raise AuthenticationFailed(
            f"open access is for loopback only, and {host[:100]!r} is not: set the same {TOKEN_VARIABLE} on "
            f"every side (or {TOKEN_FILE_VARIABLE}, or ~/{TOKEN_FILE}), or use 127.0.0.1"
        )
