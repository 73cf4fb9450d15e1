"""Facts come out of the quiz's patterns and out of tables of countries; questions are facts that are not shown before.

Guards against an answer that stands in the examples, against halves that share facts, and against damaged files.
"""

import json
import subprocess
from collections import Counter

import pytest

from evals.tasks import fetch
from evals.tasks.cloze import Cloze
from evals.tasks.facts import Fact, country_facts, load_facts, quiz_facts
from evals.tasks.quiz_files import QUIZ_FILES, quiz_text, spelling
from hf_sparsekv.errors import ConfigError, InputError

FACTS = [Fact(kind="country", subject=f"Land{i}", answer=f"Town{i}") for i in range(60)]
FACTS += [Fact(kind="element", subject=f"S{i}", answer=f"Matter{i}") for i in range(60)]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("Paris", "Paris"),
        ("United States|US{A}", "United States"),
        ("Cal{if{ornia}}|CA", "California"),
        ("{The }Gambia", "The Gambia"),
        ("Bra[z|s]il", "Brazil"),
        ("S[~a|a~|a]o Tom['e|e'|e]", "Sao Tome"),
        ("Port[-| ]au[-| ]Prince", "Port au Prince"),
    ],
)
def test_a_pattern_gives_one_spelling(pattern, text):
    assert spelling(pattern) == text


@pytest.mark.parametrize("pattern", ["Bra[z|s", "{The Gambia", "Brazil]", "a}b"])
def test_a_torn_pattern_is_refused(pattern):
    with pytest.raises(ValueError, match="pattern"):
        spelling(pattern)


def test_quiz_files_become_lines_each_subject_once(tmp_path):
    files = dict.fromkeys(QUIZ_FILES, b"")
    files |= {"asia": b"Egypt:Cairo\nKuwait:Kuwait City\n", "africa": b"Egypt:Cairo\n"}
    files |= {"state": b"Ohio|OH:Columbus:OH:carnation\n", "elements": b"He:2:4.003:Helium\n"}
    written = quiz_text([files[name] for name in QUIZ_FILES])
    assert (
        written == "country\tEgypt\tCairo\ncountry\tKuwait\tKuwait City\nstate\tOhio\tColumbus\nelement\tHe\tHelium\n"
    )
    (tmp_path / "quiz.tsv").write_text(written)
    facts = quiz_facts(tmp_path / "quiz.tsv")
    assert [f"{fact.sentence()} {fact.answer}" for fact in facts] == [
        "The capital of Egypt is Cairo",
        "The capital of the state of Ohio is Columbus",
        "The chemical element with the symbol He is Helium",
    ]
    with pytest.raises(ValueError, match="without an answer"):
        quiz_text([b"Egypt\n", *[b""] * (len(QUIZ_FILES) - 1)])


@pytest.mark.parametrize("line", ["country\tEgypt", "planet\tMars\tred", "country\t\tCairo"])
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "quiz.tsv").write_text(f"country\tFrance\tParis\n{line}\n")
    with pytest.raises(InputError, match="line 2: kind"):
        quiz_facts(tmp_path / "quiz.tsv")


def test_countries_without_a_capital_are_left_out_and_other_files_refused(tmp_path):
    path = tmp_path / "countries.json"
    path.write_text(json.dumps({"FR": {"name": "France", "capital": "Paris"}, "AQ": {"name": "Ice", "capital": ""}}))
    assert country_facts(path) == [Fact(kind="country", subject="France", answer="Paris")]
    for text, words in [
        ("[", "no JSON"),
        ("[]", "JSON object"),
        ('{"FR": {"name": "France"}}', "'FR'"),
        ("{}", "no fact"),
    ]:
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            country_facts(path)
    with pytest.raises(InputError, match="cannot read facts"):
        country_facts(tmp_path / "absent.json")


def test_without_apt_the_facts_are_countries_and_the_caller_is_told(monkeypatch, tmp_path):
    """The second source is there, the first one cannot be fetched."""
    (tmp_path / "evals").mkdir()
    countries = tmp_path / "evals" / "countries.json"
    countries.write_text(json.dumps({"FR": {"name": "France", "capital": "Paris"}}))
    monkeypatch.setattr(fetch, "_is_sound", lambda path, sha256: path == countries)

    def failing(command, **_):
        return subprocess.CompletedProcess(command, 100, b"", b"E: Unable to locate package bsdgames\n")

    monkeypatch.setattr(fetch.subprocess, "run", failing)
    monkeypatch.setattr(fetch.Path, "is_file", lambda path: False)  # nor is the package installed
    said = []
    assert [fact.subject for fact in load_facts(cache_dir=tmp_path, progress=said.append)] == ["France"]
    assert "no quiz (apt-get could not fetch bsdgames: E: Unable to locate package" in said[-1]
    with pytest.raises(InputError, match="Unable to locate"):
        load_facts("quiz", cache_dir=tmp_path, progress=said.append)
    with pytest.raises(ConfigError, match="'rumours'"):
        load_facts("rumours")


def test_questions_are_not_among_the_shown_facts_and_options_differ(text, tokenizer):
    task = Cloze(facts=FACTS, num_shots=8, lengths=(500, 900), seeds=tuple(range(8)))
    samples = list(task.samples(text))
    assert samples == list(task.samples(text))
    assert len({sample.id for sample in samples}) == len(samples) == 2 * 8 * 2
    subjects = {"tune": set(), "report": set()}
    for sample in samples:
        document, facts = tokenizer.decode(sample.document), sample.facts
        shots = document.splitlines()
        assert 0 < len(shots) == facts["num_shots"] <= 8
        assert len(set(shots)) == len(shots)
        asked = next(fact for fact in FACTS if fact.subject == facts["subject"])
        assert tokenizer.decode(sample.question) == asked.sentence()
        assert f"{asked.sentence()} " not in document
        assert facts["options"][sample.gold] == asked.answer
        assert len(set(facts["options"])) == 4
        assert [tokenizer.decode(ids) for ids in sample.continuations] == [f" {option}" for option in facts["options"]]
        assert all(shot.startswith(asked.sentence().split(asked.subject)[0]) for shot in shots)
        known = {fact.subject for fact in FACTS if f"{fact.sentence()} " in document}
        subjects[sample.half] |= known | {asked.subject}
    assert not subjects["tune"] & subjects["report"]
    assert Counter(sample.facts["kind"] for sample in samples) == {"country": 16, "element": 16}
    for aware, agnostic in zip(samples[::2], samples[1::2], strict=True):
        assert (aware.document, aware.pair_id) == (agnostic.document, agnostic.pair_id)


def test_too_few_facts_and_too_few_tokens_are_refused(text):
    with pytest.raises(InputError, match="the tune half has 3 answers of kind 'country', 5 are needed"):
        list(Cloze(facts=FACTS[:6]).samples(text))
    with pytest.raises(ConfigError, match="50 tokens do not hold"):
        list(Cloze(facts=FACTS, lengths=(50,)).samples(text))
    with pytest.raises(ConfigError, match="num_shots"):
        Cloze(facts=FACTS, num_shots=0)
