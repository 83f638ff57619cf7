"""The files for TLS: where they are named, what is refused of them, and that they are read again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from tensorhub.errors import AuthenticationFailed, InvalidType, InvalidValue
from tensorhub.protocol import certificates
from tensorhub.protocol.certificates import TLS, Certificates, resolve_tls
from tensorhub.protocol.tls import Tls
from tests.certificates import authority, issue, usual
from tests.runtime.data_rig import WAIT_S


def test_the_environment_names_files_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_tls(None) is None
    monkeypatch.setenv("TENSORHUB_TLS_CERT", "/cert")
    with pytest.raises(InvalidValue, match="TENSORHUB_TLS_KEY and TENSORHUB_TLS_CA must be set"):
        resolve_tls(None)
    monkeypatch.setenv("TENSORHUB_TLS_KEY", "/key")
    monkeypatch.setenv("TENSORHUB_TLS_CA", "/ca")
    assert resolve_tls(None) == TLS("/cert", "/key", "/ca")
    assert resolve_tls(usual()) is usual()
    assert resolve_tls(False) is None


@pytest.mark.parametrize("wrong", [True, "cert.pem", ("a", "b", "c"), 1])
def test_what_is_no_tls_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidType, match=r"give tensorhub\.TLS"):
        resolve_tls(wrong)


@pytest.mark.parametrize(
    ("path", "error"),
    [(None, InvalidType), (1, InvalidType), ("", InvalidValue), ("a\0b", InvalidValue)],
)
def test_what_is_no_path_is_refused(path: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="give the path of the key"):
        TLS("cert", path, "ca")


def _encrypted(files: TLS) -> None:
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    Path(files.key).write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )


def _another_key(files: TLS) -> None:
    other = authority().issue_cert("other").private_key_pem.bytes()
    Path(files.key).write_bytes(other)


@pytest.mark.parametrize(
    ("spoil", "name", "why"),
    [
        (lambda files: os.unlink(files.cert), "cert", "No such file"),
        (lambda files: os.unlink(files.key), "key", "No such file"),
        (lambda files: os.unlink(files.ca), "ca", "No such file"),
        (lambda files: Path(files.cert).write_text("nonsense"), "cert", "no certificate in PEM"),
        (lambda files: Path(files.cert).write_bytes(bytes(2**20 + 1)), "cert", "more than"),
        (lambda files: Path(files.key).write_text("nonsense"), "key", "cannot be used"),
        (lambda files: Path(files.ca).write_text("nonsense"), "ca", "cannot be used"),
        (lambda files: Path(files.ca).write_bytes(b"\xff"), "ca", "cannot be used"),
        (lambda files: os.chmod(files.key, 0o644), "key", "chmod 600"),
        (_another_key, "key", "not that of the certificate"),
        (_encrypted, "key", "needs a passphrase"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, spoil: Callable[[TLS], object], name: str, why: str
) -> None:
    files = issue(tmp_path)
    spoil(files)
    with pytest.raises(AuthenticationFailed, match=why) as error:
        Certificates(files)
    assert getattr(files, name) in str(error.value)


def test_a_key_that_the_group_of_the_process_may_read_is_taken(tmp_path: Path) -> None:
    """So a Secret of Kubernetes comes to a pod."""
    files = issue(tmp_path)
    os.chmod(files.key, 0o440)
    Certificates(files)


def test_files_are_read_again_and_broken_ones_keep_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tensorhub")
    now = [0.0]
    certificates = Certificates(issue(tmp_path), lambda: now[0])
    first = certificates.context("server")
    files = issue(tmp_path)
    assert certificates.context("server") == first  # a look a second
    now[0] += 1
    second = certificates.context("server")
    assert second[1] != first[1]
    assert "certificates_read" in caplog.text
    for _ in range(2):
        Path(files.cert).write_text("half a certifi")
        now[0] += 1
        assert certificates.context("server") == second
    assert caplog.text.count("certificates_not_taken") == 1
    assert str(files.cert) in caplog.text
    issue(tmp_path)
    now[0] += 1
    assert certificates.context("server")[1] not in (first[1], second[1])
    assert "BEGIN" not in caplog.text


def test_files_that_are_replaced_one_after_the_other_count_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile, and while one of them cannot be read, the last pair is in force."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)
    files, new = issue(tmp_path / "files"), issue(tmp_path / "new")
    loaded = Certificates(files)
    first = loaded.context("server")
    os.replace(new.cert, files.cert)
    assert loaded.context("server") == first
    os.unlink(files.key)
    assert loaded.context("server") == first
    os.replace(new.key, files.key)
    assert loaded.context("server")[1] != first[1]


def test_connections_come_while_files_change_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side knows by its hash the certificate that the other side got."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)
    files = issue(tmp_path / "files")
    sets = [
        {name: Path(getattr(other, name)).read_bytes() for name in ("cert", "key")}
        for other in (issue(tmp_path / "one"), issue(tmp_path / "two"))
    ]
    loaded, ends = Certificates(files), threading.Event()

    def replace() -> None:
        while not ends.is_set():
            for each in sets:
                for name, content in each.items():
                    Path(getattr(files, name)).write_bytes(content)  # not at once

    with ThreadPoolExecutor(1) as pool:
        replacing, found = pool.submit(replace), set[bytes]()
        try:
            while len(found) < 2:
                one = Tls(loaded, "client", peer="coordinator", host="localhost")
                two = Tls(loaded, "server", peer="client")
                one.handshake()
                two.handshake(one.data_to_send())
                one.handshake(two.data_to_send())
                two.handshake(one.data_to_send())
                assert one.binding == two.binding
                found.add(one.binding)
        finally:
            ends.set()
        replacing.result(WAIT_S)


def test_an_authority_is_changed_without_a_stop(tmp_path: Path) -> None:
    """Both are in the file meanwhile."""
    files, new = issue(tmp_path), trustme.CA()
    Path(files.ca).write_bytes(authority().cert_pem.bytes() + new.cert_pem.bytes())
    context, _ = Certificates(files).context("reader")
    assert len(context.get_ca_certs()) == 2
