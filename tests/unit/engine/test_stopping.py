"""Stop conditions and incremental text, against decoding everything at once and searching the whole text."""

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_sparsekv.engine.request import FinishReason
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.engine.stopping import StopChecker
from hf_sparsekv.errors import ConfigError

EOS = [2]
TEXTS = [
    "Plain English, with punctuation; and 12,345 numbers.",
    "Größe, naïveté, Ελληνικά, Привет, שלום, مرحبا",
    "日本語のテキストと한국어 텍스트 and 中文文本。",
    "emoji 😀😃 flags 🇫🇷🇩🇪 family 👩‍👩‍👧‍👦 thumbs 👍🏽 end",
    "combining e\u0301a\u0308 zero\u200bwidth \U0001d54f\U0001d552 maths ∑∞",
    "a real replacement � and a second ��",
    "code:\n\tdef f(x):\n\t\treturn x  # trailing   spaces   \n\n\n",
]


class Bytes:
    """A tokenizer with a token for every byte, and 256 + b for "ab" in front of byte b; 0 to 2 are special."""

    def __init__(self) -> None:
        self.most_decoded = 0
        self.num_decoded = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        self.most_decoded = max(self.most_decoded, len(token_ids))
        self.num_decoded += len(token_ids)
        pieces = [b"" if i < 3 else bytes([i]) if i < 256 else b"ab" + bytes([i - 256]) for i in token_ids]
        return b"".join(pieces).decode("utf-8", errors="replace")


class Fallback:
    """Like decoders with byte fallback: a run of bytes that is not valid as a whole is replaced byte for byte, and the
    space in front of the first word is left out. Tokens from 256 are the words " w0", " w1", ...
    """

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        text, run = "", b""
        for token in [*token_ids, None]:
            if token is not None and token < 256:
                run += bytes([token])
                continue
            try:
                text += run.decode("utf-8")
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            text += "" if token is None else f" w{token - 256}"
            run = b""
        return text.removeprefix(" ")


