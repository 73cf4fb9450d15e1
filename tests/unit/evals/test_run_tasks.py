"""A run measures every sample once with every configuration, goes on where it stopped, and sums up what it measured.

Guards against results of another model, configuration or text taken for one's own, against figures of a cache that
never evicted, and against values that are not the model's.
"""

import copy
import itertools
import json
import math

import pytest
import torch

import hf_sparsekv as skv
from evals import run_tasks
from evals.sample_groups import by_document, outcomes_of
from evals.scoring import SparseScorer
from evals.shared_samples import measure_part
from evals.tasks.catalog import TASKS, samples_of
from evals.tasks.essay import EssayTokens
from evals.tasks.lines import sample_parts
from evals.tasks.measure import context_of, outcome
from evals.tasks.samples import AGNOSTIC, AWARE, NO_CONTEXT
from evals.tasks.stats import bootstrap
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.testing.compare import MAX_LOGITS_RELATIVE_ERROR
from hf_sparsekv.testing.models import tiny_llama as build_tiny_llama

SMALL = skv.SparseKVConfig(num_full_layers=0, budget=64, num_recent_tokens=8, observation_window=8)
LARGE = skv.SparseKVConfig(num_full_layers=0, budget=4000)
ESSAY = {"name": "numbers", "sha256": "of the numbers"}


@pytest.fixture(scope="module")
def model():
    return build_tiny_llama(num_layers=2)


@pytest.fixture(scope="module")
def samples(text):
    chosen = samples_of(["needle", "document_qa"], text, lengths=[700], seeds=[0, 1])
    return chosen[::5] + samples_of(["perplexity"], text, lengths=[300], seeds=[0, 1, 2])


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """The intervals themselves are tested elsewhere."""
    monkeypatch.setattr(bootstrap, "__kwdefaults__", bootstrap.__kwdefaults__ | {"num_resamples": 50})


@pytest.fixture
def go(model, samples, tmp_path):
    def run(configs=None, *, path=tmp_path / "out.jsonl", **options):
        configs = {"small": SMALL} if configs is None else configs
        given = {"model": model, "samples": samples, "model_name": "tiny", "essay": ESSAY} | options
        return run_tasks.run(given.pop("model"), given.pop("samples"), configs, path, has_progress=False, **given)

    return run


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_dense_values_are_the_models_own(model, samples):
    """By one plain forward pass a continuation: no cache, no batch."""
    scorer = SparseScorer(model, run_tasks.dense_config(model), batch_size=8, softmax_dtype=torch.float32)
    for sample in samples:
        means, greedy = [], []
        for tokens in sample.continuations:
            prompt = sample.document + sample.question
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.float().log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])
            means.append(float(chosen.mean()))
            greedy.append(logits.argmax(-1).tolist() == list(tokens))
        found = outcome(scorer, sample)
        assert found["log_likelihoods"] == pytest.approx(means, rel=MAX_LOGITS_RELATIVE_ERROR)
        best = max(range(len(means)), key=means.__getitem__)
        expected = {"exact": float(greedy[0]), "choice": float(best == sample.gold), "nll": -means[0]}[sample.scorer]
        assert found["value"] == pytest.approx(expected, rel=MAX_LOGITS_RELATIVE_ERROR)
        assert found["num_evicted"] == 0


def test_the_mode_decides_what_is_compressed(samples):
    for sample in samples:
        context = context_of(sample)
        assert context.head + context.tail == sample.document + sample.question
        if sample.mode == AGNOSTIC and sample.question:
            assert context.head == sample.document
        elif sample.mode == AWARE:
            assert context.tail == sample.question[-1:]
        elif sample.mode == NO_CONTEXT:
            assert (context.head, context.tail) == (sample.document, ())
        else:
            assert context.tail == sample.document[-1:]


