"""An etcd that refuses: another's prefix, an old copy, credentials, certificates, no room. The error
names what to do.
"""

import contextlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from tensorhub.coordinator import Digested, Durable
from tensorhub.errors import AuthenticationFailed, StateError
from tensorhub.runtime.control import etcd
from tensorhub.runtime.control.election import Deposed
from tensorhub.runtime.control.etcd import Place, Refused
from tensorhub.runtime.control.etcd_election import EtcdElection
from tensorhub.runtime.control.etcd_store import VALUE_BYTES_MAX
from tests.etcd_rig import (
    ADDRESS,
    connected,
    elected,
    etcd_servers,
    kept,
    needs_etcd,
    publication,
    read,
    write,
)

pytestmark = needs_etcd


@pytest.fixture
def anyio_backend() -> str:
    return "trio"  # asyncio: tests/test_failover.py


async def test_a_prefix_that_has_something_else(place: Place) -> None:
    async with connected(place) as client:
        await client.transact((), [etcd.put(place.key("zoo"), b"animals")])
    with pytest.raises(StateError, match=r"has something else, such as b'test-\d+/zoo'"):
        await kept(place)
    for record in (b"animals", b"[]", b'{"cluster": 1, "epoch": 1}', b"{}"):
        async with connected(place) as client:
            await client.transact((), [etcd.put(place.key("cluster"), record)])
        with pytest.raises(
            StateError, match=r"test-\d+: .*; or give another prefix|is no record of a cluster"
        ):
            await kept(place)


async def test_another_format_is_named(place: Place) -> None:
    record = {"cluster": "c", "epoch": 1, "format": 99, "sequence": 0, "staged": 0}
    async with connected(place) as client:
        made = etcd.put(place.key("cluster"), json.dumps(record).encode())
        await client.transact((), [made])
    with pytest.raises(
        StateError, match="its format is 99, this version writes 4: run the release that"
    ):
        await kept(place)


async def test_an_etcd_that_was_restored_from_an_old_copy_is_refused(place: Place) -> None:
    election = EtcdElection(place)
    for _ in range(2):
        term = await election.campaign(ADDRESS, lambda leader: None)
        await term.resign()
    old = replace(term.record, epoch=1)
    for restored in (
        [etcd.put(place.key("cluster"), old.encode())],
        [etcd.delete(place.key("cluster"))],
    ):
        async with connected(place) as client:
            await client.transact((), restored)
        with pytest.raises(StateError, match=r"knows less than this coordinator.*from an old copy"):
            await election.campaign(ADDRESS, lambda leader: None)
    await election.aclose()


