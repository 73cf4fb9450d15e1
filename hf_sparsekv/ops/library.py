"""torch.library schemas, fakes and CPU/CUDA implementations of every op, in the namespace `hf_sparsekv`.

Callers use the functions of `hf_sparsekv.ops`. Registering the schemas here means that a compiled kernel takes an op
over by registering itself for its device; no caller changes. Importing this module defines operators in our own
namespace and nothing else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_sparsekv.ops import reference
from hf_sparsekv.ops.debug import guarded
from hf_sparsekv.ops.kernels import KERNELS
from hf_sparsekv.ops.prefill import PREFILL
from hf_sparsekv.ops.reference.diversity import DIVERSITY_BYTES

NAMESPACE = "hf_sparsekv"

_library = torch.library.Library(NAMESPACE, "DEF")  # noqa: TOR901 (its lifetime is the process's)

SCHEMAS = {
    "attention": "(Tensor q, Tensor k, Tensor v, float scale, Tensor? mask, bool is_causal) -> (Tensor, Tensor)",
    "attention_varlen": (
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,"
        " SymInt max_seqlen_k, float scale, bool is_causal) -> (Tensor, Tensor)"
    ),
    "window_lse": (
        "(Tensor q, Tensor k_pool, Tensor lengths, float scale, SymInt max_length, Tensor? block_table=None) -> Tensor"
    ),
    "window_score": (
        "(Tensor q, Tensor k_pool, Tensor lse, Tensor lengths, float scale, SymInt max_length,"
        ' str row_reduction="mean", str group_reduction="mean", Tensor? block_table=None, Tensor? value_norm=None,'
        " Tensor? anchor=None) -> (Tensor, Tensor)"
    ),
    "key_anchor": "(Tensor k_pool, Tensor lengths, SymInt max_length, Tensor? block_table=None) -> Tensor",
    "kv_diversity": (
        "(Tensor keys, Tensor values, Tensor lengths, Tensor? inv_freq=None, Tensor? positions=None,"
        f" int temporary_bytes={DIVERSITY_BYTES}) -> Tensor"
    ),
    "pool_scores": "(Tensor scores, Tensor lengths, str pooling, int width) -> Tensor",
    "select": (
        "(Tensor scores, Tensor lengths, Tensor budgets, SymInt capacity, int num_sinks, int num_recent, str pooling,"
        ' int pool_width, Tensor? secondary=None, str secondary_pooling="none", int secondary_width=1,'
        " float share=1.0) -> (Tensor, Tensor, Tensor)"
    ),
    "compact": "(Tensor k_pool, Tensor v_pool, Tensor index, Tensor? block_table=None) -> (Tensor, Tensor)",
    "decode_attention": (
        "(Tensor q, Tensor k_pool, Tensor v_pool, Tensor lengths, float scale, SymInt max_length,"
        " Tensor? block_table=None) -> (Tensor, Tensor, Tensor)"
    ),
    "attend_slots": (
        "(Tensor q, Tensor k_pool, Tensor v_pool, Tensor lengths, float scale, SymInt max_length,"
        " Tensor? block_table=None) -> Tensor"
    ),
    "compact_into": (
        "(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor k, Tensor v, Tensor index, Tensor block_table) -> ()"
    ),
    "write_packed": "(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor k, Tensor v, Tensor slots) -> ()",
    "write_slots": (
        "(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor k, Tensor v, Tensor slots, Tensor? block_table=None) -> ()"
    ),
    "find_victim": (
        "(Tensor scores, Tensor positions, Tensor lengths, Tensor budgets, Tensor next_position, int num_sinks,"
        " int num_recent) -> Tensor"
    ),
    "decode_step": (
        "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor(c!) positions, Tensor(d!) scores,"
        " Tensor(e!) lengths, Tensor budgets, Tensor(f!) victims, Tensor(g!) next_position, float scale, float decay,"
        " float gain, int num_sinks, int num_recent, bool score_by_position, Tensor? block_table=None) -> Tensor"
    ),
}


def _fake_attention(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_attention_varlen(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_window_lse(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_window_score(
    q: Tensor,
    k_pool: Tensor,
    lse: Tensor,
    lengths: Tensor,
    scale: float,
    max_length: int,
    *_: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], k_pool.shape[1], max_length)
    has_anchor = (len(_) > 4 and _[4] is not None) or options.get("anchor") is not None
    score = q.new_empty(shape, dtype=torch.float32)
    return score, q.new_empty(shape if has_anchor else (0,), dtype=torch.float32)


def _fake_key_anchor(k_pool: Tensor, lengths: Tensor, *_: Any, **__: Any) -> Tensor:
    return k_pool.new_empty((lengths.shape[0], k_pool.shape[1], k_pool.shape[3]), dtype=torch.float32)


def _fake_kv_diversity(keys: Tensor, *_: Any, **__: Any) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=torch.float32)


def _fake_pool_scores(scores: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _fake_select(
    scores: Tensor, lengths: Tensor, budgets: Tensor, capacity: int, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (scores.shape[0], scores.shape[1], capacity)
    return (
        scores.new_empty(shape, dtype=torch.int64),
        scores.new_empty(shape[:1], dtype=torch.int32),
        scores.new_empty(shape, dtype=torch.float32),
    )


def _fake_compact(k_pool: Tensor, v_pool: Tensor, index: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    shape = (*index.shape, k_pool.shape[-1])
    return k_pool.new_empty(shape), v_pool.new_empty(shape)


def _fake_decode_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    lengths: Tensor,
    scale: float,
    max_length: int,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    probs = q.new_empty((q.shape[0], k_pool.shape[1], max_length), dtype=torch.float32)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, probs


def _fake_in_place(*_: Any, **__: Any) -> None:
    return None


def _fake_find_victim(scores: Tensor, *_: Any) -> Tensor:
    return scores.new_empty(scores.shape[:2], dtype=torch.int64)


def _fake_output(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


_FAKES: dict[str, Callable[..., Any]] = {
    "attention": _fake_attention,
    "attention_varlen": _fake_attention_varlen,
    "window_lse": _fake_window_lse,
    "window_score": _fake_window_score,
    "key_anchor": _fake_key_anchor,
    "kv_diversity": _fake_kv_diversity,
    "pool_scores": _fake_pool_scores,
    "select": _fake_select,
    "compact": _fake_compact,
    "decode_attention": _fake_decode_attention,
    "attend_slots": _fake_output,
    "compact_into": _fake_in_place,
    "write_packed": _fake_in_place,
    "write_slots": _fake_in_place,
    "find_victim": _fake_find_victim,
    "decode_step": _fake_output,
}


def _register_all() -> None:
    for name, schema in SCHEMAS.items():
        _library.define(name + schema)
        definition = PREFILL.get(name, getattr(reference, name))
        _library.impl(name, definition, "CPU")
        _library.impl(name, guarded(name, KERNELS.get(name, definition)), "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _FAKES[name], lib=_library)


_register_all()
