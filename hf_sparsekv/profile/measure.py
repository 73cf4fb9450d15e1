"""The measurement: read a prompt, select, read on, and compare.

Shapes: C budget, K KV head, N token of the prompt, T token after it, V vocabulary. One text at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError, InputError, shown
from hf_sparsekv.hf.models import check_model, model_shape, rope_inv_freq, text_config
from hf_sparsekv.hf.observe import AttentionCall, DenseRun, observed
from hf_sparsekv.plan import ModelShape
from hf_sparsekv.profile.activations import ActivationStats
from hf_sparsekv.profile.attention import AttentionStats, weight_chunks
from hf_sparsekv.profile.output_error import OutputErrors, cut_attention
from hf_sparsekv.profile.result import HeadProfile, LayerProfile, Profile
from hf_sparsekv.profile.selection import kept_masks, scores_at
from hf_sparsekv.profile.texts import check_length, prompts_of
from hf_sparsekv.scorers.checks import check_int
from hf_sparsekv.version import __version__

NUM_RUNGS = 8
SMALLEST_SHARE = 0.02
"""Of the prompt: the first budget of a ladder, unless sinks and recent tokens need more."""
DEFAULT_HELD_OUT = 64


def measure(
    model: Any,
    inputs: Any,
    *,
    config: SparseKVConfig | None = None,
    budgets: Sequence[int | float] | None = None,
    tokenizer: Any = None,
    prompt_length: int | None = None,
    num_held_out: int = DEFAULT_HELD_OUT,
    max_texts: int = 4,
    local_window: int | None = None,
    with_logits: bool = False,
    has_progress: bool = True,
) -> Profile:
    """A model's layers and heads, measured on texts of the user's own.

    Args:
        model: a causal language model, on any device; nobody else may use it meanwhile.
        inputs: a text, several texts, or token ids int64 [B, N].
        config: its scorer selects, with its sinks, recent tokens and pooling; defaults if None.
        budgets: tokens of the prompt that are kept (int) or shares of it (float); None = a ladder of 8.
        tokenizer: turns text into ids; not needed for ids.
        prompt_length: tokens before the selection; None = all but `num_held_out`. Texts are cut to pieces of this
            length and what is held out.
        num_held_out: tokens that follow, on whose rows everything is measured.
        max_texts: pieces that are measured at most.
        local_window: of `local_mass`; None = the recent tokens of the configuration.
        with_logits: also cut one layer at a time and compare the logits: layers x budgets more passes over what is
            held out.
        has_progress: draw a bar on stderr.
    Raises:
        ModelError: no model, or one with a feature that a sparse cache does not support.
        InputError: no text, or one that is too short, or longer than the model was made for.
        ConfigError: budgets or another number out of range, or a model whose numbers overflow.
        ScoreError: the scorer returned something that cannot rank tokens.
    """
    check_model(model)
    config = SparseKVConfig() if config is None else config
    _check_config(config)
    shape = model_shape(model.config)
    texts_BN = _texts(model, inputs, tokenizer, prompt_length, num_held_out, max_texts)
    length = texts_BN.shape[1] - num_held_out
    window = config.num_recent_tokens if local_window is None else local_window
    check_int("local_window", window, at_least=1)
    ladder = ladder_of(budgets, length, config)
    measurement = _Measurement(model, shape, config, ladder, length, window, with_logits)
    with _bar(len(texts_BN) * measurement.num_passes, has_progress) as measurement.advance:
        for ids_N in texts_BN:
            measurement.add(ids_N[None].to(model.device))
    return Profile(
        shape=shape,
        config=config,
        prompt_length=length,
        num_held_out=num_held_out,
        num_texts=len(texts_BN),
        local_window=window,
        budgets=ladder,
        layers=tuple(measurement.layer(i) for i in range(shape.num_layers)),
        facts=_facts(model),
    )


def _check_config(config: object) -> None:
    if not isinstance(config, SparseKVConfig):
        raise ConfigError(f"config must be a SparseKVConfig: got {shown(config)}")


def _facts(model: Any) -> dict[str, str]:
    versions = {"hf_sparsekv": __version__, "torch": torch.__version__}
    return versions | {"dtype": str(model.dtype).removeprefix("torch.")}


def _texts(
    model: Any, inputs: Any, tokenizer: Any, prompt_length: int | None, num_held_out: int, max_texts: int
) -> Tensor:
    check_int("num_held_out", num_held_out, at_least=1)
    check_int("max_texts", max_texts, at_least=1)
    if prompt_length is not None:
        check_int("prompt_length", prompt_length, at_least=1)
    texts_BN = prompts_of(
        inputs,
        tokenizer=tokenizer,
        vocab_size=text_config(model.config).vocab_size,
        length=None if prompt_length is None else prompt_length + num_held_out,
        max_texts=max_texts,
    )
    check_length(model.config, texts_BN.shape[1])
    if texts_BN.shape[1] <= num_held_out:
        raise InputError(
            f"the texts have {texts_BN.shape[1]} tokens and num_held_out={num_held_out} of them follow the prompt: "
            "nothing is left to be one; give longer texts, or hold fewer out"
        )
    return texts_BN


def ladder_of(budgets: Sequence[int | float] | None, length: int, config: SparseKVConfig) -> tuple[int, ...]:
    """Tokens of the prompt that each budget keeps, ascending.

    Raises:
        ConfigError: a budget below what the configuration protects, or not below the prompt.
    """
    floor = config.num_protected
    if length <= floor:
        raise ConfigError(
            f"a prompt of {length} tokens has nothing to evict: num_sink_tokens + num_recent_tokens = {floor}; measure "
            "longer prompts"
        )
    if budgets is None:
        first = max(floor, round(SMALLEST_SHARE * length))
        steps = [first * (length / first) ** (i / NUM_RUNGS) for i in range(NUM_RUNGS)]
        return tuple(sorted({min(round(step), length - 1) for step in steps}))
    if isinstance(budgets, str) or not isinstance(budgets, Sequence):
        raise ConfigError(f"budgets must be a list of tokens or fractions, or None: got {shown(budgets)}")
    found = set()
    for budget in budgets:
        tokens = round(budget * length) if isinstance(budget, float) and 0 < budget < 1 else budget
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not floor <= tokens < length:
            raise ConfigError(
                f"budgets are tokens from {floor} (sinks and recent tokens) to {length - 1} (the prompt has one more), "
                f"or fractions that come to so many: got {shown(budget)}"
            )
        found.add(tokens)
    if not found:
        raise ConfigError("budgets is empty: give at least one, or None")
    return tuple(sorted(found))


@dataclass
class _LayerSums:
    activations: ActivationStats
    attention: AttentionStats
    errors: OutputErrors
    kl: list[float]
    """Per budget, summed over texts."""


class _Measurement:
    """Sums over texts, layer by layer."""

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        config: SparseKVConfig,
        budgets: tuple[int, ...],
        prompt_length: int,
        window: int,
        with_logits: bool,
    ) -> None:
        self._model, self._shape, self._config, self._budgets = model, shape, config, budgets
        self._prompt_length, self._with_logits = prompt_length, with_logits
        inv_freq = rope_inv_freq(model.config, shape.head_dim)
        self._inv_freq = None if inv_freq is None else inv_freq.to(model.device)
        self._num_texts = 0
        num_sinks, heads = config.num_sink_tokens, shape.num_kv_heads
        self._layers = [
            _LayerSums(
                ActivationStats(),
                AttentionStats(heads, budgets, prompt_length, num_sinks, window),
                OutputErrors(len(budgets), heads),
                [0.0] * len(budgets),
            )
            for _ in range(shape.num_layers)
        ]
        self.advance = lambda: None

    @property
    def num_passes(self) -> int:
        """Layer passes of one text, for a progress bar."""
        return self._shape.num_layers * (2 + len(self._budgets) * self._with_logits)

    def add(self, ids: Tensor) -> None:
        """Take the next text, int64 [1, N + T]."""
        prompt, rest = ids[:, : self._prompt_length], ids[:, self._prompt_length :]
        run = DenseRun(self._model)
        kept = self._read_prompt(run, prompt)
        logits = self._read_rest(run, rest, kept)
        if self._with_logits:
            self._cut_one_by_one(run, rest, kept, logits.float().log_softmax(dim=-1))
        self._num_texts += 1

    def layer(self, layer_idx: int) -> LayerProfile:
        """What was found of a layer."""
        sums = self._layers[layer_idx]
        heads = []
        for head in range(self._shape.num_kv_heads):
            entropy, sink, local = sums.attention.simple(head)
            heads.append(
                HeadProfile(
                    entropy=entropy,
                    sink_mass=sink,
                    local_mass=local,
                    best_mass=sums.attention.best_mass(head),
                    kept_mass=sums.errors.kept_mass(head),
                    output_error=sums.errors.of_head(head),
                )
            )
        return LayerProfile(
            layer_idx=layer_idx,
            median_magnitude=sums.activations.median_magnitude,
            peaks=sums.activations.peaks,
            num_massive=sums.activations.num_massive,
            output_error=sums.errors.of_layer,
            residual_error=sums.errors.in_residual,
            logit_kl=tuple(kl / self._num_texts for kl in sums.kl) if self._with_logits else None,
            heads=tuple(heads),
        )

    def _read_prompt(self, run: DenseRun, prompt: Tensor) -> list[Tensor]:
        """Per layer bool [C, K, N]: what each budget keeps."""
        kept: list[Tensor] = []

        def select(call: AttentionCall) -> None:
            kept.append(kept_masks(scores_at(call, self._config, self._inv_freq), self._budgets, self._config))
            self.advance()

        def look(layer_idx: int, hidden: Tensor) -> None:
            self._layers[layer_idx].activations.add(hidden[0])

        with observed(self._model, select, look):
            run.read(prompt)
        return kept

    def _read_rest(self, run: DenseRun, rest: Tensor, kept: list[Tensor]) -> Tensor:
        """Logits [1, T, V] of the dense model; masses and errors are added up on the way."""
        stream: list[Tensor] = []

        def look(layer_idx: int, hidden: Tensor) -> None:
            stream[:] = [hidden[0]]

        def compare(call: AttentionCall) -> None:
            sums = self._layers[call.layer_idx]
            for rows, weights in weight_chunks(call):
                sums.attention.add(self._prompt_length + rows.start, weights)
                sums.errors.add(call, weights, rows, kept[call.layer_idx], stream[0])
            self.advance()

        with observed(self._model, compare, look):
            return run.continue_with(rest)

    def _cut_one_by_one(self, run: DenseRun, rest: Tensor, kept: list[Tensor], dense: Tensor) -> None:
        for layer_idx, masks in enumerate(kept):
            for c, mask in enumerate(masks):

                def cut(call: AttentionCall, cut_idx: int = layer_idx, mask: Tensor = mask) -> Tensor | None:
                    return cut_attention(call, mask) if call.layer_idx == cut_idx else None

                with observed(self._model, cut):
                    log_q = run.continue_with(rest).float().log_softmax(dim=-1)
                kl = (dense.exp() * (dense - log_q)).sum(dim=-1).mean()
                self._layers[layer_idx].kl[c] += float(kl)
                self.advance()


@contextmanager
def _bar(total: int, is_drawn: bool) -> Iterator[Any]:
    """A progress bar over so many steps; yields what takes one."""
    console = Console(stderr=True)
    is_seen = console.is_terminal or console.is_jupyter
    with Progress(console=console, transient=True, disable=not (is_drawn and is_seen)) as progress:
        task = progress.add_task("measuring layers", total=total)
        yield lambda: progress.advance(task)
