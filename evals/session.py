"""One evaluation as a command line asks for it: suites chosen by name, everything checked, then measured.

Names of the offline suite go there, all others to lm-eval.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from evals import offline_suite
from evals.comparison import ALL, PUBLISHED, Method, at_ratios, methods_of, published_configs
from evals.offline_suite import Grid, OfflineSuite
from evals.run_tasks import parse_config
from evals.tasks.catalog import HUB_TASKS, TASKS
from evals.tasks.summary import DENSE
from hf_sparsekv.cli.eval_options import LM_EVAL, OFFLINE, SUITES
from hf_sparsekv.cli.loading import ModelSource, check_backend, open_model
from hf_sparsekv.cli.options import read_text
from hf_sparsekv.cli.replica import load_replica
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError, InputError, shown
from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.hf.sharding import check_tp_size
from hf_sparsekv.ops.prefill_choice import using
from hf_sparsekv.parallel.place import Place
from hf_sparsekv.plan import LayerPlan

FORMAT = 1
"""Of the report."""
UNNAMED = "sparse"
"""What the configuration of the method options is called."""


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """What was asked for."""

    tasks: tuple[str, ...]
    suite: str | None
    configs: tuple[str, ...]
    """`name:option=value,...` or JSON files."""
    methods: tuple[str, ...]
    ratios: tuple[float, ...]
    options: Mapping[str, Any]
    """Of SparseKVConfig, as given one by one."""
    lengths: tuple[int, ...] | None
    seeds: tuple[int, ...] | None
    modes: tuple[str, ...]
    half: str | None
    limit: int | None
    essay: str
    num_fewshot: int | None
    batch_size: int
    include_path: Path | None
    out: Path
    backend: str | None = None
    """What reads prompts into sparse caches; see `hf_sparsekv.SparseKVCache`."""

    def by_suite(self) -> dict[str, list[str]]:
        """The tasks' names by suite.

        Raises:
            ConfigError: an unknown suite.
        """
        if self.suite not in (None, *SUITES):
            raise ConfigError(f"--suite is {' or '.join(SUITES)}: got {shown(self.suite)}")
        found: dict[str, list[str]] = {}
        for name in dict.fromkeys(n for given in self.tasks for n in (TASKS if given == ALL else (given,))):
            found.setdefault(self.suite or (OFFLINE if is_offline(name) else LM_EVAL), []).append(name)
        return found


@dataclass(frozen=True)
class Prepared:
    """An evaluation of which everything but the weights is there."""

    request: EvalRequest
    model_name: str
    source: ModelSource
    methods: list[Method]
    suites: dict[str, Any]

    def run(
        self, *, dtype: str, device: str, place: Place, replicas_per_gpu: int, console: Console
    ) -> dict[str, Any] | None:
        """Measure what the lines do not hold yet, or a share of that in one of several processes.

        Returns:
            JSON-able: `kind`, `format`, `date`, `suites` (what made the figures, by suite) and `rows`; None in a
            process that does not lead.
        Raises:
            ConfigError: a backend that cannot read prompts here.
        """
        backend = self.request.backend
        check_backend(backend, self.source.config, dtype=dtype, device=device, is_whole=False)
        model = load_replica(
            place, self.source, dtype=dtype, device=device, replicas_per_gpu=replicas_per_gpu, console=console
        )
        suites, rows = {}, []
        for name, suite in self.suites.items():
            lines = lines_of(self.request.out, name)
            with using(backend):
                found = suite.run(model, self.methods, lines, model_name=self.model_name, place=place)
            if found is None:
                return None
            rows += found.pop("rows")
            suites[name] = found
        return {"kind": "eval", "format": FORMAT, "date": date.today().isoformat(), "suites": suites, "rows": rows}


def is_offline(name: str) -> bool:
    """Whether a task belongs to the offline suite; some have an argument behind a colon."""
    return name in TASKS or name.partition(":")[0] in HUB_TASKS


def lines_of(out: Path, suite: str) -> Path:
    """The file of a suite's lines: they are begun by different facts."""
    return out if suite == OFFLINE else out.with_name(f"{out.stem}.lm_eval{out.suffix}")


