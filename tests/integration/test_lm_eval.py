"""lm-eval with a sparse cache: right scores, honest counts, and no score where nothing was ever evicted.

Guards against a harness that scores without a cache, or with a fork, padding or truncation that changes the score.
"""

import importlib
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_sparsekv as skv
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.switch import sparse_attention
from hf_sparsekv.testing.compare import MAX_LOGITS_RELATIVE_ERROR
from hf_sparsekv.testing.models import tiny_llama as build_tiny_llama
from hf_sparsekv.testing.oracle import Oracle, forward_both, kept_columns

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'hf-sparsekv[eval]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's and its dependencies' own

ROOT = Path(__file__).parents[2]
SMALL = {"num_full_layers": 1, "budget": 16, "num_sink_tokens": 2, "num_recent_tokens": 4, "observation_window": 4}
MAX_LENGTH = 64
"""Of the model as the harness sees it: short, so that truncation happens."""


@pytest.fixture(scope="module")
def harness():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("evals.harness")


@pytest.fixture(scope="module")
def tokenizer():
    """One word, one token: "w7" is id 7; a text says exactly what ids it is."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 256)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def model():
    return build_tiny_llama(num_layers=3)


@pytest.fixture
def build(harness, model, tokenizer):
    """The adapter around the tiny model."""

    def built(method=SMALL, **options):
        options = {"max_length": MAX_LENGTH, "batch_size": 3} | options
        return harness.SparseKVLM(model, tokenizer=tokenizer, sparse_config=skv.SparseKVConfig(**method), **options)

    return built


@pytest.fixture
def stock(model, tokenizer):
    from lm_eval.models.huggingface import HFLM

    return HFLM(model, tokenizer=tokenizer, max_length=MAX_LENGTH, batch_size=3)


def words(count, seed):
    ids = torch.randint(3, 256, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=given, idx=0, metadata=("a_task", i, 1))
        for i, given in enumerate(arguments)
    ]


def pairs():
    """Contexts of many lengths, shared and not, beyond the model and empty; continuations of one and more tokens."""
    shared = words(40, 1)
    return [
        (shared, " w5"),
        (shared, " w6"),
        (shared, " w6 w7 w8"),
        (shared, " w6 w7 w9"),
        (words(23, 2), " w5 w9"),
        (words(30, 3), " w200"),
        (words(90, 4), " w11 w12 w13"),  # loses its beginning
        (words(90, 4), " w11"),
        ("", words(5, 5)),
        (words(3, 6), " w3 w4"),
    ]


def is_close(score, expected):
    return abs(score - expected) <= MAX_LOGITS_RELATIVE_ERROR * max(abs(score), abs(expected))


def log_likelihood(logits_TV, targets):
    return float(logits_TV.log_softmax(-1).gather(-1, torch.tensor(targets)[:, None]).sum())


def oracle_score(model, config, context, continuation, held_back):
    """Of one request alone: dense attention, masked to what a sparse cache of the context has kept."""
    cut = max(len(context) - held_back, 1)
    head, feed = torch.tensor([context[:cut]]), torch.tensor([context[cut:] + continuation[:-1]], dtype=torch.long)
    cache, oracle = skv.SparseKVCache(model.config, config, prompt_length=cut), Oracle(model)
    with sparse_attention(model):
        first, _ = forward_both(model, cache, oracle, head, torch.ones(1, cut, dtype=torch.bool))
    logits = [first[:, -1:]]
    if feed.shape[1]:
        seen = torch.cat([torch.ones(1, cut), torch.zeros(1, feed.shape[1])], dim=1).bool()
        num_columns = seen.shape[1]
        new = torch.ones(feed.shape[1], feed.shape[1], dtype=torch.bool).tril()
        new = torch.cat([torch.zeros(feed.shape[1], cut, dtype=torch.bool), new], dim=1)
        visible = [kept[:, :, None] | new for kept in kept_columns(cache, seen)]
        positions = torch.arange(cut, num_columns)[None]
        logits.append(oracle.forward(feed, positions, visible))
    return log_likelihood(torch.cat(logits, dim=1)[0, len(context) - cut :], continuation)


@pytest.mark.parametrize("held_back", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_score_is_that_of_dense_attention_masked_to_what_was_kept(build, model, held_back, batch_size):
    lm = build(held_back_tokens=held_back, batch_size=batch_size)
    requests = instances("loglikelihood", *pairs())
    answers = lm.loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (score, _), record in zip(pairs(), answers, lm.records, strict=True):
        target = lm.tok_encode(continuation.strip())
        ids = ([1, *lm.tok_encode(context)] if not context else lm.tok_encode(context))[-(65 - len(target)) :]
        assert is_close(score, oracle_score(model, lm.sparse_config, ids, target, held_back)), (context, continuation)
        assert record.num_context_tokens == len(ids)
        assert record.num_evicted == 2 * max(len(ids) - min(held_back, len(ids) - 1) - 16, 0)  # two window layers
        assert record.is_sparse == (record.num_evicted > 0 and (held_back > 0 or len(target) > 1))


def test_the_compression_changes_scores_but_not_an_answer_token_read_off_the_prefill(build, stock):
    """Why the end of a context is held back: else a one-token answer would be the dense model's."""
    requests = instances("loglikelihood", *pairs())
    dense = stock.loglikelihood(requests, disable_tqdm=True)
    for held_back in (0, 1):
        sparse = build(held_back_tokens=held_back).loglikelihood(requests, disable_tqdm=True)
        same = [is_close(a[0], b[0]) for a, b in zip(sparse, dense, strict=True)]
        is_single = [len(continuation.split()) == 1 for _, continuation in pairs()]
        is_short = [len(context.split()) < 16 for context, _ in pairs()]
        expected = [short or (single and not held_back) for short, single in zip(is_short, is_single, strict=True)]
        assert same == expected


