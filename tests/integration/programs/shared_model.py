"""What each rank of a shared model does in the tests of tensor parallelism; run by `hf_sparsekv.testing.ranks`."""

import os
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

import hf_sparsekv as skv
from evals.scoring import Context, SparseScorer
from evals.shared_prefill import SharedPrefill
from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.hf.sharding import load_sharded
from hf_sparsekv.hf.switch import sparse_attention
from hf_sparsekv.parallel.group import join_replica, leave_replica
from hf_sparsekv.parallel.place import Place
from hf_sparsekv.parallel.ranks import losing_others, ranks_of

OPTIONS = skv.EngineConfig(
    kv_memory_bytes=1 << 20,
    max_num_seqs=4,
    max_batch_tokens=128,
    block_size=8,
    max_model_len=160,
    reserve_output_tokens=0,
)
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def load(path):
    mesh = join_replica(Place.of_environment(WORLD), "cpu")
    return load_sharded(path, mesh, dtype=torch.float32)


def generated(model, config, prompt, **options):
    """Tokens, kept positions [layer][KV head] and scores [step][V] of one prompt."""
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    cache = skv.SparseKVCache(model.config, config)
    out = skv.generate(model, torch.tensor([prompt]), cache=cache, **settings)
    layers = cache.report(positions=True)["layers"]
    return out.new_tokens.tolist(), [layer["positions"][0] for layer in layers]


def logits_of(model, prompt):
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].numpy()  # not a tensor: its memory would go with the process


def served(model, config, prompts, params, options=OPTIONS):
    with skv.Engine(model, config, options) as engine:
        outputs = engine.generate(prompts, params)
        blocks = engine.memory.num_blocks
    return [(o.token_ids, o.error, o.report.num_preemptions) for o in outputs], blocks


def compare(path, configs, prompts, params, options):
    """Everything that must be as on one process, by configuration."""
    model = load(path)
    found = {
        config: {
            "generate": generated(model, skv.SparseKVConfig.from_json(config), prompts[-1]),
            "engine": served(model, skv.SparseKVConfig.from_json(config), prompts, params, options)[0],
        }
        for config in configs
    }
    found["logits"] = logits_of(model, prompts[-1])
    leave_replica()
    return found


def shared_prefixes(model, configs, prompts, params, options, rank=0):
    """(tokens, cached tokens, error) of prompts one after the other, then together, then behind an emptied cache."""
    with skv.Engine(model, configs[0], options) as engine:
        outputs = [engine.generate([p], params, config=c)[0] for p, c in zip(prompts, configs, strict=True)]
        outputs += engine.generate(prompts, params)
        if rank == 0:
            engine.forget_prefixes()
        outputs += engine.generate(prompts[:1], params)
    return [(output.token_ids, output.cached_tokens, output.error) for output in outputs]


def share_prefixes(path, configs, prompts, params, options):
    """`shared_prefixes` of a model that is shared itself, and what each configuration keeps in `generate`."""
    model = load(path)
    found = shared_prefixes(model, configs, prompts, params, options, RANK)
    kept = [generated(model, config, prompts[0]) for config in configs[:2]]
    leave_replica()
    return found, kept


def sample(path, config, prompt):
    """Sampled and searched tokens, the ranks' own seeds and memories being different."""
    model = load(path)
    torch.manual_seed(RANK)
    before = torch.get_rng_state()
    sampled = generated(model, config, prompt, do_sample=True, temperature=2.0)[0]
    is_untouched = torch.equal(before, torch.get_rng_state())
    beams = generated(model, config, prompt, num_beams=3)[0]
    params = skv.SamplingParams(max_tokens=12, do_sample=True, temperature=2.0, ignore_eos=True)
    options = OPTIONS.with_(kv_memory_bytes=(1 << 20) - RANK * (1 << 18))
    outputs, blocks = served(model, config, [prompt] * 3, params, options)
    leave_replica()
    return {
        "sampled": sampled,
        "beams": beams,
        "engine": outputs,
        "blocks": blocks,
        "is_random_state_untouched": is_untouched,
    }


class OneBadHead(skv.Scorer):
    """Fails for the layer's last KV head, of long prompts."""

    name = "one_bad_head"
    queries = "none"
    is_query_aware = False
    is_probability = False

    def score(self, inputs):
        scores = inputs.keys.float().norm(dim=-1)
        last = (inputs.heads.total or inputs.keys.shape[1]) - 1
        if inputs.heads.first <= last < inputs.heads.first + inputs.keys.shape[1] and inputs.num_seen > 60:
            scores[:, last - inputs.heads.first] = float("nan")
        return scores


