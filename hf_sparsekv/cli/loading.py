"""Loading a model for the command line: the cheap parts first, so that mistakes show before the weights load."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from hf_sparsekv.cli.progress import status
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.models_store import BUILTIN_ALIAS, resolve_model
from hf_sparsekv.ops.prefill_choice import check_prompts

MAX_REASON = 400
"""Characters of what transformers says of a model that it cannot open."""
UNLOADABLE = (OSError, ValueError, SafetensorError)
"""What transformers raises where it cannot load weights: no files, or torn ones."""
_BAD_FIELDS = (StrictDataclassError, TypeError, AttributeError, ArithmeticError, LookupError)
"""What transformers raises of files whose fields are missing, of a wrong type or impossible."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSource:
    """A model whose weights are not loaded yet."""

    path_or_id: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    trust_remote_code: bool
    is_offline: bool = False
    """Only what the local Hugging Face cache holds can be had."""


def open_model(name: str, *, trust_remote_code: bool, console: Console) -> ModelSource:
    """Configuration and tokenizer of a model; the built-in one is fetched when it is not there.

    Raises:
        InputError: there is no such model, or its files cannot be read.
    """
    with status(console, "opening the model") as update:
        files = _files_of(name, trust_remote_code, update)
        config, tokenizer = files.read(AutoConfig, "model"), files.read(AutoTokenizer, "the tokenizer of model")
    return ModelSource(files.path_or_id, config, tokenizer, trust_remote_code, files.is_offline)


def open_config(name: str, *, trust_remote_code: bool, console: Console) -> PreTrainedConfig:
    """Configuration of a model, for what reads no text and loads no weights.

    Raises:
        InputError: there is no such model, or its configuration cannot be read.
    """
    with status(console, "opening the model") as update:
        config: PreTrainedConfig = _files_of(name, trust_remote_code, update).read(AutoConfig, "model")
    return config


@dataclass(frozen=True)
class _ModelFiles:
    """Where the files of a model are."""

    name: str
    """As the user calls it."""
    path_or_id: str
    trust_remote_code: bool
    is_offline: bool

    def read(self, kind: Any, what: str) -> Any:
        """What one of transformers' Auto classes makes of them."""
        hub_logging.set_verbosity_error()  # each of its retries would be two lines; the failure is one of ours
        options = {"trust_remote_code": self.trust_remote_code, "local_files_only": self.is_offline}
        try:
            return kind.from_pretrained(self.path_or_id, **options)
        except _BAD_FIELDS as error:
            reason = f"{type(error).__name__}: {_one_line(error)}"
            raise InputError(f"cannot open {what} {self.name!r}: {reason}; are its files whole?") from error
        except (OSError, ValueError) as error:
            if self.is_offline:
                reason = "HF_HUB_OFFLINE is set" if hub_constants.HF_HUB_OFFLINE else f"{hub_host()} cannot be reached"
                raise InputError(
                    f"cannot open {what} {self.name!r}: {reason} and the model is not in the local "
                    f"Hugging Face cache: connect, or give a local folder or {BUILTIN_ALIAS}"
                ) from error
            raise InputError(f"cannot open {what} {self.name!r}: {_one_line(error)}") from error


def _files_of(name: str, trust_remote_code: bool, update: Callable[[str], None]) -> _ModelFiles:
    """Of a model by name; the built-in one is fetched when it is not there."""
    place = resolve_model(name, allow_fetch=True, progress=update).path_or_id
    is_offline = not Path(place).is_dir() and not is_hub_in_reach()
    return _ModelFiles(name, place, trust_remote_code, is_offline)


def hub_host() -> str:
    """Host name of the Hugging Face hub, or of the mirror that HF_ENDPOINT names."""
    return urlsplit(hub_constants.ENDPOINT).hostname or hub_constants.ENDPOINT


def is_hub_in_reach() -> bool:
    """Whether asking the hub makes sense: it retries for half a minute before it gives up on a name without address."""
    if hub_constants.HF_HUB_OFFLINE:
        return False
    if getproxies():  # a proxy looks names up itself
        return True
    try:
        socket.getaddrinfo(hub_host(), None)
    except OSError:
        return False
    return True


def load_weights(source: ModelSource, *, dtype: str, device: str, console: Console) -> PreTrainedModel:
    """The model itself, from safetensors only.

    Raises:
        ConfigError: an unknown dtype or a device that is not there.
        InputError: no safetensors, or files that cannot be read.
    """
    where, kind = pick_device(device), pick_dtype(dtype, pick_device(device))
    transformers_logging.disable_progress_bar()  # ours is on the screen already
    with status(console, f"loading the weights ({dtype_name(kind)} on {where})"):
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                source.path_or_id,
                dtype=kind,
                use_safetensors=True,
                trust_remote_code=source.trust_remote_code,
                local_files_only=source.is_offline,
            )
        except UNLOADABLE as error:
            raise InputError(f"cannot load {source.path_or_id}: {_one_line(error)}") from error
        return model.to(where).eval()  # type: ignore[no-any-return, arg-type]


def check_backend(name: str | None, config: PreTrainedConfig, *, dtype: str, device: str, is_whole: bool) -> None:
    """Refuse a backend that cannot read a model's prompts, before its weights are loaded.

    Args:
        name: what the user named; None = what the environment names, if anything.
        config: the model's.
        dtype, device: by name.
        is_whole: every prompt is read at once, into an empty cache.
    Raises:
        ConfigError: why it cannot, who can, and why not the others.
        ModelError: the model has a feature that a sparse cache does not support.
    """
    where = pick_device(device)
    check_prompts(name, where, pick_dtype(dtype, where), model_shape(config).head_dim, is_whole=is_whole)


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


def dtype_name(dtype: torch.dtype) -> str:
    """The short name: float32, not torch.float32."""
    return str(dtype).removeprefix("torch.")


def _one_line(error: Exception) -> str:
    """What an error says, its lines joined: the first alone may end where the reasons begin."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 3]}..."
