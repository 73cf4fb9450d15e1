"""What a sparse cache really did during an evaluation: one record a request, and the sum of them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_sparsekv.errors import SparseKVError


class EvictionError(SparseKVError, RuntimeError):
    """No score of an evaluation depended on a compressed cache: they would be a dense model's under another name."""


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """What became of one request."""

    kind: str
    """The harness's request type: "loglikelihood", "loglikelihood_rolling" or "generate_until"."""
    num_context_tokens: int
    """Tokens of the context after truncation; of a whole text for "loglikelihood_rolling"."""
    is_sparse: bool
    """Whether at least one scored or generated token was computed from a cache that had evicted something."""
    num_evicted: int = 0
    """Tokens that are not stored any more, summed over the layers."""
    cache_bytes: int | None = None
    """Measured when the context had been compressed (generation: at its end); None where no sparse cache was needed."""
    dense_bytes: int | None = None
    """What a dense cache would have held at that moment."""
    task: str | None = None
    """The harness's task, and of it the document; None for requests that came without."""
    doc_id: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def summary(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Shares and means over requests, JSON-able.

    The bytes are means over the requests that had a sparse cache; None when there were none.
    """
    cached = [record for record in records if record.cache_bytes is not None]
    cache_bytes = _mean(record.cache_bytes for record in cached)
    dense_bytes = _mean(record.dense_bytes for record in cached)
    return {
        "num_requests": len(records),
        "num_evicting": sum(record.num_evicted > 0 for record in records),
        "num_sparse": sum(record.is_sparse for record in records),
        "eviction_share": _mean(record.num_evicted > 0 for record in records),
        "sparse_share": _mean(record.is_sparse for record in records),
        "mean_context_tokens": _mean(record.num_context_tokens for record in records),
        "mean_cache_bytes": cache_bytes,
        "mean_dense_bytes": dense_bytes,
        "compression": dense_bytes / cache_bytes if cache_bytes and dense_bytes else None,
    }


def summary_by_task(records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """`summary` of each task's requests."""
    tasks: dict[str, list[RequestRecord]] = {}
    for record in records:
        tasks.setdefault(record.task or "", []).append(record)
    return {task: summary(of_task) for task, of_task in tasks.items()}


def require_sparse(records: Sequence[RequestRecord], *, budget: object) -> None:
    """Refuse requests none of which a compressed cache had a part in.

    Raises:
        EvictionError: there are requests, and all of them are a dense model's.
    """
    if not records or any(record.is_sparse for record in records):
        return
    longest = max(record.num_context_tokens for record in records)
    if some := [record for record in records if record.num_evicted]:
        cure = (
            "tokens were evicted, but every continuation is one token, which the prefill's own logits score: give "
            "held_back_tokens=1 or more, so that the end of the context is read from the compressed cache"
            if some[0].kind == "loglikelihood"
            else "tokens were evicted, but only one is generated, from the prefill's own logits: ask for more tokens"
        )
    else:
        cure = (
            f"nothing was evicted, the longest context has {longest} tokens: lower the budget, use longer prompts "
            "(more few-shot examples)"
        )
    raise EvictionError(
        f"no score of {len(records)} requests depended on a compressed cache with budget={budget}, so they would be "
        f"the dense model's: {cure}, or give require_eviction=False for the dense scores"
    )


def _mean(values: Iterable[Any]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None
