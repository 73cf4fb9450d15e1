"""`hf-sparsekv eval` on a tiny model: every sample beside the dense cache, mistakes before any work, nothing lost.

Guards against nominal compression, tasks that go to the wrong suite, and results that an interruption takes along.
"""

import importlib
import json
import shlex
from pathlib import Path

import pytest

from hf_sparsekv.cli import eval as eval_module
from hf_sparsekv.cli.app import main
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import InputError
from hf_sparsekv.testing.models import byte_tokenizer, tiny_llama

# numpy's longdouble probe and transformers' own, while loading
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

GRID = ["--lengths", "600", "--seeds", "1", "--limit", "2", "--essay", "pydoc"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose tokens are bytes."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(num_layers=4, num_heads=4, num_kv_heads=2).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def run(folder, capsys, monkeypatch, tmp_path):
    """Exit code, stdout and stderr of one call, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def called(*arguments):
        monkeypatch.setattr("sys.argv", ["hf-sparsekv", "eval", "-m", folder, *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        print(captured.err)  # shown where a test fails
        return caught.value.code or 0, captured.out, captured.err

    return called


def read(name):
    return json.loads(Path(name).read_text())


def lines_of(name):
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_methods_meet_the_ratio_in_measured_bytes(run):
    methods = ["--method", "tova,pyramidkv,original", "--compression", "2,4,10"]
    code, out, _ = run("-t", "needle,perplexity", *GRID, *methods, "--json", "r.json")
    assert code == 0
    report = read("r.json")
    assert report["kind"] == "eval" and report["date"]
    assert "Newcombe" in report["suites"]["offline"]["intervals"]
    assert report["suites"]["offline"]["prompts"] == {"chat_template": None, "stop_ids": []}
    assert report["command"][:4] == ["eval", "-m", report["suites"]["offline"]["model"]["name"], "-t"]
    places = {(row["task"], row["mode"]) for row in report["rows"]}
    assert places == {("needle", "aware"), ("needle", "agnostic"), ("perplexity", "agnostic")}
    for place in places:
        rows = {row["config"]: row for row in report["rows"] if (row["task"], row["mode"]) == place}
        assert set(rows) == {"dense", *(f"{m}-{r}x" for m in ("tova", "pyramidkv", "original") for r in (2, 4, 10))}
        for name, row in rows.items():
            assert row["half"] == "report"
            if name.startswith("original"):  # three of four layers keep everything
                assert "is not possible, at most 1.2" in row["refused"]
            elif name != "dense":
                assert float(name.rpartition("-")[2][:-1]) <= row["compression"] < 1.1 * float(name.split("-")[1][:-1])
                assert isinstance(row["budget"], float)
    assert "needle, query-aware, up to 600 tokens, report half, n = 2" in out
    assert "not valid: the dense model is near chance" in " ".join(out.split())


def test_a_second_call_measures_only_what_is_missing(run, monkeypatch):
    first = run("-t", "needle", *GRID, "--config", "a:num_full_layers=0,budget=0.3", "--json", "r.json")
    before = lines_of("eval.jsonl")
    assert first[0] == 0 and len(before) == 1 + 2 * 2 * 2
    assert [row["config"] for row in read("r.json")["rows"]] == ["dense", "a"] * 2
    code, *_ = run(
        "-t", "needle", *GRID, "--config", "a:num_full_layers=0,budget=0.3", "--budget", "64", "--json", "r.json"
    )
    after = lines_of("eval.jsonl")
    assert code == 0 and after[: len(before)] == before
    assert {line["config"] for line in after[len(before) :]} == {"sparse"}
    assert [row["config"] for row in read("r.json")["rows"]] == ["dense", "a", "sparse"] * 2
    assert read("r.json")["suites"]["offline"]["configs"]["needle"]["sparse"]["config"]["budget"] == 64


def test_options_beside_a_file_win(run, tmp_path):
    (tmp_path / "mine.json").write_text('{"budget": 64, "num_full_layers": 1, "scorer": "tova"}')
    code, *_ = run("-t", "needle", *GRID, "--config", "mine.json", "--num-full-layers", "2", "--json", "r.json")
    assert code == 0
    config = read("r.json")["suites"]["offline"]["configs"]["needle"]["mine"]["config"]
    assert (config["budget"], config["num_full_layers"], config["scorer"]) == (64, 2, "tova")


def test_an_interruption_of_several_processes_says_that_parts_are_left(run, monkeypatch):
    def interrupted(*_args, **_options):
        Path("eval.jsonl.part-1-of-2").write_bytes(b"")
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("evals.offline_suite").OfflineSuite, "run", interrupted)
    code, _, err = run("-t", "needle", *GRID, "--budget", "64")
    assert code == 130
    assert "stays in eval.jsonl and its parts, eval.jsonl.part-*; the same command merges them and goes on" in err


def test_an_interruption_keeps_what_is_finished(run, monkeypatch):
    stored = []
    samples_file = importlib.import_module("evals.tasks.lines").SampleLines
    add = samples_file.add

    def interrupted(lines, line_id, line):
        if len(stored) == 3:
            raise KeyboardInterrupt
        add(lines, line_id, line)
        stored.append(line_id)

    monkeypatch.setattr(samples_file, "add", interrupted)
    code, out, err = run("-t", "needle", *GRID, "--budget", "64", "--json", "r.json")
    assert (code, out) == (130, "")
    assert "what is finished stays in eval.jsonl, the same command goes on" in err
    assert [line["id"] for line in lines_of("eval.jsonl")] == ["run", *stored]
    assert not Path("r.json").exists()
    monkeypatch.setattr(samples_file, "add", add)
    assert run("-t", "needle", *GRID, "--budget", "64")[0] == 0
    assert [line["id"] for line in lines_of("eval.jsonl")][:4] == ["run", *stored]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-t", "niddle", "--suite", "offline"], "offline tasks are needle"),
        (["-t", "needle", "--suite", "online"], "--suite is offline or lm-eval: got 'online'"),
        (["-t", "needle,"], "has an empty name"),
        (["-t", "needle", "--lengths", "5000"], "samples of 5000 tokens, the model takes 4096"),
        (["-t", "needle", "--lengths", "a"], "--lengths: 'a' is not a number"),
        (["-t", "needle", "--half", "third"], "--half is report, tune or both: got 'third'"),
        (["-t", "needle", "--seeds", "0"], "no sample is left"),
        (["-t", "needle", "--method", "snapkw"], "'snapkw'"),
        (["-t", "needle", "--method", "tova", "--scorer", "h2o"], "--method names the scorers"),
        (["-t", "needle", "--method", "tova", "--compression", "0.5"], "more than 1: got 0.5"),
        (["-t", "needle", "--compression", "2", "--budget", "64"], "give one of the two"),
        (["-t", "needle", "--config", "absent.json"], "no such file: absent.json"),
        (["-t", "needle", "--config", "a:budget=64", "--config", "a:budget=80"], "a name of its own"),
        (["-t", "needle", "--num-full-layers", "5"], "the model has only 4 layers"),
        (["-t", "needle", "--num-fewshot", "2"], "--num-fewshot, --batch-size and --include-path are for tasks of lm"),
        (["-t", "needle", "--json", "eval.jsonl"], "are one file"),
        (["-t", "needle", "--json", "absent/r.json"], "no such folder"),
        (["-t", "needle", *GRID, "--device", "cpu", "--replicas-per-gpu", "2"], "has no effect on a CPU"),
        (["-t", "needle", "--json", "/proc/r.json"], "cannot write /proc/r.json: "),
        (["-t", "needle", "--out", "/proc/version"], "cannot write /proc/version: "),
    ],
)
def test_mistakes_end_in_one_line_before_any_work(run, monkeypatch, arguments, words):
    monkeypatch.setattr("hf_sparsekv.cli.loading.AutoModelForCausalLM", None)  # no weights are asked for
    code, out, err = run(*arguments, "--essay", "pydoc")
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert err.splitlines()[-1].startswith("error: ")
    assert not Path("eval.jsonl").exists()


def test_without_lm_eval_the_extra_is_named(run, monkeypatch):
    session = importlib.import_module("evals.session")
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    code, _, err = run("-t", "hellaswag")
    assert code == 2
    assert "'hellaswag' is no offline task (needle," in " ".join(err.split())
    assert 'not installed: pip install "hf-sparsekv[eval]"' in " ".join(err.split())


def test_where_the_files_are_missing_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(eval_module, "PACKAGE_FOLDER", tmp_path / "hf_sparsekv")
    with pytest.raises(InputError, match="install hf-sparsekv again"):
        eval_module.evals_module("session")


def test_the_readmes_commands_run(run):
    """Those of the offline suite, on few samples."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    commands = [line for line in readme.splitlines() if line.startswith("hf-sparsekv eval ")]
    offline = [shlex.split(line, comments=True) for line in commands if "lm-eval" not in line]
    assert len(offline) == 2
    for number, command in enumerate(offline):
        code, out, _ = run(*command[2:], *GRID, "--out", f"{number}.jsonl")
        assert code == 0 and "dense" in out


# --- tasks of lm-eval -------------------------------------------------------------------------------------------------


@pytest.fixture
def tasks(tmp_path):
    """A folder with two multiple-choice tasks, the second one with contexts too short for any ratio."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'hf-sparsekv[eval]'")
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, length in (("long_contexts", 120), ("short_contexts", 3)):
        lines = [
            {"text": "abcdefg" * (length // 3 + i), "choices": ["k", "lm", "n"], "answer": i % 3} for i in range(4)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": f"{folder}/{name}.jsonl"}, "cache_dir": f"{folder}/cache"},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_target": "answer",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc"}],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    return str(folder)


PLAIN_PROMPTS = {"chat_template": None, "stop_ids": [2, 220]}
"""The model ends an answer by 2, the harness by what the tokenizer ends a text with."""


@pytest.mark.filterwarnings("ignore")  # lm-eval's and its dependencies' own
def test_tasks_of_lm_eval_are_paired_with_the_dense_cache(run, tasks, monkeypatch):
    method = ["--method", "tova", "--compression", "2", "--include-path", tasks, "--limit", "3", "--json", "r.json"]
    code, out, _ = run("-t", "long_contexts,short_contexts", *method)
    assert code == 0
    dense, tova, *short = read("r.json")["rows"]
    prompts = read("r.json")["suites"]["lm-eval"]["prompts"]
    assert prompts == {name: PLAIN_PROMPTS for name in ("long_contexts", "short_contexts")}
    assert (dense["task"], dense["config"], dense["num_samples"], dense["compression"]) == (
        "long_contexts",
        "dense",
        3,
        1,
    )
    assert dense["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert dense["chance"] == pytest.approx(1 / 3)
    assert tova["config"] == "tova-2x" and tova["num_evicting"] == 9
    assert 2 <= tova["compression"] < 2.2
    assert tova["difference"]["value"] == pytest.approx(tova["accuracy"]["value"] - dense["accuracy"]["value"])
    assert "is not possible" in short[1]["refused"]
    assert "long_contexts, query-aware" in out
    lines = lines_of("eval.lm_eval.jsonl")
    assert [line["id"] for line in lines[1:]] == [
        "dense|long_contexts",
        "tova-2x|long_contexts",
        "dense|short_contexts",
    ]
    lm_suite = importlib.import_module("evals.lm_suite")
    monkeypatch.setattr(lm_suite, "evaluate", None)  # everything is there
    first = read("r.json")["rows"]
    assert run("-t", "long_contexts,short_contexts", *method)[0] == 0
    assert read("r.json")["rows"] == first


@pytest.mark.filterwarnings("ignore")
def test_figures_say_how_prompts_were_written_and_what_ended_answers(tasks):
    evaluate = importlib.import_module("evals.harness").evaluate
    model, tokenizer, config = tiny_llama(num_layers=2), byte_tokenizer(), SparseKVConfig(budget=64)
    options = {"include_path": tasks, "include_defaults": False, "limit": 1, "bootstrap_iters": 0}
    options["model_options"] = {"tokenizer": tokenizer}
    plain = evaluate(model, "long_contexts", config, **options)
    assert plain["prompts"] == PLAIN_PROMPTS
    model.generation_config.eos_token_id = [9, 2]
    tokenizer.chat_template = "<{% for message in messages %}{{ message['content'] }}{% endfor %}>"
    templated = evaluate(model, "long_contexts", config, apply_chat_template=True, **options)
    assert templated["prompts"] == {"chat_template": tokenizer.chat_template, "stop_ids": [2, 9, 220]}
    contexts = [figures["samples"]["long_contexts"][0]["arguments"][0][0] for figures in (plain, templated)]
    assert contexts[1] == f"<{contexts[0]}>"


@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_of_lm_eval_is_refused_before_the_weights(run, tasks, monkeypatch):
    monkeypatch.setattr("hf_sparsekv.cli.loading.AutoModelForCausalLM", None)
    code, _, err = run("-t", "long_context", "--include-path", tasks)
    assert code == 2
    assert "unknown task 'long_context'" in " ".join(err.split())


def test_of_several_filters_of_lm_eval_the_first_one_counts():
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'hf-sparsekv[eval]'")
    values_of = importlib.import_module("evals.lm_suite")._values
    samples = [
        {"doc_id": i, "filter": name, "exact_match": float(name == "strict" and i == 1)}
        for name in ("strict", "flexible")
        for i in range(2)
    ]
    assert values_of("sums", samples) == {"0": 0.0, "1": 1.0}
    assert values_of("sums", []) == {}