def test_greedy_says_whether_every_token_is_the_most_probable(build, model):
    lm, context = build(), words(40, 1)
    ids = torch.tensor([lm.tok_encode(context)])
    config = lm.sparse_config
    cache = skv.SparseKVCache(model.config, config, prompt_length=39)
    best = []
    with sparse_attention(model), torch.no_grad():
        model(ids[:, :-1], **{CACHE_KEYWORD: cache})
        cache.expect_prompt(5)
        token = ids[:, -1:]
        for _ in range(3):
            token = model(token, **{CACHE_KEYWORD: cache}).logits[:, -1:].argmax(-1)
            best.append(int(token))
    good, bad = (" ".join(f" w{i}" for i in tail) for tail in (best, [*best[:2], 3 + (best[2] == 3)]))
    answers = lm.loglikelihood(instances("loglikelihood", (context, good), (context, bad)), disable_tqdm=True)
    assert [is_greedy for _, is_greedy in answers] == [True, False]


def test_a_shared_context_is_read_once(build, model):
    lm, shapes = build(batch_size=8), []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(args[0].shape)), with_kwargs=True
    )
    try:
        shared = [(words(40, 1), f" w{i} w{i}") for i in range(5, 10)] + [
            (words(40, 1), f" w5 w{i}") for i in range(20, 23)
        ]
        lm.loglikelihood(instances("loglikelihood", *shared), disable_tqdm=True)
    finally:
        hook.remove()
    assert shapes == [(1, 39), (5, 2)]  # the context; then five forks, one of which answers four requests


