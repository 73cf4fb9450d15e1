"""Decode steps of `model.generate` as CUDA graphs: one is captured over the cache's own tensors, the others replay it.

Transformers keeps its loop: logits processors, sampling, stopping, streaming. `GraphModel` is the model to that loop,
and runs its decode steps.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_sparsekv.attention.fixed import FixedDecode
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.hf.cache_adapter import SparseKVCache
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.compile import compiled_steps
from hf_sparsekv.hf.graph_choice import GraphWish
from hf_sparsekv.hf.masks import step_mask
from hf_sparsekv.hf.paged import running
from hf_sparsekv.ops.kernels import reserve_decode_workspace

LONGEST_CAPTURE = 1024
"""Steps that a capture has room for: then the buffers of full layers grow, and one step is captured anew."""

Body = Callable[[], Any]

_SET_HERE = ("attention_mask", "use_cache", "logits_to_keep", CACHE_KEYWORD)
"""Inputs of a forward pass that a packed step has otherwise."""


class CaptureError(RuntimeError):
    """What a forward pass did that no CUDA graph can hold."""


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Where a device's captures are made and replayed."""
    return torch.cuda.Stream(device)


class Launches:
    """Launches one step after another: the first as it is, which warms up, and from the second on by replay."""

    _one_at_a_time = threading.Lock()
    """All share a stream, and with it the kernels' workspace: nobody may launch on it while somebody captures."""

    def __init__(self, device: torch.device) -> None:
        """Nothing captured yet."""
        self._device = device
        self._stream, self._memory = _stream_of(device), torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None
        self._workspace: Tensor | None = None
        """Of the kernels. Held, because somebody else on this stream may put a larger one in its place."""
        self._is_warm = False

    def run(self, body: Body, workspace: list[tuple[int, int, int, int, int, bool]]) -> Any:
        """What `body` returns; its tensors are those of the captured step and change with the next one.

        Args:
            body: launches a step; from one `forget` to the next always the same launches.
            workspace: for `reserve_decode_workspace`.
        Raises:
            CaptureError: the body did something that cannot be captured. Nothing was computed.
        """
        with self._one_at_a_time, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                outputs = self._run(body, workspace)
            current.wait_stream(self._stream)
        return outputs

    def forget(self) -> None:
        """Drop the captured step, before the memory that it works on goes."""
        if self._graph is not None:
            self._stream.synchronize()
        self._graph = self._outputs = self._workspace = None

    def _run(self, body: Body, workspace: list[tuple[int, int, int, int, int, bool]]) -> Any:
        if not self._is_warm:
            self._is_warm = True
            return body()
        if self._graph is None:
            self._workspace = reserve_decode_workspace(self._device, workspace)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                    outputs = body()
            except RuntimeError as error:
                raise CaptureError(f"{type(error).__name__}: {error}") from error
            self._graph, self._outputs = graph, outputs
        self._graph.replay()
        return self._outputs


class GraphModel:
    """A model whose calls are decode steps over one cache; everything else of it is the model's own."""

    def __init__(self, model: PreTrainedModel, cache: SparseKVCache, *, streamer: Any, wish: GraphWish) -> None:
        """Nothing captured yet.

        Args:
            model: with attention "sparsekv".
            cache: that the calls come with.
            streamer: of transformers, or None; `model.generate` does not hand it to a loop that it is given.
            wish: compiled layers or not; and whether a step that cannot be captured is an error, or is launched.
        """
        self._model, self._cache, self._streamer = model, cache, streamer
        self._wish = wish
        self._launches: Launches | None = Launches(model.device)
        self._ids: Tensor | None = None
        self._positions: Tensor | None = None
        self._inputs: dict[str, Any] = {}
        self._mask = step_mask(model.device)
        self._fixed: FixedDecode | None = None
        self._steps_to_come: int | None = None
        self.problem: str | None = None
        """Why a step could not be captured."""
        self.num_steps = 0
        """Decode steps that ran."""

    def __getattr__(self, name: str) -> Any:
        """What transformers' loop asks of a model besides calling it."""
        return getattr(self._model, name)

    def loop(self, model: PreTrainedModel, input_ids: Tensor, *, stopping_criteria: Any, **options: Any) -> Any:
        """Transformers' own loop for greedy search and sampling, with these decode steps: `custom_generate`."""
        end = stopping_criteria.max_length
        self._steps_to_come = None if end is None else end - input_ids.shape[1] - 1
        sample: Any = type(model)._sample  # type: ignore[attr-defined]
        return sample(self, input_ids, stopping_criteria=stopping_criteria, streamer=self._streamer, **options)

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor | None = None, **inputs: Any) -> Any:
        """The model's output for one new token of every request, int64 [B, 1].

        The mask of the columns before is left out: the cache knows its padding, and every new column is a token.
        """
        if self._ids is None or self._positions is None:
            self._ids, self._positions = (input_ids.new_empty(1, len(input_ids)) for _ in range(2))
            self._inputs = {name: value for name, value in inputs.items() if name not in _SET_HERE}
        self._ids.copy_(input_ids.T)
        if position_ids is None:
            self._positions.fill_(int(self._cache.get_seq_length()))
        else:
            self._positions.copy_(position_ids.T)
        fixed = self._fixed
        if fixed is None or fixed.num_left == 0:
            fixed = self._fix()
        if self._steps_to_come is not None:
            self._steps_to_come -= 1
        self.num_steps += 1
        return fixed.step(self._launch)

    def close(self) -> None:
        """Leave the cache as a plain generation would."""
        if self._launches is not None:
            self._launches.forget()
        if self._fixed is not None:
            fixed, self._fixed = self._fixed, None
            fixed.close()

    def _fix(self) -> FixedDecode:
        self.close()
        left = LONGEST_CAPTURE if self._steps_to_come is None else max(1, self._steps_to_come)
        layers = [layer.state for layer in self._cache.layers]
        self._fixed = FixedDecode(layers, self._cache.padding, min(left, LONGEST_CAPTURE), self._cache._scale)
        return self._fixed

    def _launch(self) -> Any:
        if self._launches is None:
            return self._body()
        fixed, shape = self._fixed, self._cache.shape
        assert fixed is not None and self._ids is not None
        size = (self._ids.shape[1], shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
        try:
            return self._launches.run(self._body, [(*size, *launch) for launch in sorted(fixed.launch_sizes())])
        except CaptureError as error:
            self._launches = None
            self.problem = f"a decode step of {type(self._model).__name__} cannot be captured: {error}"
            if self._wish.asks is not None:
                raise ConfigError(f"{self._wish.asks}, but {self.problem}; leave it out") from error
        return self._body()

    def _body(self) -> Any:
        """One step of all requests as a packed row, as the engine runs its own."""
        assert self._fixed is not None
        self._fixed.advance()
        layers = compiled_steps(self._model) if self._wish.compile else nullcontext()
        with layers, running(self._fixed, self._cache.shape.num_layers):
            output = self._model(
                input_ids=self._ids,
                position_ids=self._positions,
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=0,
                **self._inputs,
            )
        return CausalLMOutputWithPast(logits=output.logits[0][:, None])
