"""SamplingParams: how one request's tokens are chosen and when it ends, checked once and then frozen.

No torch here: the scheduler and the command line read these too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, Self

from hf_sparsekv.errors import ConfigError, which_was_meant

MAX_LOGPROBS = 128
MAX_STOPS = 64
MAX_SEED = 2**63 - 1
MIN_TEMPERATURE = 1e-4
"""Below it the division leaves the range of fp32 for ordinary logits."""
PENALTY_RANGE = (0.01, 100.0)
GENERATE_TOP_K = 50
"""What `model.generate` takes when it samples and its configuration leaves top_k open."""

_NO_EFFECT_WHEN_GREEDY = {"temperature": (1.0,), "top_k": (None,), "top_p": (None, 1.0), "min_p": (None, 0.0)}

_TRANSLATED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop_strings",
}
"""GenerationConfig options that are taken over whenever they are set; `_sampling` takes those that draw."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
}
"""Values that ask for nothing, besides None, False and empty collections, which never do."""

_FALSE_ASKS = ("do_sample", "use_cache")
"""Options in which False is a wish of its own; in all others it is like None."""

_WITHOUT_EFFECT = frozenset(
    {
        "transformers_version",
        # Ids that matter to padded batches and to encoders only.
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        # They shape beams or assisted decoding, which raise by their own names.
        "early_stopping",
        "length_penalty",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "max_matching_ngram_size",
        # The engine always returns objects, and its log-probabilities are always normalised.
        "return_dict_in_generate",
        "renormalize_logits",
    }
)

