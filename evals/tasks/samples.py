"""A sample: token ids that are read, the question after them, and what is scored; the same for every cache.

Two protocols, named in every sample. `AWARE`: document and question are compressed together, so the question lies in
the observation window, as far as that is long enough (`facts["question_tokens"]`). `AGNOSTIC`: the document alone is
compressed, the question comes after.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from hf_sparsekv.errors import ConfigError, shown

AWARE, AGNOSTIC, NO_CONTEXT = "aware", "agnostic", "no-context"
MODES = (AWARE, AGNOSTIC)
"""`NO_CONTEXT` samples are made by the perplexity task alone, to say what its context is worth."""
TUNE, REPORT = "tune", "report"
HALVES = (TUNE, REPORT)
EXACT, CHOICE, NLL, TOKENS = "exact", "choice", "nll", "tokens"
SCORERS = (EXACT, CHOICE, NLL, TOKENS)

Tokens = tuple[int, ...]


class Tokenizer(Protocol):
    """What the tasks need of a tokenizer of transformers."""

    def __call__(self, text: Any, *, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        """A mapping with `input_ids`: of a text, or of each text of a list; `verbose` allows warnings."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question to a model and its cache."""

    task: str
    mode: str
    """`AWARE`, `AGNOSTIC`, or `NO_CONTEXT`."""
    seed: int
    budget_tokens: int
    """Document, question and the longest continuation together have at most so many."""
    document: Tokens
    question: Tokens
    """Empty where a document is merely continued."""
    continuations: tuple[Tokens, ...]
    """What may follow; several for `CHOICE`, else one."""
    gold: int = 0
    """Index of the right continuation."""
    scorer: str
    """`EXACT`: 1 if every token of the answer is the most probable one, which is what greedy decoding writes. `CHOICE`:
    1 if the right continuation has the highest log-likelihood per token. `NLL`: mean negative log-likelihood, in nats a
    token. `TOKENS`: share of the answer's tokens that are the most probable one after the right ones before them."""
    variant: str = ""
    """Tells samples apart that agree in the rest."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able: depth, key, answer and what else a table may group by."""

    def __post_init__(self) -> None:
        """Our own generators made it: what is wrong here is a bug."""
        assert self.scorer in SCORERS
        assert self.document
        assert all(self.continuations)
        assert 0 <= self.gold < len(self.continuations)
        assert self.num_tokens <= self.budget_tokens, f"{self.num_tokens} tokens, budget {self.budget_tokens}"

    @property
    def half(self) -> str:
        """`TUNE` for even seeds, `REPORT` for odd ones."""
        return half_of(self.seed)

    @property
    def num_tokens(self) -> int:
        """Document, question and the longest continuation."""
        return len(self.document) + len(self.question) + max(len(tokens) for tokens in self.continuations)

    @property
    def pair_id(self) -> str:
        """The same for the modes of one sample."""
        return f"{self.task}/{self.budget_tokens}/s{self.seed}" + (f"/{self.variant}" if self.variant else "")

    @property
    def id(self) -> str:
        """Unique within a run."""
        return f"{self.pair_id}/{self.mode}"

    def sha256(self) -> str:
        """Of everything that a model reads and is scored on: equal ids with other tokens are found out."""
        values = [self.mode, self.document, self.question, self.continuations, self.gold, self.scorer]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def half_of(seed: int) -> str:
    """The half of the samples that a seed belongs to."""
    return HALVES[seed % 2]


def random_of(*parts: object) -> Random:
    """A generator of its own for each combination of parts, equal on every machine."""
    return Random("/".join(map(str, parts)))


def ids_of(tokenizer: Tokenizer, text: str) -> Tokens:
    """Token ids of a text without special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def prefix_ids(tokenizer: Tokenizer) -> Tokens:
    """What the tokenizer puts before every text, such as a begin-of-sequence token; often nothing."""
    plain, special = (list(tokenizer("a", add_special_tokens=flag)["input_ids"]) for flag in (False, True))
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return tuple(special[:start])
    return ()


def check_grid(*, lengths: Sequence[int], seeds: Sequence[int], modes: Sequence[str] = MODES) -> None:
    """Refuse what cannot span samples.

    Raises:
        ConfigError: names the value and the limit.
    """
    for name, values in (("lengths", lengths), ("seeds", seeds)):
        bad = [v for v in values if isinstance(v, bool) or not isinstance(v, int) or v < (name == "lengths")]
        if bad or not values:
            limit = "positive ints" if name == "lengths" else "ints from 0 on"
            raise ConfigError(f"{name} must be {limit}, at least one: got {shown(bad[0] if bad else list(values))}")
        if len(set(values)) < len(values):
            raise ConfigError(f"{name} name a value twice: {shown(list(values))}")
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ConfigError(f"modes are {' and '.join(MODES)}, at least one: got {shown(unknown or list(modes))}")


def check_depths(depths: Sequence[float]) -> None:
    """Refuse what is no place in a document.

    Raises:
        ConfigError: names the value and the limit.
    """
    for depth in depths:
        if isinstance(depth, bool) or not isinstance(depth, int | float) or not 0.0 <= depth <= 1.0:
            raise ConfigError(f"a depth lies from 0 (beginning) to 1 (end): got {shown(depth)}")
    if not depths or len(set(depths)) < len(depths):
        raise ConfigError(f"depths are needed, each once: got {shown(list(depths))}")
