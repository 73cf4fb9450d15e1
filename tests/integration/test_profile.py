"""Profiles of a tiny model against the sparse cache itself, and plans that `generate` and the engine keep to."""

import json

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.errors import ConfigError, ModelError
from hf_sparsekv.hf.observe import DenseRun, observed
from hf_sparsekv.hf.report import stored_positions
from hf_sparsekv.profile.attention import weight_chunks
from hf_sparsekv.scorers.base import TEMPORARY_BYTES

LENGTH, HELD_OUT = 120, 12
METHOD = {"num_sink_tokens": 2, "num_recent_tokens": 8, "observation_window": 8}
HYBRID = skv.SparseKVConfig(scorer="hybrid", **METHOD)


@pytest.fixture
def model(registered, tiny_llama):
    return tiny_llama(num_layers=3, attn_implementation="sparsekv")


@pytest.fixture
def ids():
    return torch.randint(3, 256, (1, LENGTH + HELD_OUT))


def measured(model, ids, config=HYBRID, **options):
    return skv.profile.measure(model, ids, config=config, num_held_out=HELD_OUT, has_progress=False, **options)


def continued(model, cache, ids):
    """Logits of the held-out tokens behind a cache that read the prompt; nothing is evicted while they are read."""
    prompt, rest = ids[:, :LENGTH], ids[:, LENGTH:]
    cache.expect_prompt(LENGTH)
    with torch.no_grad():
        model(prompt, use_cache=True, **{skv.CACHE_KEYWORD: cache})
        cache.expect_prompt(HELD_OUT + 1)
        return model(rest, use_cache=True, **{skv.CACHE_KEYWORD: cache}).logits.log_softmax(dim=-1)


@pytest.mark.parametrize("scorer", ["hybrid", "snapkv", "h2o", "keydiff", "expected_attention", "tova"])
def test_the_logits_of_one_cut_layer_are_those_of_a_cache_that_cuts_it(model, ids, scorer):
    config = skv.SparseKVConfig(scorer=scorer, **METHOD)
    profile = measured(model, ids, config, budgets=(20, 60), with_logits=True)
    dense = continued(model, skv.SparseKVCache(model.config, config.with_(num_full_layers=3)), ids)
    for layer in profile.layers:
        others = [i for i in range(3) if i != layer.layer_idx]
        for budget, kl in zip(profile.budgets, layer.logit_kl, strict=True):
            cut = config.with_(num_full_layers=None, full_layers=others, budget=budget)
            sparse = continued(model, skv.SparseKVCache(model.config, cut), ids)
            expected = float((dense.exp() * (dense - sparse)).sum(-1).mean())
            assert kl == pytest.approx(expected, rel=1e-3, abs=1e-6)
            assert kl > 1e-4


def test_the_output_error_is_that_of_attention_over_what_is_kept(model, ids):
    """By hand, from a layer's queries, keys and values and the positions that the real cache stores."""
    profile = measured(model, ids, budgets=(30,))
    cache = skv.SparseKVCache(model.config, HYBRID.with_(num_full_layers=0, budget=30), prompt_length=LENGTH)
    with torch.no_grad():
        model(ids[:, :LENGTH], use_cache=True, **{skv.CACHE_KEYWORD: cache})
    calls = []
    with observed(model, calls.append):
        DenseRun(model).read(ids)
    for layer, call in zip(profile.layers, calls, strict=True):
        errors = torch.zeros(2, 2, HELD_OUT)  # [whole or difference, KV head, row], squared
        for head in range(2):
            kept = stored_positions(cache.layers[layer.layer_idx].state, 0)[head]
            squares = torch.zeros(2, HELD_OUT)
            for row in range(HELD_OUT):
                seen = list(range(LENGTH + row + 1))
                left = [j for j in seen if j >= LENGTH or j in kept]
                for query_head in range(head * 4, head * 4 + 4):
                    outputs = []
                    for columns in (seen, left):
                        logits = call.key[0, head, columns] @ call.query[0, query_head, LENGTH + row] * call.scale
                        outputs.append(logits.softmax(-1) @ call.value[0, head, columns])
                    squares[0, row] += outputs[0].square().sum()
                    squares[1, row] += (outputs[1] - outputs[0]).square().sum()
            errors[:, head] = squares
            of_head = float((squares[1] / squares[0]).sqrt().mean())
            assert layer.heads[head].output_error[0] == pytest.approx(of_head, rel=1e-3)
        of_layer = float((errors[1].sum(0) / errors[0].sum(0)).sqrt().mean())
        assert layer.output_error[0] == pytest.approx(of_layer, rel=1e-3)


def test_curves_obey_their_laws(model, ids):
    profile = measured(model, ids)
    assert profile.budgets[0] == 10
    for layer in profile.layers:
        for head in layer.heads:
            for best, kept in zip(head.best_mass, head.kept_mass, strict=True):
                assert 0 <= kept <= best + 1e-6 <= 1 + 2e-6
            assert list(head.best_mass) == sorted(head.best_mass)
            assert 0 < head.entropy < torch.tensor(LENGTH + HELD_OUT).log()
        assert layer.output_error[-1] < layer.output_error[0]
        assert layer.logit_kl is None
        assert layer.peaks[0].magnitude >= layer.peaks[-1].magnitude > layer.median_magnitude


