"""The only door to compiled code: every tensor operation of the package, callable by name.

What each op computes is defined, with shapes, in `hf_sparsekv.ops.reference`. The functions here go through
`torch.ops.hf_sparsekv`, so that the implementation for the tensors' device is used: a compiled kernel where one is
registered, the PyTorch definition elsewhere. This room knows neither caches nor models.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_sparsekv.ops import library as _library

_namespace = getattr(torch.ops, _library.NAMESPACE)

attention: Callable[..., tuple[Tensor, Tensor]] = _namespace.attention
attention_varlen: Callable[..., tuple[Tensor, Tensor]] = _namespace.attention_varlen
window_lse: Callable[..., Tensor] = _namespace.window_lse
window_score: Callable[..., tuple[Tensor, Tensor]] = _namespace.window_score
key_anchor: Callable[..., Tensor] = _namespace.key_anchor
kv_diversity: Callable[..., Tensor] = _namespace.kv_diversity
pool_scores: Callable[..., Tensor] = _namespace.pool_scores
select: Callable[..., tuple[Tensor, Tensor, Tensor]] = _namespace.select
compact: Callable[..., tuple[Tensor, Tensor]] = _namespace.compact
compact_into: Callable[..., None] = _namespace.compact_into
decode_attention: Callable[..., tuple[Tensor, Tensor, Tensor]] = _namespace.decode_attention
attend_slots: Callable[..., Tensor] = _namespace.attend_slots
write_packed: Callable[..., None] = _namespace.write_packed
write_slots: Callable[..., None] = _namespace.write_slots
find_victim: Callable[..., Tensor] = _namespace.find_victim
decode_step: Callable[..., Tensor] = _namespace.decode_step

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
