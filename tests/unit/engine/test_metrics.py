"""The numbers of an engine are those that can be counted by hand, in the format that Prometheus reads."""

import threading
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.engine import Engine
from hf_sparsekv.engine.metrics import RATE_WINDOW_S, EngineMetrics
from hf_sparsekv.engine.request import FinishReason, Request
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.errors import RequestError
from hf_sparsekv.testing.models import tiny_llama

PROMPTS = [[5 + i] * (3 + i) for i in range(6)]


def samples(text):
    """Name and labels -> value."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def new_engine(**options):
    model = tiny_llama(num_layers=2, num_heads=4, num_kv_heads=2)
    options = {"kv_memory_bytes": 8 << 20, "max_num_seqs": 4, "max_batch_tokens": 64} | options
    return Engine(model, SparseKVConfig(num_full_layers=1, budget=40), EngineConfig(**options))


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def metrics(clock):
    pool = SimpleNamespace(num_free=7, num_usable=9, num_cached=0)
    return EngineMetrics(SimpleNamespace(num_running=2, num_waiting=3, pool=pool), clock=lambda: clock.now)


def request(prompt_length=4, times=(), **values):
    params = SamplingParams(max_tokens=8)
    return Request(
        request_id="r", prompt_ids=[1] * prompt_length, params=params, plan=None, token_times=list(times), **values
    )


def test_a_run_is_counted_token_by_token():
    with new_engine() as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=9, ignore_eos=True))
        now = samples(engine.metrics.text())
        snapshot = engine.metrics.snapshot()
    assert now["hf_sparsekv_prompt_tokens_total",] == sum(map(len, PROMPTS)) == snapshot["prompt_tokens"]
    assert now["hf_sparsekv_output_tokens_total",] == 6 * 9 == snapshot["output_tokens"]
    assert now["hf_sparsekv_requests_finished_total", "length"] == 6
    assert snapshot["requests_finished"] == {"stop": 0, "length": 6, "abort": 0, "error": 0}
    reports = [output.report for output in outputs]
    for name, times in (
        ("time_to_first_token", [report.ttft_s for report in reports]),
        ("queue_time", [report.queue_s for report in reports]),
        ("inter_token_latency", [seconds for report in reports for seconds in report.itl_s]),
    ):
        assert now[f"hf_sparsekv_{name}_seconds_count",] == len(times)
        assert now[f"hf_sparsekv_{name}_seconds_sum",] == pytest.approx(sum(times), rel=1e-9)
    assert now["hf_sparsekv_blocks_free",] == now["hf_sparsekv_blocks_total",] == engine.memory.num_blocks - 1
    assert snapshot["output_tokens_per_s"] > 0


def test_what_runs_and_what_waits_is_read_when_asked_for():
    with new_engine(max_num_seqs=2) as engine:
        for prompt in PROMPTS:
            engine.add_request(prompt, SamplingParams(max_tokens=50, ignore_eos=True), stream=False)
        engine.step()
        snapshot = engine.metrics.snapshot()
        assert (snapshot["requests_running"], snapshot["requests_waiting"]) == (2, 4)
        assert snapshot["blocks_free"] < snapshot["blocks_total"]
        for name in range(6):
            engine.abort(str(name))
        after = engine.metrics.snapshot()
        assert (after["requests_running"], after["requests_waiting"]) == (0, 0)
        assert after["blocks_free"] == after["blocks_total"]
        assert after["requests_finished"]["abort"] == 6


def test_a_refused_request_is_not_counted():
    with new_engine() as engine:
        with pytest.raises(RequestError):
            engine.add_request([])
        assert sum(engine.metrics.snapshot()["requests_finished"].values()) == 0


def test_preemptions_are_counted_and_no_token_twice():
    config = SparseKVConfig(full_layers=(0, 1))
    model = tiny_llama(num_layers=2, num_heads=4, num_kv_heads=2)
    options = EngineConfig(
        kv_memory_bytes=200_000,
        max_num_seqs=4,
        max_batch_tokens=64,
        max_model_len=160,
        block_size=8,
        reserve_output_tokens=0,
    )
    with Engine(model, config, options) as engine:
        outputs = engine.generate([[5] * 40] * 8, SamplingParams(max_tokens=100, ignore_eos=True))
        snapshot = engine.metrics.snapshot()
    assert snapshot["preemptions"] == sum(output.report.num_preemptions for output in outputs) > 0
    assert snapshot["output_tokens"] == 800
    assert snapshot["prompt_tokens"] == 320


def test_two_engines_share_nothing_and_leave_the_global_registry_alone():
    before = {family.name for family in REGISTRY.collect()}
    with new_engine() as one, new_engine() as other:
        one.generate(PROMPTS[:1], SamplingParams(max_tokens=2, ignore_eos=True))
        assert one.metrics.snapshot()["output_tokens"] == 2
        assert other.metrics.snapshot()["output_tokens"] == 0
    assert {family.name for family in REGISTRY.collect()} == before


def test_every_series_is_there_from_the_start(metrics):
    now = samples(metrics.text())
    assert now["hf_sparsekv_requests_running",] == 2
    assert now["hf_sparsekv_requests_waiting",] == 3
    assert (now["hf_sparsekv_blocks_free",], now["hf_sparsekv_blocks_total",]) == (7, 9)
    for reason in FinishReason:
        assert now["hf_sparsekv_requests_finished_total", reason.value] == 0
    assert now["hf_sparsekv_preemptions_total",] == 0


def test_the_first_token_tells_of_the_queue_and_the_prompt_the_others_of_the_gap(metrics):
    first = request(4, times=[13.0], arrival_s=10.0, started_s=11.5, num_cached=3)
    later = request(5, times=[13.0, 13.25, 13.75])
    failed = request(6, finish_reason=FinishReason.ERROR)
    metrics.observe_tokens([first, later, failed])
    now = samples(metrics.text())
    assert now["hf_sparsekv_time_to_first_token_seconds_sum",] == 3.0
    assert now["hf_sparsekv_queue_time_seconds_sum",] == 1.5
    assert now["hf_sparsekv_inter_token_latency_seconds_sum",] == 0.5
    assert (now["hf_sparsekv_output_tokens_total",], now["hf_sparsekv_prompt_tokens_total",]) == (2, 4)
    assert (now["hf_sparsekv_prompt_tokens_cached_total",], now["hf_sparsekv_prefix_hits_total",]) == (3, 1)


def test_tokens_per_second_are_those_of_the_last_while(metrics, clock):
    assert metrics.snapshot()["output_tokens_per_s"] == 0
    for _ in range(5):
        metrics.observe_tokens([request(times=[clock.now])] * 6)
        clock.now += 1.0
    assert metrics.snapshot()["output_tokens_per_s"] == pytest.approx(6.0)
    assert metrics.snapshot()["prompt_tokens_per_s"] == pytest.approx(24.0)
    clock.now = 101.5 + RATE_WINDOW_S  # the first two steps are older than the window
    assert metrics.snapshot()["output_tokens_per_s"] == pytest.approx(18 / RATE_WINDOW_S)
    clock.now += RATE_WINDOW_S
    assert metrics.snapshot()["output_tokens_per_s"] == 0
    assert metrics.snapshot()["output_tokens"] == 30


def test_metrics_can_be_read_while_they_are_written(metrics):
    done = threading.Event()

    def write():
        for i in range(3000):
            metrics.observe_tokens([request(times=[float(i)])])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not done.is_set():
        metrics.text()
        seen.append(metrics.snapshot()["output_tokens"])
    writer.join()
    assert seen == sorted(seen)
    assert metrics.snapshot()["output_tokens"] == 3000
