"""RoPE in rotate-half layout, for scorers that turn keys or queries; defined beside the ops that undo it."""

from hf_sparsekv.ops.reference.rotation import rotate

__all__ = ["rotate"]
