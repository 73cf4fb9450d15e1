"""Shapes are the published models', and dummy weights are made in place with the asked spread."""

import pytest
import torch

from hf_sparsekv.bench.shapes import SHAPES, WEIGHT_STD, dummy_model, shape_config
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.hf.models import model_shape


def num_parameters(name):
    """Counted without making any weight."""
    with torch.device("meta"):
        return sum(p.numel() for p in dummy_model(shape_config(name), dtype=torch.bfloat16, device="meta").parameters())


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes_per_token"),
    [
        ("llama3-8b-shape", 8_030_261_248, 131_072),
        ("llama3-70b-shape", 70_553_706_496, 327_680),
        ("llama3-1b-shape", 1_235_814_400, 32_768),
        ("smollm2-135m-shape", 134_515_008, 23_040),
    ],
)
def test_a_shape_has_the_published_size(name, parameters, kv_bytes_per_token):
    shape = model_shape(shape_config(name))
    assert shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * 2 == kv_bytes_per_token
    assert num_parameters(name) == parameters


def test_dummy_weights_are_made_in_their_dtype_and_leave_the_random_state_alone():
    before = torch.random.get_rng_state()
    model = dummy_model(shape_config("tiny"), dtype=torch.bfloat16, device="cpu", seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training
    weights = {name: p.float() for name, p in model.named_parameters() if p.dim() == 2}
    assert all(abs(w.std().item() / WEIGHT_STD - 1) < 0.05 for w in weights.values())
    again = dummy_model(shape_config("tiny"), dtype=torch.bfloat16, device="cpu", seed=3)
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    other = dummy_model(shape_config("tiny"), dtype=torch.bfloat16, device="cpu", seed=4)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_an_unknown_shape_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match="unknown shape 'llama': choose one of llama3-8b-shape"):
        shape_config("llama")
    assert set(SHAPES) == {"llama3-8b-shape", "llama3-70b-shape", "llama3-1b-shape", "smollm2-135m-shape", "tiny"}
