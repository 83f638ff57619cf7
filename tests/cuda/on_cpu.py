"""The kernels, compiled for the CPU by g++: their very source, run fiber by fiber.

A load or store that is not aligned ends the process: a GPU would be of no use afterwards.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from array import array
from collections.abc import Sequence
from pathlib import Path

from tensorhub.cuda.kernels import SOURCE

COMPILER = shutil.which("g++")
WHY_NOT = "no g++, which compiles the kernels for the CPU"
_OPTIONS = (
    *"-O1 -std=c++17 -shared -fPIC -fno-strict-aliasing -Wall -Werror -Wno-unknown-pragmas".split(),
    *"-fsanitize=alignment -fsanitize-undefined-trap-on-error".split(),
)


class KernelsOnCpu:
    """Built into `folder`. Addresses are this process'."""

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None
        library, source = folder / "kernels.so", Path(__file__).with_name("on_cpu.cpp")
        defined = f'-DKERNELS="{SOURCE}"'
        subprocess.run(
            [COMPILER, *_OPTIONS, defined, str(source), "-o", str(library)], check=True, timeout=100
        )
        self._library = ctypes.CDLL(str(library))

    def run(
        self,
        kernel: str,
        rows: Sequence[Sequence[int]],
        result: int,
        threads: int,
        order: int,
        *parts: int,
    ) -> None:
        """A thread block for each row, or `parts`, of so many threads. `order`: 0 or 1, of threads
        between barriers.
        """
        table = array("q", [number for row in rows for number in row])
        function = getattr(self._library, f"run_{kernel}")
        argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_int,
            ctypes.c_uint,
        )
        function.argtypes = argtypes[: 5 + len(parts)]
        if function(table.buffer_info()[0], result, len(rows), threads, order, *parts):
            raise AssertionError(f"not all threads of {kernel} come to the same barriers")

    def digests(
        self, places: Sequence[tuple[int, int]], threads: int = 256, order: int = 0
    ) -> list[int]:
        """Of these (address, bytes)."""
        made = (ctypes.c_uint64 * len(places))()
        self.run("digest_chunks", places, ctypes.addressof(made), threads, order)
        return list(made)
