"""The method's options among a harness's model arguments: `pretrained=...,budget=512,num_full_layers=3`."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError, shown

OPTIONS = tuple(SparseKVConfig.option_names())
_LISTS = ("full_layers", "budget")
_NEARLY = 0.8


def split_options(
    arguments: Mapping[str, Any], config: SparseKVConfig | None, known: tuple[str, ...]
) -> tuple[SparseKVConfig, dict[str, Any]]:
    """The method's configuration, and the arguments that are for somebody else.

    On a command line commas part the arguments, so a list is written with semicolons (`full_layers=0;1;7`), and a
    scorer's options as `scorer_options=share:0.5;alpha:2`.

    Args:
        arguments: by name; what names an option of `SparseKVConfig` is taken out.
        config: a finished configuration, in place of options.
        known: names that are somebody else's for certain; others that resemble an option are taken for a slip.
    Raises:
        ConfigError: an option that is wrong, misspelled, or given beside a configuration.
    """
    rest = {name: value for name, value in arguments.items() if name not in OPTIONS}
    for name in rest:
        close = [] if name in known else get_close_matches(name, OPTIONS, n=1, cutoff=_NEARLY)
        if close:
            raise ConfigError(f"unknown option {shown(name)}: did you mean {close[0]!r}?")
    options = {name: _parsed(name, value) for name, value in arguments.items() if name in OPTIONS}
    if config is None:
        return SparseKVConfig.from_dict(options), rest
    if not isinstance(config, SparseKVConfig):
        raise ConfigError(f"sparse_config must be a SparseKVConfig: got {shown(config)}")
    if options:
        raise ConfigError(f"give sparse_config or single options, not both: got {', '.join(options)} beside it")
    return config, rest


def _parsed(name: str, value: Any) -> Any:
    """An option's value, its text form undone; what is no such text is left for SparseKVConfig to judge."""
    if name == "full_layers" and isinstance(value, int):
        return (value,)  # a list of one, as the harness reads it
    if not isinstance(value, str):
        return value
    if name == "scorer_options":
        pairs = [pair.partition(":") for pair in value.split(";") if pair]
        if not all(key and colon for key, colon, _ in pairs):
            raise ConfigError(f"scorer_options are written name:value;name:value: got {shown(value)}")
        return {key.strip(): _literal(text) for key, _, text in pairs}
    if name in _LISTS:
        return [_literal(text) for text in value.split(";") if text]
    return value


def _literal(text: str) -> Any:
    """A number, true, false or null as JSON writes them; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()
