"""`generate` by fixed decode steps gives what it gives by plain ones. Here each step is run, where a GPU replays it."""

from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_sparsekv as skv
from hf_sparsekv import generation
from hf_sparsekv.errors import CacheError, ConfigError
from hf_sparsekv.hf import graphs
from hf_sparsekv.hf.switch import sparse_attention

SMALL = skv.SparseKVConfig(num_full_layers=1, budget=24, num_recent_tokens=8, observation_window=8)
LENGTH, NEW_TOKENS = 70, 40
PADS = (30, 5, 0)
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


class Eager:
    """Launches without a graph: every step runs as it is. Counts what a graph would have had to know."""

    made: list["Eager"]

    def __init__(self, device):
        self.addresses, self.captures = None, 0
        self.made.append(self)

    def run(self, body, workspace):
        addresses = [tensor.data_ptr() for tensor in self.cache_tensors()]
        if self.addresses is None:
            self.captures += 1
        else:
            assert addresses == self.addresses, "a replay would write to memory that the cache no longer has"
        self.addresses = addresses
        return body()

    def forget(self):
        self.addresses = None

    def cache_tensors(self):
        for layer in self.cache().layers:
            slots = getattr(layer.state, "slots", None)
            held = layer.state.columns.buffers if slots is None else vars(slots).values()
            yield from held

    def cache(self):
        return self.caches[-1]


