"""EngineConfig: what an engine may use, checked once."""

from dataclasses import dataclass, fields
from typing import Self

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError, which_was_meant
from hf_sparsekv.ops.prefill_choice import check_known

_AT_LEAST_ONE = ("block_size", "max_num_seqs", "max_batch_tokens", "prefill_target_tokens")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Memory, batch sizes and compilation of an `Engine`."""

    kv_memory_bytes: int | None = None
    """Bytes for all keys, values and bookkeeping; None = `memory_fraction` of the GPU less what the model needs, or
    1 GiB on a CPU."""
    memory_fraction: float = 0.9
    """Part of the GPU's memory that the engine may fill, model included; used when `kv_memory_bytes` is None."""
    block_size: int = 16
    """Tokens of one layer in a block."""
    max_num_seqs: int = 256
    """Requests that may run at once."""
    max_batch_tokens: int = 8192
    """Tokens of one forward pass, prompts and decoding together."""
    prefill_chunk_tokens: int | None = None
    """Longest piece of a prompt in one step; None = `max_batch_tokens`. Longer prompts are staged, see the README."""
    prefill_target_tokens: int = 2048
    """Prompt tokens that keep a GPU busy: a step that has as many admits no further prompt. Prompts that begin in one
    step also end in one, all of them late; one after the other, each has its first token as soon as it can."""
    reserve_output_tokens: int = 512
    """A request is admitted only when every running one could still grow by as many tokens: fewer means more requests
    at once, and more of them preempted and computed again."""
    prefix_caching: bool = True
    """Keep keys and values of prompts in blocks that are free otherwise, and begin requests with what is known of their
    prompts. On, because it costs little where nothing is shared: for a prompt of 4,000 tokens on a 32-layer model about
    1 ms of the host's time, beside a forward pass that runs meanwhile, and the writes of its window layers' keys
    and values, 0.5 GB in bf16."""
    max_model_len: int | None = None
    """Longest request, prompt and output; None = what the model was made for, or what the memory holds if less: a
    request that is all prompt, staged if it is longer than a chunk. A short prompt with a long output may need fewer
    blocks and is refused all the same; larger chunks (`max_batch_tokens`) or more memory raise the bound."""
    compile: bool | None = None
    """Compile the decoder layers with torch.compile; None = on a GPU only."""
    cuda_graphs: bool | None = None
    """Replay decode steps as CUDA graphs; None = on a GPU only."""
    backend: str | None = None
    """What reads prompts, by its name in `hf-sparsekv doctor`; None = what HF_SPARSEKV_ATTENTION names, or the first
    that can. It has to take rows after a past, as longer prompts and shared prefixes have them."""

    def __new__(cls, *_: object, **options: object) -> Self:
        """Refuse unknown names, and say where they belong or which there are."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                is_method = name in SparseKVConfig.option_names()
                hint = "it is one of SparseKVConfig" if is_method else which_was_meant(name, known)
                raise ConfigError(f"unknown option {name!r} of EngineConfig: {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every number.

        Raises:
            ConfigError: the value, the limit and what to do.
        """
        for name in _AT_LEAST_ONE:
            _check_int(name, getattr(self, name))
        for name in ("kv_memory_bytes", "prefill_chunk_tokens", "max_model_len"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name))
        reserve = self.reserve_output_tokens
        if isinstance(reserve, bool) or not isinstance(reserve, int) or reserve < 0:
            raise ConfigError(f"reserve_output_tokens must be an int >= 0: got {reserve!r}")
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, float) or not 0.0 < fraction < 1.0:
            raise ConfigError(f"memory_fraction must be a float in (0, 1): got {fraction!r}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} is below max_num_seqs={self.max_num_seqs}, but every "
                "running request decodes one token a step: raise the one or lower the other"
            )
        for name in ("compile", "cuda_graphs"):
            if getattr(self, name) not in (None, True, False):
                raise ConfigError(f"{name} must be True, False or None: got {getattr(self, name)!r}")
        if self.backend is not None:
            check_known(self.backend)
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError(f"prefix_caching must be True or False: got {self.prefix_caching!r}")

    @property
    def chunk_limit(self) -> int:
        """The longest prompt that is computed whole, in tokens."""
        return min(self.max_batch_tokens, self.prefill_chunk_tokens or self.max_batch_tokens)

    def with_(self, **changes: object) -> "EngineConfig":
        """A changed copy, checked again."""
        return EngineConfig(**({f.name: getattr(self, f.name) for f in fields(self)} | changes))


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an int >= 1: got {value!r}")
