"""Loading a model for the command line: the cheap parts first, so that mistakes show before the weights load."""

from dataclasses import dataclass

import torch
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.models_store import resolve_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSource:
    """A model whose weights are not loaded yet."""

    path_or_id: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    trust_remote_code: bool


def open_model(name: str, *, trust_remote_code: bool, console: Console) -> ModelSource:
    """Configuration and tokenizer of a model; the built-in one is fetched when it is not there.

    Raises:
        InputError: there is no such model, or its files cannot be read.
    """
    with console.status("opening the model") as status:
        resolved = resolve_model(name, allow_fetch=True, progress=status.update)
        try:
            config = AutoConfig.from_pretrained(resolved.path_or_id, trust_remote_code=trust_remote_code)
            tokenizer = AutoTokenizer.from_pretrained(resolved.path_or_id, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot open model {name!r}: {_first_line(error)}") from error
    return ModelSource(resolved.path_or_id, config, tokenizer, trust_remote_code)


def load_weights(source: ModelSource, *, dtype: str, device: str, console: Console) -> PreTrainedModel:
    """The model itself, from safetensors only.

    Raises:
        ConfigError: an unknown dtype or a device that is not there.
        InputError: no safetensors, or files that cannot be read.
    """
    where, kind = pick_device(device), pick_dtype(dtype, pick_device(device))
    transformers_logging.disable_progress_bar()  # ours is on the screen already
    with console.status(f"loading the weights ({str(kind).removeprefix('torch.')} on {where})"):
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                source.path_or_id,
                dtype=kind,
                use_safetensors=True,
                trust_remote_code=source.trust_remote_code,
            )
        except (OSError, ValueError) as error:
            raise InputError(f"cannot load {source.path_or_id}: {_first_line(error)}") from error
        return model.to(where).eval()  # type: ignore[no-any-return, arg-type]


def pick_device(name: str) -> str:
    """A device by name; "auto" is the GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not (name.split(":")[0] == "cuda" and torch.cuda.is_available()):
        raise ConfigError(f"device {name!r} is not available here: use cpu{' or cuda' * torch.cuda.is_available()}")
    return name


def pick_dtype(name: str, device: str) -> torch.dtype:
    """A dtype by name; "auto" is bfloat16 on a GPU and float32 on the CPU."""
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}: choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
