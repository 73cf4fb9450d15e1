"""A prompt that is read once gives every configuration what a cache of its own would have given it.

Guards against a score of another layer, prompt or configuration, against a fork that sees what it does not keep or
another fork's tokens, and against figures that a real cache would not report.
"""

import pytest
import torch
from torch import Tensor

import hf_sparsekv as skv
from evals.forks import ATTENTION_NAME
from evals.scoring import Context, SparseScorer
from evals.shared_prefill import SharedPrefill
from hf_sparsekv.errors import ConfigError, InputError, ScoreError
from hf_sparsekv.hf.cache_adapter import SparseKVCache
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.switch import sparse_attention
from hf_sparsekv.scorers import Pooling, Scorer, scorer_names
from hf_sparsekv.testing.compare import ERROR_FACTOR, MAX_LOGITS_RELATIVE_ERROR, assert_same_selection
from hf_sparsekv.testing.models import tiny_llama, tiny_qwen2

LENGTH, QUESTION = 150, 9
SMALL = {"num_recent_tokens": 8, "observation_window": 8}
CONTINUATIONS = ((1, 2, 3), (1, 2, 4), (7,), (9, 8), (1, 6, 6, 6))
MODELS = {
    "llama": lambda: tiny_llama(num_layers=3),
    "odd groups": lambda: tiny_qwen2(num_layers=3, num_heads=9, num_kv_heads=3, head_dim=8),
}


