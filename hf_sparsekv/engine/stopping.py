"""When a request ends, and its text as it grows: on the host, one object per request.

A piece of text is released once no coming token can change it: not while its last character may be incomplete, and not
while its end may be the beginning of a stop string. Without stop strings nothing is decoded until somebody asks.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from hf_sparsekv.engine.request import FinishReason
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.errors import ConfigError

_REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, or not yet one."""
_MAX_WINDOW, _KEPT_WINDOW = 16, 12
"""Tokens that are decoded again with each new one, at the most, and how many of them are left when they get more. They
hold several whole characters: a token with text has at least one byte, a character at most four."""
_MAX_INCOMPLETE = 3
"""Replacements that a character's first bytes can look like."""


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """The text of token ids, a str for one list of them."""
        ...


class StopChecker:
    """Follows one request's output tokens until they end it."""

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], tokenizer: Decoder | None = None) -> None:
        """No token yet.

        Args:
            params: the request's options.
            eos_token_ids: of the model.
            tokenizer: None = no text.
        Raises:
            ConfigError: stop strings without a tokenizer.
        """
        if params.stop_strings and tokenizer is None:
            raise ConfigError(
                f"stop_strings={list(params.stop_strings)!r} needs a tokenizer: give one, or use stop_token_ids"
            )
        self._min_tokens, self._max_tokens = params.min_tokens, params.max_tokens
        self._end_ids = frozenset(params.end_token_ids(eos_token_ids))
        self._stops = params.stop_strings
        self._detokenizer = None if tokenizer is None else _Detokenizer(tokenizer)
        self._num_tokens = 0
        self._undecoded: list[int] = []
        self._held = ""
        self._is_cut = False
        self._released: list[str] = []
        self._untold: list[str] = []
        self.finish_reason: FinishReason | None = None
        """Why the request has ended; None = it has not."""

    def append(self, token_id: int) -> FinishReason | None:
        """Take the next output token; the reason if it is the last one.

        Tokens that end the request have no text. No condition but `max_tokens` holds for the first `min_tokens` tokens.
        """
        assert self.finish_reason is None, f"a token after the end: {self.finish_reason}"
        self._num_tokens += 1
        may_stop = self._num_tokens > self._min_tokens
        is_stopped = may_stop and token_id in self._end_ids
        if not is_stopped:
            self._undecoded.append(token_id)
            is_stopped = bool(self._stops) and self._advance(may_stop)
        if is_stopped:
            self.finish(FinishReason.STOP)
        elif self._num_tokens >= self._max_tokens:
            self.finish(FinishReason.LENGTH)
        return self.finish_reason

    def finish(self, reason: FinishReason) -> None:
        """End the request for a reason of the caller's, and release the text that was held back.

        After an ERROR, which may be the tokenizer's, nothing more is decoded.
        """
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        if self._detokenizer is not None and not self._is_cut and reason is not FinishReason.ERROR:
            may_stop = self._num_tokens > self._min_tokens
            is_stopped = self._advance(may_stop) or self._take(self._detokenizer.finish(), may_stop)
            if is_stopped and reason is FinishReason.LENGTH:
                self.finish_reason = FinishReason.STOP
        self._release(self._held)
        self._held = ""

    @property
    def text(self) -> str | None:
        """All text released so far; None without a tokenizer."""
        if self._detokenizer is None:
            return None
        self._catch_up()
        self._released = ["".join(self._released)]  # so that asking at every token joins two pieces, not all
        return self._released[0]

    def new_text(self) -> str | None:
        """The text released since the last call; None without a tokenizer."""
        if self._detokenizer is None:
            return None
        self._catch_up()
        new = "".join(self._untold)
        self._untold.clear()
        return new

    def _catch_up(self) -> None:
        if self.finish_reason is None:
            self._advance(may_stop=False)

    def _advance(self, may_stop: bool) -> bool:
        """Decode what is not decoded yet; whether a stop string has ended the text."""
        if self._detokenizer is None or not self._undecoded:
            return False
        text = self._detokenizer.add(self._undecoded)
        self._undecoded = []
        return self._take(text, may_stop)

    def _take(self, text: str, may_stop: bool) -> bool:
        """Release what no stop string can begin in; whether one is complete, the text then cut before it."""
        window = self._held + text
        if may_stop and text:
            # The first to be complete counts, however the text is cut into tokens.
            found = [(at + len(stop), at) for stop in self._stops if (at := window.find(stop)) >= 0]
            if found:
                self._release(window[: min(found)[1]])
                self._held, self._is_cut = "", True
                return True
        held = _begun(window, self._stops)
        self._release(window[: len(window) - held])
        self._held = window[len(window) - held :]
        return False

    def _release(self, text: str) -> None:
        if text:
            self._released.append(text)
            self._untold.append(text)


class _Detokenizer:
    """Text of a growing list of tokens; only a few of the last ones are decoded again.

    Decoded are `context`, the tokens of the last whole characters, whose text is out and which only keep the decoder
    from treating what follows as the beginning of a text, and `pending`, the tokens since.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []
        self._context_length = 0
        self._num_out = 0
        """Characters of the text of context and pending that are out."""

    def add(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        self._pending += token_ids
        text = self._decode(self._context + self._pending)
        # A decoder with byte fallback may turn a whole run of bytes into replacements until the last one fits.
        out = self._emit(text.rstrip(_REPLACEMENT))
        if not text.endswith(_REPLACEMENT):
            self._start_anew(text)
        elif len(self._context) + len(self._pending) > _MAX_WINDOW:
            out += self._slide(text)
        return out

    def finish(self) -> str:
        """The rest, replacements for incomplete characters included."""
        return self._emit(self._decode(self._context + self._pending))

    def _emit(self, text: str) -> str:
        out = text[self._num_out :]
        self._num_out = max(self._num_out, len(text))
        return out

    def _start_anew(self, text: str) -> None:
        """Make the last whole characters of `text`, which is all out, the context."""
        if len(text) > self._context_length:  # tokens without text, such as special ones, give no context
            for num_tokens in range(1, _KEPT_WINDOW + 1):
                self._context = self._pending[-num_tokens:]
                head = self._decode(self._context)
                if head and _REPLACEMENT not in head:
                    break
            self._context_length = len(head)
        self._pending = []
        self._num_out = self._context_length

    def _slide(self, text: str) -> str:
        """Forget the oldest tokens although the end is no whole character; what can be one no more is emitted.

        UTF-8 finds its characters again after a cut, so the ends of both texts are the same.
        """
        self._context, self._context_length = [], 0
        self._pending = self._pending[-_KEPT_WINDOW:]
        tail = self._decode(self._pending)
        num_held = min(_MAX_INCOMPLETE, len(tail), len(text) - self._num_out)
        out = self._emit(text[: len(text) - num_held])
        self._num_out = len(tail) - num_held
        return out

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _begun(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters are the beginning of a stop string, and not a whole one."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > length and stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
