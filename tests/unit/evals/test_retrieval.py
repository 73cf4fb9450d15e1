"""Codes are where a sample says they are, once, in a document of the promised length.

Guards against a needle that is cut off, asked for wrongly, or found twice; and against halves that share text.
"""

import re

import pytest

from evals.tasks.essay import EssayTokens, essay_of_text
from evals.tasks.retrieval import KEY_VALUE, MULTI_KEY, NEEDLE, NEEDLE_LONG, Retrieval
from evals.tasks.samples import AGNOSTIC, AWARE, prefix_ids
from hf_sparsekv.errors import ConfigError, InputError

LONGEST_SENTENCE = 40
TASKS = {
    NEEDLE: Retrieval(lengths=(600, 1200), seeds=(0, 1, 2, 3)),
    NEEDLE_LONG: Retrieval(task=NEEDLE_LONG, num_digits=14, lengths=(600, 1200), seeds=(0, 1)),
    MULTI_KEY: Retrieval(task=MULTI_KEY, num_keys=4, lengths=(900, 1500), seeds=(0, 1)),
    KEY_VALUE: Retrieval(task=KEY_VALUE, num_keys=12, num_digits=4, lengths=(900, 1500), seeds=(0, 1)),
}


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


def test_samples_are_the_same_every_time_and_for_every_order_of_seeds(task, text):
    again = Retrieval(**{**task.__dict__, "seeds": tuple(reversed(task.seeds))})
    first = {sample.id: sample for sample in task.samples(text)}
    second = {sample.id: sample for sample in again.samples(text)}
    assert first == second
    assert len({sample.sha256() for sample in first.values()}) == len(first)
    assert len(first) == len(task.lengths) * len(task.seeds) * len(task.depths) * 2


def test_a_document_fills_its_budget_and_the_code_is_at_its_depth(task, text, tokenizer):
    for sample in task.samples(text):
        facts = sample.facts
        assert sample.num_tokens == sample.budget_tokens
        at = tokenizer.decode(sample.document[facts["needle_start"] :])
        written = f"{facts['key']}: {facts['answer']}\n" if task.task == KEY_VALUE else f"code of the {facts['key']} is"
        assert written in at[:60]
        # The place between two sentences that is nearest; the list's asked line lies somewhere in the list.
        list_room = 20 * task.num_keys if task.task == KEY_VALUE else 70 * task.num_keys
        place = facts["needle_start"] - facts["depth"] * len(sample.document)
        assert abs(place) < LONGEST_SENTENCE + list_room + 90  # 90: the header


def test_the_single_needle_lies_within_a_sentence_of_its_depth(text, tokenizer):
    for sample in TASKS[NEEDLE].samples(text):
        document = tokenizer.decode(sample.document)
        body = document[document.index("\n") + 1 :]
        needle = re.search(r" The secret code of the [a-z]+ [a-z]+ is \d+\.", body)
        before, after = len(body[: needle.start()]), len(body) - needle.end()
        assert abs(before - sample.facts["depth"] * (before + after)) <= LONGEST_SENTENCE / 2


def test_the_answer_is_unique_and_the_question_names_its_key_alone(task, text, tokenizer):
    for sample in task.samples(text):
        document, question = tokenizer.decode(sample.document), tokenizer.decode(sample.question)
        assert document.count(sample.facts["answer"]) == 1
        assert sample.facts["answer"] not in question
        assert tokenizer.decode(sample.continuations[0]) == " " + sample.facts["answer"]
        assert sample.facts["answer_tokens"] == 1 + task.num_digits  # a byte, a token
        codes = re.findall(r"\d+", document)
        assert len(codes) == len(set(codes)) == task.num_keys
        assert {len(code) for code in codes} == {task.num_digits}
        found = re.findall(r"(?:the |\n)([a-z ]+?)(?: is|:) \d", document)
        assert len(set(found)) == task.num_keys
        assert [key for key in found if re.search(rf"\b{key}(?: is|:)", question)] == [sample.facts["key"]]


def test_the_modes_share_everything_but_the_mode(task, text):
    samples = list(task.samples(text))
    for aware, agnostic in zip(samples[::2], samples[1::2], strict=True):
        assert (aware.mode, agnostic.mode) == (AWARE, AGNOSTIC)
        assert aware.pair_id == agnostic.pair_id
        assert (aware.document, aware.question, aware.continuations) == (
            agnostic.document,
            agnostic.question,
            agnostic.continuations,
        )


def test_the_halves_read_different_text(task, text, tokenizer):
    read = {"tune": set(), "report": set()}
    for sample in task.samples(text):
        assert sample.half == ("tune", "report")[sample.seed % 2]
        read[sample.half] |= set(re.findall(r"Now comes ([a-j]{4}) with", tokenizer.decode(sample.document)))
    assert read["tune"]
    assert read["report"]
    assert not read["tune"] & read["report"]


def test_what_a_tokenizer_puts_before_a_text_comes_first_and_counts(bos_tokenizer, tokenizer, text):
    assert prefix_ids(bos_tokenizer) == (256,)
    assert prefix_ids(tokenizer) == ()
    own = EssayTokens(text.essay, bos_tokenizer)
    for sample in Retrieval(lengths=(600,), seeds=(0,)).samples(own):
        assert sample.document[0] == 256
        assert 256 not in sample.document[1:] + sample.question + sample.continuations[0]
        assert sample.num_tokens == 600


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "haystack"}, "haystack"),
        ({"num_keys": 2}, "got 2"),
        ({"task": NEEDLE_LONG, "num_keys": 2}, "got 2"),
        ({"task": MULTI_KEY}, "got 1"),
        ({"task": KEY_VALUE, "num_keys": 51}, "2 to 50"),
        ({"num_digits": 2}, "num_digits"),
        ({"num_digits": 19}, "at most 18"),
        ({"depths": (1.5,)}, "1.5"),
        ({"depths": ()}, "depths"),
        ({"depths": (0.5, 0.5)}, "once"),
        ({"lengths": (0,)}, "lengths"),
        ({"lengths": ()}, "lengths"),
        ({"seeds": (-1,)}, "-1"),
        ({"seeds": (3, 3)}, "twice"),
        ({"modes": ("blind",)}, "blind"),
    ],
)
def test_a_grid_that_makes_no_task_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Retrieval(**options)


def test_lengths_that_hold_no_code_or_outgrow_the_text_are_refused(text, tokenizer):
    with pytest.raises(ConfigError, match="100 tokens do not hold"):
        list(Retrieval(lengths=(100,)).samples(text))
    short = EssayTokens(essay_of_text("short", "One sentence. Another one."), tokenizer)
    with pytest.raises(InputError, match="the tune half of short has 14 tokens"):
        list(Retrieval(lengths=(600,)).samples(short))
    with pytest.raises(InputError, match="at least 2 sentences"):
        essay_of_text("one", "Only this one")
