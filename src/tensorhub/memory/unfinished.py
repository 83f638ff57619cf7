"""The unfinished output of a fetch: a temporary directory that one process at a time fills, and a
record of the digests of its arrived chunks. After an interruption the next fetch to that output
goes on there.

The record is a hint, and not trusted: the bytes are digested again, and the digests of all chunks
together are compared with the publisher's. So a changed record, or changed files, cost a second
read of some chunks.

Responsible for the lock, for the record, and for removing both. Not responsible for the files in
it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tensorhub.errors import StateError

KEY_BYTES = 32


def stem_of(name: str) -> str:
    """What the names of all that is made for the output `name` begin with; no other output's do."""
    return f".{name[:50]}.{hashlib.blake2b(os.fsencode(name), digest_size=4).hexdigest()}"


class Unfinished:
    """`directory`, in `place`, for the output `name`. End it by `remove` or `keep`."""

    def __init__(self, place: Path, name: str) -> None:
        """StateError: another process fills it, or the names are taken by another user. OSError: it
        cannot be made.
        """
        stem = stem_of(name)
        self.record, self.directory = place / f"{stem}.part", place / f"{stem}.tmp"
        self._width = 0  # of a digest; 0: nothing is recorded
        self._recorded: list[int | None] = []
        self._is_over = False
        self._descriptor = _lock(self.record)
        # a filesystem without locks: nothing can be shared with the next process
        if self._descriptor < 0:
            self.directory = place / f"{stem}{secrets.token_hex(4)}.tmp"
        try:
            with contextlib.suppress(FileExistsError):
                self.directory.mkdir()
            status = self.directory.lstat()
            if not stat.S_ISDIR(status.st_mode) or not _is_own(status, place):
                raise StateError(
                    f"{self.directory} is another user's, or no directory: remove it, or take "
                    f"another place"
                )
        except BaseException:
            self._unlock()
            raise

    @staticmethod
    def is_in(place: Path, name: str) -> bool:
        """Whether something of a fetch of that output is there."""
        return any((place / (stem_of(name) + end)).exists() for end in (".part", ".tmp"))

    def recall(self, key: bytes, chunks: int, width: int) -> Sequence[int | None]:
        """The digests that were recorded under this key, one of `width` bytes for each chunk; None:
        not recorded. With a new key a new record begins.
        """
        self._width, self._recorded = width if self._descriptor >= 0 else 0, [None] * chunks
        if not self._width:
            return self._recorded
        entry = 1 + width
        found = os.pread(self._descriptor, KEY_BYTES + chunks * entry, 0)
        if found[:KEY_BYTES] != key:
            os.ftruncate(self._descriptor, 0)
            try:
                os.pwrite(self._descriptor, key, 0)
            except OSError:  # the files may have taken the last block of the disk
                self._width = 0
        else:
            for chunk, at in enumerate(range(KEY_BYTES, len(found) - entry + 1, entry)):
                if found[at]:
                    self._recorded[chunk] = int.from_bytes(found[at + 1 : at + entry], "big")
        return list(self._recorded)

    def note(self, digests: Sequence[int | None]) -> None:
        """Record those that are known now. A record that cannot be written is none: the fetch
        itself goes on.
        """
        if not self._width or digests == self._recorded:
            return
        with contextlib.suppress(OSError):
            for chunk, (digest, before) in enumerate(zip(digests, self._recorded, strict=True)):
                if digest is not None and digest != before:
                    entry = b"\1" + digest.to_bytes(self._width, "big")
                    os.pwrite(self._descriptor, entry, KEY_BYTES + chunk * len(entry))
                    self._recorded[chunk] = digest

    def keep(self) -> bool:
        """Leave what has arrived to the next process; False: nothing has, and nothing is left. A
        second call, or one after `remove`, does nothing.
        """
        if self._descriptor >= 0 and os.fstat(self._descriptor).st_size > KEY_BYTES:
            self._unlock()
            return True
        if not self._is_over:
            self.remove()
        return False

    def remove(self) -> None:
        """Leave nothing."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)
        if self._descriptor >= 0:  # while it is locked: so no other process' directory is removed
            with contextlib.suppress(FileNotFoundError):
                self.record.unlink()
        self._unlock()

    def _unlock(self) -> None:
        self._is_over = True
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _lock(path: Path) -> int:
    """A descriptor of that file, which is made if it is not there, and which no other process has
    locked. -1: the filesystem has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not _is_own(status, path.parent):
                raise StateError(
                    f"{path} is another user's, or no file: remove it, or take another place"
                )
            if not _flock(descriptor, path):
                path.unlink()
                os.close(descriptor)
                return -1
            with contextlib.suppress(FileNotFoundError):
                # else its last owner has just removed it
                if os.path.samestat(status, path.lstat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _flock(descriptor: int, path: Path) -> bool:
    """Lock it. False: the filesystem has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StateError(
            f"another fetch writes there now ({path}): wait for its end", retryable=True
        ) from None
    except OSError:
        return False
    return True


def _is_own(status: os.stat_result, place: Path) -> bool:
    """Whether this user has made it, by the filesystem's word: some filesystems give all files to
    one user (NFS that squashes root, CIFS, FUSE).
    """
    if status.st_uid == os.geteuid():
        return True
    with tempfile.TemporaryFile(dir=place) as made:
        return status.st_uid == os.fstat(made.fileno()).st_uid
