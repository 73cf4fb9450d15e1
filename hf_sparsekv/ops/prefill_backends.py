"""How each prefill backend is called, and how its LSE becomes ours.

Every call takes `Packed` and returns the output [T, H, D] with the LSE as the backend left it; `natural_lse` makes
that fp32 [H, T], natural logarithm. Backends that hide the LSE return None in its place. Those that take one request
at a time are called through `one_by_one`.

Shapes: B request, T query row, N key, H query head, K KV head, D head dim.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_sparsekv.ops import reference
from hf_sparsekv.ops.prefill_probes import FLASH_ATTN_2, FLASH_ATTN_3, FLASHINFER, attention_function

LONG_PROMPT = 4096
"""Up to here cuDNN sees lengths that are multiples of SHORT_STEP, beyond it of LONG_STEP: it plans each one anew."""
SHORT_STEP, LONG_STEP = 512, 1024
ALIGNED_BYTES = 16
"""The flash kernels load this much at once, from every row."""
LSE_KEYWORDS = ("return_attn_probs", "return_softmax_lse")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Requests packed one after the other; as in `reference.attention_varlen`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_rows: int
    max_keys: int
    scale: float
    is_causal: bool

    @property
    def num_requests(self) -> int:
        """B."""
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def may_have_empty_rows(self) -> bool:
        """Whether some row may see no key, as far as it is known without waiting for the device."""
        return not (_is_one(self) and self.k.shape[0] >= (self.q.shape[0] if self.is_causal else 1))


Call = Callable[[Packed], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LseForm:
    """How a backend leaves the LSE; all of ours leave fp32, to base e."""

    layout: str
    """Dimensions in order, "1" for one of size 1: "HT", "1HT" or "1HT1"."""
    empty: float = -math.inf
    """What stands for a row that sees no key. FlashAttention-2 writes +inf."""


def natural_lse(lse: Tensor, form: LseForm, num_heads: int, num_rows: int, *, has_empty_rows: bool = True) -> Tensor:
    """Any backend's LSE as ours.

    Args:
        lse: what the backend returned.
        form: how that backend leaves it.
        num_heads, num_rows: H and T.
        has_empty_rows: whether some row may see no key.
    Returns:
        fp32 [H, T], natural logarithm, -inf where a row sees nothing; changed in place.
    """
    expected = [{"H": num_heads, "T": num_rows, "1": 1}[name] for name in form.layout]
    assert lse.dtype == torch.float32, f"an LSE in {lse.dtype}, expected float32"
    assert list(lse.shape) == expected, f"an LSE of shape {list(lse.shape)}, expected {expected} ({form.layout})"
    natural = lse.reshape(num_heads, num_rows)
    if not has_empty_rows or form.empty == -math.inf:
        return natural
    return natural.masked_fill_(natural == form.empty, -math.inf)


def flash_attn_3(packed: Packed) -> tuple[Tensor, Tensor]:
    """FlashAttention-3, module `flash_attn_interface`."""
    function = attention_function(FLASH_ATTN_3)
    return _flash_attn(function, packed, packed.max_rows, _lse_keywords(function))


def flash_attn_2(packed: Packed) -> tuple[Tensor, Tensor]:
    """FlashAttention-2, package `flash-attn`."""
    return _flash_attn(attention_function(FLASH_ATTN_2), packed, _unswapped_rows(packed), {"return_attn_probs": True})


def torch_flash(packed: Packed) -> tuple[Tensor, Tensor]:
    """The FlashAttention-2 that torch carries."""
    q, k, v = (_aligned(t) for t in (packed.q, packed.k, packed.v))
    bounds = packed.cu_seqlens_q, packed.cu_seqlens_k
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *bounds, _unswapped_rows(packed), packed.max_keys, 0.0, packed.is_causal, False, scale=packed.scale
    )
    return output, lse


def flashinfer(packed: Packed) -> tuple[Tensor, None]:
    """FlashInfer on one request, by its kernels for any GPU from Ampere on, which it calls fa2.

    Its causal mask is aligned bottom-right. Packed requests are not handed to its ragged wrapper, whose plan would read
    the bounds on the host once a call just as well. Its LSE is not asked for: FlashInfer sums probabilities that it has
    rounded to the tensors' dtype, so that 0.6.8.post1 on an H200 is off by up to 8.6e-4 in bf16 and 1e-4 in fp16.
    """
    q, k, v = (_aligned(t) for t in (packed.q, packed.k, packed.v))
    function = attention_function(FLASHINFER)
    output: Tensor = function(q, k, v, causal=packed.is_causal, sm_scale=packed.scale, backend="fa2")
    return output, None


def sdpa(packed: Packed) -> tuple[Tensor, None]:
    """torch's `scaled_dot_product_attention` on one request, in its own dtype; it hides the LSE."""
    num_rows, num_keys = packed.max_rows, packed.max_keys
    q, k, v = (t.transpose(0, 1)[None] for t in (packed.q, packed.k, packed.v))
    is_whole = num_rows == num_keys  # torch aligns its own causal mask top-left
    mask = None if is_whole or num_rows == 1 or not packed.is_causal else _visible(num_rows, num_keys, q.device)
    output = scaled_dot_product_attention(
        q, k, v, mask, is_causal=packed.is_causal and is_whole, scale=packed.scale, enable_gqa=True
    )
    return output[0].transpose(0, 1), None


