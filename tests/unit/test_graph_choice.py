"""Whether `generate` takes CUDA graphs: a reason for every case in which it does not."""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.hf import graph_choice
from hf_sparsekv.hf.graph_choice import GraphWish, graph_doubt, graph_obstacle
from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.plan import LayerPlan

BATCH = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}


@pytest.mark.parametrize(
    ("wish", "obstacle", "doubt", "reason"),
    [
        (GraphWish(), None, None, None),
        (GraphWish(), None, "too short", "too short"),
        (GraphWish(), "on a CPU", None, "on a CPU"),
        (GraphWish(), "on a CPU", "too short", "on a CPU"),
        (GraphWish(True), None, "too short", None),
        (GraphWish(None, compile=True), None, "too short", None),
        (GraphWish(True, compile=True), None, None, None),
        (GraphWish(False), None, None, "cuda_graphs=False"),
        (GraphWish(False), "on a CPU", None, "cuda_graphs=False"),
    ],
)
def test_the_reason(wish, obstacle, doubt, reason):
    assert wish.why_not(obstacle, doubt) == reason


def test_graphs_that_cannot_be_had_raise_when_asked_for():
    with pytest.raises(ConfigError, match="cuda_graphs=True, but on a CPU: leave it out"):
        GraphWish(True).why_not("on a CPU", None)
    with pytest.raises(ConfigError, match="compile=True, but on a CPU: leave it out"):
        GraphWish(None, compile=True).why_not("on a CPU", None)


@pytest.mark.parametrize(
    ("cuda_graphs", "compiled", "message"),
    [
        ("yes", False, "cuda_graphs must be True, False or None: got 'yes'"),
        (0, False, "cuda_graphs must be True, False or None: got 0"),
        (torch.tensor([1, 2]), False, "cuda_graphs must be True, False or None: got tensor"),
        (None, torch.tensor([1, 2]), "compile must be True or False: got tensor"),
        (None, "yes", "compile must be True or False: got 'yes'"),
        (False, True, "cuda_graphs=False leaves them out"),
    ],
)
def test_wishes_that_are_none(cuda_graphs, compiled, message):
    with pytest.raises(ConfigError, match=message):
        GraphWish(cuda_graphs, compiled)


@pytest.fixture
def model(tiny_llama):
    return tiny_llama(num_layers=2)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if the model were on a GPU, with kernels for it."""
    monkeypatch.setattr(graph_choice, "_machine_obstacles", lambda _: iter(()))
    monkeypatch.setattr(graph_choice, "decode_obstacle", lambda *_: None)


def test_a_cpu_is_an_obstacle(model):
    assert graph_obstacle(model, BATCH, {}) == "the model is on cpu"


def test_a_missing_kernel_is_an_obstacle(model, monkeypatch):
    monkeypatch.setattr(graph_choice, "_machine_obstacles", lambda _: iter(()))
    asked = []
    monkeypatch.setattr(graph_choice, "decode_obstacle", lambda *facts: asked.append(facts) or "no kernel")
    assert graph_obstacle(model, BATCH, {}) == "no kernel"
    assert asked == [(torch.float32, 16, 4)]


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"do_sample": True, "top_p": 0.9, "max_new_tokens": 50}, None),
        ({"num_beams": 1, "output_hidden_states": False}, None),
        ({"num_beams": 3}, "num_beams=3 reorders the cache"),
        ({"custom_generate": print}, "custom_generate has a loop of its own"),
        ({"penalty_alpha": 0.6}, "penalty_alpha has a loop of its own"),
        ({"output_hidden_states": True}, "output_hidden_states hands out what a replay writes over"),
        ({"inputs_of_mine": torch.ones(1)}, "inputs_of_mine is an input that changes"),
    ],
)
def test_options(model, options, reason):
    found = graph_obstacle(model, BATCH, options)
    assert found is None if reason is None else reason in found


@pytest.mark.usefixtures("on_a_gpu")
def test_inputs_beside_ids_and_mask(model):
    batch = BATCH | {"attention_mask": BATCH["input_ids"], "position_ids": BATCH["input_ids"]}
    assert graph_obstacle(model, batch, {}) is None
    assert "token_type_ids is an input" in graph_obstacle(model, batch | {"token_type_ids": BATCH["input_ids"]}, {})


@pytest.mark.usefixtures("on_a_gpu")
def test_what_a_model_may_be(model):
    assert graph_obstacle(model, BATCH, {}) is None
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert graph_obstacle(model, BATCH, {}) == "model.layers.1.mlp has a forward hook, which a replay would not call"
    hook.remove()
    model.train()
    assert graph_obstacle(model, BATCH, {}) == "the model is in training mode: call model.eval()"
    model.eval()
    model.model.layers[0]._compiled_call_impl = print  # what `compile` sets, without its import
    assert graph_obstacle(model, BATCH, {}) == "model.layers.0 is compiled"
    model.model.layers[0]._compiled_call_impl = None
    for kind, expected in (("llama3", None), ("longrope", "rope_type 'longrope'"), ("dynamic", "rope_type 'dynamic'")):
        model.config.rope_parameters = {"rope_type": kind}
        found = graph_obstacle(model, BATCH, {})
        assert found is None if expected is None else expected in found


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("is_on", [True, False])
def test_autocast(model, monkeypatch, is_on):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda" and is_on)
    assert ("autocast" in (graph_obstacle(model, BATCH, {}) or "")) == is_on


@pytest.mark.parametrize(
    ("options", "prompt", "new", "reason"),
    [
        ({}, 100, 32, None),
        ({}, 100, 31, "31 new tokens do not pay"),
        ({}, 60, 40, "no layer has to evict anything"),
        ({}, 60, 41, "no layer has to evict anything"),  # the last token is never fed back
        ({}, 60, 42, None),
        ({"budget": 0.5}, 60, 40, None),
        ({"decode": "grow"}, 100, 200, "no layer has to evict anything"),
        ({"decode": "grow"}, 101, 200, None),
        ({"num_full_layers": 4}, 1000, 40, "no layer has to evict anything"),
    ],
)
def test_doubts(tiny_llama, options, prompt, new, reason):
    config = tiny_llama(num_layers=4).config
    plan = LayerPlan.build(skv.SparseKVConfig(**{"budget": 100} | options), model_shape(config))
    found = graph_doubt(plan, config, prompt, new)
    assert found is None if reason is None else reason in found


def test_experts_are_a_doubt(model):
    plan = LayerPlan.build(skv.SparseKVConfig(budget=100), model_shape(model.config))
    model.config.num_experts = 8
    assert "experts" in graph_doubt(plan, model.config, 1000, 100)
