"""SparseKVCache on a GPU: with the compiled kernels it keeps and says what it keeps and says without them."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.switch import sparse_attention
from hf_sparsekv.ops import kernels
from hf_sparsekv.testing.models import tiny_llama

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
CONFIG = skv.SparseKVConfig(
    num_full_layers=1, budget=96, num_sink_tokens=4, num_recent_tokens=32, observation_window=32
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Head dim 64, bf16: what the kernels are built for."""
    return tiny_llama(4, 8, 2, head_dim=64, dtype=torch.bfloat16).cuda()


def prompt(length: int, batch: int = 1) -> torch.Tensor:
    """Random token ids int64 [batch, length]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 256, (batch, length), generator=generator).cuda()


def run(model: LlamaForCausalLM, ids: torch.Tensor, config: skv.SparseKVConfig) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits fp32 [B, new tokens, V] under forced tokens, so that two runs stay comparable, and the report."""
    cache = skv.SparseKVCache(model.config, config)
    forced = prompt(NEW_TOKENS, ids.shape[0])
    cache.expect_prompt(ids.shape[1])
    logits = []
    with sparse_attention(model), torch.no_grad():
        out = model(input_ids=ids, **{CACHE_KEYWORD: cache}, use_cache=True)
        for step in range(NEW_TOKENS):
            logits.append(out.logits[:, -1].float())
            out = model(input_ids=forced[:, step : step + 1], **{CACHE_KEYWORD: cache}, use_cache=True)
    return torch.stack(logits, 1), cache.report(positions=True)


def kept_share(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Of the positions that either run stored, the part that both did."""
    both = either = 0
    for one, other in zip(a["layers"], b["layers"], strict=True):
        for request, other_request in zip(one["positions"], other["positions"], strict=True):
            for head, other_head in zip(request, other_request, strict=True):
                both += len(set(head) & set(other_head))
                either += len(set(head) | set(other_head))
    return both / either


@pytest.mark.parametrize("scorer", ["snapkv", "hybrid", "h2o", "tova", "streaming_llm", "keydiff"])
@pytest.mark.parametrize("length", [40, 97, 700])
def test_kernels_agree_with_the_definition(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, scorer: str, length: int
) -> None:
    assert kernels.load() is not None, "build the kernels first: python kernels/build.py"
    config, ids = CONFIG.with_(scorer=scorer), prompt(length)
    logits, report = run(model, ids, config)
    monkeypatch.setattr(kernels, "load", lambda: None)
    by_definition, expected_report = run(model, ids, config)
    share = kept_share(report, expected_report)
    assert share >= 0.99, f"{share:.4f} of the stored positions agree"
    exact, _ = run(tiny_llama(4, 8, 2, head_dim=64).cuda(), ids, config)
    error, allowed = variation(logits, exact), variation(by_definition, exact)
    assert error <= 2 * allowed + 1e-3, f"{error:.4f} from fp32, the definition in bf16 {allowed:.4f}"


def variation(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean total variation between two models' next-token distributions."""
    return float((logits.softmax(-1) - exact.softmax(-1)).abs().sum(-1).mean() / 2)


def test_one_row_of_a_batch_is_the_row_alone(model: LlamaForCausalLM) -> None:
    ids = prompt(500, batch=3)
    logits, _ = run(model, ids, CONFIG)
    cache_alone, _ = run(model, ids[:1], CONFIG)
    # The forced tokens of row 0 differ between the two batches only in what the generator gives: compare the first.
    assert torch.allclose(logits[:1, 0], cache_alone[:, 0], atol=0.1, rtol=0.05)


def test_memory_of_the_prompt_is_given_back(model: LlamaForCausalLM) -> None:
    ids = prompt(3000, batch=4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = skv.SparseKVCache(model.config, CONFIG)
    cache.expect_prompt(ids.shape[1])
    with sparse_attention(model), torch.no_grad():
        model(input_ids=ids, **{CACHE_KEYWORD: cache}, use_cache=True, logits_to_keep=1)
    held, planned = torch.cuda.memory_allocated() - before, cache.report()["cache_bytes"]
    assert held < planned * 1.1 + 2**20