def tokens(count, seed):
    return tuple(torch.randint(3, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


DOCUMENT, ASKED = tokens(LENGTH, 1), tokens(QUESTION, 2)


def configurations():
    """Every scorer with budgets of every kind, full layers, a pyramid, and what evicts nothing."""
    made = {"dense": skv.SparseKVConfig(num_full_layers=3), "large": skv.SparseKVConfig(budget=1000)}
    for scorer in scorer_names():
        made[f"{scorer} int"] = skv.SparseKVConfig(scorer=scorer, budget=24, num_full_layers=0, **SMALL)
        made[f"{scorer} fraction"] = skv.SparseKVConfig(scorer=scorer, budget=0.4, full_layers=(1,), **SMALL)
        made[f"{scorer} list"] = skv.SparseKVConfig(scorer=scorer, budget=(0.5, 30, 155), num_full_layers=0, **SMALL)
    pyramid = {"budget": 30, "budget_shape": "pyramid", "num_full_layers": 0}
    made["pyramid"] = skv.SparseKVConfig(**pyramid, **SMALL)
    one_row = {"num_recent_tokens": 1, "observation_window": 1}
    made["one row"] = skv.SparseKVConfig(budget=20, num_full_layers=0, row_reduction="max", **one_row)
    made["long window"] = skv.SparseKVConfig(budget=50, num_full_layers=0, num_recent_tokens=40, observation_window=40)
    norm = {"scorer_options": {"value_norm": True}, "group_reduction": "max", "pooling": "max"}
    made["norm"] = skv.SparseKVConfig(budget=20, num_full_layers=0, **norm, **SMALL)
    for name, options in {
        "h2o": {},
        "keyformer": {},
        "keyformer warm": {"scorer_options": {"temperature": 2.0}},
    }.items():
        options = {"scorer": name.split()[0], "group_reduction": "max", "num_full_layers": 0} | options
        made[f"{name} max"] = skv.SparseKVConfig(budget=20, **options, **SMALL)
    made["grow"] = skv.SparseKVConfig(budget=20, num_full_layers=0, decode="grow", **SMALL)
    return made


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def prefill(model):
    return SharedPrefill(model, configurations())


@pytest.fixture(scope="module", params=["agnostic", "aware"])
def read(request, prefill):
    """A prompt, the tokens that it consists of, and its tail."""
    document = prefill.read(DOCUMENT)
    if request.param == "agnostic":
        return document, DOCUMENT, ASKED
    return document.extend(ASKED[:-1]), DOCUMENT + ASKED[:-1], ASKED[-1:]


def assert_same_scores(found, expected):
    assert found.footprint == expected.footprint
    for score, reference in zip(found.scores, expected.scores, strict=True):
        assert score.log_likelihood == pytest.approx(reference.log_likelihood, rel=MAX_LOGITS_RELATIVE_ERROR)
        assert (score.is_greedy, score.num_greedy) == (reference.is_greedy, reference.num_greedy)


def kept_by_a_cache(model, config, head) -> list[Tensor]:
    """Positions [K, C] of each layer of a real cache after its prompt."""
    cache = SparseKVCache(model.config, config, prompt_length=len(head))
    with sparse_attention(model), torch.no_grad():
        model(torch.tensor([head]), **{CACHE_KEYWORD: cache}, use_cache=True)
    return [torch.tensor(layer["positions"][0]) for layer in cache.report(positions=True)["layers"]]


def test_every_configuration_scores_as_with_a_cache_of_its_own(model, prefill, read):
    prompt, head, tail = read
    results = prompt.score(tail, CONTINUATIONS)
    assert list(results) == list(prefill.configs)
    for name, config in prefill.configs.items():
        scorer = SparseScorer(model, config, batch_size=8, softmax_dtype=torch.float32)
        assert_same_scores(results[name], scorer.score([Context(head, tail, CONTINUATIONS)])[0])
    assert len({r.scores[0].log_likelihood for r in results.values()}) > len(results) // 2  # they do differ


def test_every_configuration_keeps_what_a_cache_of_its_own_keeps(model, prefill, read):
    prompt, head, _ = read
    for name, kept in prompt.kept().items():
        for layer_idx, expected in enumerate(kept_by_a_cache(model, prefill.configs[name], head)):
            count = kept.counts[layer_idx]
            assert count == expected.shape[1]
            everything = torch.arange(len(head)).expand(expected.shape[0], -1)
            index = everything if kept.index is None else kept.index[layer_idx, :, :count]
            assert_same_selection(index, expected)


def test_the_dense_cache_is_the_dense_model(model, prefill, read):
    prompt, head, tail = read
    found = prompt.score(tail, CONTINUATIONS, ["dense", "large"])
    assert found["dense"].scores == found["large"].scores
    for score, continuation in zip(found["dense"].scores, CONTINUATIONS, strict=True):
        before = len(head + tail)
        with torch.no_grad():
            logits = model(torch.tensor([head + tail + continuation])).logits[0, before - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None]).sum()
        assert score.log_likelihood == pytest.approx(float(expected), rel=MAX_LOGITS_RELATIVE_ERROR)
        assert score.num_greedy == int((logits.argmax(-1) == torch.tensor(continuation)).sum())


@pytest.mark.parametrize("tail", [(), (5, 6)])
@pytest.mark.parametrize("head", [DOCUMENT, DOCUMENT[:1]])
def test_tails_and_prompts_of_any_length(head, tail):
    """An empty tail: the first token is predicted from before any eviction, as `SparseScorer` does."""
    model = MODELS["llama"]()
    configs = {name: c for name, c in configurations().items() if name in ("dense", "hybrid int", "h2o fraction")}
    continuations = (tokens(30, 3), (4,))
    results = SharedPrefill(model, configs).read(head).score(tail, continuations)
    for name, config in configs.items():
        scorer = SparseScorer(model, config, softmax_dtype=torch.float32)
        assert_same_scores(results[name], scorer.score([Context(head, tail, continuations)])[0])


def test_passes_and_groups_change_nothing(monkeypatch):
    model, configs = MODELS["llama"](), configurations()
    whole = SharedPrefill(model, configs).read(DOCUMENT).score(ASKED, CONTINUATIONS)
    monkeypatch.setattr("evals.forks.GROUP_BYTES", 1)
    monkeypatch.setattr("evals.score_stacks.STACK_BYTES", 1)
    monkeypatch.setattr("evals.all_rows.CHUNK_BYTES", 50_000)  # eight rows of the many, and fewer at the end
    pieces = SharedPrefill(model, configs, pass_bytes=1).read(DOCUMENT).score(ASKED, CONTINUATIONS)
    for name in configs:
        assert_same_scores(pieces[name], whole[name])


def test_a_document_takes_several_questions_and_stays_as_it_is(prefill):
    document = prefill.read(DOCUMENT)
    alone = document.score(ASKED, CONTINUATIONS, ["hybrid int", "h2o int"])
    first = document.extend(ASKED[:4]).extend(ASKED[4:-1]).score(ASKED[-1:], CONTINUATIONS)
    document.extend(tokens(20, 4)).score((1,), CONTINUATIONS)
    again = document.extend(ASKED[:-1]).score(ASKED[-1:], CONTINUATIONS)
    for name in prefill.configs:
        assert_same_scores(again[name], first[name])
    assert document.score(ASKED, CONTINUATIONS, ["h2o int", "hybrid int"]) == alone


class _Layers(Scorer):
    """Keeps the first tokens of even layers and the last ones of odd layers; or answers nonsense in layer 2."""

    name = "by-layer"
    queries = "none"
    is_query_aware = False
    default_pooling = Pooling()

    def __init__(self, bad=None):
        self.bad = bad

    def __eq__(self, other):
        return type(other) is _Layers and other.bad == self.bad

    __hash__ = None

    def score(self, inputs):
        score = inputs.key_positions().float() * (-1.0) ** inputs.layer_idx
        if inputs.layer_idx == 2 and self.bad is not None:
            score[..., 5] = self.bad
        return score


def test_a_scorer_that_asks_for_its_layer_is_told():
    model = MODELS["llama"]()
    config = skv.SparseKVConfig(scorer=_Layers(), budget=20, num_full_layers=0, **SMALL)
    kept = SharedPrefill(model, {"own": config}).read(DOCUMENT).kept()["own"]
    for layer_idx, expected in enumerate(kept_by_a_cache(model, config, DOCUMENT)):
        assert_same_selection(kept.index[layer_idx], expected)


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity"), (1e35, "scale them")])
def test_scores_that_rank_nothing_are_refused_by_layer(value, word):
    config = skv.SparseKVConfig(scorer=_Layers(value), budget=20, num_full_layers=0, **SMALL)
    prompt = SharedPrefill(MODELS["llama"](), {"own": config}).read(DOCUMENT)
    with pytest.raises(ScoreError, match=f"'by-layer', layer 2: .*{word}"):
        prompt.score(ASKED, CONTINUATIONS)


def test_mistakes_are_named(prefill, model):
    with pytest.raises(InputError, match="at least one token"):
        prefill.read(())
    prompt = prefill.read(DOCUMENT[:20])
    with pytest.raises(InputError, match="named 'absent'"):
        prompt.score(ASKED, CONTINUATIONS, ["absent"])
    for continuations in ((), ((1,), ())):
        with pytest.raises(InputError, match="at least one"):
            prompt.score(ASKED, continuations)
    assert model.config._attn_implementation != ATTENTION_NAME  # what was lent came back


def test_bfloat16_scores_are_as_near_to_fp32_as_those_of_a_cache_of_its_own():
    model = tiny_llama(num_layers=2, dtype=torch.bfloat16)
    config = skv.SparseKVConfig(scorer="streaming_llm", budget=40, num_full_layers=0)  # rounding moves no choice
    found = SharedPrefill(model, {"c": config}).read(DOCUMENT).score(ASKED, CONTINUATIONS)["c"]
    scorer = SparseScorer(model, config, softmax_dtype=torch.float32)
    own = scorer.score([Context(DOCUMENT, ASKED, CONTINUATIONS)])[0]
    assert found.footprint == own.footprint
    exact = SharedPrefill(model.float(), {"c": config}).read(DOCUMENT).score(ASKED, CONTINUATIONS)["c"]
    values, own_values, reference = (
        torch.tensor([score.log_likelihood for score in result.scores]) for result in (found, own, exact)
    )
    rounding = (reference - reference.bfloat16().float()).abs().max()
    allowed = ERROR_FACTOR * (own_values - reference).abs().max() + 2 * rounding
    assert (values - reference).abs().max() <= allowed


def test_a_bounded_prefill_is_refused_by_name():
    config = skv.SparseKVConfig(budget=20, prefill="bounded", prefill_chunk_tokens=16, **SMALL)
    with pytest.raises(ConfigError, match=r"'mine' has prefill='bounded'.*SparseScorer"):
        SharedPrefill(MODELS["llama"](), {"mine": config})
