"""MemoryPlan: it takes no more than it was given, wastes less than a block, and promises what the scheduler keeps."""

from math import ceil

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_sparsekv.cache.pages import PagePool
from hf_sparsekv.cache.rows import RowState
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.block_pool import BlockPool
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.memory import MemoryPlan
from hf_sparsekv.engine.request import Request
from hf_sparsekv.engine.sampler import SamplerState
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.engine.scheduler import Scheduler
from hf_sparsekv.engine.tables import RequestTables
from hf_sparsekv.errors import ConfigError, RequestError
from hf_sparsekv.plan import LayerPlan, ModelShape

SHAPE = ModelShape(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
ELEMENT = 4
STOP_IDS = (2, 7)
VOCAB = 50
BASE = SparseKVConfig(num_full_layers=1, budget=40, num_sink_tokens=2, num_recent_tokens=8, observation_window=8)
DENSE = BASE.with_(num_full_layers=4)


def plan_of(kv_bytes, config=BASE, model_length=4096, **options):
    return MemoryPlan.build(
        LayerPlan.build(config, SHAPE),
        LayerPlan.build(DENSE, SHAPE),
        EngineConfig(**({"max_num_seqs": 16, "block_size": 8} | options)),
        kv_bytes=kv_bytes,
        element_bytes=ELEMENT,
        model_length=model_length,
        sampler_row_bytes=SamplerState.row_bytes(len(STOP_IDS)),
    )


def measured(plan, config):
    """Bytes of the tensors that the plan means."""
    device = torch.device("cpu")
    pages = PagePool(plan.num_blocks, SHAPE.num_kv_heads, plan.block_size, SHAPE.head_dim, torch.float32, device)
    rows = RowState(
        config,
        plan.layers,
        num_rows=plan.num_rows,
        num_kv_heads=SHAPE.num_kv_heads,
        page_size=plan.block_size,
        max_length=plan.max_model_len,
        device=device,
    )
    sampler = vars(SamplerState(plan.num_rows, VOCAB, device, STOP_IDS)).values()
    per_row = sum(t.nbytes for t in sampler if isinstance(t, torch.Tensor)) - 8 * VOCAB  # the ids belong to no row
    return pages.nbytes + rows.nbytes + per_row


configs = st.builds(
    lambda full, budget, decode: BASE.with_(num_full_layers=full, budget=budget, decode=decode),
    st.integers(0, 4),
    st.one_of(st.integers(10, 200), st.floats(0.05, 0.9)),
    st.sampled_from(["replace_lowest", "ring", "grow"]),
)


@settings(max_examples=60, deadline=None)
@given(
    config=configs,
    kv_bytes=st.integers(20_000, 3_000_000),
    block_size=st.integers(1, 33),
    max_num_seqs=st.integers(1, 64),
    max_model_len=st.one_of(st.none(), st.integers(2, 600)),
    chunk=st.none() | st.integers(1, 300),
)
def test_what_is_reserved_is_all_but_less_than_a_block_of_what_was_given(
    config, kv_bytes, block_size, max_num_seqs, max_model_len, chunk
):
    options = {"block_size": block_size, "max_num_seqs": max_num_seqs, "prefill_chunk_tokens": chunk}
    try:
        plan = plan_of(kv_bytes, config, max_model_len=max_model_len, **options)
    except ConfigError:
        if max_model_len is None:  # nothing is refused then that holds a prompt and an output
            with pytest.raises(ConfigError):
                plan_of(kv_bytes, config, max_model_len=2, **options)
        assume(False)
    assert kv_bytes - plan.block_bytes < measured(plan, config) <= kv_bytes
    assert 1 <= plan.num_rows <= max_num_seqs
    assert plan.max_model_len <= (max_model_len or 4096)
    assert plan.peak_of(plan.layers, plan.max_model_len) <= plan.num_blocks - 1
    assert plan.concurrent(plan.layers, plan.max_model_len) >= 1


def admitted(plan, layers, prompt_length, new_tokens):
    """How many such requests the scheduler runs at once before it has to preempt any."""
    scheduler = Scheduler(
        BlockPool(plan.num_blocks),
        block_size=plan.block_size,
        max_num_seqs=10_000,
        max_batch_tokens=10_000_000,
        max_model_len=plan.max_model_len + 1,
    )
    params = SamplingParams(max_tokens=new_tokens)
    for i in range(3 + 2 * plan.concurrent(layers, prompt_length + 1)):
        scheduler.add(Request(request_id=str(i), prompt_ids=[5] * prompt_length, params=params, plan=layers))
    scheduler.schedule()
    count = scheduler.num_running
    assert not scheduler.schedule().preempted
    return count


@settings(max_examples=40, deadline=None)
@given(config=configs, kv_bytes=st.integers(100_000, 900_000), length=st.integers(20, 300), block=st.integers(1, 20))
def test_the_scheduler_admits_as_many_as_the_plan_says(config, kv_bytes, length, block):
    try:
        plan = plan_of(kv_bytes, config, block_size=block, model_length=300)
    except ConfigError:
        assume(False)
    for layers in (plan.layers, plan.dense):
        if length > plan.max_model_len or plan.blocks_of(layers, length) > plan.num_blocks - 1:
            continue
        promised = plan.concurrent(layers, length)
        # The last token is never in the cache: a request of `length` in all takes at most what is promised for it.
        assert admitted(plan, layers, length - 1, 1) >= promised
        if all(spec.is_full or spec.kept_tokens(length - 1) <= length for spec in layers.layers):
            assert admitted(plan, layers, length - 1, 2) == promised


def test_the_arithmetic_by_hand():
    plan = plan_of(1_000_000, max_model_len=200)
    # Key and value of 2 heads, 8 tokens, 16 dimensions, 4 bytes; 25 blocks for 200 tokens, 5 for a budget of 40.
    assert plan.block_bytes == 2 * 2 * 8 * 16 * 4
    assert plan.blocks_of(plan.layers, 200) == 25 + 3 * 5
    assert plan.blocks_of(plan.dense, 200) == 4 * 25
    # Token, position, activity; a length and a table of 25; 3 layers with 3 numbers, 2 victims, 40 slots, 5 blocks.
    rows = 20 + 4 * 26 + 3 * (3 * 4 + 2 * 8 + 40 * 2 * 8 + 5 * 4)
    # Sampling: 2 keys, 8 options, 2 + 64 ids that end, and the row's own number.
    assert plan.row_bytes == rows + 8 * (2 + 8 + 66 + 1)
    assert plan.row_bytes_of(plan.dense) == 20 + 4 * 4 * 26 + 8 * 77
    assert plan.num_rows == 16
    assert plan.num_blocks == (1_000_000 - 16 * plan.row_bytes) // plan.block_bytes
    assert plan.concurrent(plan.layers, 200) == (plan.num_blocks - 1) // 40
    assert plan.concurrent(plan.dense, 200) == (plan.num_blocks - 1) // 100


def test_staging_by_hand():
    plan = plan_of(1_000_000, max_model_len=200, prefill_chunk_tokens=199)
    assert plan.peak_of(plan.layers, 200) == plan.blocks_of(plan.layers, 200) == 25 + 3 * 5
    plan = plan_of(1_000_000, max_model_len=200, prefill_chunk_tokens=198)
    assert plan.peak_of(plan.layers, 200) == 25 + 3 * 5 + 3 * 25  # the three window layers keep 199 tokens for a while
    assert plan.peak_of(plan.dense, 200) == plan.blocks_of(plan.dense, 200) == 4 * 25
    assert plan.concurrent(plan.layers, 200) == (plan.num_blocks - 1 - 75) // 40


chunked = {
    "config": configs,
    "kv_bytes": st.integers(20_000, 900_000),
    "block_size": st.integers(1, 20),
    "max_model_len": st.none() | st.integers(2, 400),
    "max_batch_tokens": st.integers(4, 500),
    "prefill_chunk_tokens": st.none() | st.integers(1, 500),
}


def chunked_plan(config, kv_bytes, **options):
    """(plan, scheduler of such an engine, with a pool of its size)."""
    try:
        plan = plan_of(kv_bytes, config, model_length=500, max_num_seqs=4, **options)
    except ConfigError:
        assume(False)
    scheduler = Scheduler(
        BlockPool(plan.num_blocks),
        block_size=plan.block_size,
        max_num_seqs=4,
        max_batch_tokens=options["max_batch_tokens"],
        prefill_chunk_tokens=options["prefill_chunk_tokens"],
        max_model_len=plan.max_model_len,
    )
    return plan, scheduler


def request_of(name, prompt, new, layers):
    return Request(request_id=name, prompt_ids=[5] * prompt, params=SamplingParams(max_tokens=new), plan=layers)


@settings(max_examples=150, deadline=None)
@given(**chunked)
def test_a_prompt_of_the_longest_length_less_one_is_accepted_and_runs(**drawn):
    plan, scheduler = chunked_plan(**drawn)
    prompt = plan.max_model_len - 1
    for name in ("alone", "behind it"):
        scheduler.add(request_of(name, prompt, 1, plan.layers))
    with pytest.raises(RequestError, match=f"the engine serves at most {plan.max_model_len}"):
        scheduler.add(request_of("longer", prompt + 1, 1, plan.layers))
    num_computed = 0
    while num_computed < prompt:
        step = scheduler.schedule()
        assert not step.preempted and step.prefill[0].request.request_id == "alone"
        num_computed += step.prefill[0].length
    window_layers = [spec for spec in plan.layers.layers if not spec.is_full and spec.kept_tokens(prompt) < prompt]
    if prompt > scheduler.chunk_limit and window_layers:  # it was staged: what the plan counts is what there was
        staging = len(window_layers) * ceil(prompt / plan.block_size)
        assert plan.peak_of(plan.layers, plan.max_model_len) == staging + plan.blocks_of(plan.layers, prompt + 1)


@settings(max_examples=60, deadline=None)
@given(**chunked, length=st.integers(4, 400))
def test_as_many_requests_as_promised_run_beside_one_that_is_staged(length, **drawn):
    plan, scheduler = chunked_plan(**drawn)
    assume(length <= plan.max_model_len - 1)
    promised = min(4, plan.concurrent(plan.layers, length))
    assume(promised >= 1)
    for i in range(promised):
        scheduler.add(request_of(str(i), length - 1, 1, plan.layers))
    for _ in range(5 * length):
        assert not scheduler.schedule().preempted
    assert scheduler.num_running == promised and scheduler.num_waiting == 0


def test_a_long_output_beyond_the_longest_prompt_is_refused_with_the_ways_around_it():
    grow = BASE.with_(decode="grow")
    plan, scheduler = chunked_plan(
        grow, 150_000, block_size=8, max_model_len=None, max_batch_tokens=64, prefill_chunk_tokens=None
    )
    request = request_of("long output", 1, plan.max_model_len, plan.layers)
    tables = RequestTables(plan.layers, 1, request.max_length, 8)
    assert tables.demand(request.final_length, staged=False) <= plan.num_blocks - 1  # it would fit
    with pytest.raises(RequestError, match=r"lower max_tokens, raise max_model_len if set, or give more KV memory"):
        scheduler.add(request)
    wider, scheduler = chunked_plan(
        grow, 150_000, block_size=8, max_model_len=None, max_batch_tokens=500, prefill_chunk_tokens=None
    )
    assert wider.max_model_len > plan.max_model_len
    scheduler.add(request)  # as the configuration's own words say: larger chunks raise the bound


def test_a_memory_without_room_for_staging_is_refused_with_the_way_around_it():
    whole = plan_of(150_000, max_model_len=200, max_num_seqs=1)
    with pytest.raises(ConfigError, match=r"153,600 of it to stage a prompt over 64 tokens \(raise max_batch_tokens"):
        plan_of(150_000, max_model_len=200, max_num_seqs=1, max_batch_tokens=64)
    shorter = plan_of(150_000, max_num_seqs=1, max_batch_tokens=64)
    assert 64 < shorter.max_model_len < 200 == whole.max_model_len


def test_there_are_no_more_rows_than_requests_that_the_blocks_could_hold():
    plan = plan_of(300_000, max_num_seqs=256, max_model_len=64)
    each = plan.row_bytes + (3 * 5 + 1) * plan.block_bytes
    assert plan.num_rows == 300_000 // each < 256


def test_without_a_bound_the_longest_request_is_what_the_memory_or_the_model_holds():
    assert plan_of(10 << 20, model_length=700).max_model_len == 700
    plan = plan_of(200_000, max_num_seqs=2)
    assert plan.max_model_len < 4096
    assert plan.peak_of(plan.layers, plan.max_model_len) <= plan.num_blocks - 1
    assert plan.blocks_of(plan.layers, plan.max_model_len) + plan.layers.num_full_layers > plan.num_blocks - 9
    assert plan.longest() >= plan.max_model_len


@pytest.mark.parametrize(("kv_bytes", "options"), [(1000, {}), (1, {}), (200_000, {"max_model_len": 2000})])
def test_memory_that_holds_no_request_is_refused_with_what_it_would_take(kv_bytes, options):
    with pytest.raises(ConfigError, match=rf"kv_memory_bytes={kv_bytes:,} does not hold one request .* raise kv") as e:
        plan_of(kv_bytes, **options, max_num_seqs=1)
    needed = int(str(e.value).split("which takes ")[1].split(":")[0].replace(",", ""))
    assert needed > kv_bytes
    if options:
        assert plan_of(needed, **options, max_num_seqs=1).max_model_len == 2000
        with pytest.raises(ConfigError):
            plan_of(needed - 1, **options, max_num_seqs=1)


def test_the_plan_in_words_says_what_it_computes():
    plan = plan_of(4_000_000, max_model_len=2048)
    lines = plan.describe().splitlines()
    assert lines[0].startswith(f"{plan.num_blocks:,} blocks of 8 tokens ({plan.num_blocks * plan.block_bytes:,} bytes)")
    assert lines[1].split() == ["tokens", "requests", "dense"]
    rows = [[int(word.replace(",", "")) for word in line.split()] for line in lines[2:]]
    assert [row[0] for row in rows] == [1024, 2048]
    for length, ours, dense in rows:
        assert ours == min(16, plan.concurrent(plan.layers, length))
        assert dense == plan.concurrent(plan.dense, length)
