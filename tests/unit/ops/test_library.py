"""Every op is a lawful torch operator: schema, fake, dispatch, and whole graphs under `torch.compile`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_sparsekv import ops
from hf_sparsekv.ops import library, reference
from hf_sparsekv.testing.compare import assert_bitwise_equal

SCALE = 0.5


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(kv_heads: int = 2, keys: int = 6) -> Tensor:
    return torch.randn(2, kv_heads, keys, 4)


def table() -> Tensor:
    return torch.tensor([[1, 0], [2, -1]], dtype=torch.int32)


def pages() -> Tensor:
    return torch.randn(4, 2, 3, 4)


def step_arguments(pool: Callable[[], Tensor], is_ring: bool = False) -> tuple[Any, ...]:
    new = torch.randn(2, 4, 4), torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    positions = torch.arange(6, dtype=torch.int32).expand(2, 2, 6).contiguous()
    state = positions, torch.rand(2, 2, 6), int32(6, 3), int32(6, 3), torch.tensor([[2, 3], [1, 1]]), int32(6, 3)
    return (*new, pool(), pool(), *state, SCALE, 0.9, 0.1, 1, 1, is_ring)


def cases() -> dict[str, list[tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]]]:
    """Per op: (name, positional arguments, keyword arguments)."""
    q, lengths = torch.randn(2, 4, 3, 4), int32(6, 3)
    lse, scores = torch.zeros(2, 4, 3), torch.rand(2, 2, 6)
    mask, bounds = torch.ones(2, 3, 6, dtype=torch.bool), int32(0, 4, 9)
    packed = torch.randn(9, 4, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 4)
    window = {"row_reduction": "max", "group_reduction": "max", "block_table": table()}
    factors = {"value_norm": torch.rand(2, 2, 6), "anchor": torch.randn(2, 2, 4)}
    second = {"secondary": torch.rand(2, 2, 6), "secondary_pooling": "avg", "secondary_width": 3, "share": 0.5}
    index = torch.tensor([[[0, 2], [1, -1]]] * 2)
    positions = torch.arange(6, dtype=torch.int32).expand(2, 2, 6)
    return {
        "attention": [
            ("causal", lambda: (q, rows(), rows(), SCALE, None, True), {}),
            ("mask", lambda: (q, rows(), rows(), SCALE, mask, False), {}),
        ],
        "attention_varlen": [("", lambda: (*packed, bounds, bounds, 5, 5, SCALE, True), {})],
        "window_lse": [
            ("rows", lambda: (q, rows(), lengths, SCALE, 6), {}),
            ("pages", lambda: (q, pages(), lengths, SCALE, 6), {"block_table": table()}),
        ],
        "window_score": [
            ("plain", lambda: (q, rows(), lse, lengths, SCALE, 6), {}),
            ("all", lambda: (q, pages(), lse, lengths, SCALE, 6), window | factors),
            (
                "positional",
                lambda: (q, pages(), lse, lengths, SCALE, 6, "mean", "mean", table(), None, factors["anchor"]),
                {},
            ),
        ],
        "key_anchor": [
            ("rows", lambda: (rows(), lengths, 6), {}),
            ("pages", lambda: (pages(), lengths, 6), {"block_table": table()}),
        ],
        "kv_diversity": [
            ("plain", lambda: (rows(), rows(), lengths), {}),
            ("turned", lambda: (rows(), rows(), lengths, torch.tensor([1.0, 0.1]), positions.long(), 64), {}),
        ],
        "pool_scores": [
            (kind, lambda kind=kind: (scores, lengths, kind, 3), {}) for kind in ("avg", "forward", "none")
        ],
        "select": [
            ("one-list", lambda: (scores, lengths, int32(3, 3), 4, 1, 1, "avg", 3), {}),
            ("two-lists", lambda: (scores, lengths, int32(4, 3), 9, 1, 1, "none", 1), second),
        ],
        "compact": [
            ("rows", lambda: (rows(), rows(), index), {}),
            ("pages", lambda: (pages(), pages(), index), {"block_table": table()}),
        ],
        "decode_attention": [
            ("rows", lambda: (q[:, :, 0], rows(), rows(), lengths, SCALE, 6), {}),
            ("pages", lambda: (q[:, :, 0], pages(), pages(), lengths, SCALE, 6), {"block_table": table()}),
        ],
        "find_victim": [("", lambda: (scores, positions, lengths, int32(6, 6), int32(6, 3), 1, 1), {})],
        "decode_step": [
            ("rows", lambda: step_arguments(rows), {}),
            ("ring", lambda: step_arguments(rows, True), {}),
            ("pages", lambda: step_arguments(pages), {"block_table": table()}),
        ],
    }


def paged_cases() -> dict[str, list[tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]]]:
    """Those of ops that write to a pool or only read one."""
    q, lengths, packed = torch.randn(2, 4, 4), int32(6, 3), (torch.randn(9, 2, 4), torch.randn(9, 2, 4))
    index, new, slots = torch.tensor([[[0, 2], [1, -1]]] * 2), torch.randn(2, 2, 4), torch.tensor([[0, 2], [-1, 1]])
    return {
        "attend_slots": [
            ("rows", lambda: (q, rows(), rows(), lengths, SCALE, 6), {}),
            ("pages", lambda: (q, pages(), pages(), lengths, SCALE, 6), {"block_table": table()}),
        ],
        "compact_into": [("", lambda: (pages(), pages(), rows(), rows(), index, int32(1, 2)[:, None]), {})],
        "write_packed": [("", lambda: (pages(), pages(), *packed, torch.arange(9) - 1), {})],
        "write_slots": [
            ("rows", lambda: (rows(), rows(), new, new, slots), {}),
            ("pages", lambda: (pages(), pages(), new, new, slots), {"block_table": table()}),
        ],
    }


CASES = [
    pytest.param(name, arguments, keywords, id=f"{name}-{case}" if case else name)
    for name, samples in (cases() | paged_cases()).items()
    for case, arguments, keywords in samples
]


def test_every_op_has_a_schema_a_definition_a_door_and_a_case_here():
    assert set(library.SCHEMAS) == set(reference.__all__) == set(ops.__all__) == set(cases() | paged_cases())


@pytest.mark.parametrize(("name", "arguments", "keywords"), CASES)
def test_an_op_passes_opcheck(name, arguments, keywords):
    result = torch.library.opcheck(getattr(torch.ops.hf_sparsekv, name).default, arguments(), keywords)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("name", "arguments", "keywords"), CASES)
def test_an_op_is_its_definition(name, arguments, keywords):
    """The door adds nothing: same results, same changes in place, bit for bit."""
    given = arguments()
    own, definitions = ([t.clone() if isinstance(t, Tensor) else t for t in given] for _ in range(2))
    renamed = {key: keywords[key] for key in keywords}
    for short, with_shape in (
        ("value_norm", "value_norm_BKN"),
        ("anchor", "anchor_BKD"),
        ("secondary", "secondary_BKN"),
    ):
        if short in renamed:
            renamed[with_shape] = renamed.pop(short)
    actual = getattr(ops, name)(*own, **keywords)
    expected = getattr(reference, name)(*definitions, **renamed)
    pairs = [(own, definitions)]
    if actual is not None:
        pairs.append(((actual,), (expected,)) if isinstance(actual, Tensor) else (actual, expected))
    for some, others in pairs:
        for one, other in zip(some, others, strict=True):
            if isinstance(one, Tensor):
                assert_bitwise_equal(one, other)


def test_a_decode_step_compiles_into_one_graph():
    """With the module's own tensors changed in place, as a compiled model layer does it."""
    torch._dynamo.reset()
    given = step_arguments(rows)
    eager, compiled = ([t.clone() if isinstance(t, Tensor) else t for t in given] for _ in range(2))

    def layer(*arguments: Any) -> Tensor:
        return ops.decode_step(*arguments).mul(2.0)

    expected = layer(*eager)
    actual = torch.compile(layer, fullgraph=True, backend="aot_eager")(*compiled)
    assert_bitwise_equal(actual, expected)
    for own, other in zip(compiled, eager, strict=True):
        if isinstance(own, Tensor):
            assert_bitwise_equal(own, other)
    assert not torch.equal(compiled[6], given[6])  # scores did change


def test_scoring_compiles_into_one_graph_for_every_length():
    torch._dynamo.reset()

    def layer(q: Tensor, k: Tensor, lengths: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
        scale = 0.5  # a global float would be traced as an input, in a second frame
        lse = ops.window_lse(q, k, lengths, scale, k.shape[2])
        return ops.window_score(q, k, lse, lengths, scale, k.shape[2], "max", anchor=anchor)

    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=frames, dynamic=True)
    for num_keys in (7, 9, 40):
        arguments = torch.randn(2, 4, 3, 4), rows(keys=num_keys), int32(num_keys, 3), torch.randn(2, 2, 4)
        for actual, expected in zip(compiled(*arguments), layer(*arguments), strict=True):
            assert_bitwise_equal(actual, expected)
    assert frames.frame_count == 1
