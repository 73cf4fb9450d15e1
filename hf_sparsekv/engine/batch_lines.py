"""The input of a batch run: one JSON object a line, read one at a time and checked before anything runs.

A line: {"id", one of "prompt" | "token_ids" | "messages", "config", and any field of SamplingParams}. Only the prompt
is required; null counts as absent.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.errors import InputError, SparseKVError
from hf_sparsekv.presets import without_preset_options

MAX_LINE_BYTES = 32 * 2**20
"""A longer line is refused without being read into memory."""
MAX_CONFIGS = 32
"""Different sparse configurations in one run: the engine keeps device memory for each."""

Id = str | int
ChatTemplate = Callable[[list[dict[str, Any]]], list[int]]

_PROMPTS = ("prompt", "token_ids", "messages")
_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_KEYS = ("id", *_PROMPTS, "config", *_SAMPLING)
_ONLY_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the input that needs nothing: its answer is there already."""

    number: int
    """From 1."""
    num_bytes: int
    """In the file, line break included; 0 for what was counted before."""


@dataclass(frozen=True, kw_only=True)
class BadLine(Line):
    """A line that cannot be served."""

    id: Id | None
    """None if it has none that is usable."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Job(Line):
    """A line that asks for something."""

    id: Id
    prompt: str | list[int]
    params: SamplingParams
    config: SparseKVConfig | None
    """None = the engine's."""


