"""What a long answer looks at stays, whatever the prompt's end looked at: scores follow attention while decoding.

Guards against scores that are frozen at the prompt's end, refreshed with other weights than those of attention, or
refreshed and then not obeyed.
"""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.testing.compare import MAX_FP32_RELATIVE_ERROR
from hf_sparsekv.testing.oracle import Oracle, forward_both

pytestmark = pytest.mark.usefixtures("registered")

SINKS, RECENT, BUDGET, ANSWER = 4, 8, 24, 60
METHOD = {"num_full_layers": 1, "budget": BUDGET, "num_recent_tokens": RECENT, "observation_window": 8}


class WatchedOracle(Oracle):
    """Remembers the weights of the last row of every layer, fp32 [B, K, N]: mean over the group."""

    def __init__(self, model):
        self.weights = {}
        super().__init__(model)

    def _attention(self, module, query, key, value, *rest, scaling, **options):
        visible = self._visible.layers[module.layer_idx][:, :, -1:]
        grouped = query[:, :, -1].unflatten(1, (key.shape[1], -1))
        logits = (grouped @ key.transpose(-1, -2) * scaling).masked_fill(~visible, float("-inf"))
        self.weights[module.layer_idx] = logits.softmax(dim=-1).mean(dim=2)
        return super()._attention(module, query, key, value, *rest, scaling=scaling, **options)


class Head:
    """One KV head of a layer, step by step: scores by position."""

    def __init__(self, window, head):
        if window.slots is None:  # the prompt fits
            scores = window.column_scores[0, head, : window.columns.num_columns].tolist()
            positions = range(len(scores))
        else:
            positions, scores = window.slots.positions[0, head].tolist(), window.slots.scores[0, head].tolist()
        self.scores = dict(zip(positions, scores, strict=True))

    def lowest(self, position):
        """Who goes when this one comes: the lowest score that nothing protects; None while there is room."""
        free = [p for p in self.scores if SINKS <= p <= position - RECENT]
        return min(free, key=self.scores.__getitem__) if len(self.scores) == BUDGET else None

    def let_in(self, position, victim):
        """Store a new token in the place of another."""
        self.scores.pop(victim, None)
        self.scores[position] = 0.0

    def follow(self, position, stored):
        """Let a new token in as a cache did, whose choice has to be the lowest, or as good as that."""
        gone = set(self.scores) - set(stored)
        lowest, victim = self.lowest(position), gone.pop() if gone else None
        if victim != lowest:  # a near tie: sums of another order
            assert SINKS <= victim <= position - RECENT
            assert self.scores[victim] <= self.scores[lowest] * (1 + MAX_FP32_RELATIVE_ERROR)
        self.let_in(position, victim)
        assert stored == sorted(self.scores)

    def refresh(self, weights, decay, gain):
        """Move the scores towards what the new token looked at."""
        self.scores = {p: decay * score + gain * float(weights[p]) for p, score in self.scores.items()}


@pytest.mark.parametrize("prompt", [30, 10], ids=["prompt evicted", "prompt fits"])
@pytest.mark.parametrize(
    ("options", "decay", "gain"),
    [
        ({"scorer": "snapkv", "prompt_share": 0}, 1 - 1 / 8, 1 / 8),
        ({"scorer": "snapkv", "prompt_share": 0.25}, 1 - 1 / 8, 1 / 8),
        ({"scorer": "snapkv", "decay": 0.5}, 0.5, 0.5),
        ({"scorer": "hybrid"}, 1 - 1 / 8, 1 / 8),
        ({"scorer": "h2o"}, 1.0, 1.0),
        ({"scorer": "tova"}, 0.0, 1.0),
    ],
    ids=["no share", "a quarter", "another decay", "two lists", "h2o", "tova"],
)
def test_what_stays_in_a_long_answer_is_what_its_tokens_attended_to(tiny_llama, prompt, options, decay, gain):
    """Against slots that are replaced by hand, by the weights of dense attention over what is kept."""
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    cache, oracle = skv.SparseKVCache(model.config, skv.SparseKVConfig(**METHOD, **options)), WatchedOracle(model)
    heads, frozen = {}, {}
    for step in range(ANSWER + 1):
        columns = torch.ones(1, prompt + step, dtype=torch.bool)
        forward_both(model, cache, oracle, torch.randint(3, 256, (1, 1 if step else prompt)), columns)
        if step == 0:
            cache.compress()
            windows = {window.spec.layer_idx: window for window in cache._window_layers()}
            for simulated in (heads, frozen):
                simulated |= {(idx, k): Head(window, k) for idx, window in windows.items() for k in range(2)}
            continue
        stored = [layer["positions"] for layer in cache.report(positions=True)["layers"]]
        for (idx, k), head in heads.items():
            position, still = prompt + step - 1, frozen[idx, k]
            head.follow(position, stored[idx][0][k])
            head.refresh(oracle.weights[idx][0, k], decay, gain)
            still.let_in(position, still.lowest(position))
    assert cache.report()["evicted_while_decoding"] == 2 * (ANSWER - max(0, BUDGET - prompt))
    differing = [key for key, head in heads.items() if sorted(head.scores) != sorted(frozen[key].scores)]
    assert len(differing) == len(heads)  # else scores that stand still would do as well