def fail_on_one_rank(path, config, prompts, params):
    """Outputs of an engine whose scorer fails on one rank only; and what the other methods say on each rank."""
    model = load(path)
    skv.register_scorer(OneBadHead)
    with skv.Engine(model, config.with_(scorer="one_bad_head"), OPTIONS) as engine:
        outputs = [(o.token_ids, o.error) for o in engine.generate(prompts, params)]
        if RANK:
            try:
                engine.add_request(prompts[0])
            except skv.RequestError as error:
                refusal = str(error)
            engine.follow()
            leave_replica()
            return outputs, refusal
        name = engine.add_request(prompts[-2], params)
        other = engine.add_request(prompts[0], params, config=config.with_(budget=30))
        engine.step()
        engine.abort(name)
        ends = []
        while engine.has_unfinished:
            ends += [o for o in engine.step() if o.is_finished]
    leave_replica()
    assert [o.request_id for o in ends] == [other], ends
    return outputs, ends[0].token_ids


def interrupt_while_scores_are_compared(path, config, prompt):
    """Of rank 0: what the engine says after an interrupt there, and how many messages it sends; of the other: its end.

    The other rank waits in the comparison, and must be sent nothing else.
    """
    model = load(path)
    engine = skv.Engine(model, config, OPTIONS)
    if RANK:
        try:
            engine.follow()
        except RuntimeError as error:
            return type(error).__name__, str(error)
        return "ended", ""
    union, sent = engine._ranks.union, []

    def interrupted(values):
        raise KeyboardInterrupt

    engine._ranks.union = interrupted
    engine.add_request(prompt, skv.SamplingParams(max_tokens=4, ignore_eos=True))
    try:
        while engine.has_unfinished:
            engine.step()
    except KeyboardInterrupt:
        engine._ranks.union = union
    engine._ranks.share = sent.append
    try:
        engine.step()
        said = "nothing"
    except skv.EngineError as error:
        said = str(error)
    engine.close()
    return said, len(sent)


def refuse(path):
    """The error of a model whose heads do not divide."""
    model = load(path)
    errors = []
    for call in (lambda: skv.Engine(model), lambda: skv.generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=2)):
        try:
            call()
        except skv.ConfigError as error:
            errors.append(str(error))
    leave_replica()
    return errors


def collectives(path, config, prompt):
    """Counted over the same 8 tokens: of a dense cache in `model.generate`, of ours, and of 8 steps of the engine."""
    model = load(path)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    with counted() as dense, torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    with counted() as sparse:
        skv.generate(model, ids, config, **settings)
    with skv.Engine(model, config, OPTIONS) as engine, counted() as served:
        engine.generate([prompt], skv.SamplingParams(max_tokens=8, ignore_eos=True))
    leave_replica()
    return dict(dense.counts), dict(sparse.counts), dict(served.counts)


def evaluated(model, configs, prompt, tail, continuations):
    """By configuration: kept positions [layer][KV head], log-likelihoods and footprint, of all from one prefill.

    And the same figures from a prefill of each, in which bytes are measured, with this rank's own beside them.
    """
    read = SharedPrefill(model, configs).read(prompt)
    scores, ranks = read.score(tail, continuations), ranks_of(model, model_shape(model.config))
    found = {}
    for name, kept in read.kept().items():
        layers = zip(kept.index, kept.counts, strict=True)
        positions = [index_KC[:, :count].tolist() for index_KC, count in layers]
        found[name] = {"kept": positions, "shared": figures_of(scores[name])}
        scorer = SparseScorer(model, configs[name], softmax_dtype=torch.float32, ranks=ranks)
        (own,) = scorer.score([Context(tuple(prompt), tuple(tail), tuple(map(tuple, continuations)))])
        with sparse_attention(model), torch.no_grad():
            cache = scorer._read([tuple(prompt)])[0]
        found[name] |= {"own": figures_of(own), "rank_bytes": cache.report()["cache_bytes"]}
    return found


def figures_of(result):
    return [score.log_likelihood for score in result.scores], result.footprint


def evaluate(path, *arguments):
    """`evaluated` on each rank."""
    model = load(path)
    found = evaluated(model, *arguments)
    leave_replica()
    return found


def evaluate_a_bad_head(path, config, prompt):
    """What ends each rank when a scorer fails on one."""
    model = load(path)
    skv.register_scorer(OneBadHead)
    read = SharedPrefill(model, {"bad": config.with_(scorer="one_bad_head")}).read(prompt)
    try:
        with losing_others():
            read.score([5], [[6, 7]])
    except skv.SparseKVError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


class counted:  # noqa: N801 (used like a function)
    """Counts what gloo does, whoever asks for it."""

    def __enter__(self):
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.profiler.__enter__()
        return self

    def __exit__(self, *error):
        self.profiler.__exit__(*error)
        names = [event.name for event in self.profiler.events()]
        self.counts = Counter(name for name in names if name.startswith("gloo:"))
