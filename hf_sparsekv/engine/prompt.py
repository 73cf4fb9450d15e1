"""A prompt and its options as a caller gives them, to what the engine can read."""

from collections.abc import Sequence
from textwrap import shorten

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.errors import ConfigError, RequestError

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
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(f"request {name!r}: token ids must be ints in [0, {vocab_size}): got {token!r}")
    return list(ids)


def given_params(
    params: SamplingParams | GenerationConfig | None, model: PreTrainedModel, stop_ids: tuple[int, ...], room: int
) -> SamplingParams:
    """How a request is sampled: as it says, or as its model's generation configuration does.

    Args:
        params: what came with the request.
        model: of the engine.
        stop_ids: the model's end-of-sequence tokens.
        room: tokens that may follow its prompt.
    Raises:
        ConfigError: no sampling options, or ones that the engine does not have.
    """
    if isinstance(params, SamplingParams):
        return params
    if not isinstance(params, GenerationConfig | None):
        raise ConfigError(f"params must be SamplingParams or a GenerationConfig: got {params!r}")
    if params is None:
        most = max(1, min(SamplingParams().max_tokens, room))
        return SamplingParams.from_generation_config(model.generation_config, stop_ids, max_tokens=most)
    return SamplingParams.from_generation_config(params, stop_ids)


def shown_ids(prompt: object) -> tuple[int, ...]:
    """What an output can show of a prompt that was refused."""
    return tuple(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)) else ()


def _tokenized(name: str, text: str, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[int]:
    if tokenizer is None:
        raise RequestError(f"request {name!r} is text, but the engine has no tokenizer: give token ids")
    try:
        ids: Sequence[int] = tokenizer(text)["input_ids"]
    except Exception as problem:
        raise RequestError(
            f"request {name!r}: the tokenizer fails on it ({type(problem).__name__}: {problem}): give token ids"
        ) from problem
    return ids
