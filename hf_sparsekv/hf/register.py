"""Make "sparsekv" an attention implementation of transformers, by name and on request only."""

from transformers import AttentionInterface, AttentionMaskInterface

from hf_sparsekv.hf.attention import sparsekv_attention
from hf_sparsekv.hf.compat import check_version
from hf_sparsekv.hf.masks import sparsekv_mask

ATTENTION_NAME = "sparsekv"


def register() -> None:
    """Register attention and mask function as "sparsekv"; calling it again changes nothing.

    After this, `from_pretrained(..., attn_implementation="sparsekv")` and `model.set_attn_implementation("sparsekv")`
    work. A forward pass without our cache then behaves as sdpa.

    Raises:
        ImportError: transformers is too old.
    """
    check_version()
    AttentionInterface.register(ATTENTION_NAME, sparsekv_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sparsekv_mask)


def unregister() -> None:
    """Undo `register`.

    Models that still name "sparsekv" as their attention stop working, until `register` or
    `model.set_attn_implementation("sdpa")`.
    """
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(ATTENTION_NAME, None)


def is_registered() -> bool:
    """Whether "sparsekv" names an attention function: ours, or one that stands for it."""
    return ATTENTION_NAME in AttentionInterface._global_mapping
