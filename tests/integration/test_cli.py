"""The command line does its job on a local model, and a mistake is one line and exit code 2."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_sparsekv import __version__
from hf_sparsekv.cli.app import app, main
from hf_sparsekv.testing.models import tiny_llama

METHOD = ["--budget", "40", "--num-full-layers", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer that knows one word a letter."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(num_layers=2, num_heads=4, num_kv_heads=2).save_pretrained(path)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(c): i for i, c in enumerate(range(97, 123), start=3)}
    words |= {f"w{i}": i for i in range(len(words), 256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(path)
    return str(path)


def run(capsys, monkeypatch, *arguments):
    """Exit code, stdout and stderr of one call."""
    monkeypatch.setattr("sys.argv", ["hf-sparsekv", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


def test_generate_streams_text_and_reports(folder, capsys, monkeypatch):
    prompt = " ".join("abcdefghij" * 10)
    code, out, err = run(capsys, monkeypatch, "generate", "-m", folder, "-p", prompt, "-n", "12", *METHOD)
    assert code == 0
    assert len(out.split()) >= 1
    assert "bytes measured" in err
    assert "1 window with 40 of" in err


def test_generate_json_holds_both_runs_and_the_report(folder, capsys, monkeypatch, tmp_path):
    document = tmp_path / "document.txt"
    document.write_text(" ".join("abcdefghij" * 10))
    arguments = ["--file", str(document), "-p", "k l", "-n", "6", "--compare", "--json", *METHOD]
    code, out, _ = run(capsys, monkeypatch, "generate", "-m", folder, *arguments)
    assert code == 0
    dense, sparse = json.loads(out)["runs"]
    assert (dense["cache"], sparse["cache"]) == ("dense", "sparse")
    assert sparse["cache_bytes"] == sparse["report"]["cache_bytes"] < dense["cache_bytes"]
    assert sparse["report"]["evicted_at_prompt"] == 102 - 40


def test_plan_prints_a_table_and_json(folder, capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "plan", "-m", folder, "-l", "1000", *METHOD)
    assert code == 0
    assert "window" in out
    assert "% of dense" in out
    code, out, _ = run(capsys, monkeypatch, "plan", "-m", folder, "--json", *METHOD)
    assert [layer["is_full"] for layer in json.loads(out)["layers"]] == [True, False]


def test_doctor_tells_versions_and_ops(capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "doctor", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["software"]["hf_sparsekv"] == __version__
    assert set(facts["ops"]["cpu"].values()) == {"PyTorch definition"}


def test_a_configuration_file_and_options_beside_it(folder, capsys, monkeypatch, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"budget": 64, "num_full_layers": 0}))
    code, out, _ = run(capsys, monkeypatch, "plan", "-m", folder, "--config", str(path), "--budget", "0.5", "-l", "200")
    assert code == 0
    assert "0-1" in out
    assert "100" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "5"], "num_sink_tokens + num_recent_tokens = 36"),
        (["--budget", "1.5"], "not a fraction"),
        (["--budget", "many"], "not a number"),
        (["--budget", "64,64,64", "--num-full-layers", "0"], "lists 3 layers"),
        (["--num-full-layers", "9"], "only 2 layers"),
        (["--full-layers", "0,7"], "layer 7"),
        (["--scorer", "snapvk"], "did you mean 'snapkv'"),
        (["--set", "observation_window=64"], "larger than num_recent_tokens=32"),
        (["--set", "budgets=64"], "did you mean 'budget'"),
        (["--set", "budget"], "name=value"),
        (["--config", "nowhere.json"], "no such file"),
        (["--dtype", "int3"], "unknown dtype"),
        (["--model", "./nowhere"], "no model folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(folder, capsys, monkeypatch, arguments, message):
    code, out, err = run(capsys, monkeypatch, "plan", "-m", folder, *arguments)
    assert code == 2
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "prompt is empty"),
        (["-p", "  "], "prompt is empty"),
        (["-p", "a", "--file", "nowhere.txt"], "no such file"),
        (["-p", "a b", "-n", "5000"], "4,096 in all"),
        (["-p", "a", "--device", "tpu"], "not available"),
    ],
)
def test_bad_prompts_are_refused_before_the_weights_load(folder, capsys, monkeypatch, arguments, message):
    code, out, err = run(capsys, monkeypatch, "generate", "-m", folder, *METHOD, *arguments)
    assert code == 2
    assert message in err
    assert out == ""


def test_a_folder_without_safetensors_is_refused(folder, capsys, monkeypatch, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    code, _, err = run(capsys, monkeypatch, "generate", "-m", str(copy), "-p", "a b c", *METHOD)
    assert code == 2
    assert "cannot load" in err


def test_every_subcommand_is_there():
    assert {command.callback.__name__ for command in app.registered_commands} == {
        "generate",
        "demo",
        "fetch",
        "plan",
        "doctor",
    }
