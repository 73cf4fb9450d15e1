"""What a mask says of columns that are stored must be what it said when they were stored."""

import copy

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD

pytestmark = pytest.mark.usefixtures("registered")

SMALL = skv.SparseKVConfig(num_full_layers=1, budget=24, num_recent_tokens=8, observation_window=8)
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}


def feed(model, cache, ids, mask=None):
    positions = None if mask is None else (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE_KEYWORD: cache}
        ).logits


def padded_cache(model, *, pads=30, prompt=80, steps=1):
    """A cache of two requests, the first left-padded, that has decoded; and the mask of what it saw."""
    cache, mask = skv.SparseKVCache(model.config, SMALL), torch.ones(2, prompt, dtype=torch.long)
    mask[0, :pads] = 0
    feed(model, cache, torch.randint(3, 256, (2, prompt)), mask)
    for _ in range(steps):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        feed(model, cache, torch.randint(3, 256, (2, 1)), mask)
    return cache, mask


@pytest.mark.parametrize("prompt", [80, 20], ids=["evicted", "fits"])
@pytest.mark.parametrize("num_new", [12, 1])
@pytest.mark.parametrize("change", ["all ones", "a token hidden", "a pad shown", "an answer hidden", "no mask"])
def test_a_mask_that_contradicts_the_cache_is_refused_and_harms_nothing(model, prompt, num_new, change):
    cache, mask = padded_cache(model, pads=prompt - 10, prompt=prompt)
    untouched = copy.deepcopy(cache)
    right = torch.nn.functional.pad(mask, (0, num_new), value=1)
    wrong = right.clone()
    if change == "all ones":
        wrong[:] = 1
    elif change == "a token hidden":
        wrong[1, 3] = 0
    elif change == "a pad shown":
        wrong[0, 3] = 1
    elif change == "an answer hidden":
        wrong[1, prompt] = 0
    ids = torch.randint(3, 256, (2, num_new))
    message = "no attention mask" if change == "no mask" else r"contradicts the cache at column \d+ of request [01]"
    with pytest.raises(skv.InputError, match=message):
        feed(model, cache, ids, None if change == "no mask" else wrong)
    assert torch.equal(feed(model, cache, ids, right), feed(model, untouched, ids, right))


def test_a_mask_that_hides_tokens_of_a_cache_without_padding_is_refused(model):
    cache = skv.SparseKVCache(model.config, SMALL)
    feed(model, cache, torch.randint(3, 256, (1, 80)))
    mask = torch.ones(1, 90, dtype=torch.long)
    mask[0, :5] = 0
    with pytest.raises(skv.InputError, match="column 0 of request 0"):
        feed(model, cache, torch.randint(3, 256, (1, 10)), mask)


def test_our_generate_refuses_the_conversation_without_its_mask(model):
    ids, mask = torch.randint(3, 256, (1, 80)), torch.ones(1, 80, dtype=torch.long)
    mask[0, :30] = 0
    first = skv.generate(model, {"input_ids": ids, "attention_mask": mask}, SMALL, **GREEDY)
    longer = torch.cat([first.sequences, torch.randint(3, 256, (1, 9))], dim=1)
    with pytest.raises(skv.InputError, match="mask of the whole conversation"):
        skv.generate(model, longer, cache=copy.deepcopy(first.cache), **GREEDY)
    whole = torch.nn.functional.pad(mask, (0, longer.shape[1] - 80), value=1)
    second = skv.generate(model, {"input_ids": longer, "attention_mask": whole}, cache=first.cache, **GREEDY)
    assert second.report["tokens_seen"] == [50 + 4 + 9 + 3]


@pytest.mark.parametrize("prompt", [80, 20], ids=["evicted", "fits"])
def test_padding_in_a_decode_step_is_refused_and_harms_nothing(model, prompt):
    cache, mask = padded_cache(model, pads=0, prompt=prompt)
    untouched, ids = copy.deepcopy(cache), torch.randint(3, 256, (2, 1))
    right = torch.nn.functional.pad(mask, (0, 1), value=1)
    wrong = right.clone()
    wrong[1, -1] = 0
    with pytest.raises(skv.CacheError, match="request 1 has padding in a decode step"):
        feed(model, cache, ids, wrong)
    assert cache.report(positions=True) == untouched.report(positions=True)
    assert torch.equal(feed(model, cache, ids, right), feed(model, untouched, ids, right))


def test_beams_and_copies_of_a_padded_batch_keep_their_history(model):
    cache, mask = padded_cache(model)
    cache.batch_repeat_interleave(2)
    feed(model, cache, torch.randint(3, 256, (4, 5)), torch.nn.functional.pad(mask, (0, 5), value=1)[[0, 0, 1, 1]])
    with pytest.raises(skv.InputError, match="column 0 of request 2"):
        feed(model, cache, torch.randint(3, 256, (4, 5)), torch.nn.functional.pad(mask, (0, 10), value=1)[[0, 0, 0, 1]])
