"""What the documentation site says that no page types: the command line, tables of results, parts of other documents.

`mkdocs.yml` names this file as a hook. Pages ask for the rest with comments, which GitHub does not show:

    <!-- section:kernels/README.md#Build -->      what stands under that heading
    <!-- serving:serving_published_h200 -->        a table of `evals/results/serving_published_h200.json`
    <!-- equal:serving_published_h200 -->          its engines side by side at an equal batch
    <!-- shapes:budget_shapes_needle -->          likewise, of a comparison of budget shapes
    <!-- modes:decode_modes_1k_128 -->           likewise, of decode modes over long texts
    <!-- parallel:parallel_tp1 parallel_tp2 -->   one model on several GPUs, against the same on one
    <!-- notebooks:notebooks -->                  the notebooks of a folder, each with its first paragraph
    <!-- scorers:3 -->                            the reference of every registered scorer, under headings of that level
    <!-- commands:2 -->                           every subcommand with its options, likewise

What stands between `<!-- host -->` and `<!-- /host -->` is for readers of the Markdown itself, on the repository's
host: where to find what a page would hold here.

Accuracy tables are not made here: `python -m evals.tables` writes them into the pages.
"""

import inspect
import json
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

from hf_sparsekv.cli.app import COMMANDS, load_command
from hf_sparsekv.scorers import build_scorer, scorer_names

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "evals" / "results"
SITE_RESULTS = "benchmarks/results/"
"""Where the site has the files of `RESULTS`."""
SHOWN_RESULTS = (".csv", ".json", ".png", ".svg")

_MARKER = re.compile(
    r"<!-- (?P<kind>section|serving|equal|shapes|modes|parallel|notebooks|scorers|commands):(?P<argument>.+?) -->"
)
_FOR_HOST = re.compile(r"<!-- host -->.*?<!-- /host -->\n*", re.DOTALL)
_FORMULA = re.compile(
    r'<(?P<tag>div|span) class="arithmatex">\\(?P<open>[\[(])(?P<latex>.+?)\\[\])]</(?P=tag)>', re.DOTALL
)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_PLACES = (("evals/results/", SITE_RESULTS), ("kernels/README.md", "how-to/build-kernels.md"), ("docs/", ""))
"""Links of documents at the repository's root, as the site has their targets."""


class SiteError(Exception):
    """A page asks for something that is not there."""


