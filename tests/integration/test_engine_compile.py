"""Compiled layers: what one engine compiled serves the next ones, however many there are."""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_sparsekv as skv
from hf_sparsekv.testing.models import tiny_llama

CONFIG = skv.SparseKVConfig(num_full_layers=1, budget=16, num_sink_tokens=2, num_recent_tokens=4, observation_window=4)
NUM_ENGINES = 10
"""More than the compilations of one function after which torch gives up and runs it as it is."""


def test_engines_one_after_the_other_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The backend that only traces: what counts here is how often.
    monkeypatch.setattr(LlamaDecoderLayer, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    model = tiny_llama(3, 4, 2)
    graphs, tokens = [], set()
    for _ in range(NUM_ENGINES):
        options = skv.EngineConfig(kv_memory_bytes=2**20, compile=True)
        with skv.Engine(model, CONFIG, options) as engine:
            outputs = engine.generate([list(range(1, 30)), list(range(3, 12))], skv.SamplingParams(max_tokens=6))
        tokens.add(tuple(tuple(output.token_ids) for output in outputs))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1:] == graphs[1:2] * (NUM_ENGINES - 1)
    assert not counters["recompile_limit"]
    assert len(tokens) == 1
