"""Whether a model's memory was lost, as by an engine's sleep: seen by some bytes of each tensor,
and by the numbers that no publication brings, such as padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tensorhub.integrations.recording import Recording

SAMPLES = 16  # elements of each tensor


def sampled(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Some bytes of each of these; None: there are none."""
    found = []
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.numel():
            flat = tensor.detach().view(-1)
            step = max(1, len(flat) // SAMPLES)
            found.append(flat[::step][:SAMPLES].contiguous().view(torch.uint8))
    return torch.cat(found).cpu() if found else None


def is_lost(
    before: torch.Tensor | None,
    now: torch.Tensor | None,
    recording: Recording,
    in_place: Mapping[str, torch.Tensor],
) -> bool:
    """Given samples, of after the last update (None: there was none) and of now, and the tensors
    that updates write in place.
    """
    if before is None:
        return False
    return now is None or not torch.equal(now, before) or not recording.has_numbers(in_place)
