"""What `Hub.fetch` gives: a version's tensors by name, and where they came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tensorhub.types import FetchReport, VersionInfo

if TYPE_CHECKING:
    import torch


class Fetched(Mapping[str, "torch.Tensor"]):
    """Tensors by name, in the publisher's order; the caller's own, contiguous, with the publisher's shapes and dtypes.

    Tensors that share memory at the publisher share it here. `info`: the version. `report`: what fetching it took.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], info: VersionInfo, report: FetchReport) -> None:
        self._tensors = dict(tensors)
        self.info = info
        self.report = report

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<Fetched {self.info.model} version {self.info.version}: {len(self)} tensors>"
