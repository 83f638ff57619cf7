"""A draft model, which guesses tokens for its base, is updated with the base, in one version.

A draft with a checkpoint of its own (EAGLE, a smaller model) takes its tensors from the names that
begin with `draft.`. One of the base's checkpoint (MTP) takes them from the names of the base, as
the loaders of engines do. Both models are made one here, so that one plan covers both: nothing may
be missing in either, and neither is written before all of it is known.

Responsible for that one model. Not responsible for an update (`sglang_engine`, `vllm_updater`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

import torch
from torch import nn

Item = tuple[str, torch.Tensor]
PREFIX: Final = "draft."


def joined(base: nn.Module, draft: nn.Module, *, is_one_checkpoint: bool) -> nn.Module:
    """A model with the modules of both, the draft's below `draft`. What the two share is the
    base's. Its `load_weights` loads both.
    """
    both = copy.copy(base)
    both.__dict__["_modules"] = {**base._modules, PREFIX.rstrip("."): draft}

    def load_weights(weights: Iterable[Item]) -> None:
        feed = iter(weights)
        of_draft: list[Item] = []
        of_base: list[Item] = []
        base.load_weights(_until_draft(feed, of_draft, is_one_checkpoint))  # type: ignore[operator]
        draft.load_weights(chain(of_draft, _of_draft(feed, of_base)))  # type: ignore[operator]
        if of_base:
            base.load_weights(iter(of_base))  # type: ignore[operator]

    both.__dict__["load_weights"] = load_weights
    return both


def _until_draft(
    feed: Iterator[Item], of_draft: list[Item], is_one_checkpoint: bool
) -> Iterator[Item]:
    """What the base is given: all before the first tensor of the draft's."""
    for name, tensor in feed:
        if name.startswith(PREFIX):
            of_draft.append((name.removeprefix(PREFIX), tensor))
            return
        if is_one_checkpoint:
            of_draft.append((name, tensor))
        yield name, tensor


def _of_draft(feed: Iterator[Item], of_base: list[Item]) -> Iterator[Item]:
    for name, tensor in feed:
        if name.startswith(PREFIX):
            yield name.removeprefix(PREFIX), tensor
        else:
            of_base.append((name, tensor))
