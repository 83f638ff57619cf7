"""Where the cluster's secret comes from, and when there need not be one.

Responsible for finding the token (argument, environment, file), for reading token files, for the
read-only token that belongs to a token, for never showing either, and for refusing open access
beyond loopback. Not responsible for proving it to a peer (`handshake`), nor for noticing that a
token file has changed (`runtime.control.keyring`). Raises `AuthenticationFailed`, with what to do.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from tensorhub.errors import AuthenticationFailed, InvalidType, StateError, TensorHubError
from tensorhub.types import Endpoint, parse_address

TOKEN_VARIABLE: Final = "TENSORHUB_TOKEN"
TOKEN_FILE_VARIABLE: Final = "TENSORHUB_TOKEN_FILE"
TOKEN_FILE: Final = Path(".config/tensorhub/token")  # in the home directory
TOKEN_BYTES_MAX: Final = 4096  # of a token file
TOKENS_MAX: Final = 8  # of a token file
READ_ONLY_LABEL: Final = b"tensorhub/1 read-only"

Token = str | bytes | os.PathLike[str]  # what a caller gives: the token itself, or a token file


class Secret(bytes):
    """A token's bytes, which neither `repr` nor `str` shows. Empty: open access."""

    def __repr__(self) -> str:
        return f"<Secret: {'hidden' if self else 'none, open access'}>"

    __str__ = __repr__

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a secret is neither pickled nor copied into another "
            "process: give that one a token file"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.__reduce__()


def resolve_token(token: Token | None) -> Secret | Path:
    """The secret to use, or the token file that has it: `token`, else the environment's token, else
    the token file that the environment names, else the usual token file, else no secret (open
    access).

    Text is stripped of white space at its ends, wherever it comes from; bytes are taken as they
    are. An empty `token` asks for open access; an empty environment variable counts as unset.
    Raises StateError for any other value.
    """
    if isinstance(token, bytes):
        return Secret(token)
    if isinstance(token, str):
        return Secret(token.strip().encode("utf-8", "surrogateescape"))
    if isinstance(token, os.PathLike):
        return Path(token)
    if token is not None:
        raise InvalidType(
            f"token is text, bytes, or the path of a token file, not {type(token).__name__}"
        )
    from_environment = os.environ.get(TOKEN_VARIABLE, "").strip()
    if from_environment:
        return Secret(os.fsencode(from_environment))
    named = os.environ.get(TOKEN_FILE_VARIABLE, "")
    if named:
        return Path(named)
    try:
        usual = Path.home() / TOKEN_FILE
        exists = usual.exists()
    except (OSError, RuntimeError):  # no home directory, or one that this user may not look into
        return Secret()
    return usual if exists else Secret()


def path_hint(error: TensorHubError, secret: bytes) -> str:
    """Advice about this side's token, if it is the path of a file and the error says that the
    tokens differ; else empty.
    """
    if not (isinstance(error, AuthenticationFailed) and os.path.isfile(secret)):
        return ""
    return (
        f"; this side's token is the path of a file, and text is taken as the token itself: give a "
        f"pathlib.Path, or set {TOKEN_FILE_VARIABLE}"
    )


