"""The secrets that this process uses now: a sequence. It presents the first one and accepts each of
them.

A token that a caller or the environment gives never changes. A token file is read again while it is
in use, so that a cluster changes its token without a stop: "old, new", then "new, old", then "new",
everywhere. While the file cannot be used (half written, gone, open to others), its last good tokens
stay in force. May be used from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

from tensorhub.errors import AuthenticationFailed
from tensorhub.logs import get_logger
from tensorhub.protocol.secret import Secret, read_token_file

LOOK_S = 1.0  # how often a token file is looked at, at most

log = get_logger("tensorhub.access")


def open_keyring(found: Secret | Path) -> Sequence[Secret]:
    """Of what `resolve_token` has found. Raises as `read_token_file`."""
    return TokenFile(found) if isinstance(found, Path) else (found,)


class TokenFile(Sequence[Secret]):
    """The tokens of a file. The file is read each time: its time of change is too coarse to show
    every change.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises AuthenticationFailed for a file that cannot be used."""
        self.path = path.absolute()  # whatever directory the process changes to
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._tokens: tuple[Secret, ...] = ()  # the last good ones
        self._problem = ""  # why they are not those that the file has now, if they are not
        self._tokens = read_token_file(self.path)
        self._look_at = clock() + LOOK_S  # no sooner

    def __repr__(self) -> str:
        return f"<TokenFile {self.path} of {len(self._tokens)}>"

    def __len__(self) -> int:
        return len(self._now())

    @overload
    def __getitem__(self, index: int) -> Secret: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Secret]: ...
    def __getitem__(self, index: int | slice) -> Secret | Sequence[Secret]:
        return self._now()[index]

    def __iter__(self) -> Iterator[Secret]:
        return iter(self._now())

    def __contains__(self, secret: object) -> bool:
        return secret in self._now()

    def _now(self) -> tuple[Secret, ...]:
        with self._lock:
            if self._clock() >= self._look_at:
                self._look()
                self._look_at = self._clock() + LOOK_S
            return self._tokens

    def _look(self) -> None:
        try:
            tokens, problem = read_token_file(self.path), ""
        except AuthenticationFailed as error:
            tokens, problem = self._tokens, str(error)
        if problem and problem != self._problem:
            log.warning(
                "token_file_not_taken",
                reason=problem,
                instead="the tokens that it had before stay in force",
            )
        elif tokens != self._tokens or (self._problem and not problem):
            log.info("token_file_read", path=str(self.path), tokens=len(tokens))
        self._tokens, self._problem = tokens, problem