def test_several_texts_give_the_mean_of_each_alone(model):
    texts = torch.randint(3, 256, (2, LENGTH + HELD_OUT))
    both = measured(model, texts, budgets=(20, 40))
    one, other = (measured(model, text[None], budgets=(20, 40)) for text in texts)
    for layers in zip(both.layers, one.layers, other.layers, strict=True):
        errors = [torch.tensor(layer.output_error) for layer in layers]
        torch.testing.assert_close(errors[0], (errors[1] + errors[2]) / 2)
        entropies = [layer.heads[1].entropy for layer in layers]
        assert entropies[0] == pytest.approx((entropies[1] + entropies[2]) / 2)
    assert skv.profile.Profile.from_json(both.to_json()) == both


def test_nothing_stays_on_the_model_even_when_a_scorer_fails(model, ids):
    class Fails(skv.Scorer):
        name = "fails"
        queries = "none"

        def score(self, inputs):
            raise RuntimeError("no score")

    with pytest.raises(RuntimeError, match="no score"):
        measured(model, ids, skv.SparseKVConfig(scorer=Fails(), **METHOD))
    assert model.config._attn_implementation == "sparsekv"
    assert not any(module._forward_pre_hooks for module in model.modules())
    measured(model, ids, budgets=(20,))
    assert model.config._attn_implementation == "sparsekv"


def test_rows_come_in_chunks_of_bounded_size(model):
    sizes, positions = [], []

    def look(call):
        if call.layer_idx == 0:
            for rows, weights in weight_chunks(call):
                sizes.append(weights.nbytes)
                positions.extend(range(rows.start, rows.stop))
                assert torch.allclose(weights.sum(-1), torch.ones(()))

    with observed(model, look):
        DenseRun(model).read(torch.randint(3, 256, (1, 1500)))
    assert positions == list(range(1500))
    assert len(sizes) > 1
    assert max(sizes) <= TEMPORARY_BYTES


def test_a_pattern_is_the_attention_matrix_in_blocks(model, ids):
    pattern = skv.profile.attention_pattern(model, ids, num_blocks=11)  # 132 tokens: 12 a block
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    for found, whole in zip(pattern, weights, strict=True):
        blocks = whole[0].mean(0).view(11, 12, 11, 12).mean(1).sum(-1)
        torch.testing.assert_close(found, blocks, rtol=1e-3, atol=1e-5)
    with pytest.raises(ConfigError, match="num_blocks must be an int from 1 to 132"):
        skv.profile.attention_pattern(model, ids, num_blocks=133)


def test_a_surface_shows_the_residual_stream(model, ids):
    surface = skv.profile.activation_surface(model, ids, 1)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[1][0].abs()
    assert surface.magnitude.max() == hidden.max()
    assert surface.tokens_per_row == 2  # 132 tokens in at most 128 rows
    with pytest.raises(ConfigError, match="layer_idx must be an int from 0 to 2"):
        skv.profile.activation_surface(model, ids, 3)


def test_a_selection_is_what_the_cache_keeps(model, ids):
    config = HYBRID.with_(num_full_layers=1, budget=0.25)
    prompt = ids[:, :LENGTH]
    selection = skv.profile.prompt_selection(model, prompt, config)
    cache = skv.SparseKVCache(model.config, config, prompt_length=LENGTH)
    with torch.no_grad():
        model(prompt, use_cache=True, **{skv.CACHE_KEYWORD: cache})
    for kept, layer in zip(selection.kept, cache.layers, strict=True):
        stored = stored_positions(layer.state, 0)
        assert [sorted(positions) for positions in stored] == [mask.nonzero().flatten().tolist() for mask in kept]


@pytest.mark.parametrize("unit", ["tokens", "fraction"])
def test_generate_and_the_engine_keep_to_a_plan(model, ids, unit, tmp_path):
    profile = measured(model, ids)
    plan = skv.profile.make_plan(profile, target_bytes=70_000, element_bytes=4, unit=unit)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    config = HYBRID.with_(num_full_layers=None, budget_shape="calibrated", plan=path)
    prompt = ids[:, :LENGTH]
    out = skv.generate(model, prompt, config, max_new_tokens=6, do_sample=False, eos_token_id=None)
    kept = [max(layer["stored"]) for layer in out.report["layers"]]
    layers = skv.LayerPlan.build(config, profile.shape).layers
    expected = [LENGTH + 5 if spec.is_full else spec.kept_tokens(LENGTH) for spec in layers]
    assert kept == expected
    assert len(set(expected)) > 1
    assert out.report["cache_bytes"] <= 70_000 * 1.02  # full layers grow with the answer
    params = skv.SamplingParams(max_tokens=6, ignore_eos=True)
    with skv.Engine(model, config, skv.EngineConfig(kv_memory_bytes=2**21, max_num_seqs=2)) as engine:
        found = engine.generate([prompt[0].tolist()], params)[0]
    assert list(found.token_ids) == out.new_tokens[0].tolist()


def test_what_is_no_model_is_refused(ids):
    with pytest.raises(ModelError, match="model must be a causal language model"):
        skv.profile.measure("model", ids)


def test_the_plan_of_another_model_is_refused(model, tiny_llama, ids):
    plan = skv.profile.make_plan(measured(model, ids), target_bytes=70_000, element_bytes=4)
    config = skv.SparseKVConfig(budget_shape="calibrated", plan=plan, **METHOD)
    with pytest.raises(ConfigError, match="it has 3 layers, this model 4"):
        skv.generate(tiny_llama(num_layers=4), ids, config, max_new_tokens=2)
    assert json.loads(plan.to_json())["measured"]["objective"] == "residual_error"
