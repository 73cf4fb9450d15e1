"""`hf-sparsekv run` in several processes: the same answers as in one, in order, whoever is killed on the way."""

import json
import os
import random
import time

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_sparsekv.cli.app import main
from hf_sparsekv.engine.batch_parts import ReplicaFiles
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.parallel.place import Place
from hf_sparsekv.testing.models import tiny_llama
from hf_sparsekv.testing.ranks import exit_codes, free_port, rank_environment, start_rank

WAIT_S = 120.0
OPTIONS = [
    *("--num-full-layers", "1", "--budget", "40", "--kv-memory", "8MB", "--device", "cpu", "--dtype", "float32"),
    *("--max-num-seqs", "4", "--max-batch-tokens", "128", "--max-tokens", "12", "--ignore-eos"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_llama(num_layers=2, num_heads=4, num_kv_heads=2).save_pretrained(path)
    words = {f"w{i}": i for i in range(256)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))).save_pretrained(path)
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Input of 14 lines, the last of them bad, and output."""
    numbers = random.Random(3)
    ids = [[numbers.randrange(3, 256) for _ in range(numbers.randrange(4, 70))] for _ in range(13)]
    lines = [json.dumps({"id": f"q{i}", "token_ids": prompt}) for i, prompt in enumerate(ids)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "bad"]) + "\n")
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def launch(folder, files, monkeypatch):
    """Starts `hf-sparsekv run` on some ranks of a launch."""
    started = []

    def launch(world_size, *arguments, ranks=None, output=files[1]):
        monkeypatch.setattr(
            "sys.argv", ["hf-sparsekv", "run", str(files[0]), "-o", str(output), "-m", folder, *OPTIONS, *arguments]
        )
        port = free_port()
        processes = [
            start_rank(rank_environment(rank, world_size, port), main)
            for rank in (range(world_size) if ranks is None else ranks)
        ]
        started.extend(processes)
        return processes

    yield launch
    for process in started:
        process.kill()
        process.join()


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def answers(path):
    return {line["id"]: line["token_ids"] for line in read(path)}


def left_beside(output):
    return sorted(p.name for p in output.parent.iterdir() if "part" in p.name or "merging" in p.name)


@pytest.mark.slow
def test_two_replicas_of_two_ranks_give_what_one_process_gives(launch, files, tmp_path):
    alone = tmp_path / "alone.jsonl"
    assert exit_codes(launch(1, output=alone)) == [0]
    assert exit_codes(launch(4, "--tp", "2")) == [0, 0, 0, 0]
    assert answers(files[1]) == answers(alone)
    assert [line["id"] for line in read(files[1])] == [f"q{i}" for i in range(13)]  # in the input's order
    errors = read(tmp_path / "out.errors.jsonl")
    assert [error["line"] for error in errors] == [14]
    assert errors == read(tmp_path / "alone.errors.jsonl")
    assert not left_beside(files[1])


@pytest.mark.parametrize("next_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_a_killed_replica_had_is_kept_and_the_next_run_goes_on(launch, files, tmp_path, next_size):
    alone = tmp_path / "alone.jsonl"
    assert exit_codes(launch(1, output=alone)) == [0]
    first, second = launch(2)
    part = tmp_path / "out.jsonl.part-1-of-2"
    deadline = time.monotonic() + WAIT_S
    while not read_whole(part):
        assert second.exitcode is None or not read(files[1]), "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    second.kill()
    assert exit_codes([first, second])[0] == 0
    before = read(files[1]) + read_whole(part)
    had = {line["id"]: line for line in before}
    assert set(had) >= {f"q{i}" for i in range(0, 13, 2)}  # the survivor's, all of them
    assert exit_codes(launch(next_size)) == [0] * next_size
    assert answers(files[1]) == answers(alone)
    assert all(line == had.get(line["id"], line) for line in read(files[1]))  # nothing was computed twice
    assert len(read(files[1])) == 13
    assert not left_beside(files[1])


def read_whole(path):
    """Whole lines of a file that is being written, or is gone by now."""
    try:
        return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


# --- the files alone ----------------------------------------------------------------------------------------------


def result(number):
    return {"text": "", "token_ids": [number], "finish_reason": "length", "error": None, "report": {}}


def replica_files(files, replica, num_replicas):
    errors = files[1].with_name("out.errors.jsonl")
    return ReplicaFiles(files[0], files[1], errors, replica=replica, num_replicas=num_replicas)


def test_every_line_has_one_replica(files):
    replicas = [replica_files(files, replica, 3) for replica in range(3)]
    assert [sum(replica.serves(number) for replica in replicas) for number in range(1, 15)] == [1] * 14


def test_another_number_of_replicas_is_turned_away_while_one_is_at_work(files):
    with replica_files(files, 0, 2) as (results, _):
        results.write("q4", result(1))
        with replica_files(files, 1, 2):  # a sibling is welcome
            pass
        for number in (1, 3):
            with pytest.raises(InputError, match="is being written by one of 2 replicas"):
                replica_files(files, 0, number).__enter__()
    assert [line["id"] for line in read(files[1])] == ["q4"]


def test_replicas_of_other_options_are_refused_while_one_is_at_work_and_later(files):
    def replica_of(replica, num_replicas, budget):
        errors = files[1].with_name("out.errors.jsonl")
        places = {"replica": replica, "num_replicas": num_replicas}
        return ReplicaFiles(files[0], files[1], errors, **places, options={"budget": budget})

    with replica_of(0, 2, 40) as (results, _):
        with pytest.raises(InputError, match="budget was 40, is 50"):
            replica_of(1, 2, 50).__enter__()
        with replica_of(1, 2, 40):
            results.write("q0", result(0))
    for number in (1, 2):
        with pytest.raises(InputError, match="budget was 40, is 50"):
            replica_of(0, number, 50).__enter__()
        with replica_of(0, number, 40) as (results, _):
            assert results.done == {"q0"}


def test_a_crash_between_merging_and_removing_parts_loses_and_doubles_nothing(files):
    with replica_files(files, 0, 2) as (results, _):
        results.write("q2", result(2))
        results.write("q0", result(0))
    part = files[1].with_name("out.jsonl.part-1-of-2")
    lines = [json.dumps({"id": name, **result(number)}) + "\n" for name, number in (("q0", 9), ("q1", 1), ("q3", 3))]
    part.write_text("".join(lines)[:-50])
    with replica_files(files, 0, 1) as (results, _):
        assert results.done == {"q0", "q1", "q2"}
    assert answers(files[1]) == {"q0": [0], "q1": [1], "q2": [2]}
    assert list(answers(files[1])) == ["q0", "q1", "q2"]
    assert not left_beside(files[1])


def test_files_of_something_else_are_refused_and_left_alone(files):
    errors, part = (files[1].with_name(name) for name in ("out.errors.jsonl", "out.jsonl.part-1-of-2"))
    for path in (errors, part):
        path.write_text('{"precious": 1}\n')
        for number in (1, 2):
            with pytest.raises(InputError, match=f"{path.name} holds something else"):
                replica_files(files, 0, number).__enter__()
        assert path.read_text() == '{"precious": 1}\n'
        path.unlink()


def test_a_folder_where_a_part_belongs_is_named(files):
    part = files[1].with_name(f"{files[1].name}.part-0-of-2")
    part.mkdir()
    for num_replicas in (1, 2):
        with (
            pytest.raises(InputError, match=rf"cannot write .*{part.name}: Is a directory"),
            replica_files(files, 0, num_replicas),
        ):
            pass


def test_a_link_stays_one_and_its_file_is_merged(files, tmp_path):
    real = tmp_path / "elsewhere.jsonl"
    real.write_text("")
    files[1].symlink_to(real)
    for replica in (1, 0):
        with replica_files(files, replica, 2) as (results, _):
            results.write(f"q{replica}", result(replica))
    assert files[1].is_symlink()
    assert list(answers(real)) == ["q0", "q1"]


def test_parts_of_an_earlier_run_are_kept_when_the_input_is_a_pipe(files):
    with replica_files(files, 0, 2) as (results, _):
        results.write("q2", result(2))
    files[1].rename(files[1].with_name("out.jsonl.part-0-of-2"))
    with ReplicaFiles(None, files[1], files[1].with_name("e.jsonl")) as (results, _):
        assert results.done == {"q2"}


def test_errors_of_a_replica_replace_its_own_of_the_run_before(files):
    errors = files[1].with_name("out.errors.jsonl")
    for replica, lines in ((0, (1, 3)), (1, (2, 4)), (0, (5,))):
        with replica_files(files, replica, 2) as (_, bad_lines):
            for line in lines:
                bad_lines.write(line, None, "why")
    assert [error["line"] for error in read(errors)] == [2, 4, 5]
    for replica in (0, 1):
        with replica_files(files, replica, 2):
            pass
    assert not errors.exists()


def test_places_follow_the_launcher():
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    place = Place.of_environment(2, given)
    assert (place.replica, place.num_replicas, place.tp_rank, place.local_rank) == (2, 4, 1, 1)
    assert Place.of_environment(1, {}).num_replicas == 1
    with pytest.raises(ConfigError, match=r"tp=3 does not divide 8 processes: .* tp=1 or 2 or 4 or 8"):
        Place.of_environment(3, given)
    with pytest.raises(ConfigError, match="tp=2 does not divide 1 process: start a multiple of 2"):
        Place.of_environment(2, {})
    with pytest.raises(ConfigError, match="must be numbers"):
        Place.of_environment(1, given | {"RANK": "x"})
    assert "RANK" not in os.environ


def test_replicas_share_a_gpu_only_where_that_is_asked_for():
    places = [Place(rank=r, world_size=6, local_rank=r, local_world_size=6) for r in range(6)]
    assert [place.gpu(2, replicas_per_gpu=3) for place in places] == [0, 1, 0, 1, 0, 1]
    assert [place.gpu(6) for place in places] == list(range(6))
    for place in places:  # all of them, in the same words
        with pytest.raises(ConfigError, match=r"6 processes on a machine with 2 GPUs, .* --replicas-per-gpu 3"):
            place.gpu(2, replicas_per_gpu=2)
    pairs = [Place(rank=r, world_size=6, local_rank=r, local_world_size=6, tp_size=2) for r in range(6)]
    assert [place.gpu(3, replicas_per_gpu=2) for place in pairs] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ConfigError, match=r"tp=2, but this machine has 1 GPU$"):
        pairs[0].gpu(1, replicas_per_gpu=6)


def test_replicas_that_share_a_gpu_are_told_how_much_of_it(folder, files, monkeypatch, capsys):
    arguments = [str(files[0]), "-o", str(files[1]), "-m", folder, "--replicas-per-gpu", "3"]
    monkeypatch.setattr("sys.argv", ["hf-sparsekv", "run", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "3 replicas on a GPU share its memory: give each its --kv-memory" in capsys.readouterr().err
    assert not files[1].exists()
