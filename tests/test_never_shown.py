"""A token, and its read-only one, appear nowhere: not in logs, reprs, errors, tracebacks with
locals, or pickles.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import gc
import logging
import pickle
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import tensorhub
from tensorhub import sync
from tests.rig import OPTIONS, connect, gated, nothing_left, published, tensors

SECRET = "Zyzzyva-0123-never-shown"
READ_ONLY = tensorhub.read_only_token(SECRET)
TESTS = str(Path(__file__).parent)
SOURCE = str(Path(tensorhub.__file__).parent)


def forms(secret: str) -> Iterator[str]:
    """How bytes get into text."""
    data = secret.encode()
    yield from (
        secret,
        secret[4:-4],
        repr(data)[2:-1],
        data.hex(),
        data.hex(" "),
        str(list(data))[1:-1],
    )
    for encode in (base64.b64encode, base64.urlsafe_b64encode, base64.b32encode):
        yield encode(data).decode().rstrip("=")[:-2]


FORMS = [form.lower() for secret in (SECRET, READ_ONLY) for form in forms(secret)]


def check_hidden(text: str, where: object) -> None:
    lowered = text.lower()
    assert not any(form in lowered for form in FORMS), f"shown by {where}"


def shown(thing: object) -> str:
    try:
        return f"{thing!r} {thing}"
    except (
        AttributeError,
        RuntimeError,
        ValueError,
    ):  # never made whole, changed by another thread, or of endless digits
        return ""


def check_error(error: BaseException, source: str = SOURCE) -> None:
    """All that is said of an error anywhere: itself, its causes, its traceback, and the locals of
    frames below `source`: the library's, or ("") all but the tests' own.
    """
    check_hidden("".join(traceback.format_exception(error)), "its traceback")
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None:
            continue
        check_hidden(f"{each} {each!r} {each.args} {vars(each)}", type(each))
        todo += [
            each.__cause__,
            each.__context__,
            *(each.exceptions if isinstance(each, BaseExceptionGroup) else ()),
        ]
        for frame, line in traceback.walk_tb(each.__traceback__):
            file = frame.f_code.co_filename
            if file.startswith(source) and not file.startswith(TESTS):
                check_hidden(
                    " ".join(map(shown, frame.f_locals.values())),
                    f"{file}:{line}",
                )


@contextlib.asynccontextmanager
async def fails() -> AsyncIterator[None]:
    with pytest.raises(tensorhub.TensorHubError) as caught:
        yield
    check_error(caught.value)


def check_objects() -> int:
    """Every object of the library that is alive now."""
    found = [
        thing for thing in gc.get_objects() if str(type(thing).__module__).startswith("tensorhub")
    ]
    for thing in found:
        check_hidden(shown(thing), type(thing))
    return len(found)


async def live(tmp_path: Path) -> None:
    """Serve, connect, publish, fetch, fail in all ways that have to do with tokens."""
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(f"{SECRET}\n")
    async with tensorhub.serve(token=file, options=OPTIONS) as coordinator:
        address = coordinator.address
        for wrong in (SECRET[:-1], "", READ_ONLY[:-1], tensorhub.read_only_token(READ_ONLY)):
            async with fails(), connect(address, token=wrong):
                pass
        async with (
            connect(address, "trainer", token=SECRET) as trainer,
            tensorhub.connect(address, token=READ_ONLY, options=OPTIONS) as dashboard,
        ):
            await published(trainer)
            with gated(2) as gate:
                async with connect(address, "reader", token=SECRET) as reader:
                    weights = await reader.register("m", tensors())
                    async with fails():
                        await weights.replicate(timeout=0.2)
                    assert not gate.holds
                    gate.open()
                    await weights.replicate()
                    assert check_objects() > 50
            await dashboard.fetch("m")
            async with fails():
                await dashboard.register("m", tensors())
            async with fails():
                await dashboard.fetch("other", timeout=0.01)
            check_objects()
            file.chmod(0o644)
            async with fails(), connect(address, token=file):  # type: ignore[arg-type]
                pass
    file.chmod(0o600)
    file.write_text("\n".join([SECRET] * 9))
    async with fails(), tensorhub.serve(token=file):
        pass
    file.write_text(SECRET * 500)
    async with fails(), tensorhub.serve(token=file):
        pass
    async with fails():
        with sync.serve(token=file):
            pass
    async with fails(), tensorhub.serve(port=1, host="203.0.113.1", token=SECRET):
        pass
    async with fails(), connect("tcp://127.0.0.1:1", token=SECRET):
        pass
    async with fails(), connect("junk", token=SECRET):
        pass
    for call in (tensorhub.connect, sync.connect):
        async with fails():
            call("junk", token=SECRET)
    for each in (tensorhub.serve, sync.serve):
        async with fails():
            each("127.0.0.1", -1, token=SECRET)
    async with fails():
        sync.connect("tcp://127.0.0.1:1", token=SECRET, options=OPTIONS)


@pytest.mark.heavy
@pytest.mark.usefixtures("every_object")
async def test_a_token_is_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with nothing_left():
        await live(tmp_path)
    for event in ("coordinator_listens", "peer_refused", "worker_welcomed", "session_closed"):
        assert event in caplog.text
    for record in caplog.records:
        check_hidden(f"{record.getMessage()} {vars(record)}", record.name)
    check_hidden(caplog.text, "the log")
    check_hidden(repr(pickle.dumps(OPTIONS)) + repr(dataclasses.asdict(OPTIONS)), "options")


def test_this_test_would_see_it() -> None:
    for secret in (SECRET, READ_ONLY):
        data = secret.encode()
        for text in (f"got {secret}", repr(data), data.hex(), base64.b64encode(data).decode()):
            with pytest.raises(AssertionError, match="shown by"):
                check_hidden(text, "")
