"""`generate` on a GPU: decode steps by CUDA graphs give the tokens and the caches of plain ones."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import hf_sparsekv as skv
from hf_sparsekv.hf import graphs
from hf_sparsekv.testing.compare import assert_logits_policy
from hf_sparsekv.testing.models import tiny_llama

pytestmark = pytest.mark.gpu

NEW_TOKENS = 48
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
WINDOWS = skv.SparseKVConfig(budget=96, num_sink_tokens=4, num_recent_tokens=32, observation_window=32)
"""No full layer: every launch of attention is the same kernel either way, so results are equal bit by bit."""
NEWEST = skv.SparseKVConfig(budget=96, num_sink_tokens=4, num_recent_tokens=32, scorer="streaming_llm")
"""Keeps by position alone, so that runs that round otherwise keep the same."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(4, 8, 2, head_dim=64, dtype=torch.bfloat16).cuda()


def prompts(pads: tuple[int, ...], length: int = 300) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(pads))
    ids = torch.randint(3, 256, (len(pads), length), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


def both(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], config: skv.SparseKVConfig, **options: Any):
    outputs = []
    for cuda_graphs in (False, True):
        torch.manual_seed(5)
        outputs.append(skv.generate(model, batch, config, cuda_graphs=cuda_graphs, **GREEDY | options))
    assert [out.report["decoding"]["cuda_graphs"] for out in outputs] == [False, True]
    return outputs


def assert_same(one: Any, two: Any) -> None:
    assert torch.equal(one.sequences, two.sequences)
    assert one.cache.report(positions=True) == two.cache.report(positions=True)


@pytest.mark.parametrize("pads", [(0,), (0,) * 8, (200, 5, 0)], ids=["one", "eight", "padded"])
@pytest.mark.parametrize("decode", ["replace_lowest", "ring", "grow"])
def test_replays_are_plain_steps_bit_by_bit(model: LlamaForCausalLM, pads: tuple[int, ...], decode: str) -> None:
    assert_same(*both(model, prompts(pads), WINDOWS.with_(decode=decode)))


def test_a_seed_draws_the_same_tokens(model: LlamaForCausalLM) -> None:
    assert_same(*both(model, prompts((0, 0)), WINDOWS, do_sample=True, temperature=0.8, top_p=0.9))


def test_a_capture_without_room_left_is_made_anew(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LONGEST_CAPTURE", 20)
    assert_same(*both(model, prompts((200, 5, 0)), WINDOWS.with_(decode="grow")))


def test_requests_that_end_early(model: LlamaForCausalLM) -> None:
    free = skv.generate(model, prompts((0, 0)), WINDOWS, **GREEDY).new_tokens
    assert_same(*both(model, prompts((0, 0)), WINDOWS, eos_token_id=[int(free[0, 7]), int(free[1, 20])]))


def forced(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], config: skv.SparseKVConfig, **choice: bool):
    """(logits [steps, B, V], kept positions) of a run whose new tokens are the same for every model."""
    logits: list[torch.Tensor] = []

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logits.append(scores.clone())
        return torch.zeros_like(scores).index_fill_(1, torch.tensor([len(logits) + 3], device=scores.device), 1.0)

    out = skv.generate(model, batch, config, logits_processor=[force], **choice, **GREEDY)
    assert out.report["decoding"]["cuda_graphs"] == choice["cuda_graphs"]
    return torch.stack(logits), [layer.get("positions") for layer in out.cache.report(positions=True)["layers"]]


@pytest.mark.parametrize("pads", [(0,), (200, 5, 0)], ids=["one", "padded"])
@pytest.mark.parametrize(("num_full_layers", "compiled"), [(2, False), (0, True), (2, True)])
def test_other_kernels_of_full_and_of_compiled_layers_are_as_close_to_fp32(
    model: LlamaForCausalLM, pads: tuple[int, ...], num_full_layers: int, compiled: bool
) -> None:
    batch, config = prompts(pads), NEWEST.with_(num_full_layers=num_full_layers)
    exact, exact_kept = forced(deepcopy(model).float(), batch, config, cuda_graphs=False)
    plain, plain_kept = forced(model, batch, config, cuda_graphs=False)
    graphs_logits, kept = forced(model, batch, config, cuda_graphs=True, compile=compiled)
    assert kept == plain_kept == exact_kept, "they read other keys"
    assert_logits_policy(graphs_logits, exact, plain)


def test_the_default_takes_graphs_and_leaves_a_cache_to_go_on_with(model: LlamaForCausalLM) -> None:
    batch = prompts((0,))
    answers = []
    for cuda_graphs in (False, None):
        first = skv.generate(model, batch, WINDOWS, cuda_graphs=cuda_graphs, **GREEDY)
        ids = torch.cat([first.sequences, batch["input_ids"][:, :50]], dim=1)
        answers.append(skv.generate(model, ids, cache=first.cache, cuda_graphs=cuda_graphs, **GREEDY))
    assert answers[1].report["decoding"] == {"cuda_graphs": True, "reason": None, "steps": NEW_TOKENS - 1}
    assert_same(*answers)


def test_what_cannot_be_captured_is_launched(model: LlamaForCausalLM) -> None:
    class Asks(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            assert float(hidden.float().abs().sum()) >= 0.0
            output: torch.Tensor = self.inner(hidden)
            return output

    plain = skv.generate(model, prompts((0,)), WINDOWS, cuda_graphs=False, **GREEDY)
    original = model.model.norm
    model.model.norm = Asks(original)
    try:
        out = skv.generate(model, prompts((0,)), WINDOWS, **GREEDY)
        with pytest.raises(skv.ConfigError, match="cannot be captured"):
            skv.generate(model, prompts((0,)), WINDOWS, cuda_graphs=True, **GREEDY)
    finally:
        model.model.norm = original
    assert "cannot be captured" in out.report["decoding"]["reason"]
    assert_same(plain, out)
    assert_same(*both(model, prompts((0,)), WINDOWS))  # the next one captures as ever


def test_threads_share_a_model(model: LlamaForCausalLM) -> None:
    batches = [prompts((0,), length) for length in (150, 200, 250, 300)]
    alone = [skv.generate(model, batch, WINDOWS, cuda_graphs=False, **GREEDY).sequences for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(
            pool.map(lambda batch: skv.generate(model, batch, WINDOWS, cuda_graphs=True, **GREEDY).sequences, batches)
        )
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_no_memory_stays_behind(model: LlamaForCausalLM) -> None:
    def held() -> int:
        skv.generate(model, prompts((0,)), WINDOWS, cuda_graphs=True, **GREEDY)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    held()  # the kernels' workspace stays
    first = held()
    assert [held() for _ in range(3)] == [first] * 3