@pytest.fixture(scope="module")
def tokenizer(builtin_model_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(builtin_model_path)


def checker(tokenizer: object = None, **options: object) -> StopChecker:
    return StopChecker(SamplingParams(**({"max_tokens": 10_000} | options)), EOS, tokenizer)


def stream(checker: StopChecker, token_ids: list[int]) -> list[str]:
    """What `new_text` gives after each token, until the end."""
    pieces = []
    for token in token_ids:
        reason = checker.append(token)
        pieces.append(checker.new_text())
        if reason is not None:
            return pieces
    checker.finish(FinishReason.LENGTH)
    return [*pieces, checker.new_text()]


def whole(tokenizer: object, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_an_end_of_sequence_token_or_a_stop_token_ends_the_request():
    assert [checker().append(token) for token in (2, 5)] == [FinishReason.STOP, None]
    assert [checker(stop_token_ids=(5,)).append(token) for token in (2, 5, 6)] == [*2 * [FinishReason.STOP], None]
    assert [checker(ignore_eos=True, stop_token_ids=(5,)).append(t) for t in (2, 5)] == [None, FinishReason.STOP]


def test_the_last_token_that_is_allowed_ends_the_request_and_a_stop_counts_for_more():
    lengths = checker(max_tokens=3)
    assert [lengths.append(9) for _ in range(3)] == [None, None, FinishReason.LENGTH]

    stops = checker(max_tokens=2)
    assert [stops.append(token) for token in (9, 2)] == [None, FinishReason.STOP]
    with pytest.raises(AssertionError, match="a token after the end: stop"):
        stops.append(9)


def test_nothing_ends_a_request_in_its_first_min_tokens():
    one = checker(min_tokens=2, stop_token_ids=(5,))
    assert [one.append(token) for token in (2, 5, 5)] == [None, None, FinishReason.STOP]

    text = checker(Bytes(), min_tokens=3, stop_strings=("ab",))
    assert [text.append(token) for token in b"abaxab"] == [None] * 5 + [FinishReason.STOP]
    assert text.text == "abax"

    across = checker(Bytes(), min_tokens=1, stop_strings=("ab",))
    assert [across.append(token) for token in b"ab"] == [None, FinishReason.STOP]


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ConfigError, match=r"stop_strings=\['x'\] needs a tokenizer"):
        checker(stop_strings=("x",))


def test_without_a_tokenizer_there_is_no_text():
    one = checker()
    one.append(9)

    assert (one.text, one.new_text()) == (None, None)


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.builtin_model
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_text_and_none_is_taken_back(tokenizer, text):
    ids = tokenizer.encode(text)
    one = checker(tokenizer)

    pieces = stream(one, ids)

    assert "".join(pieces) == one.text == whole(tokenizer, ids)
    if "�" not in text:
        assert "�" not in "".join(pieces)
        for num, piece in enumerate(pieces[:-1], start=1):
            at_once = whole(tokenizer, ids[:num])
            ready = at_once if not at_once.endswith("�") else at_once.rstrip("�")
            assert "".join(pieces[:num]) == ready, f"after {num} tokens: {piece!r}"


@pytest.mark.builtin_model
def test_random_tokens_of_the_vocabulary_give_the_text_that_decoding_them_all_gives(tokenizer):
    for seed in range(12):
        draw = random.Random(seed)
        # Tokens with incomplete characters are rare: make every second one of those.
        broken = [i for i in range(3, 3000) if "�" in tokenizer.decode([i])]
        ids = [draw.choice(broken) if draw.random() < 0.5 else draw.randrange(3, len(tokenizer)) for _ in range(150)]
        one = checker(tokenizer)

        assert "".join(stream(one, ids)) == whole(tokenizer, ids), f"seed {seed}"


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes_give_the_text_that_decoding_them_all_gives(seed):
    draw = random.Random(seed)
    pools = [range(0x80, 0xC0), range(0xF0, 0xF5), range(0xE0, 0xF0), range(0x41, 0x5B), range(3), range(256, 512)]
    weights = [draw.random() ** 3 for _ in pools]
    ids = [t for pool in draw.choices(pools, weights, k=200) for t in [draw.choice(pool)]]
    streamed, at_the_end = checker(Bytes(), ignore_eos=True), checker(Bytes(), ignore_eos=True)
    for token in ids:
        at_the_end.append(token)
    at_the_end.finish(FinishReason.ABORT)

    expected = whole(Bytes(), ids)
    assert "".join(stream(streamed, ids)) == streamed.text == expected
    assert at_the_end.text == at_the_end.new_text() == expected


@pytest.mark.parametrize("seed", range(20))
def test_byte_fallback_keeps_spaces_and_characters(seed):
    draw = random.Random(seed)
    characters = [list(c.encode()) for c in "é€日😀x"] + [[256 + n] for n in range(4)]
    ids = [token for _ in range(60) for token in draw.choice(characters)]
    one = checker(Fallback(), ignore_eos=True)

    pieces = stream(one, ids)

    assert "".join(pieces) == whole(Fallback(), ids)
    assert "�" not in "".join(pieces)


@pytest.mark.parametrize(
    "ids",
    [[0x41] * 3000, [0x80] * 3000, [256 + 0xE2] * 3000, [0, 1] * 1500, list("😀".encode()) * 750, [0xE2, 0] * 1500],
)
def test_a_token_costs_as_much_late_as_early(ids):
    tokenizer = Bytes()
    one = checker(tokenizer, stop_strings=("never",))

    pieces = stream(one, ids)

    assert "".join(pieces) == whole(Bytes(), ids)
    assert tokenizer.most_decoded <= 17
    assert tokenizer.num_decoded < 40 * len(ids)


def test_nothing_is_decoded_until_somebody_asks():
    tokenizer = Bytes()
    one = checker(tokenizer)
    for token in b"some words":
        one.append(token)
    assert tokenizer.num_decoded == 0

    assert (one.text, one.new_text(), one.new_text()) == ("some words", "some words", "")


def test_an_end_token_has_no_text_and_lets_go_of_what_was_held():
    one = checker(Bytes(), stop_token_ids=(ord("!"),), stop_strings=("stop",))

    assert stream(one, [*b"so sto", 0xC3, ord("!")]) == ["", "so", " ", "", "", "", "", "sto\ufffd"]
    assert one.text == "so sto\ufffd"
    assert one.finish_reason is FinishReason.STOP


# --- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "text", "expected", "num_tokens"),
    [
        (("END",), "the END is near", "the ", 7),
        (("bc", "abcd"), "xabcd", "xa", 4),  # the first to be complete
        (("bc", "abc"), "xabcd", "x", 4),  # of two that are complete together, the longer
        (("aab",), "aaaab", "aa", 5),
        (("abab",), "abaabab", "aba", 7),
        (("é",), "caf\u00e9!", "caf", 5),
        (("😀",), "a😀b", "a", 5),
        (("\n\n", "\nQ:"), "A: yes\nQ: no", "A: yes", 9),
        (("zz",), "a long z text", "a long z text", None),
        (("a",), "a", "", 1),
    ],
)
def test_a_stop_string_ends_the_text_before_it(stops, text, expected, num_tokens):
    one, ids = checker(Bytes(), stop_strings=stops), list(text.encode())

    pieces = stream(one, ids)

    assert "".join(pieces) == one.text == expected
    assert one.finish_reason is (FinishReason.LENGTH if num_tokens is None else FinishReason.STOP)
    assert len(pieces) == (len(ids) + 1 if num_tokens is None else num_tokens)


