"""Which releases of a framework an adapter accepts."""

from __future__ import annotations

import logging

import pytest

from tensorhub.errors import StateError
from tensorhub.integrations.releases import ACCEPT_UNTESTED, check_calls, check_release
from tensorhub.log_events import EVENTS

TESTED = ("0.8", "0.9.2")


def never() -> None:
    raise AssertionError("a tested release is not probed")


@pytest.mark.parametrize("installed", ["0.8.0", "0.8.7", "0.9.2", "0.9.2.post1"])
def test_a_tested_release(installed: str, caplog: pytest.LogCaptureFixture) -> None:
    check_release("verl", installed, TESTED, probe=never)
    assert not caplog.records


@pytest.mark.parametrize("installed", ["0.80.0", "0.9.1", "0.9.20", "1.0"])
def test_a_probe_that_passes_is_enough(
    installed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(ACCEPT_UNTESTED, raising=False)
    with caplog.at_level(logging.WARNING):
        check_release("verl", installed, TESTED, probe=lambda: None)
    (told,) = caplog.records
    assert "release_untested" in told.getMessage()
    assert EVENTS["release_untested"].level == "warning"


def test_a_probe_that_fails_cannot_be_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACCEPT_UNTESTED, "1")

    def fail() -> None:
        raise RuntimeError("'lm_head.weight' has other bytes")

    text = r"made for 0\.8\.x, 0\.9\.2\. The probe .* failed .*'lm_head.weight' has other bytes"
    with pytest.raises(StateError, match=text) as refused:
        check_release("vLLM", "0.34.0", TESTED, probe=fail)
    assert ACCEPT_UNTESTED not in f"{refused.value}"


def test_a_user_may_insist_on_a_release_with_other_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def probe() -> None:
        check_calls(object, Interface)

    for refusing in ("", "0", "yes"):
        monkeypatch.setenv(ACCEPT_UNTESTED, refusing)
        with pytest.raises(StateError, match=rf"a call send .*, or set {ACCEPT_UNTESTED}=1"):
            check_release("verl", "0.10.0", TESTED, probe=probe)
    monkeypatch.setenv(ACCEPT_UNTESTED, "1")
    with caplog.at_level(logging.WARNING):
        check_release("verl", "0.10.0", TESTED, probe=probe)
    assert "Interface has a call send that the adapter lacks" in caplog.text


class Interface:
    def send(self, weights: object, step: int) -> None: ...
    def close(self) -> None: ...


def test_a_probe_of_a_frameworks_calls() -> None:
    class Adapter:
        def send(self, weights: object, step: int, more: int = 0) -> None: ...
        def close(self, **any_: object) -> None: ...

    class Older:
        def send(self, weights: object) -> None: ...

    class Needs(Adapter):
        def send(self, weights: object, step: int, rank: int) -> None: ...  # type: ignore[override]

    check_calls(Adapter, Interface)
    with pytest.raises(StateError, match=r"send has other arguments: the adapter lacks \['step'\]"):
        check_calls(Older, Interface)
    with pytest.raises(StateError, match=r"and needs \['rank'\]"):
        check_calls(Needs, Interface)
    with pytest.raises(StateError, match="has a call close that the adapter lacks"):
        check_calls(type("Short", (), {"send": Adapter.send}), Interface)