class LineReader:
    """Turns lines into jobs.

    Args:
        path: the input.
        done: ids, as strings, that are not to be run again.
        defaults: fields of SamplingParams for lines that do not set them.
        config: what a line's "config" changes.
        chat_template: makes token ids of messages; None = the model has no template.
        serves: whether a line of this number is this reader's; the others are only looked at for their ids.
    Raises:
        InputError: the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        *,
        done: Collection[str] = (),
        defaults: Mapping[str, Any] | None = None,
        config: SparseKVConfig | None = None,
        chat_template: ChatTemplate | None = None,
        serves: Callable[[int], bool] | None = None,
    ) -> None:
        self._path, self._done, self._defaults = path, done, dict(defaults or {})
        self._serves = serves or (lambda number: True)
        self._config, self._chat_template = config or SparseKVConfig(), chat_template
        self._configs: dict[str, SparseKVConfig] = {}
        self._first_lines: dict[str, int] = {}
        try:
            self.total_bytes = path.stat().st_size
            with path.open("rb") as file:
                if serves is not None:
                    self.total_bytes = sum(num_bytes for number, _, num_bytes in _raw_lines(file) if serves(number))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error

    def __iter__(self) -> Iterator[Line]:
        """Every line that is not blank, in order; memory for one line at a time, and for the ids."""
        with self._path.open("rb") as file:
            for number, raw, num_bytes in _raw_lines(file):
                line = self._line(number, raw, num_bytes)
                if self._serves(number):
                    yield line

    def _line(self, number: int, raw: bytes | None, num_bytes: int) -> Line:
        name: Id | None = None
        try:
            if raw is None:
                raise InputError(f"the line has {num_bytes:,} bytes, at most {MAX_LINE_BYTES:,} are read: shorten it")
            values = _json_object(raw)
            name = _id(values.pop("id", None), number, raw)
            first = self._first_lines.setdefault(str(name), number)
            if first != number:
                raise InputError(f"id {name!r} was used in line {first} already: give each line an id of its own")
            if str(name) in self._done or not self._serves(number):
                return Line(number=number, num_bytes=num_bytes)
            return Job(
                number=number,
                num_bytes=num_bytes,
                id=name,
                config=self._sparse_config(values.pop("config", None)),
                prompt=self._prompt(values),
                params=self._params(values),
            )
        except SparseKVError as error:
            return BadLine(number=number, num_bytes=num_bytes, id=name, reason=str(error))

    def _prompt(self, values: dict[str, Any]) -> str | list[int]:
        """Take the prompt out of `values`."""
        given = [name for name in _PROMPTS if name in values]
        if len(given) != 1:
            raise InputError(
                f"give one of prompt, token_ids and messages: the line has {' and '.join(given) or 'none'}"
            )
        name, value = given[0], values.pop(given[0])
        if name == "messages":
            return self._from_messages(value)
        if name == "prompt":
            if not isinstance(value, str):
                raise InputError(f"prompt must be a string: got {_short(value)}")
            if not value.strip():
                raise InputError("the prompt is empty: give at least one token")
            return _encodable("prompt", value)
        if not isinstance(value, list) or any(type(token) is not int for token in value):
            raise InputError(f"token_ids must be a list of ints: got {_short(value)}")
        if not value:
            raise InputError("token_ids is empty: give at least one token")
        return value

    def _from_messages(self, messages: Any) -> list[int]:
        if self._chat_template is None:
            raise InputError("messages need a chat template, which this model does not have: give a prompt")
        if not isinstance(messages, list) or not messages:
            raise InputError(f"messages must be a list of at least one message: got {_short(messages)}")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise InputError(f"a message is an object with a role and a content: got {_short(message)}")
        _encodable("messages", json.dumps(messages, ensure_ascii=False))
        try:
            return self._chat_template(messages)
        except Exception as error:  # a template is a program, and may raise anything
            raise InputError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def _params(self, given: dict[str, Any]) -> SamplingParams:
        values = self._defaults | given
        if given.get("do_sample") is False:
            values = {k: v for k, v in values.items() if k in given or k not in _ONLY_WHEN_SAMPLING}
        _encodable("stop_strings", json.dumps(values.get("stop_strings"), ensure_ascii=False))
        return SamplingParams(**values)

    def _sparse_config(self, changes: Any) -> SparseKVConfig | None:
        if changes is None:
            return None
        if not isinstance(changes, dict):
            raise InputError(f"config must be an object with options of SparseKVConfig: got {_short(changes)}")
        key = json.dumps(changes, sort_keys=True)
        if key not in self._configs:
            if len(self._configs) >= MAX_CONFIGS:
                raise InputError(
                    f"{MAX_CONFIGS} different configs have come before, no more fit one run: split the file"
                )
            self._configs[key] = _changed(self._config, changes)
        return self._configs[key]


def line_numbers(path: Path) -> dict[str, int]:
    """The number of the line that has each id, as a string; lines without a usable one are left out."""
    numbers: dict[str, int] = {}
    with path.open("rb") as file:
        for number, raw, _ in _raw_lines(file):
            if raw is None:
                continue
            with suppress(SparseKVError):
                numbers.setdefault(str(_id(_json_object(raw).get("id"), number, raw)), number)
    return numbers


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None, int]]:
    """Number, content (None if too long) and length of the lines that are not blank."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number, num_bytes, is_too_long = number + 1, len(raw), len(raw) > MAX_LINE_BYTES
        while is_too_long and not raw.endswith(b"\n") and (raw := file.readline(MAX_LINE_BYTES)):
            num_bytes += len(raw)
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if is_too_long or raw.strip():
            yield number, None if is_too_long else raw, num_bytes


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text (byte {error.start} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"a line must be a JSON object: got {_short(values)}")
    for name in values:
        if name not in _KEYS:
            close = get_close_matches(name, _KEYS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"a line has {', '.join(_KEYS)}"
            if name in SparseKVConfig.option_names():
                hint = f'it is one of the method: give "config": {{"{name}": ...}}'
            raise InputError(f"unknown option {_short(name)}: {hint}")
    return {name: value for name, value in values.items() if value is not None}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{_short(twice)} appears twice in one object")
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _id(given: Any, number: int, raw: bytes) -> Id:
    """The line's id; without one, its number and a hash of what it says, so that a changed line is a new one."""
    if given is None:
        return f"line-{number}-{blake2b(raw.strip(), digest_size=6).hexdigest()}"
    if isinstance(given, bool) or not isinstance(given, (str, int)) or given == "":
        raise InputError(f"id must be a string that is not empty, or an int: got {_short(given)}")
    return _encodable("id", given) if isinstance(given, str) else given


def _encodable(name: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{name} holds half a character (a lone surrogate) at place {error.start}") from error
    return text


def _changed(config: SparseKVConfig, changes: dict[str, Any]) -> SparseKVConfig:
    """A configuration with some options changed; what an option replaces goes with it."""
    values = config.to_dict()
    if "preset" in changes:
        values = without_preset_options(values)
    for new, old in (("full_layers", "num_full_layers"), ("num_full_layers", "full_layers")):
        if new in changes:
            values.pop(old, None)
    if "scorer" in changes:
        values.pop("scorer_options", None)
    return SparseKVConfig.from_dict(values | changes)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
