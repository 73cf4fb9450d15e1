"""One prefill of a document for every configuration: what each keeps of it, and how well it goes on from there.

A window layer selects after it has attended, so keys, values and queries of a prompt are the dense model's, whatever
the configuration, unless its prefill is bounded. A prompt is therefore read once; the configurations then differ in an
index of kept tokens, and all of them are scored in one forward pass, as forks of the prompt (see `evals.forks`). The
scores are those of `SparseScorer`, up to rounding. A study:

    prefill = SharedPrefill(model, configs)                     # by name, the dense cache among them
    document = prefill.read(sample.document)
    results = document.score(sample.question, continuations)    # the question comes after the compression
    prompt = document.extend(sample.question[:-1])              # it is compressed too; the document is not read again
    results = prompt.score(sample.question[-1:], continuations)
    results["snapkv-4x"].scores[0].log_likelihood

Where several ranks share the model, all of them do the same at the same time; each selects for the KV heads it has.

Shapes: F fork, T new token, P predicting token, L layer, H query head, K KV head, A query row, N token of the prompt,
D head dim, V vocabulary.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evals.forks import KEYWORD, Forks, KeptTokens, attention_of_any_shape, forked_attention
from evals.score_stacks import PromptTensors
from evals.scoring import ContextScores, Footprint, Score
from evals.selections import Selections, num_rows
from evals.token_tree import ROOT, TokenTree
from hf_sparsekv.cache.layer import WindowLayer
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError, InputError, shown
from hf_sparsekv.hf.cache_adapter import SparseKVCache
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.models import rope_inv_freq
from hf_sparsekv.hf.switch import sparse_attention
from hf_sparsekv.scorers.checks import MAX_COUNT

PASS_BYTES = 2**30
"""What the logits of the forks of one pass may take."""


class SharedPrefill:
    """Reads prompts for some configurations of one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        configs: Mapping[str, SparseKVConfig],
        *,
        softmax_dtype: torch.dtype = torch.float32,
        pass_bytes: int = PASS_BYTES,
    ) -> None:
        """Take note of what is to be compared.

        Args:
            model: see `hf_sparsekv.generate`.
            configs: by name. One that evicts nothing of a prompt is the dense cache there.
            softmax_dtype: of the log-softmax.
            pass_bytes: what the logits of one pass may take; more forks than that fit are scored in several passes.
        Raises:
            ModelError: a model that a sparse cache does not support.
            ConfigError: a configuration that does not fit the model, or whose prefill is bounded: it goes on from what
                it has kept, so that the prompt's keys and values are its own.
        """
        for name, config in configs.items():
            if config.chunk_tokens is not None:
                raise ConfigError(
                    f"configuration {name!r} has prefill='bounded', which shares no prefill with others: score it with "
                    "SparseScorer"
                )
        self.model, self.configs = model, dict(configs)
        self.plans = {name: SparseKVCache(model.config, config).plan for name, config in self.configs.items()}
        self.softmax_dtype, self.pass_bytes = softmax_dtype, pass_bytes
        self._recording = _recording(self.configs.values())

    def read(self, tokens: Sequence[int]) -> "ReadPrompt":
        """Read the beginning of a prompt, at least one token.

        Raises:
            InputError: no token.
        """
        return self._read(SparseKVCache(self.model.config, self._recording), tokens)

    def _read(self, cache: SparseKVCache, tokens: Sequence[int]) -> "ReadPrompt":
        if not tokens:
            raise InputError("a prompt has at least one token: got none")
        # One more than will come: a prompt that goes on is no decoding, and never ends.
        cache.expect_prompt(len(tokens) + 1)
        ids = torch.tensor([list(tokens)], device=self.model.device)
        with sparse_attention(self.model), attention_of_any_shape(), torch.no_grad():
            logits_1TV = self.model(ids, **{CACHE_KEYWORD: cache}, use_cache=True, logits_to_keep=1).logits
        return ReadPrompt(self, cache, logits_1TV[0, -1])


