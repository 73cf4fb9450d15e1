"""Scorers by name: what a configuration, a file or the command line calls them."""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from inspect import isabstract
from typing import Any, TypeVar

from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.ops.reference.select import MAX_POOL_WIDTH
from hf_sparsekv.scorers.base import DECODE_MODES, POOLINGS, QUERIES, REDUCTIONS, Pooling, Scorer
from hf_sparsekv.scorers.checks import check_flag, check_fraction, check_gain, is_pool_width
from hf_sparsekv.scorers.expected_attention import ExpectedAttention
from hf_sparsekv.scorers.h2o import H2O
from hf_sparsekv.scorers.hybrid import Hybrid
from hf_sparsekv.scorers.keydiff import KeyDiff
from hf_sparsekv.scorers.keyformer import Keyformer
from hf_sparsekv.scorers.kv_diversity import KVDiversity
from hf_sparsekv.scorers.random import RandomScorer
from hf_sparsekv.scorers.rkv import RKV
from hf_sparsekv.scorers.snapkv import SnapKV
from hf_sparsekv.scorers.streaming_llm import StreamingLLM
from hf_sparsekv.scorers.tova import TOVA

_FLAGS = (
    "is_query_aware",
    "is_probability",
    "uses_row_reduction",
    "uses_group_reduction",
    "ring_freezes_selection",
)

ScorerClass = TypeVar("ScorerClass", bound=type[Scorer])

_registry: dict[str, type[Scorer]] = {
    cls.name: cls
    for cls in (
        SnapKV,
        H2O,
        Keyformer,
        TOVA,
        StreamingLLM,
        KeyDiff,
        KVDiversity,
        ExpectedAttention,
        RKV,
        Hybrid,
        RandomScorer,
    )
}


_PACKAGE_NAMES = frozenset(_registry)


def register_scorer(cls: ScorerClass) -> ScorerClass:
    """Make a scorer known by its `name`, so that configurations that use it can be written to JSON. A decorator.

    Raises:
        ConfigError: not a scorer class, an attribute that is missing or means nothing, or a name that is taken.
    """
    if not (isinstance(cls, type) and issubclass(cls, Scorer)):
        raise ConfigError(f"{cls!r} is not a scorer class: subclass hf_sparsekv.Scorer")
    _check_class(cls)
    name = cls.name
    known = _registry.get(name)
    # Running a notebook cell twice defines the same class again; that is no clash.
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        is_ours = name in _PACKAGE_NAMES
        fix = "choose another" if is_ours else f"choose another, or call hf_sparsekv.unregister_scorer({name!r}) first"
        raise ConfigError(f"the scorer name {name!r} is taken by {known.__name__}: {fix}")
    _registry[name] = cls
    return cls


def unregister_scorer(name: str) -> None:
    """Free the name of a scorer that `register_scorer` has made known. Configurations that have it keep it.

    Raises:
        ConfigError: no such name, or one of the package's own scorers.
    """
    if not isinstance(name, str) or name not in _registry:
        own = ", ".join(sorted(_registry.keys() - _PACKAGE_NAMES)) or "none"
        raise ConfigError(f"no scorer is registered as {shown(name)}: give the name of one of yours ({own})")
    if name in _PACKAGE_NAMES:
        raise ConfigError(f"scorer {name!r} is the package's own and stays: only registered ones can go")
    del _registry[name]


