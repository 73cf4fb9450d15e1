"""The shipped latency script runs, and what it writes can be checked: settings, versions, planned and measured bytes.

Guards against a published command that no longer works, and against figures without what made them.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import hf_sparsekv as skv

SCRIPT = Path(__file__).parents[2] / "evals" / "decode_speed.py"


def test_both_caches_are_measured_and_the_bytes_are_the_plans(tiny_llama, tmp_path, monkeypatch, capsys):
    model = tiny_llama(num_layers=3)
    model.save_pretrained(tmp_path / "model")
    spec = importlib.util.spec_from_file_location("decode_speed", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    options = {"model": tmp_path / "model", "context": 150, "budget": 64, "num-full-layers": 1}
    options |= {"new-tokens": 3, "repeats": 2, "json": tmp_path / "figures.json"}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr("sys.argv", ["decode_speed.py", *arguments])
    try:
        script.main()
    finally:
        skv.unregister()
    figures = json.loads((tmp_path / "figures.json").read_text())
    plan = skv.SparseKVCache(model.config, skv.SparseKVConfig(num_full_layers=1, budget=64)).plan
    assert figures["cache_bytes"] == figures["planned_bytes"]
    assert figures["cache_bytes"] == plan.total_bytes(153, element_bytes=4, prompt_length=150)
    assert figures["dense_cache_bytes"] == 153 * 3 * 2 * 2 * 16 * 4
    assert figures["scoring_extra_bytes"] > 0
    for cache in ("dense", "sparse"):
        assert figures[cache]["prefill_s"] > 0
        assert figures[cache]["decode_tokens_per_s"] > 0
        decoded = sorted(run["decode_s"] for run in figures["runs"][cache])
        assert len(decoded) == 2
        assert figures[cache]["decode_tokens_per_s"] == pytest.approx(3 / (sum(decoded) / 2))
    assert figures["scoring_s"] == pytest.approx(sum(figures["runs"]["scoring_s"]) / 2)
    assert {"context", "budget", "new_tokens", "repeats", "scorer", "device", "seed"} <= set(figures["settings"])
    assert figures["commit"] is None or re.fullmatch(r"\S*[0-9a-f]{7,40}(-dirty)?", figures["commit"])
    assert "5/7" in capsys.readouterr().err  # progress, while the run waits
    assert set(figures["versions"]) == {"torch", "transformers", "hf_sparsekv"}
