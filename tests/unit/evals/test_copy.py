"""The list stands in the document once, whole, where the sample says, and the answer is it to the letter.

Guards against a list that is cut or cannot be told from the essay, and against an answer that the question gives away.
"""

import pytest

from evals.tasks.copying import Copying
from evals.tasks.samples import EXACT
from hf_sparsekv.errors import ConfigError

GRID = {"lengths": (900, 1500), "seeds": (0, 1), "depths": (0.0, 0.5, 1.0)}


def test_the_document_holds_the_list_and_the_answer_repeats_it(text, tokenizer):
    samples = list(Copying(**GRID).samples(text))
    assert samples == list(Copying(**GRID).samples(text))
    assert len({sample.id for sample in samples}) == len(samples) == 2 * 2 * 3 * 2
    for sample in samples:
        document, question = tokenizer.decode(sample.document), tokenizer.decode(sample.question)
        answer, items = tokenizer.decode(sample.continuations[0]), sample.facts["items"]
        assert sample.scorer == EXACT
        assert sample.num_tokens == sample.budget_tokens
        assert answer == f" {', '.join(items)}."
        assert len(set(items)) == 8
        assert document.count(answer) == 1
        assert not any(item in question for item in items)
        at = tokenizer.decode(sample.document[sample.facts["passage_start"] :])
        beginning = question[question.index("The secret list of") :]
        assert at.startswith(f" {beginning}{answer}")
        # Half a sentence off at the most.
        assert abs(sample.facts["passage_start"] - sample.facts["depth"] * (len(document) - len(at.split(".")[0]))) < 40


def test_the_protocols_share_a_document_and_the_seeds_do_not(text):
    samples = list(Copying(**GRID).samples(text))
    for aware, agnostic in zip(samples[::2], samples[1::2], strict=True):
        assert (aware.mode, agnostic.mode) == ("aware", "agnostic")
        assert aware.document == agnostic.document
        assert aware.pair_id == agnostic.pair_id
    assert len({sample.document for sample in samples}) == len(samples) // 2


@pytest.mark.parametrize(
    ("options", "words"), [({"num_items": 1}, "num_items"), ({"num_items": 21}, "at most 20"), ({"depths": (2,)}, "2")]
)
def test_what_makes_no_list_is_refused(options, words, text):
    with pytest.raises(ConfigError, match=words):
        Copying(**options)
    with pytest.raises(ConfigError, match="200 tokens do not hold"):
        list(Copying(lengths=(200,)).samples(text))
