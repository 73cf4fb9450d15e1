"""Whichever backend reads the prompt, and wherever full and window layers stand, the cache keeps the same.

Guards against masks taken from the first layer's length, backends that score another thing, an LSE taken from one that
hides it, and names that are accepted and then not obeyed.
"""

from dataclasses import replace

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv import ops
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.ops import prefill, prefill_backends, prefill_choice
from hf_sparsekv.ops.prefill_table import BACKENDS
from hf_sparsekv.scorers import scorer_names
from hf_sparsekv.testing.compare import assert_same_up_to_rounding
from hf_sparsekv.testing.models import tiny_llama
from hf_sparsekv.testing.oracle import Oracle, forward_both

pytestmark = pytest.mark.usefixtures("registered")

NAMES = [backend.name for backend in BACKENDS if backend.device != "cuda"]
METHOD = {"budget": 24, "num_recent_tokens": 8, "observation_window": 8}
LENGTH = 90
CHUNK = 32
OPTIONS = skv.EngineConfig(kv_memory_bytes=16 << 20, max_num_seqs=4, max_batch_tokens=256, max_model_len=256)
GREEDY = skv.SamplingParams(max_tokens=8, ignore_eos=True)
SETTINGS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    """With heads that torch's flash attention takes."""
    return tiny_llama(num_layers=3, head_dim=32)


@pytest.fixture
def taken(monkeypatch):
    """Who took a call, in order."""
    names = []

    def noted(problem):
        backend = prefill_choice.choose(problem)
        names.append(backend.name)
        return backend

    monkeypatch.setattr(prefill, "choose", noted)
    return names


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("full_layers", [(0,), (2,), (0, 2), ()])
@pytest.mark.parametrize("pads", [(0, 0, 0), (50, 7, 0), (-50, -7, 0)], ids=["no padding", "left", "right"])
def test_layers_of_different_length_get_their_own_masks(backend, full_layers, pads):
    model = tiny_llama(num_layers=3, head_dim=32, attn_implementation="sparsekv")
    config = skv.SparseKVConfig(**METHOD, full_layers=full_layers)
    cache, oracle = skv.SparseKVCache(model.config, config, backend=backend), Oracle(model)
    columns = torch.ones(3, LENGTH, dtype=torch.bool)
    for row, count in enumerate(pads):
        columns[row, slice(0, count) if count > 0 else slice(LENGTH + count, LENGTH)] = False
    for length in (LENGTH, 1, 1, 9, 1, 1):
        if length < LENGTH:
            columns = torch.cat([columns, torch.ones(3, length, dtype=torch.bool)], dim=1)
        ids = torch.randint(3, 256, (3, length))
        sparse, dense = forward_both(model, cache, oracle, ids, columns)
        is_token = columns[:, -length:]
        assert_same_up_to_rounding(sparse[is_token], dense[is_token])
    assert cache.report()["evicted_at_prompt"] > 0
    assert cache.report()["backend"] == backend


def read(model, config, backend, ids, step):
    """(logits after the prompt, kept positions) of a prompt that is read in pieces."""
    model.set_attn_implementation("sparsekv")
    cache = skv.SparseKVCache(model.config, config, backend=backend, prompt_length=ids.shape[1])
    for start in range(0, ids.shape[1], step):
        with torch.no_grad():
            output = model(input_ids=ids[:, start : start + step], use_cache=True, **{CACHE_KEYWORD: cache})
    kept = {
        (layer["layer"], row, head, position)
        for layer in cache.report(positions=True)["layers"][1:]
        for row, heads in enumerate(layer["positions"])
        for head, positions in enumerate(heads)
        for position in positions
    }
    return output.logits[:, -1], kept


@pytest.mark.parametrize(
    ("scorer", "how"),
    [(name, "whole") for name in scorer_names()]
    + [(name, how) for name in ("hybrid", "snapkv", "h2o") for how in ("in chunks", "bounded")],
)
def test_backends_keep_the_same_tokens(scorer, how):
    """At least 99 % of them: backends may round differently, but not choose differently."""
    model = tiny_llama(num_layers=6, head_dim=32)
    ids = torch.randint(3, 256, (2, 300))
    config = skv.SparseKVConfig(num_full_layers=1, budget=64, scorer=scorer)
    if how == "bounded":
        config = config.with_(prefill="bounded", prefill_chunk_tokens=100)
    results = [read(model, config, name, ids, 300 if how == "whole" else 100) for name in (None, *NAMES)]
    logits, kept = results[0]
    assert len(kept) == 5 * 2 * 2 * 64
    for other_logits, other in results[1:]:
        assert len(other) == len(kept)
        assert len(other & kept) >= 0.99 * len(kept)
        if how != "bounded" or other == kept:  # what was kept is read by later chunks only there
            assert_same_up_to_rounding(other_logits, logits)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("padded", [False, True])