class ReadPrompt:
    """A prompt that the dense model has read, and what the configurations make of it."""

    def __init__(self, prefill: SharedPrefill, cache: SparseKVCache, last_logits_V: Tensor) -> None:
        """Take over a cache that recorded a prompt."""
        self._prefill, self._cache, self._last_logits_V = prefill, cache, last_logits_V
        self.selections = Selections(_prompt_tensors(prefill.model, cache))
        self._kept: dict[str, KeptTokens] = {}

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return self.selections.prompt.num_tokens

    def extend(self, tokens: Sequence[int]) -> "ReadPrompt":
        """The prompt with more tokens, which alone are read; this one stays as it is.

        Raises:
            InputError: no token.
        """
        return self._prefill._read(copy.deepcopy(self._cache), tokens)

    def score(
        self, tail: Sequence[int], continuations: Sequence[Sequence[int]], names: Collection[str] | None = None
    ) -> dict[str, ContextScores]:
        """Score what may follow the prompt, after its compression, with every configuration.

        Args:
            tail: read after the compression, before each continuation; may be empty, and the first token of a
                continuation is then predicted before anything was evicted.
            continuations: each scored as if it alone followed; none is empty.
            names: of configurations; None = all.
        Raises:
            InputError: a name that is not there, or an empty continuation.
            ScoreError: a scorer returned something that cannot rank tokens.
        """
        names = list(self._prefill.configs if names is None else names)
        unknown = [name for name in names if name not in self._prefill.configs]
        if unknown:
            raise InputError(f"no configuration is named {shown(unknown[0])}: name it when the prefill is made")
        if not continuations or not all(continuations):
            raise InputError("continuations have at least one token, and there is at least one of them")
        with torch.no_grad():
            kept = self.kept(names)
            # Those that evict nothing are one fork: the dense cache.
            forks: dict[str | None, KeptTokens] = {
                (None if kept[name].index is None else name): kept[name] for name in names
            }
            scores = dict(zip(forks, self._scores(list(forks.values()), tail, continuations), strict=True))
        return {
            name: ContextScores(list(scores[None if kept[name].index is None else name]), self._footprint(name))
            for name in names
        }

    def kept(self, names: Collection[str] | None = None) -> dict[str, KeptTokens]:
        """What configurations keep of the prompt; None = all of them."""
        names = self._prefill.configs if names is None else names
        missing = {name: self._prefill.configs[name] for name in names if name not in self._kept}
        self._kept |= self.selections.kept(missing, self._prefill.plans)
        return {name: self._kept[name] for name in names}

    def _footprint(self, name: str) -> Footprint:
        """By the plan, which is what a `SparseKVCache` measures; of the whole model, also where ranks share it."""
        plan, element_bytes = self._prefill.plans[name], self.selections.prompt.keys.element_size()
        return Footprint(
            num_evicted=sum(self.num_tokens - count for count in self._kept[name].counts),
            cache_bytes=plan.total_bytes(self.num_tokens, element_bytes=element_bytes),
            dense_bytes=plan.dense_bytes(self.num_tokens, element_bytes=element_bytes),
        )

    def _scores(
        self, kept: list[KeptTokens], tail: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[list[Score]]:
        """Of each fork, in the order of the continuations."""
        tree = TokenTree.build(tail, continuations)
        logit_bytes = self._last_logits_V.numel() * (self._last_logits_V.element_size() + 2 * 4)
        step = max(1, self._prefill.pass_bytes // (logit_bytes * (len(tree.predicting) + 1)))
        passes = [self._pass(kept[i : i + step], tree, continuations) for i in range(0, len(kept), step)]
        log_p_FC, num_greedy_FC = (torch.cat(parts).tolist() for parts in zip(*passes, strict=True))
        lengths = [len(continuation) for continuation in continuations]
        return [
            [Score(log_p, greedy == length, greedy) for log_p, greedy, length in zip(*fork, lengths, strict=True)]
            for fork in zip(log_p_FC, num_greedy_FC, strict=True)
        ]

    def _pass(
        self, kept: list[KeptTokens], tree: TokenTree, continuations: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihood and number of greedy tokens [F, continuation] of some forks, on the device."""
        first_F1V = self._last_logits_V.expand(len(kept), 1, -1)
        predicting = tree.predicting
        logits_FPV = torch.cat([first_F1V, self._forward(kept, tree, predicting)], dim=1) if predicting else first_F1V
        places = {place: i + 1 for i, place in enumerate(predicting)} | {ROOT: 0}
        lse_FP = torch.stack([_lse(logits_PV, self._prefill.softmax_dtype) for logits_PV in logits_FPV])
        best_FP = logits_FPV.argmax(dim=-1)
        log_p, num_greedy = [], []
        for path, continuation in zip(tree.paths, continuations, strict=True):
            at_T = torch.tensor([places[place] for place in path], device=logits_FPV.device)
            token_T = torch.tensor(list(continuation), device=logits_FPV.device)
            chosen_FT = logits_FPV[:, at_T, token_T].to(lse_FP.dtype) - lse_FP[:, at_T]
            log_p.append(chosen_FT.sum(dim=1))
            num_greedy.append((best_FP[:, at_T] == token_T).sum(dim=1))
        return torch.stack(log_p, dim=1), torch.stack(num_greedy, dim=1)

    def _forward(self, kept: list[KeptTokens], tree: TokenTree, predicting: list[int]) -> Tensor:
        """Logits [F, P, V] after the tokens that predict."""
        model, prompt = self._prefill.model, self.selections.prompt
        device = prompt.keys.device
        forks = Forks(prompt.keys, prompt.values, kept, tree.visible(device))
        ids = torch.tensor([tree.tokens], device=device).expand(len(kept), -1)
        positions = (self.num_tokens + torch.tensor([tree.depths], device=device)).expand(len(kept), -1)
        keep = torch.tensor(predicting, device=device)
        with forked_attention(model), attention_of_any_shape():
            output = model(ids, position_ids=positions, use_cache=False, logits_to_keep=keep, **{KEYWORD: forks})
        return cast(Tensor, output.logits)


def _recording(configs: Collection[SparseKVConfig]) -> SparseKVConfig:
    """A configuration that never evicts, and whose cache remembers the query rows that any of the scorers reads."""
    rows = [num_rows(config) for config in configs]
    longest = max((count or 0 for count in rows), default=0)
    scorer = "h2o" if None in rows else "tova" if longest else "keydiff"
    window = max(longest, 1)
    return SparseKVConfig(
        num_full_layers=0,
        budget=MAX_COUNT,
        num_recent_tokens=window,
        observation_window=window,
        scorer=scorer,
    )


def _prompt_tensors(model: PreTrainedModel, cache: SparseKVCache) -> PromptTensors:
    """Copies of what a recording cache holds of all layers."""
    layers = [layer.state for layer in cache.layers]
    assert all(isinstance(layer, WindowLayer) for layer in layers)
    tails = [cast(WindowLayer, layer).tail.queries for layer in layers]
    return PromptTensors(
        keys=torch.cat([layer.columns.keys for layer in layers]),
        values=torch.cat([layer.columns.values for layer in layers]),
        queries=torch.cat(tails),
        scale=cache._scale,
        inv_freq=rope_inv_freq(model.config, cache.shape.head_dim),
        heads=cache._heads,
    )


def _lse(logits_PV: Tensor, dtype: torch.dtype) -> Tensor:
    """One fork at a time: the cast logits are as large as the logits."""
    return torch.logsumexp(logits_PV.to(dtype), dim=-1)
