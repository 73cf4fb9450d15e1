"""What SparseKVConfig refuses: every message names the value, the limit and the way out."""

from math import inf
from typing import Any

import numpy as np
import pytest

from hf_sparsekv import SparseKVConfig
from hf_sparsekv.errors import ConfigError, SparseKVError
from hf_sparsekv.scorers.snapkv import SnapKV

NAN = float("nan")

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # layers
    ("both", {"num_full_layers": 2, "full_layers": [0]}, r"not both: got num_full_layers=2 and full_layers=\(0,\)"),
    ("count-negative", {"num_full_layers": -1}, "num_full_layers must be an int from 0 to 2147483647: got -1"),
    ("count-bool", {"num_full_layers": True}, "num_full_layers must be an int from . to 2147483647: got True"),
    ("count-float", {"num_full_layers": 3.0}, "num_full_layers must be an int from . to 2147483647: got 3.0"),
    ("layers-negative", {"full_layers": [0, -2]}, r"distinct layer indices from 0 up: got \[0, -2\]"),
    ("layers-twice", {"full_layers": [4, 4]}, r"distinct layer indices from 0 up: got \[4, 4\]"),
    ("layers-string", {"full_layers": "012"}, "full_layers must be a list of layer indices: got '012'"),
    ("layers-int", {"full_layers": 3}, "full_layers must be a list of layer indices: got 3"),
    ("layers-float", {"full_layers": [0, 1.0]}, "full_layers must hold ints, at most 2147483647: got 1.0"),
    ("layers-bool", {"full_layers": [True]}, "full_layers must hold ints, at most 2147483647: got True"),
    # prefill
    ("prefill-unknown", {"prefill": "chunked"}, "unknown prefill 'chunked': choose one of exact, bounded"),
    ("prefill-none", {"prefill": None}, "unknown prefill None: choose one of exact, bounded"),
    ("chunk-exact", {"prefill_chunk_tokens": 512}, "prefill_chunk_tokens=512 has no effect with prefill='exact'"),
    ("chunk-zero", {"prefill": "bounded", "prefill_chunk_tokens": 0}, "must be an int from 1 to .*: got 0"),
    ("chunk-float", {"prefill": "bounded", "prefill_chunk_tokens": 64.0}, "must be an int from 1 to .*: got 64.0"),
    (
        "chunk-below-window",
        {"prefill": "bounded", "prefill_chunk_tokens": 31},
        "prefill_chunk_tokens=31 is smaller than observation_window=32: raise it to at least 32",
    ),
    ("bounded-fraction", {"prefill": "bounded", "budget": 0.25}, "budget=0.25 is a fraction of nothing yet"),
    ("bounded-list", {"prefill": "bounded", "budget": [512, 0.5]}, "budget=0.5 is a fraction .*whole tokens as an int"),
    # tokens
    ("sinks-negative", {"num_sink_tokens": -1}, "num_sink_tokens must be an int from 0 to 2147483647: got -1"),
    ("sinks-none", {"num_sink_tokens": None}, "num_sink_tokens must be an int from . to 2147483647: got None"),
    ("recent-zero", {"num_recent_tokens": 0}, "num_recent_tokens must be an int from 1 to 2147483647: got 0"),
    ("recent-string", {"num_recent_tokens": "32"}, "num_recent_tokens must be an int from . to 2147483647: got '32'"),
    ("window-zero", {"observation_window": 0}, "observation_window must be an int from 1 to 2147483647: got 0"),
    ("window-bool", {"observation_window": True}, "observation_window must be an int from . to 2147483647: got True"),
    (
        "window-past-recent",
        {"observation_window": 33, "num_recent_tokens": 32},
        "observation_window=33 is larger than num_recent_tokens=32.*raise num_recent_tokens to 33",
    ),
    ("sinks-huge", {"num_sink_tokens": 10**30}, "num_sink_tokens must be an int from 0 to 2147483647: got 10{30}$"),
    ("recent-huge", {"num_recent_tokens": 2**63}, "num_recent_tokens must be an int from 1 to 2147483647"),
    ("recent-endless", {"num_recent_tokens": 10**5000}, "num_recent_tokens must be .*got an int of 16610 bits"),
    ("layers-huge", {"full_layers": [2**31]}, "full_layers must hold ints, at most 2147483647: got 2147483648"),
    ("layers-bytes", {"full_layers": b"1"}, "full_layers must be a list of layer indices: got b'1'"),
    # budget
    ("budget-huge", {"budget": 10**30}, "budget must be at most 2147483647: got 10{30} .*use full layers"),
    ("budget-bytes", {"budget": b"1"}, "budget must be an int .* got b'1'"),
    ("budget-array", {"budget": np.array([50, 60])}, r"budget must be an int .* got array\(\[50, 60\]\)"),
    ("budget-small", {"budget": 35}, r"budget=35 is smaller than .* = 36: raise the budget to at least 36"),
    ("budget-zero", {"budget": 0}, r"budget=0 is smaller than .* = 36"),
    ("budget-one", {"budget": 1.0}, r"budget=1.0 is not a fraction in \(0, 1\).*use full layers"),
    ("budget-nothing", {"budget": 0.0}, r"budget=0.0 is not a fraction in \(0, 1\)"),
    ("budget-float", {"budget": 512.0}, r"budget=512.0 is not a fraction.*whole tokens as an int"),
    ("budget-nan", {"budget": NAN}, r"budget=nan is not a fraction"),
    ("budget-bool", {"budget": True}, "budget must be an int .* got True"),
    ("budget-none", {"budget": None}, "budget must be an int .* got None"),
    ("budget-string", {"budget": "1024"}, "budget must be an int .* got '1024'"),
    ("budget-empty", {"budget": []}, "budget is an empty list: give one entry for each window layer"),
    ("budget-entry", {"budget": [64, 0.5, 12]}, "budget=12 is smaller than"),
    ("budget-entry-fraction", {"budget": [64, 1.5]}, "budget=1.5 is not a fraction"),
    ("budget-entry-nested", {"budget": [64, [64]]}, r"budget must be an int .* got \[64\]"),
    # shape
    ("shape", {"budget_shape": "pyramyd"}, "unknown budget_shape 'pyramyd': choose one of uniform, pyramid"),
    ("shape-of-list", {"budget_shape": "pyramid", "budget": [64]}, "budget_shape='pyramid' has no effect with a list"),
    ("beta-uniform", {"pyramid_beta": 5}, "pyramid_beta=5 has no effect with budget_shape='uniform'"),
    (
        "beta-small",
        {"pyramid_beta": 0.5, "budget_shape": "pyramid"},
        "pyramid_beta must be a finite number >= 1: got 0.5",
    ),
    (
        "beta-nan",
        {"pyramid_beta": NAN, "budget_shape": "pyramid"},
        "pyramid_beta must be a finite number >= 1: got nan",
    ),
    (
        "beta-bool",
        {"pyramid_beta": True, "budget_shape": "pyramid"},
        "pyramid_beta must be a finite number >= 1: got True",
    ),
    (
        "beta-inf",
        {"pyramid_beta": inf, "budget_shape": "pyramid"},
        "pyramid_beta must be a finite number >= 1: got inf",
    ),
    (
        "beta-endless",
        {"pyramid_beta": 10**400, "budget_shape": "pyramid", "budget": 0.5},
        "pyramid_beta must be a finite number >= 1: got an int of 1329 bits",
    ),
    # arrays compare with every choice at once
    *(
        (f"{name}-array", {name: np.array(["mean", "max"])}, f"unknown {name} array")
        for name in ("budget_shape", "pooling", "row_reduction", "group_reduction", "decode")
    ),
    # names
    ("unknown", {"bugdet": 5}, "unknown option 'bugdet': did you mean 'budget'"),
    ("ratio", {"ratio": 0.5}, "unknown option .ratio.: options are preset, .*budget"),
    ("compression-ratio", {"compression_ratio": 0.5}, "unknown option .compression_ratio.: options are .*budget"),
    # scoring
    ("pooling", {"pooling": "mean"}, "unknown pooling 'mean': choose one of avg, max, forward, none"),
    ("rows", {"row_reduction": "sum"}, "unknown row_reduction 'sum': choose one of mean, max"),
    ("groups", {"group_reduction": "sum"}, "unknown group_reduction 'sum': choose one of mean, max"),
    ("rows-idle", {"row_reduction": "max", "scorer": "tova"}, "row_reduction='max' has no effect with scorer 'tova'"),
    ("rows-idle-h2o", {"row_reduction": "mean", "scorer": "h2o"}, "row_reduction='mean' has no effect .* 'h2o'"),
    (
        "groups-idle",
        {"group_reduction": "max", "scorer": "keydiff"},
        "group_reduction='max' has no effect .* 'keydiff'",
    ),
    ("width-even", {"pool_kernel_size": 8}, "pool_kernel_size must be odd and at most 41: got 8"),
    ("width-large", {"pool_kernel_size": 43}, "pool_kernel_size must be an int from 1 to 41: got 43"),
    ("width-zero", {"pool_kernel_size": 0}, "pool_kernel_size must be an int from 1 to 41: got 0"),
    ("width-float", {"pool_kernel_size": 7.0}, "pool_kernel_size must be an int from 1 to 41: got 7.0"),
    ("width-idle", {"pool_kernel_size": 7, "pooling": "none"}, "pool_kernel_size=7 has no effect with pooling='none'"),
    # decode
    ("decode", {"decode": "rings"}, "unknown decode 'rings': choose one of replace_lowest, ring, grow"),
    ("decay-large", {"decay": 1.5}, r"decay must be a number in \[0, 1\]: got 1.5"),
    ("decay-negative", {"decay": -0.1}, r"decay must be a number in \[0, 1\]: got -0.1"),
    ("decay-nan", {"decay": NAN}, r"decay must be a number in \[0, 1\]: got nan"),
    ("decay-bool", {"decay": True}, r"decay must be a number in \[0, 1\]: got True"),
    ("decay-ring", {"decay": 0.5, "decode": "ring"}, "decay=0.5 has no effect with decode='ring'"),
    ("decay-grow", {"decay": 0.5, "decode": "grow"}, "decay=0.5 has no effect with decode='grow'"),
    ("decay-of-ring-scorer", {"decay": 0.5, "scorer": "streaming_llm"}, "decay=0.5 has no effect with decode='ring'"),
    ("share-large", {"prompt_share": 1.5}, r"prompt_share must be a number in \[0, 1\]: got 1.5"),
    ("share-nan", {"prompt_share": NAN}, r"prompt_share must be a number in \[0, 1\]: got nan"),
    (
        "share-ring",
        {"prompt_share": 0.5, "decode": "ring"},
        "prompt_share=0.5 has no effect with decode='ring': leave it out, or",
    ),
    ("share-grow", {"prompt_share": 0.1, "decode": "grow"}, "prompt_share=0.1 has no effect with decode='grow'"),
    (
        "share-of-what-is-forgotten",
        {"prompt_share": 0.5, "scorer": "tova"},
        "prompt_share=0.5 has no effect with decay=0.0, which forgets .*: give a decay of at least 1e-30",
    ),
    # scorer
    ("scorer", {"scorer": "snapvk"}, "unknown scorer 'snapvk': did you mean 'snapkv'"),
    ("scorer-far", {"scorer": "xyzzy"}, "unknown scorer 'xyzzy': see the list .*snapkv"),
    ("scorer-class", {"scorer": SnapKV}, "pass an object, not the class"),
    ("scorer-none", {"scorer": None}, "scorer must be a name or a Scorer, got None"),
    ("scorer-option", {"scorer_options": {"value_nrom": True}}, "unknown option 'value_nrom' of scorer 'hybrid'"),
    ("scorer-value", {"scorer": "rkv", "scorer_options": {"weight": 2}}, "weight must be a number"),
    ("scorer-object", {"scorer": SnapKV(), "scorer_options": {"value_norm": True}}, "no effect with a scorer object"),
    ("choice-long", {"pooling": "x" * 5000}, r"unknown pooling 'x{76}\.\.\.: choose"),
    ("future-huge", {"scorer": "expected_attention", "scorer_options": {"num_future": 10**12}}, "from 1 to 131072"),
    ("spared-huge", {"scorer": "rkv", "scorer_options": {"num_spared": 10**30}}, "num_spared must be .* 2147483647"),
    (
        "temperature-huge",
        {"scorer": "keyformer", "scorer_options": {"temperature": 10**400}},
        r"temperature must be a number from 1e-06 to 1e\+06: got an int of 1329 bits",
    ),
    ("temperature-tiny", {"scorer": "keyformer", "scorer_options": {"temperature": 1e-300}}, "from 1e-06"),
    ("scorer-options-none", {"scorer_options": None}, "scorer_options must be .*got None"),
    ("scorer-options-list", {"scorer_options": ["value_norm"]}, r"scorer_options must be .*got \['value_norm'\]"),
]


@pytest.mark.parametrize(("options", "message"), [pytest.param(o, m, id=name) for name, o, m in REFUSED])
def test_a_wrong_option_is_refused_with_its_value_and_the_way_out(options, message):
    with pytest.raises(ConfigError, match=message):
        SparseKVConfig(**options)


def test_a_configuration_error_is_a_value_error_and_ours():
    with pytest.raises(ValueError, match="num_recent_tokens") as caught:
        SparseKVConfig(num_recent_tokens=0)
    assert isinstance(caught.value, SparseKVError)


def test_every_message_is_one_line_and_short():
    for _, options, _ in REFUSED:
        with pytest.raises(ConfigError) as caught:
            SparseKVConfig(**options)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


def test_a_value_too_deep_to_print_is_refused_like_any_other():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested too deeply"):
        SparseKVConfig(budget_shape=deep)
