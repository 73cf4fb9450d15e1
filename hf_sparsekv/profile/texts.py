"""The texts that a model is measured on: token ids of equal length, a prompt and what follows it.

Shapes: B text, N token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_sparsekv.errors import InputError, shown
from hf_sparsekv.hf.models import check_model, text_config
from hf_sparsekv.model_inputs import check_text, model_inputs
from hf_sparsekv.scorers.checks import check_int


def one_text(model: Any, ids: Any) -> Tensor:
    """Token ids int64 [1, N] on the model's device.

    Args:
        model: a causal language model.
        ids: what is to be one text for it.
    Raises:
        ModelError: no model.
        InputError: no ids, ids of several texts, or a text longer than the model was made for.
    """
    check_model(model)
    if not isinstance(ids, Tensor):
        raise InputError(f"ids must be one text, int64 [1, tokens]: got {shown(ids)}; text needs a tokenizer first")
    checked = model_inputs(ids, None, text_config(model.config).vocab_size)["input_ids"]
    if checked.shape[0] != 1:
        raise InputError(f"ids must be one text, int64 [1, tokens]: got {list(checked.shape)}")
    check_length(model.config, checked.shape[1])
    return checked.long().to(model.device)


def check_length(config: Any, num_tokens: int) -> None:
    """Refuse what is longer than a model was made for: its rows would be measured where it knows nothing.

    Raises:
        InputError: too long.
    """
    limit: int | None = getattr(text_config(config), "max_position_embeddings", None)
    if limit is not None and num_tokens > limit:
        raise InputError(
            f"a text of {num_tokens:,} tokens (what is held out included) is longer than the {limit:,} positions that "
            "the model was made for: measure shorter ones"
        )


def prompts_of(inputs: Any, *, tokenizer: Any, vocab_size: int, length: int | None, max_texts: int) -> Tensor:
    """Token ids int64 [B, length].

    Args:
        inputs: a text, several texts, or token ids int64 [B, N].
        tokenizer: turns text into ids; not needed for ids.
        vocab_size: ids are below it.
        length: of the pieces that are cut from each text, evenly spaced; None = the whole of it.
        max_texts: pieces at most; each text gives about as many.
    Raises:
        InputError: no text or ids, a text that is shorter than one piece, or texts of several lengths and none given.
        ConfigError: a length or a number of texts below 1.
    """
    check_int("max_texts", max_texts, at_least=1)
    if length is not None:
        check_int("length", length, at_least=1)
    texts = [inputs] if isinstance(inputs, str) else inputs
    if isinstance(texts, Sequence):
        if not texts:
            raise InputError("no text to measure: give at least one")
        rows = [model_inputs(_encoded(text, tokenizer), None, vocab_size)["input_ids"][0] for text in texts]
    else:
        rows = list(model_inputs(texts, tokenizer, vocab_size)["input_ids"])
    if length is None:
        lengths = sorted({len(row) for row in rows})
        if len(lengths) > 1:
            raise InputError(
                f"the texts have {lengths[0]} to {lengths[-1]} tokens: give prompt_length=, so that each is cut alike"
            )
        length = lengths[0]
    share = max(1, max_texts // len(rows))
    pieces = [piece for row in rows[:max_texts] for piece in _pieces(row, length, share)]
    return torch.stack(pieces).long()


def recall_texts(texts: Tensor, *, num_held_out: int, lead: int) -> Tensor:
    """The same texts, but what follows the prompt recites a stretch of it, and the prompt ends with its first tokens.

    Plain text rarely asks for one place of its past, so layers that find such places look as if they needed little.
    Rows that recite show what these layers need. The stretches lie at depths spread over the prompts.

    Args:
        texts: int64 [B, N], see `prompts_of`.
        num_held_out: tokens of each that follow the prompt.
        lead: tokens of the stretch that end the prompt, such as the observation window.
    Returns:
        int64 [B, N].
    Raises:
        InputError: no texts, or a prompt that is too short to hold the stretch and its repetition.
        ConfigError: a number below 1.
    """
    if not isinstance(texts, Tensor) or texts.dim() != 2:
        given = list(texts.shape) if isinstance(texts, Tensor) else shown(texts)
        raise InputError(f"texts must be token ids int64 [texts, tokens], see prompts_of: got {given}")
    check_int("num_held_out", num_held_out, at_least=1)
    check_int("lead", lead, at_least=1)
    length = texts.shape[1] - num_held_out
    room = length - 2 * lead - num_held_out
    if room < 0:
        raise InputError(
            f"a prompt of {length} tokens cannot hold {lead} + {num_held_out} tokens and {lead} of them twice: "
            "take longer texts, or a smaller lead or num_held_out"
        )
    rows = []
    for i, ids in enumerate(texts):
        start = round((i + 0.5) / len(texts) * room)
        rows.append(torch.cat([ids[: length - lead], ids[start : start + lead + num_held_out]]))
    return torch.stack(rows)


def _encoded(text: Any, tokenizer: Any) -> Tensor:
    """Token ids of one text, without a tokenizer's warning that it is longer than one prompt may be."""
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"a text to measure must be a str with something in it, or ids a tensor: got {shown(text)}")
    if tokenizer is None:
        raise InputError("text needs a tokenizer: pass tokenizer=, or token ids")
    check_text(text)
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    return ids


def _pieces(ids: Tensor, length: int, count: int) -> list[Tensor]:
    """Up to `count` pieces without overlap, the first at the beginning and the last at the end."""
    count = min(count, len(ids) // length)
    if count == 0:
        raise InputError(
            f"a text has {len(ids)} tokens, {length} are needed (the prompt and what is held out): give a longer text "
            "or a shorter prompt (prompt_length=, on the command line --length)"
        )
    if count == 1:
        return [ids[:length]]
    starts = [round(i * (len(ids) - length) / (count - 1)) for i in range(count)]
    return [ids[start : start + length] for start in starts]
