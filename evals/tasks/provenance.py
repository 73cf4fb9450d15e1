"""What made a figure: versions, and the model by its weights."""

import hashlib
import platform
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import transformers
from torch.distributed.tensor import DTensor

import hf_sparsekv as skv
from hf_sparsekv.bench.machine import device_facts


def versions() -> dict[str, str]:
    """Of everything that may move a figure."""
    return {
        "hf_sparsekv": skv.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def prompt_facts(chat_template: str | None, stop_ids: Iterable[int]) -> dict[str, Any]:
    """How prompts were written and answers ended: JSON-able.

    Args:
        chat_template: the template's text; None = prompts are plain text.
        stop_ids: tokens that end an answer; none where answers are scored and not generated.
    """
    return {"chat_template": chat_template, "stop_ids": sorted(set(stop_ids))}


SCORED_TEXTS = prompt_facts(None, ())
"""Of our own tasks: they put no template around their texts, and score given answers."""


def weights_sha256(model: torch.nn.Module) -> str:
    """Of all weights, by name in alphabetical order: says which model it was, whatever it was called.

    Of a model that several ranks share all must call it: each weight is put together, one at a time.
    """
    digest = hashlib.sha256()
    for name, held in sorted(model.state_dict().items()):
        tensor = held.full_tensor() if isinstance(held, DTensor) else held
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_facts(model: transformers.PreTrainedModel, name: str) -> dict[str, Any]:
    """Which model it was: JSON-able."""
    return {
        "name": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "device_name": device_facts(model.device)["name"],
        "num_parameters": model.num_parameters(),
        "weights_sha256": weights_sha256(model),
    }
