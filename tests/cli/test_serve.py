"""`tensorhub serve`, as a process."""

import json
import resource
import signal
import socket
from urllib.request import urlopen

import pytest

from tests.cli.processes import WAIT_S, children, line_with, run_here, started

pytest.importorskip("tensorhub.api.hub", exc_type=ImportError)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_serves_until_it_is_told_to_stop(number: signal.Signals, code: int) -> None:
    with started("serve", "--json") as process:
        address = json.loads(line_with("address", process.stdout))["address"]
        host, port = address.removeprefix("tcp://").split(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), timeout=10):
            pass
        assert children(process.pid) == []
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err


def test_it_raises_its_limit_of_descriptors_and_says_for_how_many_workers_there_is_room() -> None:
    with started(
        "serve", under=("bash", "-c", 'ulimit -Sn 128 && ulimit -Hn 1024 && exec "$@"', "-")
    ) as process:
        assert line_with("room for 640 workers (`ulimit -Hn` is 1024)", process.stderr)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (1024, 1024)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_here("serve", "--port", str(port))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: StateError: ")
    assert done.stderr.count("\n") == 1
    assert f"{port} of 127.0.0.1 is in use: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--lease-s", "-1"), 2, "error: usage: Options.lease_s = -1.0"),
        (
            ("--token-file", "/no/such/file"),
            2,
            "error: usage: the token file /no/such/file cannot be read",
        ),
        (("--port", "70000"), 2, "--port"),
        (("--host", "0.0.0.0"), 1, "error: AuthenticationFailed: "),
        (("--ha", "zookeeper://a:1/b"), 1, "error: InvalidValue: ha='zookeeper://a:1/b': give "),
        (("--ha", "etcd://127.0.0.1:1/b"), 1, "error: StateError: etcd://127.0.0.1:1/b: etcd does"),
    ],
)
def test_what_cannot_be_served(arguments: tuple[str, ...], code: int, text: str) -> None:
    done = run_here("serve", *arguments)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_it_serves_http_where_it_is_told_to() -> None:
    pytest.importorskip("uvicorn")
    with started("serve", "--json", "--http", "127.0.0.1:0") as process:
        said = json.loads(line_with("address", process.stdout))
        with urlopen(f"{said['http']}readyz", timeout=WAIT_S) as answer:
            assert json.load(answer)["ready"]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "Traceback" not in err


def test_a_port_in_use_for_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_here("serve", "--http", f"127.0.0.1:{port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"--http: port {port} of 127.0.0.1 is in use: " in done.stderr
    done = run_here("serve", "--http", "0.0.0.0:0")
    assert "AuthenticationFailed: --http: open access is for loopback only" in done.stderr


def test_its_log_as_lines_of_json() -> None:
    with started("serve", "--log", "json") as process:
        address = line_with("tcp://", process.stdout).strip()
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n")  # another program
            refusal = json.loads(line_with("peer_refused", process.stderr))
        assert refusal["peer"] == "127.0.0.1"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_S)
    assert all(json.loads(line)["time"].endswith("+00:00") for line in err.splitlines())
    done = run_here("serve", "--log", "xml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "xml" in done.stderr
