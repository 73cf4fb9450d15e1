"""Sampling on the device: logits to tokens, for requests with options of their own in one batch.

`sample` can be captured in a CUDA graph: it never waits for the device, and its shapes depend on nothing but its
arguments' shapes and `SamplerFeatures`. All that differs between requests lies in one tensor, a row for each request,
which `flush` brings up to date before a step.

What a row gives depends on its own logits, options, seed and output index only: not on the other rows, on the row's
number, or on features that others need. Random numbers are a hash of (seed, output index, token id), so a request that
is preempted and starts again draws the same ones.

Shapes: B rows of the batch, V vocabulary.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from hf_sparsekv.engine.sampling_params import MAX_STOPS, SamplingParams

# Columns of the device's int64 rows. Fractions are stored as the bits of an fp64.
_KEYS, _OUTPUT_INDEX, _MIN_TOKENS, _TOP_K, _IS_GREEDY = slice(0, 2), 2, 3, 4, 5
_TEMPERATURE, _TOP_P_TAIL, _MIN_P, _PENALTY = 6, 7, 8, 9
_FIRST_END_ID = 10

_MASK_32 = 0xFFFFFFFF
_GOLDEN = 0x61C88647
"""2**32 less the golden ratio's 32 bits: odd, and below 2**31."""
_MIX_1, _MIX_2 = 0x21F0AAAD, 0xD35A2D97 - 2**32
"""Multipliers of the hash; the second is taken modulo 2**32 into int32's range."""
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24

SameTokens = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class SamplerFeatures:
    """What sampling has to do for the requests of a batch; hashable, part of a CUDA graph's key.

    More than a batch needs changes nothing in its results; less does.
    """

    any_sampling: bool = False
    any_top_k_p: bool = False
    any_min_p: bool = False
    any_penalty: bool = False
    any_min_tokens: bool = False
    num_logprobs: int | None = None
    """Most likely tokens to return with their log-probabilities; 0 = of the sampled token only, None = nothing."""

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> "SamplerFeatures":
        """The features that requests with these options need.

        `num_logprobs` is rounded up to a power of two, so that few different graphs arise.
        """
        params = list(params)
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            any_sampling=any(p.do_sample for p in params),
            any_top_k_p=any(p.top_k is not None or p.top_p not in (None, 1.0) for p in params),
            any_min_p=any(p.min_p not in (None, 0.0) for p in params),
            any_penalty=any(p.repetition_penalty != 1.0 for p in params),
            any_min_tokens=any(p.min_tokens > 0 for p in params),
            num_logprobs=_power_of_two(max(wanted)) if wanted else None,
        )

    @property
    def changes_scores(self) -> bool:
        """Whether the token is anything but the one with the largest logit."""
        return self.any_sampling or self.any_penalty or self.any_min_tokens


@dataclass(frozen=True)
class SampledTokens:
    """What `SamplerState.sample` returns, all on the device."""

    ids: Tensor
    """int64 [B], each in [0, V), whatever the logits are."""
    is_bad: Tensor
    """bool [B]: the row's logits held NaN or +inf, or nothing that may be chosen; its id then means nothing."""
    logprobs: Tensor | None
    """fp32 [B]: log-softmax of the model's own logits, before any option acts, at `ids`."""
    top_ids: Tensor | None
    """int64 [B, n], the most likely first; n = `num_logprobs`, at most V; None without log-probabilities."""
    top_logprobs: Tensor | None
    """fp32 [B, n], of `top_ids`."""


