"""The random numbers of sampling against their definition in plain Python, uniformity, and the softmax."""

import math
from collections import Counter
from hashlib import blake2b

import pytest
import torch
from torch import Tensor

from hf_sparsekv.engine.sampler import SamplerFeatures, SamplerState, gumbel_noise
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.testing.compare import assert_close_fp32


def noise_in_python(seed: int, output_index: int, token: int) -> float:
    """The definition, with Python's integers and fp64."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x21F0AAAD % 2**32
        x = (x ^ (x >> 15)) * 0xD35A2D97 % 2**32
        return x ^ (x >> 15)

    digest = blake2b(seed.to_bytes(8, "little"), digest_size=8).digest()
    keys = [int.from_bytes(digest[at : at + 4], "little") for at in (0, 4)]
    factor, mask = (mix((key + output_index * 0x61C88647) % 2**32) for key in keys)
    bits = mix((token * (factor % 2**31 | 1) ^ mask) % 2**32)
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24)))


def keys_of(seeds: range) -> Tensor:
    digests = [blake2b(seed.to_bytes(8, "little"), digest_size=8).digest() for seed in seeds]
    return torch.tensor([[int.from_bytes(d[:4], "little"), int.from_bytes(d[4:], "little")] for d in digests])


def assert_chi_square(counts: Tensor, expected: Tensor) -> None:
    """Pearson's statistic stays below its 99.99 % quantile (Wilson and Hilferty's approximation)."""
    degrees = counts.numel() - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} of {degrees} degrees, at most {limit:.1f}"


def test_noise_is_the_definition_for_every_size_of_seed_index_and_token():
    seeds, indices = (0, 1, 12345, 2**63 - 1), (0, 1, 500, 2**31 - 1)
    tokens = torch.tensor([0, 1, 2, 999, 128_255, 262_143])
    keys = torch.cat([keys_of(range(seed, seed + 1)) for seed in seeds])

    for index in indices:
        actual = gumbel_noise(keys, torch.full((4,), index), tokens)
        expected = torch.tensor([[noise_in_python(s, index, t) for t in tokens.tolist()] for s in seeds])
        assert_close_fp32(actual, expected)


@pytest.mark.parametrize("along", ["tokens", "outputs", "seeds"])
def test_noise_is_uniform_along_every_axis(along):
    num, bins = 200_000, 256
    if along == "tokens":
        noise = gumbel_noise(keys_of(range(1)), torch.tensor([3]), torch.arange(num))
    elif along == "outputs":
        noise = gumbel_noise(keys_of(range(1)).expand(num, 2), torch.arange(num), torch.tensor([17]))
    else:
        noise = gumbel_noise(keys_of(range(num)), torch.full((num,), 3), torch.tensor([17]))

    uniform = (-(-noise.double().flatten()).exp()).exp()

    assert_chi_square(torch.histc(uniform, bins, 0, 1), torch.full((bins,), num / bins))


@pytest.mark.parametrize("other", ["next token", "next output", "next seed"])
def test_neighbours_are_independent(other):
    num, bins = 1000, 16
    keys, outputs, vocab = keys_of(range(201)), torch.zeros(200, dtype=torch.int64), torch.arange(num)
    first = gumbel_noise(keys[:200], outputs, vocab)
    second = {
        "next token": lambda: gumbel_noise(keys[:200], outputs, vocab + 1),
        "next output": lambda: gumbel_noise(keys[:200], outputs + 1, vocab),
        "next seed": lambda: gumbel_noise(keys[1:], outputs, vocab),
    }[other]()

    cells = [((-(-noise.double()).exp()).exp() * bins).long().clamp_max(bins - 1) for noise in (first, second)]
    pairs = (cells[0] * bins + cells[1]).flatten()

    assert_chi_square(torch.bincount(pairs, minlength=bins**2).double(), torch.full((bins**2,), 200 * num / bins**2))


@pytest.mark.parametrize("draws", ["of many requests", "of one request"])
def test_draws_follow_the_softmax(draws):
    num, vocab = 10_000, 12
    params = SamplingParams(do_sample=True, temperature=0.8)
    logits = torch.randn(vocab) * 1.5
    state = SamplerState(num, vocab, "cpu")
    for row in range(num):
        if draws == "of many requests":
            state.set_row(row, params, params.request_seed(f"request {row}"), [])
        else:
            state.set_row(row, params, 5, [], num_outputs=row)
    state.flush()

    ids = state.sample(logits.expand(num, vocab), slice(0, num), SamplerFeatures.of([params])).ids

    assert_chi_square(torch.bincount(ids, minlength=vocab).double(), num * (logits.double() / 0.8).softmax(-1))


def test_requests_of_a_batch_differ_from_one_another():
    params, num = SamplingParams(do_sample=True), 400
    state = SamplerState(num, 20, "cpu")
    for row in range(num):
        state.set_row(row, params, params.request_seed(str(row)), [])
    state.flush()

    ids = state.sample(torch.zeros(num, 20), slice(0, num), SamplerFeatures.of([params])).ids

    assert max(Counter(ids.tolist()).values()) < 45  # 20 on average


@pytest.mark.gpu
def test_noise_is_the_same_on_a_gpu_up_to_the_logarithms():
    keys, outputs, vocab = keys_of(range(64)), torch.arange(64), torch.arange(5000)

    on_gpu = gumbel_noise(keys.cuda(), outputs.cuda(), vocab.cuda()).cpu()

    assert_close_fp32(on_gpu, gumbel_noise(keys, outputs, vocab))
