"""What the page on long generations says in words is what its files say."""

import json
from pathlib import Path

import pytest

from evals.decode_modes import DECODED_TEXT, IN_PROMPT, WHILE_DECODING

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "benchmarks" / "long-generations.md").read_text(encoding="utf-8").split())
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
NAMES = ("1k_128", "1k_256", "2.7k_256", "2.7k_512")
DEFAULT, NONE, LARGE = "replace_lowest 0.5", "replace_lowest 0", "replace_lowest 0.75"


def figures(name, measure):
    """Of each configuration, its budget left out: the accuracy, or the difference in nats a token."""
    report = json.loads((ROOT / "evals" / "results" / f"decode_modes_{name}.json").read_text(encoding="utf-8"))
    key = "nll_difference" if measure == DECODED_TEXT else "accuracy"
    rows = [row for row in report["rows"] if row["measure"] == measure]
    return {row["config"].rsplit("-", 1)[0]: row[key]["value"] for row in rows}


def spread(function, digits=3):
    """The least and the most over all files, as the page writes them."""
    found = [function(figures(name, DECODED_TEXT)) for name in NAMES]
    return tuple(f"{value:.{digits}f}".removeprefix("0") for value in (min(found), max(found)))


def test_without_a_share_no_digits_of_the_prompt_are_left():
    assert all(figures(name, IN_PROMPT)[NONE] == 0 for name in NAMES)


def test_the_default_finds_digits_and_predicts_better():
    found = [f"{figures(name, IN_PROMPT)[DEFAULT]:.2f}".removeprefix("0") for name in NAMES]
    assert "{} and {} of the cases after 384 tokens, {} and {} after 2,048".format(*found) in PAGE
    assert f"digits are found in {found[1]} of the cases, without that share in none" in README
    assert "by {} to {} nats a token, in all four tables".format(*spread(lambda row: row[NONE] - row[DEFAULT])) in PAGE


def test_a_larger_share_remembers_more_and_may_cost():
    for name in NAMES:
        assert figures(name, IN_PROMPT)[LARGE] > figures(name, IN_PROMPT)[DEFAULT]
    costs = [figures(name, DECODED_TEXT)[LARGE] - figures(name, DECODED_TEXT)[NONE] for name in NAMES]
    least, most = (f"{cost:.3f}".removeprefix("0") for cost in sorted(costs[:2]))
    assert f"cost {least} to {most} nats against none after 384 tokens" in PAGE
    assert max(costs[2:]) < 0


def test_a_ring_costs_perplexity_and_growing_costs_memory_alone():
    assert "{} to {} nats worse than the default".format(*spread(lambda row: row["ring"] - row[DEFAULT])) in PAGE
    assert f"within {float(spread(lambda row: row['grow'])[1]):.2f}".replace("0.", ".") in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_only_growing_knows_what_was_told_while_decoding(name):
    found = figures(name, WHILE_DECODING)
    assert found["grow"] == found["dense"] == 1
    assert all(value < 0.15 for mode, value in found.items() if mode not in ("grow", "dense"))


def test_the_second_model():
    found = figures("second_256", IN_PROMPT)
    assert (found[NONE], found[DEFAULT]) == (0, 0.75) and "to three of four with half" in PAGE
    text = figures("second_256", DECODED_TEXT)
    better = f"{text[NONE] - text[DEFAULT]:.3f}".removeprefix("0")
    assert f"the decoded text is predicted better by {better} nats" in PAGE
