"""The command line does its job on a local model, and a mistake is one line and exit code 2."""

import json
import socket
import subprocess
import sys
import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_sparsekv import LayerPlan, __version__
from hf_sparsekv.cli import loading
from hf_sparsekv.cli.app import COMMANDS, load_command, main
from hf_sparsekv.cli.session import size_against
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


@pytest.mark.parametrize(("switch", "asked"), [("--cuda-graphs", "cuda_graphs=True"), ("--compile", "compile=True")])
def test_generate_asks_for_graphs_or_leaves_them_out(folder, capsys, monkeypatch, switch, asked):
    arguments = ["generate", "-m", folder, "-p", "a b", "-n", "2", "--json", *METHOD]
    code, out, _ = run(capsys, monkeypatch, *arguments, "--no-cuda-graphs")
    assert code == 0
    decoding = {"cuda_graphs": False, "reason": "cuda_graphs=False"}
    assert json.loads(out)["runs"][0]["report"]["decoding"] == decoding
    code, _, err = run(capsys, monkeypatch, *arguments, "--device", "cpu", switch)
    assert code == 2
    assert f"error: {asked}, but the model is on cpu: leave it out" in err


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
        (["--budget", "50%"], "not a number: give tokens (512), a fraction of the prompt (0.1) or a list"),
        (["--budget", "64,64,64", "--num-full-layers", "0"], "lists 3 layers"),
        (["--num-full-layers", "9"], "only 2 layers"),
        (["--full-layers", "0,7"], "layer 7"),
        (["--scorer", "snapvk"], "did you mean 'snapkv'"),
        (["--set", "observation_window=64"], "larger than num_recent_tokens=32"),
        (["--set", "budgets=64"], "did you mean 'budget'"),
        (["--set", "budget"], "name=value"),
        (["--set", "share=0.5"], "scorer hybrid: give scorer_options={'share': ...}, on the command line --set scorer"),
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
        (["-p", "a b", "-n", "5000"], "4,096 in all: shorten the prompt or the file, or lower --max-new-tokens"),
        (["-p", "a", "--device", "tpu"], "not available"),
        (["-p", "a", "--compile", "--no-cuda-graphs"], "cuda_graphs=False leaves them out"),
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


@pytest.mark.parametrize("name", COMMANDS)
def test_the_overview_says_of_each_subcommand_what_its_docstring_says(name):
    assert load_command(name).callback.__doc__.splitlines()[0] == COMMANDS[name]


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--version"], f"hf-sparsekv {__version__}\n"),
        (["--help"], "generate"),
        (["generate", "--help"], "--compare"),
        (["plan", "--help"], "--length"),
        (["demo", "--help"], "--budget"),
        (["fetch", "--help"], "--quiet"),
    ],
)
def test_version_and_help_need_no_torch(arguments, output):
    code = f"import sys; sys.argv = ['hf-sparsekv', *{arguments!r}]\nfrom hf_sparsekv.cli.app import main\n"
    code += "try: main()\nfinally: sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert output in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--bugdet", "64"], "No such option: --bugdet"),
        (["plan", "--length", "0"], "--length"),
        (["plan", "-l"], "-l"),
        (["plann"], "No such command 'plann'"),
        (["--versoin"], "No such option: --versoin"),
    ],
)
def test_usage_errors_are_one_line_too(capsys, monkeypatch, arguments, message):
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert "--help)" in err
    assert err.count("\n") == 1
    assert out == ""


def test_the_comparison_says_which_cache_is_smaller_and_by_how_much(folder, capsys, monkeypatch):
    prompt = " ".join("abcdefghij" * 20)
    arguments = ["generate", "-m", folder, "-p", prompt, "-n", "4", "--compare", *METHOD]
    code, out, _ = run(capsys, monkeypatch, *arguments)
    assert code == 0
    lines = out.splitlines()
    row, held = (next(line for line in lines if label in line) for label in ("against dense", "cache bytes"))
    dense, sparse = (int(cell.replace(",", "")) for cell in held.split("│")[2:4])
    assert sparse < dense
    assert [cell.strip() for cell in row.split("│")[2:4]] == ["-", f"{dense / sparse:.1f}x smaller"]


@pytest.mark.parametrize(
    ("measured", "dense", "words"),
    [(10, 42, "4.2x smaller"), (16, 10, "1.6x larger"), (7, 7, "as large"), (0, 5, "-")],
)
def test_sizes_are_compared_in_the_right_direction(measured, dense, words):
    assert size_against(measured, dense) == words


def test_nothing_but_text_and_report_where_there_is_no_terminal(folder, capsys, monkeypatch):
    code, _, err = run(capsys, monkeypatch, "generate", "-m", folder, "-p", "a b c", "-n", "3", *METHOD)
    assert code == 0
    assert [line.split()[0] for line in err.split("\n")[:-1]] == ["cache", "layers", "evicted"]
    assert "x larger" in err  # whole blocks for so few tokens


def test_the_plan_says_what_it_assumes(folder, capsys, monkeypatch):
    code, out, err = run(
        capsys, monkeypatch, "plan", "-m", folder, "-l", "5000", "--scorer", "tova", "--device", "cpu", *METHOD
    )
    assert code == 0
    header = out.splitlines()[0]
    assert header.startswith(f"model {folder}, dtype float32 (as generate would load it here)")
    assert "scorer tova, budget 40" in header
    assert err == "warning: --length 5,000 is more than the 4,096 positions that the model was made for\n"
    _, half, _ = run(capsys, monkeypatch, "plan", "-m", folder, "--dtype", "bfloat16", "--json", *METHOD)
    facts = json.loads(half)
    assert (facts["model"], facts["dtype"], facts["config"]["budget"]) == (folder, "bfloat16", 40)
    assert LayerPlan.from_json(half).num_full_layers == 1


def test_without_a_network_an_unknown_id_fails_at_once_and_says_how_to_go_on(capsys, monkeypatch):
    def no_such_name(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    monkeypatch.setattr(loading, "getproxies", dict)
    begin = time.monotonic()
    code, out, err = run(capsys, monkeypatch, "plan", "--model", "nobody-here/no-such-model")
    assert time.monotonic() - begin < 5
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "give a local folder or smollm2-135m-instruct" in err
