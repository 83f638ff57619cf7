"""Certificates for tests: a cluster's authority, and files that it has signed."""

from __future__ import annotations

import datetime
import functools
import tempfile
from pathlib import Path
from typing import Any

import trustme

from tensorhub.protocol.certificates import TLS

HERE = ("localhost", "127.0.0.1")
LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@functools.cache
def authority() -> trustme.CA:
    """The cluster's."""
    return trustme.CA()


def issue(directory: Path, *names: str, by: trustme.CA | None = None, **more: Any) -> TLS:
    """Three files in that directory, for these names (none: `HERE`). `by`: another authority than
    the cluster's. An earlier set is replaced.
    """
    directory.mkdir(exist_ok=True)
    files = TLS(*[str(directory / f"{name}.pem") for name in ("cert", "key", "ca")])
    made = (by or authority()).issue_cert(*(names or HERE), **more)
    Path(files.cert).write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
    Path(files.key).touch(0o600)
    Path(files.key).write_bytes(made.private_key_pem.bytes())
    Path(files.ca).write_bytes(authority().cert_pem.bytes())
    return files


_directory = tempfile.TemporaryDirectory(prefix="tensorhub-tls-")


@functools.cache
def usual() -> TLS:
    """Those of a process that is not tested."""
    return issue(Path(_directory.name))
