"""A base and its draft as one model; engines' own drafts are tested with the engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from tensorhub.integrations.drafts import joined


class Loads(nn.Module):
    """Notes what its loader is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.given: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.given += [name for name, _ in weights]


def feed(*names: str) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, torch.zeros(1)) for name in names)


def test_each_loader_is_given_all_that_is_its_models_in_any_order() -> None:
    base, draft = Loads(), Loads()
    both = joined(base, draft, is_one_checkpoint=False)
    assert {"layer", "draft.layer"} <= set(dict(both.named_modules()))
    assert "draft" not in dict(base.named_modules())
    both.load_weights(feed("a", "draft.x", "b", "draft.y", "c"))  # type: ignore[operator]
    assert (base.given, draft.given) == (["a", "b", "c"], ["x", "y"])


def test_a_draft_of_the_bases_checkpoint_is_given_the_bases_tensors() -> None:
    base, draft = Loads(), Loads()
    joined(base, draft, is_one_checkpoint=True).load_weights(feed("a", "b"))  # type: ignore[operator]
    assert (base.given, draft.given) == (["a", "b"], ["a", "b"])
