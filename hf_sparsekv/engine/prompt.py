"""A prompt as a caller gives it, to the token ids that the model can read."""

from collections.abc import Sequence
from textwrap import shorten

from transformers import PreTrainedTokenizerBase

from hf_sparsekv.errors import RequestError

Prompt = str | Sequence[int]


def token_ids(name: str, prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """The token ids of a prompt; there may be none.

    Args:
        name: of the request, for messages.
        prompt: text, or a list, tuple, tensor or array of one dimension.
        tokenizer: for text.
        vocab_size: ids are below it.
    Raises:
        RequestError: neither text nor token ids, ids that the model has not got, or text without a tokenizer or that
            the tokenizer fails on.
    """
    ids = _tokenized(name, prompt, tokenizer) if isinstance(prompt, str) else prompt
    if hasattr(ids, "tolist"):  # a tensor or an array
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray)):
        raise RequestError(
            f"request {name!r}: a prompt is text or a list of token ids: got {type(prompt).__name__} "
            f"{shorten(repr(prompt), 60)}"
        )
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return list(ids)  # nearly always; what follows is slower by far, and finds the culprit
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(f"request {name!r}: token ids must be ints in [0, {vocab_size}): got {token!r}")
    return list(ids)


def shown_ids(prompt: object) -> tuple[int, ...]:
    """What an output can show of a prompt that was refused."""
    return tuple(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)) else ()


def _tokenized(name: str, text: str, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[int]:
    if tokenizer is None:
        raise RequestError(f"request {name!r} is text, but the engine has no tokenizer: give token ids")
    # The engine says itself when a prompt is too long; a tokenizer of another kind may know no such option.
    quiet = {"verbose": False} if isinstance(tokenizer, PreTrainedTokenizerBase) else {}
    try:
        ids: Sequence[int] = tokenizer(text, **quiet)["input_ids"]
    except Exception as problem:
        raise RequestError(
            f"request {name!r}: the tokenizer fails on it ({type(problem).__name__}: {problem}): give token ids"
        ) from problem
    return ids
