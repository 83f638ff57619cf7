"""The certificate, key and authorities of this process, for TLS.

Responsible for where they are named (argument, environment), for reading the files, for reading
them again when they change, and for errors that name the file. Not responsible for connections
(`tls`). Raises `AuthenticationFailed`, with what to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Literal, NamedTuple, NoReturn

from tensorhub.errors import AuthenticationFailed, InvalidType, InvalidValue, shown
from tensorhub.logs import get_logger
from tensorhub.protocol.secret import Secret, check_protection

TLS_VARIABLES: Final = {name: f"TENSORHUB_TLS_{name.upper()}" for name in ("cert", "key", "ca")}
ADVICE: Final = (
    "set TLS up on both sides or on neither: tls=TLS(...), --tls-cert, --tls-key and --tls-ca, or "
    f"{TLS_VARIABLES['cert']}, _KEY and _CA"
)
FILE_BYTES_MAX: Final = 2**20
LOOK_S: Final = 1.0  # how often the files are looked at, at most
_KINDS: Final = {"cert": "certificate", "key": "key", "ca": "file of authorities"}
_CERTIFICATE: Final = re.compile(
    rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)

# server: asks the peer for a certificate; http: does not; client: checks the peer's host name;
# reader: does not
Use = Literal["server", "http", "client", "reader"]

log = get_logger("tensorhub.access")


@dataclass(frozen=True, slots=True)
class TLS:
    """Mutual TLS: the paths of three files in PEM format, for `serve` and `connect`.

    `cert`: this process' certificate, and the intermediate certificates after it. `key`: its key,
    without a passphrase, closed to other users. `ca`: the authorities that have signed the
    certificates of all processes of the cluster. Certificates need the extended key usages
    serverAuth and clientAuth (or none at all), and a coordinator's also the names or addresses by
    which workers reach it. The files are read again when they change.
    """

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            path = getattr(self, name)
            if not isinstance(path, str | os.PathLike):
                raise InvalidType(f"TLS({name}={shown(path)}): give the path of the {kind}")
            if not os.fspath(path) or "\0" in str(os.fspath(path)):
                raise InvalidValue(f"TLS({name}={shown(path)}): give the path of the {kind}")


def resolve_tls(tls: TLS | Literal[False] | None) -> TLS | None:
    """`tls`, else what the environment names. None: no TLS, as with `False`, whatever the
    environment names. Raises InvalidType, InvalidValue (the environment names some of the files
    only).
    """
    if tls is False or isinstance(tls, TLS):
        return tls or None
    if tls is not None:
        raise InvalidType(f"tls={shown(tls)}: give tensorhub.TLS(cert=..., key=..., ca=...)")
    found = {name: os.environ.get(variable, "") for name, variable in TLS_VARIABLES.items()}
    if not any(found.values()):
        return None
    if missing := [TLS_VARIABLES[name] for name, path in found.items() if not path]:
        raise InvalidValue(
            f"{' and '.join(missing)} must be set, too: TLS needs all of "
            f"{', '.join(TLS_VARIABLES.values())}"
        )
    return TLS(**found)


def open_certificates(tls: TLS | None) -> Certificates | None:
    """Of what `resolve_tls` has found. Raises AuthenticationFailed."""
    return None if tls is None else Certificates(tls)


class _Loaded(NamedTuple):
    files: tuple[bytes, ...]  # the SHA-256 of each
    sha256: bytes  # of the certificate itself
    contexts: Mapping[Use, ssl.SSLContext]


class Certificates:
    """What the files have. A new connection uses the files' present content; if that cannot be
    used, the last good one. May be used from any thread.
    """

    def __init__(self, tls: TLS, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises AuthenticationFailed for a file that cannot be used."""
        # whatever directory the process changes to
        self.tls = TLS(*[os.path.abspath(getattr(tls, each.name)) for each in fields(tls)])
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._problem = ""  # why the last good content is not the present one, if it is not
        self._loaded = _load(self.tls, _read_all(self.tls))
        self._look_at = clock() + LOOK_S  # no sooner

    def __repr__(self) -> str:
        return f"<Certificates: {self.tls.cert}, SHA-256 {self._loaded.sha256.hex()}>"

    def context(self, use: Use) -> tuple[ssl.SSLContext, bytes]:
        """For a new connection, with the SHA-256 of this side's certificate."""
        with self._lock:
            if self._clock() >= self._look_at:
                self._look()
                self._look_at = self._clock() + LOOK_S
            return self._loaded.contexts[use], self._loaded.sha256

    def _look(self) -> None:
        try:
            files = _read_all(self.tls)
            if self._problem or _digests(files) != self._loaded.files:
                self._loaded = _load(self.tls, files)
                log.info("certificates_read", path=self.tls.cert, sha256=self._loaded.sha256.hex())
            self._problem = ""
        except AuthenticationFailed as error:
            if self._problem != (problem := str(error)):
                log.warning(
                    "certificates_not_taken",
                    reason=problem,
                    instead="new connections use what the files had before",
                )
            self._problem = problem