def test_what_may_begin_a_stop_string_is_held_back_and_nothing_else():
    one = checker(Bytes(), stop_strings=("abc", "b!"))

    assert stream(one, list(b"xababxabd")) == ["x", "", "", "ab", "", "abx", "", "", "abd", ""]


def test_a_text_that_ends_within_a_stop_string_keeps_its_beginning():
    one = checker(Bytes(), stop_strings=("abc",), max_tokens=3)

    assert [one.append(token) for token in b"xab"] == [None, None, FinishReason.LENGTH]
    assert one.text == "xab"


def test_a_stop_string_that_only_the_end_brings_to_light_still_counts():
    # The last character stays incomplete, which only the end decides.
    one = checker(Bytes(), stop_strings=("b\ufffd",), max_tokens=2)

    assert [one.append(token) for token in (0x78, 256 + 0xE2)] == [None, FinishReason.STOP]
    assert one.text == "xa"


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_are_found_wherever_tokens_cut_the_text(seed):
    draw = random.Random(seed)
    stops = tuple({"".join(draw.choices("ab€", k=draw.randint(1, 4))) for _ in range(3)})
    text = "".join(draw.choices("aab€c", k=40))
    one = checker(Bytes(), stop_strings=stops)
    ids, data = [], text.encode()
    while data:  # "ab" and a byte as one token, or a byte
        if data.startswith(b"ab") and len(data) > 2 and draw.random() < 0.7:
            ids.append(256 + data[2])
            data = data[3:]
        else:
            ids.append(data[0])
            data = data[1:]

    pieces = stream(one, ids)

    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)


@pytest.mark.builtin_model
def test_a_stop_string_across_tokens_of_the_built_in_model(tokenizer):
    ids = tokenizer.encode("The answer is 😀 forty-two.\n\nQuestion: and then?")
    one = checker(tokenizer, stop_strings=("\n\nQuestion",))

    pieces = stream(one, ids)

    assert "".join(pieces) == "The answer is 😀 forty-two."
    assert one.finish_reason is FinishReason.STOP
    assert len(pieces) < len(ids)


# --- ends of the caller's making --------------------------------------------------------------------------------------


def test_an_abort_keeps_its_reason_and_the_text():
    one = checker(Bytes(), stop_strings=("abc",))
    for token in b"xab":
        one.append(token)

    one.finish(FinishReason.ABORT)
    one.finish(FinishReason.ERROR)

    assert (one.finish_reason, one.text) == (FinishReason.ABORT, "xab")


def test_a_tokenizer_that_fails_leaves_the_text_so_far():
    class Failing(Bytes):
        def decode(self, token_ids: list[int], **options: bool) -> str:
            if ord("!") in token_ids:
                raise RuntimeError("no such token")
            return super().decode(token_ids, **options)

    one = checker(Failing(), stop_strings=("stop",))
    assert stream(one, list(b"fine"))[:4] == ["f", "i", "n", "e"]
    one = checker(Failing(), stop_strings=("stop",))
    one.append(ord("f"))
    with pytest.raises(RuntimeError, match="no such token"):
        one.append(ord("!"))

    one.finish(FinishReason.ERROR)

    assert (one.finish_reason, one.text, one.new_text()) == (FinishReason.ERROR, "f", "f")
