"""The engine on a GPU: graphs and compiled layers change nothing but the time."""

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_sparsekv as skv
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.engine import Engine
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.testing.models import tiny_llama

pytestmark = pytest.mark.gpu

CONFIG = skv.SparseKVConfig(
    num_full_layers=1, budget=96, num_sink_tokens=4, num_recent_tokens=32, observation_window=32
)
MEMORY = 256 * 2**20
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)


def model_of(dtype: torch.dtype) -> LlamaForCausalLM:
    return tiny_llama(4, 8, 2, head_dim=64, dtype=dtype).cuda()


def prompts(lengths: tuple[int, ...] = (1, 31, 96, 97, 300, 700, 64, 5, 1024)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in lengths]


def tokens(model: LlamaForCausalLM, config: skv.SparseKVConfig, params: SamplingParams = GREEDY, **options: object):
    settings = {"kv_memory_bytes": MEMORY, "compile": False, "cuda_graphs": False} | options
    with Engine(model, config, EngineConfig(**settings)) as engine:
        outputs = engine.generate(prompts(), params)
        assert engine._blocks.num_free == engine._blocks.num_usable
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("decode", ["replace_lowest", "ring", "grow"])
def test_engine_is_generate_in_fp32(decode: str) -> None:
    model, config = model_of(torch.float32), CONFIG.with_(decode=decode)
    expected = []
    for prompt in prompts():
        ids = torch.tensor([prompt]).cuda()
        out = skv.generate(model, ids, config, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(tuple(out.new_tokens[0].tolist()))
    assert tokens(model, config) == expected
    assert tokens(model, config, prefill_chunk_tokens=64, max_num_seqs=4) == expected


@pytest.mark.parametrize("config", [CONFIG, CONFIG.with_(num_full_layers=4), CONFIG.with_(decode="ring")])
def test_graph_replay_is_eager_bit_by_bit(config: skv.SparseKVConfig) -> None:
    model = model_of(torch.bfloat16)
    sampled = SamplingParams(max_tokens=32, ignore_eos=True, do_sample=True, temperature=0.8, top_p=0.9, seed=3)
    for params in (GREEDY, sampled):
        for batch in (1, 4, 9):
            eager = tokens(model, config, params, max_num_seqs=batch)
            assert tokens(model, config, params, max_num_seqs=batch, cuda_graphs=True) == eager


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # torch's advice; fp32 is meant here
def test_compiled_layers_agree_with_eager_ones() -> None:
    model = model_of(torch.float32)
    assert tokens(model, CONFIG, compile=True) == tokens(model, CONFIG)


def test_compiled_layers_in_graphs_give_what_they_give_without() -> None:
    """In one engine: compiling anew may tune a reduction another way, which then rounds differently."""
    model = model_of(torch.bfloat16)
    options = EngineConfig(kv_memory_bytes=MEMORY, max_num_seqs=2, compile=True, cuda_graphs=True)
    with Engine(model, CONFIG, options) as engine:
        replayed = [output.token_ids for output in engine.generate(prompts(), GREEDY)]
        assert engine._runner._graphs is not None
        engine._runner._graphs = None
        engine.forget_prefixes()  # what a prompt finds is read by another attention kernel, which rounds differently
        assert [output.token_ids for output in engine.generate(prompts(), GREEDY)] == replayed


def test_configurations_come_and_go_and_none_gets_the_graphs_of_another() -> None:
    """The budgets grow, so that each configuration needs more workspace than was reserved before."""
    model, given = model_of(torch.bfloat16), {}
    for graphs in (False, True):
        options = EngineConfig(kv_memory_bytes=MEMORY, max_num_seqs=2, compile=False, cuda_graphs=graphs)
        with Engine(model, CONFIG.with_(num_full_layers=4), options) as engine:
            for config in [None, *(CONFIG.with_(budget=96 + 100 * i) for i in range(8))] * 2:
                outputs = engine.generate(prompts(), GREEDY, config=config)
                given.setdefault(graphs, []).append([output.token_ids for output in outputs])
            if graphs:
                captured = engine._runner._graphs._captured.values()
                held = {group for graph in captured for group in graph.groups}
                assert held <= set(engine._groups.values())
    assert given[True] == given[False]


def test_graphs_where_no_kernel_fits_are_refused_when_asked_for() -> None:
    model = model_of(torch.float32)
    with pytest.raises(skv.ConfigError, match="cuda_graphs"):
        tokens(model, CONFIG, cuda_graphs=True)
    assert tokens(model, CONFIG, cuda_graphs=None) == tokens(model, CONFIG)
