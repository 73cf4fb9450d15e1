"""`hf-sparsekv eval` in several processes: the figures of one process, in order, whoever is killed on the way.

Guards against samples that nobody or two measure, and results that go with the process that made them.
"""

import json
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evals.claims import Claims
from evals.tasks.lines import SampleLines, sample_parts
from hf_sparsekv.cli.app import main
from hf_sparsekv.errors import InputError
from hf_sparsekv.testing.models import tiny_llama
from hf_sparsekv.testing.ranks import free_port, rank_environment, start_rank

WAIT_S = 120.0
GRID = ["--lengths", "600", "--seeds", "1,3", "--limit", "12", "--essay", "pydoc", "--device", "cpu"]
TASKS = ["-t", "needle,perplexity", *GRID, "--config", "a:num_full_layers=0,budget=0.3", "--config", "b:budget=64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose tokens are bytes."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(num_layers=4, num_heads=4, num_kv_heads=2).save_pretrained(path)
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="Ġ", pad_token="Ġ").save_pretrained(path)
    return str(path)


@pytest.fixture
def launch(folder, monkeypatch, tmp_path):
    """Starts `hf-sparsekv eval` on all ranks of a launch, with an --out and a --json of a name."""
    monkeypatch.chdir(tmp_path)
    started = []

    def launch(world_size, name, *arguments):
        files = ["--out", f"{name}.jsonl", "--json", f"{name}.json"]
        monkeypatch.setattr("sys.argv", ["hf-sparsekv", "eval", "-m", folder, *files, *(arguments or TASKS)])
        port = free_port()
        processes = [start_rank(rank_environment(rank, world_size, port), main) for rank in range(world_size)]
        started.extend(processes)
        return processes

    yield launch
    for process in started:
        process.kill()
        process.join()


def wait_for(processes):
    deadline = time.monotonic() + WAIT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


def lines_of(path):
    """Whole lines of a file that is being written, or is gone by now; without what differs from run to run."""
    try:
        raw = Path(path).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    lines = [json.loads(line) for line in raw if line.endswith(b"\n")]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def by_id(lines):
    return sorted(lines, key=lambda line: line["id"])


def figures(name):
    report = json.loads(Path(f"{name}.json").read_text())
    offline = report["suites"]["offline"]
    return report["rows"], offline["configs"], offline["model"]


def left_beside():
    return sorted(p.name for p in Path().iterdir() if any(word in p.name for word in ("part", "merging", "claims")))


@pytest.fixture
def alone(launch):
    assert wait_for(launch(1, "alone")) == [0]
    return lines_of("alone.jsonl")


def test_two_processes_give_what_one_gives(launch, alone):
    assert wait_for(launch(2, "two")) == [0, 0]
    assert len(alone) == 1 + 10 * 2 * 3 + 2 * (3 + 1)  # the header, needle, perplexity with and without a context
    assert lines_of("two.jsonl") == alone  # in the order of the samples
    assert figures("two") == figures("alone")
    assert not left_beside()


@pytest.mark.parametrize("next_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_killed_processes_had_is_kept_and_the_next_run_goes_on(launch, alone, next_size):
    processes = launch(2, "two")
    parts = [Path(f"two.jsonl.part-{rank}-of-2") for rank in range(2)]
    deadline = time.monotonic() + WAIT_S
    while not all(map(lines_of, parts)):
        assert not any(process.exitcode is not None for process in processes), "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    for process in processes:
        process.kill()
    assert wait_for(processes) == [-9, -9]
    stored = [raw for path in parts for raw in path.read_bytes().splitlines(keepends=True) if raw.endswith(b"\n")]
    assert 0 < len(stored) < len(alone) - 1
    assert wait_for(launch(next_size, "two")) == [0] * next_size
    assert by_id(lines_of("two.jsonl")) == by_id(alone)
    merged = Path("two.jsonl").read_bytes().splitlines(keepends=True)
    assert set(stored) <= set(merged)  # with their seconds: nothing was measured twice
    assert figures("two") == figures("alone")
    assert not left_beside()


def test_who_is_left_measures_what_a_killed_process_did_not(launch, alone):
    first, second = launch(2, "two")
    part = Path("two.jsonl.part-1-of-2")
    deadline = time.monotonic() + WAIT_S
    while not lines_of(part):
        assert second.exitcode is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    second.kill()
    assert wait_for([first, second]) == [0, -9]
    assert by_id(lines_of("two.jsonl")) == by_id(alone)
    assert figures("two") == figures("alone")
    assert not left_beside()


def test_what_is_there_already_is_not_measured_again(launch, alone):
    before = Path("alone.jsonl").read_bytes()
    assert wait_for(launch(2, "alone")) == [0, 0]
    assert Path("alone.jsonl").read_bytes() == before


def test_another_number_of_processes_is_turned_away_while_one_is_at_work(launch):
    with sample_parts(Path("two.jsonl"), replica=0, num_replicas=2).part():
        for number in (1, 3):
            assert wait_for(launch(number, "two")) == [2] * number
            with (
                pytest.raises(InputError, match="is being written by one of 2 replicas"),
                SampleLines(sample_parts(Path("two.jsonl"), num_replicas=number), {}),
            ):
                pass
    assert wait_for(launch(1, "two")) == [0]


def test_every_piece_is_taken_once(tmp_path):
    one, other = (Claims(tmp_path / "out.jsonl") for _ in range(2))
    assert [one.take("abc"), other.take("abc"), other.take("cab"), one.take("abc")] == ["a", "b", "c", None]
    assert one.taken == set("abc")
    one.forget()
    assert other.take("abc") == "a"


def test_a_folder_where_claims_belong_is_named(tmp_path):
    (tmp_path / "out.jsonl.claims").mkdir()
    for call in (lambda: Claims(tmp_path / "out.jsonl").take("abc"), Claims(tmp_path / "out.jsonl").forget):
        with pytest.raises(InputError, match=r"cannot write .*out\.jsonl\.claims: "):
            call()


def test_tasks_of_lm_eval_are_refused_in_several_processes(folder, monkeypatch, capsys):
    for name, value in rank_environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["hf-sparsekv", "eval", "-m", folder, "-t", "hellaswag"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "tasks of lm-eval run in one process, not in 2 (hellaswag)" in capsys.readouterr().err
