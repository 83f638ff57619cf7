"""The kernels, compiled for the CPU by g++: their very source, run fiber by fiber.

A load or store that is not aligned ends the process: a GPU would be of no use afterwards.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from tensorhub.cuda.kernels import SOURCE, TILE_BYTES

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
        numbers = [number for row in rows for number in row]
        self.launch(kernel, numbers, result, len(rows), threads, order, *parts)

    def launch(
        self,
        kernel: str,
        numbers: Sequence[int],
        result: int,
        blocks: int,
        threads: int,
        order: int,
        *parts: int,
    ) -> None:
        table = array("q", numbers)
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
        if function(table.buffer_info()[0], result, blocks, threads, order, *parts):
            raise AssertionError(f"not all threads of {kernel} come to the same barriers")

    def digests(
        self, places: Sequence[tuple[int, int]], threads: int = 256, order: int = 0
    ) -> list[int]:
        """Of these (address, bytes)."""
        made = (ctypes.c_uint64 * len(places))()
        self.run("digest_chunks", places, ctypes.addressof(made), threads, order)
        return list(made)

    def changes(
        self, older: bytes, newer: bytes, width: int, threads: int = 256, order: int = 0
    ) -> tuple[bytes, bytes]:
        """The places and differences of words, as `CudaDevice.changes` has them listed."""
        before, after = (ctypes.create_string_buffer(each, len(each)) for each in (older, newer))
        tiles = -(-len(older) // TILE_BYTES)
        counts, firsts = (ctypes.c_uint32 * tiles)(), (ctypes.c_uint32 * tiles)()
        row = [ctypes.addressof(before), ctypes.addressof(after), len(older) // 8]
        of, how = (ctypes.addressof(counts), tiles), (threads, order, width)
        self.launch("list_changes", [*row, 0, 0, 0], *of, *how)
        firsts[:] = list(accumulate(counts[:-1], initial=0))
        places = ctypes.create_string_buffer(4 * sum(counts) + 1)  # and a byte behind
        differences = ctypes.create_string_buffer(width * sum(counts) + 1)
        to = [ctypes.addressof(each) for each in (firsts, places, differences)]
        self.launch("list_changes", [*row, *to], *of, *how)
        assert places.raw[-1] == differences.raw[-1] == 0
        return places.raw[:-1], differences.raw[:-1]

    def add(
        self, address: int, width: int, places: bytes, differences: bytes, threads: int = 256
    ) -> None:
        """As `CudaDevice.add`."""
        count = len(places) // 4
        lists = [
            ctypes.create_string_buffer(each, len(each) or 1) for each in (places, differences)
        ]
        row = [count, *map(ctypes.addressof, lists)]
        self.launch("add_changes", row, address, -(-count // threads), threads, 0, width)
