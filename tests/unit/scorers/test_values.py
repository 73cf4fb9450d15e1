"""Every scorer against a computation in fp64, key by key, written here without the package's ops."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_sparsekv.errors import ConfigError
from hf_sparsekv.scorers import ScoreInputs, Scorer, TwoLists, build_scorer
from hf_sparsekv.scorers.random import position_noise

SHAPES = [
    pytest.param({}, id="plain"),
    pytest.param({"batch": 1, "heads": 9, "kv_heads": 3, "rows": 5, "keys": 13}, id="nine-heads-three-kv"),
    pytest.param({"batch": 1, "heads": 2, "kv_heads": 2, "rows": 1, "keys": 1}, id="one-key"),
    pytest.param({"rows": 9, "keys": 4}, id="more-rows-than-keys"),
    pytest.param({"rows": 7, "keys": 7}, id="whole-prompt"),
]


def weights(inputs: ScoreInputs, *, noise: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """fp64 [B, H, A', N], causal softmax of the rows that exist; noise [K, N] is added to the logits."""
    batch, heads, num_rows, _ = inputs.queries.shape
    _, kv_heads, num_keys, _ = inputs.keys.shape
    result = torch.zeros(batch, heads, min(num_rows, num_keys), num_keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            for out_row in range(result.shape[2]):
                row = num_rows - result.shape[2] + out_row
                visible = num_keys - num_rows + row + 1
                logits = inputs.keys[b, kv, :visible].double() @ inputs.queries[b, h, row].double() * inputs.scale
                if noise is not None:
                    logits = logits + noise[kv, :visible]
                exps = (logits / temperature).exp()
                result[b, h, out_row, :visible] = exps / exps.sum()
    return result


def grouped(per_head: Tensor, kv_heads: int, how: str = "mean") -> Tensor:
    """Mean or maximum over the query heads of each KV head, [B, H, N] -> [B, K, N]."""
    stacked = per_head.reshape(per_head.shape[0], kv_heads, -1, per_head.shape[-1])
    return stacked.mean(dim=2) if how == "mean" else stacked.amax(dim=2)


def scores(name: str, inputs: ScoreInputs, **options: object) -> Tensor:
    result = build_scorer(name, options).score(inputs)
    assert isinstance(result, Tensor)
    assert result.dtype == torch.float32
    assert result.shape == inputs.keys.shape[:3]
    return result


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-6)


def relative_norm(values: Tensor) -> Tensor:
    norm = values.double().pow(2).sum(-1).sqrt()
    return norm / norm.mean(dim=-1, keepdim=True)


def negative_cosine(keys: Tensor) -> Tensor:
    unit = keys.double() / keys.double().pow(2).sum(-1, keepdim=True).sqrt()
    anchor = unit.mean(dim=2, keepdim=True)
    return -(unit * anchor).sum(-1) / anchor.pow(2).sum(-1).sqrt()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ["mean", "max"])
@pytest.mark.parametrize("groups", ["mean", "max"])
def test_snapkv_reduces_rows_then_the_group(make_inputs, shape, rows, groups):
    inputs = make_inputs(**shape, row_reduction=rows, group_reduction=groups)
    p = weights(inputs)
    per_head = p.mean(dim=2) if rows == "mean" else p.amax(dim=2)
    expected = grouped(per_head, inputs.keys.shape[1], groups)

    assert_close(scores("snapkv", inputs), expected)
    assert_close(scores("snapkv", inputs, value_norm=True), expected * relative_norm(inputs.values))


@pytest.mark.parametrize("shape", SHAPES)
def test_h2o_sums_over_all_rows_and_adds_what_was_carried(make_inputs, shape):
    inputs = make_inputs(**shape)
    expected = grouped(weights(inputs).sum(dim=2), inputs.keys.shape[1])
    carried = torch.rand(inputs.keys.shape[:3])

    assert_close(scores("h2o", inputs), expected)
    assert_close(scores("h2o", make_inputs(**shape, carried=carried)), expected + carried.double())


@pytest.mark.parametrize("shape", SHAPES)
def test_tova_is_the_last_row(make_inputs, shape):
    inputs = make_inputs(**shape)

    assert_close(scores("tova", inputs), grouped(weights(inputs)[:, :, -1], inputs.keys.shape[1]))


