"""The numbers policy: every tolerance of the project, by name. A test names a policy; it cannot pass its own tolerance.

Why not `allclose`: with one of 2,048 stored slots dropped, an absolute tolerance of 1e-2 notices nothing, while the
cosine distance always does. The bounds are relative to what plain PyTorch achieves in the same dtype, so they hold
for every size and scale of input.

Shapes: any; compared tensors have equal shapes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ERROR_FACTOR = 2.0
"""A kernel may be this many times as far from the fp32 reference as PyTorch in the same dtype."""
MAX_COSINE_DISTANCE = 5e-6
MAX_FP32_RELATIVE_ERROR = 1e-5
"""Of fp32 results summed in another order (scores, weights, LSE), relative to the largest entry of a row."""
MAX_LOGITS_RELATIVE_ERROR = 5e-5
"""Of a whole fp32 model's logits when its attention sums in another order, relative to the largest entry."""
MAX_CENSUS_ULP = 4
NUM_REPEATS = 20


def assert_same_specials(actual: Tensor, reference: Tensor) -> None:
    """NaN, +inf and -inf stand in the same places."""
    assert actual.shape == reference.shape, f"shape {tuple(actual.shape)}, expected {tuple(reference.shape)}"
    masks: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
        ("NaN", torch.isnan),
        ("+inf", torch.isposinf),
        ("-inf", torch.isneginf),
    )
    for name, mask in masks:
        wrong = mask(actual) != mask(reference)
        assert not wrong.any(), f"{int(wrong.sum())} entries differ in being {name}, first at {_first(wrong)}"


def assert_close_policy(actual: Tensor, reference: Tensor, same_dtype: Tensor) -> None:
    """The policy for bf16 and fp16 outputs.

    max|actual - reference| <= 2 * max|same_dtype - reference| + 2 * rounding of the reference, the cosine distance
    is at most 5e-6, and NaN and infinities stand in the same places.

    Args:
        actual: what the kernel wrote.
        reference: the fp32 reference.
        same_dtype: plain PyTorch in the kernel's dtype, on the same inputs.
    """
    assert reference.dtype in (torch.float32, torch.float64), f"the reference is {reference.dtype}, not fp32 or fp64"
    assert_same_specials(actual, reference)
    finite = torch.isfinite(reference)
    if not finite.any():
        return
    exact = reference[finite].double()
    rounding = (exact - exact.to(actual.dtype).double()).abs().max().item()
    error = (actual[finite].double() - exact).abs().max().item()
    allowed = ERROR_FACTOR * (same_dtype[finite].double() - exact).abs().max().item() + 2 * rounding
    assert error <= allowed, f"error {error:.3e} exceeds {allowed:.3e} (rounding {rounding:.3e})"
    # The reference rounded to the output's dtype is the best that any kernel can return: its own distance is free.
    distance = cosine_distance(actual[finite], exact)
    floor = cosine_distance(exact.to(actual.dtype), exact)
    assert distance <= MAX_COSINE_DISTANCE + floor, f"cosine distance {distance:.3e} (of rounding alone {floor:.3e})"


def assert_close_fp32(actual: Tensor, reference: Tensor) -> None:
    """The policy for fp32 results that differ from the reference only in the order of sums and in exp2/log2.

    Each row (last dimension) may be off by 1e-5 of its largest entry (at least of 1e-30, so that rows of zeros are
    exact), and the cosine distance is at most 5e-6.
    """
    assert_same_specials(actual, reference)
    finite = torch.isfinite(reference)
    exact = torch.where(finite, reference, 0.0).double()
    error = torch.where(finite, actual.double() - exact, 0.0).abs()
    allowed = MAX_FP32_RELATIVE_ERROR * exact.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
    worst = (error - allowed).max().item() if error.numel() else 0.0
    where = _first(error > allowed)
    assert worst <= 0, f"error exceeds 1e-5 of the row's largest entry by {worst:.3e}, first at {where}"
    if finite.any():
        distance = cosine_distance(actual[finite], reference[finite])
        assert distance <= MAX_COSINE_DISTANCE, f"cosine distance {distance:.3e}"


def assert_same_up_to_rounding(actual: Tensor, reference: Tensor) -> None:
    """The policy for fp32 logits of a whole model whose attention is computed in two ways.

    Args:
        actual, reference: logits [..., V]; one forgotten slot moves the cosine distance far past its bound.
    """
    assert_same_specials(actual, reference)
    error = (actual.double() - reference.double()).abs().max().item()
    allowed = MAX_LOGITS_RELATIVE_ERROR * reference.double().abs().max().item()
    assert error <= allowed, f"error {error:.3e} exceeds {allowed:.3e}"
    distance = cosine_distance(actual, reference)
    assert distance <= MAX_COSINE_DISTANCE, f"cosine distance {distance:.2e} exceeds {MAX_COSINE_DISTANCE:.0e}"


