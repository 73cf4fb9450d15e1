"""`generate`: the whole job in one call: set the attention, build the cache, generate, report, put everything back."""

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError, InputError, shown
from hf_sparsekv.hf.cache_adapter import SparseKVCache
from hf_sparsekv.hf.compat import CACHE_KEYWORD, can_chunk_a_later_turn
from hf_sparsekv.hf.graph_choice import OTHER_LOOPS, PER_LAYER, GraphWish, graph_doubt, graph_obstacle
from hf_sparsekv.hf.graphs import GraphModel
from hf_sparsekv.hf.models import check_model, text_config
from hf_sparsekv.hf.shared_choice import shared_choice
from hf_sparsekv.hf.switch import sparse_attention
from hf_sparsekv.model_inputs import model_inputs
from hf_sparsekv.ops.prefill_choice import check_prompts
from hf_sparsekv.scorers.checks import check_int

_NEEDS_CROP = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
_OURS = ("past_key_values", "use_cache", "input_ids", "inputs_embeds")
_COUNTS = ("max_new_tokens", "prefill_chunk_size")
_BESIDE_IDS = ("attention_mask", "position_ids")
_DEFAULT_NEW_TOKENS = 20
"""Of transformers, where nobody says a length."""


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns."""

    sequences: Tensor
    """int64 [B, prompt + new tokens], as `model.generate` returns them; prompts are padded on the left."""
    new_tokens: Tensor
    """int64 [B, new tokens]: `sequences` without the prompt."""
    text: list[str] | None
    """The new tokens as text, special tokens left out; None without a tokenizer."""
    report: dict[str, Any]
    """`SparseKVCache.report()` at the end; `decoding` says whether CUDA graphs ran the decode steps, or why not."""
    seconds: float
    """Wall time of the whole generation, prefill included."""
    cache: SparseKVCache
    """The cache, for a next turn."""

    def __repr__(self) -> str:
        batch, count = self.new_tokens.shape
        first = f", text[0]={shorten(self.text[0], 60)!r}" if self.text else ""
        return f"GenerateOutput({batch} x {count} new tokens in {self.seconds:.2f} s{first}, cache={self.cache!r})"


def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Tensor] | str | list[str],
    config: SparseKVConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    cache: SparseKVCache | None = None,
    backend: str | None = None,
    cuda_graphs: bool | None = None,
    compile: bool = False,
    **options: Any,
) -> GenerateOutput:
    """Generate with a sparse cache; the model is left as it was found.

    Args:
        model: a causal language model of transformers, with any attention implementation.
        inputs: token ids int64 [B, T], a mapping with `input_ids` and perhaps `attention_mask` (what a tokenizer
            returns), or text, which needs `tokenizer`. What is padded on the right is padded on the left instead:
            `model.generate` would write the new tokens behind the padding.
        config: the method's options; defaults if None.
        tokenizer: turns text into ids and the result into text.
        cache: the cache of an earlier turn, in place of `config`; `inputs` then hold the whole conversation.
        backend: what reads the prompt, by its name in `hf-sparsekv doctor`; see `SparseKVCache`, which has its own.
        cuda_graphs: replay decode steps as CUDA graphs; None = on a GPU where that is possible, pays, and something is
            to be evicted. Sampling draws the same random numbers either way.
        compile: let the CUDA graph hold decoder layers that torch.compile has compiled, which takes some tens of
            seconds once a process and makes steps faster. Rounding differs from that of plain layers, so tokens may.
        options: what `model.generate` takes (max_new_tokens, do_sample, num_beams, streamer, ...). `use_cache` is on,
            whatever a generation configuration says.
    Raises:
        InputError: no prompt, a mask that does not fit it, or one too long for the model.
        ConfigError: options that contradict a sparse cache, or a backend that cannot read prompts here.
        ModelError: not a model, or the model has a feature that a sparse cache does not support.
    """
    _check_arguments(model, tokenizer, cache, config, backend)
    wish = GraphWish(cuda_graphs, compile)
    options = _checked_options(model, options)
    inputs = _with_mask(inputs, options)
    batch = model_inputs(inputs, tokenizer, text_config(model.config).vocab_size)
    batch = {name: value.to(model.device) for name, value in batch.items()}
    with shared_choice(model, batch, options) as (batch, options):
        if cache is None:
            cache = SparseKVCache(model.config, config, backend=backend)
        return _generate(model, batch, tokenizer, cache, options, wish)


def _generate(
    model: PreTrainedModel,
    batch: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    cache: SparseKVCache,
    options: Mapping[str, Any],
    wish: GraphWish,
) -> GenerateOutput:
    """`generate`, once its arguments are checked."""
    prompt_length = batch["input_ids"].shape[1]
    _check_length(model, prompt_length, options)
    if prompt_length <= cache.get_seq_length():
        raise InputError(
            f"the cache has seen {cache.get_seq_length()} tokens, the inputs have {prompt_length}: pass the whole "
            "conversation, the new turn at its end"
        )
    chunk = cache.config.chunk_tokens
    if chunk is not None and _in_force("prefill_chunk_size", model, options) is None:
        num_new = prompt_length - int(cache.get_seq_length())
        if cache.get_seq_length() == 0 or can_chunk_a_later_turn():
            options = {**options, "prefill_chunk_size": chunk}
        elif num_new > chunk:
            raise InputError(
                f"a later turn has {num_new} new tokens, more than prefill_chunk_tokens={chunk}: this transformers "
                "cannot cut it; give a larger prefill_chunk_tokens, or take transformers 5.24"
            )
    is_whole = cache.get_seq_length() == 0 and _in_force("prefill_chunk_size", model, options) is None
    check_prompts(cache.named_backend, model.device, model.dtype, cache.shape.head_dim, is_whole=is_whole)
    no_graphs = _why_no_graphs(model, batch, cache, options, wish)
    batch = _padded_on_the_left(batch, int(cache.get_seq_length()))
    cache.expect_prompt(prompt_length - int(cache.get_seq_length()))
    start = time.perf_counter()
    with sparse_attention(model), torch.no_grad(), _hinting(options):
        options = {**batch, CACHE_KEYWORD: cache, **options}
        if no_graphs is None:
            result, decoding = _generate_by_graphs(model, cache, options, wish)
        else:
            result = model.generate(**options)  # type: ignore[operator]
            decoding = {"cuda_graphs": False, "reason": no_graphs}
    seconds = time.perf_counter() - start
    sequences: Tensor = result if isinstance(result, Tensor) else result.sequences
    new_tokens = sequences[:, prompt_length:]
    text = None if tokenizer is None else tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
    report = {**cache.report(), "decoding": decoding}
    return GenerateOutput(sequences, new_tokens, text, report, seconds, cache)


def _why_no_graphs(
    model: PreTrainedModel,
    batch: Mapping[str, Tensor],
    cache: SparseKVCache,
    options: Mapping[str, Any],
    wish: GraphWish,
) -> str | None:
    names = ("num_beams", *OTHER_LOOPS, *PER_LAYER)
    in_force = {**options, **{name: _in_force(name, model, options) for name in names}}
    prompt_length = batch["input_ids"].shape[1]
    doubt = graph_doubt(cache.plan, model.config, prompt_length, _new_tokens(model, prompt_length, options))
    return wish.why_not(graph_obstacle(model, batch, in_force), doubt)


def _generate_by_graphs(
    model: PreTrainedModel, cache: SparseKVCache, options: dict[str, Any], wish: GraphWish
) -> tuple[Any, dict[str, Any]]:
    """What `model.generate` returns, and what the report says of the decode steps."""
    graphs = GraphModel(model, cache, streamer=options.get("streamer"), wish=wish)
    try:
        result = model.generate(**options, custom_generate=graphs.loop)  # type: ignore[operator]
    finally:
        graphs.close()
    return result, {"cuda_graphs": graphs.problem is None, "reason": graphs.problem, "steps": graphs.num_steps}


def _padded_on_the_left(batch: dict[str, Tensor], start: int) -> dict[str, Tensor]:
    """Move padding among the columns from `start` on before the tokens; their order stays.

    Args:
        batch: `input_ids`, and tensors of its shape that move along.
        start: columns that a cache has seen, which stay where they are.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is None or mask.shape != ids.shape or bool((mask[:, -1] != 0).all()):
        return batch
    order = (mask[:, start:] != 0).byte().argsort(dim=-1, stable=True) + start
    seen = torch.arange(start, device=ids.device).expand(len(ids), -1)
    order = torch.cat([seen, order], dim=1)
    return {name: t.gather(1, order) if t.shape == ids.shape else t for name, t in batch.items()}


