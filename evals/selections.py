"""What many configurations keep of one prompt, by the package's own scorers and selection.

Layers are scored together where the scorer does not ask which one it sees. What several configurations need alike is
computed once: a scorer's answer for all budgets and poolings, the weight that keys receive for all scorers that begin
with it.

Shapes: L layer, S layer of a stack, H query head, K KV head, A observed query row, N token of the prompt, D head dim.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evals.forks import KeptTokens
from evals.score_stacks import PromptTensors, Stack
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.plan import LayerPlan
from hf_sparsekv.scorers import TwoLists
from hf_sparsekv.scorers.checks import MAX_SCORE
from hf_sparsekv.scorers.keyformer import Keyformer
from hf_sparsekv.select import check_scores, select_index

Scores = Tensor | TwoLists


def num_rows(config: SparseKVConfig) -> int | None:
    """Query rows that a configuration's scorer reads; None = all."""
    return {"none": 0, "last": config.observation_window, "all": None}[config.scorer_object.queries]


class Selections:
    """The kept tokens of one prompt under any number of configurations."""

    def __init__(self, prompt: PromptTensors) -> None:
        """Nothing is computed before it is asked for."""
        self.prompt = prompt
        self._stacks: dict[int, list[Stack]] = {}
        """By the layers of a stack."""

    def kept(self, configs: Mapping[str, SparseKVConfig], plans: Mapping[str, LayerPlan]) -> dict[str, KeptTokens]:
        """What each configuration keeps.

        Scores are checked when all are there, so that a GPU is waited for once.

        Args:
            configs: by name.
            plans: of each of them.
        Raises:
            ScoreError: a scorer returned something that cannot rank tokens.
            ConfigError: a scorer that mixes its lists differently in different layers.
        """
        num_tokens, device = self.prompt.num_tokens, self.prompt.keys.device
        kept: dict[str, KeptTokens] = {}
        alike: dict[Hashable, list[str]] = {}
        for name, config in configs.items():
            counts = tuple(min(num_tokens, spec.kept_tokens(num_tokens)) for spec in plans[name].layers)
            kept[name] = KeptTokens(None, counts)
            if min(counts) < num_tokens:
                alike.setdefault(_scoring_of(config), []).append(name)
        checks: list[tuple[Tensor, Callable[[], None]]] = []
        # All at once: each upload would wait for the device.
        budgets = dict(zip(kept, torch.tensor([k.counts for k in kept.values()]).to(device, torch.int32), strict=True))
        windows = [num_rows(configs[name]) or 0 for names in alike.values() for name in names]
        # Keyformer's pass over all rows leaves what H2O asks for, not the other way round.
        for names in sorted(alike.values(), key=lambda names: configs[names[0]].scorer_object.name != Keyformer.name):
            scores = self._scores(configs[names[0]], max(windows))
            checks.append((_is_good(scores), _Recheck(scores, configs[names[0]].scorer_object.name)))
            for name in names:
                counts = kept[name].counts
                index, _, _ = select_index(scores, budgets[name], max(counts), configs[name])
                kept[name] = KeptTokens(index, counts)
        if checks and not bool(torch.stack([flag for flag, _ in checks]).all()):
            for _, recheck in checks:
                recheck()
        return kept

    def _scores(self, config: SparseKVConfig, window: int) -> Scores:
        """Of all layers: together, or one by one where rows are many or the scorer asks for its layer."""
        together = 1 if config.scorer_object.queries == "all" else self.prompt.stackable
        rows = num_rows(config)
        answers = [stack.scores(config, rows, window) for stack in self._stacked(together)]
        if together > 1 and any(answer is None for answer in answers):
            answers = [stack.scores(config, rows, window) for stack in self._stacked(1)]
        return _joined([answer for answer in answers if answer is not None], config)

    def _stacked(self, together: int) -> list[Stack]:
        if together not in self._stacks:
            count = self.prompt.keys.shape[0]
            pieces = [slice(start, min(start + together, count)) for start in range(0, count, together)]
            self._stacks[together] = [Stack(self.prompt, layers) for layers in pieces]
        return self._stacks[together]


@dataclass(frozen=True)
class _Recheck:
    """Says what is wrong with a scorer's answer, layer by layer; waits for the device."""

    scores: Scores
    scorer: str

    def __call__(self) -> None:
        primary = self.scores.primary if isinstance(self.scores, TwoLists) else self.scores
        for layer_idx in range(primary.shape[0]):
            one = slice(layer_idx, layer_idx + 1)
            part: Scores = primary[one]
            if isinstance(self.scores, TwoLists):
                part = _two_lists(self.scores, primary[one], self.scores.secondary[one])
            check_scores(part, (1, primary.shape[1], primary.shape[2]), layer_idx, self.scorer)


def _is_good(scores: Scores) -> Tensor:
    lists = (scores.primary, scores.secondary) if isinstance(scores, TwoLists) else (scores,)
    return torch.stack([(tensor.abs() <= MAX_SCORE).all() for tensor in lists]).all()


def _scoring_of(config: SparseKVConfig) -> Hashable:
    """Equal for configurations whose scorer gives the same answer."""
    scorer: Any = config.scorer_object
    try:
        hash(scorer)
    except TypeError:  # a user's own, which says when it equals another but has no hash
        scorer = id(scorer)
    return type(config.scorer_object), scorer, num_rows(config), config.rows, config.groups


def _joined(parts: list[Scores], config: SparseKVConfig) -> Scores:
    """The answers of all stacks as one."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    pairs = [part for part in parts if isinstance(part, TwoLists)]
    if len(tensors) == len(parts):
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if tensors or len({(p.share, p.secondary_pooling, p.secondary_width) for p in pairs}) > 1:
        raise ConfigError(
            f"scorer {config.scorer_object.name!r} mixes its lists differently in different layers, which is not "
            "supported here: score its configurations with SparseScorer"
        )
    if len(pairs) == 1:
        return pairs[0]
    primary, secondary = (torch.cat([getattr(p, name) for p in pairs]) for name in ("primary", "secondary"))
    return _two_lists(pairs[0], primary, secondary)


def _two_lists(like: TwoLists, primary: Tensor, secondary: Tensor) -> TwoLists:
    return TwoLists(
        primary=primary,
        secondary=secondary,
        share=like.share,
        secondary_pooling=like.secondary_pooling,
        secondary_width=like.secondary_width,
    )