def build_scorer(scorer: str | Scorer, options: Mapping[str, Any]) -> Scorer:
    """The scorer that a name and its options mean; an object is taken as it is.

    Raises:
        ConfigError: an unknown name or option, a value out of range, or something that is no scorer.
    """
    if isinstance(scorer, Scorer):
        if options:
            raise ConfigError(f"scorer_options={dict(options)} has no effect with a scorer object: set them on it")
        _check_class(type(scorer))
        return scorer
    if not isinstance(scorer, str):
        hint = "pass an object, not the class" if isinstance(scorer, type) else "subclass hf_sparsekv.Scorer"
        raise ConfigError(f"scorer must be a name or a Scorer, got {shown(scorer)}: {hint}")
    cls = _registry.get(scorer)
    if cls is None:
        close = get_close_matches(scorer, _registry, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see the list"
        raise ConfigError(f"unknown scorer {shown(scorer)}: {hint} (scorers: {', '.join(sorted(_registry))})")
    known = _option_names(cls)
    for name in options:
        if name not in known:
            choice = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ConfigError(f"unknown option {shown(name)} of scorer {scorer!r}: {choice}")
    try:
        return cls(**options)
    except TypeError as error:  # one is missing, or a check of the class's own stumbled over a value's type
        raise ConfigError(f"scorer {scorer!r} cannot be built of scorer_options={shown(options)}: {error}") from error


def describe_scorer(scorer: Scorer, *, must_be_registered: bool = True) -> dict[str, Any]:
    """JSON-able `{"name": ..., "options": {...}}`, the inverse of `build_scorer`.

    Raises:
        ConfigError: the scorer's class is not registered under its name, but must be.
    """
    if must_be_registered and _registry.get(scorer.name) is not type(scorer):
        raise ConfigError(
            f"scorer {type(scorer).__name__} is not registered, so it has no name that a file could hold: "
            "decorate its class with hf_sparsekv.register_scorer"
        )
    return {"name": scorer.name, "options": asdict(scorer) if is_dataclass(scorer) else {}}


def _option_names(cls: type[Scorer]) -> list[str]:
    return [f.name for f in fields(cls)] if is_dataclass(cls) else []


def _check_class(cls: type[Scorer]) -> None:
    """Refuse class attributes that would only fail, or quietly do something else, once a prompt is read."""
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f'{cls.__name__} has no name: give it a class attribute name = "..."')
    if isabstract(cls):
        raise ConfigError(f"{cls.__name__} has no method score: write one, see hf_sparsekv.Scorer")
    choices = {"queries": QUERIES, "default_row_reduction": REDUCTIONS, "default_decode": DECODE_MODES}
    for attribute, allowed in choices.items():
        value = getattr(cls, attribute)
        if value not in allowed:
            raise ConfigError(f"{cls.__name__}.{attribute} is {value!r}: make it one of {', '.join(allowed)}")
    for attribute in _FLAGS:
        check_flag(f"{cls.__name__}.{attribute}", getattr(cls, attribute))
    pool = cls.default_pooling
    if not isinstance(pool, Pooling) or pool.kind not in POOLINGS or not is_pool_width(pool.width):
        raise ConfigError(
            f"{cls.__name__}.default_pooling is {pool!r}: make it a Pooling of kind {', '.join(POOLINGS)}, "
            f"its width odd, from 1 to {MAX_POOL_WIDTH}"
        )
    check_fraction(f"{cls.__name__}.default_prompt_share", cls.default_prompt_share)
    if cls.decode_decay is not None:
        check_fraction(f"{cls.__name__}.decode_decay", cls.decode_decay)
    if cls.decode_gain is not None:
        check_gain(f"{cls.__name__}.decode_gain", cls.decode_gain)


def scorers_with(option: object) -> list[str]:
    """Names of the registered scorers that have such an option, sorted."""
    return [name for name, cls in sorted(_registry.items()) if option in _option_names(cls)]


def scorer_names() -> list[str]:
    """Names of all registered scorers, sorted."""
    return sorted(_registry)


def scorer_table() -> list[dict[str, Any]]:
    """One row a scorer: name, what it says of itself, its papers, which query rows it reads, whether queries matter."""
    return [
        {
            "name": name,
            "summary": (cls.__doc__ or "").strip().splitlines()[0],
            "papers": re.findall(r"arXiv (\d{4}\.\d{5})", cls.__doc__ or ""),
            "queries": cls.queries,
            "is_query_aware": cls.is_query_aware,
        }
        for name, cls in sorted(_registry.items())
    ]