@pytest.mark.parametrize("name", ["snapkv", "tova", "h2o"])
def test_an_lse_from_the_backend_gives_the_same_score(make_inputs, name):
    inputs = make_inputs(rows=5)
    rows = inputs.queries.shape[2]
    keys = inputs.keys.repeat_interleave(2, dim=1)
    logits = inputs.queries @ keys.transpose(-1, -2) * inputs.scale
    hidden = torch.ones(rows, 11, dtype=torch.bool).triu(11 - rows + 1)
    lse = logits.masked_fill(hidden, -math.inf).logsumexp(dim=-1)

    assert_close(scores(name, make_inputs(rows=5, lse=lse)), scores(name, inputs).double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_keyformer_sums_noisy_softmaxes(make_inputs, shape, temperature):
    inputs = make_inputs(**shape)
    kv_heads, num_keys = inputs.keys.shape[1:3]
    uniform = position_noise(5, inputs.layer_idx, kv_heads, num_keys).double()
    noise = -(-uniform.log()).log()
    expected = grouped(weights(inputs, noise=noise, temperature=temperature).sum(dim=2), kv_heads)
    carried = torch.rand(inputs.keys.shape[:3])
    options = {"seed": 5, "temperature": temperature}

    assert_close(scores("keyformer", inputs, **options), expected)
    assert_close(scores("keyformer", make_inputs(**shape, carried=carried), **options), expected + carried.double())


@pytest.mark.parametrize("shape", SHAPES)
def test_keydiff_is_the_negative_cosine_to_the_mean_direction(make_inputs, shape):
    inputs = make_inputs(**shape)

    assert_close(scores("keydiff", inputs), negative_cosine(inputs.keys))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_kv_diversity_sums_standardised_cosines(make_inputs, monkeypatch, shape, has_positions, chunk_bytes):
    monkeypatch.setattr("hf_sparsekv.scorers.base.CHUNK_BYTES", chunk_bytes)
    inv_freq = torch.tensor([1.0, 0.3, 0.07, 0.01])
    inputs = make_inputs(**shape, inv_freq=inv_freq)
    batch, kv_heads, num_keys, dim = inputs.keys.shape
    positions = inputs.key_positions()
    if has_positions:
        positions = torch.stack([torch.randperm(90)[:num_keys] for _ in range(batch * kv_heads)])
        inputs = replace(inputs, positions=positions.view(batch, kv_heads, num_keys), num_seen=90)
        positions = inputs.positions
    plain = torch.zeros(batch, kv_heads, num_keys, dim, dtype=torch.float64)
    for b, k, n in itertools.product(range(batch), range(kv_heads), range(num_keys)):
        plain[b, k, n] = rotate(inputs.keys[b, k, n], -int(positions[b, k, n]), inv_freq)

    parts = [negative_cosine(plain), negative_cosine(inputs.values)]
    expected = sum((part - part.mean(-1, keepdim=True)) / part.std(-1, correction=0, keepdim=True) for part in parts)

    if num_keys > 1:
        torch.testing.assert_close(scores("kv_diversity", inputs).double(), expected, rtol=1e-3, atol=1e-4)
    assert torch.isfinite(scores("kv_diversity", inputs)).all()


def test_kv_diversity_does_without_frequencies(make_inputs):
    inputs = replace(make_inputs(), inv_freq=None)
    still = replace(inputs, inv_freq=torch.zeros(4))

    torch.testing.assert_close(scores("kv_diversity", inputs), scores("kv_diversity", still))


@pytest.mark.parametrize("shape", SHAPES)
def test_streaming_llm_scores_by_position(make_inputs, shape):
    inputs = make_inputs(**shape)
    num_keys = inputs.keys.shape[2]
    positions = torch.arange(num_keys).flip(0).mul(3).expand(inputs.keys.shape[:3])

    assert torch.equal(scores("streaming_llm", inputs)[0, 0], torch.arange(num_keys).float())
    moved = make_inputs(**shape, positions=positions, num_seen=3 * num_keys)
    assert torch.equal(scores("streaming_llm", moved), positions.float())


def rotate(x: Tensor, position: int, inv_freq: Tensor) -> Tensor:
    """RoPE of one vector at one position, as the complex number x[i] + 1j * x[i + D / 2]."""
    first, second = x.double().chunk(2)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(first), position * inv_freq.double())
    return torch.cat([turned.real, turned.imag])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value_norm", [True, False])
