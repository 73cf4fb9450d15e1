"""The built-in model is whole and checked, or absent; a fetch that dies leaves nothing in the way."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import replace

import pytest

from hf_sparsekv.builtin_model import ModelSource
from hf_sparsekv.errors import InputError
from hf_sparsekv.models_store import (
    BUILTIN_ALIAS,
    DamagedModelError,
    builtin_path,
    check_manifest,
    fetch_builtin,
    is_fetched,
    resolve_model,
)

GGUF = b"not really a model"


@pytest.fixture
def source(tmp_path):
    """A wheel of our own with one small file in it, pinned as the real one is."""
    wheel = tmp_path / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake_model/model.gguf", GGUF)
        archive.writestr("fake_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr(
            "fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("fake_model-1.0.dist-info/RECORD", "")
    return ModelSource(
        requirement=str(wheel),
        size_text="1 kB",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member="fake_model/model.gguf",
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        bos_token_id=1,
        eos_token_id=2,
    )


def convert(source, gguf, folder, progress):
    """Stand for the real conversion: the store does not care what a model consists of."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 3)


def leftovers(cache):
    return [path.name for path in (cache / "models").iterdir() if path.name.startswith(".fetch-")]


def test_a_fetch_stores_the_model_once(tmp_path, source):
    cache, calls = tmp_path / "cache", []

    def counted(*args):
        calls.append(1)
        convert(*args)

    first = fetch_builtin(cache, source=source, convert=counted)
    assert first == builtin_path(cache) == fetch_builtin(cache, source=source, convert=counted)
    assert calls == [1]
    assert (first / "model.safetensors").read_bytes() == GGUF * 3
    assert leftovers(cache) == []
    resolved = resolve_model(BUILTIN_ALIAS.upper(), cache_dir=cache)
    assert (resolved.path_or_id, resolved.is_builtin) == (str(first), True)


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_file_that_is_not_the_pinned_one_is_never_loaded(tmp_path, source, field):
    cache, wrong = tmp_path / "cache", replace(source, **{field: "0" * 64})

    def never(*args):
        raise AssertionError("converted an unchecked file")

    with pytest.raises(InputError, match=r"expected sha256 0000.*got"):
        fetch_builtin(cache, source=wrong, convert=never)
    assert not is_fetched(cache)
    assert leftovers(cache) == []


def test_a_package_that_is_not_there_is_one_line(tmp_path, source):
    missing = replace(source, requirement=str(tmp_path / "nowhere-1.0-py3-none-any.whl"))
    with pytest.raises(InputError, match="pip could not download") as caught:
        fetch_builtin(tmp_path / "cache", source=missing, convert=convert)
    assert "\n" not in str(caught.value)


def test_a_fetch_killed_in_the_middle_leaves_nothing_in_the_way(tmp_path, source):
    cache = tmp_path / "cache"
    script = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from hf_sparsekv.builtin_model import ModelSource
        from hf_sparsekv.models_store import fetch_builtin
        def convert(source, gguf, folder, progress):
            (folder / "config.json").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
        fetch_builtin(Path({str(cache)!r}), source={source!r}, convert=convert)
    """)
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert leftovers(cache) != []
    assert not is_fetched(cache)
    with pytest.raises(InputError, match="hf-sparsekv fetch"):
        resolve_model(BUILTIN_ALIAS, cache_dir=cache)
    fetch_builtin(cache, source=source, convert=convert)
    assert is_fetched(cache)
    assert leftovers(cache) == []


def test_a_failing_conversion_leaves_nothing(tmp_path, source):
    cache = tmp_path / "cache"

    def broken(source, gguf, folder, progress):
        (folder / "config.json").write_text("half")
        raise InputError("cannot")

    with pytest.raises(InputError, match="cannot"):
        fetch_builtin(cache, source=source, convert=broken)
    assert not is_fetched(cache)
    assert leftovers(cache) == []


@pytest.mark.parametrize("damage", ["truncate", "remove", "change"])
def test_a_damaged_model_is_noticed_and_replaced(tmp_path, source, damage):
    cache = tmp_path / "cache"
    weights = fetch_builtin(cache, source=source, convert=convert) / "model.safetensors"
    if damage == "remove":
        weights.unlink()
    else:
        weights.write_bytes(b"x" * (5 if damage == "truncate" else weights.stat().st_size))
    with pytest.raises(DamagedModelError, match=r"model\.safetensors"):
        check_manifest(weights.parent, with_hashes=True)
    fetch_builtin(cache, source=source, convert=convert)
    check_manifest(weights.parent, source=source, with_hashes=True)


def test_names_and_paths_mean_what_they_say(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve_model(tmp_path / "model").path_or_id == str(tmp_path / "model")
    assert resolve_model("owner/name").path_or_id == "owner/name"
    for name, message in (
        (tmp_path / "empty", "no config.json"),
        (tmp_path / "model" / "config.json", "is a file"),
        (tmp_path / "nowhere", "no model folder"),
        ("", "no model folder"),
        ("./typo", "no model folder"),
    ):
        with pytest.raises(InputError, match=message):
            resolve_model(name, cache_dir=tmp_path)
