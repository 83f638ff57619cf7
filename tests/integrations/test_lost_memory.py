"""By what the loss of a model's memory is seen."""

from __future__ import annotations

import torch

from tensorhub.integrations.lost_memory import SAMPLES, is_lost, sampled
from tensorhub.integrations.recording import Recording


def test_what_is_lost_is_seen_and_padding_alone_too() -> None:
    head = torch.randn(20 * SAMPLES, 7)
    head[-3:] = 0.0
    recording = Recording(filled=[("head", (slice(20 * SAMPLES - 3, 20 * SAMPLES),), 0.0)])
    before, live = sampled([head]), {"head": head}
    assert not is_lost(before, sampled([head]), recording, live)
    head[-2, 5] = 1.0  # no sample
    assert is_lost(before, sampled([head]), recording, live)
    recording.fill_numbers(live)
    assert not is_lost(before, sampled([head]), recording, live)
    kept = head.clone()
    head.fill_(0.0)
    assert is_lost(before, sampled([head]), recording, live)
    head.copy_(kept)
    assert is_lost(before, sampled([head, torch.ones(2)]), recording, live)
    assert is_lost(before, None, recording, live)
    assert not is_lost(None, sampled([head]), recording, live)  # there was no update
