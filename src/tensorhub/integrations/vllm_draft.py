"""vLLM: an engine's draft model is updated with the base, in one version (`drafts`).

Responsible for where vLLM has the draft, and for what its first load filled. Not responsible for an
update (`vllm_updater`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tensorhub.integrations.drafts import PREFIX, joined
from tensorhub.integrations.vllm_first_load import first_load, note_first


def draft_of(worker: Any) -> nn.Module | None:
    """The draft model of one of vLLM's workers."""
    if hasattr(worker, "get_draft_model"):  # vLLM 0.29
        found = worker.get_draft_model()
    else:
        found = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    found = found.unwrap() if hasattr(found, "unwrap") else found
    return found if isinstance(found, nn.Module) else None


def with_draft(base: nn.Module, draft: nn.Module, vllm_config: Any) -> nn.Module:
    """See `drafts.joined`."""
    of_draft = vllm_config.speculative_config.draft_model_config.model
    is_one_checkpoint = of_draft == vllm_config.model_config.model
    firsts = first_load(base), first_load(draft)
    both = joined(base, draft, is_one_checkpoint=is_one_checkpoint)
    if firsts[0] is not None and firsts[1] is not None:
        name = "" if is_one_checkpoint else PREFIX
        note_first(both, {**firsts[0], **{f"{name}{n}": each for n, each in firsts[1].items()}})
    return both