def read_token_file(path: Path) -> tuple[Secret, ...]:
    """The tokens of a token file, one a line, 1 to `TOKENS_MAX`: the first is presented, each is
    accepted.

    Blank lines, and lines that begin with "#", do not count. Raises AuthenticationFailed for a file
    that cannot be read, has no token or too much in it, or that users besides its owner may read,
    or that belongs to a user other than this process' or root. Its group may read it, and not write
    it, if this process is of that group: so a Secret of Kubernetes comes to a pod that does not run
    as root.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise AuthenticationFailed(
            f"the token file {path} cannot be read ({reason}): create it (tensorhub token new), or "
            f"set {TOKEN_VARIABLE}"
        ) from error
    try:
        check_protection("token file", path, os.fstat(descriptor))
        # so that no traceback with locals shows it
        content = Secret(os.read(descriptor, TOKEN_BYTES_MAX + 1))
    except OSError as error:
        raise AuthenticationFailed(
            f"the token file {path} cannot be read ({error.strerror})"
        ) from error
    finally:
        os.close(descriptor)
    if len(content) > TOKEN_BYTES_MAX:
        raise AuthenticationFailed(
            f"the token file {path} has more than {TOKEN_BYTES_MAX} bytes: is it the right one?"
        )
    lines = [Secret(line.strip()) for line in content.splitlines()]
    tokens = tuple(line for line in lines if line and not line.startswith(b"#"))
    if not tokens:
        raise AuthenticationFailed(
            f"the token file {path} is empty: put a token into it, or remove it"
        )
    if len(tokens) > TOKENS_MAX:
        raise AuthenticationFailed(
            f"the token file {path} has {len(tokens)} tokens, one a line, and {TOKENS_MAX} is the "
            f"most: is it the right one?"
        )
    return tokens


def check_protection(what: str, path: Path, status: os.stat_result) -> None:
    """Raise AuthenticationFailed if that secret file is not this user's or root's alone."""
    if not stat.S_ISREG(status.st_mode):
        raise AuthenticationFailed(f"the {what} {path} is not a regular file: put it into one")
    if status.st_uid not in (os.geteuid(), 0):
        raise AuthenticationFailed(
            f"the {what} {path} belongs to user {status.st_uid}, who is neither this user "
            f"({os.geteuid()}) nor root, "
            f"and could change it: run chown {os.geteuid()} {path}, or make one of your own"
        )
    is_own_group = status.st_gid in (os.getegid(), *os.getgroups())
    if status.st_mode & (0o027 if is_own_group else 0o077):
        raise AuthenticationFailed(
            f"the {what} {path} is open to others than its owner (mode "
            f"{status.st_mode & 0o777:o}): run chmod 600 {path}"
            "; of a Secret in Kubernetes, set defaultMode: 0400 (0440 with an fsGroup)"
        )


def read_only_secret(secret: bytes) -> Secret:
    """The secret that proves its holder to be a reader. It does not reveal `secret`, which must not
    be empty.
    """
    if not secret:
        raise AuthenticationFailed(
            "open access has no read-only token: whoever gets there may do everything. Set a token"
        )
    return Secret(hmac.new(secret, READ_ONLY_LABEL, hashlib.sha256).hexdigest().encode())


def read_only_token(token: str | bytes) -> str:
    """The read-only token that belongs to a cluster's `token`: it lets a process fetch and look,
    but not change.

    Every worker and coordinator that accepts `token` also accepts the read-only token, for as long
    as it accepts `token`, without configuration. The read-only token does not reveal `token`. It
    has 64 hexadecimal digits, equal each time. Text is stripped of white space at its ends, as by
    `connect`. Raises AuthenticationFailed for an empty token (open access has none).
    """
    secret = resolve_token(token)
    if isinstance(secret, Path):
        raise InvalidType(
            "read_only_token takes the token itself: for a token file, `tensorhub token read-only`"
        )
    return read_only_secret(secret).decode()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`: "localhost", or an address of the loopback
    network.
    """
    name = host.strip("[]").partition("%")[0].lower()
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def loopback_address(endpoints: Sequence[Endpoint]) -> str:
    """The loopback address that a worker advertises for readers on any host; "": it advertises
    another one, or none.
    """
    for endpoint in endpoints:
        try:
            if endpoint.transport == "tcp" and is_loopback(parse_address(endpoint.address)[0]):
                return endpoint.address
        except StateError:  # whatever a worker says there, it is not for its reader to refuse
            continue
    return ""


def check_open_access(secret: bytes, host: str) -> None:
    """Raise AuthenticationFailed if there is no secret and `host` is not loopback."""
    if not secret and not is_loopback(host):
        raise AuthenticationFailed(
            f"open access is for loopback only, and {host[:100]!r} is not: set the same "
            f"{TOKEN_VARIABLE} on "
            f"every side (or {TOKEN_FILE_VARIABLE}, or ~/{TOKEN_FILE}), or use 127.0.0.1"
        )