def test_with_a_budget_for_everything_all_scores_are_the_stock_harness_scores(build, stock):
    lm = build(SMALL | {"budget": 128}, require_eviction=False)
    requests = instances("loglikelihood", *pairs())
    assert lm.loglikelihood(requests, disable_tqdm=True) == stock.loglikelihood(requests, disable_tqdm=True)
    texts = instances("loglikelihood_rolling", *((words(n, n),) for n in (5, 64, 150)), ("",))
    assert lm.loglikelihood_rolling(texts, disable_tqdm=True) == stock.loglikelihood_rolling(texts, disable_tqdm=True)
    settings = {"max_gen_toks": 8, "until": ["w9"], "do_sample": False}
    prompts = instances("generate_until", *((words(n, n), settings) for n in (3, 20, 40, 80)))
    assert lm.generate_until(prompts, disable_tqdm=True) == stock.generate_until(prompts, disable_tqdm=True)
    assert len(lm.records) == len(requests) + len(texts) + len(prompts)
    assert not any(record.is_sparse or record.num_evicted for record in lm.records)


@pytest.mark.parametrize("name", ["budget", "full"])
def test_the_cached_path_itself_agrees_with_the_stock_harness_when_nothing_is_evicted(harness, model, stock, name):
    """Requests that evict nothing are left to the harness; the sparse path must not depend on that."""
    from evals.scoring import Context, SparseScorer, split_context

    method = SMALL | ({"budget": 128} if name == "budget" else {"num_full_layers": 3})
    scorer = SparseScorer(model, skv.SparseKVConfig(**method), batch_size=2)
    texts = [pair for pair in pairs() if pair[0] and len(pair[0].split()) < 60]
    dense = stock.loglikelihood(instances("loglikelihood", *texts), disable_tqdm=True)
    contexts = [
        Context(*split_context(stock.tok_encode(context), 2), (tuple(stock.tok_encode(continuation)),))
        for context, continuation in texts
    ]
    for result, (score, is_greedy) in zip(scorer.score(contexts), dense, strict=True):
        assert is_close(result.scores[0].log_likelihood, score)
        assert result.scores[0].is_greedy == is_greedy
        assert result.footprint.num_evicted == 0


def test_a_rolling_text_is_read_in_chunks_with_a_selection_after_each(build, model):
    lm = build(rolling_chunk_tokens=12)
    texts = [words(60, 1), words(9, 2), words(130, 3), ""]
    answers = lm.loglikelihood_rolling(instances("loglikelihood_rolling", *((t,) for t in texts)), disable_tqdm=True)
    for text, answer in zip(texts, answers, strict=True):
        assert is_close(answer, sum(chunked(model, lm, *window) for window in windows(lm.tok_encode(text))))
    assert [record.is_sparse for record in lm.records] == [True, False, True, False]
    assert [record.num_context_tokens for record in lm.records] == [60, 9, 130, 0]


def windows(ids):
    """(tokens, how many of the last ones are scored): each token once, as much read before them as fits the model."""
    ids = [1, *ids]
    for start in range(0, len(ids) - 1, MAX_LENGTH):
        count = min(MAX_LENGTH, len(ids) - 1 - start)
        yield ids[max(start + count - MAX_LENGTH, 0) : start + count + 1], count


