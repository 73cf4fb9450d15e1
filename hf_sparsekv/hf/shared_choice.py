"""`model.generate` on several ranks that share a model: rank 0's prompt, logits and random numbers hold for all.

Every rank runs the same loop and chooses for itself, so what it chooses by must be the same to the last bit: greedy
search, sampling and beams then agree, whatever the seeds of the ranks were.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_sparsekv.hf.sharding import check_tp_size, tp_mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LeaderScores(LogitsProcessor):
    """Replaces the scores of every rank by rank 0's."""

    def __init__(self, group: "ProcessGroup") -> None:
        """For the ranks of one group."""
        self._group = group

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """fp32 [B, V], one broadcast."""
        scores = scores.contiguous()
        dist.broadcast(scores, group=self._group, group_src=0)
        return scores


@contextmanager
def shared_choice(
    model: PreTrainedModel, batch: dict[str, Tensor], options: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """What to give to `model.generate` so that all ranks of a model go the same way; nothing changes for a whole one.

    Args:
        model: whole, or this rank's part.
        batch: tensors, on the model's device.
        options: of `model.generate`.
    Raises:
        ConfigError: the model's KV heads do not divide among the ranks.
    """
    mesh = tp_mesh(model)
    if mesh is None:
        yield batch, dict(options)
        return
    check_tp_size(model.config, mesh.size())
    group, device = mesh.get_group(), model.device
    processors = LogitsProcessorList([*(options.get("logits_processor") or ()), LeaderScores(group)])
    parts: list[Any] = [{name: t.cpu() for name, t in batch.items()}, torch.get_rng_state()]
    parts.append(torch.cuda.get_rng_state(device) if device.type == "cuda" else None)
    dist.broadcast_object_list(parts, group=group, group_src=0, device=device)
    shared = {name: t.to(device) for name, t in parts[0].items()}
    # Rank 0's random state moves on as it would alone; that of the others is as it was.
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=mesh.get_local_rank() != 0):
        torch.set_rng_state(parts[1])
        if parts[2] is not None:
            torch.cuda.set_rng_state(parts[2], device)
        yield shared, {**options, "logits_processor": processors}
