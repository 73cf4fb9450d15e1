"""Every command that a page names can be given as it stands: it is there, and so are its options.

Guards against options that were renamed, programs that were moved, and targets that the Makefile lost.
"""

import re
import shlex
from pathlib import Path

import pytest

from hf_sparsekv.cli.app import COMMANDS, load_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "kernels" / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LAUNCHERS = ("python", "torchrun", "accelerate", "compute-sanitizer")
PYTHON_FENCES = ("python", "py", "json")


def fenced(text):
    """Lines of shell code, those that go on joined, without comments and settings of the environment."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if kind not in PYTHON_FENCES:
            for line in block.replace("\\\n", " ").splitlines():
                try:
                    words = shlex.split(line, comments=True)
                except ValueError:  # a drawing or a program's output
                    continue
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                for part in " ".join(map(shlex.quote, words)).split(" '&&' "):
                    yield shlex.split(part)


def inline(text):
    for code in re.findall(
        r"(?<!`)`((?:hf-sparsekv|python|make) [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    ):
        yield shlex.split(code)


def ours(words):
    """The part of a launcher's command that our program gets: `torchrun ... -m hf_sparsekv run x` -> `run x`."""
    if words[:1] == ["hf-sparsekv"]:
        return words[1:]
    if words and words[0].rpartition("/")[2] in LAUNCHERS and "hf_sparsekv" in words:
        return words[words.index("hf_sparsekv") + 1 :]
    return None


def options_of(command):
    return {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}


CODE = [(path, words) for path in PAGES for words in fenced(path.read_text(encoding="utf-8")) if words]
INLINE = [(path, words) for path in PAGES for words in inline(path.read_text(encoding="utf-8"))]


def names(commands):
    return [f"{path.name}: {' '.join(words)[:90]}" for path, words in commands]


RUN = [(path, ours(words)) for path, words in CODE if ours(words) and ours(words)[0] in COMMANDS]
NAMED = [(path, ours(words)) for path, words in INLINE if ours(words)]


@pytest.mark.parametrize(("path", "words"), RUN, ids=names(RUN))
def test_a_printed_command_is_understood(path, words):
    load_command(words[0]).make_context(words[0], words[1:])  # parses all of it, and runs nothing


@pytest.mark.parametrize(("path", "words"), NAMED, ids=names(NAMED))
def test_a_named_command_and_its_options_are_there(path, words):
    if not words[0].startswith("-") and words[0] != "COMMAND":
        options = [word.partition("=")[0] for word in words[1:] if re.match(r"-{1,2}[a-z]", word)]
        assert set(options) <= options_of(load_command(words[0]))


def test_commands_are_found():
    assert {words[0] for _, words in RUN} == {"generate", "demo", "plan", "doctor", "bench", "eval", "run"}
    assert len(RUN) > 25 and len(NAMED) > 10


PROGRAMS = [(p, w) for p, w in [*CODE, *INLINE] if w[0].rpartition("/")[2] in LAUNCHERS and ours(w) is None]
PROGRAMS = [(p, w) for p, w in PROGRAMS if not {"venv", "pytest", "pip"} & set(w)]


@pytest.mark.parametrize(("path", "words"), PROGRAMS, ids=names(PROGRAMS))
def test_a_program_and_its_options_are_there(path, words):
    module = next((words[i + 1] for i, word in enumerate(words) if word == "-m"), None)
    place = f"{module.replace('.', '/')}.py" if module else next(word for word in words if word.endswith(".py"))
    if place != "program.py":  # a reader's own
        shared = [ROOT / "kernels" / "bench" / "timing.py"] if place.startswith("kernels/bench/") else []
        source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / place, *shared))
        after = words[words.index(module or place) + 1 :]
        for option in (word.partition("=")[0] for word in after if word.startswith("--")):
            assert f'"{option}"' in source, option


def test_targets_of_make_are_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {word for _, words in [*CODE, *INLINE] if words[0] == "make" for word in words[1:] if word.isidentifier()}
    assert {"demo", "test", "eval", "docs", "notebooks"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
