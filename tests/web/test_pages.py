"""Who may read what of an endpoint, and in which form."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import anyio
import numpy as np
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

import tensorhub
from tensorhub import sync
from tensorhub.errors import AuthenticationFailed, StateError
from tensorhub.types import Options
from tensorhub.web.asking import WAITING_OF_CLIENT_MAX, OtherLoop, Questions, Unanswered
from tests.rig import connect, published, tensors
from tests.web.rig import HTTP, TOKEN, coordinator, fresh, get, raw

DATA = ("/metrics", "/summary", "/models/m", "/updates", "/explain?model=m", "/events")
LIKE_FREE = ("/models/static/a", "/models/a/static/b", "/models/healthz", "/models//", "/static")
FREE = ("/healthz", "/", "/static/index.html")
READ_ONLY = tensorhub.read_only_token(TOKEN)
HOSTILE = (
    "<script>alert(1)</script>\"'&{}\\",
    "a/b/../../etc/passwd",
    "%2e%2e%2f?model=x#y",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "x" * 512,
    "\U0001f600" * 400,
)


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


@pytest.mark.parametrize("path", FREE)
async def test_health_and_the_page_itself_need_no_token(path: str) -> None:
    async with coordinator(TOKEN) as serving:
        assert (await get(serving.http_url, path)).status == 200


@pytest.mark.parametrize(
    ("token", "may_read"),
    [
        (None, False),
        ("", False),
        ("wrong", False),
        (TOKEN + "x", False),
        (TOKEN[:-1], False),
        ("\xff" * 40, False),
        ("x" * 8000, False),
        (TOKEN, True),
        (READ_ONLY, True),
    ],
)
async def test_what_is_told_needs_a_token_and_the_read_only_one_is_enough(
    token: str | None, may_read: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with coordinator(TOKEN) as serving:
        ready = (await get(serving.http_url, "/readyz", token)).json
        assert (ready["ready"], "why" in ready) == (True, may_read)  # a probe has no token
        for path in (*DATA, *LIKE_FREE) if not may_read else DATA[:2]:
            got = await get(serving.http_url, path, token)
            assert (got.status == 200) is may_read, path
            if not may_read:
                assert got.status == 401
                assert got.headers["www-authenticate"] == "Bearer"
                assert "read-only" in got.json["error"]
                assert TOKEN not in got.text
    assert ("http_client_refused" in caplog.text) is (bool(token) and not may_read)
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("scheme", ["Basic", "bearer x", "Token"])
async def test_another_scheme_is_no_token(scheme: str) -> None:
    async with coordinator(TOKEN) as serving:
        got = await get(serving.http_url, "/summary", Authorization=f"{scheme} {TOKEN}")
        assert got.status == 401


async def test_every_token_of_a_token_file_reads_and_a_new_one_counts_at_once(
    tmp_path: Path,
) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("first\nsecond\n")
    async with tensorhub.serve(token=file, options=HTTP) as serving:
        for token in ("first", "second", tensorhub.read_only_token("second")):
            assert (await get(serving.http_url, "/summary", token)).status == 200
        file.write_text("third\n")
        assert (await fresh(serving.http_url, "/summary", "third")).status == 200
        assert (await get(serving.http_url, "/summary", "first")).status == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
async def test_in_open_access_a_page_of_another_site_reads_nothing(host: str) -> None:
    async with coordinator() as serving:
        for path in ("/summary", "/healthz", "/"):
            assert (await get(serving.http_url, path, Host=host)).status == 403
        for named in ("localhost", "localhost:1", "127.0.0.1", "[::1]:80"):
            assert (await get(serving.http_url, "/summary", Host=named)).status == 200


async def test_every_answer_says_what_a_browser_may_do_with_it() -> None:
    async with coordinator(TOKEN) as serving:
        for path in (*FREE, *DATA[:3], "/nothing", "/summary?"):
            for token in (TOKEN, None):
                headers = (await get(serving.http_url, path, token)).headers
                assert headers["content-security-policy"].startswith("default-src 'self';")
                assert "unsafe" not in headers["content-security-policy"]
                assert headers["x-content-type-options"] == "nosniff"
                is_file = path == "/" or path.startswith("/static/")
                assert headers["cache-control"] == ("no-cache" if is_file else "no-store")
                assert not {name for name in headers if "allow-origin" in name or "cookie" in name}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
async def test_nothing_can_be_changed(method: str) -> None:
    async with coordinator(TOKEN) as serving:
        for path in ("/summary", "/", "/events", "/models/m"):
            assert (await get(serving.http_url, path, TOKEN, method=method)).status == 405


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/models/none", 404),
        ("/models/", 404),
        ("/models/m?after=" + "x" * 600, 400),
        ("/models/m?after=%00", 400),
        ("/explain", 400),
        ("/explain?model=none", 404),
        ("/explain?model=m&version=-1", 400),
        ("/explain?model=m&version=9223372036854775808", 400),
        ("/explain?model=m&version=" + "9" * 5000, 400),
        ("/explain?model=m&version=%D9%A3", 400),
        ("/explain?model=m&version=seven", 400),
        ("/updates?model=%1b[31m", 400),
        ("/static/../of_coordinator.py", 404),
        ("/static/%2e%2e%2fpages.py", 404),
        ("/static//etc/passwd", 404),
        ("/metrics/", 404),
        ("/%ff%fe", 404),
        ("/models/%ff", 404),
    ],
)
async def test_bad_input_is_refused_with_a_reason(path: str, status: int) -> None:
    async with coordinator() as serving:
        got = await get(serving.http_url, path)
        assert got.status == status, got.text
        assert got.json["error"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /summary HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"z" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        b"GET http://localhost:1/summary HTTP/9.9\r\n\r\n",
        b"GET /summary HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /summary HTTP/1.1\r\nContent-Length: -5\r\nHost: localhost\r\n\r\n",
    ],
)
async def test_what_is_no_request_gets_no_answer_and_ends_nothing_else(sent: bytes) -> None:
    async with coordinator() as serving:
        with raw(serving.http_url) as connection:
            try:
                connection.sendall(sent)
                answer = connection.recv(65_536)
            except ConnectionError:
                answer = b""
        assert answer == b"" or answer.split()[1][:1] == b"4"
        assert (await get(serving.http_url, "/readyz")).json["ready"]


async def test_the_summary_is_what_status_shows() -> None:
    async with coordinator() as serving, connect(serving.address) as hub:
        await published(hub, 7)
        summary = (await fresh(serving.http_url, "/summary")).json
        about = summary["coordinator"]
        assert (about["address"], about["state"]) == (serving.address, "serving")
        assert (about["sessions"], about["workers"], about["release"]) == (
            1,
            1,
            tensorhub.__version__,
        )
        (model,) = summary["models"]
        (described,) = await hub.describe()
        assert model.pop("age_s") >= 0
        assert not model.pop("age_is_least")
        model["coordinator_behind_s"] = described.coordinator_behind_s
        assert model == json.loads(json.dumps(asdict(described)))
        page = (await get(serving.http_url, "/models/m")).json
        assert page["next"] is None
        assert page["model"]["workers"] == model["workers"]
        assert page["model"]["summary"] == model["summary"]


async def test_pages_of_a_model_list_each_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub.coordinator.overview.PAGE_WORKERS", 2)
    async with coordinator() as serving, connect(serving.address, "b", transports=["tcp"]) as hub:
        await published(hub)
        async with (
            connect(serving.address, "a", transports=["tcp"]) as a,
            connect(serving.address, "b", transports=["tcp"]) as b,
            connect(serving.address, "c/<d>&e", transports=["tcp"]) as c,
        ):
            for each in (a, b, c):
                await each.register("m", tensors())
            seen, path = [], "/models/m"
            while path:
                page = (await get(serving.http_url, path)).json
                seen += [worker["name"] for worker in page["model"]["workers"]]
                path = page["next"] and f"/models/m?{urlencode(page['next'])}"
            assert seen == ["a", "b", "b", "c/<d>&e"]


async def test_names_are_text_wherever_they_come() -> None:
    async with coordinator() as serving, connect(serving.address, '"w">\\') as hub:
        for name in HOSTILE:
            weights = await hub.register(name, tensors())
            await weights.publish(1)
        summary = await fresh(serving.http_url, "/summary")
        assert summary.headers["content-type"] == "application/json"
        assert sorted(model["model"] for model in summary.json["models"]) == sorted(HOSTILE)
        text = (await get(serving.http_url, "/metrics")).text
        (newest,) = (
            family for family in families(text) if family.name == "tensorhub_newest_version"
        )
        labels = [sample.labels["model"] for sample in newest.samples]
        assert len(set(labels)) == len(HOSTILE)
        assert set(HOSTILE[:4]) <= set(labels)
        assert max(len(label.encode()) for label in labels) <= 128


async def test_models_whose_names_are_no_paths_have_pages() -> None:
    async with coordinator() as serving, connect(serving.address) as hub:
        for name in (".", "..", "a/../b", "?"):
            await hub.register(name, tensors())
            page = await get(serving.http_url, f"/models?{urlencode({'name': name})}")
            assert page.json["model"]["model"] == name
        assert (await get(serving.http_url, "/models")).status == 404


async def test_a_client_that_goes_on_after_a_bad_body_is_no_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with coordinator() as serving:
        with raw(serving.http_url) as connection:
            head = b"GET /summary HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            connection.sendall(head + b"\r\nzzz\r\n")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 400 ")
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"qqq\r\n")
                while connection.recv(65_536):
                    pass
        assert (await get(serving.http_url, "/readyz")).json["ready"]
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # an endpoint's loop
async def test_clients_that_ask_take_turns() -> None:
    questions, order = Questions(OtherLoop(lambda call: True)), list[str]()
    gate = anyio.Event()

    async def question(name: str) -> None:
        await gate.wait()
        order.append(name)

    async with anyio.create_task_group() as tasks:
        for number in range(WAITING_OF_CLIENT_MAX):
            name = f"greedy-{number}"
            tasks.start_soon(questions.ask, name, partial(question, name), "greedy")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(Unanswered, match="too many questions wait"):
            await questions.ask("one more", partial(question, "one more"), "greedy")
        tasks.start_soon(questions.ask, "modest", partial(question, "modest"), "modest")
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert order.index("modest") <= 2
    assert len(order) == WAITING_OF_CLIENT_MAX + 1


async def test_metrics_are_prometheus_text_or_openmetrics() -> None:
    async with coordinator() as serving, connect(serving.address) as hub:
        await published(hub, 3)
        plain = await fresh(serving.http_url, "/metrics")
        assert plain.headers["content-type"].startswith("text/plain")
        found = {
            sample.name: sample.value
            for family in families(plain.text)
            for sample in family.samples
            if sample.labels in ({}, {"model": "m"})
        }
        assert found["tensorhub_newest_version"] == 3
        assert found["tensorhub_sessions"] == 1
        assert found["tensorhub_step_seconds_count"] > 3
        assert found["tensorhub_lease_margin_seconds"] <= Options().lease_s
        asked = "application/openmetrics-text; version=x<y>;q=0.5, text/plain;version=0.0.4;q=0.2"
        other = await get(serving.http_url, "/metrics", Accept=asked)
        assert other.headers["content-type"].startswith("application/openmetrics-text; version=1")
        assert {
            family.name
            for family in openmetrics.text_string_to_metric_families(other.text)  # type: ignore[no-untyped-call]
        } == {family.name for family in families(plain.text)}


async def test_more_models_than_labels_are_other() -> None:
    async with coordinator() as serving, connect(serving.address) as hub:
        for number in range(70):
            await (await hub.register(f"m{number}", {"a": np.zeros(1)})).publish(1)
        text = (await fresh(serving.http_url, "/metrics")).text
        labels = [
            sample.labels["model"]
            for family in families(text)
            for sample in family.samples
            if sample.labels.get("state") == "ready"
        ]
        assert labels == [f"m{number}" for number in reversed(range(6, 70))] + ["other"]
        assert 'tensorhub_replicas{model="other",state="ready"} 6.0' in text


def test_a_port_in_use_is_named_before_the_coordinator_is_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = Options(http=f"127.0.0.1:{port}")
        with pytest.raises(StateError, match=f"Options.http: port {port} of 127.0.0.1 is in use"):
            sync.serve(token="", options=options)


def test_open_access_is_for_loopback() -> None:
    with pytest.raises(AuthenticationFailed, match="loopback"):
        sync.serve(token="", options=Options(http="0.0.0.0:0"))


@pytest.mark.parametrize(
    "where", ["", ":80", "8080", "127.0.0.1", "127.0.0.1:70000", "a b:1", "::1:80", 80, b"x:1"]
)
def test_what_no_endpoint_can_listen_on(where: object) -> None:
    with pytest.raises(StateError, match=r"Options\.http = "):
        Options(http=where)  # type: ignore[arg-type]


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorhub.web.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(StateError, match=r"\[http\]"):
        sync.serve(token="", options=HTTP)


async def test_the_grafana_dashboard_and_the_page_name_metrics_that_exist() -> None:
    async with coordinator() as serving, connect(serving.address, options=HTTP) as hub:
        exist = set[str]()
        for url in (serving.http_url, hub.http_url):
            text = (await get(url, "/metrics")).text
            exist |= set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    root = Path(__file__).parents[2]
    for file in ("deploy/grafana/tensorhub.json", "docs/observing.md"):
        named = set(re.findall(r"\btensorhub_\w+", (root / file).read_text(encoding="utf-8")))
        assert named
        assert {re.sub("_(sum|count|bucket)$", "", name) for name in named} <= exist
    panels = json.loads((root / "deploy/grafana/tensorhub.json").read_text(encoding="utf-8"))
    assert len({panel["id"] for panel in panels["panels"]}) == len(panels["panels"])


async def test_an_explanation_says_what_would_have_helped() -> None:
    async with (
        coordinator() as serving,
        connect(serving.address, "trainer") as trainer,
        connect(serving.address, "reader") as reader,
    ):
        await published(trainer)
        weights = await reader.register("m", tensors())

        async def pause(_: object) -> None:
            await anyio.sleep(0.3)

        await weights.update(before_write=pause)
        found = (await get(serving.http_url, "/explain?model=m")).json
        assert any(text.startswith("without before_write: 0.") for text in found["help"])
