"""One prompt through one cache, timed: what `generate` and `demo` are made of."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_sparsekv import SparseKVConfig
from hf_sparsekv import generate as sparse_generate
from hf_sparsekv.cli.progress import TimedStreamer, WatchedDynamicCache, WatchedSparseKVCache, prefill_bar
from hf_sparsekv.errors import InputError
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.graph_choice import GraphWish
from hf_sparsekv.model_inputs import check_text

QUIET = {"verbose": False}
"""To a tokenizer: no warning that a prompt is too long for the model; `check_fits` says so, and what to do."""


@dataclass(frozen=True)
class Answer:
    """What one run gave."""

    kind: str
    text: str
    num_tokens: int
    prefill_seconds: float
    decode_tokens_per_second: float | None
    cache_bytes: int
    report: dict[str, Any] | None
    """The sparse cache's report; None for the dense cache."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "cache": self.kind,
            "text": self.text,
            "new_tokens": self.num_tokens,
            "prefill_s": round(self.prefill_seconds, 4),
            "decode_tokens_per_s": self.decode_tokens_per_second,
            "cache_bytes": self.cache_bytes,
            "report": self.report,
        }


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, document: str | None, *, use_chat: bool) -> Tensor:
    """Token ids int64 [1, T] of a prompt that follows a document, in the model's chat template where it has one.

    Raises:
        InputError: nothing to say.
    """
    text = prompt if document is None else f"{document.rstrip()}\n\n{prompt}"
    if not text.strip():
        raise InputError("the prompt is empty: give --prompt, --file, or both")
    check_text(text)
    if use_chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, tokenizer_kwargs=QUIET
        )
    else:
        encoded = tokenizer(text, return_tensors="pt", **QUIET)
    ids: Tensor = encoded["input_ids"]  # type: ignore[index, assignment, call-overload]
    return ids


def answer_sparse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    config: SparseKVConfig,
    console: Console,
    *,
    backend: str | None,
    wish: GraphWish | None,
    is_silent: bool,
    **options: Any,
) -> Answer:
    """Answer with the sparse cache."""
    cache = WatchedSparseKVCache(model.config, config, backend=backend)
    with prefill_bar(cache, f"reading {ids.shape[1]:,} tokens", len(cache.layers), console) as finish:
        streamer = TimedStreamer(tokenizer, on_first=finish, is_silent=is_silent)
        options |= {} if wish is None else asdict(wish)
        output = sparse_generate(model, ids, cache=cache, tokenizer=tokenizer, streamer=streamer, **options)
    assert output.text is not None
    return Answer(
        "sparse",
        output.text[0].strip(),
        output.new_tokens.shape[1],
        streamer.prefill_seconds,
        streamer.decode_tokens_per_second,
        output.report["cache_bytes"],
        output.report,
    )


def answer_dense(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    console: Console,
    *,
    is_silent: bool,
    **options: Any,
) -> Answer:
    """Answer with transformers' dense cache."""
    cache = WatchedDynamicCache(config=model.config)
    label = f"reading {ids.shape[1]:,} tokens (dense)"
    with prefill_bar(cache, label, model.config.num_hidden_layers, console) as finish:
        streamer = TimedStreamer(tokenizer, on_first=finish, is_silent=is_silent)
        with torch.no_grad():
            sequences: Tensor = model.generate(  # type: ignore[operator]
                input_ids=ids.to(model.device),
                attention_mask=torch.ones_like(ids).to(model.device),
                streamer=streamer,
                **{CACHE_KEYWORD: cache},
                **options,
            )
    new_tokens = sequences[0, ids.shape[1] :]
    text: str = tokenizer.decode(new_tokens, skip_special_tokens=True)  # type: ignore[assignment]
    return Answer(
        "dense",
        text.strip(),
        len(new_tokens),
        streamer.prefill_seconds,
        streamer.decode_tokens_per_second,
        cache.nbytes,
        None,
    )


def answer_each(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    config: SparseKVConfig,
    console: Console,
    *,
    seed: int,
    with_dense: bool,
    is_silent: bool,
    backend: str | None = None,
    wish: GraphWish | None = None,
    **options: Any,
) -> list[Answer]:
    """Answer with the dense cache where asked, then with the sparse one, from the same seed.

    `backend` and `wish` are the sparse one's: the dense cache is read by what the model was loaded with.
    """
    answers = []
    if with_dense:
        torch.manual_seed(seed)
        answers.append(answer_dense(model, tokenizer, ids, console, is_silent=True, **options))
    torch.manual_seed(seed)
    answers.append(
        answer_sparse(
            model, tokenizer, ids, config, console, backend=backend, wish=wish, is_silent=is_silent, **options
        )
    )
    return answers


def comparison_table(answers: list[Answer]) -> Table:
    """The runs side by side."""
    table = Table(title="the same prompt", show_lines=True)
    table.add_column("")
    for answer in answers:
        table.add_column(f"{answer.kind} cache", ratio=1)
    table.add_row("answer", *[Text(answer.text) for answer in answers])  # text may hold what looks like markup
    table.add_row("cache bytes", *[f"{answer.cache_bytes:,}" for answer in answers])
    dense = next((answer.cache_bytes for answer in answers if answer.report is None), None)
    if dense is not None:
        against = ["-" if answer.report is None else size_against(answer.cache_bytes, dense) for answer in answers]
        table.add_row("against dense", *against)
    table.add_row("prefill, s", *[f"{answer.prefill_seconds:.2f}" for answer in answers])
    table.add_row("decode, tokens/s", *[_rate(answer) for answer in answers])
    return table


def size_against(measured: int, dense: int) -> str:
    """How a cache compares with the dense one, in words: "4.2x smaller", "1.6x larger" or "as large"."""
    if measured == dense:
        return "as large"
    larger, smaller = max(measured, dense), min(measured, dense)
    return f"{larger / smaller:.1f}x {'smaller' if measured < dense else 'larger'}" if smaller else "-"


def report_lines(report: dict[str, Any]) -> str:
    """A report in a few lines for people."""
    windows = [layer for layer in report["layers"] if layer["kind"] == "window"]
    full = len(report["layers"]) - len(windows)
    kept = sorted({max(layer["stored"]) for layer in windows}) if windows else []
    kept_text = f"{kept[0]:,}" if len(kept) == 1 else f"{kept[0]:,} to {kept[-1]:,}" if kept else "-"
    return "\n".join(
        [
            f"cache   {report['cache_bytes']:,} bytes measured at {report['columns_seen']:,} tokens, dense "
            f"{report['dense_bytes']:,} ({size_against(report['cache_bytes'], report['dense_bytes'])})",
            f"layers  {full} full, {len(windows)} window with {kept_text} of {max(report['tokens_seen']):,} tokens "
            "per KV head",
            f"evicted {report['evicted_at_prompt']:,} tokens at the prompt's end, "
            f"{report['evicted_while_decoding']:,} while decoding (summed over layers)",
        ]
    )


def _rate(answer: Answer) -> str:
    rate = answer.decode_tokens_per_second
    return "-" if rate is None else f"{rate:.1f}"
