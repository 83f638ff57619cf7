"""How large the tensors of a benchmark are: half tiny, half large; or those of a real model, scaled down."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from math import prod

from tensorhub.manifest import itemsize
from tensorhub.testing import catalogue

TINY_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True)
class Mix:
    """About `nbytes` of tensors. `model`: of the catalogue, as one of `ranks` ranks has it; None: 300, half of them tiny, or
    as many as there are of `each` bytes.
    """

    nbytes: int
    model: str | None = None
    ranks: int = 1
    each: int | None = None

    @staticmethod
    def add_options(parser: ArgumentParser) -> None:
        parser.add_argument(
            "--model", choices=catalogue.models(), metavar="NAME", help="its tensors, of which the large are cut"
        )
        parser.add_argument("--ranks", type=int, default=1, help="with --model: one of so many ranks' part of it")

    @staticmethod
    def of(options: Namespace, mib: int | None = None) -> "Mix":
        """`mib`: instead of the option's."""
        return Mix((options.mib if mib is None else mib) * 2**20, options.model, options.ranks)

    def __str__(self) -> str:
        if self.each is not None:
            return f"{self.nbytes // self.each} tensors of {self.each} bytes"
        part = f" of one of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.model}{part}" if self.model else "half of the tensors tiny"

    def sizes(self) -> list[int]:
        """Bytes of each tensor, multiples of 4."""
        if self.each is not None:
            return [self.each] * (self.nbytes // self.each)
        if self.model is None:
            return _half_tiny(self.nbytes)
        found = catalogue.scaled(self.model, self.nbytes, ranks=self.ranks)
        return [prod(shape) * itemsize(dtype) for dtype, shape in found.values()]


def _half_tiny(nbytes: int) -> list[int]:
    """300 tensors, half of them tiny (1 to 8 KiB), the others of two sizes: in all `nbytes`."""
    tiny = [1024 * (1 + number % 8) for number in range(150)]
    left = (nbytes - sum(tiny)) // 300
    share = left // 4096 * 4096 or left // 4 * 4
    if share <= 0:
        raise ValueError("too few bytes for 300 tensors: give at least 1 MiB")
    big = [share if number % 2 else 3 * share for number in range(150)]
    big[-1] += nbytes - sum(tiny) - sum(big)
    return [size for pair in zip(big, tiny, strict=True) for size in pair]
