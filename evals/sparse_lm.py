"""SparseKVLM: an lm-eval model whose scores are read from a sparse cache.

The harness scores log-likelihoods without any cache, so a sparse one would never take part; here it does:

- **loglikelihood** (multiple choice included): the context is read and compressed, and its continuations are scored
  against what was kept. Requests with the same context share one prefill. The last `held_back_tokens` of a context are
  read after the compression: with 0, a continuation's first token is scored by the prefill's own logits, which no
  eviction has touched, and an answer of one token (A, B, C, D) would be the dense model's under another name.
- **loglikelihood_rolling**: each of the harness's windows is read in chunks of `rolling_chunk_tokens`, with a selection
  after each. A chunk's tokens attend to what was kept of the window before it, and to their own chunk; those of the
  first chunk are scored as by the dense model.
- **generate_until**: through `hf_sparsekv.generate`.

Requests that are too short for any eviction are scored by the harness's own code: they are the dense model's.
"""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor
from tqdm import tqdm

import hf_sparsekv as skv
from evals.ledger import EvictionError, RequestRecord, require_sparse, summary
from evals.model_args import split_options
from evals.scoring import Context, Footprint, Score, SparseScorer, Tokens, evicts, split_context
from hf_sparsekv.errors import ConfigError, InputError, shown
from hf_sparsekv.models_store import resolve_model
from hf_sparsekv.scorers.checks import check_flag, check_int

_log = logging.getLogger(__name__)
Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""The harness's: texts, context ids, continuation ids."""
ROLLING_CHUNK_TOKENS = 256


