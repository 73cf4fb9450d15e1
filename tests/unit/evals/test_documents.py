"""Every option stands in the document, one of them beside the person asked about.

Guards against questions that the document does not answer, or answers twice, and against a favourite letter.
"""

import re
from collections import Counter

import pytest

from evals.tasks.documents import ATTRIBUTES, LETTERS, TEXTS, DocumentQA
from hf_sparsekv.errors import ConfigError

GRID = {"lengths": (900, 1500), "seeds": tuple(range(8))}
STATEMENTS = {attribute.name: attribute.statement for attribute in ATTRIBUTES}


@pytest.mark.parametrize("answers", [TEXTS, LETTERS])
def test_the_document_gives_the_answer_and_the_other_options_once_each(answers, text, tokenizer):
    samples = list(DocumentQA(answers=answers, **GRID).samples(text))
    assert samples == list(DocumentQA(answers=answers, **GRID).samples(text))
    for sample in samples:
        facts, document = sample.facts, tokenizer.decode(sample.document)
        options = facts["options"]
        assert sample.num_tokens <= sample.budget_tokens
        assert sample.num_tokens == sample.budget_tokens  # one byte, one token: nothing is left over
        assert len(set(options)) == 4
        right = options[sample.gold]
        told = STATEMENTS[facts["attribute"]].format(person=facts["person"])
        assert tokenizer.decode(sample.document[facts["fact_start"] :]).startswith(f" {told} {right}.")
        assert document.count(facts["person"]) == 1
        for option in options:
            assert len(re.findall(rf" {option}\.", document)) == 1
        assert facts["person"] in tokenizer.decode(sample.question)


def test_options_are_asked_by_their_words_or_by_letters(text, tokenizer):
    words = next(iter(DocumentQA(**GRID).samples(text)))
    assert [tokenizer.decode(ids) for ids in words.continuations] == [f" {option}" for option in words.facts["options"]]
    letters = next(iter(DocumentQA(answers=LETTERS, **GRID).samples(text)))
    assert [tokenizer.decode(ids) for ids in letters.continuations] == [" A", " B", " C", " D"]
    for letter, option in zip("ABCD", letters.facts["options"], strict=True):
        assert f"\n{letter}. {option}\n" in tokenizer.decode(letters.question)


def test_right_options_and_places_are_spread(text):
    samples = list(DocumentQA(modes=("aware",), **GRID).samples(text))
    for half in ("tune", "report"):
        assert set(Counter(s.gold for s in samples if s.half == half).values()) == {len(samples) // 8}
    depths = [sample.facts["depth"] for sample in samples]
    assert min(depths) < 0.2
    assert max(depths) > 0.7


@pytest.mark.parametrize(
    ("options", "words"),
    [({"num_people": 3}, "num_people"), ({"num_people": 11}, "at most 10"), ({"answers": "essay"}, "essay")],
)
def test_what_makes_no_question_is_refused(options, words, text):
    with pytest.raises(ConfigError, match=words):
        DocumentQA(**options)
    with pytest.raises(ConfigError, match="do not hold"):
        list(DocumentQA(lengths=(200,)).samples(text))