def test_a_bounded_prefill_is_measured_by_its_own(go, model, samples, tmp_path):
    """Its chunks go on from what it kept; the others share a prefill all the same."""
    bounded = SMALL.with_(prefill="bounded", prefill_chunk_tokens=256)
    go({"small": SMALL, "bounded": bounded})
    lines = {line["id"]: line for line in lines_of(tmp_path / "out.jsonl")}
    different = 0
    for sample in (sample for sample in samples if sample.mode != NO_CONTEXT):
        expected = outcome(SparseScorer(model, bounded, softmax_dtype=torch.float32), sample)
        exact, found = (lines[f"{name}|{sample.id}"]["log_likelihoods"] for name in ("small", "bounded"))
        assert found == pytest.approx(expected["log_likelihoods"], rel=MAX_LOGITS_RELATIVE_ERROR)
        different += found != pytest.approx(exact, rel=1e-3)
    assert different > 0


@pytest.mark.parametrize("budget", [64, 2000], ids=["evicts", "fits"])
def test_questions_about_one_document_share_the_chunks_of_a_bounded_prefill(model, text, budget, monkeypatch):
    bounded = SMALL.with_(prefill="bounded", prefill_chunk_tokens=256, budget=budget)
    documents = by_document(samples_of(["document_qa"], text, lengths=[700], seeds=[0]))
    samples = [sample for document in documents for sample in document]
    assert all(512 < len(context_of(sample).head) <= 768 for sample in samples)  # all differ in the third chunk alone
    expected = [outcome(SparseScorer(model, bounded), sample) for sample in samples]
    passes, forward = [], SparseScorer._forward

    def counted(self, ids, *args, **options):
        passes.append(ids.shape[1])
        return forward(self, ids, *args, **options)

    monkeypatch.setattr(SparseScorer, "_forward", counted)
    scorer = SparseScorer(model, bounded)
    for sample, alone in zip(samples, expected, strict=True):
        found = outcome(scorer, sample)
        assert {**found, "seconds": 0} == {**alone, "seconds": 0}
    assert passes.count(256) == 2 * len(documents) < 2 * len(samples)  # two whole chunks, once


def test_a_bounded_prefill_shorter_than_what_is_scored_is_refused_before_anything_is_read(go, tmp_path):
    with pytest.raises(InputError, match=r"perplexity scores 2\d\d tokens .*'bounded' selects after every 100"):
        go({"bounded": SMALL.with_(prefill="bounded", prefill_chunk_tokens=100)})
    assert not (tmp_path / "out.jsonl").exists()


def test_every_sample_is_measured_once_and_summed_up(go, samples, tmp_path):
    summary = go()
    header, *lines = lines_of(tmp_path / "out.jsonl")
    assert header["id"] == "run"
    wanted = {("dense", s.id) for s in samples} | {("small", s.id) for s in samples if s.mode != NO_CONTEXT}
    assert {tuple(line["id"].split("|")) for line in lines} == wanted
    assert len(lines) == len(wanted)
    assert summary["model"] == header["model"]
    assert {"weights_sha256", "dtype", "device", "device_name"} <= set(summary["model"])
    assert set(summary["versions"]) >= {"torch", "transformers", "hf_sparsekv"}
    assert summary["prompts"] == {"chat_template": None, "stop_ids": []}
    values = {tuple(line["id"].split("|")): line for line in lines}
    for row in summary["rows"]:
        place = [row[name] for name in ("task", "budget_tokens", "mode", "half")]
        mine = [s for s in samples if [s.task, s.budget_tokens, s.mode, s.half] == place]
        found = [values[row["config"], s.id] for s in mine]
        dense = [values["dense", s.id] for s in mine]
        assert row["num_samples"] == len(mine)
        mean = sum(line["value"] for line in found) / len(found)
        if row["task"] == "perplexity":
            without = sum(values["dense", f"{s.pair_id}/no-context"]["value"] for s in mine) / len(mine)
            assert row["perplexity"]["value"] == pytest.approx(math.exp(mean))
            assert row["perplexity_without_context"] == pytest.approx(math.exp(without))
        else:
            assert row["accuracy"]["value"] == pytest.approx(mean)
            expected = mean - sum(line["value"] for line in dense) / len(dense)
            assert row["difference"]["value"] == pytest.approx(expected)
            low, high = row["difference"]["low"], row["difference"]["high"]
            assert (low == high == 0.0) == (row["config"] == "dense")
        bytes_key = "dense_bytes" if row["config"] == "dense" else "cache_bytes"
        assert row["mean_cache_bytes"] == pytest.approx(sum(line[bytes_key] for line in found) / len(found))
        assert (row["compression"] > 2) == (row["config"] == "small")
    json.dumps(summary, allow_nan=False)