@register_model("sparsekv")
class SparseKVLM(HFLM):  # type: ignore[misc]
    """`HFLM` with a sparse cache; the module's docstring says how each request type is scored."""

    def __init__(
        self,
        pretrained: Any,
        *,
        sparse_config: skv.SparseKVConfig | None = None,
        held_back_tokens: int = 1,
        rolling_chunk_tokens: int = ROLLING_CHUNK_TOKENS,
        require_eviction: bool = True,
        **arguments: Any,
    ) -> None:
        """Load a model, or take a loaded one.

        Args:
            pretrained: as for HFLM; the built-in model's alias is known too.
            sparse_config: the method's options in one; or give them one by one among the arguments.
            held_back_tokens: last tokens of a context that are read after the compression.
            rolling_chunk_tokens: tokens between two selections of loglikelihood_rolling.
            require_eviction: raise where no score of a call depended on a compressed cache; else that is logged.
            arguments: options of SparseKVConfig (`budget=512`), and whatever HFLM takes.
        Raises:
            ConfigError: an option that is wrong or does not go with a sparse cache.
            ModelError: the model has a feature that a sparse cache does not support.
        """
        check_int("held_back_tokens", held_back_tokens, at_least=0)
        check_int("rolling_chunk_tokens", rolling_chunk_tokens, at_least=1)
        check_flag("require_eviction", require_eviction)
        known = tuple(inspect.signature(HFLM.__init__).parameters)
        self.sparse_config, arguments = split_options(arguments, sparse_config, known)
        batch_size = str(arguments.get("batch_size", 1))
        if not batch_size.isdecimal() or int(batch_size) < 1:
            raise ConfigError(f"batch_size must be a positive int, no 'auto': got {shown(arguments['batch_size'])}")
        if arguments.get("mixed_precision_dtype") is not None:
            raise ConfigError(
                "mixed_precision_dtype does not go with a sparse cache: load the model in a dtype, dtype=..."
            )
        if isinstance(pretrained, str):
            pretrained = resolve_model(pretrained, allow_fetch=True).path_or_id
        super().__init__(pretrained, **arguments)
        if self.backend != "causal" or self.world_size > 1:
            raise ConfigError("a sparse cache is evaluated with a causal model and in one process")
        self.held_back_tokens, self.rolling_chunk_tokens = held_back_tokens, rolling_chunk_tokens
        self.require_eviction = require_eviction
        self.records: list[RequestRecord] = []
        """Of every request so far, in the order in which the harness asked."""
        self._scorer = SparseScorer(
            self.model, self.sparse_config, batch_size=self.batch_size, softmax_dtype=self.softmax_dtype
        )
        self._batch_texts: list[str] = []
        self._generated: dict[str, list[RequestRecord]] = {}

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results: the model, the method, and what it did."""
        info: dict[str, Any] = super().get_model_info()
        return info | {
            "sparsekv": {
                "config": self.sparse_config.to_dict(must_be_registered=False),
                "in_force": self.sparse_config.effective(),
                "held_back_tokens": self.held_back_tokens,
                "rolling_chunk_tokens": self.rolling_chunk_tokens,
                "eviction": summary(self.records),
            }
        }

    # --- loglikelihood --------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See HFLM; raises EvictionError where `require_eviction` says so."""
        start = len(self.records)
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        self._name_records(start, requests)
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        pairs = [self._truncated(context, continuation) for _, context, continuation in requests]
        groups: dict[Tokens, list[int]] = {}
        for i, (context, _) in enumerate(pairs):
            groups.setdefault(context, []).append(i)
        evicting = [
            context
            for context in sorted(groups, key=lambda context: -len(context))
            if evicts(self._scorer.plan, len(split_context(context, self.held_back_tokens)[0]))
        ]
        records = [
            RequestRecord(kind="loglikelihood", num_context_tokens=len(context), is_sparse=False)
            for context, _ in pairs
        ]
        for context in evicting:
            has_tail = bool(split_context(context, self.held_back_tokens)[1])
            for i in groups[context]:
                is_sparse = has_tail or len(pairs[i][1]) > 1
                records[i] = replace(records[i], is_sparse=is_sparse, num_evicted=1)  # at least; measured below
        if any(texts is not None for texts, _, _ in requests):  # else windows, which are judged text by text
            self._require_sparse(records)  # before any work: which contexts evict is known

        answers: dict[int, tuple[float, bool]] = {}
        bar = tqdm(
            total=sum(len(groups[c]) for c in evicting), disable=disable_tqdm, desc="Scoring with a sparse cache"
        )
        for start in range(0, len(evicting), self.batch_size):
            some = evicting[start : start + self.batch_size]
            for i, score, footprint in self._score(some, groups, pairs):
                records[i] = _with_footprint(records[i], footprint)
                answers[i] = (score.log_likelihood, score.is_greedy)
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
                bar.update()
        bar.close()
        rest = [i for i in range(len(requests)) if i not in answers]
        if rest:
            dense = super()._loglikelihood_tokens([requests[i] for i in rest], disable_tqdm, override_bs)
            answers |= dict(zip(rest, dense, strict=True))
        self.records += records
        return [answers[i] for i in range(len(requests))]

    def _score(
        self, some: list[Tokens], groups: dict[Tokens, list[int]], pairs: list[tuple[Tokens, Tokens]]
    ) -> list[tuple[int, Score, Footprint]]:
        """The requests of some contexts, by index, with their scores."""
        contexts = [
            Context(*split_context(context, self.held_back_tokens), tuple(pairs[i][1] for i in groups[context]))
            for context in some
        ]
        results = zip(some, self._scorer.score(contexts), strict=True)
        return [
            (i, score, result.footprint)
            for context, result in results
            for i, score in zip(groups[context], result.scores, strict=True)
        ]

    def _truncated(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[Tokens, Tokens]:
        """What of a request fits the model; as in HFLM the context loses its beginning.

        Raises:
            InputError: nothing to score, nothing before it, or a continuation that fills the model alone.
        """
        if not context or not continuation:
            missing = "continuation" if context else "context"
            raise InputError(f"a request whose {missing} has no token cannot be scored: check the task's texts")
        if len(continuation) > self.max_length:
            raise InputError(
                f"a continuation has {len(continuation)} tokens, the model takes {self.max_length}: cut it in the task"
            )
        return tuple(context[-(self.max_length + 1 - len(continuation)) :]), tuple(continuation)

    # --- loglikelihood_rolling ------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, read in chunks; raises EvictionError where `require_eviction` says so."""
        texts = [self._windows(request.args[0]) for request in requests]
        records = [
            RequestRecord(
                kind="loglikelihood_rolling",
                num_context_tokens=sum(len(continuation) for _, _, continuation in windows),
                is_sparse=any(self._is_sparse_window(window) for window in windows),
            )
            for windows in texts
        ]
        self._require_sparse(records)
        start = len(self.records)
        if not any(record.is_sparse for record in records):
            answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
            del self.records[start:]  # of single windows
        else:
            answers = []
            for i, request in enumerate(tqdm(requests, disable=disable_tqdm, desc="Reading with a sparse cache")):
                answer, footprint = self._score_text(texts[i])
                if footprint is not None:
                    records[i] = _with_footprint(records[i], footprint)
                answers.append(answer)
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        self.records += records
        self._name_records(start, requests)
        return answers

    def _windows(self, text: str) -> list[Request]:
        windows = utils.get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        return [(None, *utils.make_disjoint_window(window)) for window in windows]

    def _is_sparse_window(self, window: Request) -> bool:
        """Whether something is evicted before the last chunk is read."""
        num_tokens, chunk = len(_inputs(window)), self.rolling_chunk_tokens
        return any(evicts(self._scorer.plan, end) for end in range(chunk, num_tokens, chunk))

    def _score_text(self, windows: list[Request]) -> tuple[float, Footprint | None]:
        """Sum over the windows of a text, and the footprint of the one that was compressed most."""
        sparse = [window for window in windows if self._is_sparse_window(window)]
        dense = [window for window in windows if not self._is_sparse_window(window)]
        answers = super()._loglikelihood_tokens(dense, disable_tqdm=True) if dense else []
        total, footprints = sum(answer for answer, _ in answers), []
        for _, context, continuation in sparse:
            tokens, num_scored = context + continuation, len(continuation)
            scored = self._scorer.score_stream(tokens, num_scored, self.rolling_chunk_tokens)
            total += scored.log_likelihood
            footprints.append(scored.footprint)
        return total, max(footprints, key=lambda footprint: footprint.num_evicted, default=None)

    # --- generate_until -------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """See HFLM; raises EvictionError where `require_eviction` says so."""
        self._generated = {}
        texts: list[str] = super().generate_until(requests, disable_tqdm)
        start = len(self.records)
        # Requests with the same context and different settings may swap records: they evicted the same prompt.
        self.records += [self._generated[request.args[0]].pop(0) for request in requests]
        self._require_sparse(self.records[start:])
        self._name_records(start, requests)
        return texts

    def tok_batch_encode(self, strings: list[str], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See HFLM; a text without any token becomes the prefix token."""
        self._batch_texts = list(strings)
        ids, mask = super().tok_batch_encode(strings, *args, **kwargs)
        if ids.shape[1] == 0:
            ids = mask = torch.zeros(len(strings), 1, dtype=torch.long)
        ids, mask = ids.long(), mask.long()
        is_empty = mask.sum(dim=-1) == 0
        last = torch.arange(ids.shape[1]) == ids.shape[1] - 1
        fill = is_empty[:, None] & last
        return ids.masked_fill(fill, self.prefix_token_id), mask.masked_fill(fill, 1)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        temperature = options.pop("temperature", 0.0)
        if temperature == 0.0 and options.get("do_sample") is None:
            options["do_sample"] = False
        if options.get("do_sample") or temperature != 0.0:
            options["temperature"] = temperature
        stopping = stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0])
        output = skv.generate(
            self.model,
            context,
            self.sparse_config,
            max_new_tokens=max_length - context.shape[1],
            stopping_criteria=stopping,
            pad_token_id=self.tokenizer.pad_token_id,
            **options,
        )
        self._record_generated(options.get("attention_mask", torch.ones_like(context)), output)
        return output.sequences

    def _record_generated(self, mask: Tensor, output: skv.GenerateOutput) -> None:
        report, num_texts = output.report, len(self._batch_texts)
        num_beams = len(report["tokens_seen"]) // num_texts
        for i, text in enumerate(self._batch_texts):
            row = i * num_beams
            seen = report["tokens_seen"][row]
            num_evicted = sum(seen - layer["stored"][row] for layer in report["layers"])
            record = RequestRecord(
                kind="generate_until",
                num_context_tokens=int(mask[i].sum()),
                is_sparse=num_evicted > 0 and output.new_tokens.shape[1] > 1,
                num_evicted=num_evicted,
                cache_bytes=report["cache_bytes"] // num_texts,
                dense_bytes=report["dense_bytes"] // num_texts,
            )
            self._generated.setdefault(text, []).append(record)

    # --- the books ------------------------------------------------------------------------------------------------

    def _require_sparse(self, records: list[RequestRecord]) -> None:
        try:
            require_sparse(records, budget=self.sparse_config.budget)
        except EvictionError as error:
            if self.require_eviction:
                raise
            _log.warning("%s", error)

    def _name_records(self, start: int, requests: list[Any]) -> None:
        """Note which task and document the records from `start` on belong to."""
        self.records[start:] = [
            replace(record, task=getattr(request, "task_name", None), doc_id=getattr(request, "doc_id", None))
            for record, request in zip(self.records[start:], requests, strict=True)
        ]


def _inputs(window: Request) -> list[int]:
    """What the model reads to score a window."""
    return (window[1] + window[2])[:-1]


def _with_footprint(record: RequestRecord, footprint: Footprint) -> RequestRecord:
    return replace(
        record,
        num_evicted=footprint.num_evicted,
        cache_bytes=footprint.cache_bytes,
        dense_bytes=footprint.dense_bytes,
    )