@pytest.fixture
def by_graphs(monkeypatch):
    """`generate` that takes graphs wherever a machine with a GPU would, with `Eager` launches; and those."""
    launches = type("Eager", (Eager,), {"made": [], "caches": []})

    def fixed(*args):
        launches.caches.append(SimpleNamespace(layers=[SimpleNamespace(state=state) for state in args[0]]))
        return real(*args)

    real = graphs.FixedDecode
    monkeypatch.setattr(graphs, "FixedDecode", fixed)
    monkeypatch.setattr(graphs, "Launches", launches)

    def run(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(generation, "graph_obstacle", lambda *_: None)
            return skv.generate(*args, **options)

    run.launches = launches
    return run


@pytest.fixture
def model(tiny_llama):
    return tiny_llama(num_layers=3)


def prompts(pads=PADS, length=LENGTH):
    ids, mask = torch.randint(3, 256, (len(pads), length)), torch.ones(len(pads), length, dtype=torch.long)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def assert_same(one, two):
    """Tokens, and everything the caches hold, positions included."""
    assert torch.equal(one.sequences, two.sequences)
    reports = [out.cache.report(positions=True) for out in (one, two)]
    assert reports[0] == reports[1]


@pytest.mark.parametrize("pads", [(0,), (0, 0), PADS], ids=["one", "two", "padded"])
@pytest.mark.parametrize("decode", ["replace_lowest", "ring", "grow"])
@pytest.mark.parametrize("num_full_layers", [0, 1])
def test_tokens_and_cache_are_those_of_plain_steps(model, by_graphs, pads, decode, num_full_layers):
    config, batch = SMALL.with_(decode=decode, num_full_layers=num_full_layers), prompts(pads)
    plain, fixed = skv.generate(model, batch, config, **GREEDY), by_graphs(model, batch, config, **GREEDY)
    assert plain.report["decoding"] == {"cuda_graphs": False, "reason": "the model is on cpu"}
    assert fixed.report["decoding"] == {"cuda_graphs": True, "reason": None, "steps": NEW_TOKENS - 1}
    assert_same(plain, fixed)


@pytest.mark.parametrize("options", [{"temperature": 0.8, "top_p": 0.9}, {"top_k": 5}, {"num_return_sequences": 3}])
def test_a_seed_draws_the_same_tokens(model, by_graphs, options):
    results = []
    for run in (skv.generate, by_graphs):
        torch.manual_seed(11)
        results.append(run(model, prompts((0,)), SMALL, **GREEDY | {"do_sample": True}, **options))
    assert_same(*results)


@pytest.mark.parametrize("pads", [(0,), PADS], ids=["one", "padded"])
@pytest.mark.parametrize("decode", ["replace_lowest", "grow"])
def test_requests_that_end_early_are_padded_as_ever(model, by_graphs, pads, decode):
    batch, config = prompts(pads), SMALL.with_(decode=decode)
    free = skv.generate(model, batch, config, **GREEDY).new_tokens
    stops = [int(tokens[5 + 9 * row]) for row, tokens in enumerate(free)]
    plain, fixed = (run(model, batch, config, **GREEDY | {"eos_token_id": stops}) for run in (skv.generate, by_graphs))
    assert plain.new_tokens.shape[1] < NEW_TOKENS
    assert_same(plain, fixed)


def test_a_budget_used_up_while_decoding_begins_to_replace(model, by_graphs):
    config, batch = SMALL.with_(budget=LENGTH + 10), prompts()
    plain, fixed = (run(model, batch, config, **GREEDY) for run in (skv.generate, by_graphs))
    assert plain.report["evicted_at_prompt"] == 0 < plain.report["evicted_while_decoding"]
    assert_same(plain, fixed)


@pytest.mark.parametrize("pads", [(0,), PADS], ids=["one", "padded"])
@pytest.mark.parametrize("decode", ["replace_lowest", "grow"])
def test_a_capture_without_room_left_is_made_anew(model, by_graphs, monkeypatch, pads, decode):
    monkeypatch.setattr(graphs, "LONGEST_CAPTURE", 15)
    config, batch = SMALL.with_(decode=decode), prompts(pads)
    plain, fixed = (run(model, batch, config, **GREEDY) for run in (skv.generate, by_graphs))
    assert by_graphs.launches.made[0].captures == 3  # 39 steps
    assert_same(plain, fixed)


def test_the_next_turn_goes_on_from_either_cache(model, by_graphs):
    batch, answers = prompts(), []
    for run in (skv.generate, by_graphs):
        first = run(model, batch, SMALL, **GREEDY)
        turn = torch.randint(3, 256, (3, 20), generator=torch.Generator().manual_seed(1))
        ids = torch.cat([first.sequences, turn], dim=1)
        mask = torch.cat([batch["attention_mask"], torch.ones(3, NEW_TOKENS + 20, dtype=torch.long)], dim=1)
        answers.append(run(model, {"input_ids": ids, "attention_mask": mask}, cache=first.cache, **GREEDY))
    assert answers[1].report["decoding"]["cuda_graphs"]
    assert_same(*answers)


@pytest.mark.parametrize("decode", ["replace_lowest", "grow"])
def test_a_cache_filled_in_inference_mode_may_be_used_outside_of_it(model, by_graphs, decode):
    batch, answers = prompts((0,)), []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            first = by_graphs(model, batch, SMALL.with_(decode=decode), **GREEDY)
        ids = torch.cat([first.sequences.clone(), batch["input_ids"][:, :2]], dim=1)  # there is room for as many
        answers.append(skv.generate(model, ids, cache=first.cache, **GREEDY))
    assert_same(*answers)


def test_prefill_in_chunks_and_bounded(model, by_graphs):
    for options, config in (
        ({"prefill_chunk_size": 16}, SMALL),
        ({}, SMALL.with_(prefill="bounded", prefill_chunk_tokens=32)),
    ):
        batch = prompts()
        plain, fixed = (run(model, batch, config, **GREEDY | options) for run in (skv.generate, by_graphs))
        assert_same(plain, fixed)


def test_positions_of_the_callers_choice(model, by_graphs):
    batch = prompts((0, 0)) | {"position_ids": torch.arange(LENGTH).repeat(2, 1) + 100}
    plain, fixed = (run(model, batch, SMALL, **GREEDY) for run in (skv.generate, by_graphs))
    assert torch.equal(plain.sequences, fixed.sequences)
    moved = by_graphs(model, prompts((0, 0)), SMALL, **GREEDY)
    assert moved.report["decoding"]["cuda_graphs"]


def test_processors_criteria_streamers_and_scores_are_transformers_own(model, by_graphs):
    class NoEven(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, ::2] = -torch.inf
            return scores

    class TwentyAtMost(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= LENGTH + 20)

    class Collector:
        def __init__(self):
            self.tokens, self.has_ended = [], False

        def put(self, value):
            self.tokens.append(value.flatten().tolist())

        def end(self):
            self.has_ended = True

    seen, outputs = [], []
    batch = prompts((0,))
    for run in (skv.generate, by_graphs):
        streamer = Collector()
        outputs.append(
            run(
                model,
                batch,
                SMALL,
                **GREEDY,
                streamer=streamer,
                logits_processor=LogitsProcessorList([NoEven()]),
                stopping_criteria=StoppingCriteriaList([TwentyAtMost()]),
                return_dict_in_generate=True,
                output_scores=True,
            )
        )
        seen.append(streamer.tokens)
        assert streamer.has_ended
    assert seen[0] == seen[1]
    assert len(seen[0]) == 21  # the prompt, and every token
    assert outputs[0].new_tokens.shape == (1, 20)
    assert bool((outputs[0].new_tokens % 2 == 1).all())
    assert_same(*outputs)


def test_a_step_that_cannot_be_captured_is_launched_and_the_report_says_so(model, by_graphs, monkeypatch):
    class Fails(by_graphs.launches):
        def run(self, body, workspace):
            if self.captures:
                raise graphs.CaptureError("operation not permitted when stream is capturing")
            return super().run(body, workspace)

    monkeypatch.setattr(graphs, "Launches", Fails)
    batch = prompts()
    plain, fixed = skv.generate(model, batch, SMALL, **GREEDY), by_graphs(model, batch, SMALL, **GREEDY)
    assert fixed.report["decoding"]["cuda_graphs"] is False
    assert "LlamaForCausalLM cannot be captured: operation not permitted" in fixed.report["decoding"]["reason"]
    assert_same(plain, fixed)
    with pytest.raises(ConfigError, match="cuda_graphs=True, but a decode step of LlamaForCausalLM cannot be captured"):
        by_graphs(model, batch, SMALL, **GREEDY, cuda_graphs=True)


def test_an_interrupted_step_leaves_a_cache_that_refuses_to_go_on(model, by_graphs, monkeypatch):
    class Interrupted(by_graphs.launches):
        def run(self, body, workspace):
            raise KeyboardInterrupt

    monkeypatch.setattr(graphs, "Launches", Interrupted)
    cache = skv.SparseKVCache(model.config, SMALL)
    batch = prompts()
    with pytest.raises(KeyboardInterrupt):
        by_graphs(model, batch, cache=cache, **GREEDY)
    ids = torch.cat([batch["input_ids"], torch.full((3, 9), 5)], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 9, dtype=torch.long)], dim=1)
    with pytest.raises(CacheError, match="interrupted"), sparse_attention(model):
        skv.generate(model, {"input_ids": ids, "attention_mask": mask}, cache=cache, **GREEDY)


