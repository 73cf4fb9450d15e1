"""The figures that README.md types are those of the files in evals/results that it names.

Tables that `evals.tables` and the site make need no such test. vLLM's column has no file here.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = " ".join(README.split())
BALANCED, PUBLISHED = "serving_balanced_h200", "serving_published_h200"


def report(name):
    return json.loads((ROOT / "evals" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def table(first_cell):
    """Rows of cells of the table whose header begins so."""
    lines = README.split(f"| {first_cell} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def short(share):
    return "1.00" if share == 1 else f"{share:.2f}".removeprefix("0")


def runs(name, engine):
    return {(r["kv_memory_bytes"], r["concurrency"]): r for r in report(name)["runs"] if r["engine"] == engine}


def serving_cell(case, name, engine):
    run = runs(name, engine).get(case)
    if run is None:
        return ""
    ttft = run["ttft_s"]["p50"]
    seconds = f"{ttft:.2f}" if ttft < 10 else f"{ttft:.1f}"
    return f"{run['whole']['output_tokens_per_s']:,.0f}, {seconds} s"


def test_the_serving_table_is_that_of_the_files():
    rows = table("cache memory")
    assert len(rows) == 7
    for memory, concurrency, *cells in rows:
        case = (5 * 2**30 if memory.startswith("5 GiB") else None, int(concurrency))
        expected = [
            serving_cell(case, BALANCED, "sparse"),
            serving_cell(case, PUBLISHED, "sparse"),
            serving_cell(case, PUBLISHED, "dense"),
        ]
        assert cells[:3] == expected, case


def test_the_text_around_the_serving_table():
    balanced, published = report(BALANCED), report(PUBLISHED)
    assert {balanced["commit"], published["commit"]} == {"562a3d1"} and "all of commit 562a3d1" in WORDS
    for one, share in ((balanced, "11.6%"), (published, "19.9%")):
        assert f"{one['runs'][0]['cache']['ratio']:.1%}" == share and share in WORDS
    sparse, dense = (round(run["whole"]["prompt_tokens_per_s"], -2) for run in report("prefill_h200")["runs"])
    assert f"Prefill alone: {sparse:,.0f} prompt tokens/s, dense {dense:,.0f}" in WORDS
    kept = [
        run["memory"]["budget_share"]
        for one in (balanced, published)
        for run in one["runs"]
        if run["engine"] != "transformers"
    ]
    assert max(abs(share - 1) for share in kept) < 0.0075
    fit = runs(PUBLISHED, "sparse")[5 * 2**30, 64]["admissible"]["requests"]
    dense_fit = runs(PUBLISHED, "dense")[5 * 2**30, 64]["admissible"]["requests"]
    assert f"5 GiB: {fit} requests fit, of the dense mode {dense_fit}" in WORDS
    starts = [run for one in (published, balanced) for run in one["runs"] if "engine_s" in (run.get("start") or {})]
    first = [run["start"]["engine_s"] for run in starts if run["engines_before"] == 0]
    assert f"An engine starts in {min(first):.0f} to {max(first):.0f} s the first time" in WORDS
    assert max(run["start"]["engine_s"] for run in starts if run["engines_before"] > 0) < 0.55


def test_what_is_said_at_a_glance():
    def ratio(case):
        return (
            runs(PUBLISHED, "sparse")[case]["whole"]["output_tokens_per_s"]
            / runs(PUBLISHED, "dense")[case]["whole"]["output_tokens_per_s"]
        )

    assert f"{ratio((None, 10)):.2f}x at 10 requests and {ratio((None, 64)):.2f}x at 64" in WORDS
    small = [runs(PUBLISHED, engine)[5 * 2**30, 64]["whole"]["output_tokens_per_s"] for engine in ("sparse", "dense")]
    assert "64 requests in 5 GiB, {:,.0f} tokens/s against {:,.0f} dense".format(*small) in WORDS


NAMES = {"the defaults": "balanced", "question-in-window": "question-in-window", "kv_diversity": "kv_diversity"}
NAMES |= {"KeyDiff": "keydiff", "R-KV": "rkv", "SnapKV": "snapkv", "TOVA": "tova", "StreamingLLM": "streaming_llm"}


def shares(name, task, method, mode, figure=lambda row: row["accuracy"]["value"], ratios=(2, 4, 10)):
    rows = {(r["task"], r["mode"], r["config"]): r for r in report(name)["rows"]}
    return [figure(rows[task, mode, f"{method}-{ratio}x"]) for ratio in ratios]


def test_the_table_of_answers_is_that_of_the_comparison():
    rows = [line for line in README.splitlines() if re.match(r"\| .* \| [\d.]+ / [\d.]+ / [\d.]+ \| [\d.]+ / ", line)]
    assert len(rows) == len(NAMES)
    for row in rows:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        method = next(method for text, method in NAMES.items() if text in name)
        for mode, cell in zip(("aware", "agnostic"), cells, strict=True):
            expected = shares("comparison_retrieval", "needle", method, mode)
            assert cell == " / ".join(".00" if share == 0 else short(share) for share in expected), (method, mode)


def test_the_text_below_the_table_of_answers():
    people = {m: shares("comparison_words", "document_qa", m, "aware") for m in ("balanced", "question-in-window")}
    for method, values in people.items():
        assert f"`{method}` " in WORDS and " / ".join(map(short, values)) in WORDS
    later = [
        row["accuracy"]["value"]
        for row in report("comparison_words")["rows"]
        if (row["task"], row["mode"]) == ("document_qa", "agnostic") and row["config"].endswith(("-4x", "-10x"))
        if "accuracy" in row
    ]
    assert f"(at most {short(max(later))})" in WORDS
    same = {
        method: shares("comparison_mmlu", "mmlu", method, "aware", lambda row: row["agreement"]["same_choice"])[1]
        for method in ("balanced", "question-in-window", "tova")
    }
    text = "in {} (`question-in-window`: {}) of the cases at 4x, TOVA in {} (n = 80"
    assert text.format(*map(short, (same["balanced"], same["question-in-window"], same["tova"]))) in WORDS
    methods = {row["config"].rpartition("-")[0] for row in report("comparison_retrieval")["rows"]} - {""}
    assert len(methods) == 14 and "All fourteen methods" in WORDS


def test_what_is_said_of_the_second_model():
    def found(method, mode):
        return " / ".join(map(short, shares("second_model_people_1k", "document_qa", method, mode, ratios=(4, 10))))

    assert f"`balanced` keeps {found('balanced', 'aware')} asked in the prompt" in WORDS
    later = [found(method, "agnostic") for method in ("balanced", "keydiff", "kv_diversity")]
    assert "and {} asked later, KeyDiff {}, `kv_diversity` {}:".format(*later) in WORDS


def test_one_request_on_a_cpu():
    found = report("decode_speed_cpu")
    for figure in ("decode_tokens_per_s", "prefill_s"):
        assert f"| {found['dense'][figure]:.1f} | {found['sparse'][figure]:.1f} |" in README
    assert (
        f"| {found['dense_cache_bytes']:,} | {found['cache_bytes']:,} (planned {found['planned_bytes']:,}) |" in README
    )
    share, extra = found["scoring_share_of_dense_prefill"], found["scoring_extra_bytes"] / 2**20
    assert f"{share:.1%} of the prefill, {extra:.1f} MiB at most" in README


def test_what_else_was_measured_on_that_card():
    found = report("prefix_h200")["prefix_gains"]
    gains = {gain["concurrency"]: gain for gain in found if gain["engine"] == "sparse"}
    text = (
        f"{gains[32]['throughput']:.1f}x output tokens/s at c = 32; first token {gains[1]['ttft']:.1f}x sooner at c = 1"
    )
    assert text in WORDS
    exact, bounded = (report(f"long_{prefill}_32k")["runs"][0] for prefill in ("exact", "bounded"))
    peaks = [run["admissible"]["peak_request_bytes"] for run in (exact, bounded)]
    first = f"first token after {bounded['ttft_s']['p50']:.2f} s against {exact['ttft_s']['p50']:.2f}"
    assert f"{first}, {peaks[0] / peaks[1]:.0f}x smaller peak" in WORDS
    exact, bounded = (report(f"long_{prefill}_128k")["runs"][0] for prefill in ("exact", "bounded"))
    ratio = exact["admissible"]["peak_request_bytes"] / bounded["admissible"]["peak_request_bytes"]
    first = f"{bounded['ttft_s']['p50']:.2f} s against {exact['ttft_s']['p50']:.1f}"
    assert f"128k tokens: {first}, {ratio:.0f}x" in WORDS
    (batch,) = report("generate_speed_compiled_h200")["batches"]
    steps = [batch[kind]["step_ms"] for kind in ("graphs", "compiled", "transformers")]
    text = "{:.1f} ms a step by CUDA graphs, {:.1f} with compiled layers; transformers' own with a dense cache {:.0f}"
    assert text.format(*steps) in WORDS


def test_two_gpus():
    one = {
        (r["kind"], r["concurrency"]): r for k in ("sparse", "dense") for r in report(f"parallel_h200_tp1_{k}")["runs"]
    }
    two = {(r["kind"], r["concurrency"]): r for r in report("parallel_h200_tp2_8b")["runs"]}

    def span(figure):
        ratios = [two[case][figure] / one[case][figure] for case in two]
        return f"{min(ratios):.1f}x to {max(ratios):.1f}x"

    assert f"decode {span('decode_tokens_per_s')}, prefill {span('prefill_tokens_per_s')}" in WORDS
    large = {(r["kind"], r["concurrency"]): r for r in report("parallel_h200_tp2_70b")["runs"]}
    assert (
        f"Llama-3-70B shape: {round(large['sparse', 64]['decode_tokens_per_s'], -1):,.0f} tokens/s at c = 64" in WORDS
    )


def test_the_page_about_several_gpus():
    text = " ".join((ROOT / "docs" / "benchmarks" / "several-gpus.md").read_text(encoding="utf-8").split())

    def span(name):
        found = [run["collectives"]["share"] for run in report(name)["runs"]]
        return f"{100 * min(found):.0f} to {100 * max(found):.0f}%"

    assert f"take {span('parallel_h200_tp2_8b')} of it (162 of the 70B model: {span('parallel_h200_tp2_70b')})" in text


def test_the_page_on_shared_documents():
    page = (ROOT / "docs" / "how-to" / "shared-documents.md").read_text(encoding="utf-8")
    found = report("prefix_h200")
    gains = {(gain["engine"], gain["concurrency"]): gain for gain in found["prefix_gains"]}
    for engine in ("dense", "sparse"):
        runs = {(run["concurrency"], run["prefix_caching"]): run for run in found["runs"] if run["engine"] == engine}
        first = [runs[1, caching]["ttft_s"]["p50"] for caching in (False, True)]
        sooner = f"{gains[engine, 1]['ttft']:.1f}x sooner"
        assert f"first token after, p50 | {first[0]:.2f} s | {first[1]:.2f} s | {sooner} |" in page
        for clients in (1, 32):
            rates = [runs[clients, caching]["whole"]["output_tokens_per_s"] for caching in (False, True)]
            gain = f"{gains[engine, clients]['throughput']:.1f}x"
            assert f"| {clients} | output tokens/s | {rates[0]:.0f} | {rates[1]:.0f} | {gain} |" in page