def prepare(request: EvalRequest, model: str, *, trust_remote_code: bool, place: Place, console: Console) -> Prepared:
    """Check everything that can be checked before the weights are loaded.

    Raises:
        InputError: an unknown task, a model or a text that cannot be had, samples too long for the model, lm-eval
            missing.
        ConfigError: options that are wrong or contradict each other, tasks of lm-eval in several processes, or more
            ranks of a replica than the model's KV heads allow.
    """
    names = request.by_suite()
    methods = _methods(request)
    if LM_EVAL in names:
        if place.world_size > 1:
            raise ConfigError(
                f"tasks of lm-eval run in one process, not in {place.world_size} ({', '.join(names[LM_EVAL])}): start "
                "it without torchrun and --tp, or start several with tasks, an --out and a GPU (CUDA_VISIBLE_DEVICES) "
                "of their own"
            )
        _require_lm_eval(names[LM_EVAL])
    if OFFLINE not in names and (request.lengths or request.seeds):
        raise ConfigError("--lengths and --seeds are for offline tasks: none is asked for")
    if LM_EVAL not in names and (request.num_fewshot is not None or request.include_path or request.batch_size != 1):
        raise ConfigError("--num-fewshot, --batch-size and --include-path are for tasks of lm-eval: none is asked for")
    source = open_model(model, trust_remote_code=trust_remote_code, console=console)
    shape = model_shape(source.config)
    check_tp_size(source.config, place.tp_size)
    if PUBLISHED in request.methods:
        methods += published_configs(shape.num_layers)
    for method in methods:
        LayerPlan.build(SparseKVConfig.from_dict(method.options), shape)
    suites: dict[str, Any] = {}
    if OFFLINE in names:
        grid = Grid(
            lengths=request.lengths,
            seeds=request.seeds,
            modes=request.modes,
            half=request.half,
            limit=request.limit,
            essay=request.essay,
        )
        suites[OFFLINE] = OfflineSuite.prepare(names[OFFLINE], source, grid, console)
    if LM_EVAL in names:
        from evals.lm_suite import LmOptions, LmSuite

        options = LmOptions(limit=request.limit, num_fewshot=request.num_fewshot, batch_size=request.batch_size)
        suites[LM_EVAL] = LmSuite.prepare(names[LM_EVAL], options, source.tokenizer, request.include_path)
    return Prepared(request, model, source, methods, suites)


def _methods(request: EvalRequest) -> list[Method]:
    """Every configuration that is asked for, options checked; those of `PUBLISHED` need the model and come later."""
    made = []
    named = [name for name in request.methods if name != PUBLISHED]
    for option in ("scorer", "preset") if named else ():
        if option in request.options:
            raise ConfigError(f"--method names the scorers: leave out --{option}, or give --config name:{option}=...")
    made += methods_of(named, request.ratios, request.options)
    files = [text for text in request.configs if ":" not in text]
    for text in request.configs:
        if text in files:
            options = SparseKVConfig.from_json(read_text(Path(text))).to_dict() | dict(request.options)
            made += at_ratios(Path(text).stem, options, ())
        else:
            name, config = parse_config(text)
            made.append(Method(name=name, options=config.to_dict()))
    if request.ratios and files and not named:
        raise ConfigError("--compression has no effect with configurations from files: give --method, or their options")
    if not (named or files) and (request.options or request.ratios or not (request.methods or request.configs)):
        if request.ratios:
            methods_of([], request.ratios, request.options)  # their checks
        made += at_ratios(UNNAMED, request.options, request.ratios)
    counts = [method.name for method in made]
    for name in counts:
        if counts.count(name) > 1 or name == DENSE or "|" in name:
            raise ConfigError(f"each configuration needs a name of its own, without | and not {DENSE!r}: got {name!r}")
    return made


def _require_lm_eval(names: list[str]) -> None:
    """Refuse tasks of the harness where it is not installed."""
    if find_spec("lm_eval") is None:
        raise InputError(
            f"{shown(names[0])} is no offline task ({', '.join(TASKS)}), and lm-eval, which may have it, is not "
            'installed: pip install "hf-sparsekv[eval]"'
        )


assert offline_suite.NAME == OFFLINE