def eager(packed: Packed) -> tuple[Tensor, None]:
    """Matrix products in the tensors' dtype, softmax in fp32, on one request: what models do without a fused kernel."""
    group = packed.q.shape[1] // packed.k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (packed.q, packed.k, packed.v))
    k, v = (t.repeat_interleave(group, dim=0) for t in (k, v))
    logits = q @ k.mT * packed.scale
    if packed.is_causal:
        logits.masked_fill_(~_visible(packed.max_rows, packed.max_keys, q.device), -math.inf)
    weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(0, 1), None


def definition(packed: Packed) -> tuple[Tensor, Tensor]:
    """`reference.attention_varlen`."""
    bounds = packed.cu_seqlens_q, packed.cu_seqlens_k, packed.max_rows, packed.max_keys
    return reference.attention_varlen(packed.q, packed.k, packed.v, *bounds, packed.scale, packed.is_causal)


def one_by_one(call: Call, form: LseForm | None, packed: Packed) -> tuple[Tensor, Tensor]:
    """A call that takes a single request, made for each of them.

    The call sees requests with at least one row and one key and, when causal, no more rows than keys; the definition
    takes the others. Reads the bounds on the host, unless there is one request that fills the tensors.

    Args:
        call: the backend's.
        form: how it leaves the LSE; None = it hides it.
        packed: the requests.
    Returns:
        output [T, H, D], LSE fp32 [H, T], NaN where it is hidden; of one request, as the call left them.
    """
    num_heads, num_rows, num_keys = packed.q.shape[1], packed.q.shape[0], packed.k.shape[0]
    if _is_one(packed) and num_keys >= num_rows > 0 and form is not None:
        output, left = call(packed)
        return output, _found(left, form, num_heads, num_rows)
    output = torch.empty_like(packed.q)
    lse = packed.q.new_full((num_heads, num_rows), math.nan, dtype=torch.float32)
    for rows, keys in _requests(packed):
        num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start
        if num_rows == 0:
            continue
        q, k, v = packed.q[rows], packed.k[keys], packed.v[keys]
        if num_keys == 0 or (packed.is_causal and num_rows > num_keys):
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            out, row_lse = reference.attention(q, k, v, packed.scale, None, packed.is_causal)
            output[rows] = out[0].transpose(0, 1)
            lse[:, rows] = math.nan if form is None else row_lse[0]
            continue
        output[rows], left = call(replace(packed, q=q, k=k, v=v, max_rows=num_rows, max_keys=num_keys))
        if form is not None:
            lse[:, rows] = _found(left, form, num_heads, num_rows)
    return output, lse


def _found(lse: Tensor | None, form: LseForm, num_heads: int, num_rows: int) -> Tensor:
    assert lse is not None, "a backend that has an LSE returned none"
    return natural_lse(lse, form, num_heads, num_rows)


def cudnn(packed: Packed) -> tuple[Tensor, Tensor]:
    """cuDNN on one whole prompt, causal, padded at its end to a length that it has a plan for.

    Under the causal mask no row sees the padding, whose values only need to be finite. Strides are part of a plan, so
    all inputs come in one layout.
    """
    num_rows = packed.max_rows
    assert packed.is_causal and num_rows == packed.max_keys, "cuDNN is given whole prompts only"
    length = bucket_length(num_rows)
    q, k, v = (_padded(t, length).transpose(0, 1)[None] for t in (packed.q, packed.k, packed.v))
    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=packed.scale
    )
    return output[0, :, :num_rows].transpose(0, 1), lse[:, :, :num_rows]