def test_no_chat_template_is_put_around_a_sample(tokenizer, text, samples):
    """The report says that there is none."""
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = "{% for message in messages %}<|{{ message['content'] }}|>{% endfor %}"
    made = samples_of(["needle", "document_qa"], EssayTokens(text.essay, templated), lengths=[700], seeds=[0, 1])
    assert made[::5] == samples[: len(made[::5])]


def test_a_stopped_run_goes_on_after_a_torn_line(go, tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    whole = go()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:9]) + lines[9][: len(lines[9]) // 2])
    calls = []

    def counted(*arguments):
        for sample, outcomes in outcomes_of(*arguments):
            calls.extend([sample.id] * len(outcomes))
            yield sample, outcomes

    monkeypatch.setattr(run_tasks, "outcomes_of", counted)
    again = go()
    assert len(calls) == len(lines) - 9
    assert len(lines_of(path)) == len(lines)
    assert again["rows"] == whole["rows"]
    calls.clear()
    assert go()["rows"] == whole["rows"]
    assert calls == []
    more = go({"small": SMALL, "smaller": skv.SparseKVConfig(num_full_layers=0, budget=40)})
    assert len(calls) == sum(name.endswith(("aware", "agnostic")) for name in calls) > 0
    assert {row["config"] for row in more["rows"]} == {"dense", "small", "smaller"}


def test_an_interrupted_run_keeps_what_is_finished(go, tmp_path, monkeypatch):
    def interrupted(*arguments):
        yield from itertools.islice(outcomes_of(*arguments), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_tasks, "outcomes_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go()
    assert len(lines_of(tmp_path / "out.jsonl")) == 5


def test_what_has_no_room_beside_other_processes_is_measured_in_the_end(
    go, model, samples, tmp_path, monkeypatch, capsys
):
    measure, refused = run_tasks.Measurement.lines, []

    def lines(self, some, names):
        if len(refused) < 2:
            refused.extend(name for sample in some for name in names[sample.id])
            raise torch.cuda.OutOfMemoryError
        yield from measure(self, some, names)

    measurement = run_tasks.Measurement(model, samples, {"small": SMALL})
    facts = run_tasks.facts_of(model, "tiny")
    parts = sample_parts(tmp_path / "two.jsonl", measurement.line_ids, num_replicas=2)
    monkeypatch.setattr(run_tasks.Measurement, "lines", lines)
    measure_part([measurement], parts, facts, has_progress=False)
    assert "no room on the GPU beside other processes" in capsys.readouterr().err
    stored = parts.own.read_bytes().splitlines()
    assert len(stored) == len(measurement.wanted) - len(refused) > 0
    monkeypatch.undo()
    found = run_tasks.measured(measurement, parts, facts, essay=ESSAY, has_progress=False)
    assert found["rows"] == go()["rows"]
    assert set(stored) <= set((tmp_path / "two.jsonl").read_bytes().splitlines())


def test_results_of_something_else_are_refused(go, samples, tmp_path, text):
    go(samples=samples[:2])
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(InputError, match="was begun with model"):
        go(model=build_tiny_llama(num_layers=2, seed=1), samples=samples[:2])
    with pytest.raises(InputError, match="another config_sha256"):
        go({"small": LARGE}, samples=samples[:2])
    other = type(samples[0])(**samples[0].__dict__ | {"document": samples[0].document[::-1]})
    with pytest.raises(InputError, match="another sample_sha256"):
        go(samples=[other])
    assert (tmp_path / "out.jsonl").read_bytes() == before
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"id": 3, "text": "an answer"}\n')
    with pytest.raises(InputError, match="something else"):
        go(path=foreign)
    with pytest.raises(InputError, match="no such folder"):
        go(path=tmp_path / "absent" / "out.jsonl")


def test_a_cache_that_never_evicts_gets_no_figures(go):
    refused = [row for row in go({"large": LARGE})["rows"] if row["config"] == "large"]
    assert refused
    for row in refused:
        assert "nothing was evicted" in row["refused"]
        assert not {"accuracy", "perplexity"} & set(row)


def test_samples_beyond_the_model_are_refused_before_any_work(go, model, samples, tmp_path):
    config = model.config.__class__(**model.config.to_dict() | {"max_position_embeddings": 512})
    short = build_tiny_llama(num_layers=2)
    short.config = config
    with pytest.raises(InputError, match="samples of 700 tokens, the model takes 512"):
        go(model=short)
    assert not (tmp_path / "out.jsonl").exists()


def test_tasks_are_chosen_by_name_half_and_grid(text):
    assert {s.half for s in samples_of(["needle"], text, lengths=[600], seeds=[0, 1], half="report")} == {"report"}
    assert {s.mode for s in samples_of(["needle"], text, lengths=[600], modes=["aware"])} == {"aware"}
    offline = set(TASKS) - {"mmlu"}
    assert {s.task for s in samples_of(list(offline), text, lengths=[900], seeds=[0])} == offline
    for options, words in (
        ({"names": ["niddle"]}, "'niddle'"),
        ({"names": []}, "tasks are needle"),
        ({"seeds": [0, 2], "half": "report"}, "no sample is left"),
        ({"half": "both"}, "'both'"),
    ):
        given = {"names": ["needle"], "lengths": [600]} | options
        with pytest.raises((InputError, ConfigError), match=words):
            samples_of(given.pop("names"), text, **given)


def test_configurations_are_read_from_a_line():
    name, config = run_tasks.parse_config("ours:budget=0.25,scorer=hybrid,full_layers=0;3,scorer_options=share:0.5")
    assert name == "ours"
    assert config == skv.SparseKVConfig(budget=0.25, scorer="hybrid", full_layers=(0, 3), scorer_options={"share": 0.5})
    for text, words in (
        ("budget=3", "name:option=value"),
        ("dense:budget=64", "is no name"),
        ("a:budget", "name:option=value"),
        ("a:bugdet=64", "did you mean 'budget'"),
        ("a:colour=red", "unknown option 'colour'"),
        ("a:budget=-1", "budget"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_tasks.parse_config(text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own, while loading
def test_the_command_writes_lines_and_summary(model, tokenizer, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    common = ["--model", str(tmp_path / "model"), "--essay", "pydoc", "--out", str(tmp_path / "o.jsonl")]
    grid = ["--tasks", "needle", "--lengths", "600", "--seeds", "0", "--modes", "aware"]
    config = ["--config", "s:num_full_layers=0,budget=0.25"]
    assert run_tasks.main([*common, *grid, *config, "--json", str(tmp_path / "s.json")]) == 0
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["essay"]["name"] == "pydoc"
    assert [row["config"] for row in summary["rows"]] == ["dense", "s"]
    assert summary["configs"]["s"]["config"]["budget"] == 0.25
    capsys.readouterr()
    assert run_tasks.main([*common, "--tasks", "niddle"]) == 2
    assert "error: tasks are needle" in capsys.readouterr().err
    assert run_tasks.main([*common[:-1], str(tmp_path / "p.jsonl"), *grid, "--lengths", "4097"]) == 2
    assert "samples of 4097 tokens, the model takes 4096" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "p.jsonl").exists()
    assert run_tasks.main([*common, *grid, "--model", str(tmp_path / "absent")]) == 2
    assert "no model folder" in capsys.readouterr().err
    assert run_tasks.main([*common, *grid, "--json", str(tmp_path / "absent" / "s.json")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert run_tasks.main([*common, *grid, *config, *config]) == 2
    assert "same name" in capsys.readouterr().err
