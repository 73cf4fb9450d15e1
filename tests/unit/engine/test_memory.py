"""MemoryPlan: it takes no more than it was given, wastes less than a block, and promises what the scheduler keeps."""

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
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.engine.scheduler import Scheduler
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.plan import LayerPlan, ModelShape

SHAPE = ModelShape(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
ELEMENT = 4
BASE = SparseKVConfig(num_full_layers=1, budget=40, num_sink_tokens=2, num_recent_tokens=8, observation_window=8)
DENSE = BASE.with_(num_full_layers=4)


def plan_of(kv_bytes, config=BASE, model_length=4096, **options):
    return MemoryPlan.build(
        LayerPlan.build(config, SHAPE),
        LayerPlan.build(DENSE, SHAPE),
        EngineConfig(**({"max_num_seqs": 16, "block_size": 8} | options)),
        kv_bytes=kv_bytes,
        num_kv_heads=SHAPE.num_kv_heads,
        element_bytes=ELEMENT,
        model_length=model_length,
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
    return pages.nbytes + rows.nbytes


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
)
def test_what_is_reserved_is_all_but_less_than_a_block_of_what_was_given(
    config, kv_bytes, block_size, max_num_seqs, max_model_len
):
    try:
        plan = plan_of(kv_bytes, config, block_size=block_size, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    except ConfigError:
        assume(False)
    assert kv_bytes - plan.block_bytes < measured(plan, config) <= kv_bytes
    assert 1 <= plan.num_rows <= max_num_seqs
    assert plan.max_model_len <= (max_model_len or 4096)
    assert plan.blocks_of(plan.layers, plan.max_model_len) <= plan.num_blocks - 1
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
    assert plan.row_bytes == 20 + 4 * 26 + 3 * (3 * 4 + 2 * 8 + 40 * 2 * 8 + 5 * 4)
    assert plan.num_rows == 16
    assert plan.num_blocks == (1_000_000 - 16 * plan.row_bytes) // plan.block_bytes
    assert plan.concurrent(plan.layers, 200) == (plan.num_blocks - 1) // 40
    assert plan.concurrent(plan.dense, 200) == (plan.num_blocks - 1) // 100


def test_there_are_no_more_rows_than_requests_that_the_blocks_could_hold():
    plan = plan_of(300_000, max_num_seqs=256, max_model_len=64)
    each = plan.row_bytes + (3 * 5 + 1) * plan.block_bytes
    assert plan.num_rows == 300_000 // each < 256


def test_without_a_bound_the_longest_request_is_what_the_memory_or_the_model_holds():
    assert plan_of(10 << 20, model_length=700).max_model_len == 700
    plan = plan_of(200_000, max_num_seqs=2)
    assert plan.max_model_len < 4096
    assert plan.blocks_of(plan.layers, plan.max_model_len) <= plan.num_blocks - 1
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