class SamplerState:
    """Options, seeds and output counts of the requests, a row each, on the device."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str,
        eos_token_ids: Sequence[int] = (),
        same_tokens: SameTokens = lambda ids, is_bad: (ids, is_bad),
    ) -> None:
        """All rows clear.

        Args:
            num_rows: requests at once.
            vocab_size: V, the width of the logits.
            device: where the logits are.
            eos_token_ids: of the model; `min_tokens` suppresses them unless a request ignores them.
            same_tokens: makes the ids int64 [B] and bad rows bool [B] of several ranks the same; may be captured.
        """
        self._same_tokens = same_tokens
        self._num_rows, self._vocab_size = num_rows, vocab_size
        self._eos = tuple(eos_token_ids)
        self._num_end_ids = len(self._eos) + MAX_STOPS
        self._device = torch.device(device)
        clear = self._encode(SamplingParams(), 0, 0)
        self._rows = torch.tensor([clear] * num_rows, device=self._device)
        self._row_ids = torch.arange(num_rows, device=self._device)
        self._vocab = torch.arange(vocab_size, device=self._device)
        self._seen: Tensor | None = None
        self._staged: dict[int, list[int]] = {}
        self._penalised: set[int] = set()

    @staticmethod
    def row_bytes(num_eos_ids: int) -> int:
        """Bytes of one row; the mask of `reserve_penalty` is not counted, nor the V ids that all rows share."""
        return 8 * (_FIRST_END_ID + num_eos_ids + MAX_STOPS) + 8

    # --- between steps, on the host -------------------------------------------------------------------------------

    def set_row(
        self, row: int, params: SamplingParams, request_seed: int, prompt_ids: Sequence[int], *, num_outputs: int = 0
    ) -> None:
        """Give a row to a request.

        Args:
            row: in [0, num_rows).
            params: the request's options.
            request_seed: `params.request_seed(request_id)`.
            prompt_ids: its tokens so far: the prompt, and the outputs that `num_outputs` counts.
            num_outputs: outputs that the next `sample` finds done. A preempted request that starts again from its
                prompt needs none: sampling the outputs that it knows counts them.
        """
        assert 0 <= row < self._num_rows, f"row {row} of {self._num_rows}"
        self._staged[row] = self._encode(params, request_seed, num_outputs)
        self._penalised.discard(row)
        if params.repetition_penalty == 1.0:
            return
        self._penalised.add(row)
        seen = self.reserve_penalty()[row]
        seen.zero_()
        # Ids beyond the logits can never be chosen; an embedding may have more rows than the head.
        ids = torch.tensor(sorted({i for i in prompt_ids if i < self._vocab_size}), dtype=torch.int64)
        seen.index_fill_(0, self._upload(ids), True)

    def move_row(self, src: int, dst: int) -> None:
        """Put a request's state into another row, and clear its own."""
        assert src != dst, f"row {src} moves to itself"
        if src in self._staged:
            self._staged[dst] = self._staged[src]
        else:
            self._staged.pop(dst, None)
            self._rows[dst] = self._rows[src]
        if src in self._penalised:
            seen = self.reserve_penalty()
            seen[dst] = seen[src]
            self._penalised.add(dst)
        else:
            self._penalised.discard(dst)
        self.clear_row(src)

    def clear_row(self, row: int) -> None:
        """Make a row greedy and without options, as padding needs it."""
        self.set_row(row, SamplingParams(), 0, ())

    def flush(self) -> None:
        """Upload what changed: one copy of the changed rows, and none when there are none.

        Pinned memory comes from PyTorch's caching host allocator, which hands a block out again only when the copies
        from it are done: nothing waits, and no copy in flight is overwritten.
        """
        if not self._staged:
            return
        changed = self._upload(torch.tensor([[row, *values] for row, values in self._staged.items()]))
        self._rows.index_copy_(0, changed[:, 0], changed[:, 1:])
        self._staged.clear()

    def reserve_penalty(self) -> Tensor:
        """The mask of tokens seen, bool [rows, V]: made for the first request with a repetition penalty.

        To be called before a graph with `any_penalty` is captured: what a capture allocates belongs to its graph.
        """
        if self._seen is None:
            self._seen = torch.zeros(self._num_rows, self._vocab_size, dtype=torch.bool, device=self._device)
        return self._seen

    def _encode(self, params: SamplingParams, seed: int, num_outputs: int) -> list[int]:
        digest = blake2b(seed.to_bytes(8, "little"), digest_size=8).digest()
        end_ids = [i for i in params.end_token_ids(self._eos) if i < self._vocab_size]
        fractions = (params.temperature, 1 - (1.0 if params.top_p is None else params.top_p), params.min_p or 0.0)
        return [
            *struct.unpack("<2I", digest),
            num_outputs,
            params.min_tokens if end_ids else 0,
            min(params.top_k or self._vocab_size, self._vocab_size),
            int(not params.do_sample),
            *(_bits(value) for value in (*fractions, params.repetition_penalty)),
            # Any id may stand in the unused places: suppressing it twice is suppressing it.
            *(end_ids + [end_ids[0] if end_ids else 0] * (self._num_end_ids - len(end_ids))),
        ]

    def _upload(self, values: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)

    # --- in a step, on the device ---------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: slice | Tensor, features: SamplerFeatures) -> SampledTokens:
        """The next token of each row; counts it, and remembers it for the repetition penalty.

        Args:
            logits: fp32, bf16 or fp16 [B, V], contiguous.
            rows: which rows they belong to: a slice of B rows, or int64 [B], distinct.
            features: at least what the rows' options need.
        """
        assert not self._staged, f"flush() first: rows {sorted(self._staged)} have changed"
        row = self._rows[rows]
        if features.changes_scores:
            peak = logits.amax(-1)
            scores = self.scores(logits, rows, features)
            if features.any_sampling:
                noise = gumbel_noise(row[:, _KEYS], row[:, _OUTPUT_INDEX], self._vocab)
                scores = scores + noise.masked_fill_(row[:, _IS_GREEDY, None].bool(), 0.0)
            chosen, ids = scores.max(-1)
            is_bad = ~(peak.isfinite() & chosen.isfinite())
        else:
            peak, ids = logits.max(-1)
            is_bad = ~peak.isfinite()
        ids, is_bad = self._same_tokens(ids, is_bad)
        row_ids = self._row_ids[rows]
        self._rows[:, _OUTPUT_INDEX].index_copy_(0, row_ids, row[:, _OUTPUT_INDEX] + 1)
        if features.any_penalty:
            self._mask().view(-1).scatter_(0, row_ids * self._vocab_size + ids, True)
        if features.num_logprobs is None:
            return SampledTokens(ids, is_bad, None, None, None)
        return SampledTokens(ids, is_bad, *_logprobs(logits, ids, features.num_logprobs))

    def scores(self, logits: Tensor, rows: slice | Tensor, features: SamplerFeatures) -> Tensor:
        """Logits after all options, fp32 [B, V]; -inf may not be chosen. Arguments are those of `sample`.

        Greedy rows take the largest, the others draw from the softmax.
        """
        row = self._rows[rows]
        fractions = row.view(torch.float64)[:, _TEMPERATURE : _PENALTY + 1].float()
        temperature, tail, min_p, penalty = fractions.split(1, dim=-1)
        scores = logits.float()
        if features.any_penalty:
            scores = torch.where(self._mask()[rows], _penalise(scores, penalty), scores)
        if features.any_min_tokens:
            is_early = row[:, _OUTPUT_INDEX, None] < row[:, _MIN_TOKENS, None]
            end_ids = row[:, _FIRST_END_ID:]
            held_back = scores.gather(-1, end_ids).masked_fill(is_early, -torch.inf)
            scores = scores.scatter(-1, end_ids, held_back)
        if not features.any_sampling:
            return scores
        scores = scores / temperature  # greedy rows have 1, and no filter
        if features.any_top_k_p:
            scores = keep_top_k_p(scores, row[:, _TOP_K, None], tail)
        if features.any_min_p:
            scores = keep_min_p(scores, min_p)
        return scores

    def _mask(self) -> Tensor:
        assert self._seen is not None, "reserve_penalty() first: there is no mask of tokens seen"
        return self._seen


