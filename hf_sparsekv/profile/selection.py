"""What a configuration's scorer keeps of a prompt, in every layer of a dense model.

Shapes: L layer, K KV head, N token of the prompt, C budget. One request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.hf.models import model_shape, rope_inv_freq
from hf_sparsekv.hf.observe import AttentionCall, DenseRun, observed
from hf_sparsekv.plan import LayerPlan
from hf_sparsekv.profile.texts import one_text
from hf_sparsekv.scorers import ScoreInputs, TwoLists
from hf_sparsekv.select import check_scores, select_kept


def scores_at(call: AttentionCall, config: SparseKVConfig, inv_freq: Tensor | None) -> Tensor | TwoLists:
    """The scorer's answer fp32 [1, K, N] at the end of a prompt that is read in one piece.

    Raises:
        ScoreError: scores that cannot rank tokens.
    """
    scorer, num_rows = config.scorer_object, call.query.shape[2]
    needed = {"none": 0, "last": config.observation_window, "all": num_rows}[scorer.queries]
    scores = scorer.score(
        ScoreInputs(
            keys=call.key,
            values=call.value,
            queries=call.query[:, :, max(0, num_rows - needed) :],
            scale=call.scale,
            row_reduction=config.rows,
            group_reduction=config.groups,
            num_seen=call.key.shape[2],
            inv_freq=inv_freq,
            layer_idx=call.layer_idx,
        )
    )
    check_scores(scores, tuple(call.key.shape[:3]), call.layer_idx, scorer.name)  # type: ignore[arg-type]
    return scores


def kept_masks(scores: Tensor | TwoLists, budgets: Sequence[int], config: SparseKVConfig) -> Tensor:
    """bool [C, K, N]: what is kept with each budget, at most N tokens."""
    primary = scores.primary if isinstance(scores, TwoLists) else scores
    masks = torch.zeros(len(budgets), *primary.shape[1:], dtype=torch.bool, device=primary.device)
    for mask, budget in zip(masks, budgets, strict=True):
        limit = torch.tensor([budget], dtype=torch.int32, device=primary.device)
        index = select_kept(scores, limit, budget, None, config).index[0]
        mask.scatter_(-1, index, True)  # one request: its budget fills the capacity, no entry is empty
    return masks


@dataclass(frozen=True)
class Selection:
    """One prompt, selected."""

    scores: Tensor
    """fp32 [L, K, N] on the CPU: pooled, as the selection ranks; of two lists the first."""
    kept: Tensor
    """bool [L, K, N] on the CPU: everything in full layers."""


def prompt_selection(model: Any, ids: Tensor, config: SparseKVConfig) -> Selection:
    """Scores and kept tokens of a prompt under a configuration.

    Args:
        model: a causal language model.
        ids: int64 [1, N].
        config: its scorer, budgets and full layers.
    Raises:
        ModelError, InputError: no such model, or not one prompt that it can read.
        ConfigError: the configuration does not fit the model.
    """
    prompt = one_text(model, ids)
    shape, length = model_shape(model.config), prompt.shape[1]
    plan = LayerPlan.build(config, shape)
    inv_freq = rope_inv_freq(model.config, shape.head_dim)
    scores_LKN = torch.zeros(shape.num_layers, shape.num_kv_heads, length)
    kept_LKN = torch.ones(scores_LKN.shape, dtype=torch.bool)

    def look(call: AttentionCall) -> None:
        found = scores_at(call, config, None if inv_freq is None else inv_freq.to(call.key.device))
        primary = found.primary if isinstance(found, TwoLists) else found
        lengths = torch.full((1,), length, dtype=torch.int32, device=primary.device)
        pooled = ops.pool_scores(primary, lengths, config.pool.kind, config.pool.width)
        scores_LKN[call.layer_idx] = pooled[0].cpu()
        budget = plan.layers[call.layer_idx].kept_tokens(length)
        if budget < length:
            kept_LKN[call.layer_idx] = kept_masks(found, [budget], config)[0].cpu()

    with observed(model, on_attention=look):
        DenseRun(model).read(prompt)
    return Selection(scores_LKN, kept_LKN)