def _check_arguments(model: object, tokenizer: object, cache: object, config: object, backend: object) -> None:
    check_model(model)
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "batch_decode")):
        raise InputError(f"tokenizer must be a tokenizer of transformers: got {shown(tokenizer)}")
    if cache is not None and config is not None:
        raise ConfigError("give config= for a new cache or cache= to go on with one, not both")
    if cache is not None and backend is not None:
        raise ConfigError("backend= is for a new cache; give it to the SparseKVCache that is passed as cache=")
    if cache is not None and not isinstance(cache, SparseKVCache):
        raise ConfigError(f"cache must be a SparseKVCache, such as GenerateOutput.cache: got {type(cache).__name__}")


def _checked_options(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the cache switched on, which a generation configuration may have switched off.

    Raises:
        ConfigError: one that contradicts a sparse cache, wherever it is set.
    """
    for name in _OURS:
        if options.get(name) is not None:
            raise ConfigError(f"{name} is set by this function: give inputs=, and config= or cache=, instead")
    own = options.get("generation_config")
    if own is not None and not isinstance(own, GenerationConfig):
        raise ConfigError(f"generation_config must be a GenerationConfig of transformers: got {shown(own)}")
    for name in _NEEDS_CROP:
        if _in_force(name, model, options) is not None:
            raise ConfigError(f"{name} needs a cache that can go back; a sparse cache cannot: leave it out")
    if _in_force("cache_implementation", model, options) is not None:
        raise ConfigError("cache_implementation names another cache: take it out of the generation configuration")
    for name in _COUNTS:
        value = _in_force(name, model, options)
        if value is not None:
            check_int(name, value, at_least=1)
    if own is None:
        return {**options, "use_cache": True}
    own = copy.deepcopy(own)
    own.use_cache = True
    return {**options, "generation_config": own}


@contextmanager
def _hinting(options: Mapping[str, Any]) -> Iterator[None]:
    """Inside, an option that `model.generate` does not know is a ConfigError that says which was meant, if that shows.

    Only transformers can say what it takes: models and versions differ.
    """
    try:
        yield
    except ValueError as error:
        for name in options:
            if "model_kwargs" in str(error) and repr(name) in str(error) and (hint := _meaning(name)):
                raise ConfigError(f"unknown option {name!r}: {hint}") from error
        raise


def _meaning(name: str) -> str | None:
    """Where an option that does not exist belongs, or which looks like it."""
    if name in SparseKVConfig.option_names():
        return f"it is one of SparseKVConfig, give config=SparseKVConfig({name}=...)"
    known = {
        *vars(GenerationConfig()),
        *signature(generate).parameters,
        *signature(GenerationMixin.generate).parameters,
    }
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else None


def _in_force(name: str, model: PreTrainedModel, options: Mapping[str, Any]) -> Any:
    """What an option is set to: in the call, in its generation configuration, or in the model's."""
    configurations = (options.get("generation_config"), model.generation_config)
    given = [options.get(name), *(getattr(configuration, name, None) for configuration in configurations)]
    return next((value for value in given if value is not None), None)


def _with_mask(inputs: Any, options: dict[str, Any]) -> Any:
    """The inputs, with the mask and positions that came as options, which are taken out of there."""
    beside = {name: options.pop(name) for name in _BESIDE_IDS if options.get(name) is not None}
    if not beside:
        return inputs
    if not isinstance(inputs, (Tensor, Mapping)):
        raise InputError(f"{', '.join(beside)}: given beside text, whose tokenizer makes it; leave it out")
    given = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    if twice := [name for name in beside if given.get(name) is not None]:
        raise InputError(f"{twice[0]} is given twice, in inputs and as an option: leave one out")
    return given | beside


def _new_tokens(model: PreTrainedModel, prompt_length: int, options: Mapping[str, Any]) -> int:
    """How many are to be generated at most."""
    given: int | None = _in_force("max_new_tokens", model, options)
    if given is not None:
        return given
    longest: int | None = _in_force("max_length", model, options)
    return _DEFAULT_NEW_TOKENS if longest is None else longest - prompt_length


def _check_length(model: PreTrainedModel, prompt_length: int, options: Mapping[str, Any]) -> None:
    limit = getattr(text_config(model.config), "max_position_embeddings", None)
    if limit is None:
        return
    new_tokens = max(1, _new_tokens(model, prompt_length, options))
    if prompt_length + new_tokens > limit:
        raise InputError(
            f"the prompt has {prompt_length} tokens and {new_tokens} are to be generated, but the model takes "
            f"{limit} in all: shorten the prompt or lower max_new_tokens"
        )