def chunked(model, lm, ids, count):
    """Log-likelihood of the last tokens of a window, by the oracle."""
    cache, oracle, logits = skv.SparseKVCache(model.config, lm.sparse_config), Oracle(model), []
    for start in range(0, len(ids) - 1, 12):
        end = min(start + 12, len(ids) - 1)
        chunk = ids[start:end]
        cache.expect_prompt(len(chunk))
        with sparse_attention(model):
            _, dense = forward_both(model, cache, oracle, torch.tensor([chunk]), torch.ones(1, end, dtype=torch.bool))
        logits.append(dense[0])
    return log_likelihood(torch.cat(logits)[-count:], ids[-count:])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_generation_goes_through_generate(build, model, tokenizer, batch_size):
    lm = build(SMALL | {"decode": "ring"}, batch_size=batch_size)
    settings = {"max_gen_toks": 6, "until": [], "do_sample": False}
    prompts = [words(40, 1), words(25, 2), words(4, 3), ""]
    texts = lm.generate_until(instances("generate_until", *((p, settings) for p in prompts)), disable_tqdm=True)
    for prompt, text in zip(prompts, texts, strict=True):
        alone = skv.generate(
            model, prompt or "<s>", lm.sparse_config, tokenizer=tokenizer, max_new_tokens=6, do_sample=False
        )
        assert text == alone.text[0]
    assert [record.is_sparse for record in lm.records] == [True, True, False, False]
    assert [record.num_context_tokens for record in lm.records] == [40, 25, 4, 1]
    assert [record.doc_id for record in lm.records] == [0, 1, 2, 3]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_no_score_without_eviction(build, harness):
    from evals.ledger import EvictionError

    short = instances("loglikelihood", (words(9, 1), " w5 w6"))
    with pytest.raises(EvictionError, match=r"budget=16.*longest context has 9 tokens.*require_eviction=False"):
        build().loglikelihood(short, disable_tqdm=True)
    with pytest.raises(EvictionError, match="nothing was evicted"):
        build().loglikelihood_rolling(instances("loglikelihood_rolling", (words(9, 1),)), disable_tqdm=True)
    prompt = instances("generate_until", (words(9, 1), {"max_gen_toks": 2, "until": [], "do_sample": False}))
    with pytest.raises(EvictionError, match="nothing was evicted"):
        build().generate_until(prompt, disable_tqdm=True)
    prompt = instances("generate_until", (words(40, 1), {"max_gen_toks": 1, "until": [], "do_sample": False}))
    with pytest.raises(EvictionError, match="only one is generated"):
        build().generate_until(prompt, disable_tqdm=True)
    single = instances("loglikelihood", (words(40, 1), " w5"))
    with pytest.raises(EvictionError, match="held_back_tokens=1"):
        build(held_back_tokens=0).loglikelihood(single, disable_tqdm=True)
    assert build(held_back_tokens=0, require_eviction=False).loglikelihood(single, disable_tqdm=True)


def test_what_cannot_be_scored_is_named(build):
    with pytest.raises(InputError, match="continuation has no token"):
        build()._loglikelihood_tokens([(("a", ""), [5, 6], [])])
    with pytest.raises(InputError, match="has 65 tokens, the model takes 64"):
        build()._loglikelihood_tokens([(("a", "b"), [5, 6], [7] * 65)])
    with pytest.raises(ConfigError, match="batch_size"):
        build(batch_size="auto")
    with pytest.raises(ConfigError, match="held_back_tokens"):
        build(held_back_tokens=-1)
    with pytest.raises(ConfigError, match="mixed_precision_dtype"):
        build(mixed_precision_dtype="bfloat16")


# --- model arguments --------------------------------------------------------------------------------------------------


def test_all_options_come_as_model_arguments(harness, model, tokenizer, tmp_path):
    from lm_eval.api.registry import get_model

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = (
        f"pretrained={tmp_path},dtype=float32,budget=24;40,full_layers=1,num_recent_tokens=8,observation_window=8,"
        "scorer=hybrid,pooling=max,pool_kernel_size=5,row_reduction=max,held_back_tokens=2"
    )
    lm = get_model("sparsekv").create_from_arg_string(text, {"batch_size": 2, "device": "cpu"})
    expected = {"budget": (24, 40), "full_layers": (1,), "num_recent_tokens": 8, "observation_window": 8}
    expected |= {"scorer": "hybrid", "pooling": "max", "pool_kernel_size": 5, "row_reduction": "max"}
    assert lm.sparse_config == skv.SparseKVConfig(**expected)
    assert (lm.held_back_tokens, lm.batch_size) == (2, 2)
    assert json.dumps(lm.get_model_info()["sparsekv"])