def keep_top_k_p(scores: Tensor, top_k: Tensor, tail: Tensor) -> Tensor:
    """Scores with -inf where top-k, and then top-p, leave a token out.

    Top-k keeps all that equals its last one. Top-p leaves out the least likely tokens while they sum to no more than
    `tail`, and always keeps the most likely one: what TopKLogitsWarper and TopPLogitsWarper of transformers do, with
    one sort for both. Which of several equal tokens top-p leaves out is chance there, and the higher ids here.

    Args:
        scores: fp32 [B, V].
        top_k: int64 [B, 1], in [1, V]; V = off.
        tail: fp32 [B, 1]: 1 - top_p; 0 = off.
    """
    vocab_size = scores.shape[-1]
    ascending, from_end = scores.flip(-1).sort(dim=-1, stable=True)  # the higher id first among equals
    last_kept = ascending.gather(-1, vocab_size - top_k)
    ascending = ascending.masked_fill(ascending < last_kept, -torch.inf)
    is_tail = (ascending.softmax(-1).cumsum(-1) <= tail) & (tail > 0)
    is_tail[:, -1].fill_(False)
    out = (scores < last_kept).logical_or_(torch.zeros_like(is_tail).scatter_(-1, vocab_size - 1 - from_end, is_tail))
    return scores.masked_fill(out, -torch.inf)


def keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Scores fp32 [B, V] with -inf where a probability is below `min_p` (fp32 [B, 1]) of the row's largest.

    Source: min-p sampling (2407.01082).
    """
    probabilities = scores.softmax(-1)
    return scores.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)


def gumbel_noise(keys: Tensor, output_index: Tensor, vocab: Tensor) -> Tensor:
    """Gumbel noise fp32 [B, V]: the largest of `logits + noise` is a draw from softmax(logits).

    Entry [b, v] is a function of `keys[b]`, `output_index[b]` and `vocab[v]` alone. Integers stay below 2**63 and are
    cut to 32 bits, so that nothing overflows and every device gets the same ones; only the two logarithms may differ
    in the last bit.

    Args:
        keys: int64 [B, 2], 32 random bits each, of the request.
        output_index: int64 [B], at least 0, below 2**31.
        vocab: int64 [V], token ids.
    Source: the Gumbel-max trick; the hash is the two-round xorshift-multiply with the least bias that the hash
        prospector (C. Wellons) lists. One pair of 32-bit keys a row, a factor and a mask, keeps any two rows from
        having the same noise in another order.
    """
    step_keys = _mix((keys + (output_index[:, None] & 0x7FFFFFFF) * _GOLDEN).bitwise_and_(_MASK_32))
    factor, mask = (step_keys[:, :1] & 0x7FFFFFFF) | 1, step_keys[:, 1:]
    bits = _mix((vocab * factor).bitwise_xor_(mask).bitwise_and_(_MASK_32))
    # Exponential noise wins by being small, so its small values get the fine steps of fp32: 2**-33 is the least.
    uniform = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(bits: Tensor) -> Tensor:
    """A bijection of 32-bit numbers held in int64, in place."""
    bits.bitwise_xor_(bits >> 16).mul_(_MIX_1).bitwise_and_(_MASK_32)
    bits.bitwise_xor_(bits >> 15).mul_(_MIX_2).bitwise_and_(_MASK_32)
    return bits.bitwise_xor_(bits >> 15)


def _penalise(scores: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def _logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """(fp32 [B] at `ids`, int64 [B, n] most likely, fp32 [B, n] of these)."""
    scores = logits.float()
    total = scores.logsumexp(-1, keepdim=True)
    top, top_ids = scores.topk(min(num_top, scores.shape[-1]), dim=-1)
    return (scores.gather(-1, ids[:, None]) - total)[:, 0], top_ids, top - total


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length() if number else 0


def _bits(value: float) -> int:
    """The bits of an fp64, as an int64."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
