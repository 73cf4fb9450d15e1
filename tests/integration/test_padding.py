"""A request never notices the batch it is in: padding is not scored, not kept, and moves nothing.

Guards against pads that take places of the budget or shift positions, and against a batch that only works when all its
requests are about equally long.
"""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.scorers import scorer_names
from hf_sparsekv.testing.compare import assert_same_up_to_rounding

pytestmark = pytest.mark.usefixtures("registered")

METHOD = {"num_full_layers": 1, "num_recent_tokens": 8, "observation_window": 8}
LENGTHS = (70, 41, 20, 3)
"""Over the budget twice, within it, and shorter than the observation window."""
STEPS = 12


def feed(model, cache, ids, columns):
    """Logits of the last columns `ids`, positions counted over the tokens of each row."""
    positions = (columns.long().cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(
            input_ids=ids,
            attention_mask=columns.long(),
            position_ids=positions,
            use_cache=True,
            **{CACHE_KEYWORD: cache},
        ).logits


def run(model, config, ids, columns, answer):
    """Prompt and then given answer tokens; logits of the prompt's and of the answer's columns, and the cache."""
    cache = skv.SparseKVCache(model.config, config)
    prompt = feed(model, cache, ids, columns)
    steps = []
    for step in range(answer.shape[1]):
        columns = torch.cat([columns, torch.ones(len(ids), 1, dtype=torch.bool)], dim=1)
        steps.append(feed(model, cache, answer[:, step : step + 1], columns))
    return prompt, torch.cat(steps, dim=1), cache


def kept(cache, row):
    return [layer["positions"][row] for layer in cache.report(positions=True)["layers"]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("scorer", "budget"), [*((name, 24) for name in scorer_names()), ("snapkv", 0.5)])
def test_each_row_keeps_and_answers_what_it_does_alone(tiny_llama, side, scorer, budget):
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    config = skv.SparseKVConfig(**METHOD, scorer=scorer, budget=budget)
    longest = max(LENGTHS)
    ids, answer = torch.randint(3, 256, (4, longest)), torch.randint(3, 256, (4, STEPS))
    columns = torch.arange(longest)[None] < torch.tensor(LENGTHS)[:, None]
    if side == "left":
        columns = columns.flip(1)
    prompt, steps, cache = run(model, config, ids, columns, answer)
    for row, length in enumerate(LENGTHS):
        own = ids[row : row + 1, columns[row]]
        everything = torch.ones_like(own, dtype=torch.bool)
        alone_prompt, alone_steps, alone = run(model, config, own, everything, answer[row : row + 1])
        assert_same_up_to_rounding(prompt[row : row + 1, columns[row]], alone_prompt)
        assert_same_up_to_rounding(steps[row : row + 1], alone_steps)
        assert kept(cache, row) == kept(alone, 0)
        assert cache.report()["tokens_seen"][row] == length + STEPS
