"""How much memory there is, and how much of it processes take meanwhile. Imports no torch."""

import threading
from collections.abc import Iterable
from pathlib import Path

SAMPLE_S = 0.002


class Sampler:
    """The anonymous resident bytes of these processes, from now until `end`: at first, and at
    most.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self.before = {pid: anonymous_bytes(pid) for pid in pids}
        self.most = dict(self.before)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            for pid, most in self.most.items():
                self.most[pid] = max(most, anonymous_bytes(pid))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def more_mib(self, pid: int) -> float:
        """What came on top of what was there at first."""
        return round((self.most[pid] - self.before[pid]) / 2**20, 2)


def anonymous_bytes(pid: int) -> int:
    """0 if it has ended."""
    return _bytes(Path(f"/proc/{pid}/status"), "RssAnon")


def available_bytes() -> int:
    """What the system can give without swapping, by its own estimate."""
    return _bytes(Path("/proc/meminfo"), "MemAvailable")


def _bytes(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":")), 0)
