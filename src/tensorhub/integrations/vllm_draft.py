"""vLLM: an engine's draft model, which guesses tokens for its base, is updated with the base, in
one version.

A draft with a checkpoint of its own (EAGLE, a smaller model) takes its tensors from the names that
begin with `draft.`. One of the base's checkpoint (MTP) takes them from the base's names, as vLLM's
own loader does. Both models are made one here, so that one plan covers both: nothing may be missing
in either, and neither is written before all of it is known.

Responsible for that one model. Not responsible for an update (`vllm_updater`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from tensorhub.integrations.vllm_first_load import first_load, note_first

Item = tuple[str, torch.Tensor]
PREFIX: Final = "draft."


def draft_of(worker: Any) -> nn.Module | None:
    """The draft model of one of vLLM's workers."""
    if hasattr(worker, "get_draft_model"):  # vLLM 0.29
        found = worker.get_draft_model()
    else:
        found = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    found = found.unwrap() if hasattr(found, "unwrap") else found
    return found if isinstance(found, nn.Module) else None


def with_draft(base: nn.Module, draft: nn.Module, vllm_config: Any) -> nn.Module:
    """A model with the modules of both, the draft's below `draft`. What the two share is the
    base's. Its `load_weights` loads both.
    """
    of_draft = vllm_config.speculative_config.draft_model_config.model
    is_one_checkpoint = of_draft == vllm_config.model_config.model
    firsts = first_load(base), first_load(draft)
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
    if firsts[0] is not None and firsts[1] is not None:
        name = "" if is_one_checkpoint else PREFIX
        note_first(both, {**firsts[0], **{f"{name}{n}": each for n, each in firsts[1].items()}})
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
