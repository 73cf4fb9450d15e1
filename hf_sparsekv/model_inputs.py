"""What a caller gives to be read, checked once: text, ids or a mapping in, the tensors that a model takes out.

Shapes: B request, T token.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_sparsekv.errors import InputError, shown

_ID_DTYPES = (torch.int64, torch.int32)


def model_inputs(inputs: Any, tokenizer: Any, vocab_size: int) -> dict[str, Tensor]:
    """Tensors that a model takes, by name: `input_ids` int [B, T], `attention_mask` int64 [B, T] of 0 and 1 if given.

    Args:
        inputs: a prompt or a list of prompts as text, token ids [B, T], or a mapping with `input_ids`.
        tokenizer: turns text into ids; may be None where there is no text.
        vocab_size: ids are below it.
    Raises:
        InputError: anything that is no prompt.
    """
    if isinstance(inputs, (str, list)):
        inputs = _encoded(inputs, tokenizer)
    if not isinstance(inputs, (Tensor, Mapping)):
        raise InputError(f"inputs must be token ids, a mapping with input_ids, or text: got {type(inputs).__name__}")
    given: dict[str, Any] = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    batch = {name: _checked_tensor(name, value) for name, value in given.items() if value is not None}
    if "input_ids" not in batch:
        raise InputError(f"inputs must hold input_ids, a tensor [batch, tokens]: got {shown(list(given))}")
    ids = batch["input_ids"]
    _check_ids(ids, vocab_size)
    if "attention_mask" in batch:
        batch["attention_mask"] = _checked_mask(batch["attention_mask"], ids)
    positions = batch.get("position_ids")
    if positions is not None and (positions.dtype not in _ID_DTYPES or positions.shape != ids.shape):
        raise InputError(
            f"position_ids must be int64 and have the shape of input_ids {list(ids.shape)}: got {_described(positions)}"
        )
    return batch


def check_text(text: str) -> None:
    """Refuse text that no tokenizer can read.

    Raises:
        InputError: half of a surrogate pair, which is what bytes that are no UTF-8 become on a command line.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the prompt is no Unicode text: character {error.start} is half of a surrogate pair"
        ) from error


def _encoded(inputs: str | list[Any], tokenizer: Any) -> Mapping[str, Any]:
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not texts:
        raise InputError("inputs is an empty list: give at least one prompt")
    strange = [text for text in texts if not isinstance(text, str)]
    if strange:
        raise InputError(
            f"a list of inputs holds text: got {shown(strange[0])} (for token ids, give torch.tensor(ids))"
        )
    if tokenizer is None:
        raise InputError("text needs a tokenizer: pass tokenizer=, or token ids")
    for text in texts:
        if not text.strip():
            raise InputError("the prompt is empty: give at least one token")
        check_text(text)
    if len(texts) > 1 and getattr(tokenizer, "pad_token", None) is None:
        raise InputError(
            f"{len(texts)} prompts need padding, and the tokenizer has no pad token: set tokenizer.pad_token, "
            "to tokenizer.eos_token for instance"
        )
    padding = {"padding": len(texts) > 1, "padding_side": "left"}
    # Its warning that a prompt is too long would come before our error, which says what to do.
    encoded: Mapping[str, Any] = tokenizer(texts, return_tensors="pt", verbose=False, **padding)
    return encoded


def _checked_tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        hint = " (tokenize with return_tensors='pt')" if name == "input_ids" else ""
        raise InputError(f"{name} must be a tensor [batch, tokens], got {type(value).__name__}{hint}")
    if value.layout != torch.strided or value.device.type == "meta":
        raise InputError(f"{name} must be a dense tensor with values: got {_described(value)}")
    return value


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    if ids.dim() != 2:
        raise InputError(f"input_ids must be a tensor [batch, tokens], got shape {list(ids.shape)}")
    if ids.numel() == 0:
        raise InputError(f"the prompt is empty: input_ids has shape {list(ids.shape)}")
    if ids.dtype not in _ID_DTYPES:
        raise InputError(f"input_ids must be int64 or int32: got {_described(ids)}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InputError(f"token ids must be in [0, {vocab_size}): got {low} to {high}")


def _checked_mask(mask: Tensor, ids: Tensor) -> Tensor:
    """The mask as int64; every request keeps at least one token."""
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask {list(mask.shape)} must have the shape of input_ids {list(ids.shape)}")
    strange = (mask != 0) & (mask != 1)
    if bool(strange.any()):
        raise InputError(f"attention_mask must hold 1 for a token and 0 for padding: got {mask[strange][0].item()}")
    is_empty = (mask == 0).all(dim=-1)
    if bool(is_empty.any()):
        raise InputError(f"request {int(is_empty.nonzero()[0])} of the batch has no token at all")
    return mask.long()


def _described(tensor: Tensor) -> str:
    """Dtype, shape, and what is unusual."""
    layout = "" if tensor.layout == torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
    device = " on device meta" if tensor.device.type == "meta" else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{layout} {list(tensor.shape)}{device}"
