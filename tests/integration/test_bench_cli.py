"""`hf-sparsekv bench` on the tiny shape: every request and token is counted, and a mistake is one line."""

import json

import pytest

from hf_sparsekv.bench.shapes import shape_config
from hf_sparsekv.cli.app import main
from hf_sparsekv.cli.bench_options import parse_counts, parse_kinds, parse_sizes
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.hf.models import model_shape

METHOD = ["--budget", "40", "--num-full-layers", "1"]
SMALL = ["-m", "tiny", "--input-len", "90", "--output-len", "5", "--max-num-seqs", "8", "--max-batch-tokens", "256"]


def run(capsys, monkeypatch, *arguments):
    """Exit code, stdout and stderr of one call."""
    monkeypatch.setattr("sys.argv", ["hf-sparsekv", "bench", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


def check_counts(figures, num_requests):
    """Every request gave every token, and the figures agree with one another."""
    assert (figures["num_requests"], figures["num_failed"]) == (num_requests, 0)
    whole, steady = figures["whole"], figures["steady"]
    assert (whole["output_tokens"], whole["prompt_tokens"]) == (num_requests * 5, num_requests * 90)
    assert whole["output_tokens_per_s"] == pytest.approx(num_requests * 5 / whole["seconds"])
    assert steady["seconds"] < whole["seconds"]
    assert 0 < steady["output_tokens"] < whole["output_tokens"]
    for name in ("ttft_s", "itl_s", "request_s"):
        spread = figures[name]
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]


def test_every_engine_and_concurrency_gives_every_token(capsys, monkeypatch, tmp_path):
    path = tmp_path / "bench.json"
    engines = ["--engine", "dense", "--engine", "sparse"]
    arguments = ["--concurrency", "2,3", "--num-requests", "5", "--kv-memory", "1MiB", "--warmup", "1"]
    code, out, _ = run(capsys, monkeypatch, *SMALL, *METHOD, *engines, *arguments, "--json", str(path))
    assert code == 0
    assert "sparse" in out
    report = json.loads(path.read_text())
    runs = report["runs"]
    order = [("dense", 2), ("dense", 3), ("sparse", 2), ("sparse", 3)]
    assert [(figures["engine"], figures["concurrency"]) for figures in runs] == order
    shape = model_shape(shape_config("tiny"))
    token_bytes = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 4
    for figures in runs:
        check_counts(figures, num_requests=5)
        # A client's five tokens take five steps at least, and every client but the last asks twice.
        assert figures["num_steps"] >= 5 * -(-5 // figures["concurrency"])
        assert figures["cache"]["dense_bytes_per_request"] == (90 + 5) * token_bytes
        memory = figures["memory"]
        assert memory["budget_bytes"] == figures["kv_memory_bytes"] == 2**20
        assert memory["budget_share"] == memory["cache_planned_bytes"] / 2**20 <= 1
        assert memory["cache_measured_bytes"] is None  # only a GPU counts its bytes
    assert runs[2]["cache"]["ratio"] < 0.8 < runs[0]["cache"]["ratio"]
    check_provenance(report)


def check_provenance(report):
    """The report says where its figures come from."""
    assert {"format", "kind", "date", "commit", "device", "workload", "engine_options"} <= set(report)
    assert report["command"].startswith("hf-sparsekv bench -m tiny")
    assert set(report["versions"]) == {"hf_sparsekv", "torch", "cuda", "transformers", "python"}
    assert (report["model"]["weights"], report["model"]["num_layers"]) == ("dummy", 4)
    assert report["method"]["budget"] == 40


def test_equal_and_maximum_batches_stand_side_by_side(capsys, monkeypatch, tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["--engine", "dense,sparse", "--concurrency", "1,max", "--kv-memory", "400KB", "--warmup", "0"]
    code, out, _ = run(capsys, monkeypatch, *SMALL, *METHOD, *arguments, "--json", str(path))
    assert code == 0
    runs = json.loads(path.read_text())["runs"]
    assert [(r["engine"], r["is_maximum"]) for r in runs] == [
        ("dense", False), ("dense", True), ("sparse", False), ("sparse", True)
    ]  # fmt: skip
    for figures in runs:
        expected = figures["admissible"]["requests"] if figures["is_maximum"] else 1
        assert (figures["concurrency"], figures["num_failed"], figures["num_preemptions"]) == (expected, 0, 0)
    assert runs[3]["concurrency"] > runs[1]["concurrency"] >= 1
    sides = out[out.index("side by side") :]
    assert "equal, c = 1" in sides
    assert "maximum" in sides
    for figures in runs:
        rate = f"{figures['whole']['output_tokens_per_s']:,.0f} ({figures['concurrency']})"
        assert rate in sides


def test_transformers_own_batching_runs_the_same_requests(capsys, monkeypatch):
    arguments = ["--engine", "transformers", "--concurrency", "2", "--num-requests", "5", "--kv-memory", "2MB"]
    code, out, err = run(capsys, monkeypatch, *SMALL, *arguments, "--json", "-")
    assert code == 0
    (figures,) = json.loads(out)["runs"]
    check_counts(figures, num_requests=5)
    assert figures["cache"] is figures["num_steps"] is None
    assert "without warm-up" in err


def test_questions_about_a_document_run_with_the_prefix_cache_and_without(capsys, monkeypatch):
    load = ["--shared-prefix-len", "64", "--num-questions", "4", "--num-requests", "8", "--concurrency", "1,2"]
    code, out, err = run(capsys, monkeypatch, *SMALL, *METHOD, *load, "--engine", "sparse", "--json", "-")
    assert code == 0
    report = json.loads(out)
    assert (report["workload"]["shared_prefix_len"], report["workload"]["num_questions"]) == (64, 4)
    cases = [(figures["prefix_caching"], figures["concurrency"]) for figures in report["runs"]]
    assert cases == [(False, 1), (False, 2), (True, 1), (True, 2)]
    for figures in report["runs"]:
        check_counts(figures, num_requests=8)
    alone, together = (figures["prefix"] for figures in report["runs"][2:])
    # Two documents of 64 tokens, each read once; of a prompt of 90 its last 32 rows are computed.
    assert (alone["num_hits"], alone["cached_tokens"]) == (6, 6 * 48)
    assert alone["hit_rate"] == 6 * 48 / (8 * 90)
    assert 2 <= together["num_hits"] <= 6
    assert [figures["prefix"]["num_hits"] for figures in report["runs"][:2]] == [0, 0]
    assert [gain["concurrency"] for gain in report["prefix_gains"]] == [1, 2]
    assert err.count("with the prefix cache first token of a hit") == 2


def test_the_dense_baseline_runs_with_the_prefix_cache_and_without_too(capsys, monkeypatch):
    """A gain over a baseline without one would be the prefix cache's, not the sparse cache's."""
    load = ["--shared-prefix-len", "64", "--num-questions", "4", "--num-requests", "8", "--concurrency", "1"]
    code, out, _ = run(capsys, monkeypatch, *SMALL, *METHOD, *load, "--engine", "dense,sparse", "--json", "-")
    assert code == 0
    report = json.loads(out)
    runs = {(figures["engine"], figures["prefix_caching"]): figures["prefix"] for figures in report["runs"]}
    assert list(runs) == [("dense", False), ("dense", True), ("sparse", False), ("sparse", True)]
    # Of a dense prompt the last row alone is computed in any case.
    assert runs["dense", True]["cached_tokens"] == 6 * 64 > runs["sparse", True]["cached_tokens"] > 0
    assert runs["dense", False]["cached_tokens"] == runs["sparse", False]["cached_tokens"] == 0
    assert [gain["engine"] for gain in report["prefix_gains"]] == ["dense", "sparse"]


def test_a_load_without_shared_prefixes_hits_nothing_in_any_case(capsys, monkeypatch):
    arguments = ["--concurrency", "1,2", "--num-requests", "4", "--engine", "sparse", "--json", "-"]
    for option, caching in (([], True), (["--no-prefix-caching"], False)):
        code, out, err = run(capsys, monkeypatch, *SMALL, *METHOD, *arguments, *option)
        report = json.loads(out)
        assert code == 0
        assert [(r["prefix_caching"], r["prefix"]["num_hits"]) for r in report["runs"]] == [(caching, 0)] * 2
        assert report["prefix_gains"] == []
        assert "prefix cache" not in err


def test_a_case_that_cannot_run_does_not_stop_the_others(capsys, monkeypatch):
    arguments = ["--concurrency", "1", "--num-requests", "2", "--engine", "sparse", "--kv-memory", "1KB,1MB"]
    code, out, err = run(capsys, monkeypatch, *SMALL, *METHOD, *arguments, "--json", "-")
    assert code == 1
    failed, good = json.loads(out)["runs"]
    assert "does not hold one request" in failed["error"]
    assert good["num_failed"] == 0
    assert "does not hold one request" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "unknown engine 'vllm'"),
        (["--concurrency", "2,many"], "'many' is not a number"),
        (["--concurrency", "0"], "at least 1"),
        (["--concurrency", "8", "--num-requests", "3"], "never reach a concurrency of 8"),
        (["--kv-memory", "5 bananas"], "'5 bananas' is no size"),
        (["--kv-memory", "1KB", "--concurrency", "1"], "does not hold one request"),
        (["--memory-fraction", "1.5"], "memory_fraction"),
        (["--shared-prefix-len", "90"], "a shared prefix of 90 tokens in prompts of 90"),
        (["--num-questions", "3"], "3 questions about documents of 0 tokens"),
        (["--max-num-seqs", "300"], "max_batch_tokens=256"),
        (["--input-len", "4095"], "4,100"),
        (["--budget", "3"], "num_sink_tokens"),
        (["--num-full-layers", "9"], "only 4 layers"),
        (["--model", "./nowhere"], "no model folder"),
        (["--profile-steps", "5", "--device", "cpu"], "needs a GPU"),
        (["--json", "nowhere/bench.json"], "cannot write"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, monkeypatch, arguments, message):
    code, _, err = run(capsys, monkeypatch, *SMALL, *METHOD, *arguments)
    assert code == 2
    assert message in err
    assert err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("arguments", [["--input-len", "0"], ["--output-len", "x"], ["--warmup", "-1"], ["--c", "1"]])
def test_options_of_the_wrong_kind_exit_with_code_2(capsys, monkeypatch, arguments):
    assert run(capsys, monkeypatch, "-m", "tiny", *arguments)[0] == 2


def test_lists_of_numbers_and_sizes():
    assert parse_counts("10, 20,10,max,MAX") == (10, 20, None)
    assert parse_kinds(["dense, sparse", "dense"]) == parse_kinds(None) == ("dense", "sparse")
    assert parse_sizes("5GB,none,1.5GiB,200MiB,7kb,9") == (
        5 * 10**9,
        None,
        3 * 2**29,
        200 * 2**20,
        7000,
        9,
    )
    with pytest.raises(ConfigError, match="'0GB' is no memory"):
        parse_sizes("0GB")