def test_options_as_text_and_slips(harness):
    from evals.model_args import split_options

    config, rest = split_options({"scorer": "random", "scorer_options": "seed:3", "dtype": "auto"}, None, ("dtype",))
    assert (config.scorer, dict(config.scorer_options), rest) == ("random", {"seed": 3}, {"dtype": "auto"})
    with pytest.raises(ConfigError, match="did you mean 'budget'"):
        split_options({"buget": 5}, None, ())
    with pytest.raises(ConfigError, match="not both"):
        split_options({"budget": 64}, skv.SparseKVConfig(), ())
    with pytest.raises(ConfigError, match="name:value"):
        split_options({"scorer_options": "seed"}, None, ())


# --- a task, from its files to the figures ----------------------------------------------------------------------------


@pytest.fixture
def tasks(tmp_path):
    """A folder with a multiple-choice task whose contexts are long, and the same one with short contexts."""
    for name, length in (("long_contexts", 30), ("short_contexts", 5)):
        lines = [{"text": words(length + i, i), "choices": ["w5", "w6 w7", "w8"], "answer": i % 3} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": f"{tmp_path}/{name}.jsonl"}, "cache_dir": f"{tmp_path}/cache"},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_target": "answer",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc"}],
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return tmp_path


def test_a_task_of_ones_own_gives_figures_with_everything_that_made_them(harness, model, tokenizer, tasks):
    options = {"include_path": str(tasks), "include_defaults": False, "model_options": {"tokenizer": tokenizer}}
    options |= {"batch_size": 2, "limit": 3, "bootstrap_iters": 0}
    config = skv.SparseKVConfig(**SMALL)
    figures = harness.evaluate(model, ["long_contexts", "short_contexts"], config, **options)
    assert json.loads(json.dumps(figures)) == figures
    assert set(figures["results"]) == set(figures["samples"]) == {"long_contexts"}
    assert "none of 9 scores" in figures["refused"]["short_contexts"]
    eviction = figures["eviction"]
    assert eviction["all"]["eviction_share"] == eviction["all"]["sparse_share"] == 0.5
    assert eviction["tasks"]["long_contexts"]["num_sparse"] == 9
    assert eviction["tasks"]["long_contexts"]["compression"] > 1
    assert skv.SparseKVConfig.from_dict(figures["config"]) == config
    assert figures["versions"]["lm_eval"] and len(figures["model"]["weights_sha256"]) == 64
    lm = harness.SparseKVLM(model, tokenizer=tokenizer, sparse_config=config, batch_size=2)
    correct = []
    for sample in figures["samples"]["long_contexts"]:
        answers = lm.loglikelihood(instances("loglikelihood", *map(tuple, sample["arguments"])), disable_tqdm=True)
        assert [answer[0] for answer in answers] == pytest.approx(
            [float(resp[0][0]) for resp in sample["resps"]], rel=MAX_LOGITS_RELATIVE_ERROR
        )
        correct.append(max(range(3), key=lambda i: answers[i][0]) == sample["target"])
        assert len(sample["requests"]) == 3
        assert all(request["is_sparse"] and request["doc_id"] == sample["doc_id"] for request in sample["requests"])
    assert figures["results"]["long_contexts"]["acc,none"] == pytest.approx(sum(correct) / 3)


def test_what_no_task_can_give(harness, model, tokenizer, tasks):
    options = {"include_path": str(tasks), "include_defaults": False, "model_options": {"tokenizer": tokenizer}}
    with pytest.raises(InputError, match="unknown task 'long_context'"):
        harness.evaluate(model, "long_context", **options)
    with pytest.raises(InputError, match="no task is named"):
        harness.evaluate(model, [], **options)
    with pytest.raises(RuntimeError, match=r"no score of 12 requests.*longest context has 8 tokens"):
        harness.evaluate(model, "short_contexts", skv.SparseKVConfig(**SMALL), bootstrap_iters=0, **options)
    with pytest.raises(ConfigError, match="use_cache"):
        harness.evaluate(model, "long_contexts", use_cache="answers", **options)
