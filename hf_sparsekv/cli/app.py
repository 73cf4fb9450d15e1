"""`hf-sparsekv`: the entry point, and how errors reach the terminal."""

import sys

import typer
from rich.console import Console

from hf_sparsekv.cli.demo import demo
from hf_sparsekv.cli.doctor import doctor
from hf_sparsekv.cli.fetch import fetch
from hf_sparsekv.cli.generate import generate
from hf_sparsekv.cli.plan import plan
from hf_sparsekv.errors import SparseKVError

USAGE_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="hf-sparsekv",
    help="Hugging Face models generating with a small, layer-wise sparse KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, demo, fetch, plan, doctor):
    app.command()(command)


def main() -> None:
    """Run the command line; a user's mistake ends in one line on stderr and exit code 2."""
    console = Console(stderr=True)
    try:
        app()
    except SparseKVError as error:
        console.print(f"[bold red]error:[/] {' '.join(str(error).split())}", highlight=False, soft_wrap=True)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        console.print("interrupted")
        sys.exit(INTERRUPTED)
