"""Essay text: sentences of real prose, of which a document of any length is made, with other sentences set in.

The two halves of the samples read different halves of the text.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

from evals.tasks.fetch import Progress, fetched
from evals.tasks.samples import HALVES, Tokenizer, Tokens
from hf_sparsekv.errors import ConfigError, InputError, shown

AUTO, NOVELS, PYDOC = "auto", "novels", "pydoc"
SOURCES = (AUTO, NOVELS, PYDOC)

_PARAGRAPH = re.compile(r"\n\s*\n|\f")
_SENTENCE_END = re.compile(r"(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?:(?<=[.!?])|(?<=[.!?][\"”]))\s+(?=[\"“(]?[A-Z])")
_SENTENCES_A_TIME = 64


@dataclass(frozen=True)
class Essay:
    """A long text in sentences."""

    name: str
    sentences: tuple[str, ...]

    @cached_property
    def sha256(self) -> str:
        """Of the sentences: says which text it was."""
        return hashlib.sha256("\n".join(self.sentences).encode()).hexdigest()

    @cached_property
    def text(self) -> str:
        """All of it."""
        return " ".join(self.sentences)

    def half(self, name: str) -> range:
        """Indices of the sentences that a half of the samples reads."""
        middle = len(self.sentences) // 2
        return range(middle) if name == HALVES[0] else range(middle, len(self.sentences))


def essay_of_text(name: str, text: str) -> Essay:
    """A text in sentences, white space made one blank.

    Raises:
        InputError: less than two sentences, one for each half.
    """
    paragraphs = (" ".join(paragraph.split()) for paragraph in _PARAGRAPH.split(text))
    sentences = tuple(s for paragraph in paragraphs for s in _SENTENCE_END.split(paragraph) if s)
    if len(sentences) < len(HALVES):
        raise InputError(f"an essay needs at least {len(HALVES)} sentences: {name} has {len(sentences)}")
    return Essay(name, sentences)


def load_essay(source: str = AUTO, *, cache_dir: Path | None = None, progress: Progress = print) -> Essay:
    """The text of documents.

    Args:
        source: "novels" (six of them, from a Debian package), "pydoc" (Python's reference, always there), or "auto":
            the novels where they are stored or can be fetched, else the reference.
        cache_dir, progress: see `fetched`.
    Raises:
        ConfigError: an unknown source.
        InputError: the novels were asked for and cannot be had.
    """
    if source not in SOURCES:
        raise ConfigError(f"an essay is one of {', '.join(SOURCES)}: got {shown(source)}")
    if source != PYDOC:
        try:
            path = fetched("novels.txt", cache_dir=cache_dir, progress=progress)
            return essay_of_text(NOVELS, path.read_text(encoding="utf-8"))
        except InputError as error:
            if source == NOVELS:
                raise
            progress(f"no novels ({error}): documents are made of Python's reference")
    return essay_of_text(PYDOC, "\n\n".join(topics[name] for name in sorted(topics)))


@dataclass(frozen=True)
class Window:
    """A stretch of an essay, token ids by sentence; the last one may be cut."""

    sentences: tuple[Tokens, ...]

    @property
    def num_tokens(self) -> int:
        """Of all sentences."""
        return sum(map(len, self.sentences))

    def boundary(self, depth: float) -> int:
        """The number of sentences before the place between two that is nearest to a depth in [0, 1]."""
        ends, total = [0], 0
        for sentence in self.sentences:
            total += len(sentence)
            ends.append(total)
        return min(range(len(ends)), key=lambda i: abs(ends[i] - depth * total))

    def with_insertions(self, insertions: Sequence[tuple[int, Tokens]]) -> tuple[Tokens, tuple[int, ...]]:
        """The text with sentences set in.

        Args:
            insertions: pairs of a boundary and token ids; where boundaries are equal, in the given order.
        Returns:
            Token ids, and where in them each insertion begins, in the order of the insertions.
        """
        tokens: list[int] = []
        starts = [0] * len(insertions)
        for boundary in range(len(self.sentences) + 1):
            for i, (place, inserted) in enumerate(insertions):
                if place == boundary:
                    starts[i] = len(tokens)
                    tokens += inserted
            if boundary < len(self.sentences):
                tokens += self.sentences[boundary]
        return tuple(tokens), tuple(starts)


class EssayTokens:
    """An essay as a tokenizer reads it; sentences are tokenized when they are first needed."""

    def __init__(self, essay: Essay, tokenizer: Tokenizer) -> None:
        self.essay, self.tokenizer = essay, tokenizer
        self._known: dict[int, Tokens] = {}

    def window(self, half: str, num_tokens: int, rng: Random) -> Window:
        """Consecutive sentences from a random one on, exactly `num_tokens` tokens.

        At the half's end it goes on at its beginning.

        Raises:
            InputError: the half has fewer tokens.
        """
        indices = self.essay.half(half)
        first = rng.randrange(len(indices))
        sentences: list[Tokens] = []
        missing = num_tokens
        for step in range(len(indices)):
            if missing == 0:
                break
            sentence = self._tokens(indices, (first + step) % len(indices))[:missing]
            sentences.append(sentence)
            missing -= len(sentence)
        if missing:
            raise InputError(
                f"the {half} half of {self.essay.name} has {num_tokens - missing} tokens, {num_tokens} are needed: ask "
                "for shorter documents or give a longer text"
            )
        return Window(tuple(sentences))

    def _tokens(self, indices: range, place: int) -> Tokens:
        index = indices[place]
        if index not in self._known:
            some = indices[place : place + _SENTENCES_A_TIME]
            texts = [" " + self.essay.sentences[i] for i in some]
            ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            self._known |= {i: tuple(sentence) for i, sentence in zip(some, ids, strict=True)}
        return self._known[index]
