"""Bytes under paths, in a directory and in a bucket; and every fault with its error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tensorhub.archives import store as stores
from tensorhub.archives.store import PART_BYTES_MIN, Store
from tensorhub.archives.store_faults import MissingObject
from tensorhub.errors import ArchiveUnavailable, IntegrityError, InvalidValue
from tests.archives.servers import S3, SECRET, SLOW_DOWN, Answer, answering

Open = Callable[[], Store]


def pieces(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield bytes([number % 251]) * 2**20


def test_what_is_put_is_read_again(store: Store) -> None:
    count = 2 * PART_BYTES_MIN // 2**20 + 3
    assert store.put("a/large", pieces(count), count * 2**20) == count * 2**20
    store.put("a/small", [b"he", memoryview(b"llo"), b""])
    store.put("b/none", [])
    assert store.read("a/small") == b"hello"
    assert store.read("b/none") == b""
    last = (count - 1) * 2**20
    got = store.ranges("a/large", [(last, 3), (5, 0), (2**20 - 1, 2), (0, 1)])
    assert [bytes(each) for each in got] == [bytes([count - 1]) * 3, b"", b"\0\1", b"\0"]
    assert {each.path: each.nbytes for each in store.objects("a")} == {
        "a/large": count * 2**20,
        "a/small": 5,
    }
    assert [*store.objects("nothing")] == []


def test_put_replaces(store: Store) -> None:
    for text in (b"one", b"three"):
        store.put("a", [text])
    assert store.read("a") == b"three"


def test_what_is_not_there(store: Store) -> None:
    store.put("short", [b"12345"])
    with pytest.raises(MissingObject, match=f"{store.url}/gone is not there"):
        store.read("gone")
    with pytest.raises(MissingObject):
        store.ranges("gone", [(0, 1)])
    for beyond in ([(0, 6)], [(4, 2)], [(100, 1)], [(0, 5), (5, 1)]):
        with pytest.raises(IntegrityError, match="short"):
            store.ranges("short", beyond)
    with pytest.raises(IntegrityError, match="5 bytes, and not 4"):
        store.read("short", 4)


def test_deleting(store: Store) -> None:
    for name in "abc":
        store.put(f"x/{name}", [b"1"])
    store.delete(["x/a", "x/gone", "x/b", "gone/too"])
    store.delete(["x/gone"])
    store.delete([])
    assert [each.path for each in store.objects("x")] == ["x/c"]


def test_one_creator_wins(open_store: Open) -> None:
    stores = [open_store() for _ in range(6)]
    for number in range(5):
        start, won = threading.Barrier(len(stores)), list[int]()

        def create(which: int, path: str, start: threading.Barrier, won: list[int]) -> None:
            start.wait(60)
            if stores[which].create(path, f"by {which}".encode()):
                won.append(which)

        path = f"race/{number}"
        threads = [
            threading.Thread(target=create, args=(each, path, start, won))
            for each in range(len(stores))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert stores[0].read(path) == f"by {won[0]}".encode()


def test_a_creation_whose_answer_was_lost_is_repeated(store: Store) -> None:
    assert store.create("a", b"mine")
    assert store.create("a", b"mine")
    assert not store.create("a", b"of another")
    assert store.read("a") == b"mine"


def test_a_stream_that_fails_leaves_nothing(store: Store) -> None:
    def failing(count: int) -> Iterator[bytes]:
        yield from pieces(count)
        raise OSError("the memory went away")

    for count in (0, 1, PART_BYTES_MIN // 2**20 + 1):
        with pytest.raises(OSError, match="the memory went away"):
            store.put("a/b", failing(count))
    assert [*store.objects("a")] == []
    assert [*store.unfinished("a")] == []


def test_the_server_tells_the_time(store: Store) -> None:
    store.put("a", [b"1"])
    (stored,) = store.objects("")
    assert timedelta(0) <= store.now() - stored.modified < timedelta(minutes=5)
    assert [each.path for each in store.objects("")] == ["a"]


# --------------------------------------------------------------------------------------------------
# URLs


@pytest.mark.parametrize(
    "url",
    [
        "",
        "actor",
        "/data/archive",
        "http://host/path",
        "s3://",
        "s3:bucket",
        "file://host/path",
        "file:relative",
        "memory:///",
        "s3://[",
        "s3://key:hunter2@bucket/a",
        "s3://bucket/a?token=hunter2",
        "ftp://key:hunter2@bucket",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        Store(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("az://container/a", {}),
        ("gs://bucket/a", {"service_account_key": "{hunter2"}),
        ("gs://bucket/a", {"service_account_key": '{"private_key": {"hunter2": 1}}'}),
    ],
)
def test_credentials_that_are_none(
    url: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ArchiveUnavailable, match=f"{url} does not accept these") as caught:
        Store(url, options=options)
    assert "hunter2" not in str(caught.value)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArchiveUnavailable, match="make it first"):
        Store(f"file://{tmp_path}/a")
    with pytest.raises(ArchiveUnavailable, match="cannot be made: No such file"):
        Store(f"file://{tmp_path}/a/b", writable=True)
    Store(f"file://{tmp_path}/a", writable=True)
    Store(f"file://{tmp_path}/a")
    tmp_path.joinpath("file").touch()
    for writable in (False, True):
        with pytest.raises(ArchiveUnavailable, match="/file is a file: give a directory"):
            Store(f"file://{tmp_path}/file", writable=writable)


def test_without_obstore(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "from tensorhub.archives.store import Store\n"
        f"Store('file://{tmp_path}')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "StateError: archives need obstore: pip install 'tensorhub-ros[archive]'" in done.stderr


# --------------------------------------------------------------------------------------------------
# buckets


def calls(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.read("a"),
        lambda: store.ranges("a", [(0, 1)]),
        lambda: [*store.objects("a")],
        lambda: store.put("a", [b"1"]),
        lambda: store.create("a", b"1"),
        lambda: store.delete(["a"]),
    ]


def test_wrong_credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (
        s3.options_of("archiver", "hunter2"),
        s3.options_of("nobody", SECRET),
    ):
        store = Store(s3.url, options=options, timeout_s=30)
        for call in calls(store):
            with pytest.raises(ArchiveUnavailable, match="does not accept these cred") as caught:
                call()
            assert not caught.value.retryable
            assert s3.url in str(caught.value)
            assert "AWS_SECRET_ACCESS_KEY" in str(caught.value)
            shown = "".join(map(str, (caught.value, store, caught.value.__context__)))
            assert "hunter2" not in shown
            assert SECRET not in shown


def test_no_such_bucket(s3: S3) -> None:
    store = Store("s3://nowhere/a", options=s3.options, timeout_s=30)
    for call in calls(store)[:-1]:  # deletes succeed: there is nothing
        with pytest.raises(ArchiveUnavailable, match="s3://nowhere/a has no such bucket"):
            call()


def test_a_bucket_that_may_only_be_read(s3: S3, store: Store) -> None:
    writer = Store(f"{s3.url}/read-only", options=s3.options)
    writer.put("a", [b"1"])
    reader = Store(f"{s3.url}/read-only", options=s3.readers_options, timeout_s=30)
    read, ranges, objects, put, create, delete = calls(reader)
    assert read() == b"1"
    ranges(), objects()
    for call in (put, create, delete):
        with pytest.raises(ArchiveUnavailable, match="does not let this process"):
            call()
    assert writer.read("a") == b"1"


def test_endpoint_and_credentials_from_the_environment(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    store = Store(f"{s3.url}/environment")
    store.put("a", [b"1"])
    assert store.read("a") == b"1"


def test_nothing_listens() -> None:
    with answering(lambda method, path: Answer()) as gone:
        pass
    store = Store(gone.url, options=gone.options, timeout_s=2)
    for call in calls(store):
        with pytest.raises(ArchiveUnavailable, match="after retries") as caught:
            call()
        assert caught.value.retryable


def test_a_server_that_throttles_is_asked_again() -> None:
    asked: list[str] = []

    def answer(method: str, path: str) -> Answer:
        asked.append(method)
        return SLOW_DOWN if len(asked) % 4 else Answer(body=b"hello")

    with answering(answer) as server:
        store = Store(server.url, options=server.options, timeout_s=60)
        assert store.read("a") == b"hello"
        assert store.create("b", b"1")
    assert asked == ["GET"] * 4 + ["PUT"] * 4


@pytest.mark.parametrize(
    "answer", [SLOW_DOWN, Answer(429, code="TooMany"), Answer(500, code="InternalError")]
)
def test_a_server_that_throttles_forever(answer: Answer) -> None:
    with answering(lambda method, path: answer) as server:
        store = Store(server.url, options=server.options, timeout_s=1)
        for call in calls(store):
            with pytest.raises(ArchiveUnavailable, match=answer.code) as caught:
                call()
            assert caught.value.retryable


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    over, told = threading.Event(), list[tuple[str, dict[str, object]]]()
    monkeypatch.setattr(stores, "SILENT_S", 0.01)
    monkeypatch.setattr(stores.log, "warning", lambda event, **said: told.append((event, said)))

    def wait(method: str, path: str) -> Answer:
        over.wait(60)
        return Answer()

    with answering(wait) as server:
        store = Store(server.url, options=server.options, timeout_s=1)
        try:
            for call in calls(store)[:4]:
                with pytest.raises(ArchiveUnavailable) as caught:
                    call()
                assert caught.value.retryable
                assert told
        finally:
            over.set()
    ((event, said),) = told  # once
    assert (event, said["url"], said["trying"]) == ("archive_silent", server.url, "to read a")
    assert said["endpoint"] == server.options["endpoint"]
    assert said["gives_up_after_s"] == 1


def test_a_store_that_answers_is_not_watched(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    [*store.objects("")]
    monkeypatch.setattr(stores, "Timer", None)
    store.put("a", [b"1"])
    assert store.read("a") == b"1"
    with pytest.raises(MissingObject):
        store.read("gone")
    assert [each.path for each in store.objects("")] == ["a"]


def test_the_endpoint_is_named_without_what_may_be_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    assert stores._endpoint("s3", {}) == "the usual one of s3://"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://u:hunter2@h:1/?sig=hunter2")
    assert stores._endpoint("s3", {"region": "r"}) == "http:h:1/"
    assert stores._endpoint("s3", {"endpoint": "http://g"}) == "http://g"
    assert stores._endpoint("file", {}) == "this machine"


def test_a_clock_that_is_wrong() -> None:
    with answering(lambda method, path: Answer(403, code="RequestTimeTooSkewed")) as server:
        store = Store(server.url, options=server.options, timeout_s=5)
        for call in calls(store):
            with pytest.raises(ArchiveUnavailable, match="this machine's clock is wrong"):
                call()


def test_a_bucket_that_is_full() -> None:
    begun = Answer(
        body=b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
    )

    def answer(method: str, path: str) -> Answer:
        return begun if method == "POST" else Answer(507, code="XMinioStorageFull")

    with answering(answer) as server:
        store = Store(server.url, options=server.options, timeout_s=1)
        both: list[Callable[[], object]] = [
            lambda: store.create("a", b"1"),
            lambda: store.put("a", pieces(50), 2**20),
        ]
        for call in both:
            with pytest.raises(ArchiveUnavailable, match=r"is full.*make room") as caught:
                call()
            assert caught.value.retryable


def test_queries_are_not_shown() -> None:
    body = b"<Error><Message>http://x/a?sig=hunter2 //u:hunter2@h/</Message></Error>"
    with (
        answering(lambda method, path: Answer(400, body)) as server,
        pytest.raises(ArchiveUnavailable) as caught,
    ):
        Store(server.url, options=server.options, timeout_s=5).read("a")
    assert "hunter2" not in str(caught.value)


# --------------------------------------------------------------------------------------------------
# directories


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts 1 MiB of memory, with these options."""
    place = tmp_path / "mounted"
    place.mkdir()

    def mounted(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"this machine cannot mount: {done.stderr.strip()}")
        return place

    yield mounted
    if os.path.ismount(place):
        subprocess.run(["umount", place], check=True)