def test_generate_reads_the_prompt_by_the_backend_that_is_named(model, taken, backend, padded):
    ids = torch.randint(3, 256, (2, LENGTH))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :30] = 0
    config = skv.SparseKVConfig(**METHOD, num_full_layers=1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    out = skv.generate(model, inputs, config, backend=backend, **SETTINGS)
    by_transformers = {"sdpa", "eager"}
    assert set(taken) == ({backend} - by_transformers)
    expected = skv.generate(model, inputs, config, **SETTINGS)
    assert out.new_tokens.tolist() == expected.new_tokens.tolist()
    taken.clear()
    bounded = config.with_(prefill="bounded", prefill_chunk_tokens=CHUNK)
    out = skv.generate(model, ids, bounded, backend=backend, **SETTINGS)
    assert set(taken) == {backend}
    assert out.new_tokens.tolist() == skv.generate(model, ids, bounded, **SETTINGS).new_tokens.tolist()


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("chunk", [None, CHUNK])
@pytest.mark.parametrize("how", ["exact", "bounded"])
def test_the_engine_reads_prompts_by_the_backend_that_is_named(model, taken, monkeypatch, backend, chunk, how):
    companion = []
    window_lse = ops.window_lse
    monkeypatch.setattr(ops, "window_lse", lambda *given: companion.append(1) or window_lse(*given))
    config = skv.SparseKVConfig(**METHOD, num_full_layers=1, scorer="snapkv")
    if how == "bounded":
        config = config.with_(prefill="bounded", prefill_chunk_tokens=CHUNK)
    prompts = [torch.randint(3, 256, (length,)).tolist() for length in (1, 30, 90, 140)]
    with skv.Engine(model, config, OPTIONS.with_(backend=backend, prefill_chunk_tokens=chunk)) as engine:
        outputs = engine.generate(prompts, GREEDY)
    assert set(taken) == {backend}
    gives_lse = next(row for row in BACKENDS if row.name == backend).lse is not None
    if chunk is None and how == "exact":  # later chunks have no LSE of the prompt's last rows over all its keys
        assert (not companion) == gives_lse
    for prompt, output in zip(prompts, outputs, strict=True):
        alone = skv.generate(model, torch.tensor([prompt]), config, **SETTINGS)
        assert output.token_ids == tuple(alone.new_tokens[0].tolist())


@pytest.mark.parametrize("scorer", ["snapkv", "hybrid"])
def test_scoring_behind_flashinfer_is_by_an_lse_of_our_own(model, monkeypatch, scorer):
    """A stand-in, on this CPU, that has no keyword for the LSE: whoever asks it for one gets an error."""

    def attend(q, k, v, *, causal, sm_scale, backend):
        asked.append(len(q))
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return ops.reference.attention(q, k, v, sm_scale, None, causal)[0][0].transpose(0, 1)

    asked, companion = [], []
    here = {"device": None, "compute_capabilities": None, "dtypes": None, "head_dims": None, "missing": lambda: None}
    rows = tuple(replace(row, **here) if row.name == "flashinfer" else row for row in BACKENDS)
    monkeypatch.setattr(prefill_choice, "BACKENDS", rows)
    monkeypatch.setattr(prefill_backends, "attention_function", lambda module: attend)
    config = skv.SparseKVConfig(**METHOD, scorer=scorer)
    prompts = [torch.randint(3, 256, (length,)).tolist() for length in (30, 90, 140)]
    expected = [skv.generate(model, torch.tensor([prompt]), config, **SETTINGS).new_tokens[0] for prompt in prompts]
    window_lse = ops.window_lse
    monkeypatch.setattr(ops, "window_lse", lambda *given: companion.append(1) or window_lse(*given))
    with skv.Engine(model, config, OPTIONS.with_(backend="flashinfer")) as engine:
        outputs = engine.generate(prompts, GREEDY)
    assert set(asked) == {30, 90, 140} and companion
    for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
        assert output.token_ids == tuple(tokens.tolist())
        alone = skv.generate(model, torch.tensor([prompt]), config, backend="flashinfer", **SETTINGS)
        assert alone.new_tokens[0].tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("flash", ["no such backend", "one of: "]),
        ("torch_flash", ["torch_flash runs on cuda", "one of: torch_cpu, sdpa"]),
    ],
)
def test_a_backend_that_cannot_be_had_is_refused_before_anything_runs(model, monkeypatch, backend, words):
    def no_forward(*_, **__):
        raise AssertionError("the model ran")

    monkeypatch.setattr(model.model, "forward", no_forward)
    before = model.config._attn_implementation
    with pytest.raises(ConfigError) as raised:
        skv.generate(model, torch.tensor([[3, 4, 5]]), backend=backend, **SETTINGS)
    refusals = [raised]
    with pytest.raises(ConfigError) as raised:
        skv.Engine(model, None, OPTIONS.with_(backend=backend))
    refusals.append(raised)
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, backend)
    with pytest.raises(ConfigError) as raised:
        skv.generate(model, torch.tensor([[3, 4, 5]]), **SETTINGS)
    refusals.append(raised)
    for refusal in refusals:
        assert all(word in str(refusal.value) for word in [backend, *words])
    assert model.config._attn_implementation == before


def test_a_cache_has_its_backend_already(model):
    cache = skv.SparseKVCache(model.config, backend="eager")
    with pytest.raises(ConfigError, match="backend= is for a new cache"):
        skv.generate(model, torch.tensor([[3, 4, 5]]), cache=cache, backend="sdpa", **SETTINGS)
    assert skv.generate(model, torch.tensor([[3, 4, 5]]), cache=cache, **SETTINGS).report["backend"] == "eager"


def test_the_environment_names_the_backend_of_everything(model, taken, monkeypatch):
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, "reference")
    ids = torch.randint(3, 256, (1, LENGTH))
    config = skv.SparseKVConfig(**METHOD)
    assert skv.generate(model, ids, config, **SETTINGS).report["backend"] == "reference"
    with skv.Engine(model, config, OPTIONS) as engine:
        engine.generate([ids[0].tolist()], GREEDY)
    assert set(taken) == {"reference"}
