"""The plot of serving figures: which points make a line, and what is said where nothing can be drawn."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "evals" / "plot_serving.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("plot_serving", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figures(engine, concurrency, rate, *, memory=5 * 2**30):
    return {
        "engine": engine,
        "kv_memory_bytes": memory,
        "memory_fraction": 0.9,
        "concurrency": concurrency,
        "whole": {"output_tokens_per_s": rate},
        "steady": None,
        "ttft_s": {"p50": concurrency / 100},
    }


def report(*runs, budget=512, scorer="hybrid", num_full_layers=0):
    return {
        "kind": "serving",
        "method": {"budget": budget, "scorer": scorer, "num_full_layers": num_full_layers},
        "model": {"name": "tiny", "dtype": "float32"},
        "device": {"name": "a machine"},
        "workload": {"input_len": 4, "output_len": 2},
        "runs": list(runs),
    }


def draw(script, monkeypatch, capsys, *arguments):
    """Exit code and stderr."""
    monkeypatch.setattr("sys.argv", ["plot_serving.py", *map(str, arguments)])
    return script.main(), capsys.readouterr().err


def test_a_line_is_a_method_or_an_engine_and_a_memory(script):
    reports = [
        report(figures("sparse", 20, 9.0), figures("sparse", 10, 7.0), {"engine": "dense", "error": "no room"}),
        report(figures("sparse", 10, 6.0), figures("dense", 10, 5.0, memory=None), budget=256),
        report(figures("sparse", 10, 4.0), scorer="snapkv", num_full_layers=3),
    ]
    assert script.lines_of(reports, "whole") == {
        "hybrid, 512, 5 GiB": ("sparse", [(10, 7.0, 0.1), (20, 9.0, 0.2)]),
        "hybrid, 256, 5 GiB": ("sparse", [(10, 6.0, 0.1)]),
        "snapkv, 3 full + 512, 5 GiB": ("sparse", [(10, 4.0, 0.1)]),
        "dense, 90% of the GPU": ("dense", [(10, 5.0, 0.1)]),
    }


def test_of_the_same_point_the_last_counts(script):
    lines = script.lines_of([report(figures("dense", 10, 1.0)), report(figures("dense", 10, 2.0))], "whole")
    assert lines == {"dense, 5 GiB": ("dense", [(10, 2.0, 0.1)])}


def test_without_matplotlib_the_extra_is_named(script, monkeypatch, capsys, tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report(figures("dense", 10, 1.0))))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, err = draw(script, monkeypatch, capsys, path, "-o", tmp_path / "plot.png")
    assert code == 2
    assert err == 'error: plots need matplotlib: pip install "hf-sparsekv[notebooks]"\n'


def test_files_that_are_no_reports_are_refused_by_name(script, monkeypatch, capsys, tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[]")
    for name, message in ((path, "is no report"), (tmp_path / "absent.json", "cannot read")):
        code, err = draw(script, monkeypatch, capsys, name)
        assert code == 2
        assert message in err
        assert name.name in err


def test_a_png_is_drawn(script, monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `notebooks`")
    path, output = tmp_path / "bench.json", tmp_path / "plot.png"
    path.write_text(json.dumps(report(figures("dense", 10, 1.0), figures("transformers", 20, 3.0))))
    code, _ = draw(script, monkeypatch, capsys, path, "-o", output)
    assert code == 0
    assert output.read_bytes().startswith(b"\x89PNG")
