"""Decode modes over long texts: token by token is one dense pass, where nothing is evicted."""

import pytest
import torch

import hf_sparsekv as skv
from evals.decode_modes import (
    ANSWERS,
    DECODED_TEXT,
    DENSE,
    IN_PROMPT,
    WHILE_DECODING,
    configs_of,
    decode,
    main,
    rows_of,
    told_while_decoding,
)
from evals.tasks.samples import AGNOSTIC, EXACT, NLL, Sample
from hf_sparsekv.errors import InputError

DECODED = 40


@pytest.fixture
def model(registered, tiny_llama):
    return tiny_llama(num_layers=3, attn_implementation="sparsekv")


def sample(length, answer, scorer=NLL, **facts):
    ids = torch.randint(3, 256, (length + answer,), generator=torch.Generator().manual_seed(length)).tolist()
    return Sample(
        task="made",
        mode=AGNOSTIC,
        seed=1,
        budget_tokens=length + answer,
        document=tuple(ids[: length - 7]),
        question=tuple(ids[length - 7 : length]),
        continuations=(tuple(ids[length:]),),
        scorer=scorer,
        facts=facts,
    )


def in_one_pass(model, one):
    """NLL of the answer, and of the decoded tokens before it."""
    text, answer = one.document + one.question, one.continuations[0]
    ids = torch.tensor(text + answer)
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    nll = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    end = len(text) - 1
    return float(nll[end:].mean()), float(nll[end - DECODED : end].mean())


def test_dense_and_modes_that_evict_nothing_say_what_one_pass_says(model):
    samples = [sample(90, 6), sample(101, 9), sample(64, 1)]
    expected = [in_one_pass(model, one) for one in samples]
    for name, config in configs_of(3, [200], [0.0, 0.5], {}).items():
        found = decode(model, config, samples, DECODED)
        pairs = list(zip(found.values, found.text_nll, strict=True))
        torch.testing.assert_close(torch.tensor(pairs), torch.tensor(expected), msg=name)


def test_small_budgets_change_what_follows_and_take_the_bytes_of_their_mode(model):
    samples = [sample(90, 6), sample(101, 9)]
    options = {"num_sink_tokens": 2, "num_recent_tokens": 8, "observation_window": 8}
    configs = configs_of(3, [24], [0.0, 0.5], options)
    found = {name: decode(model, config, samples, DECODED) for name, config in configs.items()}
    assert all(found[name].values != found[DENSE].values for name in configs if name != DENSE)
    sizes = {name: one.cache_bytes for name, one in found.items()}
    assert sizes["replace_lowest 0-24"] == sizes["replace_lowest 0.5-24"] == sizes["ring-24"]
    assert sizes["ring-24"] < sizes["grow-24"] < sizes[DENSE]
    rows = rows_of(samples, found, configs, DECODED)
    assert [(row["measure"], row["config"]) for row in rows] == [
        (measure, name) for measure in (ANSWERS, DECODED_TEXT) for name in configs
    ]
    assert all(row["num_samples"] == 2 and "nll_difference" in row for row in rows)
    assert [row["prompt_share"] for row in rows[: len(configs)]] == [None, 0.0, 0.5, None, None]


def test_where_a_fact_was_told_is_known(model):
    early, late = sample(100, 3, EXACT, depth=0.2), sample(100, 3, EXACT, depth=0.9)
    assert [told_while_decoding(one, DECODED) for one in (early, late)] == [False, True]
    configs = {DENSE: skv.SparseKVConfig(num_full_layers=3)}
    rows = rows_of([early, late], {DENSE: decode(model, configs[DENSE], [early, late], DECODED)}, configs, DECODED)
    assert [row["measure"] for row in rows] == [IN_PROMPT, WHILE_DECODING, DECODED_TEXT]
    assert ["accuracy" in row for row in rows] == [True, True, False]


def test_samples_without_a_prompt_are_refused(model, tmp_path, capsys):
    with pytest.raises(InputError, match="--decoded 40 of 40 tokens leaves no prompt"):
        decode(model, skv.SparseKVConfig(), [sample(40, 2)], DECODED)
    assert main(["--json", str(tmp_path / "no" / "such.json")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
