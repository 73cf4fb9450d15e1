"""`hf-sparsekv run`: answers every line once, whatever happens in between.

Processes that are killed come from a fork server that has imported everything, so each starts in a moment.
"""

import functools
import io
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import time
from contextlib import nullcontext

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_sparsekv as skv
from hf_sparsekv.cli.app import main
from hf_sparsekv.testing.models import tiny_llama

CONFIG = skv.SparseKVConfig(num_full_layers=1, budget=40)
OPTIONS = [
    *("--num-full-layers", "1", "--budget", "40", "--kv-memory", "8MB", "--device", "cpu"),
    *("--max-num-seqs", "6", "--max-batch-tokens", "128", "--max-tokens", "8"),
]
WAIT_S = 60.0
OLD = {"id": "old", "token_ids": [5], "finish_reason": "length", "report": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer that knows one word a letter, and a chat template."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(num_layers=2, num_heads=4, num_kv_heads=2).save_pretrained(path)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(c): i for i, c in enumerate(range(97, 123), start=3)}
    words |= {f"w{i}": i for i in range(len(words), 256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}a"
    fast.save_pretrained(path)
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Input and output."""
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def run(folder, files, capsys, monkeypatch):
    """Exit code and stderr of one call in this process."""

    def run(*arguments, file=files[0]):
        monkeypatch.setattr("sys.argv", command(folder, (file, files[1]), *arguments))
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        assert captured.out == ""
        return caught.value.code or 0, captured.err

    return run


@pytest.fixture(scope="module")
def server():
    """Starts processes that run the command line as this process's arguments say."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf_sparsekv.cli.app", "hf_sparsekv.cli.run"])
    return context


@pytest.fixture
def start(server, folder, files, monkeypatch):
    started = []

    def start(*arguments):
        monkeypatch.setattr("sys.argv", command(folder, files, *arguments))  # the process inherits them
        process = server.Process(target=main)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def command(folder, files, *arguments):
    return ["hf-sparsekv", "run", str(files[0]), "-o", str(files[1]), "-m", folder, *OPTIONS, *arguments]


def write_lines(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))


def read_lines(path):
    """Objects of a file in which every line is whole."""
    content = path.read_bytes()
    assert not content or content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def eventually(is_true):
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def prompts(count, seed=0):
    rng = random.Random(seed)
    return {f"r{i}": [rng.randrange(3, 256) for _ in range(rng.randrange(1, 70))] for i in range(count)}


def alone(folder, ids, config=CONFIG, max_new_tokens=8):
    """What plain generation with a sparse cache gives."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = skv.generate(model, torch.tensor([ids]), config, max_new_tokens=max_new_tokens, do_sample=False)
    return output.new_tokens[0].tolist()


# --- a run that nothing happens to ------------------------------------------------------------------------------------


def test_every_kind_of_line_is_answered_and_every_bad_line_reported(folder, files, run):
    ids = prompts(3)["r2"]
    write_lines(
        files[0],
        {"id": "text", "prompt": "a b c d"},
        {"id": 7, "token_ids": ids, "max_tokens": 5},
        "{not json",
        {"id": "chat", "messages": [{"role": "user", "content": "b c"}]},
        "",
        {"id": "dense", "token_ids": ids, "config": {"num_full_layers": 2}},
        {"id": "text", "prompt": "a"},
        {"id": "no such token", "token_ids": [3, 256]},
        {"id": "long", "token_ids": [3] * 5000},
        {"id": "layers", "prompt": "a", "config": {"num_full_layers": 3}},
        {"id": "typo", "prompt": "a", "max_token": 5},
        {"id": "odds", "prompt": "c d", "logprobs": 1},
    )
    code, err = run()
    assert code == 0
    results = {line["id"]: line for line in read_lines(files[1])}
    assert list(sorted(results, key=str)) == [7, "chat", "dense", "odds", "text"]
    assert list(results["text"]) == ["id", "text", "token_ids", "finish_reason", "error", "report"]
    assert results["text"]["token_ids"] == alone(folder, [3, 4, 5, 6])
    assert results["chat"]["token_ids"] == alone(folder, [0, 4, 5, 3])
    assert results[7]["token_ids"] == alone(folder, ids, max_new_tokens=5)
    assert results["dense"]["token_ids"] == alone(folder, ids, skv.SparseKVConfig(num_full_layers=2))
    assert results[7]["finish_reason"] == "length"
    assert len(results["text"]["text"].split()) == 8
    assert results[7]["report"]["num_prompt_tokens"] == len(ids)
    assert results[7]["report"]["num_output_tokens"] == 5
    assert results[7]["report"]["ttft_s"] >= results[7]["report"]["queue_s"] >= 0
    assert [entry["token_id"] for entry in results["odds"]["logprobs"]] == results["odds"]["token_ids"]
    errors = {line["line"]: line for line in read_lines(files[1].with_name("out.errors.jsonl"))}
    assert {number: line["id"] for number, line in errors.items()} == {
        3: None, 7: "text", 8: "no such token", 9: "long", 10: "layers", 11: None
    }  # fmt: skip
    assert "used in line 1 already" in errors[7]["error"]
    assert "at most" in errors[9]["error"]
    assert "line 3: not JSON" in err
    assert "done: 5 answered, 0 skipped, 6 bad lines" in err
    assert "output tokens/s" in err


def test_a_second_run_adds_nothing_and_a_longer_input_only_what_is_new(files, run):
    lines = [{"token_ids": ids} for ids in prompts(5).values()]
    write_lines(files[0], *lines, "bad")
    assert run()[0] == 0
    before = files[1].read_bytes()
    code, err = run()
    assert code == 0
    assert files[1].read_bytes() == before
    assert "done: 0 answered, 5 skipped, 1 bad lines" in err
    assert len(read_lines(files[1].with_name("out.errors.jsonl"))) == 1
    write_lines(files[0], *lines, {"token_ids": [5]})
    assert run()[0] == 0
    assert files[1].read_bytes().startswith(before)
    assert len(read_lines(files[1])) == 6
    assert not files[1].with_name("out.errors.jsonl").exists()


def test_a_run_with_other_options_is_refused_until_it_is_told_to_go_on(files, run):
    lines = [{"token_ids": ids} for ids in prompts(4).values()]
    write_lines(files[0], *lines[:2])
    assert run()[0] == 0
    before = files[1].read_bytes()
    write_lines(files[0], *lines)
    code, err = run("--budget", "50", "--temperature", "0.5")
    assert code == 2
    assert "made with other options (budget was 40, is 50; do_sample was False, is True; temperature" in err
    assert files[1].read_bytes() == before
    assert run("--max-batch-tokens", "64", "--max-num-seqs", "2")[0] == 0  # they decide no answer
    assert files[1].read_bytes().startswith(before)
    write_lines(files[0], *lines, {"token_ids": [5]})
    assert run("--budget", "50", "--mix-options")[0] == 0
    assert len(read_lines(files[1])) == 5
    assert run("--budget", "50")[0] == 2  # those of the first run hold
    assert run()[0] == 0
    files[1].unlink()
    assert run()[0] == 0  # of a file that is gone, nobody asks


def test_results_without_known_options_are_gone_on_with(files, run):
    write_lines(files[0], {"token_ids": [5]}, {"token_ids": [6]})
    assert run()[0] == 0
    lines = files[1].read_bytes().splitlines(keepends=True)
    files[1].with_name(".out.jsonl.options.json").unlink()
    files[1].write_bytes(lines[0])
    assert run("--budget", "50")[0] == 0
    assert len(read_lines(files[1])) == 2


def test_sampling_is_the_same_in_any_run_and_order(files, run):
    lines = [{"id": name, "token_ids": ids} for name, ids in prompts(6).items()]
    answers = []
    for order in (lines, lines[::-1]):
        write_lines(files[0], *order, {"id": "greedy", "token_ids": [5, 6], "do_sample": False})
        assert run("--temperature", "1.5", "--top-k", "50")[0] == 0
        answers.append({line["id"]: line["token_ids"] for line in read_lines(files[1])})
        files[1].unlink()
    assert answers[0] == answers[1]


def test_no_more_lines_are_read_than_the_engine_can_use(files, run, monkeypatch):
    monkeypatch.setattr("hf_sparsekv.engine.batch_run.MAX_QUEUED", 4)
    live = []
    monkeypatch.setattr("hf_sparsekv.cli.run.watch", lambda *_: nullcontext(lambda p: live.append(p.num_live)))
    write_lines(files[0], *[{"token_ids": ids} for ids in prompts(40).values()])
    assert run()[0] == 0
    assert max(live) == 6 + 4
    assert len(read_lines(files[1])) == 40


# --- a run that something happens to ----------------------------------------------------------------------------------


def test_killed_at_random_moments_it_goes_on_and_answers_every_line_once(folder, files, run, start):
    asked, rng = prompts(600), random.Random(os.getpid())  # more than four starts can answer
    lengths = {name: rng.randrange(1, 12) for name in asked}  # so that they end at different times
    lines = [{"id": name, "token_ids": ids, "max_tokens": lengths[name]} for name, ids in asked.items()]
    write_lines(files[0], *lines, "bad")
    counts = [0]
    for _ in range(4):
        process = start()
        while size_of(files[1]) == counts[-1] and process.is_alive():
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.join(WAIT_S)
        counts.append(size_of(files[1]))
    assert all(earlier < later for earlier, later in itertools.pairwise(counts))  # each got a little further
    with files[1].open("ab") as file:
        file.write(b'{"id": "r')  # as if the last kill had come in the middle of a write
    code, err = run()
    assert (code, "done: 0 answered" in err) == (0, False)
    results = read_lines(files[1])
    assert sorted(result["id"] for result in results) == sorted(asked)  # all of them, none twice
    assert len(read_lines(files[1].with_name("out.errors.jsonl"))) == 1
    for result in rng.sample(results, 6):
        assert result["token_ids"] == alone(folder, asked[result["id"]], max_new_tokens=lengths[result["id"]])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_its_code_and_whole_lines(files, start, number):
    asked = prompts(200)
    write_lines(files[0], *[{"id": name, "token_ids": ids, "max_tokens": 20} for name, ids in asked.items()])
    process = start()
    eventually(lambda: size_of(files[1]) > 0 or not process.is_alive())
    os.kill(process.pid, number)
    process.join(WAIT_S)
    assert process.exitcode == 128 + number
    names = [line["id"] for line in read_lines(files[1])]
    assert 0 < len(names) == len(set(names)) < 200


def test_a_second_process_on_the_same_output_is_refused(files, start, run):
    write_lines(files[0], *[{"token_ids": ids, "max_tokens": 50} for ids in prompts(300).values()])
    process = start()
    eventually(lambda: size_of(files[1]) > 0 or not process.is_alive())
    code, err = run()
    assert code == 2
    assert "another process is writing" in err
    assert process.is_alive()


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_while_the_model_loads_is_one_line_and_the_next_run_begins(files, run, monkeypatch, number, word):
    write_lines(files[0], {"token_ids": [5]})

    def load(*_, **__):
        os.kill(os.getpid(), number)
        time.sleep(WAIT_S)

    with monkeypatch.context() as patch:
        patch.setattr("hf_sparsekv.cli.replica.load_weights", load)
        code, err = run()
    assert (code, err.splitlines()[-1]) == (128 + number, word)
    assert "Traceback" not in err
    assert run()[0] == 0
    assert len(read_lines(files[1])) == 1


def test_a_disk_that_is_full_ends_the_run_with_whole_lines_and_the_next_one_goes_on(files, run):
    write_lines(files[0], *[{"token_ids": ids} for ids in prompts(20).values()])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        code, err = run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert err.splitlines()[-1].startswith(f"error: cannot write {files[1]}: File too large")
    assert "run the same command again" in err
    whole = read_lines(files[1])
    assert 0 < len(whole) < 20
    assert run()[0] == 0
    assert read_lines(files[1])[: len(whole)] == whole
    assert len({line["id"] for line in read_lines(files[1])}) == 20


def test_an_output_that_is_deleted_meanwhile_ends_the_run(files, run, monkeypatch):
    monkeypatch.setattr("hf_sparsekv.cli.run.watch", lambda *_: nullcontext(lambda p: p.num_done and unlink()))
    unlink = functools.partial(files[1].unlink, missing_ok=True)
    write_lines(files[0], *[{"token_ids": ids} for ids in prompts(20).values()])
    code, err = run()
    assert (code, "deleted, moved or replaced while it was written to" in err) == (2, True)


def test_lines_from_standard_input(files, run, monkeypatch):
    text = "".join(json.dumps({"id": name, "token_ids": ids}) + "\n" for name, ids in prompts(5).items())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run(file="-")[0] == 0
    assert {line["id"] for line in read_lines(files[1])} == set(prompts(5))


def test_a_request_that_fails_is_an_answer_and_the_others_are_not_disturbed(files, run, monkeypatch):
    from hf_sparsekv.engine import tracker

    append = tracker.Tracker.append

    def broken(self, request, *rest):
        if request.request_id == "r1":
            raise ZeroDivisionError("a stop string's")
        return append(self, request, *rest)

    monkeypatch.setattr(tracker.Tracker, "append", broken)
    write_lines(files[0], *[{"id": name, "token_ids": ids} for name, ids in prompts(4).items()])
    code, err = run()
    assert code == 0
    results = {line["id"]: line for line in read_lines(files[1])}
    assert results["r1"]["finish_reason"] == "error"
    assert "ZeroDivisionError" in results["r1"]["error"]
    assert [len(results[name]["token_ids"]) for name in ("r0", "r2", "r3")] == [8] * 3
    assert "1 of the answers are errors" in err


# --- mistakes and what is shown ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-memory", "5 apples"], "no size"),
        (["--kv-memory", "1KB"], "raise kv_memory_bytes"),
        (["--max-batch-tokens", "2"], "max_batch_tokens=2 is below"),
        (["--top-p", "0.5"], "set do_sample=True"),
        (["--max-model-len", "5000000", "--kv-memory", "1MB"], "raise kv_memory_bytes"),
        (["--budget", "5"], "num_sink_tokens"),
        (["--dtype", "int3"], "unknown dtype"),
    ],
)
def test_mistakes_are_one_line_and_leave_the_files_alone(files, run, arguments, message):
    write_lines(files[0], {"token_ids": [5]})
    write_lines(files[1], OLD)
    code, err = run(*arguments)
    assert code == 2
    assert message in err
    assert err.splitlines()[-1].startswith("error: ")
    assert read_lines(files[1]) == [OLD]