async def test_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment or a file; and a token that etcd has forgotten is renewed."""
    with etcd_servers(tmp_path, 1, "--bcrypt-cost=4") as (member,):
        place = Place((member.endpoint,), "t", 60)
        async with connected(place) as client:
            for path, body in (
                ("user/add", {"name": "root", "password": "secret"}),
                ("user/add", {"name": "other", "password": "secret"}),
                ("user/grant", {"user": "root", "role": "root"}),
                ("enable", {}),
            ):
                with contextlib.suppress(Refused):
                    await client._call(f"auth/{path}", body, 10, bool)
        with pytest.raises(AuthenticationFailed, match="set TENSORHUB_ETCD_USER"):
            await kept(place)
        (tmp_path / "password").write_text("secret\n")
        (tmp_path / "password").chmod(0o600)
        monkeypatch.setenv("TENSORHUB_ETCD_USER", "root")
        monkeypatch.setenv("TENSORHUB_ETCD_PASSWORD", "wrong")
        with pytest.raises(AuthenticationFailed, match=r"authentication failed.*_PASSWORD_FILE"):
            await kept(place)
        monkeypatch.setenv("TENSORHUB_ETCD_PASSWORD_FILE", str(tmp_path / "none"))
        with pytest.raises(AuthenticationFailed, match=r"none' cannot be read"):
            await kept(place)
        monkeypatch.setenv("TENSORHUB_ETCD_PASSWORD_FILE", str(tmp_path / "password"))
        async with elected(place) as term:
            await read(term)
            await write(term, publication(1))
            term._etcd._token = "forgotten.1"
            await write(term, publication(2))
        monkeypatch.setenv("TENSORHUB_ETCD_USER", "other")
        with pytest.raises(AuthenticationFailed, match="give user 'other' a role for the prefix"):
            await kept(place)


async def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides show a certificate of one authority. An error names the setting to look at, each
    time: whether etcd's own words about a certificate arrive is chance.
    """
    ca, another = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca")
    another.cert_pem.write_to_path(tmp_path / "another")
    past = datetime(2020, 1, 1, tzinfo=UTC)
    for name, made in {
        "server": ca.issue_cert("127.0.0.1"),
        "client": ca.issue_cert("127.0.0.1"),
        "expired": ca.issue_cert("127.0.0.1", not_after=past),
        "stranger": another.issue_cert("127.0.0.1"),
    }.items():
        made.private_key_and_cert_chain_pem.write_to_path(tmp_path / name)
    ca.issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(tmp_path / "no key")
    server = [f"--{kind}={tmp_path / 'server'}" for kind in ("cert-file", "key-file")]
    with etcd_servers(
        tmp_path, 1, *server, f"--trusted-ca-file={tmp_path / 'ca'}", "--client-cert-auth"
    ) as (member,):
        place = Place((member.endpoint,), "t", 60)
        for settings, why in (
            ({}, "etcd does not answer .*: if etcd speaks TLS, set TENSORHUB_ETCD_CA"),
            ({"CERT": "client"}, "_CERT is set, and TENSORHUB_ETCD_CA is not: set TENS"),
            ({"CA": "none"}, r"TENSORHUB_ETCD_CA='.*none'.*No such file"),
            ({"CA": "ca", "CERT": "no key"}, r"TENSORHUB_ETCD_CERT='.*no key'.*: \[SSL\]"),
            ({"CA": "another"}, r"VERIFY_FAILED.*: is TENSORHUB_ETCD_CA='.*another' the auth"),
            ({"CA": "ca"}, "asks for a client's certificate, set TENSORHUB_ETCD_CERT and "),
            ({"CA": "ca", "CERT": "stranger"}, r"is TENSORHUB_ETCD_CERT='.*stranger' valid now"),
            ({"CA": "ca", "CERT": "expired"}, r"is TENSORHUB_ETCD_CERT='.*expired' valid now"),
        ):
            with monkeypatch.context() as environment:
                for name, file in settings.items():
                    environment.setenv(f"TENSORHUB_ETCD_{name}", str(tmp_path / file))
                for _ in range(3 if "CA" in settings else 1):
                    with pytest.raises(StateError, match=why):
                        await kept(place)
        monkeypatch.setenv("TENSORHUB_ETCD_CA", str(tmp_path / "ca"))
        monkeypatch.setenv("TENSORHUB_ETCD_CERT", str(tmp_path / "client"))
        assert await kept(place) == Durable()


async def test_an_etcd_without_room_is_told_of_and_goes_on_with_room(tmp_path: Path) -> None:
    with etcd_servers(tmp_path, 1, "--quota-backend-bytes=3000000") as (member,):
        place = Place((member.endpoint,), "t", 60)
        large = Digested("m", 1, "c-0-1", bytes(VALUE_BYTES_MAX - 100))
        async with elected(place) as term:
            await read(term)
            await write(term, publication(1))
            caught: OSError | None = None
            while caught is None:
                try:
                    await write(term, large)
                except OSError as error:
                    caught = error
            assert "cannot be written: etcd refuses it" in str(caught)
            assert not isinstance(caught, Deposed)
            assert (await read(term)).publications == (publication(1),)
        with pytest.raises(StateError, match="database space exceeded"):
            await kept(place)
