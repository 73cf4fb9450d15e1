"""The definition of every op, in plain PyTorch.

Compiled kernels are compared with these functions; on a machine without kernels these functions are what runs.
All arithmetic is fp32, whatever the dtype of the inputs, and no function touches a slot, key or row that its
`lengths` say is not there: unused storage may hold NaN.

Shape legend, used in every module of this room:
    B request (a row of the batch), H query head, K KV head, G query heads per KV head (H = K * G), D head dim,
    T query row, A observation-window row, N key, C slot, P page, S slots per page, M pages in a block table.

Keys and values come as a *pool* [P, K, S, D] with an optional int32 `block_table` [B, M]: slot j of request b is
`pool[block_table[b, j // S], :, j % S]`. Without a table, P == B and the pool is simply [B, K, S, D]. Table entries
past `ceil(lengths[b] / S)` are never followed.
"""

from hf_sparsekv.ops.reference.attention import attention, attention_varlen
from hf_sparsekv.ops.reference.decode import (
    attend_slots,
    decode_attention,
    decode_step,
    find_victim,
    write_packed,
    write_slots,
)
from hf_sparsekv.ops.reference.diversity import kv_diversity
from hf_sparsekv.ops.reference.score import key_anchor, window_lse, window_score
from hf_sparsekv.ops.reference.select import compact, compact_into, pool_scores, select

__all__ = [
    "attend_slots",
    "attention",
    "attention_varlen",
    "compact",
    "compact_into",
    "decode_attention",
    "decode_step",
    "find_victim",
    "key_anchor",
    "kv_diversity",
    "pool_scores",
    "select",
    "window_lse",
    "window_score",
    "write_packed",
    "write_slots",
]
