"""The tasks hold with a real vocabulary too: lengths by its tokens, facts readable, questions short.

Guards against pieces that a subword tokenizer reads differently once they stand in a document.
"""

import pytest
from transformers import AutoTokenizer

from evals.tasks.catalog import TASKS, samples_of
from evals.tasks.essay import EssayTokens, load_essay

OBSERVATION_WINDOW = 32

pytestmark = pytest.mark.builtin_model


@pytest.fixture(scope="module")
def real_text(builtin_model_path):
    return EssayTokens(load_essay("pydoc"), AutoTokenizer.from_pretrained(builtin_model_path))


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"mmlu", "cloze"}))
def test_facts_are_readable_and_lengths_are_the_models(name, real_text):
    tokenizer = real_text.tokenizer
    samples = samples_of([name], real_text, lengths=[1024, 8192], seeds=[0, 1])
    assert samples == samples_of([name], real_text, lengths=[1024, 8192], seeds=[0, 1])
    for sample in samples:
        assert sample.mode == "no-context" or sample.num_tokens == sample.budget_tokens
        prompt, facts = tokenizer.decode(sample.document + sample.question), sample.facts
        # The pieces are what the tokenizer makes of the whole prompt, but for the places where a sentence was cut.
        assert abs(len(tokenizer(prompt)["input_ids"]) - len(sample.document + sample.question)) < 64
        if name in ("needle", "needle_long", "multi_key", "key_value"):
            told = tokenizer.decode(sample.document[facts["needle_start"] :][:40])
            assert facts["key"] in told
            assert facts["answer"] in told
            assert prompt.count(facts["answer"]) == 1
        if name == "copy":
            told = tokenizer.decode(sample.document[facts["passage_start"] :][:90])
            assert f"{', '.join(facts['items'])}." in told
            assert 30 <= facts["answer_tokens"] <= 60
        if name == "document_qa":
            told = tokenizer.decode(sample.document[facts["fact_start"] :][:40])
            assert facts["person"] in told
            assert f" {facts['options'][sample.gold]}." in told
        assert len(sample.question) <= OBSERVATION_WINDOW
