"""`--backend` of every command that reads prompts: obeyed where it can be had, refused before the weights otherwise."""

import pytest
from transformers import AutoModelForCausalLM

from hf_sparsekv.cli import bench as bench_module
from hf_sparsekv.cli.app import main
from hf_sparsekv.ops import prefill, prefill_choice
from hf_sparsekv.testing.models import byte_tokenizer, tiny_llama

# numpy's longdouble probe and transformers' own, while loading
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LOAD = ["--concurrency", "1", "--num-requests", "1", "--warmup", "0"]
METHOD = ["--budget", "40", "--set", "num_recent_tokens=8", "--set", "observation_window=8"]
COMMANDS = {
    "generate": ["-p", "Which colours are there, and which of them is the best one of all?", "-n", "3", "--no-chat"],
    "run": ["prompts.jsonl", "-o", "answers.jsonl", "--max-tokens", "3", "--kv-memory", "16MiB"],
    "bench": [
        "--dummy-weights",
        "--engine",
        "sparse",
        "--input-len",
        "90",
        "--output-len",
        "3",
        "--kv-memory",
        "16MiB",
        *LOAD,
    ],
    "eval": ["--tasks", "needle", "--lengths", "600", "--seeds", "1", "--limit", "1", "--essay", "pydoc"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose tokens are bytes."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(num_layers=2, head_dim=32).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def call(folder, capsys, monkeypatch, tmp_path):
    """Exit code and stderr of one command, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(prefill_choice.BACKEND_VARIABLE, raising=False)
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "Which colours are there, and which is best?"}\n')

    def called(command, *arguments):
        given = ["hf-sparsekv", command, "-m", folder, *COMMANDS[command], *METHOD, *arguments]
        monkeypatch.setattr("sys.argv", given)
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code or 0, capsys.readouterr().err

    return called


@pytest.fixture
def taken(monkeypatch):
    """Who took a call, in order."""
    names = []

    def noted(problem):
        backend = prefill_choice.choose(problem)
        names.append(backend.name)
        return backend

    monkeypatch.setattr(prefill, "choose", noted)
    return names


@pytest.mark.parametrize("command", COMMANDS)
def test_the_backend_that_is_named_reads_the_prompts(call, taken, command):
    code, err = call(command, "--backend", "reference")
    assert code == 0, err
    assert taken and set(taken) == {"reference"}
    assert prefill_choice.named() is None


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flash", ["backend 'flash': no such backend; name one of: torch_cpu, sdpa, eager, reference (not "]),
        (
            "torch_flash",
            ["backend 'torch_flash': torch_flash runs on cuda", "one of: torch_cpu, sdpa, eager, reference"],
        ),
    ],
)
def test_one_that_cannot_be_had_is_refused_before_the_weights(call, monkeypatch, command, name, words):
    def no_weights(*_, **__):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", no_weights)
    monkeypatch.setattr(bench_module, "dummy_model", no_weights)
    code, err = call(command, "--backend", name, "--device", "cpu")
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


def test_what_the_environment_names_is_checked_as_early(call, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, "torch_flash")
    code, err = call("generate", "--device", "cpu")
    assert code == 2
    assert "HF_SPARSEKV_ATTENTION=torch_flash: torch_flash runs on cuda" in err
