"""How many bytes the cache may have: measured on the device before anything is reserved."""

import torch
from torch import Tensor

from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.runner import Runner
from hf_sparsekv.errors import ConfigError

CPU_DEFAULT_BYTES = 2**30
"""Cache of an engine on a CPU that was given no size."""


class _NoCache:
    """A forward pass without any cache: attention of the right cost in memory, over the new tokens alone."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Of all tokens, as one sequence."""
        query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=q.shape[1] > k.shape[1]
        )
        return output[0].transpose(0, 1).contiguous()


def kv_bytes_available(runner: Runner, config: EngineConfig) -> int:
    """Bytes for blocks and bookkeeping: what was asked for, or what a full batch of prompts leaves on the GPU.

    Raises:
        ConfigError: the model's own needs leave nothing.
    """
    if config.kv_memory_bytes is not None:
        return config.kv_memory_bytes
    device = runner.device
    if device.type != "cuda":
        return CPU_DEFAULT_BYTES
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    tokens = torch.zeros(config.max_batch_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(config.max_batch_tokens, device=device)
    index = torch.arange(min(config.max_num_seqs, config.max_batch_tokens), device=device)
    with torch.inference_mode():  # as the runner does: layers are compiled for one mode
        runner.forward(_NoCache(), tokens, positions, index)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    available = int(config.memory_fraction * total) - peak - others
    if available <= 0:
        raise ConfigError(
            f"memory_fraction={config.memory_fraction} of {total:,} bytes leaves nothing for the cache: a full "
            f"batch of {config.max_batch_tokens} tokens takes {peak:,}, other processes {others:,}; lower "
            "max_batch_tokens"
        )
    return available
