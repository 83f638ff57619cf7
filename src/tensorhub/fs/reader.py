"""What all filesystems of one process share that read from one cluster: a hub, and memory for
windows.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from tensorhub import sync
from tensorhub.api.tools import published_parts
from tensorhub.fs.cache import Cache
from tensorhub.fs.versions import Version
from tensorhub.runtime.loop_thread import finish_blocking
from tensorhub.types import ModelInfo, Options, Selector

VERSIONS = 8  # of which the headers are kept


@dataclass(frozen=True, slots=True)
class Settings:
    """How to read. `timeout_s`: of each call, and of each read."""

    address: str
    token_file: str | None
    timeout_s: float
    cache_bytes: int


class Reader:
    """See the module. Made by `reader_of`."""

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.timeout_s
        token = Path(settings.token_file) if settings.token_file is not None else None
        options = Options(
            op_timeout_s=settings.timeout_s, coordinator_wait_s=min(settings.timeout_s, 10.0)
        )
        self._hub = sync.connect(settings.address, token=token, options=options)
        self.cache = Cache(settings.cache_bytes)
        self._lock = threading.Lock()
        self._versions: OrderedDict[str, Version] = OrderedDict()  # by content id

    def version(self, model: str, selector: Selector) -> Version:
        """The files of a version. Raises as `Hub.plan`; ManifestMismatch: it cannot be files."""
        with self._lock:
            known = dict(self._versions)
        info, parts = finish_blocking(published_parts(self._hub._async, model, selector, known))
        if parts is None:
            version = known[info.content_id]
        else:
            version = Version(self._hub, info, parts, self.cache, self._timeout_s)
        with self._lock:
            self._versions[info.content_id] = version
            self._versions.move_to_end(info.content_id)
            if len(self._versions) > VERSIONS:
                self._versions.popitem(last=False)
        return version

    def models(self) -> tuple[ModelInfo, ...]:
        """See `Hub.describe`."""
        return self._hub.describe(limit=0)

    def model(self, model: str) -> ModelInfo:
        """See `Hub.describe`: with the newest versions."""
        return self._hub.describe(model, limit=0)

    def close(self) -> None:
        """Leave the cluster. Reads fail from now on."""
        self._hub.close()
        self.cache.close()


_readers: weakref.WeakValueDictionary[tuple[int, Settings], Reader] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def reader_of(settings: Settings) -> Reader:
    """The reader with these settings, of this process. Raises as `tensorhub.connect`."""
    key = os.getpid(), settings
    with _lock:
        found = _readers.get(key)
        if found is None:
            found = _readers[key] = Reader(settings)
        return found


def close(reader: Reader) -> None:
    """Close a reader, which nothing gets any more."""
    with _lock:
        for key in [key for key, each in _readers.items() if each is reader]:
            del _readers[key]
    reader.close()