# the content of each file, by its kind
_Files = Mapping[str, bytes]


def _read_all(tls: TLS) -> _Files:
    return {name: _read(tls, name) for name in _KINDS}


def _digests(files: _Files) -> tuple[bytes, ...]:
    return tuple([hashlib.sha256(files[name]).digest() for name in _KINDS])


def _load(tls: TLS, files: _Files) -> _Loaded:
    """Each file was read once: all that is made here has the same certificate and key."""
    first = _CERTIFICATE.search(files["cert"])
    try:
        der = ssl.PEM_cert_to_DER_cert(first[0].decode() if first else "")
    except ValueError as error:
        raise _unusable(tls, "cert", "it begins with no certificate in PEM format") from error
    server, client = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT
    contexts: dict[Use, ssl.SSLContext] = {
        "server": _context(tls, files, server),
        "http": _context(tls, files, server),
        "client": _context(tls, files, client),
        "reader": _context(tls, files, client),
    }
    contexts["server"].verify_mode = ssl.CERT_REQUIRED
    contexts["reader"].check_hostname = False
    return _Loaded(_digests(files), hashlib.sha256(der).digest(), contexts)


def _context(tls: TLS, files: _Files, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no connection resumes another one

    def passphrase() -> NoReturn:
        raise _unusable(tls, "key", "it needs a passphrase; give one without")

    try:
        with _in_memory(files["cert"]) as cert, _in_memory(files["key"]) as key:
            context.load_cert_chain(cert, key, passphrase)
    except (OSError, ValueError) as error:
        if "MISMATCH" in str(error):
            raise _unusable(tls, "key", f"it is not that of the certificate {tls.cert}") from error
        raise _unusable(tls, "key", f"with {tls.cert}: {_reason(error)}") from error
    try:
        context.load_verify_locations(cadata=files["ca"].decode())
    except (OSError, ValueError) as error:
        raise _unusable(tls, "ca", _reason(error)) from error
    return context


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """The path of a file that has this content and no name: OpenSSL takes paths only."""
    with open(os.memfd_create("tensorhub-tls"), "wb", buffering=0) as file:
        file.write(content)
        yield f"/proc/self/fd/{file.fileno()}"


def _read(tls: TLS, name: str) -> bytes:
    """One file. AuthenticationFailed: it cannot be read, is too large, or is a key that is open to
    other users.
    """
    path = Path(getattr(tls, name))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if name == "key":
                check_protection("key", path, os.fstat(descriptor))
            # a traceback with locals does not show it
            content = Secret(os.read(descriptor, FILE_BYTES_MAX + 1))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unusable(tls, name, str(error.strerror)) from error
    if len(content) > FILE_BYTES_MAX:
        raise _unusable(tls, name, f"it has more than {FILE_BYTES_MAX} bytes")
    return content


def _unusable(tls: TLS, name: str, reason: str) -> AuthenticationFailed:
    return AuthenticationFailed(
        f"the {_KINDS[name]} {getattr(tls, name)} cannot be used: {reason}; it is given by "
        f"TLS({name}=), --tls-{name} or {TLS_VARIABLES[name]}"
    )


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error).replace("_", " ").lower()
