"""Runner: one forward pass of the unmodified model over a packed batch, then sampling, all on the device."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_sparsekv.attention.packed import DecodeRows, PackedStep
from hf_sparsekv.cache.pages import PagePool
from hf_sparsekv.engine.batch import Batch
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.graphs import DecodeGraphs, rows_of
from hf_sparsekv.engine.group import Group
from hf_sparsekv.engine.sampler import SampledTokens
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.hf.compile import compile_layers, uncompile_layers
from hf_sparsekv.hf.models import check_packed, text_config
from hf_sparsekv.hf.paged import Step, running
from hf_sparsekv.ops.kernels import decode_obstacle
from hf_sparsekv.ops.prefill_choice import check_prompts, using
from hf_sparsekv.plan import ModelShape


@dataclass(frozen=True)
class StepTokens:
    """What a step computed, still on the device."""

    groups: list[SampledTokens]
    """Per group of the batch, by row."""
    can_rank: Tensor | None
    """bool [prompts that ended and were scored], of their scores, or None without any."""
    device: torch.device


class Runner:
    """Runs batches on one model: decode steps as CUDA graphs where there are any, everything else launch by launch."""

    def __init__(self, model: PreTrainedModel, shape: ModelShape) -> None:
        """The model must have the paged attention."""
        self._model, self._shape = model, shape
        self._is_compiled = self._wants_graphs = False
        self._graphs: DecodeGraphs | None = None
        self._backend: str | None = None

    def configure(self, options: EngineConfig) -> None:
        """Decide about graphs and compilation; `close` undoes what this does to the model.

        Raises:
            ConfigError: CUDA graphs were asked for where there can be none, or a backend that cannot read prompts here.
            ModelError: requests of one batch would change one another's keys.
        """
        longest = options.max_model_len or text_config(self._model.config).max_position_embeddings
        check_packed(self._model.config, longest)
        check_prompts(options.backend, self.device, self._model.dtype, self._shape.head_dim, is_whole=False)
        self._backend = options.backend
        self._wants_graphs = _wants_graphs(self._model, self._shape, options)
        if options.compile or (options.compile is None and self.device.type == "cuda"):
            compile_layers(self._model)
            self._is_compiled = True

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._model.device

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the model's GPU the current one for as long as it is entered."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def prepare(self, pool: PagePool, group: Group) -> None:
        """Warm up on rows that belong to nobody: compile, and reserve what graphs need.

        Args:
            pool: keys and values.
            group: of the engine's own configuration, still empty.
        """
        if not self._wants_graphs and not self._is_compiled:
            return
        rows = group.rows
        for count in {1, min(2, rows.num_rows), rows.num_rows}:
            self._decode(PackedStep(pool, [DecodeRows(rows, 0, count, rows.max_length)], [], []), [group])
        rows.clear(slice(0, rows.num_rows))
        if self._wants_graphs:
            self._graphs = DecodeGraphs(pool, self._shape.num_heads, self._decode)
            self._graphs.reserve(rows)

    def close(self) -> None:
        """Leave the model as it was."""
        self._graphs = None
        if self._is_compiled:
            uncompile_layers(self._model)

    def forget(self, group: Group) -> None:
        """Let go of what was made for a group that is dropped."""
        if self._graphs is not None:
            self._graphs.forget(group)

    def run(self, batch: Batch) -> StepTokens:
        """The next token of every request whose prompt is complete; device state moves on by one token."""
        with torch.autocast(self.device.type, enabled=False):  # the caller's would cast what the pool stores
            return self._run(batch)

    def _run(self, batch: Batch) -> StepTokens:
        for part in batch.groups:
            part.group.sampler.flush()
        if batch.is_decode_only and self._graphs is not None:
            outputs = self._graphs.run(batch)
            counts = [len(part.sampled) for part in batch.groups]
            return StepTokens([rows_of(o, n) for o, n in zip(outputs, counts, strict=True)], None, self.device)
        return self._run_mixed(batch)

    @torch.inference_mode()  # a fifth less of the host's time than no_grad; what lasts is made outside it
    def _run_mixed(self, batch: Batch) -> StepTokens:
        decoding, places = _inputs(batch.step.decode)
        tokens = torch.cat([*decoding, batch.prompt_ids])
        positions = torch.cat([*places, batch.prompt_positions])
        for rows in batch.step.decode:
            rows.advance()
        logits = self.forward(batch.step, tokens, positions, 0 if batch.logit_index is None else batch.logit_index)
        outputs, first = [], 0
        for part in batch.groups:
            count = len(part.sampled)
            outputs.append(_sample(part.group, logits[first : first + count], part.num_decode))
            first += count
        return StepTokens(outputs, batch.step.finish(), tokens.device)

    @torch.inference_mode()
    def _decode(self, step: PackedStep, groups: list[Group]) -> list[SampledTokens]:
        """One decode step of rows that may be padding; what a CUDA graph captures."""
        tokens, positions = _inputs(step.decode)
        for part in step.decode:
            part.advance()
        logits = self.forward(step, torch.cat(tokens), torch.cat(positions), 0)
        return [
            _sample(group, logits[part.offset : part.offset + part.count], part.count)
            for group, part in zip(groups, step.decode, strict=True)
        ]

    def forward(self, step: Step, tokens: Tensor, positions: Tensor, logit_index: Tensor | int) -> Tensor:
        """Logits [n, V] of the tokens at `logit_index` (0 = all) for token ids and positions int64 [T]."""
        with running(step, self._shape.num_layers), using(self._backend):
            output = self._model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logit_index,
            )
        logits: Tensor = output.logits[0]
        return logits


def _inputs(decode: list[DecodeRows]) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids and positions int64 [rows] of every group."""
    tokens = [part.rows.tokens[: part.count] for part in decode]
    return tokens, [part.rows.positions[: part.count] for part in decode]


def _sample(group: Group, logits: Tensor, num_decode: int) -> SampledTokens:
    """Sample for the first rows of a group, and leave the tokens where the next step reads them."""
    rows, count = group.rows, logits.shape[0]
    rows.positions[:num_decode] += rows.is_active[:num_decode]
    sampled = group.sampler.sample(logits, slice(0, count), group.features)
    rows.tokens[:count] = sampled.ids
    return sampled


def _wants_graphs(model: PreTrainedModel, shape: ModelShape, options: EngineConfig) -> bool:
    if options.cuda_graphs is False:
        return False
    obstacle = decode_obstacle(model.dtype, shape.head_dim, shape.num_heads // shape.num_kv_heads)
    if model.device.type != "cuda":
        obstacle = f"the model is on {model.device}"
    if options.cuda_graphs and obstacle is not None:
        raise ConfigError(f"cuda_graphs=True, but {obstacle}: set cuda_graphs=None")
    return obstacle is None
