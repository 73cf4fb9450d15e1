"""Groups: which sparse configurations are in use, and the device state of each.

Every group has as many rows as the engine may run requests, whoever uses them. So a group is made when the first
request of its configuration has been accepted, and dropped, some time after its last one, when another needs room.
"""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping

import torch

from hf_sparsekv.cache.rows import RowState
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.group import Group
from hf_sparsekv.engine.memory import MemoryPlan
from hf_sparsekv.engine.request import Request
from hf_sparsekv.engine.sampler import SameTokens, SamplerState
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.plan import LayerPlan

MAX_IDLE = 4
"""Groups without a live request that may stay when another is made: clients tend to come back."""


class Groups(Mapping[Hashable, Group]):
    """The groups by the key of their configuration; the engine's own is there from the beginning and stays."""

    def __init__(
        self,
        config: SparseKVConfig,
        memory: MemoryPlan,
        *,
        vocab_size: int,
        device: torch.device,
        stop_ids: tuple[int, ...],
        forget: Callable[[Group], None],
        same_tokens: SameTokens,
    ) -> None:
        """The engine's own group.

        Args:
            config: the engine's own.
            memory: how many rows, and of which size; its plan is the one of `config`.
            vocab_size: V, the width of the logits.
            device: of the rows.
            stop_ids: the model's end-of-sequence tokens.
            forget: called with a group that is about to be dropped.
            same_tokens: of the samplers.
        """
        self._same_tokens = same_tokens
        self._memory, self._vocab_size, self._device = memory, vocab_size, device
        self._stop_ids, self._forget = stop_ids, forget
        self._live: Counter[Hashable] = Counter()
        self._idle: dict[Hashable, None] = {}
        """Keys without a live request, the longest idle first; never the engine's own."""
        self._own_key: Hashable = _Key(config)
        self._by_key: dict[Hashable, Group] = {self._own_key: self._new_group(config, memory.layers)}

    def __getitem__(self, key: Hashable) -> Group:
        return self._by_key[key]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def own(self) -> Group:
        """Of the engine's own configuration."""
        return self._by_key[self._own_key]

    def plan_of(self, config: SparseKVConfig) -> tuple[Hashable, LayerPlan]:
        """The key and the plan of a configuration; nothing is reserved for it.

        Raises:
            ConfigError: no SparseKVConfig, or one that does not fit the model.
        """
        if not isinstance(config, SparseKVConfig):
            raise ConfigError(f"config must be a SparseKVConfig: got {shown(config)}")
        key = _Key(config)
        for known, group in self._by_key.items():
            if known == key:
                return known, group.rows.plan  # the same object: looking it up compares no options
        return key, LayerPlan.build(config, self._memory.layers.shape)

    def request_of(
        self,
        config: SparseKVConfig,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        is_streamed: bool,
        arrival_s: float | None = None,
    ) -> Request:
        """A request with what its configuration means for it; nothing is reserved yet.

        Raises:
            ConfigError: as `plan_of`.
        """
        key, plan = self.plan_of(config)
        return Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            plan=plan,
            group=key,
            num_query_rows=_num_query_rows(config, plan),
            arrival_s=time.perf_counter() if arrival_s is None else arrival_s,
            is_streamed=is_streamed,
            seed=seed,
        )

    def enter(self, request: Request, config: SparseKVConfig) -> None:
        """Count an accepted request in; the first of a configuration makes its group, and drops idle ones for it."""
        key = request.group
        if key not in self._by_key:
            while len(self._idle) > MAX_IDLE:
                self._drop(next(iter(self._idle)))
            self._by_key[key] = self._new_group(config, request.plan)
        self._idle.pop(key, None)
        self._live[key] += 1

    def leave(self, request: Request) -> None:
        """Count a request out that has ended."""
        key = request.group
        self._live[key] -= 1
        if self._live[key] == 0:
            del self._live[key]
            if key != self._own_key:
                self._idle[key] = None

    def clear(self) -> None:
        """Let go of every group, the engine's own too."""
        self._by_key.clear()
        self._idle.clear()

    def _drop(self, key: Hashable) -> None:
        del self._idle[key]
        self._forget(self._by_key.pop(key))

    @torch.inference_mode(False)  # what is made in inference mode could not be written to outside it
    def _new_group(self, config: SparseKVConfig, plan: LayerPlan) -> Group:
        memory = self._memory
        rows = RowState(
            config,
            plan,
            num_rows=memory.num_rows,
            num_kv_heads=plan.shape.num_kv_heads,
            page_size=memory.block_size,
            max_length=memory.max_model_len,
            device=self._device,
        )
        sampler = SamplerState(memory.num_rows, self._vocab_size, self._device, self._stop_ids, self._same_tokens)
        return Group(rows, sampler)


def _num_query_rows(config: SparseKVConfig, plan: LayerPlan) -> int | None:
    """Last rows of a prompt whose queries a request needs: those that score, and the last; None = all of them."""
    if all(spec.is_full for spec in plan.layers):
        return 1
    return {"none": 1, "last": config.observation_window, "all": None}[config.scorer_object.queries]


class _Key:
    """What makes two configurations one: the same options, the same scorer object or one of the same class.

    A name may have been registered anew since, with another class behind it. The hash is taken once: groups are looked
    up for every block that a step adds.
    """

    __slots__ = ("_hash", "_parts")

    def __init__(self, config: SparseKVConfig) -> None:
        self._parts = config, type(config.scorer_object)
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self._parts == other._parts)
