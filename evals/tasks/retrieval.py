"""Digit retrieval in the style of RULER: codes set into essay text, or a list of them; one is asked for.

- `needle`: one code in an essay. `needle_long`: one code that is longer than the usual pooling of scores is wide.
  `multi_key`: several, anywhere. `key_value`: a list of them in one place.
- An answer counts when all of its digits are right (`EXACT`).
- Every depth, length and seed draws its own text, key and digits; the two modes of a sample share them.

Source: the tasks of RULER (arXiv 2404.06654, section 3.1); words, sentences and digits are our own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from evals.tasks.essay import EssayTokens
from evals.tasks.samples import (
    EXACT,
    MODES,
    Sample,
    Tokens,
    check_depths,
    check_grid,
    half_of,
    ids_of,
    prefix_ids,
    random_of,
)
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.scorers.checks import check_int

NEEDLE, NEEDLE_LONG, MULTI_KEY, KEY_VALUE = "needle", "needle_long", "multi_key", "key_value"
TASKS = (NEEDLE, NEEDLE_LONG, MULTI_KEY, KEY_VALUE)
LENGTHS = (1024, 2048, 4096, 8192)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
MAX_DIGITS = 18

_FIRST_WORDS = (
    "amber ashen brass briny bronze calm cedar chalk cobalt coral crimson dusky ebony fallow feral flint "
    "frosty gilded golden granite hazel hollow hushed indigo ivory jade lilac linen lunar marble mellow misty "
    "mossy oaken ochre opal pearl pewter quiet rustic sable saffron scarlet silent silver sober solar sunken "
    "tawny velvet"
)
_FIRST = tuple(_FIRST_WORDS.split())
_SECOND_WORDS = (
    "anchor arrow basin beacon bellows bridge candle canyon castle compass cradle dagger falcon ferry garden "
    "glacier hammer harbor heron island kettle ladder lantern lily locket meadow mirror otter pillar plough "
    "quarry raven ribbon saddle sparrow spindle thimble thistle timber tower trellis tunnel valley violin "
    "wagon walnut whistle willow window zither"
)
_SECOND = tuple(_SECOND_WORDS.split())
_HEADER = "Somewhere in the following text secret codes are given. Remember them.\n"
_LIST_HEADER = "Somewhere in the following text a list gives a code for each name. Remember them.\n"


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """One of the four tasks on a grid of lengths, depths and seeds."""

    task: str = NEEDLE
    num_keys: int = 1
    """Codes in a document, one of which is asked for."""
    num_digits: int = 7
    lengths: Sequence[int] = LENGTHS
    depths: Sequence[float] = DEPTHS
    """Where the asked code, or the list, lies: 0 = at the beginning, 1 = at the end."""
    seeds: Sequence[int] = (0, 1)
    modes: Sequence[str] = MODES

    def __post_init__(self) -> None:
        """Refuse what makes no task.

        Raises:
            ConfigError: names the value and the limit.
        """
        if self.task not in TASKS:
            raise ConfigError(f"retrieval has {', '.join(TASKS)}: got {self.task!r}")
        check_int("num_digits", self.num_digits, at_least=3)
        if self.num_digits > MAX_DIGITS:
            raise ConfigError(f"num_digits is at most {MAX_DIGITS}: got {self.num_digits}")
        check_int("num_keys", self.num_keys, at_least=1)
        if (self.task in (NEEDLE, NEEDLE_LONG)) != (self.num_keys == 1) or self.num_keys > len(_SECOND):
            raise ConfigError(
                f"{NEEDLE} and {NEEDLE_LONG} have one key, {MULTI_KEY} and {KEY_VALUE} have 2 to {len(_SECOND)}: got "
                f"{self.num_keys}"
            )
        check_grid(lengths=self.lengths, seeds=self.seeds, modes=self.modes)
        check_depths(self.depths)

    def samples(self, text: EssayTokens) -> Iterator[Sample]:
        """Every sample, shortest first; the two modes of one are neighbours.

        Raises:
            ConfigError: a length that does not hold the codes and the question.
            InputError: the text is too short.
        """
        for length in self.lengths:
            for seed in self.seeds:
                for depth in self.depths:
                    rng = random_of("retrieval", self.task, self.num_keys, self.num_digits, length, seed, depth)
                    made = self._listed if self.task == KEY_VALUE else self._hidden
                    yield from made(text, length, seed, depth, rng)

    def _hidden(self, text: EssayTokens, length: int, seed: int, depth: float, rng: Random) -> Iterator[Sample]:
        """Codes in an essay."""
        numbers = rng.sample(range(len(_FIRST) * len(_SECOND)), 2 * len(_FIRST))
        keys = (f"{_FIRST[i % len(_FIRST)]} {_SECOND[i // len(_FIRST)]}" for i in numbers)
        pairs = self._pairs((key for key in keys if key not in text.essay.text), text.essay.text, rng)
        needles = [ids_of(text.tokenizer, " " + _statement(*pair)) for pair in pairs]
        head = _head(text, _HEADER)
        question, answer = _asked(text, pairs[0])
        room = length - len(head) - sum(map(len, needles)) - len(question) - len(answer)
        _check_room(length, room)
        window = text.window(half_of(seed), room, rng)
        places = [window.boundary(depth)] + [rng.randint(0, len(window.sentences)) for _ in needles[1:]]
        body, starts = window.with_insertions(list(zip(places, needles, strict=True)))
        place = {"depth": depth, "needle_start": len(head) + starts[0], "num_keys": self.num_keys}
        yield from self._both(head + body, question, answer, pairs[0], length, seed, place)

    def _listed(self, text: EssayTokens, length: int, seed: int, depth: float, rng: Random) -> Iterator[Sample]:
        """A list of codes in an essay; the asked line is a random one."""
        pairs = self._pairs(rng.sample(_SECOND, len(_SECOND)), text.essay.text, rng)
        index = rng.randrange(len(pairs))
        lines = [ids_of(text.tokenizer, f"\n{key}: {code}") for key, code in pairs]
        lines[0] = ids_of(text.tokenizer, f"\n\n{pairs[0][0]}: {pairs[0][1]}")
        end = ids_of(text.tokenizer, "\n\n")
        question = ids_of(text.tokenizer, f"\n\nFrom the list above:\n{pairs[index][0]}:")
        answer = ids_of(text.tokenizer, f" {pairs[index][1]}")
        head = _head(text, _LIST_HEADER)
        room = length - len(head) - sum(map(len, lines)) - len(end) - len(question) - len(answer)
        _check_room(length, room)
        window = text.window(half_of(seed), room, rng)
        body, starts = window.with_insertions([(window.boundary(depth), line) for line in [*lines, end]])
        place = {"depth": depth, "needle_start": len(head) + starts[index], "num_keys": self.num_keys}
        yield from self._both(head + body, question, answer, pairs[index], length, seed, place)

    def _both(
        self,
        document: Tokens,
        question: Tokens,
        answer: Tokens,
        pair: tuple[str, str],
        length: int,
        seed: int,
        place: dict[str, float],
    ) -> Iterator[Sample]:
        for mode in self.modes:
            yield Sample(
                task=self.task,
                mode=mode,
                seed=seed,
                budget_tokens=length,
                document=document,
                question=question,
                continuations=(answer,),
                scorer=EXACT,
                variant=f"k{self.num_keys}/n{self.num_digits}/d{place['depth']:g}",
                facts=place
                | {"key": pair[0], "answer": pair[1], "answer_tokens": len(answer)}
                | {"question_tokens": len(question)},
            )

    def _pairs(self, keys: Iterable[str], text: str, rng: Random) -> list[tuple[str, str]]:
        """As many keys as are needed, each with a code; the codes all differ, and none of them is in the text."""
        codes: dict[str, None] = {}
        while len(codes) < self.num_keys:
            code = str(rng.randrange(10 ** (self.num_digits - 1), 10**self.num_digits))
            if code not in text:
                codes[code] = None
        pairs = [(key, code) for code, key in zip(codes, keys, strict=False)]  # keys are made one by one, as needed
        assert len(pairs) == self.num_keys
        return pairs


def things(count: int, rng: Random) -> list[str]:
    """Names of so many things, all different, in the plural."""
    return [name if name.endswith("s") else f"{name}s" for name in rng.sample(_SECOND, count)]


def _statement(key: str, code: str) -> str:
    return f"The secret code of the {key} is {code}."


def _asked(text: EssayTokens, pair: tuple[str, str]) -> tuple[Tokens, Tokens]:
    """Question and answer."""
    key, code = pair
    question = f"\n\nWhat is the secret code of the {key}? The secret code of the {key} is"
    return ids_of(text.tokenizer, question), ids_of(text.tokenizer, " " + code)


def _head(text: EssayTokens, header: str) -> Tokens:
    return prefix_ids(text.tokenizer) + ids_of(text.tokenizer, header)


def _check_room(length: int, room: int) -> None:
    if room < 1:
        raise ConfigError(f"{length} tokens do not hold the codes and the question: ask for longer documents")
