"""The manifests' commands, in their environment: what a pod of each kind does, and how it ends."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import trustme

import tensorhub
from tensorhub import sync
from tensorhub.types import Options
from tests.cli.processes import WAIT_S, eventually, line_with
from tests.deploy.pods import node, templates
from tests.etcd_rig import ETCD, needs_etcd
from tests.rig import CHUNK_BYTES, tensors
from tests.runtime.control.lease_api import lease_server

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("ip") is None, reason="ip is not installed (Debian: iproute2)"),
]
TOKEN = "of-the-test"
OPTIONS = Options(op_timeout_s=WAIT_S, chunk_bytes=CHUNK_BYTES)
SECRETS = {"tensorhub-token": {"token": TOKEN.encode()}}


def asked(url: str, token: str = "", trust: ssl.SSLContext | None = None) -> tuple[int, str]:
    """As a kubelet or Prometheus asks."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=WAIT_S, context=trust) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, ""
    except OSError:  # it does not listen yet
        return 0, ""


def test_a_coordinator_and_a_seed(tmp_path: Path) -> None:
    pods = templates("single.yaml")
    with node(tmp_path, SECRETS) as here:
        here.attach("tensorhub-0")
        address = f"tcp://{here.addresses['tensorhub-0']}:17337"

        def publish() -> sync.Hub:
            hub = sync.connect(address, token=TOKEN, name="trainer", options=OPTIONS)
            hub.register("actor", tensors(1)).publish(1)
            return hub

        def probed(pod: str, path: str, token: str = "") -> tuple[int, str]:
            url = f"http://{here.addresses[pod]}:8080{path}"
            return here.inside("client", lambda: asked(url, token))

        with here.run("tensorhub-0", pods["tensorhub"]) as coordinator:
            hub = here.inside("client", publish)
            with here.run("seed", pods["tensorhub-seed-actor-a"]) as seed:
                assert json.loads(line_with("{", seed.process.stdout))["version"] == 1
                view = hub.describe("actor")
                (place,) = [each.location for each in view.workers if each.name != "trainer"]
                assert (place.site, place.rack) == ("zone-a", "node-1")
                for pod in ("tensorhub-0", "seed"):
                    assert probed(pod, "/healthz") == (200, "ok\n")
                    assert eventually(lambda pod=pod: probed(pod, "/readyz")[0] == 200)  # type: ignore[misc]
                    assert probed(pod, "/readyz") == (200, '{"ready": true}')
                    assert probed(pod, "/metrics")[0] == 401
                    assert probed(pod, "/metrics", tensorhub.read_only_token(TOKEN))[0] == 200
                assert seed.end() == 0
            assert coordinator.end() == 0
        with here.run("tensorhub-0", pods["tensorhub"]) as coordinator:  # the same volume
            assert hub.describe("actor", timeout=WAIT_S).mark == 1
            hub.close()
            assert coordinator.end() == 0


def test_an_archive_waits_for_its_coordinator_and_keeps_a_version(tmp_path: Path) -> None:
    pods = templates("single.yaml")
    arguments = pods["tensorhub-archive"]["spec"]["containers"][0]["args"]
    arguments[arguments.index("--to=s3://bucket/runs")] = "--to=file:///tmp/runs"
    with node(tmp_path, SECRETS) as here, ExitStack() as stack:
        here.attach("tensorhub-0")
        archive = stack.enter_context(here.run("archive", pods["tensorhub-archive"]))
        coordinator = stack.enter_context(here.run("tensorhub-0", pods["tensorhub"]))
        address = f"tcp://{here.addresses['tensorhub-0']}:17337"
        hub = here.inside(
            "client",
            lambda: stack.enter_context(sync.connect(address, token=TOKEN, options=OPTIONS)),
        )
        hub.register("actor", tensors(1)).publish(1)
        assert json.loads(line_with("{", archive.process.stdout))["version"] == 1
        assert archive.end() == 0
        hub.close()
        assert coordinator.end() == 0


