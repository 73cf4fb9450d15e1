"""The benchmark of several devices runs on CPUs as it does on GPUs, and its files can be compared."""

import json
import runpy
from pathlib import Path

import pytest

from hf_sparsekv.testing.ranks import run_ranks

SCRIPT = Path(__file__).parents[2] / "evals" / "parallel_speed.py"
OPTIONS = [
    *("--device", "cpu", "--shape", "tiny", "--concurrency", "2", "--input-len", "40", "--steps", "4"),
    *("--kv-memory", "4000000", "--num-full-layers", "1", "--budget", "40"),
]


@pytest.mark.slow
def test_two_ranks_are_measured_and_compared(tmp_path, monkeypatch, capsys):
    paths = [tmp_path / f"tp{size}.json" for size in (1, 2)]
    for size, path in enumerate(paths, start=1):
        # The processes inherit the arguments.
        monkeypatch.setattr("sys.argv", ["parallel_speed.py", *OPTIONS, "--tp", str(size), "--json", str(path)])
        run_ranks(SCRIPT, "main", size)
        runs = json.loads(path.read_text())["runs"]
        assert [run["kind"] for run in runs] == ["sparse", "dense"]
        for run in runs:
            assert run["num_decoding"] == 2
            assert run["decode_tokens_per_s"] > 0
            assert (run["collectives"]["share"] > 0) == (size == 2)
    weights = [json.loads(path.read_text())["runs"][0]["weight_bytes_of_rank"] for path in paths]
    assert weights[1] < 0.75 * weights[0]  # norms and, before transformers 5.24, the embedding are whole
    monkeypatch.setattr("sys.argv", ["parallel_speed.py", "--compare", *map(str, paths)])
    runpy.run_path(str(SCRIPT))["main"]()
    assert "tiny, sparse, 2: " in capsys.readouterr().out


def test_a_shape_that_does_not_divide_is_told(tmp_path, monkeypatch):
    path = tmp_path / "tp.json"
    monkeypatch.setattr("sys.argv", ["parallel_speed.py", *OPTIONS, "--tp", "3", "--json", str(path)])
    run_ranks(SCRIPT, "main", 3)
    assert "choose tp=1 or 2" in json.loads(path.read_text())["runs"][0]["error"]
    monkeypatch.setattr("sys.argv", ["parallel_speed.py", *OPTIONS, "--tp", "2"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="start 2 processes for --tp 2: got 4"):
        runpy.run_path(str(SCRIPT))["main"]()