def test_expected_attention_is_the_gaussian_formula(make_inputs, shape, value_norm):
    num_future, ahead = 6, 20
    base = make_inputs(**shape)
    batch, kv_heads, num_keys, dim = base.keys.shape
    inputs = make_inputs(**shape, num_seen=num_keys + ahead)
    heads = inputs.queries.shape[1]
    num_rows = min(inputs.queries.shape[2], num_keys)
    turn = torch.stack(
        [
            torch.stack([rotate(e, num_keys + ahead + t, inputs.inv_freq) for e in torch.eye(dim)], dim=1)
            for t in range(num_future)
        ]
    ).mean(dim=0)
    per_head = torch.zeros(batch, heads, num_keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            plain = torch.stack(
                [
                    rotate(inputs.queries[b, h, row - num_rows], ahead + num_keys - num_rows + row, -inputs.inv_freq)
                    for row in range(num_rows)
                ]
            )
            mean = turn @ plain.mean(dim=0)
            covariance = turn @ torch.cov(plain.T, correction=0).reshape(dim, dim) @ turn.T
            for j in range(num_keys):
                key = inputs.keys[b, h // (heads // kv_heads), j].double() * inputs.scale
                per_head[b, h, j] = (mean @ key + key @ covariance @ key / 2).exp()
    expected = grouped(per_head / per_head.sum(-1, keepdim=True), kv_heads)
    expected = expected * inputs.values.double().pow(2).sum(-1).sqrt() if value_norm else expected

    actual = scores("expected_attention", inputs, num_future=num_future, value_norm=value_norm)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-4, atol=1e-6)


def test_expected_attention_says_why_it_needs_frequencies(make_inputs):
    with pytest.raises(ConfigError, match=r"expected_attention.*rotary positions.*choose another scorer"):
        build_scorer("expected_attention", {}).score(make_inputs(inv_freq=None))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_spared", [0, 1, 3])
def test_rkv_subtracts_redundancy_from_importance(make_inputs, shape, num_spared):
    inputs = make_inputs(**shape)
    batch, kv_heads, num_keys, _ = inputs.keys.shape
    importance = grouped(weights(inputs).mean(dim=2), kv_heads)
    redundancy = torch.zeros_like(importance)
    for b in range(batch):
        for k in range(kv_heads):
            unit = torch.nn.functional.normalize(inputs.keys[b, k].double(), dim=-1)
            mean = torch.zeros(num_keys, dtype=torch.float64)
            for i in range(num_keys):
                similar = [float(unit[i] @ unit[j]) if i != j else 0.0 for j in range(num_keys)]
                copies = [j for j in range(num_keys) if similar[j] > 0.1]
                spared = copies[len(copies) - min(num_spared, len(copies)) :]
                for j in range(num_keys):
                    mean[j] += 0.0 if j in spared else similar[j] / num_keys
            redundancy[b, k] = mean.softmax(dim=-1)

    actual = scores("rkv", inputs, weight=0.3, threshold=0.1, num_spared=num_spared)
    assert_close(actual, 0.3 * importance - 0.7 * redundancy)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value_norm", [True, False])
def test_hybrid_gives_both_lists(make_inputs, shape, value_norm):
    inputs = make_inputs(**shape, row_reduction="max")
    expected = grouped(weights(inputs).amax(dim=2), inputs.keys.shape[1])

    result = build_scorer("hybrid", {"value_norm": value_norm, "share": 0.4, "rest_width": 5}).score(inputs)

    assert isinstance(result, TwoLists)
    assert_close(result.primary, expected * relative_norm(inputs.values) if value_norm else expected)
    assert_close(result.secondary, scores("kv_diversity", inputs).double())
    keys = build_scorer("hybrid", {"rest": "keys"}).score(inputs)
    assert isinstance(keys, TwoLists)
    assert_close(keys.secondary, negative_cosine(inputs.keys))
    assert (result.share, result.secondary_pooling, result.secondary_width) == (0.4, "avg", 5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rest_may_go_by_the_newest_row_unpooled(make_inputs, shape):
    inputs = make_inputs(**shape, row_reduction="max")
    result = build_scorer("hybrid", {"share": 0.75, "rest": "newest_row"}).score(inputs)
    assert isinstance(result, TwoLists)
    assert_close(result.secondary, grouped(weights(inputs)[:, :, -1], inputs.keys.shape[1]))
    assert (result.share, result.secondary_pooling, result.secondary_width) == (0.75, "none", 1)
    with pytest.raises(ConfigError, match="rest_width=9 has no effect with rest='newest_row'"):
        build_scorer("hybrid", {"rest": "newest_row", "rest_width": 9})


def test_hybrid_defaults_are_those_of_the_study():
    scorer: Scorer = build_scorer("hybrid", {})

    assert scorer.default_row_reduction == "max"
    assert (scorer.default_pooling.kind, scorer.default_pooling.width) == ("avg", 21)
    assert vars(scorer) == {
        "share": 0.5,
        "value_norm": False,
        "rest": "keys_and_values",
        "rest_width": 7,
    }