def test_two_coordinators_with_a_lease(tmp_path: Path) -> None:
    template = templates("lease.yaml")["tensorhub"]
    (tmp_path / "account").mkdir()
    with ExitStack() as stack:
        here = stack.enter_context(node(tmp_path, {}))
        server = lease_server(tmp_path / "account", here.addresses["client"], "tensorhub")
        api = here.inside("client", lambda: stack.enter_context(server))
        account = {file.name: file.read_bytes() for file in api.account.iterdir()}
        here.secrets = {**SECRETS, "account": account}
        here.environment = {
            "KUBERNETES_SERVICE_HOST": here.addresses["client"],
            "KUBERNETES_SERVICE_PORT": str(api.port),
        }
        for name in ("tensorhub-0", "tensorhub-1"):
            here.attach(name)
        first = stack.enter_context(here.run("tensorhub-0", template))
        line_with("coordinator_listens", first.process.stderr)
        second = stack.enter_context(here.run("tensorhub-1", template))
        line_with("coordinator_stands_by", second.process.stderr)
        holder = api.leases["tensorhub"]["spec"]["holderIdentity"]
        assert holder.startswith("tcp://tensorhub-0.tensorhub.svc:17337#")
        assert first.end() == 0
        assert json.loads(line_with("coordinator_listens", second.process.stderr))["epoch"] == 2
        assert second.end() == 0


@needs_etcd
def test_two_coordinators_with_etcd_and_tls(tmp_path: Path) -> None:
    template = templates("etcd.yaml")["tensorhub"]
    pods = ("tensorhub-0", "tensorhub-1")
    etcds = [f"etcd-{number}.etcd" for number in range(3)]
    authority, key = trustme.CA(), tmp_path / "key"
    with node(tmp_path, {}) as here, ExitStack() as stack:
        for name in pods:
            here.attach(name)
        at = here.addresses["client"]
        here.hosts = dict.fromkeys(etcds, at)
        services = [f"{name}.tensorhub.svc" for name in pods]
        made = authority.issue_cert(*here.addresses.values(), *services, *etcds)
        made.private_key_and_cert_chain_pem.write_to_path(key)
        key.chmod(0o600)
        (ca := tmp_path / "ca").write_bytes(authority.cert_pem.bytes())
        files = {
            "tls.crt": key.read_bytes(),
            "tls.key": key.read_bytes(),
            "ca.crt": ca.read_bytes(),
        }
        here.secrets = {
            **SECRETS,
            "tensorhub-tls": files,
            "tensorhub-etcd": {"ca.crt": files["ca.crt"]},
        }
        options = (f"--cert-file={key}", f"--key-file={key}", f"--data-dir={tmp_path}/etcd")
        urls = (
            f"--listen-client-urls=https://{at}:2379",
            f"--advertise-client-urls=https://{at}:2379",
        )
        more = ("--listen-metrics-urls=http://127.0.0.1:2381",)
        etcd = subprocess.Popen(
            ["ip", "netns", "exec", f"{here.prefix}-client", ETCD, *options, *urls, *more],
            stderr=subprocess.DEVNULL,
        )
        stack.callback(etcd.wait)
        stack.callback(etcd.kill)
        metrics = "http://127.0.0.1:2381/health"
        assert eventually(lambda: here.inside("client", lambda: asked(metrics))[0] == 200)
        first = stack.enter_context(here.run(pods[0], template))
        line_with("coordinator_listens", first.process.stderr)
        second = stack.enter_context(here.run(pods[1], template))
        line_with("coordinator_stands_by", second.process.stderr)
        tls = tensorhub.TLS(cert=key, key=key, ca=ca)
        addresses = [f"tcp://{here.addresses[name]}:17337" for name in pods]
        hub = here.inside(
            "client", lambda: sync.connect(addresses, token=TOKEN, tls=tls, options=OPTIONS)
        )
        stack.callback(hub.close)
        hub.register("actor", tensors(1)).publish(1)
        trust = ssl.create_default_context(cafile=ca)
        for name, ready in zip(pods, (200, 503), strict=True):
            for path, status in (("/healthz", 200), ("/readyz", ready)):
                url = f"https://{here.addresses[name]}:8080{path}"
                assert eventually(
                    lambda url=url, status=status: (  # type: ignore[misc]
                        here.inside("client", lambda: asked(url, trust=trust))[0] == status
                    )
                )
        assert first.end() == 0
        line_with("coordinator_listens", second.process.stderr)
        assert hub.describe("actor", timeout=WAIT_S).mark == 1
        hub.close()
        assert second.end() == 0