_INSTEAD = {
    "max_length": "it counts the prompt too: set max_new_tokens",
    "min_length": "it counts the prompt too: set min_new_tokens",
    "num_return_sequences": "add the prompt several times, each with a seed of its own",
    "use_cache": "the engine always has a cache: leave it out",
    "cache_implementation": "the engine has a cache of its own: leave it out",
    "prefill_chunk_size": "set EngineConfig.prefill_chunk_tokens",
    "output_scores": "ask for logprobs",
    "output_logits": "ask for logprobs",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and what ends a request. Greedy unless `do_sample`.

    The order in which these act is that of `model.generate`: repetition penalty, min_tokens, temperature, top_k, top_p,
    min_p.

    Raises:
        ConfigError: an option that is impossible, contradictory or without effect.
    """

    max_tokens: int = 256
    """Output tokens at the most, a final end-of-sequence token included."""
    min_tokens: int = 0
    """Output tokens before anything but `max_tokens` may end the request."""
    do_sample: bool = False
    """Draw from the distribution; False = take the most likely token, the lowest id among equals."""
    temperature: float = 1.0
    """Divides the logits."""
    top_k: int | None = None
    """Keep this many most likely tokens, and what equals the last of them."""
    top_p: float | None = None
    """Keep the fewest tokens whose probabilities sum to this, in [0, 1]."""
    min_p: float | None = None
    """Keep tokens of at least this fraction of the largest probability, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output (CTRL, 1909.05858)."""
    seed: int | None = None
    """Of the random numbers; None = derived from the request's id."""
    stop_token_ids: tuple[int, ...] = ()
    """End the request besides the model's end-of-sequence tokens."""
    stop_strings: tuple[str, ...] = ()
    """End the request when its text contains one; the text is cut before it."""
    ignore_eos: bool = False
    """Let the model's end-of-sequence tokens pass."""
    logprobs: int | None = None
    """Log-probabilities of the output: of the token itself and of this many most likely ones; None = none at all."""

    def __new__(cls, *_: object, **options: object) -> Self:
        """Refuse unknown names with a hint: `max_new_tokens` is what the other API calls it."""
        _check_names(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Normalise sequences and check every option."""
        set_ = object.__setattr__
        set_(self, "stop_strings", _strings(self.stop_strings))
        set_(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}: "
                "lower the one or raise the other"
            )
        for name in ("do_sample", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False: got {getattr(self, name)!r}")
        self._check_distribution()
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def _check_distribution(self) -> None:
        hint = "; for the most likely token every time, set do_sample=False" if self.temperature == 0 else ""
        _check_float("temperature", self.temperature, MIN_TEMPERATURE, math.inf, hint)
        _check_float("repetition_penalty", self.repetition_penalty, *PENALTY_RANGE)
        if self.top_k is not None:
            _check_int("top_k", self.top_k, 1, hint="; None keeps every token")
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                _check_float(name, getattr(self, name), 0.0, 1.0)
        if self.do_sample:
            return
        for name, neutral in _NO_EFFECT_WHEN_GREEDY.items():
            if getattr(self, name) not in neutral:
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no effect with do_sample=False: "
                    "set do_sample=True or leave it out"
                )

    def request_seed(self, request_id: str) -> int:
        """The seed in force, in [0, 2**63): the given one, or a hash of the id that every run and machine shares."""
        if self.seed is not None:
            return self.seed
        digest = blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little") & MAX_SEED

    def end_token_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that end the request, in a model with these end-of-sequence tokens; none of them twice."""
        eos = () if self.ignore_eos else tuple(eos_token_ids)
        return tuple(dict.fromkeys((*eos, *self.stop_token_ids)))

    @classmethod
    def from_generation_config(cls, config: Any, eos_token_ids: Sequence[int], **overrides: Any) -> "SamplingParams":
        """What a `transformers.GenerationConfig` asks for.

        Options of sampling are left out, as `generate` does, when `do_sample` is explicitly False. Without
        `max_new_tokens` the default of `max_tokens` holds, not the 20 of `generate`.

        Args:
            config: a GenerationConfig, or any object with its attributes.
            eos_token_ids: the engine's end-of-sequence tokens; a different set in `config` takes their place.
            overrides: fields of this class that count in place of what `config` says.
        Raises:
            ConfigError: an option that the engine cannot honour, by name; see also the class.
        """
        _check_names(overrides)
        options = {name: value for name, value in vars(config).items() if not name.startswith("_")}
        options = {name: value for name, value in options.items() if not _asks_nothing(name, value)}
        values = {ours: options.pop(theirs) for theirs, ours in _TRANSLATED.items() if theirs in options}
        values |= _sampling(options, overrides)
        values |= _end_tokens(options.pop("eos_token_id", None), eos_token_ids)
        # Where both are set, `generate` too lets the count of new tokens decide.
        for total, new in (("max_length", "max_tokens"), ("min_length", "min_tokens")):
            if new in values or new in overrides:
                options.pop(total, None)
        for name, value in options.items():
            instead = _INSTEAD.get(name, f"leave it out, or set config.{name} = None")
            raise ConfigError(f"{name}={value!r} is not supported by the engine: {instead}")
        return cls(**(values | overrides))


def _check_names(options: Mapping[str, object]) -> None:
    known = [f.name for f in fields(SamplingParams)]
    for name in options:
        if name not in known:
            hint = f"did you mean {_TRANSLATED[name]!r}?" if name in _TRANSLATED else which_was_meant(name, known)
            raise ConfigError(f"unknown option {name!r}: {hint}")


def _asks_nothing(name: str, value: object) -> bool:
    if value is None or name in _WITHOUT_EFFECT:
        return True
    if value is False:
        return name not in _FALSE_ASKS
    return value in ([], (), {}) or value in _NEUTRAL.get(name, ())


def _sampling(options: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Take the options of sampling out of `options`."""
    names = (*_NO_EFFECT_WHEN_GREEDY, "do_sample")
    given = {name: options.pop(name) for name in names if name in options}
    do_sample = overrides.get("do_sample", given.get("do_sample"))
    if do_sample is None:
        for name, value in given.items():
            if value not in _NO_EFFECT_WHEN_GREEDY[name] and not (name == "top_k" and value in (0, GENERATE_TOP_K)):
                raise ConfigError(
                    f"{name}={value!r} is set, but not do_sample: "
                    "set it to True to sample, to False for greedy decoding"
                )
    if not do_sample:
        return {"do_sample": False}
    top_k = given.get("top_k", GENERATE_TOP_K)
    return given | {"do_sample": do_sample, "top_k": None if top_k == 0 else top_k}


def _end_tokens(config_eos: Any, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    if config_eos is None:
        return {}
    if hasattr(config_eos, "tolist"):  # a tensor or an array, of one id or several
        config_eos = config_eos.tolist()
    wanted = list(config_eos) if isinstance(config_eos, (list, tuple)) else [config_eos]
    for token in wanted:
        _check_int("eos_token_id", token, 0, hint="; for none at all, set SamplingParams.ignore_eos")
    if set(eos_token_ids) <= set(wanted):
        return {"stop_token_ids": tuple(i for i in wanted if i not in eos_token_ids)}
    return {"ignore_eos": True, "stop_token_ids": tuple(wanted)}


def _strings(values: object) -> tuple[str, ...]:
    values = (values,) if isinstance(values, str) else values
    if not isinstance(values, Sequence) or not all(isinstance(v, str) for v in values):
        raise ConfigError(f"stop_strings must be strings: got {values!r}")
    if not all(values):
        raise ConfigError(f"stop_strings holds an empty string, which every text contains: got {list(values)!r}")
    return _at_most("stop_strings", values)


def _token_ids(values: object) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigError(f"stop_token_ids must be a list of token ids: got {values!r}")
    for value in values:
        _check_int("a stop token id", value, 0)
    return _at_most("stop_token_ids", values)


def _at_most(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if len(values) > MAX_STOPS:
        raise ConfigError(f"{name} has {len(values)} entries, at most {MAX_STOPS} are possible: leave some out")
    return tuple(dict.fromkeys(values))


def _check_int(name: str, value: object, low: int, high: float = math.inf, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an int: got {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be {_between(low, high)}: got {value}{hint}")


def _check_float(name: str, value: object, low: float, high: float, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number: got {value!r}")
    if not low <= value <= high or math.isinf(value):  # NaN is in no range
        raise ConfigError(f"{name} must be {_between(low, high)}: got {value}{hint}")


def _between(low: float, high: float) -> str:
    return f"at least {low}, and finite" if math.isinf(high) else f"in [{low}, {high}]"
