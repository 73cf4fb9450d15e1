"""Whatever is given, the command line ends in one line that says what is wrong: no traceback, nothing eaten."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from hf_sparsekv.cli.app import NOBODY_READS, main
from hf_sparsekv.cli.session import Answer, comparison_table
from hf_sparsekv.models_store import BUILTIN_ALIAS, builtin_path
from hf_sparsekv.testing.models import tiny_llama

ENDLESS, DEEP, LONG = "9" * 5000, "[" * 100_000, "a" * 5000
START = "import sys; sys.argv = ['hf-sparsekv', *sys.argv[1:]]\nfrom hf_sparsekv.cli.app import main\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without a tokenizer: nothing here gets that far."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(num_layers=2).save_pretrained(path)
    return str(path)


@pytest.fixture
def error_of(capsys, monkeypatch):
    """The one line that a call ends in."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["hf-sparsekv", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        assert (caught.value.code, captured.out) == (2, "")
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "1e-300"], r"must be 0 \(greedy\) or from 0.001 to 100: got 1e-300"),
        (["--temperature", "inf"], r"must be 0 \(greedy\) or from 0.001 to 100: got inf"),
        (["--seed", "99999999999999999999999"], "--seed"),
        (["--seed", "-1"], "--seed"),
        (["--set", f"budget={ENDLESS}"], "budget must be an int"),
        (["--set", f"budget={DEEP}"], "budget must be an int"),
        (["--set", "decay=nan"], r"decay must be a number in \[0, 1\]: got nan"),
        (["--set", "decay=-inf"], r"decay must be a number in \[0, 1\]: got -inf"),
        (["--budget", ENDLESS], "--budget: '9+.*is not a number"),
        (["--model", "~nouser"], "the model is '~nouser', but that home folder is not known"),
        (["--model", f"./{LONG}"], "cannot look at 'a+"),
        (["--model", "[bold]x"], r"\[bold\]x"),
        (["--file", "[/x]"], r"no such file: \[/x\]"),
        (["--num-full-layers", "2", "--full-layers", "1"], r"got num_full_layers=2 and full_layers=\(1,\)"),
    ],
)
def test_a_mistake_is_one_line(error_of, folder, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    err = error_of("generate", "-m", folder, "-p", "a", *arguments)
    assert re.search(message, err)
    assert len(err) < 500


@pytest.mark.parametrize("text", [f'{{"budget": {ENDLESS}}}', DEEP])
def test_a_configuration_file_that_json_cannot_read_is_one_line(error_of, folder, tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert "not a configuration: invalid JSON" in error_of("plan", "-m", folder, "--config", str(path))


def test_a_configuration_file_may_begin_with_a_byte_order_mark(error_of, folder, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"budget": 5}')
    assert "budget=5 is smaller" in error_of("plan", "-m", folder, "--config", str(path))


@pytest.mark.parametrize(
    ("cache", "message"),
    [("~nouser", "HF_SPARSEKV_CACHE is '~nouser', but that home"), (f"/tmp/{LONG}", "cannot look at .*File name too")],
)
def test_a_cache_folder_that_cannot_be_is_one_line(error_of, monkeypatch, cache, message):
    monkeypatch.setenv("HF_SPARSEKV_CACHE", cache)
    assert re.search(message, error_of("plan"))


def test_a_deeply_nested_manifest_is_damage(error_of, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPARSEKV_CACHE", str(tmp_path))
    path = builtin_path()
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(DEEP)
    assert re.search(r"damaged: .*RecursionError.*hf-sparsekv fetch", error_of("plan", "-m", BUILTIN_ALIAS))


def test_markup_in_an_answer_is_text():
    answer = Answer("sparse", "a [bold]b[/bold] [/x]", 3, 0.1, 1.0, 10, None)
    cells = list(comparison_table([answer]).columns[1].cells)
    assert str(cells[0]) == "a [bold]b[/bold] [/x]"


# --- processes ----------------------------------------------------------------------------------------------------


def start(*arguments, code="main()", **options):
    return subprocess.Popen([sys.executable, "-c", START + code, *arguments], stderr=subprocess.PIPE, **options)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["--version"], ["generate", "--help"]])
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        process = start(*arguments, stdout=full)
        err = process.communicate(timeout=60)[1].decode()
    assert (process.returncode, err) == (2, "error: cannot write the output: No space left on device\n")


def test_nobody_who_reads_is_no_error_message():
    code = "import typer\nfrom hf_sparsekv.cli import app\nloud = typer.Typer(); "
    code += "loud.command()(lambda: print('x' * 100_000, flush=True))\n"
    code += "app.load_command = lambda name: typer.main.get_command(loud)\nmain()"
    reader, writer = os.pipe()
    os.close(reader)
    process = start("plan", code=code, stdout=writer)
    os.close(writer)
    err = process.communicate(timeout=60)[1]
    assert (process.returncode, err) == (NOBODY_READS, b"")


def test_an_interrupt_while_modules_are_imported_is_one_line():
    """At any moment, inside a callback that swallows exceptions too."""
    code = "import weakref\nfrom hf_sparsekv.cli.interrupt import importing\n"
    code += "class Thing: pass\ndef wait(_):\n    import time\n    print('ready', flush=True)\n    time.sleep(30)\n"
    code += "with importing():\n    thing = Thing()\n    ref = weakref.ref(thing, wait)\n    del thing\n"
    process = start(code=code, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=10)[1]
    assert (process.returncode, err) == (130, b"interrupted\n")


def test_an_interrupted_command_that_has_just_begun_is_one_line(folder):
    process = start("plan", "-m", folder, code="print('ready', flush=True)\nmain()", stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    assert (process.returncode, err) == (130, b"interrupted\n")


def test_bytes_that_are_no_text_are_refused_in_a_prompt(folder):
    code = "from hf_sparsekv.cli.session import encode_prompt\nfrom hf_sparsekv.errors import InputError\n"
    code += "try: encode_prompt(None, sys.argv[1], None, use_chat=False)\nexcept InputError as error: print(error)"
    process = start(b"ab\xff", code=code, stdout=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (
        0,
        b"the prompt is no Unicode text: character 2 is half of a surrogate pair\n",
    ), err
