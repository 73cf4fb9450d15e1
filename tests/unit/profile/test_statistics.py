"""The parts of a profile against what a few lines of plain tensors say."""

import json

import pytest
import torch

from hf_sparsekv import SparseKVConfig
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.profile import Profile, prompts_of, recall_texts
from hf_sparsekv.profile.activations import ActivationStats, _largest_of_cells
from hf_sparsekv.profile.attention import AttentionStats
from hf_sparsekv.profile.measure import ladder_of

CONFIG = SparseKVConfig()


def test_peaks_and_massive_entries_are_found_by_token_and_channel():
    hidden = torch.full((6, 8), 0.1)
    hidden[2, 5], hidden[4, 1] = -500.0, 90.0
    stats = ActivationStats()
    stats.add(torch.full((6, 8), 0.3))
    stats.add(hidden)
    assert stats.median_magnitude == pytest.approx(0.2)
    assert stats.num_massive == 1  # 90 is 900 times the median, but not above 100
    first, second = stats.peaks[:2]
    assert (first.text, first.token, first.channel, first.magnitude) == (1, 2, 5, 500.0)
    assert (second.token, second.channel) == (4, 1)


def test_a_surface_keeps_the_largest_of_each_cell():
    values = torch.arange(15.0).view(5, 3)
    assert _largest_of_cells(values, 2, 2).tolist() == [[4.0, 5.0], [10.0, 11.0], [13.0, 14.0]]


def test_masses_locality_and_entropy_of_rows():
    weights = torch.tensor([[0.5, 0.1, 0.2, 0.1, 0.1, 0.0], [0.25, 0.05, 0.4, 0.1, 0.1, 0.1]])[None, None]
    stats = AttentionStats(1, (1, 2, 4), prompt_length=4, num_sinks=1, window=2)
    stats.add(4, weights[:, :, :1])
    stats.add(5, weights[:, :, 1:])
    entropy, sink, local = stats.simple(0)
    assert sink == pytest.approx((0.5 + 0.25) / 2)
    assert local == pytest.approx((0.1 + 0.1 + 0.1 + 0.1) / 2)
    assert entropy == pytest.approx(float(torch.special.entr(weights).sum()) / 2)
    assert stats.best_mass(0) == pytest.approx(((0.6 + 0.6) / 2, (0.8 + 0.85) / 2, 1.0))


def test_a_ladder_climbs_from_what_is_protected_to_less_than_the_prompt():
    ladder = ladder_of(None, 1024, CONFIG)
    assert ladder[0] == 36
    assert ladder[-1] < 1024
    assert list(ladder) == sorted(set(ladder))
    assert ladder_of(None, 37, CONFIG) == (36,)
    assert ladder_of(None, 100_000, CONFIG)[0] == 2000
    assert ladder_of([0.5, 100, 64], 128, CONFIG) == (64, 100)


@pytest.mark.parametrize(
    ("budgets", "length", "message"),
    [
        (None, 36, "a prompt of 36 tokens has nothing to evict"),
        ([35], 100, "budgets are tokens from 36 .* to 99 .* got 35"),
        ([100], 100, "got 100"),
        ([0.1], 100, "got 0.1"),
        ([1.5], 100, "got 1.5"),
        ([True], 100, "got True"),
        ([], 100, "budgets is empty"),
    ],
)
def test_budgets_that_measure_nothing_are_refused(budgets, length, message):
    with pytest.raises(ConfigError, match=message):
        ladder_of(budgets, length, CONFIG)


def test_texts_are_cut_into_pieces_that_do_not_overlap():
    ids = torch.arange(100)[None]
    options = {"tokenizer": None, "vocab_size": 100}
    pieces = prompts_of(ids, length=30, max_texts=8, **options)
    assert [piece[0].item() for piece in pieces] == [0, 35, 70]
    assert pieces.shape == (3, 30)
    assert prompts_of(ids, length=None, max_texts=8, **options).shape == (1, 100)
    assert prompts_of(ids, length=100, max_texts=2, **options).shape == (1, 100)
    assert prompts_of(ids, length=30, max_texts=2, **options)[:, 0].tolist() == [0, 70]


def test_recall_texts_recite_a_stretch_of_their_prompt():
    texts = torch.arange(200).view(2, 100)
    recited = recall_texts(texts, num_held_out=10, lead=5)
    assert recited.shape == texts.shape
    for row, text, start in zip(recited, texts, (18, 52), strict=True):  # room for 70 places
        assert row[:85].tolist() == text[:85].tolist()
        assert row[85:].tolist() == text[start : start + 15].tolist()
    with pytest.raises(InputError, match=r"a prompt of 90 tokens cannot hold 41 \+ 10 tokens"):
        recall_texts(texts, num_held_out=10, lead=41)
    assert recall_texts(texts, num_held_out=10, lead=40).shape == texts.shape


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "no text to measure"),
        ("words", "text needs a tokenizer"),
        (["", "b"], "something in it"),
        ([1, 2], "must be a str"),
        (torch.zeros(1, 8, dtype=torch.long), "has 8 tokens, 9 are needed"),
        (torch.full((1, 20), 300), r"token ids must be in \[0, 256\)"),
        (torch.zeros(20, dtype=torch.long), "input_ids must be a tensor"),
    ],
)
def test_what_cannot_be_measured_is_refused(inputs, message):
    with pytest.raises(InputError, match=message):
        prompts_of(inputs, tokenizer=None, vocab_size=256, length=9, max_texts=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "format is 9, this release reads 1"),
        ({"layers": []}, "0 layers, its model 4"),
        ({"budgets": [80, 40, 160, 320]}, "budgets must ascend"),
        ({"budgets": [40, 80]}, "lacks points for 2 budgets"),
        ({"colour": 1}, "it has an unknown 'colour'"),
        ({"layers": 3}, "not iterable"),
    ],
)
def test_a_file_that_holds_no_profile_is_refused(change, message, profile_of):
    profile = profile_of([(0.9, 0.5, 0.2, 0.1)] * 4)
    values = profile.to_dict()
    assert Profile.from_json(json.dumps(values)) == profile
    with pytest.raises(ConfigError, match=message):
        Profile.from_json(json.dumps({**values, **change}))
