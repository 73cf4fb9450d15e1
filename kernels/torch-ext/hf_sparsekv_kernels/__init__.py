"""The kernels of hf_sparsekv as kernel-builder packages them: `ops` holds every op, with fakes for torch.compile.

Every op writes into tensors that the caller allocates; what each one computes is defined in plain PyTorch in
`hf_sparsekv.ops.reference`.
"""

import torch

from ._ops import add_op_namespace_prefix, ops  # noqa: TID252 (each build has a package name of its own)

__all__ = ["ops"]

_IN_PLACE_OPS = (
    "compact",
    "decode_attention",
    "decode_step",
    "key_anchor",
    "kv_diversity",
    "lse_tail",
    "score",
    "select",
    "write_kv",
    "write_kv_packed",
)


def _fake(*_: object, **__: object) -> None:
    """An op that only writes into its arguments returns nothing, so its fake does nothing."""


for _name in _IN_PLACE_OPS:
    torch.library.register_fake(add_op_namespace_prefix(_name))(_fake)
