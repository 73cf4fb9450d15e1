"""Every attention backend that this GPU has, named, through the cache and through the engine: the same tokens are kept.

Of the first layer, whose queries and keys do not depend on attention, the choice is compared exactly; whole models
in bf16 by what they predict.
"""

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import hf_sparsekv as skv
from hf_sparsekv.attention import packed
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.switch import sparse_attention
from hf_sparsekv.ops.prefill_choice import prompt_problem
from hf_sparsekv.ops.prefill_table import BACKENDS
from hf_sparsekv.testing.compare import assert_close_fp32, assert_same_selection_up_to_near_ties
from hf_sparsekv.testing.models import tiny_llama

pytestmark = pytest.mark.gpu

LENGTH, CHUNK = 700, 128
CONFIG = skv.SparseKVConfig(
    num_full_layers=0, budget=96, num_sink_tokens=4, num_recent_tokens=32, observation_window=32, scorer="snapkv"
)
UNPOOLED = CONFIG.with_(pooling="none")
OPTIONS = skv.EngineConfig(kv_memory_bytes=256 * 2**20, max_num_seqs=4, compile=False, cuda_graphs=False)
NAMES = [backend.name for backend in BACKENDS if backend.device != "cpu"]
MAX_VARIATION = 1e-3
"""Of the mean total variation, beyond twice that of plain products in bf16."""


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that reads whole prompts here, or a skip that says why it does not."""
    return usable(request.param, is_whole=True)


def usable(name: str, *, is_whole: bool) -> str:
    row = next(row for row in BACKENDS if row.name == name)
    reason = row.refusal(prompt_problem("cuda", torch.bfloat16, 64, is_whole=is_whole))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return name


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(4, 8, 2, head_dim=64, dtype=torch.bfloat16).cuda()


def prompt(length: int = LENGTH, batch: int = 1) -> Tensor:
    """Random token ids int64 [batch, length]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 256, (batch, length), generator=generator)


def logits_of(model: LlamaForCausalLM, name: str, *, pads: int = 0) -> Tensor:
    """fp32 [B, V] after a prompt of which nothing is evicted, the first request padded on the left."""
    ids = prompt(batch=2).to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    cache = skv.SparseKVCache(model.config, CONFIG.with_(budget=2 * LENGTH), backend=name, prompt_length=LENGTH)
    with sparse_attention(model), torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, **{CACHE_KEYWORD: cache}, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1].float()


def variation(logits: Tensor, exact: Tensor) -> float:
    """Mean total variation between two models' next-token distributions."""
    return float((logits.softmax(-1) - exact.softmax(-1)).abs().sum(-1).mean() / 2)


@pytest.mark.parametrize("pads", [0, 200])
def test_a_prompt_reads_the_same(model: LlamaForCausalLM, backend: str, pads: int) -> None:
    exact = logits_of(tiny_llama(4, 8, 2, head_dim=64).to(model.device), "reference", pads=pads)
    error, allowed = (variation(logits_of(model, name, pads=pads), exact) for name in (backend, "eager"))
    assert error <= 2 * allowed + MAX_VARIATION, f"{error:.5f} from fp32, eager in bf16 {allowed:.5f}"


def test_generate_keeps_the_same_tokens_in_the_first_layer(model: LlamaForCausalLM, backend: str) -> None:
    """Their scores are made of the same queries and keys, by the same pass."""
    kept = []
    for name in (backend, "reference"):
        settings = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = skv.generate(model, prompt().to(model.device), CONFIG, backend=name, **settings)
        kept.append(out.cache.report(positions=True)["layers"][0]["positions"])
    assert kept[0] == kept[1]


def first_selection(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """(scores fp32 [1, K, N], kept positions [1, K, C]) of the first layer, by the engine."""
    seen: list[tuple[Tensor, Tensor]] = []

    def noted(scores: Tensor, *given: object) -> packed.Kept:
        kept = select_kept(scores, *given)
        seen.append((scores.clone(), kept.index.clone()))
        return kept

    select_kept = packed.select_kept
    with monkeypatch.context() as patch:
        patch.setattr(packed, "select_kept", noted)
        with skv.Engine(model, UNPOOLED, OPTIONS.with_(backend=name, prefill_chunk_tokens=chunk)) as engine:
            (output,) = engine.generate([prompt()[0].tolist()], skv.SamplingParams(max_tokens=2, ignore_eos=True))
    assert output.error is None and len(output.token_ids) == 2
    return seen[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [None, CHUNK])
def test_the_engine_scores_and_keeps_the_same_in_the_first_layer(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int | None
) -> None:
    """By the LSE that the backend returned, where it returned one."""
    usable(name, is_whole=False)
    scores, index = first_selection(model, monkeypatch, name, chunk)
    expected, expected_index = first_selection(model, monkeypatch, "reference", chunk)
    assert_close_fp32(scores, expected)
    assert_same_selection_up_to_near_ties(index, expected_index, expected)
