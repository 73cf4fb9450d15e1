"""The measuring programs beside the package: mistakes end in one line before anything is measured, and figures add up.

Guards against tracebacks, against figures that are lost because there is no place for them, and against a published
command that no longer works.
"""

import json
import runpy
from pathlib import Path

import pytest
import torch

EVALS = Path(__file__).parents[2] / "evals"
TINY = ["--model", "tiny", "--device", "cpu", "--prompt", "100", "--budget", "40", "--num-full-layers", "1"]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Exit code, stdout and stderr of a program, as a shell sees them."""
    monkeypatch.chdir(tmp_path)

    def called(program, *arguments):
        monkeypatch.setattr("sys.argv", [program, *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(EVALS / program), run_name="__main__")
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return called


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("budget_shapes.py absent.json --json x.json", "error: no such file: absent.json"),
        ("budget_shapes.py bad.json --json x.json", "error: not a profile"),
        ("budget_shapes.py bad.json --json absent/x.json", "error: cannot write --json absent/x.json"),
        ("decode_speed.py --repeats 0", "argument --repeats: '0' is no whole number from 1 on"),
        ("decode_speed.py --context few", "argument --context: 'few' is no whole number from 1 on"),
        ("decode_speed.py --shape tiny --context 64 --budget 3", "error: budget=3 is smaller than"),
        ("decode_speed.py --json absent/x.json", "error: cannot write --json absent/x.json"),
        ("generate_speed.py --model none --device cpu", "error: unknown shape 'none'"),
        ("generate_speed.py --new-tokens 1", "argument --new-tokens: '1' is no whole number from 8 on"),
        ("generate_speed.py --json absent/x.json", "error: cannot write --json absent/x.json"),
        ("parallel_speed.py --compare absent.json bad.json", "error: cannot read absent.json"),
        ("parallel_speed.py --compare other.json bad.json", "error: other.json has figures of another program"),
        ("parallel_speed.py --json absent/x.json", "error: cannot write --json absent/x.json"),
        ("serving_grid.py --output-len 0", "argument --output-len: '0' is no whole number from 1 on"),
    ],
)
def test_mistakes_end_in_one_line(run, tmp_path, command, words):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text('{"kind": "serving"}')
    code, out, err = run(*command.split())
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
@pytest.mark.parametrize("command", ["decode_speed.py --device cuda", "generate_speed.py", "serving_grid.py"])
def test_a_gpu_that_is_not_there_is_named(run, command):
    code, _, err = run(*command.split())
    assert code == 2
    assert "error: device 'cuda' is not available here" in err


def test_generate_is_timed_by_differences_of_whole_runs(run, tmp_path):
    code, _, _ = run(
        "generate_speed.py", *TINY, "--new-tokens", 8, "--batch-sizes", 2, "--repeats", 1, "--json", "x.json"
    )
    assert code == 0
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["settings"]["new_tokens"] == 8 and report["provenance"]["device"]["type"] == "cpu"
    (batch,) = report["batches"]
    assert batch["batch_size"] == 2 and set(batch) == {"batch_size", "plain", "transformers"}
    for kind in ("plain", "transformers"):
        (first,), (whole,) = batch[kind]["seconds"]["1"], batch[kind]["seconds"]["8"]
        assert batch[kind]["step_ms"] == pytest.approx(1000 * (whole - first) / 7)
    assert batch["plain"]["cache_bytes"] > 0


def test_weights_of_a_shape_are_random_and_nothing_is_fetched(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPARSEKV_CACHE", str(tmp_path / "no-cache"))
    small = [
        "--shape",
        "tiny",
        "--context",
        80,
        "--budget",
        40,
        "--num-full-layers",
        1,
        "--new-tokens",
        2,
        "--repeats",
        1,
    ]
    code, out, _ = run("decode_speed.py", *small)
    assert code == 0 and not (tmp_path / "no-cache").exists()
    assert json.loads(out)["dense_cache_bytes"] == 82 * 4 * 2 * 2 * 16 * 4
