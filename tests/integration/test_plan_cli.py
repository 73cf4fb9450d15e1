"""`hf-sparsekv plan --calibrate`: a text in, a plan out, and every mistake one line before anything is measured."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_sparsekv import SparseKVConfig
from hf_sparsekv.cli.app import main
from hf_sparsekv.testing.models import tiny_llama

METHOD = ["--num-full-layers", "0", "--scorer", "hybrid"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose tokenizer has a word for each number."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(num_layers=2, num_heads=4, num_kv_heads=2).save_pretrained(path)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(path)
    return str(path)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{3 + i * i % 251}" for i in range(700)))
    return str(path)


def run(capsys, monkeypatch, *arguments):
    """Exit code, stdout and stderr of one call."""
    monkeypatch.setattr("sys.argv", ["hf-sparsekv", "plan", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


@pytest.mark.parametrize(("size", "unit"), [(["--budget", "80"], "tokens"), (["--compression", "3"], "fraction")])
def test_a_text_becomes_a_plan_that_configurations_take(folder, text, tmp_path, capsys, monkeypatch, size, unit):
    out_file = tmp_path / "plan.json"
    arguments = ["-m", folder, "-l", "200", "--calibrate", text, "-o", str(out_file), *size, *METHOD]
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 0, err
    assert "measured on 2 pieces of 200 tokens, each continued and recited for 64 rows" in out
    assert "% of dense" in out
    assert "with the scorer that it was measured with, hybrid" in " ".join(out.split())
    values = json.loads(out_file.read_text())
    assert values["unit"] == unit
    assert values["measured"]["config"]["scorer"] == "hybrid"
    config = SparseKVConfig(budget_shape="calibrated", plan=out_file)
    assert len(config.budget) + len(config.full_layers) == 2
    use = ["-m", folder, "-l", "200", "--set", "budget_shape=calibrated", "--set", f"plan={out_file}"]
    code, again, _ = run(capsys, monkeypatch, *use)
    assert code == 0
    total = next(line for line in out.splitlines() if "total" in line)
    assert total in again
    used = int(total.split()[1].replace(",", ""))
    assert used == values["measured"]["cache_bytes"]


def test_json_holds_the_plan_that_was_measured(folder, text, tmp_path, capsys, monkeypatch):
    arguments = ["-m", folder, "-l", "200", "--calibrate", text, "-o", str(tmp_path / "p.json"), *METHOD]
    code, out, _ = run(capsys, monkeypatch, *arguments, "--compression", "3", "--json")
    assert code == 0
    assert SparseKVConfig.from_dict(json.loads(out)["config"]).budget_shape == "calibrated"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compression", "4"], "--compression has no effect without --calibrate"),
        (["-o", "x.json"], "--output has no effect without --calibrate"),
        (["--calibrate", "TEXT"], "--calibrate needs --output"),
        (["--calibrate", "TEXT", "-o", "nowhere/x.json"], "cannot write nowhere/x.json"),
        (["--calibrate", "TEXT", "-o", "."], "cannot write ."),
        (["--calibrate", "nowhere.txt", "-o", "OUT"], "no such file: nowhere.txt"),
        (["--calibrate", "EMPTY", "-o", "OUT"], "is empty: measuring needs a text"),
        (["--calibrate", "TEXT", "-o", "OUT", "--compression", "1"], "--compression must be more than 1"),
        (["--calibrate", "TEXT", "-o", "OUT", "--compression", "nan"], "--compression must be more than 1"),
        (["--calibrate", "TEXT", "-o", "OUT", "--compression", "4", "--budget", "64"], "not both"),
        (["--calibrate", "TEXT", "-o", "OUT", "--compression", "50"], "no plan takes"),
        (["--calibrate", "TEXT", "-o", "OUT", "--budget", "300"], "hold every layer in full"),
        (["--calibrate", "TEXT", "-o", "OUT", "-l", "2000", "--budget", "64"], "has 700 tokens, 2064 are needed"),
        (["--calibrate", "TEXT", "-o", "OUT", "-l", "5000"], "more than the 4,096 positions"),
        (
            ["--calibrate", "TEXT", "-o", "OUT", "-l", "4033"],
            "more than the 4,096 positions that the model was made for: measure with --length 4032 or less",
        ),
        (["--calibrate", "BINARY", "-o", "OUT"], "is not UTF-8 text"),
        (["--calibrate", "TEXT", "-o", "OUT", "-l", "30"], "nothing to evict"),
        (["--calibrate", "TEXT", "-o", "OUT", "-l", "100", "--budget", "64"], "cannot hold 32 + 64 tokens"),
    ],
)
def test_mistakes_are_one_line(folder, text, tmp_path, capsys, monkeypatch, arguments, message):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary").write_bytes(bytes(range(255, 0, -1)))
    places = {"TEXT": text, "OUT": str(tmp_path / "out.json"), "EMPTY": str(tmp_path / "empty.txt")}
    places["BINARY"] = str(tmp_path / "binary")
    given = [places.get(argument, argument) for argument in arguments]
    length = [] if "-l" in given else ["-l", "200"]
    code, _, err = run(capsys, monkeypatch, "-m", folder, *length, "--num-full-layers", "0", *given)
    assert code == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "out.json").exists()


def test_planning_reads_no_text_and_needs_no_tokenizer(tmp_path, text, capsys, monkeypatch):
    tiny_llama(num_layers=2).save_pretrained(tmp_path / "bare")
    bare = str(tmp_path / "bare")
    code, out, err = run(capsys, monkeypatch, "-m", bare, "-l", "200", "--budget", "80")
    assert code == 0, err
    assert "0-1  window" in out
    code, _, err = run(
        capsys, monkeypatch, "-m", bare, "--calibrate", text, "-o", str(tmp_path / "p.json"), "-l", "200"
    )
    assert code == 2
    said = " ".join(err.split())
    assert "cannot open the tokenizer of model" in said
    assert not said.endswith(":"), "the reasons come after the colon"


@pytest.mark.parametrize("field", [{"num_hidden_layers": "x"}, {"num_attention_heads": 0}, {"dtype": "no such"}])
def test_a_configuration_with_an_impossible_field_is_one_line(folder, tmp_path, capsys, monkeypatch, field):
    values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(values | field), encoding="utf-8")
    code, _, err = run(capsys, monkeypatch, "-m", str(tmp_path), "-l", "200", "--budget", "80")
    assert code == 2
    assert f"error: cannot open model '{tmp_path}': " in " ".join(err.split())
    assert "are its files whole?" in " ".join(err.split())


def test_torn_weights_are_one_line(folder, tmp_path, text, capsys, monkeypatch):
    torn = tmp_path / "torn"
    shutil.copytree(folder, torn)
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:1000])
    plan = str(tmp_path / "p.json")
    code, _, err = run(
        capsys, monkeypatch, "-m", str(torn), "--calibrate", text, "-o", plan, "-l", "200", "--budget", "80", *METHOD
    )
    assert code == 2
    assert f"error: cannot load {torn}: " in " ".join(err.split())


def test_a_torn_tokenizer_is_one_line(folder, tmp_path, text, capsys, monkeypatch):
    torn = tmp_path / "torn"
    shutil.copytree(folder, torn)
    (torn / "tokenizer.json").write_text("{}", encoding="utf-8")
    plan = str(tmp_path / "p.json")
    code, _, err = run(capsys, monkeypatch, "-m", str(torn), "--calibrate", text, "-o", plan, "-l", "200")
    assert code == 2
    assert f"error: cannot open the tokenizer of model '{torn}': KeyError" in " ".join(err.split())
