"""The shipped latency script runs, and what it writes can be checked: settings, versions, planned and measured bytes.

Guards against a published command that no longer works, against figures without what made them, and against clocks that
are read while the device still works, or while anything warms up.
"""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_sparsekv as skv

EVALS = Path(__file__).parents[2] / "evals"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EVALS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_caches_are_measured_and_the_bytes_are_the_plans(tiny_llama, tmp_path, monkeypatch, capsys):
    model = tiny_llama(num_layers=3)
    model.save_pretrained(tmp_path / "model")
    script = load("decode_speed")
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


def test_a_run_of_each_cache_warms_up_and_is_not_counted(tiny_llama, monkeypatch):
    script, model = load("decode_speed"), tiny_llama(num_layers=2)
    number = iter(range(100))
    one_run = script.one_run

    def numbered(*arguments):
        one_run(*arguments)
        return {"prefill_s": next(number), "decode_s": 1.0}

    monkeypatch.setattr(script, "one_run", numbered)
    arguments = SimpleNamespace(repeats=3, context=60, new_tokens=1, device="cpu")
    skv.register()
    try:
        taken = script.take_turns(model, torch.randint(3, 256, (1, 60)), skv.SparseKVConfig(budget=40), arguments)
    finally:
        skv.unregister()
    # The caches take turns: 0 and 1 are the first runs of the two.
    found = {cache: [run["prefill_s"] for run in taken["runs"][cache]] for cache in ("dense", "sparse")}
    assert found == {"dense": [2, 4, 6], "sparse": [3, 5, 7]}
    assert len(taken["runs"]["scoring_s"]) == 3


@pytest.fixture
def events(monkeypatch):
    """What happens, in order, where a device works on its own until it is waited for."""
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: events.append("wait"))
    return events


def clock(events):
    return SimpleNamespace(perf_counter=lambda: events.append("clock") or float(len(events)))


def test_the_clock_is_read_when_the_device_is_done(events, monkeypatch):
    script = load("decode_speed")

    def model(**_):
        events.append("step")
        return SimpleNamespace(logits=torch.zeros(1, 1, 5))

    monkeypatch.setattr(script, "time", clock(events))
    times = script.one_run(model, torch.zeros(1, 4, dtype=torch.long), None, 3, "cuda")
    assert events == ["wait", "clock", "step", "wait", "clock", "step", "step", "step", "wait", "clock"]
    assert times == {"prefill_s": 3.0, "decode_s": 5.0}


def test_a_whole_generation_is_timed_to_its_end(events, monkeypatch):
    script = load("generate_speed")
    monkeypatch.setattr(script, "time", clock(events))
    assert script.timed(lambda: events.append("run"), torch.device("cuda")) == (3.0, None)
    assert events == ["wait", "clock", "run", "wait", "clock"]
