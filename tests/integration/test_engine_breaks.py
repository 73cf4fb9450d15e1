"""The engine under what callers do to it: interrupts, threads, inference mode, scorers that change."""

import signal
import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_sparsekv as skv
from hf_sparsekv.engine.inflight import InFlight
from hf_sparsekv.engine.scheduler import Scheduler
from hf_sparsekv.engine.tables import _LayerTables
from hf_sparsekv.engine.tracker import Tracker
from hf_sparsekv.testing.models import tiny_llama

OPTIONS = skv.EngineConfig(kv_memory_bytes=8 << 20, max_num_seqs=4, max_batch_tokens=128, max_model_len=128)
CONFIG = skv.SparseKVConfig(num_full_layers=1, budget=40, num_recent_tokens=8, observation_window=8)
GREEDY = skv.SamplingParams(max_tokens=10, ignore_eos=True)
PROMPT = [(7 * i) % 250 + 3 for i in range(60)]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_layers=3)


def tokens(engine, **options):
    return engine.generate([PROMPT], GREEDY, **options)[0].token_ids


def drain(engine):
    while engine.has_unfinished:
        engine.step()


def test_an_interrupt_while_tokens_are_read_ends_every_request(model, monkeypatch):
    with skv.Engine(model, CONFIG, OPTIONS) as engine:
        expected = tokens(engine)
        wait, calls = InFlight.wait, []

        def interrupted(step):
            calls.append(step)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return wait(step)

        monkeypatch.setattr(InFlight, "wait", interrupted)
        engine.add_request(PROMPT, GREEDY)
        with pytest.raises(KeyboardInterrupt):
            drain(engine)
        assert not engine.has_unfinished
        assert tokens(engine) == expected


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (_LayerTables, "extend"),  # blocks that are taken and in no table yet
        (Scheduler, "_release"),  # a request that has ended and holds its blocks still
        (Tracker, "add"),  # a request that is queued and unknown to whoever would end it
    ],
)
def test_ctrl_c_in_the_middle_of_the_books_waits_for_their_end(model, monkeypatch, owner, name):
    with skv.Engine(model, CONFIG, OPTIONS) as engine:
        expected = tokens(engine)
        with monkeypatch.context() as patch:
            method, calls = getattr(owner, name), []

            def interrupted(*args):
                calls.append(args)
                if len(calls) == 1:  # a second one would be raised at once
                    signal.raise_signal(signal.SIGINT)
                return method(*args)

            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([PROMPT, PROMPT[:7]], GREEDY)
        assert not engine.has_unfinished
        assert engine._blocks.num_free == engine._blocks.num_usable
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert tokens(engine) == expected


def signed(sign):
    """A scorer class that orders keys by the norm of their values, upwards or downwards."""

    class Signed(skv.Scorer):
        name = "signed"
        queries = "none"
        is_query_aware = is_probability = False

        def __init__(self, factor=sign):
            self.factor = factor

        def score(self, inputs):
            return self.factor * inputs.values.float().norm(dim=-1)

    return Signed


def test_two_objects_of_one_scorer_class_are_two_configurations(model):
    kind = signed(1.0)
    configs = [CONFIG.with_(scorer=kind(sign), budget=24) for sign in (1.0, -1.0)]
    with skv.Engine(model, configs[0], OPTIONS) as engine:
        one, other = (tokens(engine, config=config) for config in configs)
    for config, got in zip(configs, (one, other), strict=True):
        out = skv.generate(model, torch.tensor([PROMPT]), config, max_new_tokens=10, do_sample=False, eos_token_id=None)
        assert list(got) == out.new_tokens[0].tolist()
    assert one != other


def test_an_attention_that_changes_within_a_pass_is_noticed(model):
    own = tiny_llama(num_layers=3)
    hook = own.model.layers[1].register_forward_pre_hook(lambda *_: own.set_attn_implementation("sdpa"))
    with skv.Engine(own, CONFIG, OPTIONS) as engine:
        engine.add_request(PROMPT, GREEDY)
        with pytest.raises(skv.ModelError, match="close the engine first"):
            engine.step()
        hook.remove()


def test_inference_mode_and_autocast_of_the_caller_do_not_matter(model):
    with skv.Engine(model, CONFIG, OPTIONS) as engine:
        expected = tokens(engine)
    with torch.inference_mode():
        engine = skv.Engine(model, CONFIG, OPTIONS)
        assert tokens(engine) == expected
    with engine:
        assert tokens(engine) == expected
        with torch.autocast("cpu", torch.bfloat16):
            assert tokens(engine) == expected


def test_a_second_thread_in_step_is_told_so(model, monkeypatch):
    with skv.Engine(model, CONFIG, OPTIONS) as engine:
        engine.add_request(PROMPT, GREEDY)
        inside, done = threading.Event(), threading.Event()
        launch = engine._launch

        def slow():
            inside.set()
            done.wait(10)
            return launch()

        monkeypatch.setattr(engine, "_launch", slow)
        thread = threading.Thread(target=engine.step)
        thread.start()
        assert inside.wait(10)
        with pytest.raises(skv.RequestError, match="another thread"):
            engine.step()
        done.set()
        thread.join()


def test_rotary_factors_that_go_by_the_batch_are_refused():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 96, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=192, head_dim=16, rope_parameters=rope, **sizes)
    model = LlamaForCausalLM(config).eval()
    with pytest.raises(skv.ModelError, match=r"'longrope'.*max_model_len=96"):
        skv.Engine(model, CONFIG, OPTIONS)
    with skv.Engine(model, CONFIG, OPTIONS.with_(max_model_len=96)) as engine:
        assert len(tokens(engine)) == 10


def test_a_closed_engine_has_no_prefixes_to_forget(model):
    engine = skv.Engine(model, CONFIG, OPTIONS)
    engine.close()
    with pytest.raises(skv.CacheError, match="the engine is closed"):
        engine.forget_prefixes()