# --- what mkdocs calls --------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the files of results that pages show or link to."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.iterdir()):
        if path.suffix in SHOWN_RESULTS:
            files.append(File.generated(config, SITE_RESULTS + path.name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put what belongs there in the place of a page's markers."""
    return filled(markdown, page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """Put MathML, which browsers draw by themselves, in the place of a page's LaTeX."""
    from latex2mathml.converter import convert

    return with_formulas(html, convert)


# --- formulas -----------------------------------------------------------------------------------------------------


def with_formulas(html: str, to_mathml: Callable[..., str]) -> str:
    """A page whose formulas, as pymdownx.arithmatex marks them, were converted.

    Args:
        html: of the page.
        to_mathml: takes LaTeX and `display=`, "block" or "inline".
    """

    def made(formula: re.Match[str]) -> str:
        display = "block" if formula["open"] == "[" else "inline"
        return to_mathml(unescape(formula["latex"]).strip(), display=display)

    return _FORMULA.sub(made, html)


# --- markers ------------------------------------------------------------------------------------------------------


def filled(markdown: str, page: str) -> str:
    """A page with its markers replaced.

    Args:
        markdown: its text.
        page: its path below docs/, to which links are made relative.
    Raises:
        SiteError: a marker names a file or a heading that is not there.
    """

    def made(marker: re.Match[str]) -> str:
        kind, argument = marker["kind"], marker["argument"]
        if kind == "section":
            name, _, heading = argument.partition("#")
            return moved(section(_read(ROOT / name), heading, name), page)
        if kind == "notebooks":
            return notebooks(ROOT / argument)
        if kind == "scorers":
            return scorers(int(argument))
        if kind == "commands":
            return commands(int(argument))
        reports = [json.loads(_read(RESULTS / f"{name}.json")) for name in argument.split()]
        return parallel_table(reports) if kind == "parallel" else _TABLES[kind](*reports)

    return _MARKER.sub(made, _FOR_HOST.sub("", markdown))


def section(text: str, heading: str, name: str) -> str:
    """What stands under a heading of a Markdown document, up to the next one of its level or above.

    Raises:
        SiteError: there is no such heading.
    """
    lines, found, is_code = text.splitlines(), [], False
    level = 0
    for line in lines:
        is_code ^= line.startswith("```")
        mark = None if is_code else re.match(r"(#+) (.*)", line)
        if level and mark and len(mark[1]) <= level:
            break
        if level:
            found.append(line)
        elif mark and mark[2] == heading:
            level = len(mark[1])
    if not level:
        raise SiteError(f"{name} has no heading {heading!r}")
    return "\n".join(found).strip()


def moved(text: str, page: str) -> str:
    """A text from the repository's root with its links as they must be on a page."""

    def link(found: re.Match[str]) -> str:
        target = found["target"]
        for prefix, place in _PLACES:
            if target.startswith(prefix):
                path, hash_, anchor = (place + target.removeprefix(prefix)).partition("#")
                return f"]({posixpath.relpath(path, posixpath.dirname(page) or '.')}{hash_}{anchor})"
        return found[0]

    return _LINK.sub(link, text)


def notebooks(folder: Path) -> str:
    """Markdown: each notebook's file, with the title and the paragraph that it opens with.

    Raises:
        SiteError: there is none, or one that does not open so.
    """
    parts = []
    for path in sorted(folder.glob("*.ipynb")):
        opening = "".join(json.loads(_read(path))["cells"][0]["source"])
        found = re.match(r"# (?:\d+\. )?(?P<title>.+)\n\n(?P<text>(?:.+\n?)+)", opening)
        if found is None:
            raise SiteError(f"{path} does not open with a title and a paragraph")
        parts.append(f"**{found['title']}** (`{folder.name}/{path.name}`)\n\n{found['text'].strip()}")
    if not parts:
        raise SiteError(f"no notebook in {folder}")
    return "\n\n".join(parts)


def scorers(level: int) -> str:
    """What mkdocstrings makes the reference of each registered scorer of."""
    classes = [type(build_scorer(name, {})) for name in scorer_names()]
    options = f'    options: {{heading_level: {level}, filters: ["!^_", "!^score$"]}}'
    return "\n\n".join(f"::: {of.__module__}.{of.__name__}\n{options}" for of in classes)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SiteError(f"cannot read {path}: {error}") from error


# --- the command line ---------------------------------------------------------------------------------------------


def commands(level: int) -> str:
    """Markdown: every subcommand with its options, from the program itself."""
    parts = []
    for name in COMMANDS:
        command = load_command(name)
        context = command.make_context(f"hf-sparsekv {name}", [], resilient_parsing=True)
        parts += [
            f"{'#' * level} {name}",
            "```\n" + _usage(command, context) + "\n```",
            inspect.cleandoc(command.help or ""),
        ]
        panels: dict[str, list[Sequence[str]]] = {}
        for param in command.params:
            record = param.get_help_record(context)
            if record:
                panel = getattr(param, "rich_help_panel", None) or "Options"
                panels.setdefault(panel, []).append((f"`{record[0].strip()}`", " ".join(record[1].split())))
        for panel, rows in panels.items():
            parts += [f"**{panel}**", _markdown((panel.lower(), "meaning"), rows)]
    return "\n\n".join(parts)


def _usage(command: Any, context: Any) -> str:
    return " ".join(["hf-sparsekv", command.name, *command.collect_usage_pieces(context)])


# --- results ------------------------------------------------------------------------------------------------------


def serving_table(report: Mapping[str, Any]) -> str:
    """Markdown: every run of `hf-sparsekv bench --json`."""
    heads = ["engine", "cache memory", "c", "output tokens/s", "prompt tokens/s", "TTFT p50 / p99, s"]
    heads += ["between tokens p50 / p99, ms", "cache of a request", "preempted"]
    rows = []
    for run in report["runs"]:
        memory = run["kv_memory_bytes"]
        rows.append(
            (
                run["engine"],
                f"{run['memory_fraction']:.0%} of the card" if memory is None else f"{memory / 2**30:g} GiB",
                str(run["concurrency"]),
                f"{run['whole']['output_tokens_per_s']:,.0f}",
                f"{run['whole']['prompt_tokens_per_s']:,.0f}",
                _pair(run["ttft_s"], 1, 2),
                _pair(run["itl_s"], 1000, 1),
                _cache_of(run),
                "-" if run["num_preemptions"] is None else str(run["num_preemptions"]),
            )
        )
    origin = f"{report['device']['name']}, {report['model']['name']}, {report['model']['dtype']}"
    versions = f"torch {report['versions']['torch']}, transformers {report['versions']['transformers']}"
    made = f"{origin}, {report['date'][:10]}, commit {report['commit']}, {versions}."
    return f"{_markdown(heads, rows)}\n{made}\n\n```\n{report['command']}\n```\n"


def _cache_of(run: Mapping[str, Any]) -> str:
    """Bytes of a request; transformers' engine does not say."""
    cache = run["cache"]
    return "-" if cache is None else f"{cache['bytes_per_request']:,.0f} bytes, {cache['ratio']:.1%} of dense"


def equal_table(report: Mapping[str, Any]) -> str:
    """Markdown: output tokens/s of our two engines at the same concurrency, with all of the card's memory."""
    engines, found = ("dense", "sparse"), dict[int, dict[str, float]]()
    for run in report["runs"]:
        if run["engine"] in engines and run["kv_memory_bytes"] is None:
            found.setdefault(run["concurrency"], {})[run["engine"]] = run["whole"]["output_tokens_per_s"]
    complete = {c: case for c, case in found.items() if len(case) == len(engines)}
    rows = [(str(c), *(f"{complete[c][engine]:,.0f}" for engine in engines)) for c in sorted(complete)]
    return _markdown(("c", *(f"{engine}, tokens/s" for engine in engines)), rows)


def parallel_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: prefill and decode of `evals/parallel_speed.py` side by side, with what more GPUs made of it.

    Args:
        reports: one or more for each number of GPUs; the first has the figures of the fewest.
    """
    found: dict[tuple[str, str, int], dict[int, Mapping[str, Any]]] = {}
    for report in reports:
        for run in report["runs"]:
            if "decode_tokens_per_s" in run:
                found.setdefault((run["shape"], run["kind"], run["concurrency"]), {})[report["tp"]] = run
    sizes = sorted({report["tp"] for report in reports})
    heads = ["model", "cache", "c"]
    heads += [f"{what}, {size} GPU{'s' * (size > 1)}" for what in ("prefill", "decode") for size in sizes]
    rows = [
        (
            shape.removesuffix("-shape"),
            kind,
            str(concurrency),
            *(_sped(cases, size, "prefill_tokens_per_s") for size in sizes),
            *(_sped(cases, size, "decode_tokens_per_s") for size in sizes),
            *(
                f"{(cases[size]['collectives'] or {}).get('share', 0):.0%}" if size in cases else "-"
                for size in sizes[1:]
            ),
        )
        for (shape, kind, concurrency), cases in sorted(found.items(), key=lambda case: (case[0][0][::-1], case[0]))
    ]
    heads += [f"collectives, {size} GPUs" for size in sizes[1:]]
    first = reports[0]
    made = f"{first['device']['name']}, {first['date'][:10]}, commit {first['commit']}"
    commands = "\n".join(str(report["command"]) for report in reports)
    return f"{_markdown(heads, rows)}\n{made}, torch {first['versions']['torch']}.\n\n```\n{commands}\n```\n"


def _sped(cases: Mapping[int, Mapping[str, Any]], size: int, figure: str) -> str:
    """A rate, and what it is of the smallest number of GPUs that has one."""
    if size not in cases:
        return "-"
    rate, least = cases[size][figure], min(cases)
    return f"{rate:,.0f}" + (f" ({rate / cases[least][figure]:.2f}x)" if size > least else "")


def shapes_table(report: Mapping[str, Any]) -> str:
    """Markdown: the rows of `python -m evals.budget_shapes --json`, one for each profile, ratio and layout."""
    is_accuracy = any("accuracy" in row for row in report["rows"])
    figure, difference = ("accuracy", "difference_to_uniform")
    if not is_accuracy:
        figure, difference = ("perplexity", "nll_difference_to_uniform")
    heads = ("protocol", "profile", "compression", "layout", figure, difference.replace("_", " "), "n")
    rows = [
        (
            row["mode"] + (f", up to {row['budget_tokens']:,} tokens" if "budget_tokens" in row else ""),
            _profile(report, row),
            f"{row['compression']}x" if "compression" in row else "-",
            row["layout"],
            _interval(row[figure], ""),
            _interval(row.get(difference), "+"),
            str(row["num_samples"]),
        )
        for row in report["rows"]
    ]
    note = f"\n\n{report['note']}" if report.get("note") else ""
    return f"{_markdown(heads, rows)}\n```\n{report['command']}\n```{note}\n"


def modes_table(report: Mapping[str, Any]) -> str:
    """Markdown: the rows of `python -m evals.decode_modes --json`, one for each measure and configuration."""
    heads = ("measured", "configuration", "cache, bytes", "figure", "difference from dense", "n")
    rows = [
        (
            f"{row['measure']}, {'accuracy' if 'accuracy' in row else 'perplexity'}",
            row["config"],
            f"{row['cache_bytes']:,}",
            _interval(row["accuracy"] if "accuracy" in row else row["perplexity"], ""),
            _interval(row["difference"] if "difference" in row else row["nll_difference"], "+"),
            str(row["num_samples"]),
        )
        for row in report["rows"]
    ]
    return (
        f"{_markdown(heads, rows)}\nOf perplexity the difference is in nats a token.\n\n```\n{report['command']}\n```\n"
    )


def _profile(report: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    if "profile" not in row:
        return "-"
    scorer = report["profiles"][row["profile"]]["config"]["scorer"]
    return f"{row['profile']} ({scorer if isinstance(scorer, str) else scorer['name']})"


def _pair(found: Mapping[str, float | None] | None, factor: float, digits: int) -> str:
    if not found or found["p50"] is None or found["p99"] is None:
        return "-"
    return f"{found['p50'] * factor:,.{digits}f} / {found['p99'] * factor:,.{digits}f}"


def _interval(found: Mapping[str, float] | None, sign: str) -> str:
    if found is None:
        return "-"
    return f"{found['value']:{sign}.3f} [{found['low']:{sign}.3f}, {found['high']:{sign}.3f}]"


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


_TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "serving": serving_table,
    "equal": equal_table,
    "shapes": shapes_table,
    "modes": modes_table,
}