@pytest.mark.root
def test_a_disk_that_is_full(mount: Callable[[str], Path]) -> None:
    place = mount("size=1m")
    store = Store(f"file://{place}")
    store.put("a", [b"1"])
    large: list[Callable[[], object]] = [
        lambda: store.put("b", pieces(3)),
        lambda: store.create("b", bytes(2**21)),
    ]
    for call in large:
        with pytest.raises(
            ArchiveUnavailable, match=r"is full.*No space left.*make room"
        ) as caught:
            call()
        assert caught.value.retryable
    assert [each.path for each in store.objects("")] == ["a"]
    store.put("b", [b"1"])


@pytest.mark.root
def test_a_directory_that_may_only_be_read(mount: Callable[[str], Path]) -> None:
    store = Store(f"file://{mount('size=1m')}")
    store.put("a", [b"1"])
    mount("remount,ro")
    assert store.read("a") == b"1"
    for call in calls(store)[3:]:
        with pytest.raises(ArchiveUnavailable, match=r"does not let this process.*Read-only"):
            call()


def test_files_that_a_writer_has_not_finished(local: Store, tmp_path: Path) -> None:
    local.put("x/a", [b"1"])
    staged = tmp_path / "archive/x/b#1"
    staged.write_bytes(b"12")
    assert [each.path for each in local.objects("x")] == ["x/a"]
    assert [(each.path, each.nbytes) for each in local.unfinished("x")] == [("x/b#1", 2)]
    local.delete(["x/b#1"])
    assert [*local.unfinished("")] == []
    assert local.read("x/a") == b"1"
