"""How large the tensors of a benchmark are: half tiny, half large; or those of a real model, scaled
down.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from math import prod

from benches import catalogue
from benches.comparison.sizes import half_tiny
from tensorhub.model.dtypes import itemsize

TINY_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True)
class SizeProfile:
    """About `nbytes` of tensors. `model`: of the catalogue, as one of `ranks` ranks has it; None:
    300, half of them tiny, or as many as there are of `each` bytes.
    """

    nbytes: int
    model: str | None = None
    ranks: int = 1
    each: int | None = None

    @staticmethod
    def add_options(parser: ArgumentParser) -> None:
        parser.add_argument(
            "--model",
            choices=catalogue.models(),
            metavar="NAME",
            help="its tensors, of which the large are cut",
        )
        parser.add_argument(
            "--ranks", type=int, default=1, help="with --model: one of so many ranks' part of it"
        )

    @staticmethod
    def of(options: Namespace, mib: int | None = None) -> "SizeProfile":
        """`mib`: instead of the option's."""
        return SizeProfile(
            (options.mib if mib is None else mib) * 2**20, options.model, options.ranks
        )

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
            return half_tiny(self.nbytes)
        found = catalogue.scaled(self.model, self.nbytes, ranks=self.ranks)
        return [prod(shape) * itemsize(dtype) for dtype, shape in found.values()]