def assert_logits_policy(actual: Tensor, reference: Tensor, same_dtype: Tensor) -> None:
    """The policy for the logits of a whole model in bf16 that is run in two ways.

    Rounding grows from layer to layer, so two runs in one dtype may be far apart: each is compared with fp32. As in
    `assert_close_policy`, max|actual - reference| <= 2 * max|same_dtype - reference| + 2 * rounding of the reference
    to bf16; the cosine distance, too, is at most twice that of `same_dtype`, and 5e-6 more.

    Args:
        actual: logits [..., V] of a bf16 model, of any dtype.
        reference: the same weights in fp32, run plainly on the same tokens.
        same_dtype: the same weights in bf16, run plainly on the same tokens.
    """
    assert_same_specials(actual, reference)
    exact = reference.double()
    rounding = (exact - exact.to(torch.bfloat16).double()).abs().max().item()
    error, plain_error = ((logits.double() - exact).abs().max().item() for logits in (actual, same_dtype))
    allowed = ERROR_FACTOR * plain_error + 2 * rounding
    assert error <= allowed, f"error {error:.3e} exceeds {allowed:.3e}, of a plain run {plain_error:.3e}"
    distance, plain = cosine_distance(actual, exact), cosine_distance(same_dtype, exact)
    allowed = ERROR_FACTOR * plain + MAX_COSINE_DISTANCE
    assert distance <= allowed, f"cosine distance {distance:.3e} exceeds {allowed:.3e}, of a plain run {plain:.3e}"


def assert_census(lse: Tensor, num_keys: Tensor) -> None:
    """With a query of zeros the LSE is the logarithm of the number of keys read: one missing key shows.

    Args:
        lse: fp32, natural log.
        num_keys: keys that each entry should have read, broadcastable.
    """
    expected = num_keys.double().log().expand_as(lse)
    ulp = torch.finfo(torch.float32).eps * expected.abs().clamp_min(1.0)
    off = (lse.double() - expected).abs() / ulp
    off = torch.where((lse == expected.float()), 0.0, off)  # equal infinities
    wrong = off > MAX_CENSUS_ULP
    assert not wrong.any(), f"LSE off by {off.max().item():.1f} ulp, first at {_first(wrong)}"


def assert_bitwise_equal(actual: Tensor, expected: Tensor) -> None:
    """Every bit, NaN payloads included."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    as_bytes = [t.contiguous().view(torch.uint8) for t in (actual, expected)]
    wrong = as_bytes[0] != as_bytes[1]
    assert not wrong.any(), f"{int(wrong.sum())} bytes differ, first at {_first(wrong)}"


def assert_repeatable(launch: Callable[[], Sequence[Tensor]]) -> None:
    """20 launches on the same inputs give the same bits.

    Args:
        launch: runs once from the same state and returns its outputs, freshly allocated.
    """
    first = launch()
    for _ in range(NUM_REPEATS - 1):
        for actual, expected in zip(launch(), first, strict=True):
            assert_bitwise_equal(actual, expected)


def assert_same_selection(index: Tensor, reference_index: Tensor) -> None:
    """Equal kept positions: the policy where no two scores can change places by rounding.

    Args:
        index, reference_index: int64 [..., C], kept positions, ascending, then -1.
    """
    assert index.shape == reference_index.shape, f"shape {tuple(index.shape)}, expected {tuple(reference_index.shape)}"
    wrong = index != reference_index
    assert not wrong.any(), f"{int(wrong.sum())} places differ, first at {_first(wrong)}"


def assert_same_selection_up_to_near_ties(index: Tensor, reference_index: Tensor, scores: Tensor) -> None:
    """As many kept positions, and scores that differ by no more than a sum in another order can make them.

    Args:
        index, reference_index: int64 [..., C], kept positions, ascending and distinct, then -1.
        scores: fp32 [..., N], what both were chosen by.
    """
    kept, reference_kept = index >= 0, reference_index >= 0
    assert torch.equal(kept, reference_kept), (
        f"kept {kept.sum(-1).tolist()}, expected {reference_kept.sum(-1).tolist()}"
    )
    pairs = (index[..., 1:] > index[..., :-1]) | ~kept[..., 1:]
    assert pairs.all(), f"positions do not ascend, first at {_first(~pairs)}"
    values, reference_values = (
        scores.gather(-1, i.clamp_min(0)).masked_fill(i < 0, float("inf")).sort(-1).values
        for i in (index, reference_index)
    )
    assert_close_fp32(values, reference_values)


def cosine_distance(a: Tensor, b: Tensor) -> float:
    """1 - 2 a.b / (a.a + b.b), in fp64 over all entries: 0 for equal tensors, and sensitive to their scale too."""
    x, y = a.double().flatten(), b.double().flatten()
    total = (x @ x + y @ y).item()
    return 0.0 if total == 0 else 1.0 - 2.0 * (x @ y).item() / total


def _first(mask: Tensor) -> list[int]:
    return mask.nonzero()[0].tolist() if mask.any() else []
