"""EngineConfig: every number is checked, and its message names the value, the limit and the fix."""

import pytest

from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.errors import ConfigError


def test_the_defaults_are_those_of_a_gpu_of_ones_own():
    config = EngineConfig()
    assert (config.kv_memory_bytes, config.memory_fraction) == (None, 0.9)
    assert (config.block_size, config.max_num_seqs, config.max_batch_tokens) == (16, 256, 8192)
    assert config.prefix_caching
    assert (config.prefill_chunk_tokens, config.max_model_len, config.compile, config.cuda_graphs) == (None,) * 4


@pytest.mark.parametrize(
    "name", ["block_size", "max_num_seqs", "max_batch_tokens", "prefill_target_tokens", "kv_memory_bytes"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "16"])
def test_a_count_is_an_int_from_one(name, value):
    with pytest.raises(ConfigError, match=rf"{name} must be an int >= 1: got {value!r}"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": None}, "block_size must be an int >= 1: got None"),
        ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens must be an int >= 1: got 0"),
        ({"max_model_len": -5}, "max_model_len must be an int >= 1: got -5"),
        ({"memory_fraction": 1}, r"memory_fraction must be a float in \(0, 1\): got 1"),
        ({"memory_fraction": 1.5}, r"memory_fraction must be a float in \(0, 1\): got 1.5"),
        ({"memory_fraction": float("nan")}, r"memory_fraction must be a float in \(0, 1\): got nan"),
        (
            {"max_batch_tokens": 100},
            "max_batch_tokens=100 is below max_num_seqs=256, but every running request decodes one token a step: "
            "raise the one or lower the other",
        ),
        ({"compile": "yes"}, "compile must be True, False or None: got 'yes'"),
        ({"prefix_caching": None}, "prefix_caching must be True or False: got None"),
        ({"cuda_graphs": 2}, "cuda_graphs must be True, False or None: got 2"),
    ],
)
def test_an_impossible_option_names_the_value_and_the_limit(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_a_changed_copy_is_checked_too_and_leaves_the_original():
    config = EngineConfig(max_num_seqs=8)
    assert config.with_(block_size=32) == EngineConfig(max_num_seqs=8, block_size=32)
    assert config.block_size == 16
    with pytest.raises(ConfigError, match="below max_num_seqs=8"):
        config.with_(max_batch_tokens=4)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("blocksize", r"did you mean 'block_size'\?"),
        ("budget", "it is one of SparseKVConfig"),
        ("tp", "options are kv_memory_bytes, .*, backend"),
    ],
)
def test_an_unknown_option_says_which_was_meant(name, hint):
    for make in (EngineConfig, EngineConfig().with_):
        with pytest.raises(ConfigError, match=f"^unknown option '{name}' of EngineConfig: {hint}$"):
            make(**{name: 4})


def test_it_is_frozen():
    with pytest.raises(AttributeError):
        EngineConfig().block_size = 4