def test_graphs_are_left_out_where_they_do_not_pay_and_taken_when_asked(model, by_graphs):
    batch = prompts()
    short = by_graphs(model, batch, SMALL, **GREEDY | {"max_new_tokens": 31})
    assert short.report["decoding"] == {"cuda_graphs": False, "reason": "31 new tokens do not pay for a capture, 32 do"}
    asked = by_graphs(model, batch, SMALL, **GREEDY | {"max_new_tokens": 31}, cuda_graphs=True)
    assert asked.report["decoding"] == {"cuda_graphs": True, "reason": None, "steps": 30}
    assert torch.equal(short.sequences, asked.sequences)
    one = by_graphs(model, batch, SMALL, **GREEDY | {"max_new_tokens": 1}, cuda_graphs=True)
    assert one.report["decoding"]["steps"] == 0
    with pytest.raises(ConfigError, match="cuda_graphs=True, but the model is on cpu: leave it out"):
        skv.generate(model, batch, SMALL, **GREEDY, cuda_graphs=True)


def test_a_cache_that_evicts_nothing_stays_the_dense_one_unless_graphs_are_asked_for(model, by_graphs):
    batch, config = prompts(), SMALL.with_(budget=LENGTH + NEW_TOKENS)
    plain = by_graphs(model, batch, config, **GREEDY)
    assert "no layer has to evict" in plain.report["decoding"]["reason"]
    asked = by_graphs(model, batch, config, **GREEDY, cuda_graphs=True)
    assert asked.report["decoding"]["cuda_graphs"]
    assert torch.equal(plain.sequences, asked.sequences)


def test_compiled_layers_compile_once_and_leave_the_model_as_it_was(model, by_graphs, monkeypatch):
    # The backend that only traces: what counts here is how often.
    monkeypatch.setattr(LlamaDecoderLayer, "compile", partialmethod(nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    batch, graphs_seen = prompts(), []
    plain = skv.generate(model, batch, SMALL, **GREEDY)
    for _ in range(10):  # more than the compilations of one function after which torch gives up
        out = by_graphs(model, batch, SMALL, **GREEDY | {"max_new_tokens": 34}, compile=True)
        assert torch.equal(out.new_tokens, plain.new_tokens[:, :34])
        graphs_seen.append(counters["stats"]["unique_graphs"])
    assert graphs_seen[0] > 0
    assert set(graphs_seen) == {graphs_seen[0]}
    assert not counters["recompile_limit"]
    assert not counters["graph_break"]
    assert all(module._compiled_call_impl is None for module in model.modules())
    with pytest.raises(ConfigError, match="compile=True, but the model is on cpu: leave it out"):
        skv.generate(model, batch, SMALL, **GREEDY, compile=True)