def bucket_length(num_rows: int) -> int:
    """The length that cuDNN is given for a prompt of `num_rows` tokens: at most 24 of them up to 20,480 tokens."""
    step = SHORT_STEP if num_rows <= LONG_PROMPT else LONG_STEP
    return -(-num_rows // step) * step


def torch_cpu(packed: Packed) -> tuple[Tensor, Tensor]:
    """torch's flash attention for the CPU on one request, in fp32.

    bf16 and fp16 are widened first, as the definition does: torch's own half-precision path takes about as long and
    approximates its exponentials, which the LSE shows. torch aligns the causal mask top-left, so the keys before the
    first row are attended apart and the two parts merged by their LSE.
    """
    dtype = packed.q.dtype
    q, k, v = (t.float().transpose(0, 1)[None] for t in (packed.q, packed.k, packed.v))
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))  # otherwise it reads the wrong numbers
    attend = functools.partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, scale=packed.scale)
    num_past = packed.max_keys - packed.max_rows
    if not packed.is_causal or packed.max_rows == 1:
        output, lse = attend(q, k, v, 0.0, False)
    elif num_past == 0:
        output, lse = attend(q, k, v, 0.0, True)
    else:
        past, past_lse = attend(q, k[:, :, :num_past], v[:, :, :num_past], 0.0, False)
        own, own_lse = attend(q, k[:, :, num_past:], v[:, :, num_past:], 0.0, True)
        lse = torch.logaddexp(past_lse, own_lse)
        output = past * (past_lse - lse).exp()[..., None] + own * (own_lse - lse).exp()[..., None]
    return output[0].transpose(0, 1).to(dtype), lse


def _flash_attn(function: Any, packed: Packed, max_rows: int, keywords: dict[str, bool]) -> tuple[Tensor, Tensor]:
    q, k, v = (_aligned(t) for t in (packed.q, packed.k, packed.v))
    bounds = packed.cu_seqlens_q, packed.cu_seqlens_k, max_rows, packed.max_keys
    output, lse, *_ = function(
        q, k, v, *bounds, softmax_scale=packed.scale, causal=packed.is_causal, **keywords
    )  # older FlashAttention-3 has no keyword for the LSE and always returns it
    return output, lse


@functools.cache
def _lse_keywords(function: Any) -> dict[str, bool]:
    """The keyword by which this build of FlashAttention-3 returns the LSE, if it needs one."""
    parameters = inspect.signature(function).parameters
    return {name: True for name in LSE_KEYWORDS if name in parameters}


def _visible(num_rows: int, num_keys: int, device: torch.device) -> Tensor:
    """bool [T, N]: the causal mask, aligned bottom-right."""
    return torch.ones(num_rows, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_rows)


def _unswapped_rows(packed: Packed) -> int:
    """The longest request's rows, as FlashAttention-2 may be told.

    Told 1, it folds the query heads of a KV head into rows, which needs one row from every request: with an empty
    request among them it would read the wrong rows.
    """
    has_empty_request = packed.q.shape[0] != packed.num_requests
    return 2 if packed.max_rows == 1 and has_empty_request else packed.max_rows


def _aligned(t: Tensor) -> Tensor:
    """The tensor, copied if some row of it does not begin where the flash kernels can load."""
    size = t.element_size()
    starts = [t.data_ptr(), *(stride * size for stride in t.stride()[:-1])]
    if t.stride(-1) == 1 and all(start % ALIGNED_BYTES == 0 for start in starts):
        return t
    return t.clone(memory_format=torch.contiguous_format)  # not `contiguous`: what begins off a boundary may be that


def _padded(t: Tensor, length: int) -> Tensor:
    """A contiguous [length, heads, D] that begins with the tensor and ends with zeros."""
    num_rows = t.shape[0]
    if num_rows == length:
        return t.contiguous()
    padded = t.new_empty(length, *t.shape[1:])
    padded[:num_rows] = t
    padded[num_rows:] = 0
    return padded


def _is_one(packed: Packed) -> bool:
    """Whether there is one request, which fills the tensors."""
    lengths = packed.q.shape[0], packed.k.shape[0]
    return packed.num_requests == 1 and (packed.max_rows, packed.max_keys) == lengths


def _requests(packed: Packed) -> Iterator[tuple[slice, slice]]:
    """Rows and keys of each request."""
    if _is_one(packed):
        yield slice(0, packed.q.shape[0]), slice(0, packed.k.shape[0])  # known without waiting for the GPU
        return
    rows, keys = torch.stack([packed.cu_seqlens_q, packed.cu_seqlens_k]).tolist()
    for b in range(packed.num_requests):
        yield slice(rows[b], rows[b + 1]), slice(keys[b], keys[b + 1])
