"""The serving grid: it can be stopped, goes on where it was, and writes what `bench --json` writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--shape", "tiny", "--device", "cpu", "--input-len", "24", "--concurrency", "2", "--num-requests", "2"]


def grid(folder, *options, output_len=3, only="published_1024"):
    command = [
        sys.executable,
        str(ROOT / "evals" / "serving_grid.py"),
        str(folder),
        *SMALL,
        "--max-batch-tokens",
        "256",
        *options,
    ]
    return subprocess.run(
        [*command, "--only", only, "--output-len", str(output_len)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    stopped = grid(folder, "--time-limit", "0")
    assert (stopped.returncode, list(folder.iterdir())) == (1, []), stopped.stderr
    assert stopped.stdout.count("not begun") == 2
    done = grid(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_file_is_a_report_of_the_bench_with_the_time_of_each_start(folder):
    report = json.loads((folder / "serving_published_1024.json").read_text())
    assert (report["kind"], report["method"]["budget"], report["workload"]["output_len"]) == ("serving", 1024, 3)
    assert [run["case"] for run in report["runs"]] == ["sparse c=64 90%", "sparse c=20 90%"]
    assert [run["engines_before"] for run in report["runs"]] == [0, 1]
    for run in report["runs"]:
        assert run["whole"]["output_tokens"] == 6 and run["num_failed"] == 0
        assert 0 < run["start"]["engine_s"] < run["case_s"] and 0 < run["start"]["warmup_s"] < run["case_s"]


def test_what_is_there_is_not_run_again_and_what_failed_is(folder):
    path = folder / "serving_published_1024.json"
    report = json.loads(path.read_text())
    kept, lost = report["runs"]
    report["runs"] = [kept, {"case": lost["case"], "error": "no memory"}]
    path.write_text(json.dumps(report))
    again = grid(folder)
    assert again.returncode == 0 and again.stdout.count("there already") == 1, again.stdout + again.stderr
    first, second = json.loads(path.read_text())["runs"]
    assert first == kept and second["case"] == lost["case"] and "error" not in second


def test_another_workload_does_not_enter_the_file(folder):
    path = folder / "serving_published_1024.json"
    before = path.read_text()
    other = grid(folder, output_len=2)
    assert other.returncode == 2 and "has another workload" in other.stdout
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--concurrency", "1"], "sparse c=64 90% was run with concurrency=2, not 1"),
        (["--num-requests", "3"], "sparse c=64 90% was run with num_requests=2, not 3"),
        (["--concurrency", "3"], "2 requests never reach a concurrency of 3: ask for more requests"),
    ],
)
def test_another_load_does_not_enter_the_file(folder, options, difference):
    path = folder / "serving_published_1024.json"
    before = path.read_text()
    other = grid(folder, *options)
    assert other.returncode == 2 and difference in other.stdout, other.stdout + other.stderr
    assert other.stdout.count("\n") == 1
    assert path.read_text() == before


def test_another_model_does_not_enter_the_file(folder):
    path = folder / "serving_published_1024.json"
    before = path.read_text()
    report = json.loads(before)
    report["model"]["num_layers"] += 1
    path.write_text(json.dumps(report))
    other = grid(folder)
    path.write_text(before)
    assert other.returncode == 2 and "has another model" in other.stdout, other.stdout + other.stderr


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": 3}'])
def test_what_is_no_report_is_left_alone(tmp_path, text):
    path = tmp_path / "serving_published_1024.json"
    path.write_text(text)
    refused = grid(tmp_path)
    assert refused.returncode == 2 and str(path) in refused.stdout, refused.stdout + refused.stderr
    assert path.read_text() == text


def test_a_text_that_no_case_has_is_refused(tmp_path):
    refused = grid(tmp_path / "new", only="nothing")
    assert refused.returncode == 2 and "--only 'nothing' is in no line of --list" in refused.stdout
    assert not (tmp_path / "new").exists()
