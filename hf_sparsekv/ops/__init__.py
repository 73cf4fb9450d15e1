"""The only door to compiled code: every tensor operation of the package, callable by name.

What each op computes is defined, with shapes, in `hf_sparsekv.ops.reference`. The functions here go through
`torch.ops.hf_sparsekv`, so that the implementation for the tensors' device is used: a compiled kernel where one is
registered, the PyTorch definition elsewhere. This room knows neither caches nor models.
"""

import torch

from hf_sparsekv.ops import library as _library

_namespace = getattr(torch.ops, _library.NAMESPACE)

attention = _namespace.attention
attention_varlen = _namespace.attention_varlen
window_lse = _namespace.window_lse
window_score = _namespace.window_score
key_anchor = _namespace.key_anchor
pool_scores = _namespace.pool_scores
select = _namespace.select
compact = _namespace.compact
decode_attention = _namespace.decode_attention
write_slots = _namespace.write_slots
find_victim = _namespace.find_victim
decode_step = _namespace.decode_step

__all__ = [
    "attention",
    "attention_varlen",
    "compact",
    "decode_attention",
    "decode_step",
    "find_victim",
    "key_anchor",
    "pool_scores",
    "select",
    "window_lse",
    "window_score",
    "write_slots",
]
